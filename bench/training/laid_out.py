"""Plans of an order on given ranks: each worker holds one stage, or two where the order wants that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.stages import Plan, divided

Cuts = Callable[[int], Iterable[int]]
"""For so many stages: where the first one begins, all others, and where the last one ends."""


def evenly(layers: int) -> Cuts:
    """As many layers in each stage as in the others, the first ones have more where it must be."""
    return lambda stages: accumulate(divided(layers, stages), initial=0)


def laid_out(
    order: str, workers: Sequence[Sequence[int]], cuts: Cuts, microbatches: int, **more: Any
) -> Plan:
    """The plan of an order for workers of these ranks; `more` is handed to `Plan`."""
    for stages in (len(workers), 2 * len(workers)):
        layout = ORDERS[order].layout(stages, len(workers))
        if layout is not None:
            home = {stage: workers[worker] for worker, held in enumerate(layout) for stage in held}
            parts = [(*ends, home[it]) for it, ends in enumerate(pairwise(cuts(stages)))]
            return Plan(parts, microbatches, order, **more)
    raise AssertionError(f"order {order} must suit {len(workers)} workers")
