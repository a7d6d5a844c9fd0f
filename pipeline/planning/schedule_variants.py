"""Plans in orders that no closed form ranks, made from plans in 1F1B.

These are zero-bubble orders and those with several stages on a rank. The ranks of each stage stay; where an
order lays several stages on them, the layers are cut anew, so that the slowest stage is as fast as can be.
Whether any of it is worth it, the simulator says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np

from arborcast.pipeline.costs.saved_bytes import Treatment
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.planning.tables import Floats, LayerTables
from arborcast.pipeline.stages import Plan, Stage

MOST_EACH = 4
"""Stages on a rank that are tried at most: each is a message more for every microbatch."""


def derived(
    plan: Plan, layers: LayerTables, orders: Sequence[str], batch: int, most_each: int = MOST_EACH
) -> Iterator[Plan]:
    """A plan's ranks and microbatches in other orders, as far as there are layers enough.

    Stages that are cut anew keep all results; or, if the plan recomputes some, they recompute all.

    Args:
        plan: with every stage on ranks of its own.
        layers: of its model, and where they may be cut.
        orders: of `ORDERS`.
        batch: samples.
        most_each: stages on a rank that are tried.
    """
    by_layer = any(it.segments for it in plan.stages)
    ways = (False, True) if by_layer and Treatment.RECOMPUTE in plan.treatments else (plan.recompute,)
    for name in orders:
        order, workers = ORDERS[name], len(plan.stages)
        if workers == 1 or (order.splits and plan.treatments != {Treatment.KEEP}):
            continue  # there is nothing to fill, or nothing to split
        for each in range(1, most_each + 1):
            layout = order.layout(each * workers, workers)
            if layout is None:
                continue
            ranks = {stage: plan.stages[it].ranks for it, held in enumerate(layout) for stage in held}
            stages = plan.stages if each == 1 else _cut(ranks, layers, batch / plan.microbatches)
            if stages is None:
                continue
            for recompute in ways:
                yield replace(
                    plan,
                    stages=stages,
                    order=name,
                    recompute=recompute,
                    method=f"{plan.method} and {name}",
                    offload_gbps=None,
                )


def _cut(ranks: dict[int, tuple[int, ...]], layers: LayerTables, samples: float) -> tuple[Stage, ...] | None:
    """All layers in as many stages, whose passes of a microbatch take as little as can be at most."""
    bounds = (0, *layers.cuts, layers.profile.depth)
    if len(bounds) - 1 < len(ranks):
        return None
    fixed, each = (
        (a + b)[np.ix_(bounds, bounds)] for a, b in zip(layers.forward, layers.backward, strict=True)
    )
    found = _balanced([fixed + samples / len(ranks[stage]) * each for stage in range(len(ranks))])
    return tuple(Stage(bounds[a], bounds[b], ranks[stage]) for stage, (a, b) in enumerate(found))


def _balanced(costs: Sequence[Floats]) -> tuple[tuple[int, int], ...]:
    """The ranges [start, end) of consecutive parts of the layers, the dearest as cheap as possible.

    What a part costs may depend on which it is. (`model.balance` is for sums.) A dynamic program over (part,
    layers so far): O(parts depth^2). Of equals, the later cuts.

    Args:
        costs: of each part, by [start, end].
    """
    depth = len(costs[0]) - 1
    least = np.array([0.0, *[inf] * depth])  # by the number of layers in the parts so far
    cuts = []
    for cost in costs:
        table = np.where(np.tri(depth + 1, dtype=bool), inf, np.maximum(least[:, None], cost))
        least = table.min(axis=0)
        cuts.append(depth - table[::-1].argmin(axis=0))
    bounds = [depth]
    for cut in reversed(cuts):
        bounds.append(int(cut[bounds[-1]]))
    return tuple(pairwise(reversed(bounds)))
