"""Plans in orders that no closed form ranks, made from plans in 1F1B.

These are zero-bubble orders and those with several stages on a rank. The ranks of each stage stay; where an
order lays several stages on them, the layers are cut anew, so that the slowest stage is as fast as can be.
Whether any of it is worth it, the simulator says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

from arborcast.pipeline.costs.saved_bytes import Treatment
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.planning.tables import LayerTables
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
    fixed, each = (a + b for a, b in zip(layers.forward, layers.backward, strict=True))
    times = {len(it): (fixed + samples / len(it) * each).tolist() for it in ranks.values()}

    def cost(stage: int, start: int, end: int) -> float:
        return float(times[len(ranks[stage])][bounds[start]][bounds[end]])

    if len(bounds) - 1 < len(ranks):
        return None
    found = _balanced(cost, len(bounds) - 1, len(ranks))
    return tuple(Stage(bounds[a], bounds[b], ranks[stage]) for stage, (a, b) in enumerate(found))


def _balanced(cost: Callable[[int, int, int], float], depth: int, parts: int) -> tuple[tuple[int, int], ...]:
    """The ranges [start, end) of `parts` consecutive parts of the layers, the dearest as cheap as possible.

    What a part costs may depend on which it is: `cost(part, start, end)`. (`model.balance` is for sums.)
    A dynamic program over (part, layers so far): O(parts depth^2) costs. Of equals, the later cuts.
    """
    least = [0.0, *[inf] * depth]  # by the number of layers in the parts so far
    cuts: list[list[int]] = []
    for part in range(parts):
        found, cut = [inf] * (depth + 1), [0] * (depth + 1)
        last = part == parts - 1
        for end in [depth] if last else range(part + 1, depth - (parts - 1 - part) + 1):
            for start in range(end - 1, part - 1, -1):
                if least[start] >= found[end]:
                    continue  # this range cannot improve it
                now = max(least[start], cost(part, start, end))
                if now < found[end]:
                    found[end], cut[end] = now, start
        least = found
        cuts.append(cut)
    bounds = [depth]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return tuple(pairwise(reversed(bounds)))
