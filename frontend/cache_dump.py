"""`statewise cache dump URL`: what a running server has cached, as text, picture or data.

    statewise cache dump http://127.0.0.1:30000                    one line per node
    statewise cache dump URL --format svg -o cache.svg             a picture
    statewise cache dump URL --format json | jq .pools             data

Exit status 0: written; 2: the server did not answer as it should.
"""

from __future__ import annotations

import argparse
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

FORMATS = ("ascii", "svg", "json")
TIMEOUT_S = 60.0


def fetch(url: str, form: str, api_key: str) -> bytes:
    """Ask a server for its cache. Raises OSError where there is no answer or a refusal."""
    request = urllib.request.Request(f"{url.rstrip('/')}/cache?format={form}")
    if request.type not in ("http", "https"):
        raise OSError(f"{url} is no http:// or https:// address")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        with error:
            raise OSError(f"{url} answered {error.code} {error.reason}") from error


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="statewise cache dump", description="Show what a running server has cached."
    )
    parser.add_argument("url", help="address of the server, as http://127.0.0.1:30000")
    parser.add_argument("--format", choices=FORMATS, default="ascii")
    parser.add_argument(
        "-o", "--output", type=Path, help="file to write (default: standard output)"
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("STATEWISE_API_KEY", ""),
        help="the server's key (default: STATEWISE_API_KEY)",
    )
    args = parser.parse_args(list(argv))
    try:
        body = fetch(args.url, args.format, args.api_key)
        if args.output is not None:
            args.output.write_bytes(body)
    except (OSError, ValueError) as error:
        print(f"statewise cache dump: {error}", file=sys.stderr)
        return 2
    if args.output is None:
        sys.stdout.write(body.decode("utf-8"))
    return 0
