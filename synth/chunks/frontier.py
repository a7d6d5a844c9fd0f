"""The frontier between latency (steps) and bandwidth (rounds per chunk), complete where it can be proved.

For each number of steps from the latency on: the least R/C over all C, and the smallest C that attains it
(`synth.chunks.curve`). Points that improve on all fewer steps are the frontier. It ends where the static
limit is reached, within a tolerance of it, at the largest S asked, or at the deadline. An allreduce is
composed of a reduce-scatter and an allgather, so its frontier is that of the sums of their points.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

from synth import bounds
from synth.certificate import Bound
from synth.chunks.curve import Curve, Effort, trace
from synth.chunks.lift import Plan
from synth.chunks.mirror import allreduce_of, mirrored, repeated, schedule_of, share_of_demand
from synth.chunks.problem import Problem
from synth.chunks.step_bound import StaticLimit, StepBound
from synth.chunks.step_optimum import StepOptimum, explain
from synth.collective import Collective, Kind
from synth.deadline import Deadline
from synth.errors import InfeasibleError, InputError, Prover
from synth.reachability import who_is_cut_off
from synth.schedule import Method, Schedule
from synth.topology import Topology

STEPS_BEYOND_LATENCY = 6
"""How many more steps than the fewest possible are looked at where nothing else is asked."""


@dataclass(frozen=True)
class Point:
    """A schedule that no other one known beats in both steps and R/C.

    Attributes:
        chunks: C.
        steps: S.
        rounds: R.
        least: the proven limit of R/C in so many steps, whatever the number of chunks; of an allreduce:
            of all compositions of a reduce-scatter and an allgather, like what follows.
        is_proved: whether R/C is the least in so many steps and C the smallest that attains it.
        proof: how that was proved, or what is missing.
        proved_by: who says so; empty where something is missing.
        bounds: the exact certificates behind `least`, two for an allreduce (of its halves).
        schedule: what attains it.
    """

    chunks: int
    steps: int
    rounds: int
    least: Fraction
    is_proved: bool
    proof: str
    proved_by: tuple[Prover, ...]
    bounds: tuple[StepBound, ...]
    schedule: Schedule

    @property
    def ratio(self) -> Fraction:
        """R/C."""
        return Fraction(self.rounds, self.chunks)


@dataclass(frozen=True)
class Frontier:
    """The points in order of steps.

    Attributes:
        topology: the fabric.
        collective: what is done on it.
        points: each with more steps and a smaller R/C than the one before.
        static_ratio: the limit of R/C for any number of steps.
        complete: whether nothing is missing: every point is proved and the last one attains the limit (of an
            allreduce: the sum of the limits of its halves, the best that a composition can do).
        why_stopped: what ended it.
        open_steps: numbers of steps at which something is left to prove.
        timed_out: whether the deadline ended it.
        seconds: that it took.
    """

    topology: Topology
    collective: Collective
    points: tuple[Point, ...]
    static_ratio: Fraction
    complete: bool
    why_stopped: str
    open_steps: tuple[int, ...]
    timed_out: bool
    seconds: float


def pareto(
    topology: Topology,
    collective: Collective,
    *,
    max_steps: int | None = None,
    tolerance: Fraction | None = None,
    deadline_s: float | None = None,
    seed: int = 0,
    jobs: int = 1,
    cache: bool = True,
    proofs: bool = True,
) -> Frontier:
    """The frontier of a collective on a topology.

    Args:
        topology: the fabric.
        collective: what to do on it.
        max_steps: the largest S looked at; None for the latency and `STEPS_BEYOND_LATENCY` more.
        tolerance: stop where R/C is within this part of the static limit; None: only where it is attained.
        deadline_s: limit in seconds; what was found by then is returned. None for no limit.
        seed: of the solvers.
        jobs: numbers of steps worked on at once, through joblib (whose own backends take over inside
            `joblib.parallel_config`); negative for all cores but so many, as joblib counts.
        cache: whether to keep and use answers on disk.
        proofs: whether to prove the points; otherwise good schedules are looked for with little effort.

    Raises:
        InputError: a number out of its range.
        InfeasibleError: some rank cannot be reached, or `max_steps` is below the latency.
    """
    start = time.perf_counter()
    deadline = Deadline.after(deadline_s)
    _check(tolerance, jobs, max_steps, deadline_s)
    limit = bounds.bound(topology, collective, deadline_s=deadline.left_s)
    if limit.rate == 0:
        raise InfeasibleError(who_is_cut_off(topology, collective), limit)
    effort = Effort(tolerance or Fraction(0), seed, jobs, cache, proofs)
    halves = [
        _Half.of(
            topology,
            part,
            limit if part == collective else bounds.bound(topology, part, deadline_s=deadline.left_s),
        )
        for part in parts_of(collective)
    ]
    latency = sum(half.latency for half in halves)
    last = latency + STEPS_BEYOND_LATENCY if max_steps is None else max_steps
    if last < latency:
        words = f"{collective.kind}: needs at least {latency} steps, got a maximum of {last}"
        raise InfeasibleError(words, proved_by=[Prover.LIMIT])
    curves: list[Curve] = []
    for half in halves:
        # On symmetric links the reversed fabric is the fabric: both halves ask the same.
        known = [curve for other, curve in zip(halves, curves, strict=False) if other.asks_as(half)]
        curves.append(
            known[0].with_static(half.static)
            if known
            else half.trace(last - latency, effort, deadline.share(len(halves) - len(curves)))
        )
    points = (
        _joined(topology, collective, limit, halves, curves, seed)
        if collective.kind is Kind.ALLREDUCE
        else _single(halves[0], curves[0], seed)
    )
    kept = tuple(_improving(point for point in points if point.steps <= last))
    why = "; ".join(dict.fromkeys(curve.why_stopped for curve in curves))
    open_steps, complete = curves[0].open_steps, curves[0].complete
    if collective.kind is Kind.ALLREDUCE:
        open_steps = _open_steps(curves, kept, len(collective.ranks), last)
        best = sum(curve.static.ratio for curve in curves) / len(collective.ranks)
        complete = not open_steps and bool(kept) and kept[-1].ratio == best
        if not complete and all(curve.complete for curve in curves):
            why = f"no more than {last} steps were looked at"
    return Frontier(
        topology,
        collective,
        kept,
        static_ratio(topology, collective, limit),
        complete,
        why,
        open_steps,
        any(curve.timed_out for curve in curves),
        round(time.perf_counter() - start, 3),
    )


def latency_of(topology: Topology, collective: Collective) -> int:
    """The fewest steps of any schedule (of an allreduce: of any that is composed of two halves).

    Raises:
        InfeasibleError: some rank cannot be reached.
    """
    steps = [Problem.of(*mirrored(topology, part)).latency for part in parts_of(collective)]
    if None in steps:
        raise InfeasibleError(who_is_cut_off(topology, collective), bounds.bound(topology, collective))
    return sum(step for step in steps if step is not None)


def static_ratio(topology: Topology, collective: Collective, limit: Bound) -> Fraction:
    """The R/C below which the rate of a schedule would exceed its limit."""
    share = Fraction(1) if collective.kind is Kind.ALLREDUCE else share_of_demand(collective)
    return topology.bandwidth_unit / (limit.rate * share)


@dataclass(frozen=True)
class _Half:
    """A collective of its own, or one of the two that an allreduce is composed of."""

    topology: Topology
    collective: Collective
    problem: Problem
    latency: int
    static: StepBound

    @classmethod
    def of(cls, topology: Topology, collective: Collective, limit: Bound) -> _Half:
        problem = Problem.of(*mirrored(topology, collective))
        latency = problem.latency
        assert latency is not None, "a collective with a rate above zero reaches everybody"
        ratio = static_ratio(topology, collective, limit)
        return cls(topology, collective, problem, latency, StepBound(latency, ratio, StaticLimit(limit)))

    def asks_as(self, other: _Half) -> bool:
        """Whether both problems are one and the same, so that a curve of one is a curve of the other."""
        mine, others = self.problem, other.problem
        return (mine.routes, mine.capacities, mine.demands, self.static.ratio) == (
            others.routes,
            others.capacities,
            others.demands,
            other.static.ratio,
        )

    def trace(self, spare: int, effort: Effort, deadline: Deadline) -> Curve:
        return trace(self.problem, self.static, self.latency + spare, effort, deadline)

    def schedule(self, chunks: int, plan: Plan, method: Method) -> Schedule:
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


def _single(half: _Half, curve: Curve, seed: int) -> Iterator[Point]:
    for optimum in curve.points:
        plan, chunks = optimum.plan, optimum.chunks
        assert plan is not None, "a point of a curve has a plan"
        yield Point(
            chunks,
            len(plan.rounds),
            sum(plan.rounds),
            optimum.limit.ratio,
            optimum.is_settled,
            _proof(optimum),
            optimum.proved_by,
            (optimum.limit,),
            half.schedule(chunks, plan, _method(chunks, plan.rounds, seed)),
        )


def _joined(
    topology: Topology,
    collective: Collective,
    limit: Bound,
    halves: Sequence[_Half],
    curves: Sequence[Curve],
    seed: int,
) -> Iterator[Point]:
    """Every point of one half before every point of the other, each with its chunks divided as needed."""
    ranks = len(collective.ranks)
    for first, second in product(curves[0].points, curves[1].points):
        chunks = math.lcm(first.chunks, second.chunks)
        schedules = []
        for half, optimum in zip(halves, (first, second), strict=True):
            assert optimum.plan is not None, "a point of a curve has a plan"
            plan = repeated(optimum.plan, chunks // optimum.chunks)
            schedules.append(half.schedule(chunks, plan, _method(chunks, plan.rounds, seed)))
        rounds = tuple(count for schedule in schedules for count in schedule.rounds or ())
        method = _method(chunks * ranks, rounds, seed)
        least, fewest = _limits_together(curves, len(rounds))
        is_least = Fraction(sum(rounds), chunks) == least
        proof = f"reduce-scatter: {_proof(first)}; allgather: {_proof(second)}; among their compositions"
        if not is_least:
            proof += f" not proved: at least {least / ranks}"
        elif chunks != fewest:
            proof += " the smallest C is not proved"
        yield Point(
            chunks * ranks,
            len(rounds),
            sum(rounds),
            least / ranks,
            is_least and chunks == fewest,
            proof,
            _provers(curves) if is_least and chunks == fewest else (),
            (first.limit, second.limit),
            allreduce_of(collective, *schedules, method=method, bound=limit),
        )


def _provers(curves: Sequence[Curve]) -> tuple[Prover, ...]:
    """All on whose word limits of two curves together may rest."""
    settled = [point for curve in curves for point in curve.points if point.is_settled]
    return (Prover.LIMIT, *dict.fromkeys(prover for point in settled for prover in point.refuted_by))


def _limits_together(curves: Sequence[Curve], steps: int) -> tuple[Fraction, int]:
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


def _open_steps(curves: Sequence[Curve], points: Sequence[Point], ranks: int, last: int) -> tuple[int, ...]:
    """Steps of an allreduce that its halves were looked at for and at which something is left to prove."""
    open_steps = []
    for steps in range(
        sum(min(curve.limits) for curve in curves),
        min(last, sum(max(curve.limits) for curve in curves)) + 1,
    ):
        until = [point for point in points if point.steps <= steps]
        least = _limits_together(curves, steps)[0] / ranks
        if not until or (until[-1].steps == steps and not until[-1].is_proved) or least < until[-1].ratio:
            open_steps.append(steps)
    return tuple(open_steps)


def _improving(points: Iterable[Point]) -> Iterator[Point]:
    """Those with a smaller R/C than any with as few steps or fewer."""
    best: Fraction | None = None
    for point in sorted(points, key=lambda point: (point.steps, point.ratio, point.chunks)):
        if best is None or point.ratio < best:
            best = point.ratio
            yield point


def _method(chunks: int, rounds: Sequence[int], seed: int) -> Method:
    return Method("pareto", seed, (("chunks", chunks), ("steps", len(rounds)), ("rounds", sum(rounds))))


def _proof(optimum: StepOptimum) -> str:
    if optimum.ratio != optimum.limit.ratio:
        return f"not proved: at least {optimum.limit.ratio} by {explain(optimum.limit)}"
    smallest = optimum.smallest or "the smallest C is not proved"
    return f"{explain(optimum.limit)}; {smallest}"


def _check(tolerance: Fraction | None, jobs: int, max_steps: int | None, deadline_s: float | None) -> None:
    if tolerance is not None and tolerance < 0:
        raise InputError(f"tolerance must not be negative, got {tolerance}")
    if jobs == 0:
        raise InputError("jobs must be a number of processes, or -1 for all cores, got 0")
    if max_steps is not None and max_steps < 1:
        raise InputError(f"max-steps: must be at least 1, got {max_steps}")
    if deadline_s is not None and deadline_s <= 0:
        raise InputError(f"deadline must be positive, got {deadline_s} s")
