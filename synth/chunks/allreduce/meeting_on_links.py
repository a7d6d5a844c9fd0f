"""Allreduces that meet on links, all at one time: a spread from every link, the same backwards before it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from arborcast.synth import bounds
from arborcast.synth.certificate import Bound
from arborcast.synth.chunks.allreduce.halves import Half
from arborcast.synth.chunks.allreduce.points import MEETINGS_ON_LINKS, RestrictedSchedule, point_method
from arborcast.synth.chunks.curve import FrontierOptions
from arborcast.synth.chunks.problem.time_reversal import reversed_in_time
from arborcast.synth.collective import Collective, Demand
from arborcast.synth.deadline import Deadline
from arborcast.synth.schedule import Schedule, Transfer
from arborcast.synth.topology import Topology


def met_on_links(
    topology: Topology,
    collective: Collective,
    limit: Bound,
    last: int,
    options: FrontierOptions,
    deadline: Deadline,
) -> list[RestrictedSchedule]:
    """Allreduces that meet on links: every chunk is reduced to both ends of one, who exchange what they have.

        step   0 1     2       3 4       in 2 h + 1 steps, where a spread from both ends takes h; the first h
               a -> u  u <-> v  u -> a    steps are the last ones backwards, so that links must be alike both
               b -> v           v -> b    ways. Every link has as many chunks as it carries in a round.

    Such schedules have the least possible loads, and one or two steps fewer than trees that meet in a rank.
    Nothing is proved of them here. None where there are switches, links that differ both ways, or only two
    ranks.

    Args:
        topology: the fabric.
        collective: an allreduce.
        limit: of its rate.
        last: the largest S looked at.
        options: how to go about the spread.
        deadline: what is found by then is returned.
    """
    members = collective.members
    capacity = {(a.src, a.dst): units for a, units in zip(topology.links, topology.capacities, strict=True)}
    alike = all(capacity.get((dst, src)) == units for (src, dst), units in capacity.items())
    if topology.switches or not alike or len(members) < 3:
        return []
    ends = [pair for pair in capacity if pair[0] < pair[1] and members.issuperset(pair)]
    places = [pair for pair in ends for _ in range(capacity[pair])]
    spread = Collective.custom(topology, (Demand(frozenset(p), members - frozenset(p)) for p in places))
    half = Half.of(topology, spread, bounds.bound(topology, spread, deadline=deadline))
    most = (last - 1) // 2
    if half.latency > most:
        return []
    curve = half.trace(most - half.latency, replace(options, proofs=False, jobs=1), deadline)
    found = []
    for optimum in curve.points:
        assert optimum.plan is not None, "a point of a curve has a plan"
        rounds = (*optimum.plan.rounds[::-1], optimum.chunks, *optimum.plan.rounds)
        method = point_method(optimum.chunks * len(places), rounds, options.seed)
        after = half.schedule(optimum.chunks, optimum.plan, method)
        steps = len(optimum.plan.rounds)
        before = (reversed_in_time(transfer, steps) for transfer in after.transfers)
        middle = (
            Transfer(index * optimum.chunks + chunk, src, dst, steps, reduce=True)
            for index, (one, other) in enumerate(places)
            for chunk in range(optimum.chunks)
            for src, dst in ((one, other), (other, one))
        )
        later = (replace(transfer, step=transfer.step + steps + 1) for transfer in after.transfers)
        chunks = [replace(chunk, demand=None) for chunk in after.chunks]
        schedule = Schedule.build(
            topology, collective, method, limit, chunks, (*before, *middle, *later), rounds
        )
        ratio = Fraction(sum(rounds), len(chunks))
        found.append(RestrictedSchedule(schedule, ratio, MEETINGS_ON_LINKS))
    return found
