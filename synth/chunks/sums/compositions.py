"""Collectives that are one problem of copies, and allreduces composed of two of them.

A reduce-scatter before an allgather is an allreduce, so that the frontiers of both give schedules of it, and
the least of their compositions: mostly with fewer chunks at once and more steps than an allreduce that is
searched as it is (`synth.chunks.sums.optimum`), which is all schedules.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

from arborcast.synth import bounds
from arborcast.synth.certificate import Bound
from arborcast.synth.chunks.bounds.certificate import StaticLimit, StepBound
from arborcast.synth.chunks.curve import CopyOptimum, Curve, FrontierOptions, trace
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.prune import ChunkPlan
from arborcast.synth.chunks.problem.time_reversal import (
    allreduce_of,
    mirrored,
    repeated,
    reversed_in_time,
    schedule_of,
    share_of_demand,
)
from arborcast.synth.chunks.step_optimum import MOST_SENDS, is_large
from arborcast.synth.chunks.sums.points import COMPOSITIONS, MEETINGS_ON_LINKS, point_method
from arborcast.synth.chunks.trees.plan import MOST_NEAR
from arborcast.synth.chunks.trees.rounding import RoundedTrees
from arborcast.synth.collective import Collective, Demand, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.schedule import Method, Schedule, Transfer
from arborcast.synth.topology import Topology

MOST_COMMON = 8
"""Numbers of chunks tried for two halves whose own have no common multiple that is small enough."""


@dataclass(frozen=True)
class Half:
    """A collective of its own, or one of the two that an allreduce is composed of."""

    topology: Topology
    collective: Collective
    problem: ChunkProblem
    latency: int
    static: StepBound

    @classmethod
    def of(cls, topology: Topology, collective: Collective, limit: Bound) -> Half:
        problem = ChunkProblem.of(*mirrored(topology, collective))
        latency = problem.latency
        assert latency is not None, "a collective with a rate above zero reaches everybody"
        ratio = static_ratio(topology, collective, limit)
        return cls(topology, collective, problem, latency, StepBound(latency, ratio, StaticLimit(limit)))

    def asks_as(self, other: Half) -> bool:
        """Whether both problems are one and the same, so that a curve of one is a curve of the other."""
        mine, others = self.problem, other.problem
        return (mine.routes, mine.capacities, mine.demands, self.static.ratio) == (
            others.routes,
            others.capacities,
            others.demands,
            other.static.ratio,
        )

    def trace(self, spare: int, options: FrontierOptions, deadline: Deadline) -> Curve:
        return trace(self.problem, self.static, self.latency + spare, options, deadline)

    def schedule(self, chunks: int, plan: ChunkPlan, method: Method) -> Schedule:
        bound = self.static.certificate
        assert isinstance(bound, StaticLimit), "made with one"
        return schedule_of(
            self.topology, self.collective, self.problem, chunks, plan, method=method, bound=bound.bound
        )


def parts_of(collective: Collective) -> list[Collective]:
    """The collectives it is composed of: two for an allreduce, otherwise itself."""
    if collective.kind is not Kind.ALLREDUCE:
        return [collective]
    return [replace(collective, kind=kind) for kind in (Kind.REDUCE_SCATTER, Kind.ALLGATHER)]


def latency_of_parts(topology: Topology, collective: Collective) -> int | None:
    """The fewest steps of the parts one after the other; None where some rank cannot be reached."""
    steps = [ChunkProblem.of(*mirrored(topology, part)).latency for part in parts_of(collective)]
    return None if None in steps else sum(step for step in steps if step is not None)


def static_ratio(topology: Topology, collective: Collective, limit: Bound) -> Fraction:
    """The R/C below which the rate of a schedule would exceed its limit."""
    share = Fraction(1) if collective.kind is Kind.ALLREDUCE else share_of_demand(collective)
    return topology.bandwidth_unit / (limit.rate * share)


@dataclass(frozen=True)
class Composition:
    """A reduce-scatter and then an allgather.

    Attributes:
        schedule: both, with C, S and R among its method's settings.
        ratio: R/C of the allreduce.
        is_least: whether that is the least of all compositions in so many steps, with the smallest C of any
            composition that attains it.
        proof: how that was proved, or what is missing.
        halves: the limits of both halves, each with its exact certificate; none of what only meets somewhere.
        restriction: see `synth.chunks.sums.points.Point`.
    """

    schedule: Schedule
    ratio: Fraction
    is_least: bool
    proof: str
    halves: tuple[StepBound, ...]
    restriction: str = COMPOSITIONS


def compositions(
    topology: Topology,
    collective: Collective,
    limit: Bound,
    last: int,
    options: FrontierOptions,
    deadline: Deadline,
    best_known: Callable[[int], Fraction | None] = lambda steps: None,
) -> tuple[Composition, ...]:
    """Allreduces composed of the points of both halves, in order of steps and then of R/C.

    Args:
        topology: the fabric.
        collective: an allreduce.
        limit: of its rate.
        last: the largest S looked at.
        options: how to go about the halves.
        deadline: what is found by then is returned.
        best_known: the least R/C found otherwise in no more steps: of many ranks only what is better is
            written down.
    """
    halves = [
        Half.of(topology, part, bounds.bound(topology, part, deadline=deadline))
        for part in parts_of(collective)
    ]
    spare = last - sum(half.latency for half in halves)
    if spare < 0:
        return ()
    curves: list[Curve] = []
    for half in halves:
        # On symmetric links the reversed fabric is the fabric: both halves ask the same.
        known = [curve for other, curve in zip(halves, curves, strict=False) if other.asks_as(half)]
        curves.append(
            known[0].with_static(half.static)
            if known
            else half.trace(spare, options, deadline.share(len(halves) - len(curves)))
        )
    most = None if options.slack is None else MOST_NEAR
    pairs: Iterable[tuple[CopyOptimum, CopyOptimum]] = product(curves[0].points, curves[1].points)
    if is_large(halves[0].problem):
        most_chunks = MOST_SENDS // (len(collective.ranks) * (len(collective.ranks) - 1))

        def is_better(steps: int, ratio: Fraction) -> bool:
            least = best_known(steps)
            return least is None or ratio / len(collective.ranks) < least

        pairs = _best_pairs(halves, curves, most_chunks, is_better, deadline)
    found = _joined(topology, collective, limit, halves, curves, pairs, options.seed, most)
    in_time = (each for each in found if each.schedule.steps <= last)
    return tuple(
        sorted(in_time, key=lambda each: (each.schedule.steps, each.ratio, each.schedule.chunk_count))
    )


def meetings(
    topology: Topology,
    collective: Collective,
    limit: Bound,
    last: int,
    options: FrontierOptions,
    deadline: Deadline,
) -> tuple[Composition, ...]:
    """Allreduces that meet on links: every chunk is reduced to both ends of one, who exchange what they have.

        step   0 1     2       3 4       in 2 h + 1 steps, where a spread from both ends takes h; the first h
               a -> u  u <-> v  u -> a    steps are the last ones backwards, so that links must be alike both
               b -> v           v -> b    ways. Every link has as many chunks as it carries in a round.

    Such schedules have the least possible loads, and one or two steps fewer than trees that meet in a rank.
    Nothing is proved of them here. Arguments: see `compositions`. None where there are switches, links that
    differ both ways, or only two ranks.
    """
    members = collective.members
    capacity = {(a.src, a.dst): units for a, units in zip(topology.links, topology.capacities, strict=True)}
    alike = all(capacity.get((dst, src)) == units for (src, dst), units in capacity.items())
    if topology.switches or not alike or len(members) < 3:
        return ()
    ends = [pair for pair in capacity if pair[0] < pair[1] and members.issuperset(pair)]
    places = [pair for pair in ends for _ in range(capacity[pair])]
    spread = Collective.custom(topology, (Demand(frozenset(p), members - frozenset(p)) for p in places))
    half = Half.of(topology, spread, bounds.bound(topology, spread, deadline=deadline))
    most = (last - 1) // 2
    if half.latency > most:
        return ()
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
        words = f"found among {MEETINGS_ON_LINKS}"
        found.append(Composition(schedule, ratio, False, words, (), MEETINGS_ON_LINKS))
    return tuple(found)


def _joined(
    topology: Topology,
    collective: Collective,
    limit: Bound,
    halves: Sequence[Half],
    curves: Sequence[Curve],
    pairs: Iterable[tuple[CopyOptimum, CopyOptimum]],
    seed: int,
    most_chunks: int | None,
) -> Iterator[Composition]:
    """Points of one half before points of the other, each with its chunks divided as needed.

    Both halves must have the same number of them, which may be too many.
    """
    ranks = len(collective.ranks)
    for first, second in pairs:
        chunks = math.lcm(first.chunks, second.chunks)
        if most_chunks is not None and chunks > most_chunks:
            continue
        schedules = []
        for half, optimum in zip(halves, (first, second), strict=True):
            assert optimum.plan is not None, "a point of a curve has a plan"
            plan = repeated(optimum.plan, chunks // optimum.chunks)
            schedules.append(half.schedule(chunks, plan, point_method(chunks, plan.rounds, seed)))
        rounds = tuple(count for schedule in schedules for count in schedule.rounds or ())
        method = point_method(chunks * ranks, rounds, seed)
        least, fewest = limits_together(curves, len(rounds))
        is_least = Fraction(sum(rounds), chunks) == least
        proof = f"reduce-scatter: {first.proof}; allgather: {second.proof}; among their compositions"
        if not is_least:
            proof += f" not proved: at least {least / ranks}"
        elif chunks != fewest:
            proof += " the smallest C is not proved"
        yield Composition(
            allreduce_of(collective, *schedules, method=method, bound=limit),
            Fraction(sum(rounds), chunks * ranks),
            is_least and chunks == fewest,
            proof,
            (*first.bounds, *second.bounds),
        )


def _best_pairs(
    halves: Sequence[Half],
    curves: Sequence[Curve],
    most_chunks: int,
    is_better: Callable[[int, Fraction], bool],
    deadline: Deadline,
) -> Iterator[tuple[CopyOptimum, CopyOptimum]]:
    """Of each number of steps the pair of the least R/C, where it is less than with fewer steps.

    Many schedules of many ranks would take long to write down, and so would one of more chunks than that. So
    both get a number of chunks that they can share, rounded along their own trees where it is not theirs.
    """
    rounded: dict[tuple[int, int], RoundedTrees] = {}

    def resized(which: int, optimum: CopyOptimum, chunks: int) -> CopyOptimum:
        assert optimum.plan is not None, "a point of a curve has a plan"
        if chunks % optimum.chunks == 0:
            return optimum
        key = which, optimum.steps
        if key not in rounded:
            rounded[key] = RoundedTrees.of_plan(halves[which].problem, optimum.chunks, optimum.plan)
        rounds = tuple(rounded[key].rounds(chunks))
        return replace(optimum, chunks=chunks, plan=ChunkPlan(rounds, ()), minimality_proof=None)

    best: Fraction | None = None
    by_steps: dict[int, list[tuple[CopyOptimum, CopyOptimum]]] = defaultdict(list)
    for first, second in product(curves[0].points, curves[1].points):
        by_steps[first.steps + second.steps].append((first, second))
    for steps, pairs in sorted(by_steps.items()):
        if deadline.has_passed:
            return
        found: list[tuple[Fraction, int, CopyOptimum, CopyOptimum]] = []
        for first, second in pairs:
            for chunks in _common_chunks(first.chunks, second.chunks, most_chunks):
                one, other = resized(0, first, chunks), resized(1, second, chunks)
                found.append((_ratio_of(one, other), chunks, one, other))
        ratio, chunks, one, other = min(found, key=lambda each: each[:2])
        if best is None or ratio < best:
            best = ratio
            if not is_better(steps, ratio):
                continue
            yield _written(rounded.get((0, one.steps)), one), _written(rounded.get((1, other.steps)), other)


def _ratio_of(first: CopyOptimum, second: CopyOptimum) -> Fraction:
    assert first.ratio is not None and second.ratio is not None, "a point of a curve has a plan"
    return first.ratio + second.ratio


def _common_chunks(first: int, second: int, most: int) -> list[int]:
    """Numbers of chunks for two plans: the least multiple of both, or multiples of one and the most."""
    together = math.lcm(first, second)
    if together <= most:
        return [together]
    multiples = {chunks for own in (first, second) for chunks in range(own, most + 1, own)}
    return sorted(multiples | {most}, reverse=True)[:MOST_COMMON]


def _written(trees: RoundedTrees | None, optimum: CopyOptimum) -> CopyOptimum:
    """The same with the sends of a plan of which only the rounds were worked out."""
    assert optimum.plan is not None, "a point of a curve has a plan"
    if optimum.plan.sends or trees is None:
        return optimum
    return replace(optimum, plan=trees.plan(optimum.chunks))


def limits_together(curves: Sequence[Curve], steps: int) -> tuple[Fraction, int]:
    """The limits of R/C and then of C, both per rank, of any composition of two halves in so many steps.

    Both halves of a composition have the same C. One that attains the limit attains that of each half, so
    that C times either ratio is whole, and C is no less than the fewest chunks of each.
    """
    first, second = curves
    splits = [(some, steps - some) for some in range(min(first.limits), steps - min(second.limits) + 1)]
    least = min(first.least(some) + second.least(others) for some, others in splits)
    fewest = []
    for some, others in splits:
        parts = first.least(some), second.least(others)
        if sum(parts) == least:
            unit = math.lcm(*(part.denominator for part in parts))
            most = max(first.fewest_chunks(some), second.fewest_chunks(others))
            fewest.append(-(-most // unit) * unit)
    return least, min(fewest)
