"""Time and bus bandwidth over message sizes: a schedule, the baselines beside it, and the bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborcast.synth.baselines.nccl_model import NOT_RUN
from arborcast.synth.certificate import Bound
from arborcast.synth.errors import InputError
from arborcast.synth.formats.sizes import format_size
from arborcast.synth.pictures.canvas import INK, PALETTE, check_path, headline, picture
from arborcast.synth.simulation.timing import Timing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osD^vPX"


def draw_sweep(
    rows_by_method: Mapping[str, Sequence[Timing]],
    path: Path | str,
    *,
    bound: Bound | None = None,
    title: str = "Simulated time and bus bandwidth over message size",
) -> None:
    """Draw time over size on the left and busbw over size on the right.

    Args:
        rows_by_method: timings of each method; the first is drawn strongest, those whose name holds
            "model" are dashed because they come from a formula.
        path: an .svg or .png file.
        bound: drawn as the line that no method can pass.
        title: says what is seen.

    Raises:
        InputError: there is nothing to draw, an unknown suffix, no matplotlib, or the file cannot be
            written.
    """
    check_path(path)
    drawn = {method: rows for method, rows in rows_by_method.items() if rows}
    if not drawn:
        raise InputError(f"picture {path}: there are no timings to draw")
    with picture(path, 10, 4.2, 1, 2) as (figure, (time_axes, rate_axes)):
        for index, (method, rows) in enumerate(drawn.items()):
            sizes = [row.bytes for row in rows]
            style: dict[str, Any] = {
                "label": method,
                "color": PALETTE[index % len(PALETTE)],
                "marker": _MARKERS[index % len(_MARKERS)],
                "markersize": 4 if index == 0 else 3,
                "linewidth": 2.2 if index == 0 else 1.2,
                "linestyle": "--" if "model" in method else "-",
                "zorder": 10 - min(index, 7),
            }
            time_axes.plot(sizes, [row.time_us for row in rows], **style)
            rate_axes.plot(sizes, [row.busbw for row in rows], **style)
        if bound is not None and bound.rate:
            _draw_bound(time_axes, rate_axes, bound, [row for rows in drawn.values() for row in rows])
        time_axes.set_yscale("log")
        time_axes.set_title("Time (us)")
        rate_axes.set_ylim(bottom=0)
        rate_axes.set_title("busbw (GB/s)")
        for axes in (time_axes, rate_axes):
            _scale_sizes(axes, sorted({row.bytes for rows in drawn.values() for row in rows}))
        figure.legend(*time_axes.get_legend_handles_labels(), loc="outside right center", fontsize=8)
        nccl = any(method.startswith("nccl-") for method in drawn)
        headline(figure, title, f"nccl: {NOT_RUN}" if nccl else "")


def _draw_bound(time_axes: Axes, rate_axes: Axes, bound: Bound, rows: Sequence[Timing]) -> None:
    sizes = sorted({row.bytes for row in rows})
    # All rows are of one collective, so that any of them tells what busbw is times algbw.
    factor = next((row.busbw / row.algbw for row in rows if row.algbw), 1.0)
    rate = float(bound.rate)
    style: dict[str, Any] = {"color": INK, "linewidth": 1.0, "linestyle": ":", "zorder": 1}
    time_axes.plot(sizes, [size / (1000 * rate) for size in sizes], label="bound", **style)
    rate_axes.axhline(rate * factor, **style)


def _scale_sizes(axes: Axes, sizes: Sequence[int]) -> None:
    """A logarithmic axis with at most seven ticks, at sizes that were simulated."""
    axes.set_xscale("log")
    every = -(-len(sizes) // 7)
    ticks = sizes[::-1][::every]
    axes.set_xticks(ticks, [format_size(size) for size in ticks], rotation=30, ha="right")
    axes.minorticks_off()
    axes.grid(visible=True)
    axes.set_xlabel("buffer")
