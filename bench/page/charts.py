"""Charts as values, drawn by matplotlib as SVG that stands inside the page.

Colours are variables of the page's style sheet, so that a chart follows the reader's light or dark mode, and
points tell their figures when the reader points at them. The same chart is drawn once.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from html import escape
from typing import Any, Literal, TypeAlias

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from arborcast.bench.page.words import Format, digits, size, times

WIDTH_INCHES = 5.0
"""360 points: a phone's width, so that letters stay readable."""

_COLOURS = {
    "ours": "#0b63b6",
    "base": "#a3a9b1",
    "quiet": "#1c1e21",
    "line": "#e3e5e8",
    "bad": "#b3261e",
    "loss": "#f7e4e3",
    "label": "#646a73",
    "paper": "#fefefe",
}
"""As matplotlib is told; each becomes the variable of its name."""

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "arborcast",
    "font.size": 10.5,
    "font.family": "sans-serif",
    "text.parse_math": False,
    "path.simplify": False,
}


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
    tone: str = "base"
    dashed: bool = False
    drawn: Literal["both", "curve", "points"] = "both"


@dataclass(frozen=True)
class LineChart:
    """Curves over size; both axes are logarithmic.

    Attributes:
        description: for those who do not see it.
        lines: those without points are left out.
        equal: the ratio at which nobody wins; what lies below is shaded. None where values are no ratios.
        below: what the shade is called.
        across: names a figure of the lower axis.
        upright: names a figure of the left axis.
    """

    description: str
    lines: tuple[Line, ...]
    equal: float | None = 1.0
    below: str = ""
    across: Format = size
    upright: Format | None = None


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
    values: tuple[tuple[str, float], ...]
    hint: str = ""
    heading: str = ""


@dataclass(frozen=True)
class DotChart:
    """A line per thing, with a dot per contender and a stroke for a limit; the axis is at the top.

    Attributes:
        description: for those who do not see it.
        dots: at least one with a value above 0.
        unit: of the axis.
        logarithmic: the axis; else it starts at 0.
        label_width: that the labels take, as a share of the whole.
    """

    description: str
    dots: tuple[Dots, ...]
    unit: str
    logarithmic: bool = False
    label_width: float = 0.26


@dataclass(frozen=True)
class Graph:
    """Ranks as discs, switches as squares, links as lines as wide as they are fast.

    Attributes:
        description: for those who do not see it.
        places: of each vertex; a rank's is a number, a switch's a name.
        cables: both ends, the width in points, whether it fell short, and what is told on pointing.
    """

    description: str
    places: tuple[tuple[int | str, tuple[float, float]], ...]
    cables: tuple[tuple[int | str, int | str, float, bool, str], ...]


Chart: TypeAlias = LineChart | DotChart | Graph


@lru_cache(maxsize=512)
def svg(chart: Chart) -> str:
    """The chart's markup, with every text in it escaped; nothing where it has nothing to show."""
    with mpl.rc_context(_STYLE):
        match chart:
            case LineChart():
                drawn = _lines(chart)
            case DotChart():
                drawn = _dots(chart)
            case Graph():
                drawn = _graph(chart)
        return "" if drawn is None else _markup(*drawn, chart.description)


Drawn: TypeAlias = tuple[Figure, list[list[str]]]
"""A figure, and what is told of its artists by the number in their `gid`: of each of its points, or of it."""


def _markup(figure: Figure, hints: Sequence[Sequence[str]], description: str) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Type")))
    whole = re.sub(r"\s*\n\s*", "\n", re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.S))
    view = re.search(r'viewBox="([^"]*)"', whole)
    inside = whole[whole.index(">", whole.index("<svg")) + 1 :]
    for name, colour in _COLOURS.items():
        inside = inside.replace(colour, f"var(--{name})")
    inside = re.sub(  # an id once in a page; glyphs and clips are the same wherever they have the same name
        r' id="(?:(?P<hint>hint-\d+)|(?:figure|axes|patch|line2d|text|matplotlib[^"]*|[a-zA-Z]+_\d+)[^"]*)"',
        lambda found: f' data-at="{found["hint"]}"' if found["hint"] else "",
        inside,
    )
    groups = re.split(r' data-at="hint-(\d+)">', inside)
    drawn = [groups[0]]
    for number, group in zip(groups[1::2], groups[2::2], strict=True):
        titles = [f"<title>{escape(hint)}</title>" for hint in hints[int(number)]]
        first, *points = re.split(r"(<use[^>]*)/>", group)
        drawn += [">", *(() if points else titles), first]
        for at in range(0, len(points), 2):
            drawn += [points[at], ">", *titles[at // 2 : at // 2 + 1], "</use>", points[at + 1]]
    inside = "".join(drawn)
    box = view[1] if view else ""
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(description)}">{inside}'


def _axes(height_inches: float, left: float, right: float, bottom: float, top: float) -> tuple[Figure, Axes]:
    """Axes with these margins in inches, and no frame."""
    figure = Figure(figsize=(WIDTH_INCHES, height_inches))
    width, height = WIDTH_INCHES - left - right, height_inches - bottom - top
    axes = figure.add_axes(
        (left / WIDTH_INCHES, bottom / height_inches, width / WIDTH_INCHES, height / height_inches)
    )
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelcolor=_COLOURS["label"])
    return figure, axes


def _lines(chart: LineChart) -> Drawn | None:
    shown = [(line, [point for point in line.points if min(point) > 0]) for line in chart.lines]
    shown = [(line, points) for line, points in shown if points]
    if not shown:
        return None
    name, exact = chart.upright or _ratio, chart.upright or times
    sizes = sorted({x for _, points in shown for x, _ in points})
    values = [y for _, points in shown for _, y in points] + ([] if chart.equal is None else [chart.equal])
    low, high = min(values) / 1.12, max(values) * 1.12
    figure, axes = _axes(3.1, 0.55, 1.0, 0.35, 0.1)
    axes.set(xscale="log", yscale="log", ylim=(low, high))
    if len(sizes) > 1:
        axes.set_xlim(sizes[0], sizes[-1])
    ticks = log_ticks(low, high)
    axes.yaxis.set(major_locator=FixedLocator(ticks), minor_locator=NullLocator())
    axes.set_yticklabels(map(name, ticks))
    below = sizes[::-1][:: max(1, math.ceil((len(sizes) - 1) / 4))]
    axes.xaxis.set(major_locator=FixedLocator(below), minor_locator=NullLocator())
    axes.set_xticklabels(map(chart.across, below))
    axes.grid(axis="y", color=_COLOURS["line"], linewidth=0.8)
    if chart.equal is not None:
        axes.axhspan(low, chart.equal, color=_COLOURS["loss"], linewidth=0, zorder=0)
        axes.axhline(chart.equal, color=_COLOURS["quiet"], linewidth=0.8)
        if chart.below and math.log(chart.equal / low) > 0.08 * math.log(high / low):
            axes.text(0.01, 0.015, chart.below, color=_COLOURS["bad"], fontsize=9.5, transform=axes.transAxes)
    hints: list[list[str]] = []
    for line, points in sorted(shown, key=lambda each: (each[0].drawn == "points", each[0].tone == "ours")):
        colour, is_ours = _COLOURS[line.tone], line.tone == "ours"
        if line.drawn != "points":
            style = "--" if line.dashed else "-"
            axes.plot(*zip(*points, strict=True), style, color=colour, linewidth=1.9 if is_ours else 1.2)
        if line.drawn != "curve":
            size_pt = 5.0 if line.drawn == "points" else 3.2
            gid = f"hint-{len(hints)}"
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, "o", color=colour, markersize=size_pt, gid=gid, clip_on=False, zorder=3)
            hints.append([f"{line.label}, {chart.across(x)}: {exact(y)}" for x, y in points])
    _end_labels(axes, [(line, points[-1][1]) for line, points in shown if line.label], (low, high))
    return figure, hints


def _end_labels(axes: Axes, ends: Iterable[tuple[Line, float]], span: tuple[float, float]) -> None:
    """Names at the right ends, moved apart where they would overlap: each takes 7.5 % of the height."""
    low, high = map(math.log, span)
    wanted = sorted(
        ((math.log(y) - low) / (high - low), number, line) for number, (line, y) in enumerate(ends)
    )
    places: list[float] = []
    for at, _, _ in wanted:
        places.append(max(at, places[-1] + 0.075) if places else at)
    over = max(0.0, places[-1] - 1) if places else 0.0
    for at, (_, _, line) in zip(places, wanted, strict=True):
        axes.text(
            1.02,
            at - over,
            line.label,
            color=_COLOURS["ours" if line.tone == "ours" else "label"],
            fontweight="bold" if line.tone == "ours" else "normal",
            va="center",
            transform=axes.transAxes,
        )


def _dots(chart: DotChart) -> Drawn | None:
    values = [value for one in chart.dots for _, value in one.values if value > 0]
    if not values:
        return None
    low, high = (min(values) / 1.5, max(values) * 1.5) if chart.logarithmic else (0.0, max(values) * 1.04)
    rows = len(chart.dots) + sum(1.7 for one in chart.dots if one.heading)
    figure, axes = _axes(0.19 * rows + 0.35, chart.label_width * WIDTH_INCHES, 0.18, 0.05, 0.3)
    axes.set(xlim=(low, high), ylim=(rows - 0.4, -0.6))
    if chart.logarithmic:
        axes.set_xscale("log")
    ticks = log_ticks(low, high) if chart.logarithmic else MaxNLocator(5).tick_values(0, high)
    ticks = [tick for tick in ticks if low <= tick <= high]
    ticks = ticks[:: -(-len(ticks) // 6)] if len(ticks) > 6 else ticks
    name = unit_time if chart.unit == "s" else _short
    axes.xaxis.set(major_locator=FixedLocator(ticks), minor_locator=NullLocator())
    axes.xaxis.tick_top()
    axes.set_xticklabels(map(name, ticks))
    axes.grid(axis="x", color=_COLOURS["line"], linewidth=0.8)
    outside = partial(axes.text, transform=axes.get_yaxis_transform(), va="center")
    if chart.unit != "s":
        outside(-chart.label_width / (0.96 - chart.label_width), -1.35, chart.unit, color=_COLOURS["label"])
    hints: list[list[str]] = []
    y, labels = 0.0, []
    for one in chart.dots:
        if one.heading:
            y += 0.7
            at = -chart.label_width / (0.96 - chart.label_width)
            outside(at, y, one.heading, color=_COLOURS["quiet"], fontweight="bold")
            y += 1
        hint = f"hint-{len(hints)}"
        hints.append([one.hint or one.label])
        axes.plot((low, high), (y, y), color=_COLOURS["line"], linewidth=0.5, gid=hint)
        ends = [value for tone, value in one.values if tone != "quiet"]
        if len(ends) > 1:
            axes.plot((min(ends), max(ends)), (y, y), color=_COLOURS["base"], linewidth=1.2)
        for tone, value in one.values:
            marker, width = ("|", 11.0) if tone == "quiet" else ("o", 5.8 if tone == "ours" else 5.0)
            axes.plot(max(value, low), y, marker, color=_COLOURS[tone], markersize=width, gid=hint)
        labels.append((y, one.label))
        y += 1
    axes.set_yticks([y for y, _ in labels], [label for _, label in labels])
    return figure, hints


def _graph(chart: Graph) -> Drawn | None:
    if not chart.places:
        return None
    at = dict(chart.places)
    xs, ys = zip(*at.values(), strict=True)
    figure, axes = _axes(2.64, 0.0, 0.0, 0.0, 0.0)
    wide, high = max(xs) - min(xs) + 1.0, max(ys) - min(ys) + 1.0
    scale = max(high / 2.64, wide / 4.2, 1.2)  # units per inch: pictures side by side are equally high
    axes.set(
        xlim=(min(xs) - 0.5, min(xs) - 0.5 + WIDTH_INCHES * scale),
        ylim=((max(ys) + min(ys)) / 2 - 1.32 * scale, (max(ys) + min(ys)) / 2 + 1.32 * scale),
    )
    axes.set_axis_off()
    hints: list[list[str]] = []
    for src, dst, width, is_short, hint in chart.cables:
        colour = _COLOURS["bad" if is_short else "base"]
        x, y = zip(at[src], at[dst], strict=True)
        axes.plot(x, y, color=colour, linewidth=width, solid_capstyle="round", gid=f"hint-{len(hints)}")
        hints.append([hint])
    for vertex, (x_at, y_at) in chart.places:
        shape, edge = ("s", "label") if isinstance(vertex, str) else ("o", "quiet")
        axes.plot(
            x_at,
            y_at,
            shape,
            color=_COLOURS["paper"],
            markeredgecolor=_COLOURS[edge],
            markersize=14 if shape == "s" else 16,
            gid=f"hint-{len(hints)}",
            zorder=3,
        )
        hints.append([vertex if isinstance(vertex, str) else f"rank {vertex}"])
        if isinstance(vertex, int):
            axes.text(x_at, y_at, str(vertex), color=_COLOURS["quiet"], ha="center", va="center", zorder=4)
    return figure, hints


def log_ticks(low: float, high: float) -> list[float]:
    """At most 7 round values between two, about the same factor apart, with 1 among them if it is there."""
    inside: list[float] = []
    for steps in ((1, 1.2, 1.5, 2, 3, 5, 7), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [float(f"{step * 10.0**decade:.6g}") for decade in decades for step in steps]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= 7:
            return inside
    return inside[:: -(-len(inside) // 7)]


def unit_time(value: float) -> str:
    """A round number of seconds for an axis."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if value < 0.999 * limit:
            return f"{value * factor:g} {unit}"
    return f"{value:g} s"


def _short(value: float) -> str:
    return f"{value:g}" if value < 1e4 else digits(value)


def _ratio(value: float) -> str:
    return f"{_short(value)}×"
