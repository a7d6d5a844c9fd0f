"""PipeDream's planner (SOSP 2019, section 3.1): replicated stages by dynamic programming, made synchronous.

    A[j][m] = min over k, n of max( A[k][m - n],                     layers 0..k on the first m - n devices
                                    boundary(k),                     activations and gradients at the cut
                                    (T(k..j) + sync(k..j, n)) / n )  the last stage on n devices

It minimises the time per microbatch in the steady state and counts an allreduce for each microbatch on each
replica, as PipeDream trains; here gradients are added up and the pipeline is flushed after every batch, so
the plan may hold back from replication. With several levels (devices in hosts, hosts in a cluster) the
program of the inner level, over all ranges of layers, is the T of the outer one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import inf
from typing import TypeAlias

from arborcast.pipeline.costs.link_costs import BYTES_PER_US
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.planning.hosts import Groups, levels
from arborcast.pipeline.planning.planning_problem import PlanningProblem, RangeFits
from arborcast.pipeline.stages import Plan, Stage

StageCost: TypeAlias = Callable[[int, int, int, int], float]
"""`cost(start, end, first, count)`: of the layers [start, end) on devices first..first + count - 1."""

BoundaryCost: TypeAlias = Callable[[int, int], float]
"""`cost(cut, device)`: of what crosses before layer `cut`, to `device` from the one before it."""


@dataclass(frozen=True, slots=True)
class DeviceRange:
    """Consecutive layers on consecutive devices: a stage of the program's answer."""

    start: int
    end: int
    first: int
    count: int


def pipedream(problem: PlanningProblem) -> Plan:
    """PipeDream's plan over all ranks in the order of their numbers, 1F1B with a flush.

    Where the fabric has levels, both the flat and the level-by-level program are run, and the plan with the
    shorter predicted step is taken. The published program does not know memory: where its plan does not fit,
    recomputation is tried, and the flat program over the stages that fit.

    Raises:
        PlanError: nothing fits (by how much), or ranks are not connected.
        BatchError: there are fewer samples than microbatches.
    """
    problem.check_batch()
    costs = _RangeCosts(problem)
    found: list[Plan] = []
    refusal: PlanError | None = None
    for plan in costs.plans():
        try:
            found.append(problem.recomputing_where_needed(plan))
        except PlanError as error:
            refusal = error
    if problem.memory_bytes is not None and all(plan.recompute for plan in found):
        found += [plan for plan in [costs.within_memory()] if plan]
    if refusal and not found:
        raise refusal
    return problem.fastest(found)


def program(
    depth: int, devices: int, stage: StageCost, boundary: BoundaryCost, start: int = 0
) -> list[tuple[float, tuple[DeviceRange, ...]]]:
    """A[end][devices] for every end: the least time per microbatch of the layers [start, end), with stages.

    All devices are used. O(depth^2 devices^2) costs are asked for, fewer where they cannot matter; of equals
    the first found stands. An infinite time has no stages.
    """
    best = [[inf] * (devices + 1) for _ in range(depth + 1)]
    how: list[list[tuple[int, int]]] = [[(start, 0)] * (devices + 1) for _ in range(depth + 1)]
    for end in range(start + 1, depth + 1):
        for used in range(1, devices + 1):
            best[end][used] = stage(start, end, 0, used)
            for count in range(1, used):
                first = used - count
                for cut in range(start + 1, end):
                    now = best[cut][first]
                    if now >= best[end][used]:
                        continue
                    now = max(now, boundary(cut, first))
                    if now < best[end][used]:
                        now = max(now, stage(cut, end, first, count))
                    if now < best[end][used]:
                        best[end][used], how[end][used] = now, (cut, first)
    return [
        (best[end][devices], _trace(how, start, end, devices) if best[end][devices] < inf else ())
        for end in range(depth + 1)
    ]


def _trace(how: list[list[tuple[int, int]]], start: int, end: int, used: int) -> tuple[DeviceRange, ...]:
    pieces: list[DeviceRange] = []
    while end > start:
        cut, first = how[end][used]
        pieces.append(DeviceRange(cut, end, first, used - first))
        end, used = cut, first
    return tuple(reversed(pieces))


class _RangeCosts:
    """What is asked of the program: costs of ranges on this network, for one number of microbatches."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem, self.network, self.profile = problem, problem.network, problem.profile
        self.ranks = problem.ranks
        self.times = list(accumulate(problem.layer_us, initial=0.0))
        self.gradient_bytes = cache(problem.profile.gradient_bytes)

    def plans(self) -> list[Plan]:
        """The flat one, and the one by levels where there are any."""
        found = levels(self.network)
        flat = self.plan(self.ranks, (len(self.ranks),))
        if len(found) == 1:
            return [flat]
        # Coarse groups first, so that every group of every level is a slice of this order.
        places = sorted(self.ranks, key=lambda rank: [_index(groups, rank) for groups in found[::-1]])
        return [flat, self.plan(tuple(places), tuple(len(groups[0]) for groups in found))]

    def within_memory(self) -> Plan | None:
        """The flat program over stages that fit, without recomputation if possible."""
        for recompute in (False, True):
            fit = self.problem.range_fits(recompute=recompute)
            try:
                plan = self.plan(self.ranks, (len(self.ranks),), fit)
                return self.problem.recomputing_where_needed(plan)
            except PlanError:
                continue
        return None

    def plan(self, places: tuple[int, ...], sizes: tuple[int, ...], fit: RangeFits | None = None) -> Plan:
        """The program's plan, level by level from the finest.

        Args:
            places: all ranks; every group of a level is a slice of them.
            sizes: of the groups of each level, in ranks, the finest first.
            fit: whether a range fits (for one level); None where memory does not matter.
        """
        depth, width = self.profile.depth, 1
        inner = _DeviceAnswers(
            alone=lambda start, end: self.times[end] - self.times[start],
            stages=lambda start, end: [Stage(start, end, (0,))],
        )
        for size in sizes:
            stage = self._stage_cost(places, size, width, inner, fit)
            boundary = self._boundary_cost(places, size, width)
            starts = range(1 if size == len(places) else depth)
            table = {start: program(depth, size // width, stage, boundary, start) for start in starts}
            inner, width = _level(table, inner, width), size
        if inner.alone(0, depth) == inf:
            raise PlanError(f"pipedream: no pipeline of {depth} layers takes all of {len(self.ranks)} ranks")
        stages = (
            Stage(it.start, it.end, tuple(places[rank] for rank in it.ranks)) for it in inner.stages(0, depth)
        )
        return self.problem.plan(stages, "1f1b", "pipedream" if len(sizes) == 1 else "pipedream by levels")

    def _stage_cost(
        self, places: tuple[int, ...], size: int, width: int, inner: _DeviceAnswers, fit: RangeFits | None
    ) -> StageCost:
        """(T + synchronisation) / count; the first ranks of the components synchronise."""
        smallest = self.problem.batch // self.problem.microbatches

        @cache
        def us_per_byte(first: int, count: int) -> float:
            heads = [
                places[group + first * width : group + (first + count) * width : width]
                for group in range(0, len(places), size)
            ]
            rate = min(self.network.allreduce_rate(ranks) for ranks in heads)
            return 1 / (float(rate) * BYTES_PER_US) if rate else inf

        @cache
        def replicas(start: int, end: int) -> int:
            return max((stage.replicas for stage in inner.stages(start, end)), default=1)

        def cost(start: int, end: int, first: int, count: int) -> float:
            if count * replicas(start, end) > smallest:
                return inf  # some replica would have no sample
            if fit is not None:
                behind = min(size - first - count, self.profile.depth - end)
                if not fit(start, end, places[first : first + count], behind):
                    return inf
            alone, gradients = inner.alone(start, end), self.gradient_bytes(start, end)
            if count == 1 or not gradients:
                return alone / count
            sync = count * self.network.collective_us + gradients * us_per_byte(first, count)
            return (alone + sync) / count

        return cost

    def _boundary_cost(self, places: tuple[int, ...], size: int, width: int) -> BoundaryCost:
        """Activations there and gradients back, between neighbours in the order of places."""

        @cache
        def cost(cut: int, device: int) -> float:
            crossing = self.profile.output_bytes(cut, self.problem.samples)
            seams = range(device * width, len(places), size)
            ends = [(places[seam - 1], places[seam]) for seam in seams]
            return max(
                self.network.transfer_us({(a, b): crossing}) + self.network.transfer_us({(b, a): crossing})
                for a, b in ends
            )

        return cost


@dataclass(frozen=True, slots=True)
class _DeviceAnswers:
    """The program's answers on all devices of a group, for every range of layers.

    Attributes:
        alone: the time of a range.
        stages: its stages, on ranks counted from the group's first place.
    """

    alone: Callable[[int, int], float]
    stages: Callable[[int, int], list[Stage]]


def _level(
    table: dict[int, list[tuple[float, tuple[DeviceRange, ...]]]], inside: _DeviceAnswers, width: int
) -> _DeviceAnswers:
    """Answers of a level from its table: a piece repeats its inner stages on each of its components.

    Replicas of an inner stage come component by component, so that samples stay on their component.
    """

    def stages(start: int, end: int) -> list[Stage]:
        return [
            Stage(
                inner.start,
                inner.end,
                tuple(
                    rank + component * width
                    for component in range(piece.first, piece.first + piece.count)
                    for rank in inner.ranks
                ),
            )
            for piece in table[start][end][1]
            for inner in inside.stages(piece.start, piece.end)
        ]

    return _DeviceAnswers(lambda start, end: table[start][end][0], stages)


def _index(groups: Groups, rank: int) -> int:
    return next(index for index, group in enumerate(groups) if rank in group)
