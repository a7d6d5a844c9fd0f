"""Column generation by cheap trees instead of the cheapest, which may take too long: it proves nothing.

Trees are mixed by the linear program over those found so far (`synth.chunks.trees.step_master`), whose prices
say which are cheap. Sources of trees look a little first, and longer once that finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from arborcast.synth.chunks.trees.pricing import Prices, TimedTree, cost_of
from arborcast.synth.chunks.trees.step_master import MultiplicativeWeights, RestrictedMaster
from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.errors import TimedOutError
from arborcast.synth.progress import report

RUINS = (20, 200)
"""How often branches of a cheap tree are cut off: while that finds trees, and once it does not."""

_CLOSE = 1e-9  # relative: a smaller gain is a matter of rounding
_SMOOTHING = 0.5  # how far the prices asked for stay at those asked before

Source: TypeAlias = Callable[[Prices, bool], Sequence[tuple[int, TimedTree]]]
"""Cheap trees under prices, the cheapest first, each with the index of its class; whether to look long."""


class CheapGeneration:
    """The program, and who finds trees for it.

    Attributes:
        master: the trees so far; each class has one once `begin` is over.
    """

    def __init__(self, master: RestrictedMaster, sources: Sequence[Source], deadline: Deadline) -> None:
        self.master = master
        self._sources = sources
        self._deadline = deadline

    def begin(self, turns: int) -> None:
        """Trees for prices that grow with the load of those before; one of each class in any case."""
        weights = MultiplicativeWeights(self.master)
        for _ in range(turns):
            prices = weights.prices()
            for source in self._sources:
                if self._deadline.has_passed and self.master.is_complete:
                    return
                for chunk_class, tree in source(prices, False)[:1]:
                    self.master.add(chunk_class, tree)
                    weights.add(tree, self.master.classes[chunk_class].count)

    def run(self, enough: float) -> tuple[float, Prices, list[Fraction]]:
        """The R/C of the best mixture in time, the last prices, and the weights of the master's trees.

        Args:
            enough: R/C at which to stop.
        """
        master, deadline = self.master, self._deadline
        costs, prices = master.solve(NO_DEADLINE)
        stable = np.full(prices.shape, 1 / sum(master.problem.capacities))
        long = False
        try:
            while True:
                deadline.check("the search for cheap trees")
                costs, prices = master.solve(deadline)
                report(f"trees in {master.steps} steps, R/C {costs.sum():.5g}", 0, 0)
                if costs.sum() <= enough * (1 + _CLOSE):
                    break
                stable = _SMOOTHING * stable + (1 - _SMOOTHING) * prices
                if any(self._improves(asked, prices, costs, long) for asked in (stable, prices)):
                    continue
                if long:
                    break
                long = True
            weights = master.exact()[0]
        except (TimedOutError, ArithmeticError):
            weights = master.weights()
        return float(costs.sum()), prices, weights

    def _improves(self, asked: Prices, prices: Prices, costs: Prices, long: bool) -> bool:
        """Add trees that are cheaper than what the program believes; whether there were any."""
        improved = False
        for source in self._sources:
            self._deadline.check("the search for cheap trees")
            improved |= self._add_cheaper(source(asked, long), prices, costs)
        return improved

    def _add_cheaper(self, found: Iterable[tuple[int, TimedTree]], prices: Prices, costs: Prices) -> bool:
        master, least = self.master, _CLOSE * float(costs.sum())
        added = False
        for chunk_class, tree in found:
            cost = master.classes[chunk_class].count * cost_of(master.problem, tree, prices)
            if cost < costs[chunk_class] - least:
                added |= master.add(chunk_class, tree)
        return added
