"""Check what formatter, linter and type checker do not: layers, sizes, clocks, words, links.

The rules are tables at the top; each check is a function from a parsed file to problems, so that
a test can plant one violation of each. Imports are read from the syntax tree, never executed. An
import inside a function is lazy: it may reach an optional package, but not another layer.

It does not judge names or prose, and it does not follow imports into other packages.

    usage: python tools/tidy.py [ROOT]          exit status 1 and one line per problem
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70
MAX_COLUMNS = 100

FOLDERS = ("radix", "kernels", "runtime", "frontend")
PACKAGE = "statewise"
CODE_SUFFIXES = {".py", ".cpp", ".cc", ".c", ".h", ".hpp", ".cu", ".cuh"}
TEXT_SUFFIXES = CODE_SUFFIXES | {".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".sh", ""}

# Modules of the runtime that decide and never compute: no torch, no clock, no randomness.
CONTROL_PLANE = (
    "statewise.radix",
    "statewise.runtime.cache",
    "statewise.runtime.scheduler",
    "statewise.runtime.engine.core",
    "statewise.runtime.messages",
    "statewise.runtime.memory.block_pool",
    "statewise.runtime.sampling_params",
    "statewise.runtime.errors",
    "statewise.runtime.config",
)
CLOCK_MODULE = "statewise.runtime.clock"

# Roots that a module may import from the project: first matching prefix decides.
LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("statewise.radix", ("statewise.radix",)),
    ("statewise.kernels", ("statewise.kernels",)),
    ("statewise.runtime", ("statewise.runtime", "statewise.kernels", "statewise.radix")),
    ("statewise.frontend", ("statewise.frontend",)),
)
# What a layer may reach lazily, inside a function, beside the above.
LAZY_LAYERS: dict[str, tuple[str, ...]] = {"statewise.frontend": ("statewise.runtime",)}

RADIX_PACKAGES = {"numpy"}
RADIX_BANNED_STDLIB = {
    "asyncio", "concurrent", "ctypes", "io", "mmap", "os", "pathlib", "shutil", "socket",
    "subprocess", "tempfile", "threading",
}  # fmt: skip
TIME_AND_CHANCE = {"time", "datetime", "random", "secrets", "uuid"}
NEVER = {
    "pickle": "state crosses processes as typed messages",
    "cPickle": "state crosses processes as typed messages",
    "dill": "state crosses processes as typed messages",
    "cloudpickle": "state crosses processes as typed messages",
    "shelve": "it pickles",
    "marshal": "it is unsafe on foreign bytes",
    "multiprocessing": "it pickles; processes are started as subprocesses",
    "transformers": "run time reads models itself; it is an oracle for tests",
}
LAZY_ONLY = {
    "flashinfer", "sgl_kernel", "tvm_ffi", "triton", "llguidance", "xgrammar",
    "cryptography", "lz4", "obstore", "zstandard",
}  # fmt: skip
NO_TORCH_FOLDERS = ("statewise.frontend", "statewise.runtime.server", "statewise.runtime.tokenizer")

FORBIDDEN_WORDS = (
    (re.compile(r"\b(TODO|FIXME|XXX)\b"), "unfinished work belongs in the issue tracker"),
    (re.compile(r"\bNotImplementedError\b"), "no stubs"),
    (re.compile(r"(?<![\w.])/work/"), "a path of one machine"),
    (re.compile(r"\b(workplace|the issue (text|says))\b", re.IGNORECASE), "speak of the project"),
    (re.compile(r"\b(Claude|ChatGPT|Copilot|AI[- ]generated)\b"), "speak of the project"),
    (re.compile(r"^(<{7}|>{7}) ", re.MULTILINE), "a merge conflict"),
)
FORBIDDEN_CLASS_NAME = re.compile(r"(Manager|Helper|Helpers|Util|Utils)$")
# These files spell the forbidden words because they check for them.
WORD_CHECKERS = {"tools/tidy.py", "tests/unit/test_tidy.py"}


@dataclass(frozen=True)
class Problem:
    """One violation: where, which rule, and what to do."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


@dataclass(frozen=True)
class Import:
    """One imported module name, and whether it happens when the module loads."""

    name: str
    line: int
    lazy: bool
    level: int = 0


@dataclass(frozen=True)
class Source:
    """A text file of the project; `tree` where it is Python."""

    path: str  # relative to the root, POSIX
    text: str
    tree: ast.Module | None
    imports: tuple[Import, ...] = ()

    @property
    def module(self) -> str:
        """Dotted import name, or "" for what is not part of the package."""
        parts = PurePosixPath(self.path).with_suffix("").parts
        if parts[:2] == ("src", PACKAGE):
            parts = parts[1:]
        elif parts[0] in FOLDERS:
            parts = (PACKAGE, *parts)
        else:
            return ""
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def under(module: str, prefixes: tuple[str, ...]) -> bool:
    """Whether `module` is one of `prefixes` or lies below one."""
    return any(module == p or module.startswith(p + ".") for p in prefixes)


# --- reading ------------------------------------------------------------------------------------


def _is_type_checking(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def _walk_imports(node: ast.AST, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, lazy)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            yield Import(base, child.lineno, lazy, child.level)
            for alias in child.names:  # `from statewise import radix` names a module, too
                if base.split(".")[0] == PACKAGE:
                    yield Import(f"{base}.{alias.name}", child.lineno, lazy, child.level)
        elif _is_type_checking(child):
            continue  # types only: nothing is loaded
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk_imports(child, lazy or is_function)


def parse(path: str, text: str) -> Source:
    """Read one file; a syntax error is left to the linter."""
    if not path.endswith(".py"):
        return Source(path, text, None)
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return Source(path, text, None)
    return Source(path, text, tree, tuple(_walk_imports(tree, lazy=False)))


def tracked_files(root: Path) -> list[str]:
    """Files git knows or would add; every file below `root` where it is no repository."""
    command = ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode == 0:
        names = [n.decode() for n in done.stdout.split(b"\0") if n]
    else:
        names = [p.relative_to(root).as_posix() for p in root.rglob("*")]
    return sorted(n for n in names if (root / n).is_file() and not _through_link(root, n))


def _through_link(root: Path, name: str) -> bool:
    return any((root / p).is_symlink() for p in (name, *map(str, PurePosixPath(name).parents)))


def read_sources(root: Path) -> list[Source]:
    """Every text file of the project, parsed."""
    sources = []
    for name in tracked_files(root):
        if PurePosixPath(name).suffix not in TEXT_SUFFIXES:
            continue
        try:
            sources.append(parse(name, (root / name).read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return sources


_PRAGMA = re.compile(r"\s*#\s*(type: ignore|noqa|fmt: skip).*$")

# --- checks of one file -------------------------------------------------------------------------


def check_sizes(source: Source) -> Iterator[Problem]:
    """Files, functions and lines stay small enough to read."""
    if PurePosixPath(source.path).suffix not in CODE_SUFFIXES:
        return
    lines = source.text.splitlines()
    if len(lines) > MAX_FILE_LINES:
        message = f"{len(lines)} lines, at most {MAX_FILE_LINES}: split it"
        yield Problem(source.path, len(lines), "file-length", message)
    for number, line in enumerate(lines, 1):
        line = _PRAGMA.sub("", line)  # as the formatter measures
        if len(line) > MAX_COLUMNS:
            message = f"{len(line)} columns, at most {MAX_COLUMNS}"
            yield Problem(source.path, number, "columns", message)
    for node in ast.walk(source.tree) if source.tree else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                message = f"{node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
                yield Problem(source.path, node.lineno, "function-length", message)


def check_imports(source: Source) -> Iterator[Problem]:
    """No relative or bare imports, nothing that pickles, optional packages lazily."""
    for found in source.imports:
        root = found.name.split(".")[0]
        if found.level:
            yield Problem(source.path, found.line, "relative-import", "import statewise.<...>")
        elif root in FOLDERS:
            message = f"import {PACKAGE}.{found.name}; the bare name may be another project"
            yield Problem(source.path, found.line, "bare-import", message)
        if not source.module:
            continue
        if root in NEVER:
            yield Problem(source.path, found.line, "never", f"{root}: {NEVER[root]}")
        if root in LAZY_ONLY and not found.lazy:
            message = f"{root} is optional: import it inside a function"
            yield Problem(source.path, found.line, "lazy", message)
        if root == "torch" and under(source.module, NO_TORCH_FOLDERS + CONTROL_PLANE):
            yield Problem(source.path, found.line, "torch", f"{source.module} must not use torch")


def check_layers(source: Source) -> Iterator[Problem]:
    """Who may import whom."""
    for layer, allowed in LAYERS:
        if not under(source.module, (layer,)):
            continue
        for found in source.imports:
            lazily = LAZY_LAYERS.get(layer, ()) if found.lazy else ()
            is_ours = found.name.startswith(PACKAGE + ".")
            if is_ours and not under(found.name, allowed + lazily + (f"{PACKAGE}.__version__",)):
                message = f"{layer} must not import {found.name}"
                yield Problem(source.path, found.line, "layer", message)


def check_radix(source: Source) -> Iterator[Problem]:
    """radix/ is pure: standard library and numpy, no I/O, no threads, no clock."""
    if not under(source.module, ("statewise.radix",)):
        return
    for found in source.imports:
        root = found.name.split(".")[0]
        foreign = root not in sys.stdlib_module_names | RADIX_PACKAGES | {PACKAGE, ""}
        if foreign or root in RADIX_BANNED_STDLIB:
            message = f"radix may not import {root}"
            yield Problem(source.path, found.line, "radix-pure", message)
    for node in ast.walk(source.tree) if source.tree else ():
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("open", "print"):
            yield Problem(source.path, node.lineno, "radix-pure", "radix does no I/O")


def check_clock(source: Source) -> Iterator[Problem]:
    """Control-plane code takes time and chance from the clock module, so that it can be run again.

    `np.random` counts as chance.
    """
    if source.module == CLOCK_MODULE or not under(source.module, CONTROL_PLANE):
        return
    for found in source.imports:
        if found.name.split(".")[0] in TIME_AND_CHANCE or found.name.startswith("numpy.random"):
            message = f"{found.name}: time and chance come from {CLOCK_MODULE}"
            yield Problem(source.path, found.line, "clock", message)
    for node in ast.walk(source.tree) if source.tree else ():
        owner = getattr(getattr(node, "value", None), "id", "")
        if isinstance(node, ast.Attribute) and node.attr == "random" and owner in ("np", "numpy"):
            yield Problem(source.path, node.lineno, "clock", "numpy.random in the control plane")


def check_words(source: Source) -> Iterator[Problem]:
    """No unfinished work, no machine's paths, no names that say nothing."""
    if source.path in WORD_CHECKERS:
        return
    for pattern, why in FORBIDDEN_WORDS:
        for match in pattern.finditer(source.text):
            line = source.text.count("\n", 0, match.start()) + 1
            yield Problem(source.path, line, "word", f"{match.group().strip()!r}: {why}")
    for node in ast.walk(source.tree) if source.tree else ():
        if isinstance(node, ast.ClassDef) and FORBIDDEN_CLASS_NAME.search(node.name):
            yield Problem(source.path, node.lineno, "word", f"class {node.name} says nothing")


def check_module(source: Source) -> Iterator[Problem]:
    """Say what a module is, postpone annotations: asked of every module of the package."""
    if not source.module or source.tree is None:
        return
    if not ast.get_docstring(source.tree):
        yield Problem(source.path, 1, "docstring", "a module says what it does and does not do")
    has_code = any(not isinstance(n, ast.Expr | ast.Import | ast.ImportFrom | ast.Assign)
                   for n in source.tree.body)  # fmt: skip
    if has_code and not any(i.name == "__future__" for i in source.imports):
        message = "from __future__ import annotations"
        yield Problem(source.path, 1, "future", message)


# --- checks of all files ------------------------------------------------------------------------


def check_torch_free(sources: list[Source]) -> Iterator[Problem]:
    """No chain of imports at load time leads from a torch-free module to torch."""
    modules = {s.module: s for s in sources if s.module}
    for source in modules.values():
        if under(source.module, CONTROL_PLANE + NO_TORCH_FOLDERS):
            chain = _chain_to_torch(source.module, modules)
            if len(chain) > 2:  # a direct import is reported by check_imports
                yield Problem(source.path, 1, "torch", "loads torch: " + " -> ".join(chain))


def _chain_to_torch(start: str, modules: dict[str, Source]) -> list[str]:
    pending = [[start]]
    seen = {start}
    while pending:
        path = pending.pop(0)
        for name in _loaded_by(modules[path[-1]], modules):
            if name == "torch":
                return [*path, name]
            if name not in seen:
                seen.add(name)
                pending.append([*path, name])
    return []


def _loaded_by(source: Source, modules: dict[str, Source]) -> Iterator[str]:
    """Modules of the project, and torch, that load when `source` does; packages included."""
    for found in source.imports:
        if found.lazy:
            continue
        if found.name.split(".")[0] == "torch":
            yield "torch"
        parts = found.name.split(".")
        for n in range(1, len(parts) + 1):
            if ".".join(parts[:n]) in modules:
                yield ".".join(parts[:n])


_LINK = re.compile(r"(?<!\!)\[[^\]\n]*\]\(([^)\s]+)\)|!\[[^\]\n]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def anchors_of(text: str) -> set[str]:
    """Heading anchors as rendered on the usual hosts: lower case, spaces to hyphens."""
    found: set[str] = set()
    for title in re.findall(r"^#{1,6}\s+(.*?)\s*#*$", _blank_fences(text), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", title.replace("`", "").lower())
        found.add(plain.replace(" ", "-"))
    return found


def _blank_fences(text: str) -> str:
    return _FENCE.sub(lambda m: "\n" * m.group().count("\n"), text)


def check_links(sources: list[Source], root: Path) -> Iterator[Problem]:
    """Relative links in Markdown, and documents that code names, lead to what exists."""
    for source in sources:
        if not source.path.endswith(".md"):
            yield from _check_named_documents(source, root)
            continue
        text = _blank_fences(source.text)
        for match in _LINK.finditer(text):
            target = match.group(1) or match.group(2)
            line = text.count("\n", 0, match.start()) + 1
            why = _broken(target, source, root)
            if why:
                yield Problem(source.path, line, "link", f"{target}: {why}")


def _check_named_documents(source: Source, root: Path) -> Iterator[Problem]:
    if source.path in WORD_CHECKERS:
        return
    for match in re.finditer(r"(?<![\w/.])docs/[\w/.-]+\.md", source.text):
        if not (root / match.group()).exists():
            line = source.text.count("\n", 0, match.start()) + 1
            yield Problem(source.path, line, "link", f"{match.group()}: no such file")


def _broken(target: str, source: Source, root: Path) -> str:
    if re.match(r"[a-z]+:", target):
        return ""
    name, _, anchor = target.partition("#")
    path = (root / source.path).parent / name if name else root / source.path
    if not path.exists():
        return "no such file"
    if not anchor or path.suffix != ".md":
        return ""
    found = anchors_of(path.read_text(encoding="utf-8"))
    return "" if anchor in found else "no such heading"


FILE_CHECKS: tuple[Callable[[Source], Iterator[Problem]], ...] = (
    check_sizes,
    check_imports,
    check_layers,
    check_radix,
    check_clock,
    check_words,
    check_module,
)


def check_all(root: Path) -> list[Problem]:
    """Every problem below `root`, ordered by place."""
    sources = read_sources(root)
    problems = [p for source in sources for check in FILE_CHECKS for p in check(source)]
    problems += check_torch_free(sources)
    problems += check_links(sources, root)
    return sorted(set(problems), key=lambda p: (p.path, p.line, p.rule, p.message))


def main(argv: list[str]) -> int:
    """Print problems; 1 if there are any."""
    root = Path(argv[1]) if len(argv) > 1 else Path(__file__).resolve().parent.parent
    problems = check_all(root)
    for problem in problems:
        print(problem)
    if problems:
        print(f"{len(problems)} problem(s)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
