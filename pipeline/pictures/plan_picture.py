"""A plan as one picture: its layers cut into stages, what a microbatch and memory cost each, and its step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from arborcast.pipeline.costs.saved_bytes import Treatment
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.pictures.timeline_picture import (
    COMPUTES,
    LOOKS,
    as_rows,
    axis_of,
    draw_rows,
    kinds_of,
    legend,
    prepare,
    row_height,
    rows_of,
    title_of,
    width_for,
)
from arborcast.pipeline.planning.memory_need import readable
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.stages import Plan, Stage
from arborcast.synth.pictures.canvas import INK, PALETTE, QUIET, check_path, headline, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from arborcast.pipeline.planning.plan_prediction import Prediction

MAX_NAMED = 40
"""Layers that are still named below their bars."""

MEMORY = {
    "parameters": PALETTE[0],
    "gradients": PALETTE[5],
    "optimizer": PALETTE[2],
    "activations": PALETTE[4],
    "boundary": PALETTE[6],
}
"""The parts of a stage's memory, from the left, and their colours."""

BYTES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


def draw_plan(
    plan: Plan,
    profile: Profile,
    prediction: Prediction,
    path: Path | str,
    *,
    batch: int | None = None,
    memory_bytes: int | None = None,
) -> None:
    """Draw a plan to be understood at a glance.

    Args:
        plan: what to draw.
        profile: of its model.
        prediction: of its step, with that batch.
        path: an .svg or .png file.
        batch: samples; None for the profile's.
        memory_bytes: the limit of each rank; None for no limit.

    Raises:
        PlanError: the plan has another number of layers than the profile.
        InputError: an unknown suffix, no matplotlib, or the file cannot be written.
    """
    check_path(path)
    if plan.depth != profile.depth:
        raise PlanError(f"plan: must have the {profile.depth} layers of {profile.model}, got {plan.depth}")
    samples = max(plan.microbatch_sizes(profile.samples if batch is None else batch))
    rows = rows_of([prediction.timeline], plan)
    axis = axis_of(prediction.time_us)
    heights = 2.3, 0.7 + 0.3 * len(plan.stages), 0.5 + row_height(len(rows)) * len(rows)
    with picture(path, width_for([prediction.timeline]), 1.0 + sum(heights)) as (figure, (only,)):
        only.remove()
        panels = figure.subplot_mosaic(
            [["layers", "layers"], ["load", "memory"], ["step", "step"]],
            height_ratios=list(heights),
        )
        prepare(panels["step"], rows, plan, axis)
        _draw_layers(panels["layers"], plan, profile, samples, figure.get_figwidth())
        _draw_load(panels["load"], plan, profile, samples)
        _draw_memory(panels["memory"], prediction, memory_bytes)
        panels["step"].set_title(
            f"predicted step: {prediction.time_us / axis.unit_us:.4g} {axis.unit}, "
            f"ranks idle {100 * prediction.bubble:.0f} % of it"
        )
        panels["step"].set_xlabel(f"time ({axis.unit})")
        legend(figure, kinds_of(prediction.timeline))
        headline(figure, title_of(plan), _note(plan, profile))
        figure.draw_without_rendering()  # boxes know their width once the layout is made
        draw_rows(panels["step"], prediction.timeline, rows, axis)


def _draw_layers(axes: Axes, plan: Plan, profile: Profile, samples: int, inches: float) -> None:
    """Time per layer, with the stages as boxes behind and what crosses between them."""
    layers = range(profile.depth)
    forward = [profile.forward_us(layer, layer + 1, samples) for layer in layers]
    backward = [profile.backward_us(layer, layer + 1, samples) for layer in layers]
    axis = axis_of(max(a + b for a, b in zip(forward, backward, strict=True)))
    low, high = ([value / axis.unit_us for value in values] for values in (forward, backward))
    axes.bar(layers, low, 0.8, color=LOOKS["forward"].colour, zorder=3)
    axes.bar(layers, high, 0.8, low, color=LOOKS["backward"].colour, zorder=3)
    top = max(a + b for a, b in zip(low, high, strict=True)) or 1.0
    per_layer = 0.9 * inches / profile.depth
    is_raised = False
    for index, stage in enumerate(plan.stages):
        if index % 2 == 0:
            axes.axvspan(stage.start - 0.5, stage.end - 0.5, color="#f3f3f3", zorder=0)
        room = per_layer * (stage.end - stage.start)
        text = f"stage {index}" if room > 0.55 else str(index)
        axes.text(_middle(stage), 1.22 * top, text, ha="center", fontsize=8, fontweight="bold", color=INK)
        if room > 0.8:
            ranks = f"{_ranks(stage.ranks)}"
            axes.text(_middle(stage), 1.08 * top, ranks, ha="center", fontsize=7, color=QUIET)
        if index:
            axes.axvline(stage.start - 0.5, color=QUIET, linewidth=0.9, linestyle="--", zorder=2)
            size = readable(profile.output_bytes(stage.start, samples))
            before = plan.stages[index - 1]
            is_raised = per_layer * (before.end - before.start) < 0.7 and index > 1 and not is_raised
            place = (1.47 if is_raised else 1.36) * top  # two labels side by side need room
            axes.text(stage.start - 0.5, place, size, ha="center", va="bottom", fontsize=7, color=PALETTE[1])
    axes.set_xlim(-0.5, profile.depth - 0.5)
    axes.set_ylim(0, 1.36 * top)
    axes.set_ylabel(f"time ({axis.unit})")
    axes.tick_params(axis="x", length=0)
    if profile.depth <= MAX_NAMED:
        names = [layer.name for layer in profile.layers]
        is_tilted = max(map(len, names)) * 0.075 > per_layer
        axes.set_xticks(
            layers, names, fontsize=7, rotation=35 if is_tilted else 0, ha="right" if is_tilted else "center"
        )
    axes.set_title(
        f"layers of {profile.model}: time of a microbatch of {samples} sample{'' if samples == 1 else 's'}, "
        "bytes that cross between stages (one way)",
        pad=24,
    )


def _draw_load(axes: Axes, plan: Plan, profile: Profile, samples: int) -> None:
    """What a microbatch costs each stage."""
    load = [plan.pass_us(profile, index, samples / stage.replicas) for index, stage in enumerate(plan.stages)]
    axis = axis_of(max(map(sum, load)))
    rows = range(len(load))
    first, second = ([pair[part] / axis.unit_us for pair in load] for part in (0, 1))
    axes.barh(rows, first, COMPUTES[1], color=LOOKS["forward"].colour, zorder=3)
    axes.barh(rows, second, COMPUTES[1], first, color=LOOKS["backward"].colour, zorder=3)
    names = [f"stage {index}  {_ranks(stage.ranks)}" for index, stage in enumerate(plan.stages)]
    as_rows(axes, names, label=f"time ({axis.unit})")
    named = {Treatment.RECOMPUTE: "recomputation", Treatment.OFFLOAD: "offload"}
    extra = " and ".join(name for treatment, name in named.items() if treatment in plan.treatments)
    axes.set_title("a microbatch on each rank" + (f", with {extra}" if extra else ""))


def _draw_memory(axes: Axes, prediction: Prediction, limit: int | None) -> None:
    """What each stage needs of its ranks' memory, part by part."""
    most = max((*(memory.total for memory in prediction.memory), limit or 0, 1))
    unit, size = next((unit, size) for unit, size in BYTES if most >= size)
    rows = range(len(prediction.memory))
    ends = [0.0] * len(rows)
    for part, colour in MEMORY.items():
        sizes = [getattr(memory, part) / size for memory in prediction.memory]
        axes.barh(rows, sizes, COMPUTES[1], ends, color=colour, label=part, zorder=3)
        ends = [end + more for end, more in zip(ends, sizes, strict=True)]
    for row, end, peak in zip(rows, ends, prediction.peak_in_flight, strict=True):
        axes.text(end, row, f"  {peak} in flight", va="center", fontsize=7, color=QUIET)
    if limit is not None:
        axes.axvline(limit / size, color=PALETTE[1], linewidth=1.4, label="limit", zorder=4)
    as_rows(axes, [f"stage {index}" for index in rows], label=f"memory of each rank ({unit})")
    axes.set_xlim(0, 1.15 * most / size)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(MEMORY) + 1, fontsize=7, handlelength=1.0
    )


def _note(plan: Plan, profile: Profile) -> str:
    said = {
        "Fabric": plan.topology.name if plan.topology else "",
        "plan": plan.method,
        "costs": profile.source,
    }
    return "; ".join(f"{name}: {value}" for name, value in said.items() if value) + "."


def _middle(stage: Stage) -> float:
    return (stage.start + stage.end - 1) / 2


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1` or `ranks 0-7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:4]))
    return f"ranks {shown}" + (", ..." if len(ranks) > 4 else "")
