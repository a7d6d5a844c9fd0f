"""One instance of (C, S, R), answered: by the cache, or by a race of encodings with and without symmetry.

This is where the pieces meet: groups of symmetries, encodings, child processes. A plan that comes out of
here was pruned; that it is correct is still for `synth.verification.verifier` to say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from arborcast.synth.chunks.problem.instance import Problem
from arborcast.synth.chunks.problem.orbits import Orbits
from arborcast.synth.chunks.problem.outcome import Found, Impossible, Unfinished
from arborcast.synth.chunks.problem.prune import Plan, prune
from arborcast.synth.chunks.problem.symmetry import useful_groups
from arborcast.synth.chunks.solvers.cache import ChunkCache
from arborcast.synth.chunks.solvers.portfolio import Entrant, race
from arborcast.synth.chunks.solvers.worker import Workers
from arborcast.synth.deadline import Deadline

Answer: TypeAlias = Plan | Impossible | Unfinished

MOST_GROUPS = 3
"""How many groups are tried by the preferred encoding: a large one may admit no schedule."""


@dataclass
class Searcher:
    """Answers instances of one problem.

    Attributes:
        problem: what is to be done.
        encodings: those that may run; the first is preferred.
        seed: of the solvers; the same seed gives the same plan on any machine.
        deadline: of all searches together.
        workers: the processes in which solvers run.
        cache: where answers are kept; None to keep none.
        symmetric: whether groups of symmetries are tried beside the problem as it is.
    """

    problem: Problem
    encodings: tuple[str, ...]
    seed: int
    deadline: Deadline
    workers: Workers
    cache: ChunkCache | None
    symmetric: bool = True
    _groups: dict[int, tuple[Orbits, ...]] = field(default_factory=dict)

    def search(self, chunks: int, steps: int, rounds: int, *, slices: int | None = None) -> Answer:
        """A plan, a solver's word that there is none, or `Unfinished` after so many slices.

        S is at least the latency of the problem, R at least S; for `slices` see
        `synth.chunks.solvers.portfolio`.

        Raises:
            TimedOutError: the deadline passed.
        """
        key = ""
        if self.cache is not None:
            key = self.cache.key(
                self.problem,
                chunks,
                steps,
                rounds,
                encodings=self.encodings,
                seed=self.seed,
                symmetric=int(self.symmetric),
                slices=slices,
            )
            kept = self.cache.get(key)
            if kept is not None:
                return kept
        verdict = race(
            self._entrants(chunks),
            steps=steps,
            rounds=rounds,
            seed=self.seed,
            deadline=self.deadline,
            workers=self.workers,
            slices=slices,
        )
        answer: Answer
        match verdict.outcome:
            case Found(found_rounds, sends):
                assert verdict.entrant is not None, "somebody found it"
                unfolded = verdict.entrant.orbits.unfold(sends)
                answer = prune(self.problem, chunks, found_rounds, unfolded)
            case outcome:
                answer = outcome
        if self.cache is not None and not isinstance(answer, Unfinished):
            self.cache.put(key, answer)
        return answer

    def _entrants(self, chunks: int) -> list[Entrant]:
        """Groups first, the larger the faster where one fits, then the problem as it is; by each encoding."""
        reduced = self._reduced(chunks)
        whole = Orbits.trivial(self.problem, chunks)
        first, *others = self.encodings
        entrants = [Entrant(first, orbits) for orbits in (*reduced[:MOST_GROUPS], whole)]
        for encoding in others:
            entrants += [Entrant(encoding, orbits) for orbits in (*reduced[:1], whole)]
        return entrants

    def _reduced(self, chunks: int) -> tuple[Orbits, ...]:
        if not self.symmetric:
            return ()
        if chunks not in self._groups:
            groups = useful_groups(self.problem, chunks)
            self._groups[chunks] = tuple(Orbits(self.problem, chunks, group) for group in groups)
        return self._groups[chunks]
