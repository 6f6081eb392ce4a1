"""Curves of cumulative effective reuse over the requests of a trace, to a file.

An .svg is written by hand here, the same bytes for the same figures; any other suffix is drawn by
matplotlib, which has to be installed for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 62, 190, 40, 48
COLOURS = ("#1b7f4d", "#c04a2b", "#555555", "#3b62b5", "#a07a1a")
MAX_POINTS = 300


class PlotError(ValueError):
    """The plot cannot be made; the message says what would help."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A named line: `values[i]` after request i + 1."""

    name: str
    values: Sequence[float]


def write_plot(path: Path, title: str, curves: Sequence[Curve]) -> None:
    """Draw the curves into `path`; PlotError where matplotlib is needed and missing."""
    if path.suffix == ".svg":
        path.write_text(svg(title, curves), encoding="utf-8")
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        problem = "needs matplotlib, which is not installed; a name in .svg needs nothing"
        raise PlotError(f"{path}: {problem}") from None
    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    for curve in curves:
        axes.plot(range(1, len(curve.values) + 1), curve.values, label=curve.name)
    axes.set(title=title, xlabel="requests", ylabel="effective reuse, share of prompt tokens")
    axes.legend()
    figure.savefig(path)


def svg(title: str, curves: Sequence[Curve]) -> str:
    """The picture as text."""
    count = max(len(curve.values) for curve in curves)
    top = max(max(curve.values, default=0.0) for curve in curves)
    scale = next(s for s in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 2.0) if top <= s)
    frame = _Frame(count, scale)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
        *frame.grid(),
    ]
    for index, curve in enumerate(curves):
        parts += frame.line(curve, index)
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Frame:
    """Axes: requests to the right, shares upwards."""

    def __init__(self, count: int, scale: float) -> None:
        self.count, self.scale = count, scale
        self.width, self.height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(self, request: float, share: float) -> str:
        """A point as text."""
        x = LEFT + self.width * request / self.count
        y = TOP + self.height * (1 - share / self.scale)
        return f"{x:.1f},{y:.1f}"

    def grid(self) -> list[str]:
        """Lines and numbers of both axes."""
        out = []
        for step in range(6):
            share = self.scale * step / 5
            start, end = self.at(0, share).split(","), self.at(self.count, share).split(",")
            out.append(
                f'<line x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}" stroke="#ddd"/>'
                f'<text x="{LEFT - 8}" y="{float(start[1]) + 4:.1f}" text-anchor="end">'
                f"{share:.2f}</text>"
            )
            request = self.count * step // 5
            x = self.at(request, 0).split(",")[0]
            out.append(
                f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{request}</text>'
            )
        middle = LEFT + self.width / 2
        out.append(
            f'<text x="{middle:.1f}" y="{HEIGHT - 10}" text-anchor="middle">requests; effective '
            "reuse so far, share of prompt tokens</text>"
        )
        return out

    def line(self, curve: Curve, index: int) -> list[str]:
        """One curve and its name beside it, names one below the other."""
        every = max(1, len(curve.values) // MAX_POINTS)
        places = [*range(0, len(curve.values), every), len(curve.values) - 1]
        points = " ".join(self.at(i + 1, curve.values[i]) for i in places)
        colour = COLOURS[index % len(COLOURS)]
        y = TOP + 16 + 20 * index
        x = WIDTH - RIGHT + 12
        last = curve.values[-1]
        return [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>',
            f'<line x1="{x}" y1="{y - 4}" x2="{x + 16}" y2="{y - 4}" stroke="{colour}" '
            'stroke-width="3"/>',
            f'<text x="{x + 22}" y="{y}">{escape(curve.name)} {last:.3f}</text>',
        ]
