"""Few trees: as few as reach the optimum up to a tolerance, or the best rate with at most so many.

Fewer trees mean larger messages and fewer of them. BLINK's integer program chooses among candidate trees
(of the exact packing, of the multiplicative weights, and the widest single tree). With one root, or with
an allreduce's pairs, HiGHS closes it; with all roots it does not, and weights that favour what is already
used, followed by dropping what can be dropped, choose instead, beside trees that were woven around each
other (`synth.packing.candidates`).

Source: Wang et al., BLINK (MLSys 2020), section 4; Candes, Wakin, Boyd (2008) for the reweighting.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Any, Generic, TypeAlias

import numpy as np

from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.errors import InputError
from arborcast.synth.lp.tree_program import CLOSE, Floats, few
from arborcast.synth.packing.candidates import CANDIDATES, candidates, reweave, widest
from arborcast.synth.packing.carrier import Carrier, Packing, merge
from arborcast.synth.packing.mwu import weigh
from arborcast.synth.packing.ruling_out import EFFORT, is_ruled_out
from arborcast.synth.packing.weights import Choice, One, Weighted
from arborcast.synth.schedule import Settings
from arborcast.synth.topology import Topology

DEFAULT_TOLERANCE = Fraction(1, 20)

_CANDIDATE_EPSILON = Fraction(1, 20)  # a coarse run yields some hundred different trees
_SEARCH_LIMIT = 300  # branch-and-bound vertices: unlike a time limit, the same on any machine
_REWEIGHTINGS = 8
_ATTEMPTS = 3  # at thinning out, from different prices
_USED = 1e-7  # of the rate: a smaller weight is none
_GAIN = 1e-3  # relative: what an exchange must bring, so that exchanges come to an end
_FLOATING = "in floating point"
_CUT_SHORT = "none: the search was cut short"


def fewest(
    topology: Topology,
    roots: Sequence[int] | None,
    optimum: Fraction,
    known: Iterable[Carrier] = (),
    *,
    tolerance: Fraction = DEFAULT_TOLERANCE,
    max_trees: int | None = None,
    seed: int = 0,
    deadline: Deadline = NO_DEADLINE,
) -> Packing:
    """Few out-trees from each root, all roots at one rate; or few pairs for an allreduce, in all.

    Args:
        topology: the graph.
        roots: one for a broadcast, all ranks for an allgather; None for an allreduce, whose roots are free.
        optimum: the largest rate per root (of an allreduce: of all), GB/s.
        known: carriers that should be among the candidates, such as those of the exact packing.
        tolerance: the part of the optimum that may be given up for fewer trees, from 0 to below 1.
            Ignored with `max_trees`.
        max_trees: at most so many trees per root, at the best rate; None for as few as the tolerance allows.
        seed: of the candidates and of the integer program.
        deadline: when the best so far is returned.

    Returns:
        Carriers with exact weights. `settings` hold "tolerance" or "max_trees", the number of "candidates",
        and "proved": what is known about the answer.

    Raises:
        InputError: a tolerance or a number of trees out of its range.
    """
    _check(tolerance, max_trees)
    woven = weigh(topology, roots, epsilon=_CANDIDATE_EPSILON, seed=seed, deadline=deadline).carriers
    others = [*widest(topology, roots), *woven]
    known = merge(known)
    rewoven = [
        merge(reweave(topology, roots, count, deadline=deadline))
        for count in range(max(1, (max_trees or 0) - 1), (max_trees or 0) + 1)
        if roots is not None and len(roots) > 1
    ]
    groups: tuple[tuple[Carrier, ...], ...]
    if roots is None:
        groups = (candidates(known, others, CANDIDATES),)
    else:
        groups = tuple(
            candidates(
                [tree for tree in chain(known, *rewoven) if tree.root == root],
                [tree for tree in others if tree.root == root],
                CANDIDATES // len(roots) + 1,
            )
            for root in roots
        )
    starts = tuple(_keys(trees) for trees in rewoven)
    search = _Search(Choice(topology, groups, optimum), _keys(known), starts, seed, deadline)
    return Packing(*search.run(tolerance, max_trees, Fraction(1)))


def fewest_among(
    choice: Choice[One],
    known: Iterable[One],
    *,
    tolerance: Fraction = DEFAULT_TOLERANCE,
    max_trees: int | None = None,
    seed: int = 0,
    deadline: Deadline,
    search_limit: int = _SEARCH_LIMIT,
) -> tuple[tuple[One, ...], Settings]:
    """Few of given carriers: what `fewest` does with its own.

    Args:
        choice: what to choose from.
        known: some of them that together reach the best rate.
        tolerance: the part of the best rate of all that may be given up, from 0 to below 1. Ignored with
            `max_trees`.
        max_trees: at most so many in each group, at the best rate; None for as few as the tolerance allows.
        seed: of the integer program.
        deadline: when to be content with the best so far.
        search_limit: branch-and-bound vertices of the integer program; 0 does without it.

    Returns:
        Carriers with exact weights, and what is known about them.

    Raises:
        InputError: a tolerance or a number of trees out of its range.
    """
    _check(tolerance, max_trees)
    return _Search(choice, _keys(known), (), seed, deadline, search_limit).run(
        tolerance, max_trees, choice.rate
    )


_Keys: TypeAlias = frozenset[tuple[Any, ...]]


def _keys(carriers: Iterable[Weighted]) -> _Keys:
    return frozenset(carrier.key for carrier in carriers)


def _check(tolerance: Fraction, max_trees: int | None) -> None:
    if not 0 <= tolerance < 1:
        raise InputError(f"tolerance: must be from 0 to below 1, got {tolerance}")
    if max_trees is not None and max_trees < 1:
        raise InputError(f"max-trees: must be at least 1, got {max_trees}")


@dataclass(frozen=True, eq=False)
class _Search(Generic[One]):
    """The choice among candidates; rates inside are parts of the choice's target."""

    choice: Choice[One]
    known: _Keys  # of carriers that together reach the optimum, or nearly so
    starts: tuple[_Keys, ...]  # of carriers that are together a choice of few already
    seed: int
    deadline: Deadline
    search_limit: int = _SEARCH_LIMIT

    def run(
        self, tolerance: Fraction, max_trees: int | None, optimum: Fraction
    ) -> tuple[tuple[One, ...], Settings]:
        """The chosen carriers with exact weights, and what was proved; a tolerance is part of the optimum."""
        if max_trees is None:
            asked: tuple[str, str | int | None] = ("tolerance", str(tolerance))
            wanted = optimum * (1 - tolerance)
            reached = wanted if self.choice.reaches(wanted) else self.choice.rate
            kept, proved = self._fewest(reached)
            if self.choice.only(kept).rate < wanted:
                proved = "none: the candidates do not reach the tolerance"
        else:
            asked = ("max_trees", max_trees)
            kept, proved = self._best_of(max_trees)
        carriers = self.choice.only(kept).weighed()
        return carriers, (asked, ("candidates", len(self.choice.carriers)), ("proved", proved))

    def _fewest(self, rate: Fraction) -> tuple[list[int], str]:
        """The fewest carriers that reach a rate, as all of them do."""
        starts = [self._of(self.known), *(self._sparse(float(rate), attempt) for attempt in range(_ATTEMPTS))]
        reaching = [start for start in starts if self.choice.only(start).reaches(rate)]
        every = list(range(len(self.choice.carriers)))
        dropped = [self._dropped(start, rate) for start in reaching or [every]]
        kept, none_too_many = min(dropped, key=lambda found: len(found[0]))
        groups = len(self.choice.groups)
        if len(kept) == groups:
            return kept, "no fewer trees are possible"
        alone = (
            "none of the trees can be left out" if none_too_many else "none: rounding errors, or out of time"
        )
        if groups > 1 or self.search_limit == 0:
            return kept, alone
        chosen, closed = self._searched(None, float(rate), kept)
        if chosen is not None and len(chosen) < len(kept):
            if self.choice.only(chosen).reaches(rate):
                kept = chosen
            else:
                closed = False  # the integer program took a rounding error for a carrier's share
        if closed and self._rules_out(len(kept) - 1, rate, strictly=True):
            return kept, "fewest among the candidates"
        return kept, f"none: HiGHS calls them the fewest, {_FLOATING}" if closed else _CUT_SHORT

    def _best_of(self, max_trees: int) -> tuple[list[int], str]:
        """At most so many carriers per group, at the largest rate."""
        if max_trees == len(self.choice.groups) == 1:
            return [self._best_single()], "best among the candidates"
        kept = self._best_sparse(max_trees)
        rate = self.choice.only(kept).best.rate
        closed = len(self.choice.groups) > 1
        if rate < 1 - CLOSE and not closed:
            chosen, closed = self._searched(max_trees, None, kept)
            if chosen and self.choice.only(chosen).best.rate > rate * (1 + CLOSE):
                kept = chosen
        exact = self.choice.only(kept).rate
        kept = self._dropped(kept, exact)[0]
        if exact == 1:
            return kept, "optimal"
        if closed and self._rules_out(max_trees, exact, strictly=False):
            return kept, "best among the candidates"
        if len(self.choice.groups) > 1:
            return kept, "none: heuristic choice per root"
        return kept, f"none: HiGHS calls them the best, {_FLOATING}" if closed else _CUT_SHORT

    def _best_single(self) -> int:
        """The carrier that carries most alone, the lowest of equals."""
        choice = self.choice
        return min(
            range(len(choice.carriers)),
            key=lambda index: (-choice.rows.alone(choice.uses[index]), choice.carriers[index].height),
        )

    def _rules_out(self, most: int, rate: Fraction, *, strictly: bool) -> bool:
        choice = self.choice
        effort = EFFORT if len(choice.groups) == 1 else 1  # else the first limit decides
        return is_ruled_out(
            choice.rows,
            choice.uses,
            most,
            rate,
            strictly=strictly,
            deadline=self.deadline,
            effort=effort,
        )

    def _searched(
        self, most: int | None, rate: float | None, kept: Sequence[int]
    ) -> tuple[list[int] | None, bool]:
        """What an integer program finds, from a solution on."""
        return few(
            self.choice.rows,
            self.choice.uses,
            most=most,
            rate=rate,
            start=sorted(kept),
            search_limit=self.search_limit,
            seed=self.seed,
            seconds=self.deadline.left_s,
        )

    def _of(self, keys: _Keys) -> list[int]:
        return [index for index, carrier in enumerate(self.choice.carriers) if carrier.key in keys]

    def _sparse(self, rate: float, attempt: int = 0) -> list[int]:
        """Carriers that reach a rate, after making those dear that carry little, again and again.

        The first attempt starts from equal prices, further ones from random prices.
        """
        best: list[int] = list(range(len(self.choice.carriers)))
        noise = random.Random(self.seed * _ATTEMPTS + attempt)
        prices = np.array([1 + (noise.random() if attempt else 0) for _ in best])
        for _ in range(_REWEIGHTINGS):
            if self.deadline.has_passed:
                break
            weights = self.choice.cheapest(prices, rate * (1 - CLOSE))
            if weights is None:
                break
            used = self._used(weights, rate)
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

    def _best_sparse(self, max_trees: int) -> list[int]:
        """A good choice of at most so many per group: the starts, or thin out and keep the heaviest."""
        best: list[int] = []
        best_rate = -1.0
        known = self._of(self.known)
        all_known = self.choice.only(known)
        for keys in self.starts:
            kept, reached = self._with_heaviest(self._of(keys), max_trees)
            if reached > best_rate * (1 + CLOSE):
                best, best_rate = kept, reached
        for tenths in range(10, 0, -1):
            rate = self.choice.best.rate * tenths / 10
            if rate <= best_rate or (best and self.deadline.has_passed):
                break
            thinned = self._sparse(rate)
            reaches = all(all_known.groups) and all_known.best.rate >= rate * (1 - CLOSE)
            for start in (thinned, known) if reaches else (thinned,):
                kept, reached = self._with_heaviest(start, max_trees)
                if reached > best_rate * (1 + CLOSE):
                    best, best_rate = kept, reached
        return self._exchanged(best, best_rate, max_trees) if len(self.choice.groups) > 1 else best

    def _exchanged(self, kept: list[int], rate: float, max_trees: int) -> list[int]:
        """A choice in which no single root gains by choosing again among all its candidates."""
        group_of = self.choice.group_of
        waiting = list(range(len(self.choice.groups)))
        while waiting and not self.deadline.has_passed:
            group = waiting.pop(0)
            pool = [index for index in range(len(group_of)) if group_of[index] == group or index in kept]
            other, reached = self._with_heaviest(pool, max_trees)
            if reached > rate * (1 + _GAIN):
                kept, rate = other, reached
                waiting = [root for root in range(len(self.choice.groups)) if root != group]
        return kept

    def _with_heaviest(self, some: Sequence[int], max_trees: int) -> tuple[list[int], float]:
        """The heaviest of each group at the best weights of some carriers, and the rate they reach."""
        weights = np.zeros(len(self.choice.carriers))
        weights[sorted(some)] = self.choice.only(some).best.weights
        kept = self._heaviest(weights, max_trees)
        return kept, self.choice.only(kept).best.rate

    def _heaviest(self, weights: Floats, max_trees: int) -> list[int]:
        taken: Counter[int] = Counter()
        kept = []
        for index in map(int, np.argsort(-weights.round(9), kind="stable")):
            group = self.choice.group_of[index]
            if taken[group] < max_trees and (weights[index] > 0 or not taken[group]):
                taken[group] += 1
                kept.append(index)
        return sorted(kept)

    @staticmethod
    def _used(weights: Floats, rate: float) -> list[int]:
        return [int(index) for index in np.flatnonzero(weights > _USED * rate)]
