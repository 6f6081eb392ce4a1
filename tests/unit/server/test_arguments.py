"""The command line is the settings struct: every field, its default, its choices, its errors."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from statewise.runtime.config import GROUPS, ServerArgs, checked, meta_of
from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.server.arguments import flag_of, from_environment, make_parser, parse

FIELDS = msgspec.structs.fields(ServerArgs)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in FIELDS:
        monkeypatch.delenv(f"STATEWISE_{field.name.upper()}", raising=False)


def test_defaults_come_from_the_struct() -> None:
    assert parse(["--model-path", "m"]) == ServerArgs(model_path="m")


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_setting_has_a_description_a_group_and_a_flag(
    field: msgspec.structs.FieldInfo,
) -> None:
    meta = meta_of(field)
    assert meta.description
    assert (meta.extra or {})["group"] in GROUPS
    assert flag_of(field.name) in make_parser("x").format_help()


def test_values_and_flags_are_read() -> None:
    args = parse(
        ["--model", "m", "--port=1234", "--disable-radix-cache", "--no-enable-metrics",
         "--watermark", "0.5"]
    )  # fmt: skip
    assert (args.port, args.disable_radix_cache, args.enable_metrics) == (1234, True, False)
    assert args.watermark == 0.5


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--model-path is needed"),
        (["--model-path", "m", "--prot", "1"], "did you mean --port?"),
        (["--model-path", "m", "--port", "x"], "invalid int value"),
        (["--model-path", "m", "--port", "70000"], "port"),
        (["--model-path", "m", "--dtype", "int3"], "'dtype' is 'int3'"),
        (["--model-path", "m", "--watermark", "2"], "watermark"),
        (["--model-path", "m", "--tp-size", "2"], "tp_size"),
        (["--model-path", "m", "stray"], "unexpected value 'stray'"),
        (["--model-path", "m", "--mod", "x"], "unknown argument --mod"),
    ],
)
def test_a_wrong_command_line_ends_with_a_reason(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_command_line_beats_environment_beats_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("model-path: from-file\nport: 1\nhost: h1\nlog_level: debug\n")
    monkeypatch.setenv("STATEWISE_HOST", "h2")
    monkeypatch.setenv("STATEWISE_LOG_LEVEL", "error")
    args = parse(["--config", str(config), "--log-level", "warning"])
    assert (args.model_path, args.port, args.host, args.log_level) == (
        "from-file", 1, "h2", "warning",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "unknown setting 'prot' (did you mean 'port'?)"),
        ("- a", "names and values"),
        ("port: [", "config file"),
        ("port: abc", "port"),
    ],
)
def test_a_wrong_config_file_ends_with_a_reason(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(text)
    with pytest.raises(SystemExit):
        parse(["--config", str(config), "--model-path", "m"])
    assert message in capsys.readouterr().err


def test_environment_values_are_typed() -> None:
    read = from_environment({"STATEWISE_AUDIT": "yes", "STATEWISE_PORT": "5", "OTHER": "x"})
    assert read == {"audit": True, "port": 5}
    with pytest.raises(InvalidRequestError, match="STATEWISE_PORT is 'x'"):
        from_environment({"STATEWISE_PORT": "x"})


def test_checked_names_the_setting() -> None:
    with pytest.raises(InvalidRequestError, match="page_size"):
        checked({"model_path": "m", "page_size": -1})
