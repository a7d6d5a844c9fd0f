"""The picture of a recorded run: a row per link with what its wire carried and what its receiver had."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from arborcast.bench.contest.recording import Part
from arborcast.bench.contest.timeline import Timeline
from arborcast.bench.contest.wires import Busy, joined
from arborcast.synth.formats.sizes import format_size
from arborcast.synth.pictures.canvas import FAINT, INK, PALETTE, QUIET, headline, picture
from arborcast.synth.topology import Hop

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(timeline: Timeline, path: Path) -> None:
    """Draw when links were busy, and where they lost time.

    Args:
        timeline: of one run.
        path: an .svg or .png file.

    Raises:
        InputError: an unknown suffix, no matplotlib, or the file cannot be written.
    """
    hops = sorted(timeline.uses)
    received = _received(timeline)
    with picture(path, 13, 1.8 + 0.36 * len(hops)) as (figure, (axes,)):
        for row, hop in enumerate(hops):
            _draw_row(axes, row, timeline, hop, received.get(hop, []))
        _label(axes, timeline, hops)
        share = timeline.optimum_s / timeline.run_s
        headline(
            figure,
            f"{timeline.order.collective.kind} of {format_size(timeline.order.size_bytes)} by "
            f"{timeline.contender.name} on {timeline.plan.topology.name}: {timeline.run_s * 1e3:.1f} ms, "
            f"{share:.3f} of the limit",
            "Thick: what the wire carried, a colour per chunk (colours repeat). Thin: what its receiver had. "
            "Behind a row: part of the time busy; ms lost at the start, in gaps, at the end.",
        )


def _draw_row(axes: Axes, row: int, timeline: Timeline, hop: Hop, received: list[Part]) -> None:
    use = timeline.uses[hop]
    axes.barh(row, timeline.run_s * 1e3, 0.5, color=FAINT, linewidth=0)
    _bars(axes, use.busy, row - 0.25, 0.5)
    rate = timeline.rates[hop]
    used = joined(
        [Busy(part.at_s - 8 * part.size_bytes / rate, part.at_s, part.chunk) for part in received],
        within_s=0.0,
    )
    _bars(axes, used, row + 0.29, 0.14)
    lost = "  ".join(f"{each * 1e3:5.1f}" for each in (use.start_s, use.gaps_s, use.end_s))
    text = f"{100 * use.busy_s / timeline.run_s:5.1f} %  {lost}"
    axes.text(
        1.005 * timeline.run_s * 1e3, row, text, va="center", fontsize=7, color=QUIET, family="monospace"
    )


def _bars(axes: Axes, bars: tuple[Busy, ...], bottom: float, height: float) -> None:
    axes.broken_barh(
        [(1e3 * bar.start_s, 1e3 * (bar.end_s - bar.start_s)) for bar in bars],
        (bottom, height),
        facecolors=[PALETTE[bar.chunk % len(PALETTE)] for bar in bars],
        linewidth=0,
    )


def _label(axes: Axes, timeline: Timeline, hops: list[Hop]) -> None:
    label = timeline.plan.topology.label
    arrow = "\N{RIGHTWARDS ARROW}"
    axes.set_yticks(range(len(hops)), [f"{label(src)} {arrow} {label(dst)}" for src, dst in hops], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(hops) - 0.4, -0.6)
    axes.set_xlim(0, 1.17 * timeline.run_s * 1e3)
    axes.axvline(timeline.optimum_s * 1e3, color=INK, linewidth=0.9, linestyle="--")
    axes.text(timeline.optimum_s * 1e3, -0.65, "limit ", ha="right", va="bottom", fontsize=7, color=INK)
    axes.axvline(timeline.run_s * 1e3, color=QUIET, linewidth=0.8, linestyle=":")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("time (ms)")


def _received(timeline: Timeline) -> dict[Hop, list[Part]]:
    """By the last link of its way."""
    found: dict[Hop, list[Part]] = defaultdict(list)
    for trace in timeline.traces:
        for part in trace.received:
            path = timeline.plan.path(part.src, part.dst)
            found[path[-2], path[-1]].append(part)
    return found
