"""The linear program behind `synth.chunks.trees.column_generation`, over the trees found so far.

It is written down as its dual: prices of links in steps, which each tree limits by a row. A new tree is
then a new row, from which the dual simplex goes on where it stood. A group of symmetries merges the prices
of links, and the rows of demands, that it maps to each other; the optimum is the same, because prices and
packings may be averaged over the group.

`MultiplicativeWeights` (Plotkin, Shmoys, Tardos 1995) gives prices that grow with the load of the trees
taken so far: a source of trees that fit together, before the first linear program.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.chunks.bounds.step_certificate import StepLengths
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkClass, ChunkOrbits, Group, OrbitSend, least_links
from arborcast.synth.chunks.problem.prune import TimedRoute
from arborcast.synth.chunks.trees.pricing import TimedTree, in_order
from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.linear_program import LinearProgram

_GRAIN = 1 << 30
"""What weights in floating point are rounded to."""


class RestrictedMaster:
    """Prices and weights for the trees of one representative of each orbit of demands.

    Attributes:
        problem: what there is to send over.
        steps: S.
        classes: the representative demands; `count` is the size of the orbit.
        trees: what was added: the index of the class, the tree.
        orbits: the number of the orbit of each link.
    """

    def __init__(self, problem: ChunkProblem, steps: int, group: Group) -> None:
        self.problem = problem
        self.steps = steps
        self.trees: list[tuple[int, TimedTree]] = []
        self._images = ChunkOrbits(problem, len(group), group)
        self.classes: tuple[ChunkClass, ...] = self._images.classes
        self._packed: list[float] = []
        self._known: set[tuple[int, TimedTree]] = set()
        self.orbits = link_orbits(problem, group)
        count = len(self.classes)
        # The prices of a step are worth `_unit` together, so that one of them is about 1 for HiGHS.
        self._unit = sum(problem.capacities)
        self._program = LinearProgram([1] * count + [0] * (steps * self._width), 1)
        for step in range(steps):
            columns = [self._column(step, orbit) for orbit in range(self._width)]
            self._program.add_row(columns, self._capacities, upper=self._unit)

    @cached_property
    def _width(self) -> int:
        return int(self.orbits.max()) + 1

    @cached_property
    def _capacities(self) -> list[int]:
        """Of each orbit of links, all of its links together."""
        total = [0] * self._width
        for orbit, capacity in zip(self.orbits.tolist(), self.problem.capacities, strict=True):
            total[orbit] += capacity
        return total

    @property
    def is_complete(self) -> bool:
        """Whether each class has a tree."""
        return len({chunk_class for chunk_class, _ in self.trees}) == len(self.classes)

    def _column(self, step: int, orbit: int) -> int:
        return len(self.classes) + step * self._width + orbit

    def add(self, chunk_class: int, tree: TimedTree) -> bool:
        """Take in a tree; whether it is a new one."""
        if (chunk_class, tree) in self._known:
            return False
        self._known.add((chunk_class, tree))
        self.trees.append((chunk_class, tree))
        uses = Counter(
            self._column(step, int(self.orbits[link]))
            for route, step in tree
            for link in self.problem.routes[route].links
        )
        times = self.classes[chunk_class].count
        self._program.add_row(
            [chunk_class, *uses], [1, *(-times * count for count in uses.values())], upper=0
        )
        return True

    def add_later(self, trees: Iterable[tuple[int, TimedTree]]) -> bool:
        """Take in trees of demands of one step fewer, with a step in which they wait anywhere; if any."""
        position = {found.demand: index for index, found in enumerate(self.classes)}
        added = False
        for demand, tree in trees:
            for idle in range(self.steps) if demand in position else ():
                later = tuple((route, step + (step >= idle)) for route, step in tree)
                added |= self.add(position[demand], later)
        return added

    def solve(self, deadline: Deadline = NO_DEADLINE) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What the trees of each class cost at least, and the prices of steps and links that make it so.

        The costs are those of a whole orbit of demands; together they are the R/C of the best packing.

        Raises:
            TimedOutError: the deadline passed.
        """
        values = self._program.solve(deadline) / self._unit
        self._packed = self._program.prices()[self.steps :].tolist()
        count = len(self.classes)
        prices = np.maximum(values[count:], 0.0).reshape(self.steps, self._width)
        return values[:count], prices[:, self.orbits]

    def weights(self) -> list[Fraction]:
        """What the last `solve` packs of each tree, nearly; without one, as much of each."""
        found = self._packed or [1.0] * len(self.trees)
        found = found + [0.0] * (len(self.trees) - len(found))
        return self._whole([Fraction(round(weight * _GRAIN), _GRAIN) for weight in found])

    def exact(self) -> tuple[list[Fraction], StepLengths]:
        """The weights and the prices of the last `solve`, exactly.

        Both are feasible whatever the tolerances of HiGHS let pass: each class is packed once, and no step
        is worth more than 1. Their ratios are equal unless the tolerances mattered.

        Raises:
            ArithmeticError: the basis of HiGHS is singular.
        """
        vertex = self._program.exact()
        values = [max(value, Fraction(0)) / self._unit for value in vertex.values[len(self.classes) :]]
        lengths = []
        for step in range(self.steps):
            row = values[step * self._width : (step + 1) * self._width]
            worth = sum(map(operator.mul, self._capacities, row), Fraction(0))
            lengths.append(tuple(row[orbit] / max(worth, Fraction(1)) for orbit in self.orbits.tolist()))
        return self._whole(vertex.prices[self.steps :]), tuple(lengths)

    def _whole(self, weights: Sequence[Fraction]) -> list[Fraction]:
        """The weights of each class scaled to 1 together, none negative."""
        total = [Fraction(0)] * len(self.classes)
        for (chunk_class, _), weight in zip(self.trees, weights, strict=True):
            total[chunk_class] += max(weight, Fraction(0))
        return [
            max(weight, Fraction(0)) / total[chunk_class]
            for (chunk_class, _), weight in zip(self.trees, weights, strict=True)
        ]

    def unfolded(self, weights: Sequence[Fraction]) -> dict[tuple[int, TimedTree], Fraction]:
        """The weights of the trees of all demands, from those of the classes."""
        packed: dict[tuple[int, TimedTree], Fraction] = defaultdict(Fraction)
        for (chunk_class, tree), weight in zip(self.trees, weights, strict=True):
            if not weight:
                continue
            copies: dict[tuple[int, int], list[TimedRoute]] = defaultdict(list)
            sends = (OrbitSend(chunk_class, 0, route, step) for route, step in tree)
            for send in self._images.unfold(sends):
                copies[send.demand, send.chunk].append((send.route, send.step))
            each = weight * self.classes[chunk_class].count / len(self._images.group)
            for (demand, _), sends_of_copy in copies.items():
                packed[demand, in_order(sends_of_copy)] += each
        return packed


class MultiplicativeWeights:
    """The load of some trees of a program, with their images under its group, on each link in each step.

    Attributes:
        orbits: the number of the orbit of each link; links of one orbit have one load.
    """

    def __init__(self, master: RestrictedMaster) -> None:
        problem, steps = master.problem, master.steps
        self.orbits = master.orbits
        self._routes = problem.routes
        self._capacities = np.array(problem.capacities, dtype=np.float64)
        # An image of a tree is as likely to use any link of an orbit.
        self._offered = self._capacities * np.bincount(self.orbits)[self.orbits]
        self._load = np.zeros((steps, int(self.orbits.max()) + 1))
        self._turns = 0

    def add(self, tree: TimedTree, times: int) -> None:
        """Take a tree so many times."""
        for route, step in tree:
            for link in self._routes[route].links:
                self._load[step, self.orbits[link]] += times

    def prices(self) -> NDArray[np.float64]:
        """Those of each step, which are worth 1 together; the more often asked, the steeper."""
        relative = self._load[:, self.orbits] / self._offered
        highest = relative.max(axis=1, keepdims=True)
        prices = np.where(highest > 0, relative / np.where(highest > 0, highest, 1), 1)
        for _ in range(2 + ((1 + self._turns).bit_length() - 1) // 2):
            prices = prices * prices  # unlike other powers, the same on every machine
        self._turns += 1
        return np.asarray(prices / (prices * self._capacities).sum(axis=1, keepdims=True))


def link_orbits(problem: ChunkProblem, group: Group) -> Ints:
    """For each link the number of its orbit under the group."""
    least = least_links(problem.topology, group)
    return np.unique(least, return_inverse=True)[1].astype(np.int64)
