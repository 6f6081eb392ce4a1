"""The tree as data, as text and as a picture.

    dump   JSON-able: namespaces -> nodes with pages, residency, locks, checkpoints
    show   ASCII, one line per node, one mark per page and group
    svg    the same as a stand-alone picture

    marks:  # resident   s other stamp or invalid   h host  d disk  r remote   . absent

This module only reads.
"""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

from statewise.radix.key import Namespace
from statewise.radix.node import Node
from statewise.radix.segment import BLOCK, SLOW_BLOCK, SLOW_TIER, Segment
from statewise.radix.topology import Topology, checkpoints_of

TIER_MARKS = "#hdr"
MAX_MARKS = 64
COLOURS = {"#": "#3b7dd8", "s": "#d8a03b", "h": "#6bb36b", "d": "#8f6bb3", "r": "#b36b8f"}
ABSENT_COLOUR = "#e8e8e8"


def marks(segment: Segment, stamp: int) -> str:
    """One character per page."""
    good = segment.valid(stamp)
    out = []
    for page in range(segment.num_pages):
        if segment.table[BLOCK, page] >= 0:
            out.append("#" if good[page] else "s")
        elif segment.aside.slow is not None and segment.aside.slow[SLOW_BLOCK, page] >= 0:
            out.append(TIER_MARKS[int(segment.aside.slow[SLOW_TIER, page])])
        else:
            out.append(".")
    return "".join(out)


def dump(topology: Topology) -> dict[str, Any]:
    """Everything as JSON-able data, nodes nested under their parents."""
    return {
        "page_size": topology.schema.page_size,
        "groups": [{"name": g.name, "kind": g.kind.value} for g in topology.schema.groups],
        "stamps": list(topology.stamps),
        "evictable": list(topology.evictable),
        "namespaces": [
            {
                "salt": topology.namespaces[key].salt,
                "adapter": topology.namespaces[key].adapter,
                "root": _dump_node(topology, root),
            }
            for key, root in topology.roots.items()
        ],
    }


def _dump_node(topology: Topology, top: Node) -> dict[str, Any]:
    """Nest without recursion: a tree may be deeper than the interpreter's stack."""
    made: dict[Node, dict[str, Any]] = {}
    stack = [top]
    while stack:
        node = stack.pop()
        made[node] = _dump_one(topology, node)
        if node is not top and node.parent is not None:
            made[node.parent]["children"].append(made[node])
        stack.extend(reversed(node.children.values()))
    return made[top]


def _dump_one(topology: Topology, node: Node) -> dict[str, Any]:
    groups = topology.schema.groups
    return {
        "start": node.start,
        "end": node.end,
        "locks": node.locks,
        "protected": bool(node.protect),
        "hits": node.hits,
        "pages": {
            groups[g].name: marks(node.segments[g], topology.stamps[g]) for g in topology.paged
        },
        "checkpoints": [
            {
                "position": c.position,
                "reason": c.reason,
                "locks": c.locks,
                "blocks": {groups[b.group].name: b.block for b in c.blocks},
            }
            for c in checkpoints_of(node)
        ],
        "children": [],
    }


def show(topology: Topology) -> str:
    """ASCII picture; long runs are cut to their last pages."""
    lines = []
    for key, root in topology.roots.items():
        lines.append(_namespace_line(topology.namespaces[key]))
        stack = [(root, 0)]
        while stack:
            node, depth = stack.pop()
            if node.parent is not None:
                lines.append(_node_line(topology, node, depth))
            stack.extend((child, depth + 1) for child in reversed(node.children.values()))
    return "\n".join(lines) + "\n" if lines else "(empty)\n"


def _namespace_line(namespace: Namespace) -> str:
    return f"namespace salt={namespace.salt!r} adapter={namespace.adapter!r}"


def _node_line(topology: Topology, node: Node, depth: int) -> str:
    groups = topology.schema.groups
    parts = []
    for g in topology.paged:
        text = marks(node.segments[g], topology.stamps[g])
        cut = text if len(text) <= MAX_MARKS else ".." + text[-MAX_MARKS:]
        parts.append(f"{groups[g].name}={cut}")
    held = " ".join(f"@{c.position}" for c in checkpoints_of(node))
    lock = f" locks={node.locks}" if node.locks else ""
    body = " ".join(parts)
    return f"{'  ' * depth}[{node.start},{node.end}) {body}{lock}{' ' if held else ''}{held}"


def svg(topology: Topology) -> str:
    """Stand-alone SVG: a row per node, a strip of pages per group; checkpoints as ticks."""
    cell, strip = 6, 8
    rows = [(ns, node) for ns, node in topology.nodes()]
    widest = max((node.end for _, node in rows), default=0)
    parts, y = [], 10
    for namespace, node in rows:
        if node.parent is None:
            parts.append(_text(4, y + 10, _namespace_line(namespace)))
            y += 20
            continue
        for g in topology.paged:
            text = marks(node.segments[g], topology.stamps[g])
            parts.extend(_strip(text, 4 + node.start * cell, y, cell, strip))
            y += strip + 1
        for checkpoint in checkpoints_of(node):
            x = 4 + checkpoint.page * cell
            parts.append(f'<path d="M{x} {y}l-3 5h6z" fill="#c33"/>')
        y += 8
    body = "".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(400, widest * cell + 20)}" '
        f'height="{y + 10}" font-family="monospace" font-size="11">{body}</svg>\n'
    )


def _strip(text: str, x: int, y: int, cell: int, height: int) -> list[str]:
    """Rectangles of equal neighbouring marks."""
    out, start = [], 0
    for i in range(1, len(text) + 1):
        if i == len(text) or text[i] != text[start]:
            colour = COLOURS.get(text[start], ABSENT_COLOUR)
            out.append(
                f'<rect x="{x + start * cell}" y="{y}" width="{(i - start) * cell}" '
                f'height="{height}" fill="{colour}" stroke="#fff" stroke-width="0.5"/>'
            )
            start = i
    return out


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}">{escape(text)}</text>'
