"""What a user installs holds everything: editable, wheel, sdist, and the processes they start.

The four folders stand at the repository's root and reach the package through links; each way of
installing treats links in its own way, so each is tried.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("radix", "runtime", "kernels", "frontend")
SHIPPED_SUFFIXES = {".py", ".typed", ".cpp", ".h", ".html"}
BUILD = "from setuptools import build_meta; build_meta.build_{}({!r})"


def _run(*command: str, cwd: Path, **env: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    clean["STATEWISE_NATIVE"] = "0"  # compiling is the kernels' own test
    done = subprocess.run(
        command, cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def _tracked() -> list[str]:
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout: what belongs to the package cannot be listed")
    names = [n.decode() for n in done.stdout.split(b"\0") if n]
    return [n for n in names if (REPOSITORY / n).exists() or (REPOSITORY / n).is_symlink()]


def _shipped(names: list[str]) -> set[str]:
    """Path in the package of every source file: statewise/radix/schema.py and so on."""
    wanted = set()
    for name in names:
        if Path(name).suffix in SHIPPED_SUFFIXES:
            if name.split("/")[0] in FOLDERS:
                wanted.add(f"statewise/{name}")
            elif name.startswith("src/"):
                wanted.add(name.removeprefix("src/"))
    return wanted


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the checkout's own files to a place where building leaves no trace in it."""
    copy = tmp_path_factory.mktemp("packaging") / "tree"
    for name in _tracked():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, target, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    target = tree.parent / "wheel"
    target.mkdir()
    _run(sys.executable, "-P", "-c", BUILD.format("wheel", str(target)), cwd=tree)
    [built] = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def sdist(tree: Path) -> Path:
    target = tree.parent / "sdist"
    target.mkdir()
    _run(sys.executable, "-P", "-c", BUILD.format("sdist", str(target)), cwd=tree)
    [built] = target.glob("*.tar.gz")
    return built


def test_wheel_holds_every_source_file(wheel: Path, tree: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    assert _shipped(_tracked()) - inside == set()
    assert "statewise/py.typed" in inside
    assert not [n for n in inside if n.startswith(tuple(f"{f}/" for f in (*FOLDERS, "tests")))]


@pytest.mark.slow
def test_a_wheel_built_from_the_sdist_holds_the_same_sources(
    sdist: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        assert not [m.name for m in archive.getmembers() if m.issym()]
        archive.extractall(tmp_path, filter="data")
    [unpacked] = tmp_path.iterdir()
    target = tmp_path / "out"
    target.mkdir()
    _run(sys.executable, "-P", "-c", BUILD.format("wheel", str(target)), cwd=unpacked)
    [again] = target.glob("*.whl")
    with zipfile.ZipFile(again) as a, zipfile.ZipFile(wheel) as b:
        sources = [n for n in b.namelist() if Path(n).suffix in SHIPPED_SUFFIXES]
        assert sources
        assert {n: a.read(n) for n in sources} == {n: b.read(n) for n in sources}


@pytest.mark.slow
def test_an_installed_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
    offline = ("--no-index", "--target", str(target), str(wheel))
    _run(sys.executable, "-P", *pip, *offline, cwd=tmp_path)
    code = "import statewise, statewise.radix as r; print(statewise.__file__, r.__file__)"
    printed = _run(sys.executable, "-P", "-c", code, cwd=tmp_path, PYTHONPATH=str(target))
    assert [p.startswith(str(target)) for p in printed.split()] == [True, True]
    version = _run(
        sys.executable, "-P", "-m", "statewise", "--version", cwd=tmp_path, PYTHONPATH=str(target)
    )
    assert version.split()[-1] == _declared_version()


@pytest.mark.parametrize("cwd", [REPOSITORY, REPOSITORY / "src", Path("/")], ids=str)
def test_the_editable_install_is_found_from_anywhere(cwd: Path) -> None:
    code = "import statewise.runtime.errors as e; print(e.__file__)"
    printed = Path(_run(sys.executable, "-P", "-c", code, cwd=cwd))
    assert printed.resolve() == REPOSITORY / "runtime" / "errors.py"


def test_one_file_is_one_module() -> None:
    """A link must not let the same file load twice under two names."""
    spec = importlib.util.find_spec("statewise.radix.schema")
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == REPOSITORY / "radix" / "schema.py"
    code = "import radix"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=False)
    assert b"ModuleNotFoundError" in done.stderr


def test_a_process_started_by_a_process_finds_the_package() -> None:
    inner = "import statewise.radix.schema as s; print(s.__name__)"
    outer = (
        "import subprocess, sys;"
        f"print(subprocess.run([sys.executable, '-P', '-c', {inner!r}],"
        " capture_output=True, text=True, check=True).stdout.strip())"
    )
    printed = _run(sys.executable, "-P", "-c", outer, cwd=REPOSITORY)
    assert printed == "statewise.radix.schema"


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, statewise; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = set(ast.literal_eval(_run(sys.executable, "-P", "-c", code, cwd=REPOSITORY)))
    assert loaded & {"torch", "numpy", "transformers", "zmq", "starlette", "uvicorn"} == set()


def test_the_console_script_is_the_module(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("statewise")
    by_script = _run(str(script), "--version", cwd=tmp_path)
    by_module = _run(sys.executable, "-P", "-m", "statewise", "--version", cwd=REPOSITORY)
    assert by_script == by_module
    assert by_script.split()[-1] == _declared_version()


def _declared_version() -> str:
    text = (REPOSITORY / "src" / "statewise" / "__init__.py").read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__":
            return str(ast.literal_eval(node.value))
    pytest.fail("src/statewise/__init__.py declares no __version__")
