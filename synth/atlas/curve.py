"""The curve of a page: how many times the least time each way takes, over sizes, as SVG within the page.

Colours and lines are named by class, so that the page's style decides them in light and in dark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log2

from markupsafe import Markup

from arborcast.synth.atlas.figures import SizeCurve, SizeTimes
from arborcast.synth.formats.sizes import format_size

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 420, 240, 34, 12, 20, 34
TOP_OF_SCALE = 8.0
"""Times the least time that are drawn at most; what takes longer runs along the upper edge."""

LINES: dict[str, tuple[str, Callable[[SizeTimes], float | None]]] = {
    "nccl": ("NCCL's model", lambda point: point.nccl_us),
    "ring": ("best rings", lambda point: point.ring_us),
    "best": ("chosen", lambda point: point.time_us),
}


def drawn(curve: SizeCurve, among: str) -> Markup:
    """A figure of one collective, where the least time is that of every schedule `among` some; or nothing."""
    if not curve.points:
        return Markup("")
    shown = [name for name, (_, of) in LINES.items() if any(of(point) is not None for point in curve.points)]
    label = f"{curve.kind}: time over size, as a multiple of the least time of any schedule{among}"
    parts = [Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(WIDTH, HEIGHT, label)]
    parts += [*_axes(curve), *(_line(curve, name) for name in shown), *_legend(shown)]
    caption = Markup("<figcaption>{}; {:g} stands for that and more</figcaption>")
    return Markup("<figure>{}</svg>{}</figure>").format(
        Markup("").join(parts), caption.format(label, TOP_OF_SCALE)
    )


def _x(curve: SizeCurve, size: int) -> float:
    first, last = log2(curve.points[0].bytes), log2(curve.points[-1].bytes)
    return LEFT + (WIDTH - LEFT - RIGHT) * (log2(size) - first) / max(last - first, 1)


def _y(times: float) -> float:
    """Logarithmic from 1/1.5 to the top: a model may promise less than what can be."""
    part = log2(1.5 * min(max(times, 1 / 1.5), TOP_OF_SCALE)) / log2(1.5 * TOP_OF_SCALE)
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part


def _axes(curve: SizeCurve) -> Iterator[Markup]:
    for times in (1, 1.5, 2, 3, 4, 6, 8):
        style, y = "least" if times == 1 else "grid", round(_y(times), 1)
        yield Markup('<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
            style, LEFT, WIDTH - RIGHT, y, y
        )
        yield Markup('<text x="{}" y="{}" text-anchor="end">{:g}x</text>').format(LEFT - 4, y + 4, times)
    for point in curve.points[::5]:
        x = round(_x(curve, point.bytes), 1)
        yield Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(
            x, HEIGHT - BOTTOM + 14, format_size(point.bytes)
        )


def _line(curve: SizeCurve, name: str) -> Markup:
    of = LINES[name][1]
    places = " ".join(
        f"{_x(curve, point.bytes):.1f},{_y(us / point.least_us):.1f}"
        for point in curve.points
        if (us := of(point)) is not None
    )
    return Markup('<polyline class="line {}" points="{}"/>').format(name, places)


def _legend(names: list[str]) -> Iterator[Markup]:
    for place, name in enumerate(reversed(names)):
        x, y = LEFT + 120 * place, HEIGHT - 6
        yield Markup('<line class="line {}" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
            name, x, x + 20, y - 4, y - 4
        )
        yield Markup('<text x="{}" y="{}">{}</text>').format(x + 26, y, LINES[name][0])
