"""One (C, S, R) of an allreduce, answered: partial sums raced under several groups, beside the proof of none.

What comes out was pruned; that it is correct is still for `synth.verification.verifier` to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, cast

from arborcast.synth.chunks.problem.instance import Problem
from arborcast.synth.chunks.problem.orbits import Group
from arborcast.synth.chunks.problem.outcome import Found, Impossible, Unfinished
from arborcast.synth.chunks.problem.symmetry import subgroups
from arborcast.synth.chunks.solvers.cache import ChunkCache
from arborcast.synth.chunks.solvers.portfolio import Entrant, Verdict, race
from arborcast.synth.chunks.solvers.workers import Workers
from arborcast.synth.chunks.sums.instance import ChunkSum, SumOrbits, SumPlan, pruned
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import Prover
from arborcast.synth.symmetry.permutations import identity

SumAnswer: TypeAlias = SumPlan | Impossible | Unfinished

SEARCHES: Mapping[str, str] = {
    "sums": "arborcast.synth.chunks.sums.search:SumSearch",
    "spread": "arborcast.synth.chunks.sums.search:SpreadSearch",
    "fewest": "arborcast.synth.chunks.sums.search:FewestSearch",
    "fewest sums": "arborcast.synth.chunks.sums.search:FewestSumSearch",
}
"""Where the searches are found, as `module:class`."""

GROUPS = 5, 4
"""How many groups are tried that move every chunk, and how many of which some elements keep its transfers."""

_ALIKE = 2  # groups of one size
_LARGEST_KEPT = 4


@dataclass
class SumSearcher:
    """Answers instances of one allreduce.

    Attributes:
        problem: see `synth.chunks.sums.instance.sum_problem`.
        seed: of the solvers; the same seed gives the same plan on any machine.
        deadline: of all searches together.
        workers: the processes in which solvers run.
        cache: where answers are kept; None to keep none.
    """

    problem: Problem
    seed: int
    deadline: Deadline
    workers: Workers
    cache: ChunkCache | None

    def search(
        self,
        chunks: int,
        steps: int,
        rounds: int,
        *,
        slices: int | None = None,
        groups: tuple[int, int] = GROUPS,
    ) -> SumAnswer:
        """A plan, the proof that there is no schedule, `NoneHere`, or `Unfinished` after so many slices.

        Args:
            chunks: C.
            steps: S, at least the latency of the problem.
            rounds: R, at least S.
            slices: how much effort to spend (see `synth.chunks.solvers.portfolio`); None until there is an
            answer.
            groups: see `GROUPS`.

        Returns:
            `NoneHere` where no schedule keeps one partial sum per rank and chunk, and whether several would
            do is not known.

        Raises:
            TimedOutError: the deadline passed.
        """
        key = ""
        if self.cache is not None:
            key = self.cache.key_of(
                "allreduce",
                self.problem,
                size=[chunks, steps, rounds],
                seed=self.seed,
                slices=slices,
                groups=groups,
            )
            kept = _kept(self.cache, key)
            if kept is not None:
                return kept
        whole = SumOrbits.trivial(self.problem, chunks)
        symmetric = self._symmetric(chunks, groups)
        first, *others = [*symmetric, whole]
        entrants = [Entrant("sums", first), Entrant("spread", whole)]
        entrants += [Entrant("sums", orbits) for orbits in others]
        verdict = self._race(entrants, steps, rounds, slices)
        answer: SumAnswer
        match verdict.outcome:
            case Found(found_rounds, sends):
                assert verdict.entrant is not None, "somebody found it"
                orbits = cast(SumOrbits, verdict.entrant.orbits)
                unfolded = orbits.unfold(sends)
                answer = pruned(self.problem, chunks, found_rounds, unfolded)
            case outcome:
                answer = outcome
        if self.cache is not None and not isinstance(answer, Unfinished):
            self.cache.put_json(key, _document(answer))
        return answer

    def fewest(self, steps: int, cost: int, *, slices: int, sums: bool = False) -> int:
        """A number of links that messages of one chunk pass in all at least, from `cost` on.

        Args:
            steps: S, at least the latency of the problem.
            cost: what is known to be needed.
            slices: effort of each search.
            sums: whether messages are transfers of partial sums, one per rank; otherwise of anything.
        """
        entrant = Entrant("fewest sums" if sums else "fewest", SumOrbits.trivial(self.problem, 1))
        most = steps * sum(len(route.links) for route in self.problem.routes)
        while cost <= most and isinstance(self._race([entrant], steps, cost, slices).outcome, Impossible):
            cost += 1
        return cost

    def _race(self, entrants: list[Entrant], steps: int, rounds: int, slices: int | None) -> Verdict:
        return race(
            entrants,
            steps=steps,
            rounds=rounds,
            seed=self.seed,
            deadline=self.deadline,
            workers=self.workers,
            slices=slices,
            encodings=SEARCHES,
        )

    def _symmetric(self, chunks: int, most: tuple[int, int]) -> list[SumOrbits]:
        """Groups that move every chunk, the largest first; then some that keep the transfers of each."""
        alone: Group = (identity(self.problem.topology.size),)
        pairs = [
            (group, kept)
            for group in self._groups
            for kept in [alone, *self._groups]
            if len(kept) <= _LARGEST_KEPT
            and set(kept) <= set(group)
            and chunks % (len(group) // len(kept)) == 0
        ]
        pairs.sort(key=lambda pair: (-len(pair[0]), len(pair[1])))
        chosen: list[list[SumOrbits]] = [[], []]
        sizes: Counter[tuple[int, int]] = Counter()
        for group, kept in pairs:
            place, size = int(len(kept) > 1), (len(group), len(kept))
            if len(chosen[place]) < most[place] and sizes[size] < _ALIKE:
                sizes[size] += 1
                chosen[place].append(SumOrbits(self.problem, chunks, group, kept))
        return chosen[0] + chosen[1]

    @cached_property
    def _groups(self) -> tuple[Group, ...]:
        return subgroups(self.problem)


def plan_to_document(plan: SumPlan) -> dict[str, Any]:
    """Rounds and transfers as rows of numbers."""
    sends = [[send.chunk, send.route, send.step, int(send.copies)] for send in plan.sends]
    return {"rounds": list(plan.rounds), "sends": sends}


def plan_from_document(document: Mapping[str, Any]) -> SumPlan:
    """The inverse.

    Raises:
        KeyError, TypeError, ValueError: the document is not one of ours.
    """
    rows = [tuple(map(int, row)) for row in document["sends"]]
    return SumPlan(
        tuple(map(int, document["rounds"])),
        tuple(ChunkSum(0, chunk, route, step, bool(copies)) for chunk, route, step, copies in rows),
    )


def _document(answer: SumPlan | Impossible) -> dict[str, Any]:
    return {"plan": None if isinstance(answer, Impossible) else plan_to_document(answer)}


def _kept(cache: ChunkCache, key: str) -> SumPlan | Impossible | None:
    document = cache.get_json(key)
    if document is None:
        return None
    plan = document["plan"]
    return Impossible(Prover.CADICAL) if plan is None else plan_from_document(plan)
