"""The frontier between latency (steps) and bandwidth (rounds per chunk), complete where it can be proved.

For each number of steps from the latency on: the least R/C over all C, and the smallest C that attains it
(`synth.chunks.curve`). Points that improve on all fewer steps are the frontier. It ends where the static
limit is reached, within a tolerance of it, at the largest S asked, or at the deadline. An allreduce is no
problem of copies, and has a way of its own (`synth.chunks.allreduce.allreduce_frontier`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from arborcast.synth import bounds
from arborcast.synth.chunks.allreduce.allreduce_frontier import trace_allreduce
from arborcast.synth.chunks.allreduce.halves import Half, latency_of_parts, static_ratio
from arborcast.synth.chunks.allreduce.partial_sums import sum_problem
from arborcast.synth.chunks.allreduce.points import ON_GRID, Point, point_method, point_of
from arborcast.synth.chunks.curve import CopyOptimum, Curve, FrontierOptions
from arborcast.synth.chunks.quantized_rates import QuantizedRates
from arborcast.synth.collective import Collective, Kind, Question, as_collective
from arborcast.synth.deadline import Deadline, Limit, check_seconds
from arborcast.synth.errors import InfeasibleError, InputError, Prover
from arborcast.synth.features import check_features
from arborcast.synth.ports import Ports
from arborcast.synth.routes.reachability import who_is_cut_off
from arborcast.synth.topology import Topology

STEPS_BEYOND_LATENCY = 6
"""How many more steps than the fewest possible are looked at where nothing else is asked."""


@dataclass(frozen=True, kw_only=True)
class Frontier(Curve[Point]):
    """The points of a collective in order of steps, and what is known beyond them; see `Curve`, too.

    Attributes:
        topology: the fabric.
        collective: what is done on it.
        grid: what its rates were rounded down to; then all that is said of R/C, limits and proofs, is said
            of the rounded fabric, and schedules alone of the real one. None where rates are as they are.
        limits_of_rate: the exact limits of the rate, GB/s, of the real fabric and of the rounded one.
        static_ratio: the limit of R/C for any number of steps.
        seconds: that it took.
    """

    topology: Topology
    collective: Collective
    grid: QuantizedRates | None
    limits_of_rate: tuple[Fraction, Fraction]
    static_ratio: Fraction
    seconds: float


def pareto(
    topology: Topology,
    collective: Question,
    *,
    root: int = 0,
    ranks: Sequence[int] | None = None,
    max_steps: int | None = None,
    tolerance: Fraction | None = None,
    rate_tolerance: Fraction | None = None,
    deadline_s: Limit = None,
    seed: int = 0,
    jobs: int = 1,
    cache: bool = True,
    proofs: bool = True,
) -> Frontier:
    """The frontier of chunk schedules between steps (latency) and rounds per chunk (bandwidth).

    Args:
        topology: the fabric, whose switches only forward here, whatever else they can do.
        collective: a kind by name, or a whole `Collective` (then `root` and `ranks` are not used).
        root: for kinds that have one.
        ranks: those that take part; None for all.
        max_steps: the largest S looked at; None for the latency (of an allreduce, that of a reduce-scatter
            and an allgather) and `STEPS_BEYOND_LATENCY` more.
        tolerance: stop where R/C is within this part of the static limit; None: only where it is attained.
        rate_tolerance: the part of its rate that each link may lose; see `synth.chunks.quantized_rates`.
            Where rates are rounded, nothing is searched for proofs, blocks have few chunks, and it also
            counts as the tolerance of R/C where none is given.
        deadline_s: limit in seconds; what was found by then is returned. None for no limit.
        seed: of the solvers.
        jobs: numbers of steps worked on at once, through joblib (whose own backends take over inside
            `joblib.parallel_config`); negative for all cores but so many, as joblib counts. Of an
            allreduce always one at a time.
        cache: whether to keep and use answers on disk.
        proofs: whether to prove the points; otherwise good schedules are looked for with little effort.

    Raises:
        InputError: a collective that does not fit, or a number out of its range.
        InfeasibleError: some rank cannot be reached, or `max_steps` is below the latency; carries the proof.

    Examples:
        >>> frontier = synth.pareto(topologies.load("ring:4"), "allgather", cache=False)
        >>> [(point.chunks, point.steps, point.rounds) for point in frontier.points]
        [(2, 2, 3)]
    """
    start = time.perf_counter()
    topology = topology.forwarding
    collective = as_collective(topology, collective, root=root, ranks=ranks)
    check_features(topology, "frontier of chunks")
    ports = Ports.of(topology) if topology.streams else None
    topology = topology if ports is None else ports.fabric
    deadline = Deadline.after(deadline_s)
    _check(tolerance, jobs, max_steps, deadline_s)
    real = bounds.bound(topology, collective, deadline=deadline)
    if real.rate == 0:
        raise InfeasibleError(who_is_cut_off(topology, collective), real)
    grid, fabric, limit = QuantizedRates.of(topology, rate_tolerance), topology, real
    if grid is not None:
        topology = grid.rounded
        limit = bounds.bound(topology, collective, deadline=deadline)
    options = FrontierOptions(tolerance or Fraction(0), seed, jobs, cache, proofs)
    if grid is not None:
        near = grid.tolerance if tolerance is None else tolerance
        options = FrontierOptions(near, seed, jobs, cache, proofs=False, slack=grid.tolerance)
    latency = latency_of(topology, collective)
    last = max_steps
    if last is None:
        # Hierarchies need more steps than what is searched as it is, and are among what is looked at.
        last = (latency_of_parts(topology, collective) or latency) + STEPS_BEYOND_LATENCY
    if last < latency:
        words = f"{collective.kind}: needs at least {latency} steps, got a maximum of {last}"
        raise InfeasibleError(words, proved_by=[Prover.LIMIT])
    if collective.kind is Kind.ALLREDUCE:
        traced = trace_allreduce(topology, collective, limit, last, options, deadline)
    else:
        half = Half.of(topology, collective, limit)
        curve = half.trace(last - latency, options, deadline)
        traced = Curve(**(vars(curve) | {"points": tuple(_single(half, curve, seed))}))
    points = traced.points
    if grid is not None:
        lifted = (grid.lift(point.schedule, real) for point in points)
        points = tuple(
            replace(point, schedule=schedule, scope=f"{point.scope} {ON_GRID}")
            for point, schedule in zip(points, lifted, strict=True)
        )
    found = Frontier(
        **(vars(traced) | {"points": points}),
        topology=fabric,
        collective=collective,
        grid=grid,
        limits_of_rate=(real.rate, limit.rate),
        static_ratio=static_ratio(topology, collective, limit),
        seconds=round(time.perf_counter() - start, 3),
    )
    return found if ports is None else _lifted(found, ports)


def _lifted(frontier: Frontier, ports: Ports) -> Frontier:
    """A frontier of the graph with ports as one of the fabric: its limits hold there, too.

    A schedule that holds streams for more rounds than its loads take, as messages over slow links do, has
    these rounds, of which nothing is proved.
    """
    points: list[Point] = []
    open_steps = set(frontier.open_steps)
    for point in frontier.points:
        schedule = ports.lift(point.schedule)
        rounds = sum(schedule.rounds or ())
        found = replace(point, schedule=schedule)
        if rounds > point.rounds:
            open_steps.add(point.steps)
            proof = f"streams are held for {rounds} rounds, loads take {point.rounds}"
            found = replace(found, rounds=rounds, is_proved=False, proof=proof, proved_by=())
        if not points or found.ratio < points[-1].ratio:
            points.append(found)
    complete = frontier.complete and open_steps == set(frontier.open_steps)
    return replace(
        frontier,
        topology=ports.topology,
        points=tuple(points),
        complete=complete,
        open_steps=tuple(sorted(open_steps)),
    )


def latency_of(topology: Topology, collective: Collective) -> int:
    """The fewest steps of any schedule.

    Raises:
        InfeasibleError: some rank cannot be reached.
    """
    if collective.kind is Kind.ALLREDUCE:
        steps = sum_problem(topology, collective).latency
    else:
        steps = latency_of_parts(topology, collective)
    if steps is None:
        raise InfeasibleError(who_is_cut_off(topology, collective), bounds.bound(topology, collective))
    return steps


def _single(half: Half, curve: Curve[CopyOptimum], seed: int) -> Iterator[Point]:
    for optimum in curve.points:
        plan, chunks = optimum.plan, optimum.chunks
        assert plan is not None, "a point of a curve has a plan"
        yield point_of(optimum, half.schedule(chunks, plan, point_method(chunks, plan.rounds, seed)))


def _check(tolerance: Fraction | None, jobs: int, max_steps: int | None, deadline_s: Limit) -> None:
    if tolerance is not None and tolerance < 0:
        raise InputError(f"tolerance must not be negative, got {tolerance}")
    if jobs == 0:
        raise InputError("jobs must be a number of processes, or -1 for all cores, got 0")
    if max_steps is not None and max_steps < 1:
        raise InputError(f"max-steps: must be at least 1, got {max_steps}")
    check_seconds(deadline_s)
