"""The figure of the size sweeps: a panel per machine, our speed-up over the best other method against size.

Below the line at 1 we lose, and that half is shaded. A marker is drawn wherever there is a row; large
machines have few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborcast.synth.baselines.nccl_model import NOT_RUN
from arborcast.synth.errors import InputError
from arborcast.synth.formats.sizes import format_size
from arborcast.synth.pictures.canvas import INK, PALETTE, QUIET, check_path, headline, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 4
TICKS = tuple(1 << power for power in (10, 16, 20, 24, 30))
STYLES: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("allreduce", "selection-with-overhead"): {"color": PALETTE[0], "marker": "o", "linestyle": "-"},
    ("allreduce", "selection"): {"color": PALETTE[0], "marker": "", "linestyle": ":"},
    ("allgather", "selection-with-overhead"): {"color": PALETTE[1], "marker": "s", "linestyle": "-"},
    ("allgather", "selection"): {"color": PALETTE[1], "marker": "", "linestyle": ":"},
}
NAMES = {"selection-with-overhead": "choice with overhead known", "selection": "choice by links only"}


def draw(rows: Sequence[Mapping[str, Any]], path: Path | str, *, over: str = "speed_up_over_nccl") -> None:
    """Draw the rows of a sweep.

    Args:
        rows: of `bench.sweeps`, of any number of machines, which keep their order.
        path: an .svg or .png file.
        over: the column drawn: "speed_up_over_nccl", or "speed_up" for the best of all others.

    Raises:
        InputError: there is nothing to draw, an unknown suffix, no matplotlib, or the file cannot be
            written.
    """
    check_path(path)
    drawn = [row for row in rows if row.get(over) is not None]
    machines = list(dict.fromkeys(row["topology"] for row in drawn))
    if not machines:
        raise InputError(f"picture {path}: no row has a {over} to draw")
    columns = min(COLUMNS, len(machines))
    lines = -(-len(machines) // columns)
    with picture(path, 2.7 * columns + 0.6, 2.1 * lines + 1.3, lines, columns) as (figure, panels):
        every = list(panels)
        low = min(0.7, *(row[over] for row in drawn)) * 0.9
        high = max(2.0, *(row[over] for row in drawn)) * 1.1
        for axes, machine in zip(every, machines, strict=False):
            _panel(axes, [row for row in drawn if row["topology"] == machine], over, low, high)
        for axes in every[len(machines) :]:
            axes.set_axis_off()
        handles = {
            label: handle
            for axes in every[: len(machines)]
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, fontsize=8)
        headline(figure, _title(over))


def _title(over: str) -> str:
    whom = f"the better of {NOT_RUN}" if over == "speed_up_over_nccl" else "the best other method"
    return f"Speed-up over {whom}\nsimulated, no NVLS, its overhead on both sides; we lose where it is shaded"


def _panel(axes: Axes, rows: Sequence[Mapping[str, Any]], over: str, low: float, high: float) -> None:
    axes.axhspan(low, 1, color="#f6dcd2", zorder=0)
    axes.axhline(1, color=INK, linewidth=1.2, zorder=2)
    for (kind, method), style in STYLES.items():
        points = [
            (row["bytes"], row[over]) for row in rows if (row["collective"], row["method"]) == (kind, method)
        ]
        if points:
            label = f"{kind}, {NAMES[method]}"
            axes.plot(*zip(*points, strict=True), label=label, markersize=3.5, linewidth=1.4, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_ylim(low, high)
    axes.set_xlim(TICKS[0] / 1.5, TICKS[-1] * 1.5)
    axes.set_xticks(TICKS, [format_size(size).replace(" ", "").replace("iB", "") for size in TICKS])
    between = (0.75, 1.5, 3) if high < 4 else ()
    marks = sorted(mark for mark in (0.25, 0.5, 1, 2, 4, 8, 16, 32, *between) if low <= mark <= high)
    axes.set_yticks(marks, [f"{mark:g}" for mark in marks])
    axes.minorticks_off()
    axes.grid(visible=True, zorder=1)
    first = rows[0]
    axes.set_title(f"{short_name(first['topology'])}")
    axes.text(
        0.98,
        0.97,
        f"{first['ranks']} ranks",
        transform=axes.transAxes,
        ha="right",
        va="top",
        color=QUIET,
        fontsize=8,
    )


def short_name(spec: str) -> str:
    """A machine in a few letters: `2 x dgx-a100`, `torus 8x8`."""
    name, _, arguments = spec.partition(":")
    first = arguments.partition(",")[0]
    if first.startswith("boxes="):
        return f"{first.removeprefix('boxes=')} x {name}"
    return f"{name} {first}".strip()
