"""Charts of the page as values that say what is shown; `drawing.py` draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from arborcast.bench.page.words import Format, size


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


@dataclass(frozen=True)
class Steps:
    """A figure that keeps its value until the next place, over evenly spaced places such as commits.

    Attributes:
        description: for those who do not see it.
        places: what stands below each place.
        points: the number of the place, by number, and the value from there on.
        upright: names a value.
    """

    description: str
    places: tuple[str, ...]
    points: tuple[tuple[int, float], ...]
    upright: Format


Chart: TypeAlias = LineChart | DotChart | Graph | Steps
