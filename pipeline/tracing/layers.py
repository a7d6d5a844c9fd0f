"""The layers of a trace: which of its legal cuts are kept, and what each piece between them is called.

Cuts beside each other differ little in time and much in bytes, so of those close together only the cheapest
stays; what is more than asked for is merged so that the layers take about the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

from pipeline.errors import PartitionError
from pipeline.tracing.balance import balanced_cuts
from pipeline.tracing.cuts import Cut
from pipeline.tracing.table import Table

MOST = 64
"""Layers where no number is asked for: enough to balance any number of stages that a plan has."""
FLOPS_PER_BYTE = 16
"""Arithmetic that takes as long as writing a byte: a V100's 15 TFLOP/s over its 900 GB/s, about any GPU's."""
CLOSE = 1 / (4 * MOST)
"""Cuts with less than this share of the time between them are one choice."""
SLACK = 0.25
"""How much more than the least possible the longest layer may take for cheaper cuts."""


def weights(table: Table) -> list[int]:
    """What the operators with a position take, in FLOPs, memory traffic counted in."""
    return [table.flops[item.name] + FLOPS_PER_BYTE * item.size_bytes for item in table.placed]


def chosen_cuts(table: Table, name: str, layers: int | Literal["all"] | None) -> tuple[Cut, ...]:
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
    wanted = min(most, MOST) if layers is None else layers
    few = cheapest_nearby(legal, spent, CLOSE)
    if layers is None and len(few) < MOST:
        return tuple(few)
    offered = few if len(few) >= wanted - 1 else legal
    bounds = [0, *(cut.position for cut in offered), len(table.placed)]
    between = [spent[end] - spent[start] for start, end in pairwise(bounds)]
    costs = [0.0, *(float(cut.size_bytes) for cut in offered)]
    return tuple(offered[at - 1] for at in balanced_cuts(between, wanted, costs=costs, slack=SLACK))


def cheapest_nearby(cuts: Sequence[Cut], spent: Sequence[int], share: float) -> list[Cut]:
    """Of cuts that lie close together the one that fewest bytes cross, of equal ones the last."""
    kept: list[Cut] = []
    group: list[Cut] = []
    for cut in cuts:
        if group and spent[cut.position] - spent[group[0].position] > share * spent[-1]:
            kept.append(_cheapest(group))
            group = []
        group.append(cut)
    return [*kept, _cheapest(group)] if group else kept


def layer_names(table: Table, bounds: Sequence[int]) -> tuple[str, ...]:
    """A unique name for each layer: the module of its heaviest operator."""
    heavy = weights(table)
    names: list[str] = []
    for start, end in pairwise(bounds):
        at = max(range(start, end), key=lambda index: heavy[index])
        node = table.nodes[table.placed[at].name]
        path = next((str(path) for path, _ in reversed(node.meta.get("nn_module_stack", {}).values())), "")
        path = path.split("@")[0]  # torch marks repeated calls of a module
        if not path or path.startswith("_empty"):
            path = node.name
        names.append(f"{path}:{node.name}" if path in names else path)
    return tuple(names)


def _cheapest(group: Sequence[Cut]) -> Cut:
    return min(reversed(group), key=lambda cut: cut.size_bytes)


def _hindrance(table: Table) -> str:
    """The first reason why there are not more."""
    fault = next(
        (f" (before {table.placed[cut.position].name}: {cut.fault})" for cut in table.cuts if cut.fault), ""
    )
    return fault
