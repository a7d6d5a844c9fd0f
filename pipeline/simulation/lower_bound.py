"""What is proven of a step's time: a limit for the list order, and what no order can go below.

T <= (1 + (4S-4)/M) · W0 + max AllReduce in the list order.

W0 is the most time that any stage computes, or that any direction of any boundary is busy, over all
microbatches. A microbatch m is in block b of the list order in pass m+b, so that M+4S-4 passes do
everything, and no pass needs longer than W0/M: in a pass every stage does at most one forward and one
backward pass, every boundary carries at most one message each way, and none of them waits for another of
the same pass. Stages that begin as soon as they can are never later than stages that wait for the end of
each pass. (SPP, INFOCOM 2022, arXiv 2204.10562, has the form with both directions of a boundary as one
channel.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cache
from itertools import pairwise, product

from arborcast.pipeline.costs.link_costs import BYTES_PER_US, LinkCosts
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.simulation.synchronisation import bucket_runs, ties_us, updates_us
from arborcast.pipeline.stages import Plan, overlaps, shares

CONDITION = (
    "order pe without a cap; as many samples in each microbatch as in the largest; each message at the even "
    "share of its links among all pairs of ranks that ever use them"
)
"""Under which `bound_us` is proven; the last two are ways to count, which only make the bound larger."""


def proven_bound_us(busiest_us: float, stages: int, microbatches: int, allreduce_us: float = 0.0) -> float:
    """The limit from its terms.

    It is proven for the list order (pe) without a cap where a message never takes longer than what is
    counted for it: each direction of a boundary is a channel of its own, or messages that share one take
    turns in the list order and their times are added in `busiest_us`. A channel that both directions share
    in the order of arrival can break it.

    Args:
        busiest_us: W0, the most time over all microbatches of any stage's computation, allreduce excluded,
            or of any boundary's messages in one direction.
        stages: S.
        microbatches: M.
        allreduce_us: the longest allreduce of any stage, with all that comes behind it.
    """
    return float(1 + Fraction(4 * stages - 4, microbatches)) * busiest_us + allreduce_us


def bound_us(plan: Plan, profile: Profile, network: LinkCosts, *, batch: int | None = None) -> float | None:
    """The limit for a plan's stages in order pe without a cap, whatever order the plan names.

    None where ranks hold several stages, which that order does not.

    Messages that share links are counted at a rate that max-min fairness never goes below, so that the
    simulator keeps to the limit on any topology.

    Raises:
        PlanError: no path leads from a stage to the next, or replicas are not connected.
        BatchError: the batch does not split.
    """
    if len(plan.workers) < len(plan.stages):
        return None
    samples = max(plan.microbatch_sizes(profile.samples if batch is None else batch))
    sums_us = [sum(it.time_us for it in bucket_runs(plan, profile, network, own)) for own in plan.workers]
    exchange = max(sums_us) + sum(ties_us(plan, profile, network).values())
    exchange += max(updates_us(plan, profile))
    busiest = max(
        [*_computations(plan, profile, network, samples), *_messages(plan, profile, network, samples)]
    )
    return proven_bound_us(plan.microbatches * busiest, len(plan.stages), plan.microbatches, exchange)


def least_us(plan: Plan, profile: Profile, *, batch: int | None = None) -> float:
    """What a step takes at least, in any order of the plan's passes and over any links.

    Each rank does all its passes and its update. Before its first pass a microbatch goes through the stages
    before. Where backward passes are whole, a gradient goes back through them behind its last one. Of these
    ways the share of the replica with the least samples counts.
    """
    sizes = plan.microbatch_sizes(profile.samples if batch is None else batch)
    stages, splits = plan.stages, ORDERS[plan.order].splits
    least = []
    for number, stage in enumerate(stages):
        forward, backward = plan.pass_us(profile, number, min(sizes) // stage.replicas)
        least.append(forward + (0.0 if splits else backward))
    longest = 0.0

    @cache
    def busy_us(index: int, samples: int) -> float:
        return sum(plan.pass_us(profile, index, samples))

    for worker, update_us in zip(plan.workers, updates_us(plan, profile), strict=True):
        for replica in range(len(worker.ranks)):
            busy = update_us
            for index, size in product(worker.stages, sizes):
                start, stop = shares(size, len(worker.ranks))[replica]
                busy += busy_us(index, stop - start)
            longest = max(longest, sum(least[: worker.stages[0]]) + busy)
    return longest


def _computations(plan: Plan, profile: Profile, network: LinkCosts, samples: int) -> Iterable[float]:
    """Time of each stage's forward and backward pass of one microbatch, on the replica with most of it."""
    messages = Counter(end for pair in _sizes(plan, profile, samples) for end in pair)
    for index, stage in enumerate(plan.stages):
        most = max(stop - start for start, stop in shares(samples, stage.replicas))
        handling = network.handling_us * max(messages[rank] for rank in stage.ranks)
        yield sum(plan.pass_us(profile, index, most)) * profile.crowding + handling


def _messages(plan: Plan, profile: Profile, network: LinkCosts, samples: int) -> Iterable[float]:
    """Time of each message of one microbatch where its links are shared by all that ever use them."""
    sizes = _sizes(plan, profile, samples)
    users = Counter(hop for src, dst in sizes for hop in network.path(src, dst))
    for (src, dst), size_bytes in sizes.items():
        path = network.path(src, dst)
        rate = min(network.topology.bandwidth[hop] / users[hop] for hop in path)
        latency_us = float(network.latency_us(src, dst))
        yield network.message_us + latency_us + size_bytes / (float(rate) * BYTES_PER_US)


def _sizes(plan: Plan, profile: Profile, samples: int) -> Mapping[tuple[int, int], float]:
    """Bytes by (from, to) of one microbatch, both ways."""
    sizes = {}
    for ours, theirs in pairwise(plan.stages):
        for it in overlaps(samples, ours.replicas, theirs.replicas):
            size_bytes = profile.output_bytes(theirs.start, it.stop - it.start)
            src, dst = ours.ranks[it.sender], theirs.ranks[it.receiver]
            sizes[src, dst] = sizes[dst, src] = size_bytes
    return sizes
