"""Predicted against measured step time over the number of microbatches: whether the cost model holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborcast.bench.training.step_formula import PipelineModel, Run, residuals
from arborcast.synth.errors import InputError
from arborcast.synth.pictures.canvas import FAINT, PALETTE, QUIET, headline, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_fit(
    model: PipelineModel,
    runs: Sequence[Run],
    path: Path | str,
    *,
    title: str = "Step time over the number of microbatches",
) -> None:
    """Draw a curve per number of stages with its measured dots, and below it how far off each dot is.

    A ring marks the fastest step of each curve within the range measured.

    Args:
        model: predicts.
        runs: measured; any numbers of stages.
        path: ends in .svg or .png.
        title: of the picture.

    Raises:
        InputError: there is no run, or the picture cannot be written.
    """
    if not runs:
        raise InputError("fit picture: must have at least one run, got none")
    stages = sorted({run.stages for run in runs})
    measured = sorted({run.microbatches for run in runs})
    unit, name = _unit(max(run.time_us for run in runs))
    with picture(path, 7.2, 4.8, rows=2) as (figure, (above, below)):
        if (grid := above.get_gridspec()) is not None:
            grid.set_height_ratios((3, 1))
        for index, count in enumerate(stages):
            colour = PALETTE[index % len(PALETTE)]
            mine = [run for run in runs if run.stages == count]
            # Dots of one m stand side by side in the lower panel, so that none hides another.
            aside = 1.012 ** (2 * index - len(stages) + 1)
            _curve(above, model, mine, range(measured[0], measured[-1] + 1), unit, colour)
            _errors(below, model, mine, aside, colour)
        above.set_ylim(bottom=0)
        above.set_ylabel(f"step ({name})")
        above.legend(title="line: model, dot: measured, ring: fastest", title_fontsize=8)
        above.tick_params(labelbottom=False)
        below.axhline(0, color=QUIET, linewidth=0.8)
        limit = 125 * max(0.01, *(abs(residual) for residual in residuals(model, runs)))
        below.set_ylim(-limit, limit)
        below.set_ylabel("error (%)")
        below.set_xlabel("microbatches m")
        for axis in (above, below):
            axis.set_xscale("log")
            axis.set_xticks(measured, [str(m) for m in measured])
            axis.minorticks_off()
            axis.set_xlim(measured[0] / 1.08, measured[-1] * 1.08)
            axis.grid(True, axis="y", color=FAINT)
        headline(figure, title, _note(model, runs))


def _curve(
    axis: Axes, model: PipelineModel, runs: Sequence[Run], curve: range, unit: float, colour: str
) -> None:
    count = runs[0].stages
    axis.plot(curve, [model.step_us(m, count) / unit for m in curve], color=colour, linewidth=1.6)
    best = min(curve, key=lambda m: model.step_us(m, count))
    ring: dict[str, Any] = {"markersize": 11, "markerfacecolor": "none", "markeredgecolor": colour}
    axis.plot(best, model.step_us(best, count) / unit, "o", **ring)
    axis.plot(
        [run.microbatches for run in runs],
        [run.time_us / unit for run in runs],
        "o",
        color=colour,
        markersize=4.5,
        label=f"{count} stage{'s' if count > 1 else ''}, best m = {best}",
    )


def _errors(axis: Axes, model: PipelineModel, runs: Sequence[Run], aside: float, colour: str) -> None:
    places = [run.microbatches * aside for run in runs]
    off = [100 * residual for residual in residuals(model, runs)]
    axis.plot(places, off, "o", color=colour, markersize=4)
    axis.vlines(places, 0, off, color=colour, linewidth=1)


def _note(model: PipelineModel, runs: Sequence[Run]) -> str:
    worst = max(abs(residual) for residual in residuals(model, runs))
    return (
        f"compute {_readable(model.compute_us)}, start of a message {_readable(model.start_us)}, "
        f"transfer of a batch {_readable(model.transfer_us)}; worst error {worst:.1%}"
    )


def _unit(time_us: float) -> tuple[float, str]:
    return (1e6, "s") if time_us >= 2e6 else (1e3, "ms") if time_us >= 2e3 else (1.0, "us")


def _readable(time_us: float) -> str:
    unit, name = _unit(time_us)
    digits = 0 if time_us == 0 else max(0, 2 - math.floor(math.log10(time_us / unit)))
    return f"{time_us / unit:.{digits}f} {name}"
