"""Compiled modules are used only where they were made from exactly these sources by this Python."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from statewise import compiled
from statewise.compiled import FOLDER, LIBRARY, MODULES, PACKAGE, digest, find, problem
from statewise.radix import tree

RADIX = Path(compiled.__file__).with_name("radix")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(f"NAME = {name!r}\n")
    return tmp_path


def pretend_compiled(sources: Path) -> None:
    (sources / FOLDER).mkdir()
    (sources / FOLDER / "digest").write_text(digest(sources))


def test_every_compiled_module_exists() -> None:
    assert all((RADIX / f"{name}.py").exists() for name in MODULES)


def test_compiled_modules_are_found_under_the_names_of_their_sources(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_compiled(sources)
    monkeypatch.delenv("STATEWISE_COMPILED", raising=False)
    finder = find(sources)
    assert finder is not None
    for name in (*(f"{PACKAGE}.{name}" for name in MODULES), LIBRARY):
        spec = finder.find_spec(name, None)
        assert spec is not None
        assert spec.origin is not None
        assert Path(spec.origin).parent == sources / FOLDER
    assert finder.find_spec(f"{PACKAGE}.planner", None) is None
    monkeypatch.setenv("STATEWISE_COMPILED", "0")
    assert find(sources) is None


def test_without_compiled_modules_the_sources_are_read(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STATEWISE_COMPILED", raising=False)
    assert find(sources) is None
    monkeypatch.setenv("STATEWISE_COMPILED", "1")
    with pytest.raises(ImportError, match="not compiled"):
        find(sources)


@pytest.mark.parametrize("name", MODULES)
def test_any_change_of_a_source_makes_what_was_compiled_unused(
    sources: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_compiled(sources)
    assert problem(sources) == ""
    (sources / f"{name}.py").write_text("NAME = 'another'\n")
    monkeypatch.delenv("STATEWISE_COMPILED", raising=False)
    assert find(sources) is None
    monkeypatch.setenv("STATEWISE_COMPILED", "1")
    with pytest.raises(ImportError, match="other sources"):
        find(sources)


def test_this_very_process_runs_what_it_was_told_to() -> None:
    expected = os.environ.get("STATEWISE_COMPILED") != "0" and not problem(RADIX)
    assert (Path(tree.__file__).parent.name == FOLDER) == expected
