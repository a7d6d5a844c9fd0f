"""What a step costs behind the backward passes: sums of gradients, and the update.

Every worker's replicas sum their gradients bucket by bucket, from the last layer to the first, each as soon
as the last passes have come to it (`pipeline.run.gradients`); then the workers that use the same parameter do
one more allreduce for it; then the optimizer steps.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from arborcast.pipeline.costs.link_costs import LinkCosts, ring_messages
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.stages import BUCKET_BYTES, Plan, StageWorker


def updates_us(plan: Plan, profile: Profile) -> tuple[float, ...]:
    """Time of the optimizer's step on each worker."""
    return tuple(profile.update_us(plan.layers_of(worker)) for worker in plan.workers)


@dataclass(frozen=True, slots=True)
class BucketRun:
    """Buckets one behind the other that are there at the same time.

    Attributes:
        time_us: of all their allreduces.
        firsts: for each stage with gradients in them, the first layer that gives some.
    """

    time_us: float
    firsts: Mapping[int, int]


def bucket_runs(plan: Plan, profile: Profile, network: LinkCosts, worker: StageWorker) -> list[BucketRun]:
    """The gradients of a worker in the order in which its replicas sum them; none of a single rank.

    A layer's gradients are taken to be there once its backward pass is through.

    Raises:
        PlanError: links among the ranks of the worker do not connect them.
    """
    held = plan.layers_of(worker)
    total = profile.bytes_once("gradient_bytes", held) if len(worker.ranks) > 1 else 0
    if not total:
        return []
    whole_us = network.allreduce_us(worker.ranks, min(total, BUCKET_BYTES))
    if math.isinf(whole_us):
        raise PlanError(
            f"plan: stage {worker.stages[0]}: links between its ranks must connect them, for they share "
            f"gradients, got ranks {', '.join(map(str, worker.ranks))} of topology {network.topology.name}"
        )
    elsewhere: Counter[int] = Counter()  # by layer, what an earlier one of the worker completes
    for tie in profile.ties:
        users = [it for it in tie.layers if any(start <= it < end for start, end in held)]
        elsewhere.update(dict.fromkeys(users[1:], tie.size_bytes))
    found: list[BucketRun] = []
    filled, firsts = 0, dict[int, int]()
    for stage in reversed(worker.stages):
        for layer in reversed(range(plan.stages[stage].start, plan.stages[stage].end)):
            size = profile.layers[layer].gradient_bytes - elsewhere[layer]
            if not size:
                continue
            firsts[stage] = layer
            full, filled = divmod(filled + size, BUCKET_BYTES)
            if full:
                found.append(BucketRun(full * whole_us, firsts))
                firsts = {stage: layer} if filled else {}
    if filled:
        found.append(BucketRun(network.allreduce_us(worker.ranks, filled), firsts))
    return found


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
    return 2 * (len(ranks) - 1) * network.transfer_us(ring_messages(ranks, size_bytes))
