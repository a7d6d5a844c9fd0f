"""One (C, S, R) by one encoding: a schedule, the proof that there is none, or out of time.

Before a solver is asked, exact limits answer what they can: the latency, the static limit, and the limit of
S steps. An allreduce is searched as it is by CaDiCaL, and says "none" only with a proof over every schedule;
the other encodings compose it of a reduce-scatter and an allgather, and what they say is said of these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from arborcast.synth import bounds
from arborcast.synth.certificate import Bound, Scope
from arborcast.synth.chunks.allreduce.halves import Half, latency_of_parts, parts_of, static_ratio
from arborcast.synth.chunks.allreduce.partial_sums import SumPlan, sum_problem, sum_schedule
from arborcast.synth.chunks.allreduce.searcher import SearchEffort, SumAnswer, SumSearcher
from arborcast.synth.chunks.bounds.flow_bound import flow_bound
from arborcast.synth.chunks.bounds.step_certificate import StaticLimit, StepBound
from arborcast.synth.chunks.problem.outcome import Infeasible, Unknown
from arborcast.synth.chunks.problem.prune import ChunkPlan
from arborcast.synth.chunks.problem.time_reversal import allreduce_of
from arborcast.synth.chunks.quantized_rates import QuantizedRates
from arborcast.synth.chunks.solvers.cache import ChunkCache
from arborcast.synth.chunks.solvers.search import Searcher
from arborcast.synth.chunks.solvers.solver_child import SolverProcess, WorkerDiedError
from arborcast.synth.chunks.step_result import explain
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
        rate_tolerance: the part of its rate that each link may lose; see `synth.chunks.quantized_rates`.
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
    grid = QuantizedRates.of(topology, rate_tolerance) if real.rate else None
    fabric, limit = topology, real
    if grid is not None:
        fabric, limit = grid.rounded, bounds.bound(grid.rounded, collective, deadline=deadline)
    settings = (("chunks", size.chunks), ("steps", size.steps), ("rounds", size.rounds))
    how, kept = Method(method, seed, settings), ChunkCache() if cache else None
    with SolverProcess() as child:
        question = _Question(fabric, collective, limit, size, how, deadline, child, kept)
        try:
            found = question.answer()
        except InfeasibleError as none:
            shown = none if proof is None else question.with_proof(none, proof)
            words = "" if grid is None else f"; {grid} (rate tolerance 0 takes them as they are)"
            raise InfeasibleError(
                f"{shown}{words}", shown.proof, proved_by=shown.proved_by, proof_file=shown.proof_file
            ) from none
        except WorkerDiedError as error:
            raise SolverDiedError(f"{collective.kind} {size}: {error}") from error
    return found if grid is None else grid.lift(found, real)


FIRST_SLICES = 2
"""Effort of a direct search for an allreduce before its compositions have a turn."""

MOST_SENDS = 20_000
"""Possible transfers (chunks, routes and steps multiplied) beyond which they have it at once."""


@dataclass(frozen=True)
class _Question:
    """A collective on a fabric whose rates are as they are counted in, its limit, and how to go about it."""

    topology: Topology
    collective: Collective
    limit: Bound
    size: Size
    method: Method
    deadline: Deadline
    child: SolverProcess
    cache: ChunkCache | None

    def answer(self) -> Schedule:
        """A schedule of that size.

        Raises:
            InfeasibleError, InputError, TimedOutError: see `solve_by_chunks`.
            WorkerDiedError: the solver crashed or ran out of memory.
        """
        if self.limit.rate == 0:
            raise InfeasibleError(who_is_cut_off(self.topology, self.collective), self.limit)
        if self.collective.kind is not Kind.ALLREDUCE:
            return self._half(self.collective, self.limit).answer(self.size)
        return self._sums() if self.method.name == "sat" else self._composed()

    def with_proof(self, none: InfeasibleError, proof: Path) -> InfeasibleError:
        """The same answer, with CaDiCaL's proof of it in a file where its formula allows one."""
        from arborcast.synth.chunks.refutation import formula_file, write_refutation

        size = (self.size.chunks, self.size.steps, self.size.rounds)
        try:
            written = write_refutation(
                self.topology, self.collective, size, proof, deadline=self.deadline, child=self.child
            )
        except (TimedOutError, WorkerDiedError) as error:
            kind = SolverDiedError if isinstance(error, WorkerDiedError) else TimedOutError
            raise kind(f"{none}; without a proof in {proof}: {error}") from error
        if not written:
            why = "messages over which every contribution could come to every rank are not excluded"
            words = f"{none}; no DRAT proof in {proof}: {why}"
            return InfeasibleError(words, none.proof, proved_by=none.proved_by)
        words = f"{none}; DRAT proof in {proof}, of the formula in {formula_file(proof)}"
        by = (*none.proved_by, Prover.CADICAL)
        return InfeasibleError(words, none.proof, proved_by=by, proof_file=proof)

    def _half(self, collective: Collective, limit: Bound) -> _Half:
        half = Half.of(self.topology, collective, limit)
        method = self.method
        searcher = Searcher(half.problem, method.seed, self.deadline, self.child, self.cache, method.name)
        return _Half(half, searcher, method)

    def _sums(self) -> Schedule:
        """An allreduce searched as it is; its compositions, which are some, where that takes long."""
        size = self.size
        problem = sum_problem(self.topology, self.collective)
        sums = SumSearcher(problem, self.method.seed, self.deadline, self.child, self.cache)
        assert problem.latency is not None, "a collective with a rate above zero reaches everybody"
        _check_steps("allreduce", problem.latency, size)
        flows = sums.flow_limit(size.steps)
        limits = [] if flows is None else [flows]
        if self.limit.scope is Scope.EVERY_SCHEDULE:
            ratio = static_ratio(self.topology, self.collective, self.limit)
            limits.append(StepBound(size.steps, ratio, StaticLimit(self.limit)))
        _check_ratio("allreduce", size, limits)
        answer: SumAnswer = Unknown()
        if self._may_be_composed():
            if size.chunks * size.steps * len(problem.routes) <= MOST_SENDS:
                answer = sums.search(size.chunks, size.steps, size.rounds, SearchEffort(FIRST_SLICES))
            if type(answer) is Unknown:
                with contextlib.suppress(InfeasibleError):
                    return self._composed()
        if type(answer) is Unknown:
            answer = sums.search(size.chunks, size.steps, size.rounds)
        if isinstance(answer, Infeasible):
            words = f"allreduce {size}: there is none, proved by {answer.proved_by} over every schedule"
            raise InfeasibleError(words, proved_by=[answer.proved_by])
        if not isinstance(answer, SumPlan):
            raise InfeasibleError(
                f"allreduce {size}: there is none with one partial sum per rank and chunk, proved by "
                "CaDiCaL; schedules that keep several apart are not excluded"
            )
        return sum_schedule(
            self.topology,
            self.collective,
            problem,
            size.chunks,
            answer,
            method=self.method,
            bound=self.limit,
        )

    def _may_be_composed(self) -> bool:
        """Whether the numbers of an allreduce are such that there may be a composition."""
        latency = latency_of_parts(self.topology, self.collective)
        whole = self.size.chunks % len(self.collective.ranks) == 0
        return whole and (latency or 0) <= self.size.steps <= self.size.rounds

    def _composed(self) -> Schedule:
        """An allreduce as a reduce-scatter of some of the steps and rounds, then an allgather of the rest."""
        size, ranks = self.size, len(self.collective.ranks)
        if size.chunks % ranks:
            raise InputError(
                f"allreduce: chunks must be a multiple of its {ranks} ranks, who own as many each, "
                f"got {size.chunks}"
            )
        halves = [self._half(part, bounds.bound(self.topology, part)) for part in parts_of(self.collective)]
        first, second = (each.half.latency for each in halves)
        name = "allreduce, as a reduce-scatter and an allgather"
        _check_steps(name, first + second, size, proved_by=())
        provers: dict[Prover, None] = {}
        # The most even division of the steps first.
        for steps in sorted(range(first, size.steps - second + 1), key=lambda s: abs(2 * s - size.steps)):
            pair = _in_steps(halves, steps, replace(size, chunks=size.chunks // ranks), provers)
            if pair is not None:
                return allreduce_of(self.collective, *pair, method=self.method, bound=self.limit)
        inexact = [prover for prover in provers if not prover.is_exact]
        how = f"not proved: according to {inexact[0]}" if inexact else f"proved by {' and '.join(provers)}"
        raise InfeasibleError(
            f"allreduce {size}: no reduce-scatter and allgather compose it in any division of its steps "
            f"and rounds, {how}; other schedules are not excluded, method sat looks at all"
        )


@dataclass(frozen=True)
class _Half:
    """A collective that is one problem, and who answers it."""

    half: Half
    searcher: Searcher
    method: Method

    def answer(self, size: Size) -> Schedule:
        """A schedule of that size; raises as `_Question.answer`."""
        name = self.half.collective.kind
        _check_steps(name, self.half.latency, size)
        _check_ratio(name, size, [replace(self.half.static, steps=size.steps)])
        flows = flow_bound(self.half.problem, size.steps, deadline=self.searcher.deadline)
        _check_ratio(name, size, [flows] if flows else [])
        answer = self.searcher.search(size.chunks, size.steps, size.rounds)
        if isinstance(answer, Infeasible):
            words = f"{name} {size}: there is none, "
            words += "proved by" if answer.is_proof else "not proved: according to"
            raise InfeasibleError(f"{words} {answer.proved_by}", proved_by=[answer.proved_by])
        assert isinstance(answer, ChunkPlan), "without a limit of effort every search ends"
        return self.half.schedule(size.chunks, answer, self.method)


def _in_steps(
    halves: Sequence[_Half], steps: int, size: Size, provers: dict[Prover, None]
) -> tuple[Schedule, Schedule] | None:
    """The first half of so many steps in as few rounds as it can, the other in what is left of a size.

    With C and S fixed a schedule of R rounds becomes one of R + 1 by making a step longer, so that the
    fewest rounds of the first half leave the second one the best chance. Whoever says that there is
    none is added to `provers`.
    """
    rest = size.steps - steps
    for rounds in range(steps, size.rounds - rest + 1):
        first = None
        try:
            first = halves[0].answer(replace(size, steps=steps, rounds=rounds))
            return first, halves[1].answer(replace(size, steps=rest, rounds=size.rounds - rounds))
        except InfeasibleError as none:
            provers.update(dict.fromkeys(none.proved_by))
            if first is not None:
                break
    return None


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
