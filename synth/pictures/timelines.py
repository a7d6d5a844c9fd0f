"""The timeline of a simulated run: a row per link or adder, a bar per piece or frame, a colour per chunk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from arborcast.synth.formats.sizes import format_size
from arborcast.synth.pictures.canvas import PALETTE, QUIET, check_path, headline, picture
from arborcast.synth.schedule import Schedule
from arborcast.synth.simulation.simulator import simulate, timeline
from arborcast.synth.simulation.timing import Occupation, join_touching
from arborcast.synth.topology import Hop

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LINKS = 48
MAX_BARS = 4000


def draw_timeline(
    schedule: Schedule,
    size_bytes: int,
    path: Path | str,
    *,
    pieces: int | None = None,
    max_links: int = MAX_LINKS,
) -> None:
    """Draw when each link carries what, and when the adder of each switch adds what.

    Without `pieces` the simulator chooses; of more links than `max_links` those that are busy longest are
    shown.

    Raises:
        InputError: a wrong size, an unknown suffix, no matplotlib, or the file cannot be written.
    """
    check_path(path)
    timing = simulate(schedule, size_bytes, pieces=pieces)
    every = timeline(schedule, size_bytes, pieces=timing.pieces)
    passing = {link: seen for link, seen in every.items() if seen}
    busy = {link: sum(one.end_us - one.start_us for one in seen) for link, seen in passing.items()}
    shown = sorted(sorted(passing, key=lambda link: (-busy[link], link))[:max_links])
    with picture(path, 10, 1.5 + 0.19 * len(shown)) as (figure, (axes,)):
        edges = sum(len(passing[link]) for link in shown) <= MAX_BARS
        for row, link in enumerate(shown):
            bars = passing[link] if edges else join_touching(passing[link])
            _draw_row(axes, row, bars, edges, f"{100 * busy[link] / timing.time_us:.0f} %", timing.time_us)
        _label_rows(axes, schedule, shown, timing.time_us)
        unused = sum(src != dst for src, dst in every.keys() - passing.keys())
        notes = [
            f"The figure at the end of a row is the part of the time that the link is busy; "
            f"each chunk has a colour{' (colours repeat)' if len(schedule.chunks) > len(PALETTE) else ''}.",
            f"{unused} links carry nothing." if unused else "",
            f"{len(passing) - len(shown)} links that are busy for less are left out."
            if len(passing) > len(shown)
            else "",
        ]
        headline(
            figure,
            f"{schedule.collective.kind} of {format_size(size_bytes)} on {schedule.topology.name}: "
            f"{timing.time_us:.4g} us, {timing.pieces} piece{'s' if timing.pieces > 1 else ''} per chunk",
            " ".join(note for note in notes if note),
        )


def _draw_row(
    axes: Axes, row: int, bars: Sequence[Occupation], edges: bool, share: str, end_us: float
) -> None:
    axes.broken_barh(
        [(bar.start_us, bar.end_us - bar.start_us) for bar in bars],
        (row - 0.4, 0.8),
        facecolors=[PALETTE[bar.chunk % len(PALETTE)] for bar in bars],
        edgecolors="white",
        linewidth=0.3 if edges else 0.0,
    )
    axes.text(1.01 * end_us, row, share, va="center", fontsize=7, color=QUIET)


def _label_rows(axes: Axes, schedule: Schedule, links: Sequence[Hop], end_us: float) -> None:
    label = schedule.topology.label
    axes.set_yticks(
        range(len(links)),
        [
            f"{label(src)} adds" if src == dst else f"{label(src)} \N{RIGHTWARDS ARROW} {label(dst)}"
            for src, dst in links
        ],
        fontsize=7,
    )
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(links) - 0.4, -0.6)
    axes.set_xlim(0, 1.06 * end_us)
    axes.axvline(end_us, color=QUIET, linewidth=0.8, linestyle=":")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("time (us)")
