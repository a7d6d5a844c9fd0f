"""The Divisible paper's sweeps as one picture: the model's curves, the published figures as stars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborcast.bench.training.divisible_paper import (
    BATCH,
    BEST,
    CALIBRATED,
    GEMM_SHARE,
    MEMORY_SHARE,
    MESSAGE_US,
    MICROBATCH_SIZES,
    TILE,
)
from arborcast.synth.pictures.canvas import FAINT, INK, PALETTE, QUIET, headline, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TICKS = (1, 2, 5, 10, 20, 40, 80)


def draw_divisible(rows: Sequence[dict[str, Any]], path: Path | str) -> None:
    """Draw what `divisible_sweeps` returned.

    Args:
        rows: of all sweeps.
        path: ends in .svg or .png.

    Raises:
        InputError: the picture cannot be written.
    """
    with picture(path, 10.5, 6.4, rows=2, columns=3) as (figure, axes):
        _microbatches(axes[0], rows)
        _optima(axes[1], rows)
        _bandwidth(axes[2], rows)
        for axis, stages in zip(axes[3:], (4, 8, 16), strict=True):
            _width(axis, rows, stages)
        for axis in axes:
            axis.set_ylim(bottom=0)
            axis.grid(True, axis="y", color=FAINT)
            axis.set_axisbelow(True)
        axes[0].set_ylabel("speed-up over 1 process")
        axes[3].set_ylabel("speed-up over the batch whole")
        headline(
            figure,
            f"32 fully connected layers, batch {BATCH}: the Divisible paper's sweeps by the simulator",
            f"calibrated on the speed-up of {CALIBRATED} processes: {MESSAGE_US:.0f} us per message and end; "
            f"assumed: {GEMM_SHARE:.0%} of the P100's arithmetic, {MEMORY_SHARE:.0%} of its memory rate, "
            f"tiles of {TILE} samples",
        )


def _microbatches(axis: Axes, rows: Sequence[dict[str, Any]]) -> None:
    mine = [row for row in rows if row["sweep"] == "microbatches"]
    counts = sorted({row["stages"] for row in mine})
    for colour, stages in zip(PALETTE[-1:] + PALETTE, counts, strict=False):
        points = [(row["microbatches"], row["speed_up"]) for row in mine if row["stages"] == stages]
        axis.plot(*zip(*points, strict=True), ".-", color=colour, linewidth=1.4, label=f"{stages}")
        if stages in BEST:
            axis.plot(*BEST[stages], "*", color=colour, markersize=12, markeredgecolor=INK, zorder=3)
    axis.set_xscale("log")
    axis.set_xticks(TICKS, [str(tick) for tick in TICKS])
    axis.minorticks_off()
    axis.set_xlabel("microbatches; star: the paper's best")
    axis.set_title("Microbatches, by processes")
    axis.legend(loc="upper left", fontsize=8, ncols=2)


def _optima(axis: Axes, rows: Sequence[dict[str, Any]]) -> None:
    mine = [row for row in rows if row["sweep"] == "best"]
    for place, row in enumerate(mine):
        axis.bar(place - 0.2, row["paper_speed_up"], 0.38, color=QUIET)
        axis.bar(place + 0.2, row["speed_up"], 0.38, color=PALETTE[4 if row["calibrated"] else 0])
        note = "set" if row["calibrated"] else f"{row['difference']:+.1%}"
        axis.annotate(
            note,
            (place, max(row["paper_speed_up"], row["speed_up"])),
            ha="center",
            va="bottom",
            fontsize=8,
            textcoords="offset points",
            xytext=(0, 2),
        )
    labels = [f"{row['stages']}\nm {row['microbatches']}" for row in mine]
    axis.set_xticks(range(len(mine)), labels)
    axis.set_xlabel("processes")
    axis.set_title("Speed-up: paper (grey), model")


def _bandwidth(axis: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for name, style, colour in (("InfiniBand", "o-", PALETTE[0]), ("NVLink", "x--", PALETTE[1])):
        points = [
            (row["microbatches"], row["time_us"] / 1e6)
            for row in rows
            if row["sweep"] == "bandwidth" and row["network"] == name
        ]
        axis.plot(*zip(*points, strict=True), style, color=colour, markersize=5, label=name)
    axis.set_xscale("log")
    axis.set_xticks(TICKS, [str(tick) for tick in TICKS])
    axis.minorticks_off()
    axis.set_xlabel("microbatches")
    axis.set_ylabel("step (s)")
    axis.set_title("Bandwidth, 4 processes")
    axis.legend(loc="upper center", fontsize=8)


def _width(axis: Axes, rows: Sequence[dict[str, Any]], stages: int) -> None:
    for colour, size in zip(PALETTE, MICROBATCH_SIZES, strict=False):
        points = [
            (row["width"], row["speed_up"])
            for row in rows
            if row["sweep"] == "width" and row["stages"] == stages and row["microbatches"] == BATCH // size
        ]
        axis.plot(*zip(*points, strict=True), ".-", color=colour, linewidth=1.4, label=f"{size}")
    axis.set_xticks(range(2000, 10001, 2000))
    axis.set_xlabel("width of the layers")
    axis.set_title(f"Width, {stages} processes")
    if stages == 4:
        axis.legend(title="samples of a microbatch", title_fontsize=8, fontsize=8, ncols=3, loc="lower right")
