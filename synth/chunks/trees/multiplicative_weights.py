"""Prices that grow with the load of the trees taken so far, so that the next trees go elsewhere.

Multiplicative weights (Plotkin, Shmoys, Tardos 1995), as a source of trees that fit together: before
the first linear program of `synth.chunks.trees.column_generation`, and among equally cheap trees in
`synth.chunks.trees.whole_trees`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.chunks.problem.instance import Problem
from arborcast.synth.chunks.problem.orbits import Group
from arborcast.synth.chunks.trees.pricing import TimedTree
from arborcast.synth.kernels.compiled import Ints


class Pressure:
    """The load of some trees and of their images under a group, on each link in each step.

    Attributes:
        orbits: the number of the orbit of each link; links of one orbit have one load.
    """

    def __init__(self, problem: Problem, steps: int, group: Group) -> None:
        self.orbits = link_orbits(problem, group)
        self._routes = problem.routes
        capacities = np.array(problem.capacities, dtype=np.float64)
        # An image of a tree is as likely to use any link of an orbit.
        self._offered = capacities * np.bincount(self.orbits)[self.orbits]
        self._load = np.zeros((steps, int(self.orbits.max()) + 1))
        self._turns = 0

    def add(self, tree: TimedTree, times: int) -> None:
        """Take a tree so many times."""
        for route, step in tree:
            for link in self._routes[route].links:
                self._load[step, self.orbits[link]] += times

    def prices(self) -> NDArray[np.float64]:
        """From 0 to 1, which the busiest link of each step costs; the more often asked, the steeper."""
        relative = self._load[:, self.orbits] / self._offered
        highest = relative.max(axis=1, keepdims=True)
        prices = np.where(highest > 0, relative / np.where(highest > 0, highest, 1), 1)
        for _ in range(2 + ((1 + self._turns).bit_length() - 1) // 2):
            prices = prices * prices  # unlike other powers, the same on every machine
        self._turns += 1
        return np.asarray(prices)


def link_orbits(problem: Problem, group: Group) -> Ints:
    """For each link the number of its orbit under the group."""
    links = problem.topology.links
    index = {(link.src, link.dst): position for position, link in enumerate(links)}
    first = [min(index[element[link.src], element[link.dst]] for element in group) for link in links]
    return np.unique(first, return_inverse=True)[1].astype(np.int64)
