"""A plan of both levels as one picture: layers by ranks with mesh and specs, and the other ways beside it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from arborcast.pipeline.meshes import shown
from arborcast.pipeline.pictures.timeline_picture import as_rows, axis_of
from arborcast.pipeline.planning.interop_search import JointStage
from arborcast.pipeline.planning.memory_need import readable
from arborcast.pipeline.planning.sharded_planning import ShardedChoice
from arborcast.pipeline.sharding.graph import Graph
from arborcast.synth.pictures.canvas import INK, PALETTE, QUIET, check_path, headline, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE_INCHES = 0.16
"""Of a line of text."""


def draw_sharded(found: ShardedChoice, path: Path | str) -> None:
    """Draw a plan of both levels to be understood at a glance.

    Above, a box for each stage over its layers and its ranks, coloured by the number of axes of its mesh,
    with how operators that multiply are divided. Below, the step of each way to train.

    Args:
        found: the plan and the other ways.
        path: an .svg or .png file.

    Raises:
        InputError: an unknown suffix, no matplotlib, or the file cannot be written.
    """
    check_path(path)
    stages = found.joint.stages
    order = [rank for stage in stages for rank in stage.ranks]
    order += sorted(set(range(found.topology.ranks)) - set(order))
    lines = [_lines(found, it) for it in stages]
    share = max(len(text) * len(order) / len(it.ranks) for text, it in zip(lines, stages, strict=True))
    heights = [max(2.4, LINE_INCHES * (share + 1)), 0.8 + 0.3 * len(found.ways)]
    with picture(path, 11, 1.1 + sum(heights)) as (figure, (only,)):
        only.remove()
        panels = figure.subplot_mosaic([["stages"], ["ways"]], height_ratios=heights)
        _draw_stages(panels["stages"], found, order, lines)
        _draw_ways(panels["ways"], found)
        batch = found.sliced.graph.samples * found.microbatches
        headline(
            figure,
            f"{found.sliced.graph.name} on {found.topology.name}: {found.best}, "
            f"{batch} samples a step, microbatches: {found.microbatches}",
            "S(d): dimension d is divided along this axis of the mesh; R: replicas; P: summands. "
            "Reads of the largest operators, then what they make.",
        )


def _draw_stages(axes: Axes, found: ShardedChoice, order: list[int], lines: list[list[str]]) -> None:
    from matplotlib.patches import Rectangle

    for number, (stage, text) in enumerate(zip(found.joint.stages, lines, strict=True)):
        first, width = order.index(stage.ranks[0]), stage.end - stage.start
        colour = PALETTE[len(stage.priced.setting.sizes) * 2 % len(PALETTE)]
        corner = stage.start - 0.5, first - 0.5
        box = axes.add_patch(Rectangle(corner, width, len(stage.ranks), facecolor=colour, alpha=0.14))
        axes.add_patch(
            Rectangle(corner, width, len(stage.ranks), fill=False, edgecolor=colour, linewidth=1.4)
        )
        axes.text(
            stage.start - 0.5 + 0.01 * found.sliced.depth,
            first - 0.5 + 0.02 * len(order),
            "\n".join([f"stage {number}: {text[0]}", *text[1:]]),
            va="top",
            fontsize=7,
            color=INK,
            linespacing=1.25,
            clip_path=box,
            clip_on=True,
        )
    axes.set_xlim(-0.5, found.sliced.depth - 0.5)
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_yticks(range(len(order)), [f"rank {it}" for it in order], fontsize=7)
    axes.set_xlabel("layer")
    axes.tick_params(length=0)
    axes.set_title("stages: layers by ranks")


def _draw_ways(axes: Axes, found: ShardedChoice) -> None:
    steps = [it.prediction.time_us for it in found.ways.values() if it.prediction is not None]
    axis = axis_of(max(steps))
    for row, (name, way) in enumerate(found.ways.items()):
        if way.prediction is None:
            axes.text(0, row, " none", va="center", fontsize=8, color=QUIET)
            continue
        time = way.prediction.time_us / axis.unit_us
        colour = PALETTE[0] if name == found.best else PALETTE[6]
        axes.barh(row, time, 0.62, color=colour, zorder=3)
        held = readable(way.memory_bytes)
        axes.text(time, row, f" {time:.4g} {axis.unit}, a rank holds {held}", va="center", fontsize=8)
    as_rows(axes, list(found.ways), label=f"step ({axis.unit})")
    axes.margins(x=0.25)
    axes.set_title("predicted step, collectives by their schedules")


def _lines(found: ShardedChoice, stage: JointStage) -> list[str]:
    """The mesh, and the largest operators with their specs; equal ones together."""
    graph = found.sliced.stage(stage.start, stage.end)
    count = Counter(graph.classes)
    flops = {
        number: sum(it.flops for it in operator.kernels) for number, operator in enumerate(graph.operators)
    }
    heavy = [number for number in range(len(graph.operators)) if flops[number] and count[number]]
    mesh = "x".join(map(str, stage.priced.setting.sizes)) or "1"
    memory = found.prediction.memory[found.joint.stages.index(stage)].total
    head = f"mesh {mesh}, {readable(memory)}"
    if not stage.priced.setting.sizes:
        return [head]  # nothing is divided
    return [head, *(_said(graph, stage, it, count[it]) for it in heavy if graph.classes[it] == it)]


def _said(graph: Graph, stage: JointStage, number: int, times: int) -> str:
    operator, way = graph.operators[number], stage.priced.sharding.chosen[number]
    assert way is not None
    reads = ", ".join(shown(it.spec) for it in way.demands)
    makes = ", ".join(shown(it) for it in way.outputs)
    name = operator.module or operator.name
    return f"{f'{times} x ' if times > 1 else ''}{operator.kind} {name}: {reads} -> {makes}"
