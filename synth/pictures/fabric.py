"""The picture of a topology: ranks as discs, links as lines as wide as they are fast, switches as squares.

Switches that reduce or multicast are hexagons.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from arborcast.synth.formats.words import counted
from arborcast.synth.pictures.canvas import FAINT, INK, QUIET, headline, picture
from arborcast.synth.pictures.placement import Placement, Point, place
from arborcast.synth.topology import Hop, Topology, Vertex

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_SLOW_TO_FAST = ("#9ecae1", "#4292c6", "#08519c", "#08306b")
_RANK = "#ffffff"
_SWITCH = "#fde0b6"
_ABLE = "#a1d99b"  # a switch that reduces or multicasts
_IDLE = "#d62728"
_INCH = 0.75  # per unit of the placement
_SIDE_INCHES = 14.0  # of a square as large as the picture may be


def draw_topology(topology: Topology, path: Path | str, idle: Collection[Hop] = ()) -> None:
    """Draw ranks, switches and links to an SVG or PNG file.

    A line without arrow heads is a link each way of the same bandwidth; its width and colour say which. Links
    that are named `idle` are red and broken.

    Raises:
        InputError: an unknown suffix, no matplotlib, or a file that cannot be written.
    """
    if topology.parallels:  # a line for each pair, with what its links have together
        switches = topology.switches[: len(topology.switches) - len(topology.parallels)]
        together = (replace(link, latency_us=Fraction(0)) for link in topology.cables)
        topology = Topology.build(topology.name, topology.ranks, together, switches)
    placement = place(topology)
    xs, ys = zip(*placement.points.values(), strict=True)
    width, height = max(xs) - min(xs) + 2, max(ys) - min(ys) + 2
    # What is wide and low, as rows of ranks are, may be wider than what is as high as wide.
    scale = min(_INCH, _SIDE_INCHES / math.sqrt(width * height), 2 * _SIDE_INCHES / max(width, height))
    rates = sorted({link.bandwidth for link in topology.links})
    size = (max(width * scale, 3.6) + 1.6, max(height * scale, 2.5) + 0.4)
    with picture(path, *size) as (figure, (axes,)):
        axes.set_aspect("equal")
        axes.set_axis_off()
        axes.set_xlim(min(xs) - 1, max(xs) + 1)
        axes.set_ylim(min(ys) - 1, max(ys) + 1)
        _draw_groups(axes, placement)
        _draw_links(axes, topology, placement, rates, scale, frozenset(idle))
        _draw_vertices(axes, topology, placement, scale)
        _draw_legend(figure, topology, rates, bool(idle))
        headline(figure, f"{topology.name}: {counted(topology.ranks, 'rank')}, {_describe_links(topology)}")


def _draw_groups(axes: Axes, placement: Placement) -> None:
    from matplotlib.patches import Circle

    for group in placement.groups:
        points = [placement.points[vertex] for vertex in group]
        centre = (sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points))
        radius = max(math.dist(point, centre) for point in points) + 0.5
        axes.add_patch(Circle(centre, radius, facecolor="#f5f5f5", edgecolor=FAINT, zorder=0))


def _draw_links(
    axes: Axes,
    topology: Topology,
    placement: Placement,
    rates: Sequence[Fraction],
    scale: float,
    idle: Collection[Hop],
) -> None:
    from matplotlib.patches import FancyArrowPatch

    crowded = min(1.0, scale / _INCH)
    for link in topology.links:
        there, back = (link.src, link.dst), (link.dst, link.src)
        twin = topology.bandwidth.get(back)
        alike = twin == link.bandwidth and (there in idle) == (back in idle)
        if alike and link.src > link.dst:
            continue
        axes.add_patch(
            FancyArrowPatch(
                placement.points[link.src],
                placement.points[link.dst],
                connectionstyle=f"arc3,rad={_bow(*there, placement, apart=twin is not None and not alike)}",
                arrowstyle="-" if alike else "-|>",
                mutation_scale=8 * crowded,
                shrinkA=0,
                shrinkB=0 if alike else 10 * crowded,
                linewidth=_line_width(link.bandwidth, rates) * max(0.4, crowded),
                color=_IDLE if there in idle else _colour(link.bandwidth, rates),
                linestyle="--" if there in idle else "-",
                zorder=1,
            )
        )


def _bow(src: Vertex, dst: Vertex, placement: Placement, *, apart: bool) -> float:
    """How far a line bows: opposite links that differ bow apart, long ways of a grid bow round the others."""
    start, end = placement.points[src], placement.points[dst]
    if placement.is_grid and math.dist(start, end) > 2 * 1.6 - 0.1:
        return 0.18 if _points_away(start, end) else -0.18
    return 0.12 if apart else 0.0


def _points_away(start: Point, end: Point) -> bool:
    """Whether a bow to the right of the way from start to end leads away from the middle."""
    (x, y), (dx, dy) = (
        ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2),
        (end[0] - start[0], end[1] - start[1]),
    )
    return x * dy - y * dx >= 0


def _line_width(bandwidth: Fraction, rates: Sequence[Fraction]) -> float:
    return 1.2 + 3.2 * math.sqrt(bandwidth / rates[-1]) if len(rates) > 1 else 2.0


def _colour(bandwidth: Fraction, rates: Sequence[Fraction]) -> str:
    if len(rates) == 1:
        return _SLOW_TO_FAST[1]
    position = rates.index(bandwidth) / (len(rates) - 1)
    return _SLOW_TO_FAST[round(position * (len(_SLOW_TO_FAST) - 1 if len(rates) > 2 else 2))]


def _draw_vertices(axes: Axes, topology: Topology, placement: Placement, scale: float) -> None:
    size = (26 * min(1.0, scale / _INCH)) ** 2 * 0.6
    font = max(3.0, 9 * min(1.0, scale / _INCH))
    for vertex, (x, y) in placement.points.items():
        is_switch, is_able = topology.is_switch(vertex), topology.ranks <= vertex < topology.holders
        axes.scatter(
            [x],
            [y],
            s=size,
            marker="o" if not is_switch else "h" if is_able else "s",
            facecolor=_RANK if not is_switch else _ABLE if is_able else _SWITCH,
            edgecolor=QUIET if is_switch and not is_able else INK,
            linewidth=1.0 * min(1.0, scale / _INCH),
            zorder=2,
        )
        if is_switch:
            axes.annotate(
                str(topology.label(vertex)),
                (x, y),
                xytext=(0, -math.sqrt(size) / 2 - 2),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=0.8 * font,
                color=INK,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.75},
                zorder=3,
            )
        else:
            axes.text(x, y, str(vertex), ha="center", va="center", fontsize=font, zorder=3)


def _draw_legend(figure: Figure, topology: Topology, rates: Sequence[Fraction], has_idle: bool) -> None:
    from matplotlib.lines import Line2D

    shown = rates if len(rates) <= 8 else [rates[0], rates[len(rates) // 2], rates[-1]]
    each_way = " each way" if topology.is_symmetric else ""
    handles = [
        Line2D(
            [],
            [],
            color=_colour(rate, rates),
            linewidth=_line_width(rate, rates),
            label=_rate(rate) + each_way,
        )
        for rate in reversed(shown)
    ]
    if has_idle:
        handles.append(Line2D([], [], color=_IDLE, linestyle="--", label="carries nothing"))
    handles.append(_marker("o", _RANK, INK, "rank"))
    able = topology.switches[: topology.holders - topology.ranks]
    if able:
        handles.append(_marker("h", _ABLE, INK, "switch that reduces or multicasts"))
    if len(able) < len(topology.switches):
        handles.append(_marker("s", _SWITCH, QUIET, "switch"))
    figure.legend(handles=handles, loc="outside right center", fontsize=8, handlelength=1.8)


def _marker(marker: str, face: str, edge: str, label: str) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D(
        [],
        [],
        linestyle="none",
        marker=marker,
        markersize=9,
        markerfacecolor=face,
        markeredgecolor=edge,
        label=label,
    )


def _rate(rate: Fraction) -> str:
    return f"{float(rate):.4g} GB/s"


def _describe_links(topology: Topology) -> str:
    links = f"{counted(len(topology.links), 'directed link')}"
    return f"{counted(len(topology.switches), 'switch')}, {links}" if topology.switches else links
