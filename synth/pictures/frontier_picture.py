"""The frontier between latency and bandwidth: steps across, rounds per chunk up, a staircase of schedules."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from arborcast.synth.pictures.canvas import INK, LETTERS_PER_INCH, PALETTE, QUIET, headline, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from arborcast.synth.chunks.allreduce.points import Point
    from arborcast.synth.chunks.frontier import Frontier

_MOST_UPRIGHT = 13
"""Steps of the axis up to which labels fit beside each other; on a longer one they are tilted."""


def draw_frontier(frontier: Frontier, path: Path | str, *, title: str) -> None:
    """Draw the points with their (C, S, R), what they dominate, and what is proved to be out of reach.

    Without points only the static limit is drawn.

    Raises:
        InputError: an unknown suffix, no matplotlib, or the file cannot be written.
    """
    points = frontier.points
    steps = [point.steps for point in points]
    span = max(steps) - min(steps) + 1 if steps else 1
    width = min(14.0, max(6.4, 2.0 + 0.95 * span))
    with picture(path, width, 4.4) as (figure, (axes,)):
        lowest, highest = _heights(frontier)
        axes.set_ylim(lowest, highest)
        if points:
            _draw_stairs(axes, points, highest)
            _draw_points(axes, points, tilted=span > _MOST_UPRIGHT)
            axes.set_xlim(min(steps) - 0.4, max(steps) + 1.0)
            axes.set_xticks(range(min(steps), max(steps) + 1))
            axes.legend(loc="upper right", fontsize=8)
        else:
            axes.set_xticks([])
            axes.text(0.5, 0.5, "no schedule found", transform=axes.transAxes, ha="center", color=QUIET)
        _draw_static_limit(axes, frontier.static_ratio)
        axes.set_xlabel("steps S (latency)")
        axes.set_ylabel("rounds per chunk R/C (bandwidth)")
        ended = f" It ends here: {frontier.why_stopped}." if frontier.why_stopped else ""
        note = f"Each point is a schedule of (C chunks, S steps, R rounds).{ended}"
        headline(figure, title, fill(note, int(LETTERS_PER_INCH * width)))


def _ratio(point: Point) -> Fraction:
    return Fraction(point.rounds, point.chunks)


def _heights(frontier: Frontier) -> tuple[float, float]:
    """Room for the labels above the first point, and for that of the static limit below its line."""
    values = [float(frontier.static_ratio)]
    values += [float(value) for point in frontier.points for value in (_ratio(point), point.least)]
    lowest, highest = min(values), max(values)
    span = max(highest - lowest, 0.2 * highest)
    return max(0.0, lowest - 0.18 * span), highest + 0.3 * span


def _draw_stairs(axes: Axes, points: Sequence[Point], highest: float) -> None:
    """The best known R/C in at most so many steps, and above it what is dominated."""
    across = [point.steps for point in points]
    up = [float(_ratio(point)) for point in points]
    across.append(across[-1] + 1)  # more steps never harm
    up.append(up[-1])
    axes.fill_between(across, up, highest, step="post", color=PALETTE[0], alpha=0.07, linewidth=0)
    axes.step(across, up, where="post", color=PALETTE[0], linewidth=1.4, alpha=0.6, zorder=2)


def _draw_points(axes: Axes, points: Sequence[Point], *, tilted: bool) -> None:
    style: dict[str, Any] = {"linestyle": "none", "color": PALETTE[0], "zorder": 4}
    disc: dict[str, Any] = style | {"marker": "o", "markersize": 7, "markeredgewidth": 1.6}
    proved = [point for point in points if point.is_proved]
    others = [point for point in points if not point.is_proved]
    below = [point for point in points if point.least < _ratio(point)]
    if proved:
        label = "proved: the least R/C in so many steps"
        axes.plot(_steps(proved), list(map(float, map(_ratio, proved))), label=label, **disc)
    if others:
        label = "found, not proved in full"
        disc["markerfacecolor"] = "white"
        axes.plot(_steps(others), list(map(float, map(_ratio, others))), label=label, **disc)
    if below:
        limits = [float(point.least) for point in below]
        axes.vlines(
            _steps(below),
            limits,
            list(map(float, map(_ratio, below))),
            color=PALETTE[0],
            linewidth=1.2,
            zorder=3,
        )
        label = "proven limit of R/C in so many steps"
        axes.plot(_steps(below), limits, marker="_", markersize=9, markeredgewidth=1.6, label=label, **style)
    for point in points:
        _label(axes, point, tilted=tilted)


def _steps(points: Sequence[Point]) -> list[int]:
    return [point.steps for point in points]


def _label(axes: Axes, point: Point, *, tilted: bool) -> None:
    """Up and to the right of a point the picture is empty: the stairs run along its level and then down."""
    least = f", limit {point.least}" if point.least != _ratio(point) else ""
    name = f"({point.chunks}, {point.steps}, {point.rounds})"
    value = f"{_ratio(point)}{least}"
    style: dict[str, Any] = {"textcoords": "offset points", "ha": "left", "va": "bottom", "zorder": 5}
    place = (point.steps, float(_ratio(point)))
    if tilted:
        text = f"{name}  {value}"
        axes.annotate(text, place, (6, 5), fontsize=7, rotation=40, rotation_mode="anchor", **style)
        return
    axes.annotate(name, place, (6, 15), fontsize=8.5, fontweight="bold", **style)
    axes.annotate(value, place, (6, 5), fontsize=7.5, color=QUIET, **style)


def _draw_static_limit(axes: Axes, ratio: Fraction) -> None:
    axes.axhline(float(ratio), color=INK, linewidth=1.0, linestyle="--", zorder=1)
    axes.annotate(
        f"static limit {ratio}, in any number of steps",
        (0.0, float(ratio)),
        (4, -6),
        xycoords=axes.get_yaxis_transform(),
        textcoords="offset points",
        ha="left",
        va="top",
        fontsize=8,
        color=INK,
    )
