"""The layers of a trace: which of its legal cuts are kept, and what each piece between them is called.

Cuts beside each other differ little in time and much in bytes, so that of those close together only the
cheapest stay; what is more than asked for is merged so that the layers take about the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

from arborcast.pipeline.errors import PartitionError
from arborcast.pipeline.model.balance import balanced_cuts
from arborcast.pipeline.model.traced.cut_points import CutPoint
from arborcast.pipeline.model.traced.operator_table import OperatorTable

MOST = 64
"""Layers where no number is asked for: enough to balance any number of stages that a plan has."""
FLOPS_PER_BYTE = 16
"""Arithmetic that takes as long as writing a byte: a V100's 15 TFLOP/s over its 900 GB/s, about any GPU's."""
NEAR = 1 / 32
"""A cut is dropped for a cheaper one with at most this share of the time between them."""
VERY_NEAR = 1 / MOST
"""Likewise for an equal one."""
SLACK = 0.25
"""How much more than the least possible the longest layer may take for cheaper cuts."""


def weights(table: OperatorTable) -> list[int]:
    """What the operators with a position take, in FLOPs, memory traffic counted in."""
    return [table.flops[item.name] + FLOPS_PER_BYTE * table.written[item.name] for item in table.placed]


def chosen_cuts(table: OperatorTable, name: str, layers: int | Literal["all"] | None) -> tuple[CutPoint, ...]:
    """The cuts between the layers.

    Args:
        table: the trace.
        name: of the model, for errors.
        layers: how many; "all" for every legal cut; None for those worth having, at most `MOST` layers.

    Raises:
        PartitionError: there are fewer legal cuts than asked for.
    """
    legal = [cut for cut in table.cuts if not cut.fault]
    if layers == "all":
        return tuple(legal)
    most = len(legal) + 1
    if layers is not None and not 1 <= layers <= most:
        raise PartitionError(
            f"model {name}: layers must be in 1..{most}, as it has {len(legal)} legal cuts, got {layers}"
            + _hindrance(table)
        )
    spent = list(accumulate(weights(table), initial=0))
    useful = [cut for cut in legal if not _is_idle(table, cut, spent)]
    few, scale = worthwhile(useful, spent), 1
    if layers is None:
        while len(few) >= MOST:
            scale *= 2
            few = worthwhile(few, spent, scale)
        return tuple(few)
    offered = few if len(few) >= layers - 1 else legal
    bounds = [0, *(cut.position for cut in offered), len(table.placed)]
    between = [spent[end] - spent[start] for start, end in pairwise(bounds)]
    costs = [0.0, *(float(cut.size_bytes) for cut in offered)]
    return tuple(offered[at - 1] for at in balanced_cuts(between, layers, costs=costs, slack=SLACK))


def worthwhile(cuts: Sequence[CutPoint], spent: Sequence[int], scale: int = 1) -> list[CutPoint]:
    """The cuts without those near which a kept one is that fewer bytes cross, or as many very near.

    Args:
        cuts: in order.
        spent: time of all operators before each position.
        scale: how many times `NEAR` and `VERY_NEAR` count as near.
    """
    kept: list[CutPoint] = []
    total = max(spent[-1], 1)
    for cut in sorted(cuts, key=lambda cut: (cut.size_bytes, -cut.position)):
        for other in kept:
            limit = NEAR if other.size_bytes < cut.size_bytes else VERY_NEAR
            if abs(spent[other.position] - spent[cut.position]) <= scale * limit * total:
                break
        else:
            kept.append(cut)
    return sorted(kept, key=lambda cut: cut.position)


def layer_names(table: OperatorTable, bounds: Sequence[int]) -> tuple[str, ...]:
    """A unique name for each layer: the module of its heaviest operator."""
    heavy = weights(table)
    names: list[str] = []
    for start, end in pairwise(bounds):
        at = max(range(start, end), key=lambda index: heavy[index])
        node = table.nodes[table.placed[at].name]
        path = table.captured.module_of(node)
        if not path or path.startswith("_empty"):
            path = node.name
        names.append(f"{path}:{node.name}" if path in names else path)
    return tuple(names)


def _is_idle(table: OperatorTable, cut: CutPoint, spent: Sequence[int]) -> bool:
    """Whether there is next to nothing before a cut or behind it: little time and no parameters."""
    limit = VERY_NEAR * spent[-1]
    sides = ((0, cut.position), (cut.position, len(table.placed)))
    return any(
        spent[end] - spent[start] <= limit
        and not any(
            name in table.captured.tensors or (name in table.by_name and table.by_name[name].copied)
            for item in table.placed[start:end]
            for name in item.inputs
        )
        for start, end in sides
    )


def _hindrance(table: OperatorTable) -> str:
    """The first reason why there are not more."""
    fault = next(
        (f" (before {table.placed[cut.position].name}: {cut.fault})" for cut in table.cuts if cut.fault), ""
    )
    return fault
