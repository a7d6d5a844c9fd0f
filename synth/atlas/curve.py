"""The curve of a page: how many times the least time each way takes, over sizes, as SVG within the page.

Colours and lines are named by class, so that the page's style decides them in light and in dark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log2
from typing import Any

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


def shown(curve: SizeCurve, among: str) -> dict[str, Any]:
    """What `curve.html.jinja` draws, where the least time is of every schedule `among` some; or nothing."""
    if not curve.points:
        return {}
    names = [name for name, (_, of) in LINES.items() if any(of(point) is not None for point in curve.points)]
    return {
        "label": f"{curve.kind}: time over size, as a multiple of the least time of any schedule{among}",
        "width": WIDTH,
        "height": HEIGHT,
        "most": TOP_OF_SCALE,
        "marks": list(_marks(curve)),
        "curves": [(name, _places(curve, name)) for name in names],
        "legend": [
            (name, LINES[name][0], LEFT + 120 * place, HEIGHT - 6)
            for place, name in enumerate(reversed(names))
        ],
        "left": LEFT,
        "right": WIDTH - RIGHT,
    }


def _x(curve: SizeCurve, size: int) -> float:
    first, last = log2(curve.points[0].bytes), log2(curve.points[-1].bytes)
    return LEFT + (WIDTH - LEFT - RIGHT) * (log2(size) - first) / max(last - first, 1)


def _y(times: float) -> float:
    """Logarithmic from 1/1.5 to the top: a model may promise less than what can be."""
    part = log2(1.5 * min(max(times, 1 / 1.5), TOP_OF_SCALE)) / log2(1.5 * TOP_OF_SCALE)
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part


def _marks(curve: SizeCurve) -> Iterator[tuple[str, float, str]]:
    """Of both axes: the class of a line across and its height, or nothing and a size's place; the text."""
    for times in (1, 1.5, 2, 3, 4, 6, 8):
        yield "least" if times == 1 else "grid", round(_y(times), 1), f"{times:g}x"
    for point in curve.points[::5]:
        yield "", round(_x(curve, point.bytes), 1), format_size(point.bytes)


def _places(curve: SizeCurve, name: str) -> str:
    of = LINES[name][1]
    return " ".join(
        f"{_x(curve, point.bytes):.1f},{_y(us / point.least_us):.1f}"
        for point in curve.points
        if (us := of(point)) is not None
    )
