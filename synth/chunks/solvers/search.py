"""One instance of (C, S, R), answered: by the cache, or by an encoding, with and without symmetry in turns.

This is where the pieces meet: groups of symmetries, encodings, child processes. A plan that comes out of
here was pruned; that it is correct is still for `synth.verification.verifier` to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from arborcast.synth.chunks.encodings.registry import ENCODINGS, Encoding
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkOrbits, ChunkSend
from arborcast.synth.chunks.problem.outcome import Feasible, Infeasible, Unknown
from arborcast.synth.chunks.problem.prune import ChunkPlan, prune
from arborcast.synth.chunks.problem.symmetry import useful_groups
from arborcast.synth.chunks.solvers.cache import ChunkCache, kept_or_found
from arborcast.synth.chunks.solvers.portfolio import PortfolioMember, PortfolioResult, run_portfolio
from arborcast.synth.chunks.solvers.solver_child import SolverProcess
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import Prover

Answer: TypeAlias = ChunkPlan | Infeasible | Unknown

MOST_GROUPS = 3
"""How many groups are tried: a large one may admit no schedule."""


@dataclass
class ProblemSearcher:
    """Answers instances of one problem.

    Attributes:
        problem: what is to be done.
        seed: of the solvers; the same seed gives the same plan on any machine.
        deadline: of all searches together.
        child: the process in which solvers run.
        cache: where answers are kept; None to keep none.
        encodings: those of the members of its portfolios, by name.
    """

    problem: ChunkProblem
    seed: int
    deadline: Deadline
    child: SolverProcess
    cache: ChunkCache | None
    encodings: ClassVar[Mapping[str, Encoding]] = ENCODINGS

    def _portfolio(
        self, members: Sequence[PortfolioMember], steps: int, rounds: int, slices: int | None
    ) -> PortfolioResult:
        return run_portfolio(
            members,
            steps=steps,
            rounds=rounds,
            seed=self.seed,
            deadline=self.deadline,
            child=self.child,
            slices=slices,
            encodings=self.encodings,
        )


@dataclass
class Searcher(ProblemSearcher):
    """Looks for copies.

    Attributes:
        encoding: by which a solver is asked.
    """

    encoding: str
    _groups: dict[int, tuple[ChunkOrbits, ...]] = field(default_factory=dict)

    def search(self, chunks: int, steps: int, rounds: int, *, slices: int | None = None) -> Answer:
        """A plan, a solver's word that there is none, or `Unknown` after so many slices.

        S is at least the latency of the problem, R at least S; for `slices` see
        `synth.chunks.solvers.portfolio`.

        Raises:
            TimedOutError: the deadline passed.
        """
        return kept_or_found(
            self.cache,
            "instance",
            self.problem,
            lambda: self._searched(chunks, steps, rounds, slices),
            (ChunkPlan, ChunkSend, Infeasible, Prover),
            is_final=lambda answer: not isinstance(answer, Unknown),
            size=[chunks, steps, rounds],
            encoding=self.encoding,
            seed=self.seed,
            slices=slices,
        )

    def _searched(self, chunks: int, steps: int, rounds: int, slices: int | None) -> Answer:
        result = self._portfolio(self._members(chunks), steps, rounds, slices)
        match result.outcome:
            case Feasible(found_rounds, sends):
                assert result.member is not None, "somebody found it"
                unfolded = result.member.orbits.unfold(sends)
                return prune(self.problem, chunks, found_rounds, unfolded)
            case outcome:
                return outcome

    def _members(self, chunks: int) -> list[PortfolioMember]:
        """Groups first, the larger the faster where one fits, then the problem as it is."""
        whole = ChunkOrbits.trivial(self.problem, chunks)
        orbits = (*self._reduced(chunks)[:MOST_GROUPS], whole)
        return [PortfolioMember(self.encoding, each) for each in orbits]

    def _reduced(self, chunks: int) -> tuple[ChunkOrbits, ...]:
        if chunks not in self._groups:
            groups = useful_groups(self.problem, chunks)
            self._groups[chunks] = tuple(ChunkOrbits(self.problem, chunks, group) for group in groups)
        return self._groups[chunks]
