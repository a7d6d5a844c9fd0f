"""HetPipe's plan (USENIX ATC 2020), made synchronous: equal pipelines side by side, one allreduce per stage.

A *virtual worker* is a group of ranks that trains as a pipeline of one rank per stage; data parallelism
joins the virtual workers. With 2 hosts (a, b) of 4 ranks each, the paper's policies give the workers

    NP (node partition)        a0 a1 a2 a3 | b0 b1 b2 b3                a worker is a host
    ED (equal distribution)    a0 b0 | a1 b1 | a2 b2 | a3 b3            a worker has a rank of every host
    HD (hybrid distribution)   a0 a1 b0 b1 | a2 a3 b2 b3                half of a host and half of the next

In our plans stage s has the s-th ranks of all workers as its replicas. The published system trains with
stale weights between parameter servers; here every batch ends with an allreduce.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import accumulate, chain
from math import inf

from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.planning.hosts import Groups, levels
from arborcast.pipeline.planning.memory_need import (
    Limit,
    RangeFits,
    fitted,
    range_fits,
    with_and_without_recompute,
)
from arborcast.pipeline.planning.stage_balance import balanced_by
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.simulation.pass_simulator import simulate
from arborcast.pipeline.stages import Plan, boundary_messages


def hetpipe(
    profile: Profile,
    network: LinkCosts,
    *,
    batch: int,
    microbatches: int,
    memory_bytes: Limit | None = None,
) -> Plan:
    """The plan of the policy with the shortest predicted step.

    Hosts are read from the rates (`hosts.levels`); a fabric of one level is one host, whose two halves HD
    takes. Every policy is tried at every level.

    Raises:
        PlanError: no policy gives a plan that fits and whose workers are joined (the last one's refusal).
        BatchError: there are fewer samples than microbatches.
    """
    Plan([(0, profile.depth, (0,))], microbatches).microbatch_sizes(batch)  # raises where it must
    found = levels(network)
    layouts = {
        workers: policy
        for hosts in (found[:-1] or found)
        for policy, workers in reversed(virtual_workers(hosts).items())
    }
    plans: list[tuple[float, Plan]] = []
    scheduled = replace(network, by_schedule=True)
    refusal: PlanError | None = None
    for workers, policy in layouts.items():
        try:
            plan = worker_plan(
                profile, network, workers, policy, batch=batch, microbatches=microbatches, limit=memory_bytes
            )
            plans.append((simulate(plan, profile, scheduled, batch=batch).time_us, plan))
        except BatchError as error:  # too many workers for so small a microbatch
            refusal = PlanError(str(error))
        except PlanError as error:  # memory, or workers that no links join
            refusal = error
    if not plans:
        raise refusal or PlanError("hetpipe: no policy gives a plan")
    return min(plans, key=lambda it: it[0])[1]


def virtual_workers(hosts: Groups) -> dict[str, Groups]:
    """The workers of each policy; every one lists its ranks in the order of its stages.

    HD is missing where hosts have an odd number of ranks, or where their number is odd and not 1.
    """
    size = len(hosts[0])
    found: dict[str, Groups] = {"NP": hosts, "ED": tuple(zip(*hosts, strict=True))}
    half = size // 2
    if size % 2 == 0 and len(hosts) == 1:
        found["HD"] = (hosts[0][:half], hosts[0][half:])
    elif size % 2 == 0 and len(hosts) % 2 == 0:
        pairs = zip(hosts[::2], hosts[1::2], strict=True)
        found["HD"] = tuple(chain(*((a[:half] + b[:half], a[half:] + b[half:]) for a, b in pairs)))
    return found


def worker_plan(
    profile: Profile,
    network: LinkCosts,
    workers: Groups,
    policy: str,
    *,
    batch: int,
    microbatches: int,
    limit: Limit | None,
) -> Plan:
    """The plan of some virtual workers: the largest time of a stage is least among divisions that fit.

    A stage's time is its computation and the messages it receives: activations from the stage before it,
    gradients from the one behind.

    Raises:
        PlanError: fewer layers than stages, or memory holds no division.
        BatchError: fewer samples in a microbatch than workers.
    """
    ranks = tuple(zip(*workers, strict=True))  # of each stage
    samples = batch / microbatches
    times = _stage_times(profile, network, ranks, samples)

    def plan(fit: RangeFits | None) -> Plan:
        def cost(part: int, start: int, end: int) -> float:
            if fit is not None and not fit(start, end, ranks[part], len(ranks) - 1 - part):
                return inf
            return times(part, start, end)

        ranges = balanced_by(cost, profile.depth, len(ranks))
        return Plan(
            [(start, end, of) for (start, end), of in zip(ranges, ranks, strict=True)],
            microbatches,
            "1f1b",
            topology=network.topology,
            model=profile.model,
            method=f"hetpipe {policy}",
        )

    free = plan(None)
    if limit is not None:
        for recompute in (False, True):
            fit = range_fits(
                profile, limit, free.ranks, batch=batch, microbatches=microbatches, recompute=recompute
            )
            try:
                bounded = with_and_without_recompute(plan(fit))[recompute]
                return fitted([free, bounded] if not recompute else [bounded], profile, limit, batch)
            except PlanError:
                continue  # then with recomputation, or not at all
    return fitted(with_and_without_recompute(free), profile, limit, batch)


def _stage_times(
    profile: Profile, network: LinkCosts, ranks: Groups, samples: float
) -> Callable[[int, int, int], float]:
    """`time(part, start, end)` of a stage on its replicas; each computes its share of a microbatch."""
    replicas = len(ranks[0])
    layer_times = (
        profile.forward_us(it, it + 1, samples / replicas)
        + profile.backward_us(it, it + 1, samples / replicas)
        for it in range(profile.depth)
    )
    sums = list(accumulate(layer_times, initial=0.0))

    @cache
    def received(cut: int, sender: int, receiver: int) -> float:
        size = profile.output_bytes(cut, samples)
        return network.transfer_us(boundary_messages(ranks[sender], ranks[receiver], size))

    def cost(part: int, start: int, end: int) -> float:
        before = received(start, part - 1, part) if part else 0.0
        behind = received(end, part + 1, part) if part < len(ranks) - 1 else 0.0
        return sums[end] - sums[start] + before + behind

    return cost
