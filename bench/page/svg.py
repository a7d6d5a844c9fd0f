"""Two kinds of charts as inline SVG: lines over size, and dots on a line per thing compared.

Colours are classes of the page's style sheet, so that a chart follows the reader's light or dark mode. Charts
are 360 units wide and stand side by side; that is a phone's width, so that their letters stay readable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from arborcast.bench.page.parts import Tone
from arborcast.bench.page.words import digits, size

WIDTH = 360


@dataclass(frozen=True)
class Line:
    """A curve with its name at its right end.

    Attributes:
        label: short; nothing for none.
        points: size (or whatever lies below) and value, by size.
        tone: ours is drawn strongest.
        dashed: for what is a formula.
        drawn: "curve" without the points, for what is known everywhere; "points" for single figures.
    """

    label: str
    points: tuple[tuple[float, float], ...]
    tone: Tone = "base"
    dashed: bool = False
    drawn: Literal["both", "curve", "points"] = "both"


@dataclass(frozen=True)
class Dots:
    """A line of a dot chart.

    Attributes:
        label: what is compared.
        values: by tone; "quiet" is drawn as an upright stroke, for a limit.
        hint: shown when the reader points at it.
        heading: starts a group of lines.
    """

    label: str
    values: tuple[tuple[Tone, float], ...]
    hint: str = ""
    heading: str = ""


@dataclass(frozen=True)
class _Frame:
    """The area of a line chart, both axes logarithmic."""

    sizes: tuple[float, float]
    values: tuple[float, float]
    left: float = 34.0
    right: float = WIDTH - 66.0
    top: float = 10.0
    bottom: float = 190.0

    def x(self, value: float) -> float:
        return self.left + _part(value, *self.sizes) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - _part(value, *self.values) * (self.bottom - self.top)


def _part(value: float, low: float, high: float) -> float:
    return 0.5 if low == high else (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))


def line_chart(
    lines: Sequence[Line],
    *,
    equal: float | None = 1.0,
    below: str = "",
    size_name: Callable[[float], str] = size,
    value_name: Callable[[float], str] | None = None,
    description: str = "",
) -> str:
    """Curves over size; both axes are logarithmic.

    Args:
        lines: at least one with a point.
        equal: the ratio at which nobody wins; what lies below is shaded. None where values are no ratios.
        below: what the shade is called.
        size_name: of a figure of the lower axis; bytes unless told.
        value_name: of a figure of the left axis; ratios unless told.
        description: for those who do not see it.
    """
    points = [(x, y) for line in lines for x, y in line.points if x > 0 and y > 0]
    if not points:
        return ""
    values = [y for _, y in points] + ([] if equal is None else [equal])
    sizes = [x for x, _ in points]
    frame = _Frame((min(sizes), max(sizes)), (min(values) / 1.12, max(values) * 1.12))
    drawn = [] if equal is None else [_shade(frame, equal, below)]
    drawn += [*_value_axis(frame, equal, value_name or _ratio), *_size_axis(frame, points, size_name)]
    drawn += [
        _curve(frame, line, size_name, value_name or _exact_ratio)
        for line in sorted(lines, key=lambda line: (line.drawn == "points", line.tone == "ours"))
    ]
    drawn += _end_labels(frame, [line for line in lines if line.points and line.label])
    return _svg(WIDTH, 222, drawn, description)


def _ratio(value: float) -> str:
    return f"{_short(value)}×"


def _exact_ratio(value: float) -> str:
    return f"{digits(value)}×"


def _shade(frame: _Frame, equal: float, below: str) -> str:
    top = frame.y(equal)
    height = frame.bottom - top
    words = (
        f'<text class="loss-name" x="{frame.left + 4:.1f}" y="{frame.bottom - 5:.1f}">{escape(below)}</text>'
        if below and height > 14
        else ""
    )
    return (
        f'<rect class="loss" x="{frame.left:.1f}" y="{top:.1f}" width="{frame.right - frame.left:.1f}" '
        f'height="{height:.1f}"/>{words}'
    )


def _value_axis(frame: _Frame, equal: float | None, name: Callable[[float], str]) -> list[str]:
    drawn = []
    for tick in log_ticks(*frame.values):
        y = frame.y(tick)
        kind = "equal" if tick == equal else "rule"
        drawn.append(f'<path class="{kind}" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>')
        drawn.append(
            f'<text class="end" x="{frame.left - 5:.1f}" y="{y + 3.5:.1f}">{escape(name(tick))}</text>'
        )
    return drawn


def _short(value: float) -> str:
    return f"{value:g}" if value < 1e4 else digits(value)


def log_ticks(low: float, high: float) -> list[float]:
    """At most 7 round values between two, about the same factor apart, with 1 among them if it is there."""
    for steps in ((1, 1.2, 1.5, 2, 3, 5, 7), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [float(f"{step * 10.0**decade:.6g}") for decade in decades for step in steps]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= 7:
            return inside
    return inside[:: -(-len(inside) // 7)]


def _size_axis(
    frame: _Frame, points: Sequence[tuple[float, float]], name: Callable[[float], str]
) -> list[str]:
    """Ticks at sizes that were asked about, at most five of them, evenly chosen from the largest down."""
    sizes = sorted({x for x, _ in points})
    every = max(1, math.ceil((len(sizes) - 1) / 4))
    drawn = [f'<path class="rule" d="M{frame.left:.1f} {frame.bottom:.1f}H{frame.right:.1f}"/>']
    for value in sizes[::-1][::every]:
        x = frame.x(value)
        drawn.append(f'<path class="axis" d="M{x:.1f} {frame.bottom:.1f}v4"/>')
        drawn.append(
            f'<text class="middle" x="{x:.1f}" y="{frame.bottom + 17:.1f}">{escape(name(value))}</text>'
        )
    return drawn


def _curve(
    frame: _Frame, line: Line, size_name: Callable[[float], str], value_name: Callable[[float], str]
) -> str:
    shown = [(x, y) for x, y in line.points if x > 0 and y > 0]
    if not shown:
        return ""
    points = [(frame.x(x), frame.y(y)) for x, y in shown]
    way = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashed = " dashed" if line.dashed else ""
    radius = 3.2 if line.drawn == "points" else 2
    marks = "".join(
        f'<circle class="{line.tone}" cx="{px:.1f}" cy="{py:.1f}" r="{radius}"><title>'
        f"{escape(f'{line.label}, {size_name(x)}: {value_name(y)}')}</title></circle>"
        for (px, py), (x, y) in zip(points, shown, strict=True)
    )
    path = f'<path class="curve {line.tone}{dashed}" d="{way}"/>'
    return (path if line.drawn != "points" else "") + (marks if line.drawn != "curve" else "")


def _end_labels(frame: _Frame, lines: Sequence[Line]) -> list[str]:
    """Names at the right ends, moved apart where they would overlap."""
    wanted = sorted((frame.y(line.points[-1][1]), number) for number, line in enumerate(lines))
    places: list[tuple[float, int]] = []
    for y, number in wanted:
        places.append((max(y, places[-1][0] + 12 if places else y), number))
    over = max(0.0, places[-1][0] - frame.bottom) if places else 0.0
    return [
        f'<text class="name {lines[number].tone}" x="{frame.right + 6:.1f}" y="{y - over + 3.5:.1f}">'
        f"{escape(lines[number].label)}</text>"
        for y, number in places
    ]


def dot_chart(
    dots: Sequence[Dots],
    *,
    unit: str,
    logarithmic: bool = False,
    label_width: float = 92.0,
    description: str = "",
) -> str:
    """A line per thing, with a dot per contender and a stroke for a limit; the axis is at the top.

    Args:
        dots: at least one with a value above 0.
        unit: of the axis.
        logarithmic: the axis; else it starts at 0.
        label_width: that the labels take.
        description: for those who do not see it.
    """
    values = [value for one in dots for _, value in one.values if value > 0]
    if not values:
        return ""
    low, high = (min(values) / 1.5, max(values) * 1.5) if logarithmic else (0.0, max(values) * 1.04)
    left, right, y = label_width, WIDTH - 12.0, 30.0

    def x(value: float) -> float:
        part = _part(max(value, low), low, high) if logarithmic else value / high
        return left + part * (right - left)

    drawn, lines = [], []
    for one in dots:
        if one.heading:
            y += 10
            lines.append(f'<text class="heading" x="0" y="{y + 3.5:.1f}">{escape(one.heading)}</text>')
            y += 15
        lines.append(_dot_line(one, y, left, right, x))
        y += 14
    bottom = y - 4
    for tick in _seven(log_ticks(low, high)) if logarithmic else linear_ticks(high):
        name = unit_time(tick) if unit == "s" else _short(tick)
        drawn.append(f'<path class="rule" d="M{x(tick):.1f} 20V{bottom:.1f}"/>')
        drawn.append(f'<text class="middle" x="{x(tick):.1f}" y="14">{escape(name)}</text>')
    if unit != "s":
        drawn.append(f'<text x="0" y="14">{escape(unit)}</text>')
    return _svg(WIDTH, bottom + 4, drawn + lines, description)


def unit_time(value: float) -> str:
    """A round number of seconds for an axis."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if value < 0.999 * limit:
            return f"{value * factor:g} {unit}"
    return f"{value:g} s"


def _seven(ticks: list[float]) -> list[float]:
    return ticks[:: -(-len(ticks) // 6)] if len(ticks) > 6 else ticks


def linear_ticks(high: float) -> list[float]:
    """Round values from 0, four to six of them."""
    base = 10.0 ** math.floor(math.log10(high))
    step = next(base * part for part in (0.1, 0.2, 0.25, 0.5, 1, 2) if high / (base * part) <= 5)
    return [float(f"{step * count:.6g}") for count in range(int(high / step) + 1)]


def _dot_line(one: Dots, y: float, left: float, right: float, x: object) -> str:
    place = x if callable(x) else float
    marks = []
    for tone, value in one.values:
        at = place(value)
        marks.append(
            f'<path class="limit" d="M{at:.1f} {y - 5:.1f}v10"/>'
            if tone == "quiet"
            else f'<circle class="{tone}" cx="{at:.1f}" cy="{y:.1f}" r="{4 if tone == "ours" else 3.4}"/>'
        )
    ends = [place(value) for tone, value in one.values if tone != "quiet"]
    joined = f'<path class="join" d="M{min(ends):.1f} {y:.1f}H{max(ends):.1f}"/>' if len(ends) > 1 else ""
    return (
        f"<g><title>{escape(one.hint or one.label)}</title>"
        f'<rect class="touch" x="0" y="{y - 7:.1f}" width="{right:.1f}" height="14"/>'
        f'<path class="faint" d="M{left:.1f} {y:.1f}H{right:.1f}"/>'
        f'<text class="end" x="{left - 8:.1f}" y="{y + 3.5:.1f}">{escape(one.label)}</text>'
        f"{joined}{''.join(marks)}</g>"
    )


def _svg(width: float, height: float, drawn: Sequence[str], description: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(description)}">'
        f"{''.join(drawn)}</svg>"
    )
