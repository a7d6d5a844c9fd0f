"""What gradients cost between the backward passes and the update: among replicas, and for shared parameters.

Every worker's replicas do one allreduce; then the workers that use the same parameter do one more for it.
"""

from __future__ import annotations

import math
from collections import defaultdict

from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.stages import Plan


def replicas_us(plan: Plan, profile: Profile, network: LinkCosts) -> tuple[float, ...]:
    """Time of the allreduce of each worker.

    Raises:
        PlanError: links among the ranks of a worker do not connect them.
    """
    times = []
    for worker in plan.workers:
        ranges = [(plan.stages[it].start, plan.stages[it].end) for it in worker.stages]
        time = network.allreduce_us(worker.ranks, profile.gradient_bytes_of(ranges))
        if math.isinf(time):
            raise PlanError(
                f"plan: stage {worker.stages[0]}: links between its ranks must connect them, for they share "
                f"gradients, got ranks {', '.join(map(str, worker.ranks))} of topology "
                f"{network.topology.name}"
            )
        times.append(time)
    return tuple(times)


def ties_us(plan: Plan, profile: Profile, network: LinkCosts) -> dict[tuple[int, ...], float]:
    """Time to sum the gradients of shared parameters, by the workers that use them.

    Where links among just those ranks do not connect them, it is a ring of messages along their paths.

    Raises:
        PlanError: no path leads from one of the ranks to another.
    """
    starts = [stage.start for stage in plan.stages]
    home = {stage: index for index, worker in enumerate(plan.workers) for stage in worker.stages}
    sizes: defaultdict[tuple[int, ...], int] = defaultdict(int)
    for tie in profile.ties_across(plan.cuts):
        holders = {home[sum(layer >= start for start in starts) - 1] for layer in tie.layers}
        if len(holders) > 1:
            sizes[tuple(sorted(holders))] += tie.size_bytes
    times = {}
    for users, size_bytes in sizes.items():
        ranks = [rank for worker in users for rank in plan.workers[worker].ranks]
        times[users] = sum_us(ranks, size_bytes, network)
    return times


def sum_us(ranks: list[int], size_bytes: int, network: LinkCosts) -> float:
    """Time to sum gradients among ranks of several workers.

    Where links among just them do not connect them, it is a ring of messages along their paths:
    reduce-scatter and allgather, n-1 steps each, of an n-th of the bytes.

    Raises:
        PlanError: no path leads from one of the ranks to another.
    """
    time = network.allreduce_us(ranks, size_bytes)
    if not math.isinf(time):
        return time
    part = size_bytes / len(ranks)
    around = dict.fromkeys(zip(ranks, ranks[1:] + ranks[:1], strict=True), part)
    return 2 * (len(ranks) - 1) * network.transfer_us(around)
