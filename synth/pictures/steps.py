"""A step-synchronous schedule in space and time: ranks in rows, steps in columns, sends as ribbons.

A ribbon is what one rank sends another in one step of the chunks of one owner, as wide as there are chunks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from arborcast.synth.errors import InputError
from arborcast.synth.formats.words import counted
from arborcast.synth.pictures.canvas import (
    INK,
    LETTERS_PER_INCH,
    PALETTE,
    QUIET,
    check_path,
    headline,
    picture,
)
from arborcast.synth.schedule import Schedule, Transfer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.path import Path as Outline

MAX_STEPS = 16
"""Steps that are drawn of a longer schedule."""

_PORT = 0.78
"""Height of the fullest bundle at a rank, in rows."""

_MARGIN = 0.035
"""Room between a rank's bar and the ribbons at it, in columns."""

_DARK, _LIGHT = 0.5, 0.5
"""How far the second and third use of the palette are blended with black and with white."""


@dataclass(frozen=True, slots=True)
class Ribbon:
    """Chunks of one colour from rank to rank in one step; `start` and `end` are its tops, down from 0."""

    step: int
    colour: int
    chunks: int
    start: float
    end: float


def draw_steps(schedule: Schedule, path: Path | str, *, max_steps: int = MAX_STEPS) -> None:
    """Draw which rank sends how much to which in each step, and whose data it is.

    Of a schedule with more steps, the first `max_steps` are drawn.

    Raises:
        InputError: the schedule has no rounds or no transfers, an unknown suffix, no matplotlib, or the
            file cannot be written.
    """
    check_path(path)
    if schedule.rounds is None:
        raise InputError(
            f"picture {path}: the schedule must have rounds, its steps only order; draw its trees"
        )
    if not schedule.transfers:
        raise InputError(f"picture {path}: there are no transfers to draw")
    steps = min(len(schedule.rounds), max_steps)
    shown = [transfer for transfer in schedule.transfers if transfer.step < steps]
    by_owner = len({chunk.owner for chunk in schedule.chunks}) > 1
    unit = _PORT / _fullest(shown)
    ranks = schedule.topology.ranks
    row = 0.66 if ranks <= 16 else max(0.3, 11 / ranks)
    width = 0.8 + max(5.6, steps * max(1.5, min(3.2, 14 / steps)))
    with picture(path, width, 1.7 + row * ranks) as (figure, (axes,)):
        _draw_ribbons(axes, list(ribbons_of(shown, _colours_of(schedule, by_owner), unit)), unit)
        _draw_ranks(axes, ranks, steps, by_owner)
        for step in range(steps):
            _head(axes, schedule, step)
        axes.set_xlim(-0.14, steps + 0.1)
        axes.set_ylim(ranks - 0.45, -1.05)
        axes.set_axis_off()
        headline(
            figure, _title(schedule), fill(_note(schedule, steps, by_owner), int(LETTERS_PER_INCH * width))
        )


def _fullest(transfers: Iterable[Transfer]) -> int:
    """The most chunks that leave or reach one rank in one step."""
    seen: Counter[tuple[str, int, int]] = Counter()
    for transfer in transfers:
        seen["out", transfer.step, transfer.src] += 1
        seen["in", transfer.step, transfer.dst] += 1
    return max(seen.values())


def _colours_of(schedule: Schedule, by_owner: bool) -> list[int]:
    """The number of the colour of each chunk: its owner's, or where all have one owner its own."""
    return [chunk.owner if by_owner else index for index, chunk in enumerate(schedule.chunks)]


def ribbons_of(transfers: Iterable[Transfer], colours: Sequence[int], unit: float) -> Iterator[Ribbon]:
    """Ribbons stacked at both ends: what leaves a rank in the order of its targets, and the reverse.

    Each chunk has the number of a colour and the height `unit`, in rows.
    """
    bundles: Counter[tuple[int, int, int, int]] = Counter(
        (transfer.step, transfer.src, transfer.dst, colours[transfer.chunk]) for transfer in transfers
    )
    leaving = _tops({key: (key[0], key[1]) for key in sorted(bundles)}, bundles, unit)
    arriving = _tops(
        {key: (key[0], key[2]) for key in sorted(bundles, key=lambda key: (key[0], key[2], key[1], key[3]))},
        bundles,
        unit,
    )
    for key in sorted(bundles):
        yield Ribbon(key[0], key[3], bundles[key], leaving[key], arriving[key])


def _tops(
    ports: Mapping[tuple[int, int, int, int], tuple[int, int]],
    bundles: Mapping[tuple[int, int, int, int], int],
    unit: float,
) -> dict[tuple[int, int, int, int], float]:
    """Where each bundle begins at its port (step, rank), one below the other around the rank's row."""
    heights: dict[tuple[int, int], float] = defaultdict(float)
    for key, port in ports.items():
        heights[port] += unit * bundles[key]
    tops = {}
    reached = {port: port[1] - height / 2 for port, height in heights.items()}
    for key, port in ports.items():
        tops[key] = reached[port]
        reached[port] += unit * bundles[key]
    return tops


def _draw_ribbons(axes: Axes, ribbons: Sequence[Ribbon], unit: float) -> None:
    from matplotlib.collections import PathCollection

    axes.add_collection(
        PathCollection(
            [_outline(ribbon, unit) for ribbon in ribbons],
            facecolors=[colour(ribbon.colour) for ribbon in ribbons],
            edgecolors="face",  # a steep ribbon is thin, and stays visible by its edge
            linewidths=0.3,
            alpha=0.82,
        )
    )


def _outline(ribbon: Ribbon, unit: float) -> Outline:
    from matplotlib.path import Path as Outline

    left, right = ribbon.step + _MARGIN, ribbon.step + 1 - _MARGIN
    bend = (right - left) * 0.45
    thick = unit * ribbon.chunks
    start, end = ribbon.start, ribbon.end
    points = [
        (left, start),
        *((left + bend, start), (right - bend, end), (right, end)),
        (right, end + thick),
        *((right - bend, end + thick), (left + bend, start + thick), (left, start + thick)),
        (left, start),
    ]
    move, line, curve, close = Outline.MOVETO, Outline.LINETO, Outline.CURVE4, Outline.CLOSEPOLY
    return Outline(points, [move, *[curve] * 3, line, *[curve] * 3, close])


def _draw_ranks(axes: Axes, ranks: int, steps: int, by_owner: bool) -> None:
    """A bar for each rank before, between and after the steps; the first ones are the key to the colours."""
    for rank in range(ranks):
        for step in range(steps + 1):
            of_owner = by_owner and step == 0
            axes.plot(
                [step, step],
                [rank - 0.43, rank + 0.43],
                color=colour(rank) if of_owner else QUIET,
                linewidth=5 if of_owner else 2,
                solid_capstyle="butt",
            )
        axes.text(-0.05, rank, str(rank), ha="right", va="center", fontsize=9, fontweight="bold")
        axes.text(steps + 0.03, rank, str(rank), ha="left", va="center", fontsize=9, color=QUIET)


def _head(axes: Axes, schedule: Schedule, step: int) -> None:
    assert schedule.rounds is not None, "checked by the caller"
    rounds = schedule.rounds[step]
    passing = [transfer for transfer in schedule.transfers if transfer.step == step]
    unit = schedule.unit or schedule.topology.bandwidth_unit
    capacity = rounds * sum(rate // unit for rate in schedule.topology.bandwidth.values())
    busy = sum(len(transfer.hops) for transfer in passing) / capacity
    reduces = {transfer.reduce for transfer in passing} == {True}
    axes.text(
        step + 0.5,
        -0.82,
        f"step {step + 1}: {counted(rounds, 'round')}{', reduces' if reduces else ''}",
        ha="center",
        va="bottom",
        fontsize=9,
        fontweight="bold",
        color=INK,
    )
    axes.text(
        step + 0.5,
        -0.78,
        f"{counted(len(passing), 'send')}, {100 * busy:.0f} % of the links",
        ha="center",
        va="top",
        fontsize=7.5,
        color=QUIET,
    )


def colour(number: int) -> tuple[float, float, float]:
    """The palette, then the palette darker, then lighter, and again."""
    from matplotlib.colors import to_rgb

    other, part = ((0, 0.0), (0, _DARK), (1, _LIGHT))[number // len(PALETTE) % 3]
    pure = to_rgb(PALETTE[number % len(PALETTE)])
    red, green, blue = (value + (other - value) * part for value in pure)
    return red, green, blue


def _title(schedule: Schedule) -> str:
    rounds = schedule.rounds or ()
    counts = ((len(rounds), "step"), (sum(rounds), "round"), (len(schedule.transfers), "send"))
    return (
        f"{schedule.collective.kind} on {schedule.topology.name}: "
        f"{', '.join(counted(number, name) for number, name in counts)}"
    )


def _note(schedule: Schedule, steps: int, by_owner: bool) -> str:
    different = len(set(_colours_of(schedule, by_owner)))
    what = "the rank whose data it is" if by_owner else "the chunk"
    repeat = " (colours repeat)" if different > 3 * len(PALETTE) else ""
    parts = [f"A ribbon goes from sender to receiver, as wide as its chunks; its colour is {what}{repeat}."]
    if len(schedule.rounds or ()) > steps:
        parts.append(f"These are the first {steps} of {len(schedule.rounds or ())} steps.")
    return " ".join(parts)
