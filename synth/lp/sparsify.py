"""Few trees of many: as few as keep a rate, or the best rate with at most so many.

BLINK's integer program, where there is one group of trees: HiGHS closes it. With a group for each root it
does not, and weights that favour what is already used, followed by dropping what can be dropped, choose.

Source: Wang et al., BLINK (MLSys 2020), section 4; Candes, Wakin, Boyd (2008) for the reweighting.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InputError
from arborcast.synth.lp.branch_and_bound import EFFORT, is_ruled_out
from arborcast.synth.lp.choice import TreeCandidates
from arborcast.synth.lp.tree_program import CLOSE, Floats, few
from arborcast.synth.schedule import Settings
from arborcast.synth.solve_options import SolveOptions

_SEARCH_LIMIT = 300  # branch-and-bound vertices: unlike a time limit, the same on any machine
_QUICK_LIMIT, _QUICK_UP_TO = 20, 64  # vertices where nothing was asked, of so many trees; of more one
_REWEIGHTINGS = 8
_ATTEMPTS = 3  # at thinning out, from different prices
_FEW_GROUPS, _SMALL = 4, 120  # groups, and trees of all together, that an integer program takes
_USED = 1e-7  # of the rate: a smaller weight is none
_GAIN = 1e-3  # relative: what an exchange must bring, so that exchanges come to an end
_CUT_SHORT = "none: the search was cut short"


def check_few(tolerance: Fraction | None, max_trees: int | None) -> None:
    """Refuse numbers out of their range.

    Raises:
        InputError: names the number and the range.
    """
    if tolerance is not None and not 0 <= tolerance < 1:
        raise InputError(f"tolerance: must be from 0 to below 1, got {tolerance}")
    if max_trees is not None and max_trees < 1:
        raise InputError(f"max-trees: must be at least 1, got {max_trees}")


def few_as_asked(
    choice: TreeCandidates,
    known: Sequence[int],
    options: SolveOptions,
    deadline: Deadline,
    *,
    starts: Sequence[Sequence[int]] = (),
    optimum: Fraction | None = None,
    quickly: bool = False,
) -> tuple[dict[int, Fraction], Settings]:
    """As few trees as are asked for, with exact weights; where nothing is asked, none that can be left out.

    Args:
        choice: what to choose from.
        known: some that together reach the best rate, or nearly so.
        options: `max_trees` of each group, at the best rate; with a tolerance, as few as keep the rest of the
            rate, which is tried first and kept where it needs no more than `max_trees`.
        deadline: when to be content with the best so far.
        starts: choices of few that are known already.
        optimum: what the tolerance is a part of; None for the best rate of the choice.
        quickly: among many trees no integer program is asked where the options say nothing.

    Returns:
        The weight of each tree that carries anything, by its index, and what is known about them.

    Raises:
        InputError: a tolerance or a number of trees out of its range.
    """
    tolerance, most = options.tolerance, options.max_trees
    check_few(tolerance, most)
    asked = tolerance is not None or most is not None
    search = _CandidateSearch(choice, known, starts, options.seed, deadline)
    if tolerance is not None or not asked:
        rate = (choice.rate if optimum is None else optimum) * (1 - (tolerance or 0))
        # A short search is worth it without being asked: on a hypercube it finds 2 trees instead of 9.
        unasked = _QUICK_LIMIT if len(choice.trees) <= _QUICK_UP_TO else int(not quickly)
        kept, proved = search.fewest(rate, _SEARCH_LIMIT if asked else unasked)
        largest = max(Counter(choice.trees[index].group for index in kept).values())
        if most is None or largest <= most:
            facts: Settings = (("tolerance", str(tolerance)),)
            return search.weighed(kept), (*facts, *_known(choice, proved)) if asked else ()
    assert most is not None, "one of the two was asked for"
    kept, proved = search.best_of(most)
    return search.weighed(kept), (("max_trees", most), *_known(choice, proved))


def _known(choice: TreeCandidates, proved: str) -> Settings:
    return ("candidates", len(choice.trees)), ("proved", proved)


@dataclass(frozen=True, eq=False)
class _CandidateSearch:
    """The choice among candidates, by their indices."""

    choice: TreeCandidates
    known: Sequence[int]
    starts: Sequence[Sequence[int]]
    seed: int
    deadline: Deadline

    def weighed(self, kept: Sequence[int]) -> dict[int, Fraction]:
        """The exact weights of those that carry anything."""
        kept = sorted(kept)
        weights = zip(kept, self.choice.only(kept).weights, strict=True)
        return {index: weight for index, weight in weights if weight}

    def fewest(self, wanted: Fraction, search_limit: int) -> tuple[list[int], str]:
        """The fewest trees that reach a rate, or what all of them do; with 0 without an integer program."""
        rate = wanted if self.choice.reaches(wanted) else self.choice.rate
        kept, proved = self._fewest(rate, search_limit)
        if self.choice.only(kept).rate < wanted:
            proved = "none: the candidates do not reach the tolerance"
        return kept, proved

    def _fewest(self, rate: Fraction, search_limit: int) -> tuple[list[int], str]:
        starts = [
            list(self.known),
            *(self._sparse(float(rate), attempt) for attempt in range(_ATTEMPTS)),
        ]
        reaching = [start for start in starts if self.choice.only(start).reaches(rate)]
        every = list(range(len(self.choice.trees)))
        dropped = [self._dropped(start, rate) for start in reaching or [every]]
        kept, none_too_many = min(dropped, key=lambda found: len(found[0]))
        if len(kept) == self.choice.groups:
            return kept, "no fewer trees are possible"
        if not (search_limit and self._is_searched):
            out_of_time = "none: rounding errors, or out of time"
            return kept, "none of the trees can be left out" if none_too_many else out_of_time
        chosen, closed = self._searched(None, float(rate), search_limit)
        if chosen is not None and len(chosen) < len(kept):
            if self.choice.only(chosen).reaches(rate):
                kept = chosen
            else:
                closed = False  # the integer program took a rounding error for a tree's share
        if closed and self._rules_out(len(kept) - 1, rate, strictly=True):
            return kept, "fewest among the candidates"
        return kept, "none: HiGHS calls them the fewest, in floating point" if closed else _CUT_SHORT

    def best_of(self, most: int) -> tuple[list[int], str]:
        """At most so many trees per group, at the largest rate."""
        rows, trees = self.choice.rows, self.choice.trees
        if most == self.choice.groups == 1:
            every = range(len(trees))
            widest = min(every, key=lambda index: (-rows.alone(trees[index]), trees[index].height))
            return [widest], "best among the candidates"
        kept = self._best_sparse(most)
        rate = self.choice.only(kept).best.rate
        closed = not self._is_searched
        if rate < 1 - CLOSE and not closed:
            chosen, closed = self._searched(most, None)
            if chosen and self.choice.only(chosen).best.rate > rate * (1 + CLOSE):
                kept = chosen
        exact = self.choice.only(kept).rate
        kept = self._dropped(kept, exact)[0]
        if exact == 1:
            return kept, "optimal"
        if closed and self._rules_out(most, exact, strictly=False):
            return kept, "best among the candidates"
        if not self._is_searched:
            return kept, "none: heuristic choice per root"
        return kept, "none: HiGHS calls them the best, in floating point" if closed else _CUT_SHORT

    @property
    def _is_searched(self) -> bool:
        """Whether the integer program is asked, which HiGHS closes for one group, or for few small ones."""
        groups = self.choice.groups
        return groups == 1 or (groups <= _FEW_GROUPS and len(self.choice.trees) <= _SMALL)

    def _rules_out(self, most: int, rate: Fraction, *, strictly: bool) -> bool:
        effort = EFFORT if self.choice.groups == 1 else 1  # else the first limit decides
        return is_ruled_out(
            self.choice.rows,
            self.choice.trees,
            most,
            rate,
            strictly=strictly,
            deadline=self.deadline,
            effort=effort,
        )

    def _searched(
        self, most: int | None, rate: float | None, search_limit: int = _SEARCH_LIMIT
    ) -> tuple[list[int] | None, bool]:
        """What an integer program finds."""
        return few(
            self.choice.rows,
            self.choice.trees,
            most=most,
            rate=rate,
            search_limit=search_limit,
            seed=self.seed,
            seconds=self.deadline.left_s,
        )

    def _sparse(self, rate: float, attempt: int = 0) -> list[int]:
        """Trees that reach a rate, after making those dear that carry little, again and again.

        The first attempt starts from equal prices, further ones from random prices.
        """
        best: list[int] = list(range(len(self.choice.trees)))
        noise = random.Random(self.seed * _ATTEMPTS + attempt)
        prices = np.array([1 + (noise.random() if attempt else 0) for _ in best])
        for _ in range(_REWEIGHTINGS):
            if self.deadline.has_passed:
                break
            weights = self.choice.cheapest(prices, rate * (1 - CLOSE))
            if weights is None:
                break
            used = np.flatnonzero(weights > _USED * rate).tolist()
            if len(used) < len(best):
                best = used
            prices = 1 / (weights / rate + 0.01)
        return best

    def _dropped(self, kept: list[int], rate: Fraction) -> tuple[list[int], bool]:
        """The same without those that can be left out, tried from the lightest on; whether none is left."""
        proved = True
        weights = self.choice.only(kept).best.weights
        kept = sorted(kept)
        for index in [kept[position] for position in np.argsort(weights, kind="stable")]:
            if self.deadline.has_passed:
                return kept, False
            fewer = [other for other in kept if other != index]
            some = self.choice.only(fewer)
            if some.reaches(rate):
                kept = fewer
            else:
                proved = proved and some.falls_short(rate)
        return kept, proved

    def _best_sparse(self, most: int) -> list[int]:
        """A good choice of at most so many per group: the starts, or thin out and keep the heaviest."""
        best: tuple[list[int], float] = [], -1.0
        for start in self.starts:
            best = self._better(best, start, most)
        all_known = self.choice.only(self.known)
        for tenths in range(10, 0, -1):
            rate = self.choice.best.rate * tenths / 10
            if rate <= best[1] or (best[0] and self.deadline.has_passed):
                break
            best = self._better(best, self._sparse(rate), most)
            if all_known.is_complete and all_known.best.rate >= rate * (1 - CLOSE):
                best = self._better(best, self.known, most)
        return self._exchanged(*best, most) if self.choice.groups > 1 else best[0]

    def _exchanged(self, kept: list[int], rate: float, most: int) -> list[int]:
        """A choice in which no single group gains by choosing again among all its candidates."""
        trees, groups = self.choice.trees, range(self.choice.groups)
        waiting = list(groups)
        while waiting and not self.deadline.has_passed:
            group = waiting.pop(0)
            pool = [index for index, tree in enumerate(trees) if tree.group == group or index in kept]
            other, reached = self._with_heaviest(pool, most)
            if reached > rate * (1 + _GAIN):
                kept, rate = other, reached
                waiting = [root for root in groups if root != group]
        return kept

    def _better(
        self, best: tuple[list[int], float], start: Sequence[int], most: int
    ) -> tuple[list[int], float]:
        found = self._with_heaviest(start, most)
        return found if found[1] > best[1] * (1 + CLOSE) else best

    def _with_heaviest(self, some: Sequence[int], most: int) -> tuple[list[int], float]:
        """The heaviest of each group at the best weights of some trees, and the rate they reach."""
        weights = np.zeros(len(self.choice.trees))
        weights[sorted(some)] = self.choice.only(some).best.weights
        kept = self._heaviest(weights, most)
        return kept, self.choice.only(kept).best.rate

    def _heaviest(self, weights: Floats, most: int) -> list[int]:
        taken: Counter[int] = Counter()
        kept = []
        for index in map(int, np.argsort(-weights.round(9), kind="stable")):
            group = self.choice.trees[index].group
            if taken[group] < most and (weights[index] > 0 or not taken[group]):
                taken[group] += 1
                kept.append(index)
        return sorted(kept)
