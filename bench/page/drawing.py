"""The charts of the page drawn by Altair, as SVG that lies inside the page.

Vega draws when the page is made, not when it is read: the page holds no script of it and needs no network.
Colours are variables of the page's style sheet, so that a chart follows the reader's light or dark mode, and
points tell their figures when the reader points at them. The same chart is drawn once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias
from xml.etree import ElementTree

import altair as alt
import pandas as pd
import vl_convert

from arborcast.bench.page.charts import Chart, DotChart, Graph, Line, LineChart, Steps
from arborcast.bench.page.words import Format, digits, times, unit_time

WIDTH = 360
"""Pixels of a whole chart: a phone's width, so that letters stay readable."""

TONES = ("ours", "base", "quiet", "line", "bad", "loss", "label", "paper")
"""Variables of the page's style sheet that are colours."""

Layers: TypeAlias = list[alt.Chart]


@lru_cache(maxsize=512)
def svg(chart: Chart) -> str:
    """The chart's markup, with every text in it escaped; nothing where it has nothing to show."""
    match chart:
        case LineChart():
            drawn = _lines(chart)
        case DotChart():
            drawn = _dots(chart)
        case Graph():
            drawn = _graph(chart)
        case Steps():
            drawn = _steps(chart)
    return "" if drawn is None else _markup(drawn, chart.description)


def _markup(chart: alt.LayerChart, description: str) -> str:
    """Drawn by Vega; what a mark says to a screen reader is what it says on pointing, too."""
    whole = vl_convert.vegalite_to_svg(chart.to_json(validate=False))
    ElementTree.register_namespace("", "http://www.w3.org/2000/svg")
    root = ElementTree.fromstring(whole)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        said = element.attrib.pop("aria-label", "")
        element.attrib = {name: value for name, value in element.attrib.items() if name in _KEPT}
        if said:
            title = ElementTree.Element("title")
            title.text = said
            element.insert(0, title)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": description}
    return ElementTree.tostring(root, encoding="unicode")


_KEPT = frozenset(
    """
    viewBox d transform x y x1 y1 x2 y2 dx dy width height fill fill-opacity stroke stroke-width
    stroke-dasharray stroke-linecap stroke-opacity opacity font-size font-weight font-family text-anchor
    """.split()  # noqa: SIM905 - names read better without quotes
)
"""Attributes of a drawing; the others name its parts for scripts."""


def _whole(layers: Layers, width: float, height: float, padding: Sequence[float]) -> alt.LayerChart:
    """Layers above each other; the padding is that of the left, top, right and bottom."""
    drawn: alt.LayerChart = (
        alt.layer(*layers)
        .properties(
            width=width,
            height=height,
            padding=dict(zip(("left", "top", "right", "bottom"), padding, strict=True)),
            autosize="none",
        )
        .configure(font="sans-serif", background="transparent")
        .configure_view(stroke=None)
        .configure_axis(
            domain=False,
            ticks=False,
            gridColor=colour("line"),
            labelColor=colour("label"),
            labelFontSize=10.5,
            labelOverlap=False,
            labelPadding=5,
            aria=False,
        )
        .configure_text(fontSize=10.5, aria=False, baseline="middle")
        .configure_rule(aria=False)
        .configure_rect(aria=False)
        .configure_line(aria=False)
    )
    return drawn


def colour(tone: str) -> str:
    """The variable of the page's style sheet."""
    return f"var(--{tone})"


_COLOUR = alt.Color("tone:N", legend=None, scale=alt.Scale(domain=TONES, range=list(map(colour, TONES))))
_HINT = alt.Description("hint:N")
_WIDTH = alt.StrokeWidth("width:Q", scale=None, legend=None)
_DASHES = alt.StrokeDash("dashes:N", scale=None, legend=None)


_X, _Y = alt.X("x:Q"), alt.Y("y:Q")


def _axis(ticks: Sequence[float], named: Format, **more: Any) -> alt.Axis:
    """An axis with these ticks, each under its name in our words."""
    names = json.dumps([named(tick) for tick in ticks])
    last = max(1, len(ticks) - 1)  # Vega counts ticks from 0 to 1
    shown = f"{names}[round(datum.index * {last})]"
    return alt.Axis(values=list(ticks), title=None, labelExpr=shown, **more)


def _scale(low: float, high: float, kind: Literal["log", "linear"] = "log") -> alt.Scale:
    return alt.Scale(type=kind, domain=[low, high], nice=False, zero=False)


def _lines(chart: LineChart) -> alt.LayerChart | None:
    shown = [(line, [point for point in line.points if min(point) > 0]) for line in chart.lines]
    shown = [(line, points) for line, points in shown if points]
    if not shown:
        return None
    name, exact = chart.upright or _ratio, chart.upright or times
    sizes = sorted({x for _, points in shown for x, _ in points})
    values = [y for _, points in shown for _, y in points] + ([] if chart.equal is None else [chart.equal])
    low, high = min(values) / 1.12, max(values) * 1.12
    wide = (sizes[0], sizes[-1]) if len(sizes) > 1 else (sizes[0] / 2, sizes[0] * 2)
    below = sizes[::-1][:: max(1, math.ceil((len(sizes) - 1) / 4))][::-1]
    x = _X.scale(_scale(*wide)).axis(_axis(below, chart.across, grid=False, labelOverlap=True))
    ticks = log_ticks(low, high)
    y = _Y.scale(_scale(low, high)).axis(_axis(ticks, name))
    rows = pd.DataFrame(
        {
            "x": at,
            "y": value,
            "line": number,
            "tone": line.tone,
            "drawn": line.drawn,
            "dashes": [4, 3] if line.dashed else [1, 0],
            "width": 1.9 if line.tone == "ours" else 1.2,
            "area": 28 if line.drawn == "points" else 14,
            "hint": f"{line.label}, {chart.across(at)}: {exact(value)}",
        }
        for number, (line, points) in enumerate(_ours_last(shown))
        for at, value in points
    )
    curves = alt.Chart(rows[rows["drawn"] != "points"]).mark_line()
    points = alt.Chart(rows[rows["drawn"] != "curve"]).mark_circle(opacity=1)
    layers: Layers = [] if chart.equal is None else _shade(chart, (low, high), wide)
    layers += [
        curves.encode(x, y, _COLOUR, alt.Detail("line:N"), _WIDTH, strokeDash=_DASHES),
        points.encode(x, y, _COLOUR, _HINT, size=alt.Size("area:Q", scale=None)),
        *_end_labels([(line, points[-1][1]) for line, points in shown if line.label], (low, high)),
    ]
    left = _room(map(name, ticks), 40)
    right = _room((line.label for line, _ in shown), 72)
    return _whole(layers, WIDTH - left - right, 190, (left, 8, right, 26))


def _room(words: Iterable[str], least: int) -> int:
    """Pixels that words beside a chart take: a letter is about 6 wide."""
    return max(least, 10 + 6 * max(map(len, words)))


def _ours_last(
    shown: Iterable[tuple[Line, list[tuple[float, float]]]],
) -> list[tuple[Line, list[tuple[float, float]]]]:
    """What is drawn last lies above: single figures, and ours."""
    return sorted(shown, key=lambda each: (each[0].drawn == "points", each[0].tone == "ours"))


def _shade(chart: LineChart, span: tuple[float, float], wide: tuple[float, float]) -> Layers:
    """Where nobody wins, and below it where we lose, with its name where there is room."""
    low, high = span
    equal = chart.equal or low
    at = pd.DataFrame([{"x": wide[0], "x2": wide[1], "y": low, "y2": equal, "said": chart.below}])
    layers = [
        alt.Chart(at).mark_rect(color=colour("loss")).encode(_X, _Y, x2="x2:Q", y2="y2:Q"),
        alt.Chart(at).mark_rule(color=colour("quiet"), strokeWidth=0.8).encode(y="y2:Q"),
    ]
    if chart.below and math.log(equal / low) > 0.08 * math.log(high / low):
        words = alt.Chart(at).mark_text(align="left", color=colour("bad"), fontSize=9.5, dx=3, dy=-7)
        layers.append(words.encode(_X, _Y, alt.Text("said:N")))
    return layers


def _end_labels(ends: Iterable[tuple[Line, float]], span: tuple[float, float]) -> Layers:
    """Names at the right ends, moved apart where they would overlap: each takes 7.5 % of the height."""
    low, high = map(math.log, span)
    wanted = sorted(
        ((math.log(y) - low) / (high - low), number, line) for number, (line, y) in enumerate(ends)
    )
    places: list[float] = []
    for at, _, _ in wanted:
        places.append(max(at, places[-1] + 0.075) if places else at)
    over = max(0.0, places[-1] - 1) if places else 0.0
    layers = []
    for at, (_, _, line) in zip(places, wanted, strict=True):
        is_ours = line.tone == "ours"
        words = alt.Chart(
            pd.DataFrame([{"y": math.exp(low + (at - over) * (high - low)), "said": line.label}])
        )
        drawn = words.mark_text(
            align="left",
            dx=5,
            color=colour("ours" if is_ours else "label"),
            fontWeight=600 if is_ours else 400,
        )
        layers.append(drawn.encode(_Y, alt.Text("said:N"), x=alt.value("width")))
    return layers


def _dots(chart: DotChart) -> alt.LayerChart | None:
    values = [value for one in chart.dots for _, value in one.values if value > 0]
    if not values:
        return None
    low, high = (min(values) / 1.5, max(values) * 1.5) if chart.logarithmic else (0.0, max(values) * 1.04)
    ticks = log_ticks(low, high) if chart.logarithmic else even_ticks(high)
    rows: list[dict[str, Any]] = []
    heads: list[dict[str, Any]] = []
    at = 0.0
    for one in chart.dots:
        if one.heading:
            heads.append({"y": at + 0.7, "said": one.heading})
            at += 1.7
        ends = [value for tone, value in one.values if tone != "quiet"] or [low]
        line = {"y": at, "said": one.label, "hint": one.hint or one.label, "from": min(ends), "to": max(ends)}
        rows += [line | {"tone": tone, "x": max(value, low)} for tone, value in one.values]
        at += 1
    left = round(chart.label_width * WIDTH)
    y = _Y.scale(alt.Scale(domain=[-0.6, at - 0.4], reverse=True, nice=False)).axis(None)
    x = _X.scale(_scale(low, high, "log" if chart.logarithmic else "linear")).axis(
        _axis(ticks, unit_time if chart.unit == "s" else _short, orient="top", labelOverlap=True)
    )
    table = pd.DataFrame(rows)
    once = alt.Chart(table.drop_duplicates("y"))
    layers = [
        once.mark_rule(color=colour("line"), strokeWidth=0.5).encode(y),
        once.mark_rule(color=colour("base"), strokeWidth=1.2).encode(alt.X("from:Q"), y, x2="to:Q"),
        once.mark_text(align="right", dx=-5, color=colour("label")).encode(
            y, alt.Text("said:N"), x=alt.value(0)
        ),
        *(
            alt.Chart(table[(table["tone"] == "quiet") == is_stroke])
            .mark_point(
                filled=not is_stroke,
                opacity=1,
                shape="stroke" if is_stroke else "circle",
                angle=90 if is_stroke else 0,
            )
            .encode(x, y, _COLOUR, _HINT, size=alt.value(90 if is_stroke else 30))
            for is_stroke in (False, True)
        ),
    ]
    if heads:
        words = alt.Chart(pd.DataFrame(heads)).mark_text(
            align="left", dx=-left, fontWeight=600, color=colour("quiet")
        )
        layers.append(words.encode(y, alt.Text("said:N"), x=alt.value(0)))
    if chart.unit != "s":
        unit = alt.Chart(pd.DataFrame([{"said": chart.unit}])).mark_text(
            align="left", dx=-left, color=colour("label")
        )
        layers.append(unit.encode(alt.Text("said:N"), x=alt.value(0), y=alt.value(-11)))
    return _whole(layers, WIDTH - left - 13, 13.7 * at, (left, 22, 13, 4))


def _graph(chart: Graph) -> alt.LayerChart | None:
    if not chart.places:
        return None
    at = dict(chart.places)
    xs, ys = zip(*at.values(), strict=True)
    height = 190
    wide, high = max(xs) - min(xs) + 1.0, max(ys) - min(ys) + 1.0
    scale = max(high / height, wide / 302, 1 / 60)  # units per pixel: pictures side by side are equally high
    middle = (max(ys) + min(ys)) / 2
    x = _X.axis(None).scale(_scale(min(xs) - 0.5, min(xs) - 0.5 + WIDTH * scale, "linear"))
    y = _Y.axis(None).scale(_scale(middle - height / 2 * scale, middle + height / 2 * scale, "linear"))
    cables = pd.DataFrame(
        {
            "x": at[src][0],
            "y": at[src][1],
            "x2": at[dst][0],
            "y2": at[dst][1],
            "width": width,
            "tone": "bad" if is_short else "base",
            "hint": hint,
        }
        for src, dst, width, is_short, hint in chart.cables
    )
    vertices = pd.DataFrame(
        {
            "x": place[0],
            "y": place[1],
            "said": "" if isinstance(vertex, str) else str(vertex),
            "hint": vertex if isinstance(vertex, str) else f"rank {vertex}",
        }
        for vertex, place in chart.places
    )
    ranks, switches = (
        alt.Chart(vertices[(vertices["said"] == "") == is_switch]) for is_switch in (False, True)
    )
    paper: Any = {"fill": colour("paper"), "opacity": 1, "strokeWidth": 1}
    layers = [
        alt.Chart(cables)
        .mark_rule(aria=True, strokeCap="round")
        .encode(x, y, _COLOUR, _HINT, _WIDTH, x2="x2:Q", y2="y2:Q"),
        switches.mark_square(size=200, stroke=colour("label"), **paper).encode(x, y, _HINT),
        ranks.mark_circle(size=260, stroke=colour("quiet"), **paper).encode(x, y, _HINT),
        ranks.mark_text(color=colour("quiet")).encode(x, y, alt.Text("said:N")),
    ]
    return _whole(layers if len(cables) else layers[1:], WIDTH, height, (0, 0, 0, 0))


def _steps(chart: Steps) -> alt.LayerChart | None:
    if not chart.points:
        return None
    last = len(chart.places) - 1
    top = max(value for _, value in chart.points)
    rows = pd.DataFrame(
        {"x": at, "y": value, "hint": f"{chart.places[at]}: {chart.upright(value)}"}
        for at, value in chart.points
    )
    until_now = pd.concat([rows, pd.DataFrame([{"x": last, "y": chart.points[-1][1]}])])
    shown = sorted({last * number // 3 for number in range(4)})
    x = _X.scale(_scale(0, max(last, 1), "linear")).axis(
        _axis(shown, lambda at: chart.places[int(at)][5:10], grid=False)
    )
    y = _Y.scale(_scale(0, top * 1.08 or 1.0, "linear")).axis(_axis(even_ticks(top or 1.0), chart.upright))
    layers = [
        alt.Chart(until_now).mark_line(interpolate="step-after", color=colour("ours")).encode(x, y),
        alt.Chart(rows).mark_circle(opacity=1, size=24, color=colour("ours")).encode(x, y, _HINT),
    ]
    return _whole(layers, WIDTH - 95, 120, (62, 8, 33, 24))


def even_ticks(high: float) -> list[float]:
    """From 0 on, at most 7 round values up to one, equally far apart."""
    least = 10.0 ** math.floor(math.log10(high / 6))
    step = next(factor * least for factor in (1, 2, 2.5, 5, 10) if high / (factor * least) < 7)
    return [number * step for number in range(math.floor(high / step) + 1)]


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


def _short(value: float) -> str:
    return f"{value:g}" if value < 1e4 else digits(value)


def _ratio(value: float) -> str:
    return f"{_short(value)}×"
