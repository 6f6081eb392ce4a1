"""The command `statewise`.

    statewise serve --model-path ...     start a server
    statewise make-tiny-model ARCH DIR   write a tiny random checkpoint, to try things with
    statewise rpc-keys DIR NAME ...      make CURVE keys for an RPC endpoint and its clients
    statewise cache ls|verify|gc|export|import DIR ...  look after a disk cache
    statewise cache dump URL             show what a running server has cached
    statewise version

Each command imports what it needs when it runs, so that `statewise version` costs milliseconds.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from statewise import __version__

TINY_SIZES = {
    "layers": "number of layers",
    "hidden": "numbers in a token's hidden state",
    "intermediate": "numbers inside an MLP",
    "heads": "query heads",
    "kv_heads": "heads of keys and values, where the architecture has them",
    "head_dim": "numbers in a head",
    "window": "sliding window in tokens, where the architecture has one",
    "context": "longest context in tokens",
}


def serve(argv: Sequence[str]) -> int:
    """Start a server; its arguments are those of `statewise serve --help`."""
    from statewise.runtime.server.launch import main as launch

    return launch(argv, prog="statewise serve")


def make_tiny_model(argv: Sequence[str]) -> int:
    """Write a tiny random checkpoint."""
    from statewise.runtime.models.tiny import RECIPES, TinySize
    from statewise.runtime.models.tiny import make_tiny_model as make

    parser = argparse.ArgumentParser(
        prog="statewise make-tiny-model", description="Write a tiny random checkpoint."
    )
    parser.add_argument("arch", choices=sorted(RECIPES), help="architecture")
    parser.add_argument("directory", type=Path, help="where to write it")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    for option, meaning in TINY_SIZES.items():
        default = getattr(TinySize(), option)
        flag = f"--{option.replace('_', '-')}"
        parser.add_argument(
            flag, type=_positive, default=default, help=f"{meaning} (default: {default})"
        )
    args = parser.parse_args(list(argv))
    size = TinySize(**{option: getattr(args, option) for option in TINY_SIZES})
    print(make(args.arch, args.directory, size=size, seed=args.seed))
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def rpc_keys(argv: Sequence[str]) -> int:
    """Make CURVE key pairs: NAME.key to give away, NAME.key_secret to keep."""
    import zmq.auth

    parser = argparse.ArgumentParser(
        prog="statewise rpc-keys",
        description="Make CURVE key pairs for an RPC endpoint and its clients (docs/rpc.md).",
    )
    parser.add_argument("directory", type=Path, help="where to write them")
    parser.add_argument("names", nargs="+", help="one pair for each name")
    args = parser.parse_args(list(argv))
    args.directory.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        public, secret = zmq.auth.create_certificates(args.directory, name)
        Path(secret).chmod(0o600)
        print(public, secret, sep="\n")
    return 0


def cache(argv: Sequence[str]) -> int:
    """Show a server's cache; list, verify, clean, export or import a disk cache."""
    if argv and argv[0] == "dump":
        from statewise.frontend.cache_dump import main as dump

        return dump(argv[1:])
    from statewise.frontend.cache_command import main as run

    return run(argv)


def version(_argv: Sequence[str]) -> int:
    """Print the version."""
    print(f"statewise {__version__}")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": serve,
    "make-tiny-model": make_tiny_model,
    "rpc-keys": rpc_keys,
    "cache": cache,
    "version": version,
}


def usage() -> str:
    """Return the list of commands."""
    lines = [f"  {name:<16} {_summary(command)}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: statewise COMMAND ...", "", *lines, "", "statewise COMMAND --help says more."]
    )


def _summary(command: Callable[[Sequence[str]], int]) -> str:
    return (command.__doc__ or "").splitlines()[0]


def _run(name: str, words: Sequence[str]) -> int:
    """One command; a file that cannot be made or read is said in a line, except by a server."""
    if name == "serve":
        return serve(words)
    try:
        return COMMANDS[name](words)
    except OSError as error:
        print(f"statewise {name}: {error}", file=sys.stderr)
        return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    name, *rest = words
    name = "version" if name == "--version" else name
    if name in COMMANDS:
        return _run(name, rest)
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    print(f"statewise: unknown command {name!r}{hint}\n\n{usage()}", file=sys.stderr)
    return 2
