"""Steps of training as pictures: a row per rank, predicted above measured on one axis of time.

A row shows what the rank computes, lighter for later ones of several stages; the thin bar below it shows the
messages on their way from it. While the rank computes nothing, an allreduce takes the whole row.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from arborcast.pipeline.simulation.timeline import Interval, Timeline
from arborcast.pipeline.stages import Plan
from arborcast.synth.errors import InputError
from arborcast.synth.pictures.canvas import FAINT, INK, PALETTE, QUIET, check_path, headline, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 12
"""Inches of a picture of few boxes per row."""

MAX_WIDTH = 18

DIGIT = 0.07
"""Inches of a digit with the room around it; a number that stands upright needs no more."""

MAX_EDGED = 600
"""Boxes of a row that still get an edge; of more, edges would be all there is to see."""


class Look(NamedTuple):
    """How a kind of interval is drawn: its colour, that of its number, its place and depth in the row."""

    colour: str
    ink: str
    top: float
    height: float
    depth: int


COMPUTES = (-0.42, 0.6)
MESSAGES = (0.22, 0.18)
ALL = (-0.42, 0.82)
CENTRE = COMPUTES[0] + COMPUTES[1] / 2

LOOKS = {
    "forward": Look(PALETTE[0], "white", *COMPUTES, depth=4),
    "backward": Look(PALETTE[4], INK, *COMPUTES, depth=4),
    "weights": Look(PALETTE[1], "white", *COMPUTES, depth=4),
    "update": Look(PALETTE[2], "white", *COMPUTES, depth=4),
    "allreduce": Look(PALETTE[3], "white", *ALL, depth=3),
    "communication": Look(PALETTE[6], "white", *MESSAGES, depth=4),
    "waiting": Look("#ececec", INK, *COMPUTES, depth=2),
}
"""Of every kind in `pipeline.simulation.timeline.KINDS`, in the order of the legend."""

NUMBERED = ("forward", "backward", "weights")


class Axis(NamedTuple):
    """The axis of time: its end and its unit."""

    end_us: float
    unit: str
    unit_us: float


def draw_timelines(
    timelines: Mapping[str, Timeline],
    path: Path | str,
    *,
    plan: Plan | None = None,
    title: str = "",
) -> None:
    """Draw steps one above the other, on the same axis of time.

    Args:
        timelines: by what they are called, such as "predicted" and "measured"; the first is what the others
            are compared with.
        path: an .svg or .png file.
        plan: what the step carried out; its ranks are then sorted by stage and its stages named.
        title: of the picture; "" for one that says what the plan is.

    Raises:
        InputError: there is nothing to draw, an unknown suffix, no matplotlib, or the file cannot be written.
    """
    check_path(path)
    if not timelines:
        raise InputError(f"picture {path}: must show at least one timeline, got none")
    for name, timeline in timelines.items():
        if not timeline.time_us > 0:
            raise InputError(
                f"picture {path}: timeline {name} must last longer than 0 us, got {timeline.time_us}"
            )
    rows = rows_of(timelines.values(), plan)
    axis = axis_of(max(timeline.time_us for timeline in timelines.values()))
    height = 1.3 + len(timelines) * (0.55 + row_height(len(rows)) * len(rows))
    with picture(path, width_for(timelines.values()), height, len(timelines)) as (figure, every):
        for axes, name in zip(every, timelines, strict=True):
            prepare(axes, rows, plan, axis)
            axes.set_title(_caption(name, timelines, axis))
        every[-1].set_xlabel(f"time ({axis.unit})")
        legend(figure, (kind for timeline in timelines.values() for kind in kinds_of(timeline)))
        headline(
            figure,
            title or (title_of(plan) if plan else "A step of training"),
            "The figure at the end of a row is the part of the step in which the rank computes; "
            "figures in boxes are microbatches"
            + (", lighter boxes the later stages of a rank." if plan and _shares_ranks(plan) else "."),
        )
        figure.draw_without_rendering()  # boxes know their width once the layout is made
        for axes, timeline in zip(every, timelines.values(), strict=True):
            draw_rows(axes, timeline, rows, axis)


def rows_of(timelines: Iterable[Timeline], plan: Plan | None) -> tuple[int, ...]:
    """The ranks to show: those of the plan by their stages, then others that do something, by number."""
    planned = plan.ranks if plan else ()
    seen = {interval.rank for timeline in timelines for interval in timeline.intervals}
    return (*planned, *sorted(seen - set(planned)))


def width_for(timelines: Iterable[Timeline]) -> float:
    """Inches of a picture: more where the rows have many boxes."""
    boxes = max(
        number
        for timeline in timelines
        for number in Counter(it.rank for it in timeline.intervals if it.kind in NUMBERED).values()
    )
    return min(MAX_WIDTH, max(WIDTH, boxes * 1.2 * DIGIT + 2))


def row_height(rows: int) -> float:
    """Inches of a row."""
    return min(0.34, max(0.14, 6 / rows))


def axis_of(end_us: float) -> Axis:
    """The axis for a step of such a length."""
    for unit, unit_us in (("s", 1e6), ("ms", 1e3)):
        if end_us >= 10 * unit_us:
            return Axis(end_us, unit, unit_us)
    return Axis(end_us, "us", 1.0)


def prepare(axes: Axes, rows: Sequence[int], plan: Plan | None, axis: Axis) -> None:
    """Name the rows, part the stages and set the limits, so that the layout can be made."""
    names = [f"rank {rank}" for rank in rows]
    if plan:
        for index, worker in enumerate(plan.workers):
            first = rows.index(worker.ranks[0])
            names[first] = f"stage {', '.join(map(str, worker.stages))}  {names[first]}"
            if index:
                axes.axhline(first - 0.5, color=FAINT, linewidth=0.8, zorder=1)
    as_rows(axes, names, CENTRE, min(8, 50 * row_height(len(rows))))
    axes.set_xlim(0, 1.05 * axis.end_us / axis.unit_us)


def as_rows(
    axes: Axes, names: Sequence[str], centre: float = 0.0, fontsize: float = 8, label: str = ""
) -> None:
    """Name rows from the top down.

    Args:
        axes: of the rows.
        names: of them.
        centre: of what is drawn in a row, beside its number.
        fontsize: of names.
        label: of the other axis, along which values are read by a grid; "" for none.
    """
    axes.set_yticks([row + centre for row in range(len(names))], names, fontsize=fontsize)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    if label:
        axes.grid(axis="x", color=FAINT, linewidth=0.6)
        axes.set_xlabel(label)


def draw_rows(axes: Axes, timeline: Timeline, rows: Sequence[int], axis: Axis) -> None:
    """Draw what each rank does; the axes must have been prepared and their layout made."""
    by_row: dict[tuple[int, str], list[Interval]] = {}
    place = {rank: row for row, rank in enumerate(rows)}
    for interval in timeline.intervals:
        by_row.setdefault((place[interval.rank], interval.kind), []).append(interval)
    inches = axes.get_window_extent().width / axes.get_figure(root=True).dpi  # type: ignore[union-attr]
    per_us = inches / (axes.get_xlim()[1] * axis.unit_us)
    for (row, kind), intervals in by_row.items():
        _draw_kind(axes, row, kind, intervals, axis)
    for kind in NUMBERED:
        _number(axes, [it for it in timeline.intervals if it.kind == kind], place, axis, per_us)
    end = timeline.time_us
    for row, rank in enumerate(rows):
        share = f"{100 * timeline.busy_us(rank) / end:.0f} %"
        axes.text(
            1.005 * axis.end_us / axis.unit_us, row + CENTRE, share, va="center", fontsize=7, color=QUIET
        )
    axes.axvline(end / axis.unit_us, color=QUIET, linewidth=0.8, linestyle=":")


def legend(figure: Figure, kinds: Iterable[str]) -> None:
    """One legend for all rows of a picture."""
    from matplotlib.patches import Patch

    seen = set(kinds)
    handles = [Patch(facecolor=look.colour, label=kind) for kind, look in LOOKS.items() if kind in seen]
    figure.legend(
        handles=handles,
        loc="outside upper right",
        ncols=len(handles),
        fontsize=8,
        handlelength=1.2,
        columnspacing=1.4,
    )


def kinds_of(timeline: Timeline) -> set[str]:
    """Which kinds of intervals there are."""
    return {interval.kind for interval in timeline.intervals}


def title_of(plan: Plan) -> str:
    """What a plan is, in a line."""
    replicas = [len(worker.ranks) for worker in plan.workers]
    stages = f"{len(plan.stages)} stage{'s' if len(plan.stages) > 1 else ''}"
    if _shares_ranks(plan):
        stages += f", {len(plan.stages) // len(replicas)} on each rank"
    if max(replicas) > 1:
        stages += (
            f" of {', '.join(map(str, replicas))} ranks"
            if len(replicas) <= 4
            else f" on {sum(replicas)} ranks"
        )
    microbatches = f"{plan.microbatches} microbatch{'es' if plan.microbatches > 1 else ''}"
    return f"{plan.model + ': ' if plan.model else ''}{stages}, {microbatches}, order {plan.order}"


def _shares_ranks(plan: Plan) -> bool:
    return len(plan.workers) < len(plan.stages)


def _caption(name: str, timelines: Mapping[str, Timeline], axis: Axis) -> str:
    time_us = timelines[name].time_us
    first = next(iter(timelines))
    caption = f"{name}: {time_us / axis.unit_us:.4g} {axis.unit}"
    if name != first:
        ratio = timelines[first].time_us / time_us - 1
        caption += f" ({first} is {100 * abs(ratio):.1f} % {'above' if ratio > 0 else 'below'})"
    return caption


def _draw_kind(axes: Axes, row: int, kind: str, intervals: Sequence[Interval], axis: Axis) -> None:
    from matplotlib.colors import to_rgba

    look = LOOKS[kind]
    stages = sorted({it.stage for it in intervals if it.stage is not None})
    lighter: dict[int | None, float] = {
        stage: 0.5 * index / max(1, len(stages) - 1) for index, stage in enumerate(stages)
    }
    colours = [to_rgba(look.colour, 1 - lighter.get(it.stage, 0.0)) for it in intervals]
    has_edges = kind != "waiting" and len(intervals) <= MAX_EDGED
    axes.broken_barh(
        [(it.start_us / axis.unit_us, (it.end_us - it.start_us) / axis.unit_us) for it in intervals],
        (row + look.top, look.height),
        facecolors=colours,
        edgecolors="white",
        linewidth=0.4 if has_edges else 0.0,
        zorder=look.depth,
    )


def _number(
    axes: Axes, intervals: Sequence[Interval], place: Mapping[int, int], axis: Axis, inches_per_us: float
) -> None:
    """Write microbatches into boxes, upright where those are narrow; into none where most are too narrow."""
    widths = [(it.end_us - it.start_us) * inches_per_us for it in intervals]
    room = [width / DIGIT for width in widths]
    if not room or statistics.median(room) < 1:
        return
    for it, digits in zip(intervals, room, strict=True):
        if digits < 1 or it.microbatch is None:
            continue
        look = LOOKS[it.kind]
        axes.text(
            (it.start_us + it.end_us) / 2 / axis.unit_us,
            place[it.rank] + CENTRE,
            str(it.microbatch),
            ha="center",
            va="center_baseline" if digits >= len(str(it.microbatch)) else "center",
            rotation=0 if digits >= len(str(it.microbatch)) else 90,
            fontsize=6.5,
            color=look.ink,
            zorder=look.depth + 1,
        )
