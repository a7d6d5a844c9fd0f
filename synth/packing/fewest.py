"""Few trees: as few as reach the optimum up to a tolerance, or the best rate with at most so many.

Fewer trees mean larger messages and fewer of them. BLINK's integer program chooses among candidate trees
(of the exact packing, of the multiplicative weights, and the widest single tree). With one root, or with
an allreduce's pairs, HiGHS closes it; with all roots it does not, and weights that favour what is already
used, followed by dropping what can be dropped, choose instead, beside trees that were woven around each
other (`synth.packing.reweave`).

Source: Wang et al., BLINK (MLSys 2020), section 4; Candes, Wakin, Boyd (2008) for the reweighting.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Any, Generic

import numpy as np

from synth.deadline import Deadline
from synth.errors import InputError
from synth.packing.candidates import CANDIDATES, candidates, wide_pairs, widest_trees
from synth.packing.carrier import AnyCarrier, Pair, Pairing, merge, shape
from synth.packing.mwu import weigh_pairs, weigh_trees
from synth.packing.reweave import reweave
from synth.packing.weights import Choice, Floats
from synth.schedule import Settings
from synth.topology import Topology
from synth.tree import Packing, Tree

DEFAULT_TOLERANCE = Fraction(1, 20)

_CANDIDATE_EPSILON = Fraction(1, 20)  # a coarse run yields some hundred different trees
_SEARCH_LIMIT = 300  # branch-and-bound vertices: unlike a time limit, the same on any machine
_REWEIGHTINGS = 8
_ATTEMPTS = 3  # at thinning out, from different prices
_USED = 1e-7  # of the rate: a smaller weight is none
_GAIN = 1e-3  # relative: what an exchange must bring, so that exchanges come to an end
_SLACK = 1e-9  # relative: what the floating solver may be short of a rate


def fewest_trees(
    topology: Topology,
    roots: Sequence[int],
    optimum: Fraction,
    known: Iterable[Tree] = (),
    *,
    tolerance: Fraction = DEFAULT_TOLERANCE,
    max_trees: int | None = None,
    seed: int = 0,
    deadline_s: float | None = None,
) -> Packing:
    """Few out-trees from each root, all roots at one rate.

    Args:
        topology: the graph.
        roots: one for a broadcast, all ranks for an allgather.
        optimum: the largest rate per root, GB/s.
        known: trees that should be among the candidates, such as those of the exact packing.
        tolerance: the part of the optimum that may be given up for fewer trees, from 0 to below 1.
            Ignored with `max_trees`.
        max_trees: at most so many trees per root, at the best rate; None for as few as the tolerance allows.
        seed: of the candidates and of the integer program.
        deadline_s: seconds that the choice may take; then the best so far is returned.

    Returns:
        Trees with exact weights. `settings` hold "tolerance" or "max_trees", the number of "candidates",
        and "proved": what is known about the answer.

    Raises:
        InputError: a tolerance or a number of trees out of its range.
    """
    _check(tolerance, max_trees)
    deadline = Deadline.after(deadline_s)
    wide = [tree for root in roots for tree in widest_trees(topology, root)]
    woven = weigh_trees(topology, roots, epsilon=_CANDIDATE_EPSILON, seed=seed, deadline_s=deadline_s).trees
    known = merge(known)
    rewoven = [
        merge(reweave(topology, roots, count, deadline=deadline))
        for count in range(max(1, (max_trees or 0) - 1), (max_trees or 0) + 1)
        if len(roots) > 1
    ]
    groups = tuple(
        candidates(
            [tree for tree in chain(known, *rewoven) if tree.root == root],
            [tree for tree in (*wide, *woven) if tree.root == root],
            CANDIDATES // len(roots) + 1,
        )
        for root in roots
    )
    starts = tuple(frozenset(map(shape, trees)) for trees in rewoven)
    search = _Search(Choice(topology, groups), frozenset(map(shape, known)), starts, optimum, seed, deadline)
    carriers, settings = search.run(tolerance, max_trees)
    return Packing(carriers, settings)


def fewest_pairs(
    topology: Topology,
    optimum: Fraction,
    known: Iterable[Pair] = (),
    *,
    tolerance: Fraction = DEFAULT_TOLERANCE,
    max_trees: int | None = None,
    seed: int = 0,
    deadline_s: float | None = None,
) -> Pairing:
    """Few pairs for an allreduce: `fewest_trees`, where a tree is now a pair and all pairs count together."""
    _check(tolerance, max_trees)
    deadline = Deadline.after(deadline_s)
    wide = wide_pairs(topology)
    woven = weigh_pairs(topology, epsilon=_CANDIDATE_EPSILON, seed=seed, deadline_s=deadline_s).pairs
    known = merge(known)
    group = candidates(known, (*wide, *woven), CANDIDATES)
    search = _Search(Choice(topology, (group,)), frozenset(map(shape, known)), (), optimum, seed, deadline)
    carriers, settings = search.run(tolerance, max_trees)
    return Pairing(carriers, settings)


def fewest_among(
    choice: Choice[AnyCarrier],
    known: Iterable[AnyCarrier],
    *,
    tolerance: Fraction = DEFAULT_TOLERANCE,
    max_trees: int | None = None,
    seed: int = 0,
    deadline: Deadline,
    search_limit: int = _SEARCH_LIMIT,
) -> tuple[tuple[AnyCarrier, ...], Settings]:
    """Few of given carriers: what `fewest_trees` and `fewest_pairs` do with their own.

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
    most = Fraction(choice.best().rate) * choice.topology.bandwidth_unit
    search = _Search(choice, frozenset(map(shape, known)), (), most, seed, deadline, search_limit)
    return search.run(tolerance, max_trees)


def _check(tolerance: Fraction, max_trees: int | None) -> None:
    if not 0 <= tolerance < 1:
        raise InputError(f"tolerance: must be from 0 to below 1, got {tolerance}")
    if max_trees is not None and max_trees < 1:
        raise InputError(f"max-trees: must be at least 1, got {max_trees}")


@dataclass(frozen=True, eq=False)
class _Search(Generic[AnyCarrier]):
    """The choice among candidates; rates inside are floats in units of capacity."""

    choice: Choice[AnyCarrier]
    known: frozenset[tuple[object, ...]]  # shapes that together reach the optimum, or nearly so
    starts: tuple[frozenset[tuple[object, ...]], ...]  # shapes that are together a choice of few already
    optimum: Fraction
    seed: int
    deadline: Deadline
    search_limit: int = _SEARCH_LIMIT

    def run(self, tolerance: Fraction, max_trees: int | None) -> tuple[tuple[AnyCarrier, ...], Settings]:
        """The chosen carriers with exact weights, and what was proved."""
        most = self.choice.best().rate
        if max_trees is None:
            asked: tuple[str, str | int | None] = ("tolerance", str(tolerance))
            exact = self.optimum / self.choice.topology.bandwidth_unit * (1 - tolerance)
            kept, proved = self._fewest(min(most, float(exact)))
            if most < float(exact) * (1 - _SLACK):
                proved = "none: the candidates do not reach the tolerance"
        else:
            asked = ("max_trees", max_trees)
            kept, proved = self._best_of(max_trees, most)
            kept = self._dropped(kept, self.choice.only(kept).best().rate)
        carriers = self.choice.only(kept).weighed()
        return carriers, (asked, ("candidates", len(self.choice.carriers)), ("proved", proved))

    def _fewest(self, rate: float) -> tuple[list[int], str]:
        """The fewest carriers that reach a rate."""
        starts = [self._of(self.known), *(self._sparse(rate, attempt) for attempt in range(_ATTEMPTS))]
        kept = min((self._dropped(start, rate) for start in starts if self._reaches(start, rate)), key=len)
        groups = len(self.choice.groups)
        if len(kept) == groups:
            return kept, "no fewer trees are possible"
        if groups > 1 or self.search_limit == 0:
            return kept, "none of the trees can be left out"
        model, binary = self._integer_program()
        model.changeColBounds(len(self.choice.carriers), rate * (1 - _SLACK), rate)
        for column in binary:
            model.changeColCost(column, 1.0)
        chosen, closed = self._solve(model, kept)
        if len(chosen) < len(kept) and self._reaches(chosen, rate):
            kept = chosen
        elif len(chosen) < len(kept):
            closed = False  # the integer program took a rounding error for a carrier's share
        return kept, "fewest among the candidates" if closed else "none: the search was cut short"

    def _best_of(self, max_trees: int, most: float) -> tuple[list[int], str]:
        """At most so many carriers per group, at the largest rate."""
        if max_trees == len(self.choice.groups) == 1:
            return [self._best_single()], "best among the candidates"
        kept = self._best_sparse(max_trees, most)
        rate = self.choice.only(kept).best().rate
        if self._is_optimum(rate):
            return kept, "optimal"
        if len(self.choice.groups) > 1:
            return kept, "none: heuristic choice per root"
        model, binary = self._integer_program()
        columns = np.array(binary, dtype=np.int32)
        model.addRow(0.0, float(max_trees), len(columns), columns, np.ones(len(columns)))
        model.changeColCost(len(self.choice.carriers), -1.0)
        chosen, closed = self._solve(model, kept)
        if chosen and self.choice.only(chosen).best().rate > rate * (1 + _SLACK):
            kept = chosen
        return kept, "best among the candidates" if closed else "none: the search was cut short"

    def _best_single(self) -> int:
        """The carrier that carries most alone, the lowest of equals."""
        heights = [carrier.height for carrier in self.choice.carriers]
        return min(range(len(heights)), key=lambda index: (-self.choice.most[index], heights[index]))

    def _is_optimum(self, rate: float) -> bool:
        return rate >= float(self.optimum / self.choice.topology.bandwidth_unit) * (1 - _SLACK)

    def _of(self, shapes: frozenset[tuple[object, ...]]) -> list[int]:
        return [index for index, carrier in enumerate(self.choice.carriers) if shape(carrier) in shapes]

    def _reaches(self, kept: Sequence[int], rate: float) -> bool:
        """Whether these carriers alone reach a rate."""
        some = self.choice.only(kept)
        return all(some.groups) and some.best().rate >= rate * (1 - _SLACK)

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
            weights = self.choice.cheapest(prices, rate * (1 - _SLACK))
            if weights is None:
                break
            used = self._used(weights, rate)
            if len(used) < len(best):
                best = used
            prices = 1 / (weights / rate + 0.01)
        return best

    def _dropped(self, kept: list[int], rate: float) -> list[int]:
        """The same without those that can be left out, tried from the lightest on."""
        weights = self.choice.only(kept).best().weights
        for index in [kept[position] for position in np.argsort(weights, kind="stable")]:
            fewer = [other for other in kept if other != index]
            if self.deadline.has_passed:
                break
            if self._reaches(fewer, rate):
                kept = fewer
        return kept

    def _best_sparse(self, max_trees: int, most: float) -> list[int]:
        """A good choice of at most so many per group: the starts, or thin out and keep the heaviest."""
        best: list[int] = []
        best_rate = -1.0
        known = self._of(self.known)
        for shapes in self.starts:
            kept, reached = self._with_heaviest(self._of(shapes), max_trees)
            if reached > best_rate * (1 + _SLACK):
                best, best_rate = kept, reached
        for tenths in range(10, 0, -1):
            rate = most * tenths / 10
            if rate <= best_rate or (best and self.deadline.has_passed):
                break
            thinned = self._sparse(rate)
            for start in (thinned, known) if self._reaches(known, rate) else (thinned,):
                kept, reached = self._with_heaviest(start, max_trees)
                if reached > best_rate * (1 + _SLACK):
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
        weights[sorted(some)] = self.choice.only(some).best().weights
        kept = self._heaviest(weights, max_trees)
        return kept, self.choice.only(kept).best().rate

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

    def _integer_program(self) -> tuple[Any, list[int]]:
        """The linear program plus a 0-1 column per carrier without which it carries nothing."""
        import highspy

        model = self.choice.program(seed=self.seed, deadline_s=self.deadline.left_s)
        model.setOptionValue("mip_max_nodes", self.search_limit)
        model.setOptionValue("mip_rel_gap", 1e-6)  # "best" is to mean best
        binary = []
        for index, most in enumerate(self.choice.most):
            column = len(self.choice.carriers) + 1 + index
            model.addCol(0.0, 0.0, 1.0, 0, np.array([], dtype=np.int32), np.array([]))
            model.changeColIntegrality(column, highspy.HighsVarType.kInteger)
            columns = np.array([index, column], dtype=np.int32)
            model.addRow(-highspy.kHighsInf, 0.0, 2, columns, np.array([1.0, -most]))
            binary.append(column)
        return model, binary

    def _solve(self, model: Any, start: Sequence[int]) -> tuple[list[int], bool]:
        """What the integer program keeps, and whether the search was complete; `start` is a solution."""
        import highspy

        count = len(self.choice.carriers)
        smaller = self.choice.only(start).best()
        values = np.zeros(2 * count + 1)
        values[sorted(start)] = smaller.weights
        values[count] = smaller.rate
        values[[count + 1 + index for index in start]] = 1
        solution = highspy.HighsSolution()
        solution.col_value = values.tolist()
        model.setSolution(solution)
        model.run()
        closed = model.modelStatusToString(model.getModelStatus()) == "Optimal"
        found = np.array(model.getSolution().col_value)
        if len(found) < 2 * count + 1:
            return [], closed
        return [int(index) for index in np.flatnonzero(found[count + 1 :] > 0.5)], closed
