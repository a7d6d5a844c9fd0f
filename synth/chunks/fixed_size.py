"""One (C, S, R) by one encoding: a schedule, the proof that there is none, or out of time.

Before a solver is asked, exact limits answer what they can: the latency, the static limit, and the limit of
S steps. An allreduce is searched as it is by CaDiCaL, and says "none" only with a proof over every schedule;
the other encodings compose it of a reduce-scatter and an allgather, and what they say is said of these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from arborcast.synth import bounds
from arborcast.synth.certificate import Bound, Scope
from arborcast.synth.chunks.bounds.certificate import StaticLimit, StepBound
from arborcast.synth.chunks.bounds.flow_bounds import cut_bound
from arborcast.synth.chunks.grid import Grid
from arborcast.synth.chunks.optimum import explain
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.outcome import Infeasible, Unknown
from arborcast.synth.chunks.problem.prune import ChunkPlan
from arborcast.synth.chunks.problem.time_reversal import allreduce_of, mirrored
from arborcast.synth.chunks.solvers.cache import ChunkCache
from arborcast.synth.chunks.solvers.search import Searcher
from arborcast.synth.chunks.solvers.worker import WorkerDiedError, Workers
from arborcast.synth.chunks.sums.halves import Half, parts_of, static_ratio
from arborcast.synth.chunks.sums.instance import SumPlan, sum_problem, sum_schedule
from arborcast.synth.chunks.sums.searcher import SearchEffort, SumAnswer, SumSearcher
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline, Limit
from arborcast.synth.errors import InfeasibleError, InputError, Prover, SolverDiedError, TimedOutError
from arborcast.synth.routes.reachability import who_is_cut_off
from arborcast.synth.schedule import Method, Schedule
from arborcast.synth.topology import Topology


@dataclass(frozen=True, slots=True)
class Size:
    """What SCCL calls an instance's (C, S, R).

    Attributes:
        chunks: C, of the buffer (broadcast, reduce, allreduce), of a rank's block (allgather,
            reduce-scatter, gather, scatter), of a pair's block (alltoall), of each block (custom).
        steps: S.
        rounds: R, of all steps together.
    """

    chunks: int
    steps: int
    rounds: int

    def __str__(self) -> str:
        """As the literature writes it."""
        return f"({self.chunks}, {self.steps}, {self.rounds})"


def solve_by_chunks(
    topology: Topology,
    collective: Collective,
    method: str,
    size: Size,
    *,
    rate_tolerance: Fraction | None = None,
    seed: int = 0,
    deadline_s: Limit = None,
    cache: bool = True,
    proof: Path | None = None,
) -> Schedule:
    """A step-synchronous schedule of C chunks, S steps and R rounds.

    Args:
        topology: the fabric.
        collective: what to do on it.
        method: "smt", "ilp" or "sat".
        size: (C, S, R), whose rounds are those of the grid where rates are rounded.
        rate_tolerance: the part of its rate that each link may lose; see `synth.chunks.grid.Grid.of`.
        seed: of the solver.
        deadline_s: limit in seconds; None for no limit.
        cache: whether to keep and use answers on disk.
        proof: where there is none, the file for CaDiCaL's proof of it (see
        `synth.chunks.refutation`).

    Raises:
        InputError: a number below 1; for an allreduce not by "sat", chunks that its ranks do not divide.
        InfeasibleError: there is none; the message says how that was proved or that it was not, `proof` is
            the exact limit where one proves it.
        TimedOutError: the deadline passed.
        SolverDiedError: the solver crashed or ran out of memory.
    """
    for name in ("chunks", "steps", "rounds"):
        if getattr(size, name) < 1:
            raise InputError(f"{name} must be at least 1, got {getattr(size, name)}")
    deadline = Deadline.after(deadline_s)
    real = bounds.bound(topology, collective, deadline=deadline)
    grid = Grid.of(topology, rate_tolerance)
    if grid is None or real.rate == 0:
        return _solved(topology, collective, method, size, real, seed, deadline, cache, proof)
    limit = bounds.bound(grid.rounded, collective, deadline=deadline)
    try:
        found = _solved(grid.rounded, collective, method, size, limit, seed, deadline, cache, proof)
    except InfeasibleError as none:
        raise InfeasibleError(
            f"{none}; {grid} (rate tolerance 0 takes them as they are)",
            none.proof,
            proved_by=none.proved_by,
            proof_file=none.proof_file,
        ) from none
    return grid.lift(found, real)


def _solved(
    topology: Topology,
    collective: Collective,
    method: str,
    size: Size,
    limit: Bound,
    seed: int,
    deadline: Deadline,
    cache: bool,
    proof: Path | None,
) -> Schedule:
    """A schedule of that size on a fabric whose rates are as they are counted in; raises as the caller."""
    settings = (("chunks", size.chunks), ("steps", size.steps), ("rounds", size.rounds))
    how = Method(method, seed, settings)
    with Workers() as workers:

        def searcher(problem: ChunkProblem) -> Searcher:
            kept = ChunkCache() if cache else None
            return Searcher(problem, (method,), seed, deadline, workers, kept)

        try:
            if limit.rate == 0:
                raise InfeasibleError(who_is_cut_off(topology, collective), limit)
            if collective.kind is Kind.ALLREDUCE:
                composition = _Composition(topology, collective, limit, size, how)
                if method != "sat":
                    return composition.solve(searcher)
                kept = ChunkCache() if cache else None
                sums = SumSearcher(sum_problem(topology, collective), seed, deadline, workers, kept)
                return _solve_sums(composition, sums, searcher)
            return _Question.of(topology, collective, limit, searcher).solve(size, how)
        except InfeasibleError as none:
            if proof is None:
                raise
            raise _with_proof(none, topology, collective, size, proof, deadline, workers) from none
        except WorkerDiedError as error:
            raise SolverDiedError(f"{collective.kind} {size}: {error}") from error


def _with_proof(
    none: InfeasibleError,
    topology: Topology,
    collective: Collective,
    size: Size,
    proof: Path,
    deadline: Deadline,
    workers: Workers,
) -> InfeasibleError:
    """The same answer, with CaDiCaL's proof of it in a file where its formula allows one."""
    from arborcast.synth.chunks.refutation import formula_file, write_refutation

    asked = (size.chunks, size.steps, size.rounds)
    try:
        written = write_refutation(topology, collective, asked, proof, deadline=deadline, workers=workers)
    except (TimedOutError, WorkerDiedError) as error:
        kind = SolverDiedError if isinstance(error, WorkerDiedError) else TimedOutError
        raise kind(f"{none}; without a proof in {proof}: {error}") from error
    if not written:
        why = "messages over which every contribution could come to every rank are not excluded"
        return InfeasibleError(
            f"{none}; no DRAT proof in {proof}: {why}", none.proof, proved_by=none.proved_by
        )
    words = f"{none}; DRAT proof in {proof}, of the formula in {formula_file(proof)}"
    by = (*none.proved_by, Prover.CADICAL)
    return InfeasibleError(words, none.proof, proved_by=by, proof_file=proof)


@dataclass(frozen=True)
class _Question:
    """A collective that is one problem, and who answers it."""

    half: Half
    searcher: Searcher

    @classmethod
    def of(
        cls,
        topology: Topology,
        collective: Collective,
        limit: Bound,
        searcher: Callable[[ChunkProblem], Searcher],
    ) -> _Question:
        half = Half.of(topology, collective, limit)
        return cls(half, searcher(half.problem))

    def solve(self, size: Size, method: Method) -> Schedule:
        self._check_limits(size)
        answer = self.searcher.search(size.chunks, size.steps, size.rounds)
        if isinstance(answer, Infeasible):
            words = f"{self.half.collective.kind} {size}: there is none, "
            words += "proved by" if answer.is_proof else "not proved: according to"
            raise InfeasibleError(f"{words} {answer.proved_by}", proved_by=[answer.proved_by])
        assert isinstance(answer, ChunkPlan), "without a limit of effort every search ends"
        return self.half.schedule(size.chunks, answer, method)

    def _check_limits(self, size: Size) -> None:
        """Raise InfeasibleError where a limit answers without any search."""
        name = self.half.collective.kind
        _check_steps(name, self.half.latency, size)
        _check_ratio(name, size, [replace(self.half.static, steps=size.steps)])
        _check_ratio(name, size, [cut_bound(self.half.problem, size.steps, deadline=self.searcher.deadline)])


FIRST_SLICES = 2
"""Effort of a direct search for an allreduce before its compositions have a turn."""

MOST_SENDS = 20_000
"""Possible transfers (chunks, routes and steps multiplied) beyond which they have it at once."""


def _solve_sums(
    asked: _Composition, sums: SumSearcher, searcher: Callable[[ChunkProblem], Searcher]
) -> Schedule:
    """An allreduce searched as it is; its compositions, which are some, where that takes long."""
    size = asked.size
    _check_sum_limits(asked, sums)
    answer: SumAnswer = Unknown()
    if asked.may_be:
        if size.chunks * size.steps * len(sums.problem.routes) <= MOST_SENDS:
            answer = sums.search(size.chunks, size.steps, size.rounds, SearchEffort(FIRST_SLICES))
        if type(answer) is Unknown:
            with contextlib.suppress(InfeasibleError):
                return asked.solve(searcher)
    if type(answer) is Unknown:
        answer = sums.search(size.chunks, size.steps, size.rounds)
    if isinstance(answer, Infeasible):
        words = f"allreduce {size}: there is none, proved by {answer.proved_by} over every schedule"
        raise InfeasibleError(words, proved_by=[answer.proved_by])
    if not isinstance(answer, SumPlan):
        raise InfeasibleError(
            f"allreduce {size}: there is none with one partial sum per rank and chunk, proved by CaDiCaL; "
            "schedules that keep several apart are not excluded"
        )
    return sum_schedule(
        asked.topology,
        asked.collective,
        sums.problem,
        size.chunks,
        answer,
        method=asked.method,
        bound=asked.limit,
    )


def _check_sum_limits(asked: _Composition, sums: SumSearcher) -> None:
    """Raise InfeasibleError where a limit over every schedule answers without any search."""
    latency, size = sums.problem.latency, asked.size
    assert latency is not None, "a collective with a rate above zero reaches everybody"
    _check_steps("allreduce", latency, size)
    flows = sums.flow_limit(size.steps)
    limits = [] if flows is None else [flows]
    if asked.limit.scope is Scope.EVERY_SCHEDULE:
        ratio = static_ratio(asked.topology, asked.collective, asked.limit)
        limits.append(StepBound(size.steps, ratio, StaticLimit(asked.limit)))
    _check_ratio("allreduce", size, limits)


def _check_ratio(name: str, size: Size, limits: Iterable[StepBound]) -> None:
    """Raise InfeasibleError with the first limit that says that so few rounds are not enough."""
    ratio = Fraction(size.rounds, size.chunks)
    for bound in limits:
        if ratio < bound.ratio:
            raise InfeasibleError(
                f"{name} {size}: {size.steps} steps need at least {bound.ratio} rounds per chunk, "
                f"whatever the number of chunks, got {ratio}; proved by {explain(bound)}",
                bound,
            )


def _check_steps(
    name: str, latency: int, size: Size, *, proved_by: Sequence[Prover] = (Prover.LIMIT,)
) -> None:
    """Raise InfeasibleError where there are too few steps, or fewer rounds than steps.

    Args:
        name: what is asked for.
        latency: the steps that it needs.
        size: (C, S, R).
        proved_by: nobody where the latency is not that of every schedule.
    """
    if size.steps < latency:
        words = f"{name}: needs at least {latency} steps, got {size.steps}"
        raise InfeasibleError(words, proved_by=proved_by)
    if size.rounds < size.steps:
        words = f"{name}: every step takes a round, so {size.steps} steps need as many, got {size.rounds}"
        raise InfeasibleError(words, proved_by=[Prover.LIMIT])


@dataclass(frozen=True)
class _Composition:
    """An allreduce: a reduce-scatter of some of the steps and rounds, then an allgather of the others."""

    topology: Topology
    collective: Collective
    limit: Bound
    size: Size
    method: Method

    def solve(self, searcher: Callable[[ChunkProblem], Searcher]) -> Schedule:
        ranks = len(self.collective.ranks)
        if self.size.chunks % ranks:
            raise InputError(
                f"allreduce: chunks must be a multiple of its {ranks} ranks, who own as many each, "
                f"got {self.size.chunks}"
            )
        halves = [
            _Question.of(self.topology, part, bounds.bound(self.topology, part), searcher)
            for part in parts_of(self.collective)
        ]
        together = sum(each.half.latency for each in halves)
        _check_steps("allreduce, as a reduce-scatter and an allgather", together, self.size, proved_by=())
        provers: dict[Prover, None] = {}
        for steps in self._splits(halves):
            pair = self._with_steps(halves, steps, provers)
            if pair is not None:
                return allreduce_of(self.collective, *pair, method=self.method, bound=self.limit)
        inexact = [prover for prover in provers if not prover.is_exact]
        how = f"not proved: according to {inexact[0]}" if inexact else f"proved by {' and '.join(provers)}"
        raise InfeasibleError(
            f"allreduce {self.size}: no reduce-scatter and allgather compose it in any division of its steps "
            f"and rounds, {how}; other schedules are not excluded, method sat looks at all"
        )

    @property
    def may_be(self) -> bool:
        """Whether its numbers are such that there may be one."""
        parts = [ChunkProblem.of(*mirrored(self.topology, part)) for part in parts_of(self.collective)]
        return (
            self.size.chunks % len(self.collective.ranks) == 0
            and sum(part.latency or 0 for part in parts) <= self.size.steps <= self.size.rounds
        )

    def _splits(self, halves: Sequence[_Question]) -> list[tuple[int, int]]:
        """Steps of the two halves, the most even division first."""
        first, second = (each.half.latency for each in halves)
        divisions = [(s, self.size.steps - s) for s in range(first, self.size.steps - second + 1)]
        return sorted(divisions, key=lambda pair: abs(pair[0] - pair[1]))

    def _with_steps(
        self, halves: Sequence[_Question], steps: tuple[int, int], provers: dict[Prover, None]
    ) -> tuple[Schedule, Schedule] | None:
        """The first half in as few rounds as it can, the other in those that are left.

        With C and S fixed a schedule of R rounds becomes one of R + 1 by making a step longer, so that the
        fewest rounds of the first half leave the second one the best chance. Whoever says that there is
        none is added to `provers`.
        """
        chunks = self.size.chunks // len(self.collective.ranks)
        for rounds in range(steps[0], self.size.rounds - steps[1] + 1):
            try:
                first = halves[0].solve(Size(chunks, steps[0], rounds), self.method)
            except InfeasibleError as none:
                provers.update(dict.fromkeys(none.proved_by))
                continue
            try:
                rest = self.size.rounds - rounds
                return first, halves[1].solve(Size(chunks, steps[1], rest), self.method)
            except InfeasibleError as none:
                provers.update(dict.fromkeys(none.proved_by))
                return None
        return None
