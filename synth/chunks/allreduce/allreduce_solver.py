"""The least rounds per chunk of an allreduce in a given number of steps, over every schedule and every C.

Limits hold for whatever copies and adds partial sums; what is found keeps one partial sum per rank and
chunk. Where they meet, the point is proved over every schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from typing import TypeAlias, TypeVar

from arborcast.synth.chunks.allreduce.partial_sums import ChunkSum, SumPlan
from arborcast.synth.chunks.allreduce.searcher import SearchEffort, SumSearcher
from arborcast.synth.chunks.bounds.step_certificate import MessageDual, StepBound
from arborcast.synth.chunks.problem.outcome import Inconclusive, Infeasible
from arborcast.synth.chunks.step_result import StepOptimum, StepSearch, kept_optimum
from arborcast.synth.chunks.trees.whole_trees import admissible_chunk_counts

Answer = TypeVar("Answer")

SumOptimum: TypeAlias = StepOptimum[SumPlan]

Known: TypeAlias = Callable[[], Fraction | None]
"""The least R/C of so many steps known from elsewhere; asked where a search at the limit finds nothing."""


@dataclass(frozen=True, slots=True)
class SumBudget:
    """How much is done for a number of steps; counted, so that it is the same on every machine.

    Attributes:
        first: of a search at the limit, or for anything.
        guess: of a search above the limit.
        last: of searches at the limit where nothing known is below it.
        count_slices: effort of proving that messages are not fewer.
        sizes: how many C are tried at the limit.
        largest_guess: chunks up to which all C are tried above it.
        largest_orbit: the same of those C that are images of one chunk under many groups.
        most_messages: possible messages (routes and steps multiplied) up to which their fewest are counted.
    """

    first: SearchEffort
    guess: SearchEffort
    last: tuple[SearchEffort, ...]
    count_slices: int
    sizes: int
    largest_guess: int
    largest_orbit: int
    most_messages: int


THOROUGH = SumBudget(
    first=SearchEffort(2, (5, 4), 8_000),
    guess=SearchEffort(1, (1, 24), 1_500),
    last=(SearchEffort(3, (5, 4), 8_000), SearchEffort(4, (0, 0), 1_200)),
    count_slices=3,
    sizes=3,
    largest_guess=12,
    largest_orbit=64,
    most_messages=400,
)
"""To prove: some ten seconds for a search."""

_SECOND = SearchEffort(1, (2, 1), 4_000)

QUICK = SumBudget(
    first=_SECOND,
    guess=_SECOND,
    last=(),
    count_slices=0,
    sizes=1,
    largest_guess=4,
    largest_orbit=4,
    most_messages=0,
)
"""To have a candidate: a second."""


def sum_optimum(
    searcher: SumSearcher,
    steps: int,
    static: StepBound | None,
    below: Fraction | None,
    known: Known,
    budget: SumBudget,
) -> SumOptimum:
    """The least R/C in so many steps.

    Args:
        searcher: of the problem.
        steps: S, at least the latency of the problem.
        static: the limit for any number of steps where it holds for every schedule; otherwise None.
        below: only a smaller R/C is of interest; None for any.
        known: see `Known`.
        budget: how much to do.

    Returns:
        The best found; `out_of_time` says whether the deadline of the searcher came first.
    """
    limit = None if static is None else replace(static, steps=steps)
    return _SumSearch(searcher, steps, limit, below, known, budget).run()


class _SumSearch(StepSearch[SumPlan, SumSearcher]):
    """A search for partial sums."""

    def __init__(
        self,
        searcher: SumSearcher,
        steps: int,
        limit: StepBound | None,
        below: Fraction | None,
        known: Known,
        budget: SumBudget,
    ) -> None:
        super().__init__(searcher, steps, limit, below)
        self._known = known
        self._budget = budget
        self._without: set[tuple[Fraction, int]] = set()  # R/C and C of no schedule, or none with one sum

    def settle(self) -> None:
        """Raise the limit and search at it; above it where that attains nothing."""
        self._report("limit by flows")
        self._raise_to(self._searcher.flow_limit(self._steps))
        before, soon = self.result.least, self._budget.first
        if self._below is None and not self._take_anything(soon):
            self._count_messages()
            return
        if not self._is_of_interest(before) or self._in_time(4, lambda: self._attempt(before, soon)):
            return
        floor = self._in_time(4, self._count_messages) or before
        if not self._is_of_interest(floor):
            return
        if floor > before and self._in_time(4, lambda: self._attempt(floor, soon)):
            return
        known = self._known()
        if known is not None:
            self._below = known if self._below is None else min(known, self._below)
        if self._is_of_interest(floor) and self._look_around(floor):
            return
        if known is not None and known <= floor and self._attempt(floor, self._budget.guess):
            return  # in fewer chunks than what is known, it may be
        if known is None or floor <= known:
            for trial in self._budget.last:
                if self._attempt(floor, trial):
                    break

    def _in_time(self, part: int, task: Callable[[], Answer]) -> Answer | None:
        """The same as `_in_part`, and where the task does not end by then, the result is not final."""
        answer = self._in_part(part, task)
        if answer is None:
            self._searcher.deadline.check("the search")
            self.result = replace(self.result, out_of_time=True)
        return answer

    def _attempt(self, ratio: Fraction, trial: SearchEffort) -> bool:
        """Search at the smallest C that could attain a ratio, and at larger ones where that is none."""
        if not ratio:
            return False
        for chunks in islice(admissible_chunk_counts(ratio, self._steps), self._budget.sizes):
            if self._take(ratio, chunks, trial):
                return True
            if (ratio, chunks) not in self._without:
                return False
        return False

    def _take_anything(self, trial: SearchEffort) -> bool:
        """Have some plan before time is spent on a good one; False where none has one partial sum."""
        for rounds in dict.fromkeys((self._steps, self._most_rounds())):
            if Fraction(rounds) >= self.result.least and self._take(Fraction(rounds), 1, trial):
                self._below = Fraction(rounds)
                return True
        return (Fraction(self._most_rounds()), 1) not in self._without

    def _count_messages(self) -> Fraction:
        """Raise the limit to that of the fewest messages of one chunk.

        Returns:
            The R/C that a search for partial sums, one per rank and chunk, cannot fall below; the limit
            holds for several, too.
        """
        links = sum(self._problem.capacities)
        if len(self._problem.routes) * self._steps > self._budget.most_messages:
            return self.result.least
        self._report("the fewest messages")
        slices = self._budget.count_slices
        # From what is known, rounded down: a number is proved only once fewer were refuted.
        cost = self._searcher.fewest(self._steps, math.floor(self.result.least * links), slices=slices)
        ratio = Fraction(cost, links)
        lengths = ((Fraction(1, links),) * len(self._problem.topology.links),) * self._steps
        self._raise_to(StepBound(self._steps, ratio, MessageDual(lengths, ratio)))
        cost = math.floor(self.result.least * links)
        sums = self._searcher.fewest(self._steps, cost, slices=slices, sums=True)
        return max(self.result.least, Fraction(sums, links))

    def _look_around(self, floor: Fraction) -> bool:
        """Better and better plans of few chunks or of the images of one; whether one attains the floor."""
        budget = self._budget
        orbits = (chunks for chunks in self._searcher.whole_orbits if chunks <= budget.largest_orbit)
        for chunks in dict.fromkeys((*orbits, *range(1, budget.largest_guess + 1))):
            # A schedule of R rounds becomes one of R + 1 by making a step longer.
            low = max(self._steps, math.ceil(floor * chunks))
            high = math.ceil((self._below or self._most_rounds() + 1) * chunks) - 1
            if low > high or not self._guess(chunks, high):
                continue
            while low < high:
                middle = (low + high) // 2
                if self._guess(chunks, middle):
                    high = middle
                else:
                    low = middle + 1
            self._below = Fraction(high, chunks)
            if self._below == floor:
                return True
        return False

    def _guess(self, chunks: int, rounds: int) -> bool:
        return self._take(Fraction(rounds, chunks), chunks, self._budget.guess)

    def _most_rounds(self) -> int:
        """Rounds with which one chunk may go over every route in every step."""
        fullest = max(
            -(-len(passing) // capacity)
            for passing, capacity in zip(self._problem.passing, self._problem.capacities, strict=True)
        )
        return fullest * self._steps

    def _take(self, ratio: Fraction, chunks: int, trial: SearchEffort) -> bool:
        """Search at one C and note what comes of it; whether a plan was found."""
        if (ratio, chunks) in self._without:
            return False
        rounds = int(ratio * chunks)
        answer = self._asked(
            chunks, rounds, lambda: self._searcher.search(chunks, self._steps, rounds, trial)
        )
        if isinstance(answer, Infeasible):
            self._refuted[ratio, chunks] = answer
        if isinstance(answer, Infeasible | Inconclusive):
            self._without.add((ratio, chunks))
        if not isinstance(answer, SumPlan):
            return False
        self._take_plan(chunks, answer)
        return True


def cached_optimum(
    searcher: SumSearcher,
    steps: int,
    static: StepBound | None,
    below: Fraction | None,
    known: Known,
    *,
    proofs: bool,
) -> SumOptimum:
    """`sum_optimum`, from the searcher's cache where it was worked out to its end before."""
    return kept_optimum(
        searcher.cache,
        "allreduce optimum",
        searcher.problem,
        steps,
        static,
        lambda: sum_optimum(searcher, steps, static, below, known, THOROUGH if proofs else QUICK),
        (SumPlan, ChunkSum),
        below=None if below is None else str(below),
        seed=searcher.seed,
        proofs=int(proofs),
    )
