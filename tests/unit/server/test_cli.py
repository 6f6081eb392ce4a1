"""The command `statewise`: its commands, its mistakes, its cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from statewise import __version__
from statewise.frontend.cli import COMMANDS, main


def test_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"statewise {__version__}\n" * 2
    assert main(["help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    assert main([]) == 2


def test_a_mistyped_command_is_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["srve"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["make-tiny-model", "llama", "DIR"], ["rpc-keys", "DIR", "a"]])
def test_a_directory_that_cannot_be_made_is_said_in_a_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([str(tmp_path / "file") if word == "DIR" else word for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"statewise {words[0]}: ")
    assert error.count("\n") == 1


def test_serve_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve"])
    assert "--model-path is needed" in capsys.readouterr().err


def test_a_tiny_model_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make-tiny-model", "gemma3", str(tmp_path / "m"), "--seed", "3"]) == 0
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["model_type"] == "gemma3_text"
    assert str(tmp_path / "m") in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["make-tiny-model", "gpt5", str(tmp_path / "n")])


def test_a_tiny_models_sizes_are_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--layers", "8", "--hidden", "32", "--window", "24", "--context", "8192"]
    assert main(["make-tiny-model", "deepseek-v4", str(tmp_path / "m"), *words]) == 0
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    sizes = [config[k] for k in ("num_hidden_layers", "hidden_size", "sliding_window")]
    assert sizes == [8, 32, 24]
    assert config["max_position_embeddings"] == 8192
    with pytest.raises(SystemExit):
        main(["make-tiny-model", "llama", str(tmp_path / "n"), "--layers", "0"])
    assert "0 is not positive" in capsys.readouterr().err


@pytest.mark.slow
def test_the_server_process_loads_no_torch() -> None:
    """Only the scheduler may: the others would cost hundreds of megabytes each."""
    modules = ("launch", "tokenizer_process", "detokenizer_process", "rpc")
    code = "import sys\n" + "".join(f"import statewise.runtime.server.{m}\n" for m in modules)
    code += "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
