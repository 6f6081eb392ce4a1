"""What published hybrid models keep per token, per resumable position and in all, as a table.

    python tools/state_bytes.py [--tokens 131072]

Computed from the configs alone, by the schema that serving uses: bfloat16 cache, float32 tails and
recurrent state, pages of 128 tokens. A resumable position needs the window before it and one
snapshot of every tail and recurrent group; "in all" is one prompt of that many tokens, history
whole, with one resumable position at its end.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from statewise.radix.need import needs_snapshot  # noqa: E402
from statewise.radix.schema import CacheSchema, StateGroupSpec  # noqa: E402
from support.published import PUBLISHED, schema_of  # noqa: E402

MIB = 1 << 20


def group_row(group: StateGroupSpec, schema: CacheSchema, tokens: int) -> tuple[str, float]:
    """(cells of one group, its bytes for a prompt of `tokens`)."""
    page = schema.page_size
    per_token = group.block_bytes(page) / page
    layers = len(group.layers)
    if group.kind.is_history:
        return (
            f"{layers} | {per_token:,.0f} | | {per_token * tokens / MIB:,.1f}",
            per_token * tokens,
        )
    if group.kind.is_window:
        position = per_token * (group.window - 1)
    else:
        position = float(group.block_bytes(page)) if needs_snapshot(group, tokens) else 0.0
    per = f"{per_token:,.0f}" if group.kind.is_window else ""
    return f"{layers} | {per} | {position / MIB:,.2f} | {position / MIB:,.1f}", position


def table(tokens: int) -> Iterator[str]:
    """Markdown."""
    yield f"| model | group | layers | B a token | MiB a position | MiB for {tokens:,} tokens |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, raw in PUBLISHED.items():
        schema, total = schema_of(raw), 0.0
        for group in schema.groups:
            cells, size = group_row(group, schema, tokens)
            total += size
            yield f"| {name} | `{group.name}` | {cells} |"
            name = ""
        yield f"| | in all | | | | {total / MIB:,.1f} |"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=131072, help="tokens of the prompt")
    args = parser.parse_args()
    print("\n".join(table(args.tokens)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
