"""Pictures of the page: points as values, drawn by Altair as SVG that lies inside the page.

Vega draws when the page is made, not when it is read: the page holds no script and needs no network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from arborcast.bench.page.results import Document

Point: TypeAlias = tuple[str, str, float | str, float]
"""Panel, series, place on the lower axis and value."""


@dataclass(frozen=True)
class Chart:
    """Curves, or a dot for each thing, in panels of one size.

    Attributes:
        points: of a document.
        lower: what the lower axis shows.
        upright: what the left axis shows.
        mark: "line" over a number, both axes logarithmic; "point" for named things, along a linear axis.
        rule: a value that is marked, such as the ratio at which nobody wins.
    """

    points: Callable[[Document], Iterable[Point]]
    lower: str
    upright: str
    mark: Literal["line", "point"] = "line"
    rule: float | None = None


def svg(chart: Chart, document: Document) -> str:
    """The chart's markup, with every text in it escaped; nothing where it has nothing to show."""
    import altair as alt
    import pandas as pd
    import vl_convert

    points = pd.DataFrame(chart.points(document), columns=["panel", "series", "x", "y"]).dropna()
    if chart.mark == "line":
        points = points[(points["x"] > 0) & (points["y"] > 0)] if len(points) else points
    if not len(points):
        return ""
    colour = alt.Color("series:N", title=None, sort=None)
    if chart.mark == "line":
        # Without grids: logarithmic ones hide the curves.
        log = alt.Scale(type="log", nice=False, padding=8)
        x = alt.X("x:Q", title=chart.lower, scale=log, axis=alt.Axis(format="~s", grid=False))
        y = alt.Y("y:Q", title=chart.upright, scale=log, axis=alt.Axis(grid=False))
        drawn: Any = alt.Chart().mark_line(point=True).encode(x, y, colour)
    else:
        x = alt.X("y:Q", title=chart.upright)
        y = alt.Y("x:N", title=None, sort=None)
        drawn = alt.Chart().mark_point(filled=True).encode(x, y, colour)
    if chart.rule is not None:
        at = {"y" if chart.mark == "line" else "x": alt.datum(chart.rule)}
        drawn = drawn + alt.Chart().mark_rule(strokeDash=[4, 3]).encode(**at)
    whole = (
        alt.layer(drawn, data=points)
        .properties(width=260, height=150 if chart.mark == "line" else alt.Step(13))
        .facet(facet=alt.Facet("panel:N", title=None, sort=None), columns=3)
        .resolve_scale(y="shared" if chart.mark == "line" else "independent")
        .configure(background="transparent")
        .configure_axis(labelOverlap=True)
    )
    markup = vl_convert.vegalite_to_svg(whole.to_json(validate=False))
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", markup)
