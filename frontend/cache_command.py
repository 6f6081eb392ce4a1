"""`statewise cache`: look after a disk cache.

    statewise cache ls DIR                 what is there, by state group
    statewise cache verify DIR             read and check everything, drop what is damaged
    statewise cache gc DIR [--ttl-hours]   drop old pages, give unused room back
    statewise cache export DIR FILE        all pages into one file
    statewise cache import DIR FILE        the pages of such a file

`ls` works beside a running server; the others need the directory for themselves, and say which
process has it. `ls`, `verify` and `export` also read a directory that cannot be written. Exit
status 0: done; 1: damage was found; 2: it could not be done.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from statewise.frontend.progress import Progress


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A callback that draws a bar from its first call on."""
    bars: list[Progress] = []

    def show(done: int, total: int) -> None:
        if not bars:
            bars.append(Progress(total))
        bars[0].to(done)

    try:
        yield show
    finally:
        for bar in bars:
            bar.close()


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.1f} MiB"


def _ls(args: argparse.Namespace) -> int:
    from statewise.runtime.tiers.admin import list_pages

    groups = list_pages(args.directory)
    print(f"{'group':<16} {'pages':>9} {'size':>14} {'longest':>9}  oldest            last used")
    for name, one in sorted(groups.items()):
        print(
            f"{name:<16} {one.num_pages:>9,} {_mib(one.size_bytes):>14} {one.longest:>9,}  "
            f"{_when(one.oldest_s)}  {_when(one.newest_used_s)}"
        )
    total = sum(one.num_pages for one in groups.values())
    print(f"{total:,} pages, {_mib(sum(one.size_bytes for one in groups.values()))}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from statewise.runtime.clock import SystemClock
    from statewise.runtime.tiers.admin import verify

    with _bar() as progress:
        report = verify(args.directory, SystemClock(), progress)
    print(f"{report.num_whole:,} pages are whole, {_mib(report.size_bytes)}")
    for kind, count in sorted(report.damaged.items()):
        done = "dropped" if report.has_dropped else "kept: the directory cannot be written"
        print(f"{count:,} damaged ({kind}), {done}")
    return 1 if report.damaged else 0


def _gc(args: argparse.Namespace) -> int:
    from statewise.runtime.clock import SystemClock
    from statewise.runtime.tiers.admin import collect

    with _bar() as progress:
        given_back = collect(args.directory, SystemClock(), args.ttl_hours * 3600, progress)
    print(f"{_mib(given_back)} given back")
    return 0


def _export(args: argparse.Namespace) -> int:
    from statewise.runtime.clock import SystemClock
    from statewise.runtime.tiers.admin import export_pages

    with _bar() as progress:
        count = export_pages(args.directory, args.file, SystemClock(), progress)
    print(f"{count:,} pages in {args.file}, {_mib(args.file.stat().st_size)}")
    return 0


def _import(args: argparse.Namespace) -> int:
    from statewise.runtime.clock import SystemClock
    from statewise.runtime.tiers.admin import import_pages

    with _bar() as progress:
        report = import_pages(args.directory, args.file, SystemClock(), progress)
    print(
        f"{report.num_new:,} pages are new, {report.num_known:,} were known, "
        f"{report.num_damaged:,} damaged"
    )
    if report.lost_bytes:
        print(f"{report.lost_bytes:,} bytes of {args.file} are no pages: it is damaged or cut off")
    return 1 if report.num_damaged or report.lost_bytes else 0


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not 0.0 <= hours < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of hours")
    return hours


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="statewise cache",
        description="Look after a disk cache (docs/tiers.md).",
        epilog="`statewise cache dump URL` shows what a running server has cached.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text)
        one.add_argument("directory", type=Path, help="the server's --disk-cache-dir")
        one.set_defaults(run=run)
        return one

    command("ls", _ls, "Show what is there, by state group.")
    command("verify", _verify, "Read and check every page; drop what is damaged.")
    collect = command("gc", _gc, "Drop old pages and give unused room back.")
    collect.add_argument(
        "--ttl-hours", type=_hours, default=0.0, help="drop pages older than this (default: none)"
    )
    export = command("export", _export, "Copy all pages into one file.")
    export.add_argument("file", type=Path, help="the file to make")
    take_in = command("import", _import, "Take in the pages of an exported file.")
    take_in.add_argument("file", type=Path, help="the exported file")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit status."""
    args = _parser().parse_args(list(argv))
    from statewise.runtime.tiers.store import TierError

    try:
        status: int = args.run(args)
    except TierError as error:
        print(f"statewise cache: {error}", file=sys.stderr)
        return 2
    return status
