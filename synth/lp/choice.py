"""A choice of trees, and how much each of them should carry, exactly.

The floating solver finds which trees and which full rows make the optimum; the weights themselves are those
of the exact vertex, so that no rounding error reaches a schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Protocol

import numpy as np

from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.tree_program import Floats, TreeProgram, TreeRows, Weighable, Weighed, is_below

_CLEAR = 1e-6  # relative: a floating rate that is so far from another one tells which is larger


class Carries(Protocol):
    """What carries a weight along links."""

    @property
    def uses(self) -> Ints:
        """How often it uses each row."""

    @property
    def height(self) -> int:
        """Steps from the first that sends to the last that receives."""


class Choosable(Weighable, Protocol):
    """A tree, or a pair of trees, that is chosen among others."""

    @property
    def height(self) -> int:
        """Steps from the first that sends to the last that receives."""


@dataclass(frozen=True, slots=True)
class Use:
    """What a carrier uses of the links, by their index, and the group it belongs to."""

    group: int
    used: Mapping[int, int]
    height: int

    @classmethod
    def of(cls, group: int, carrier: Carries) -> Use:
        """Counted on its links."""
        links = np.flatnonzero(carrier.uses)
        used = dict(zip(links.tolist(), carrier.uses[links].tolist(), strict=True))
        return cls(group, used, carrier.height)


@dataclass(frozen=True, eq=False)
class TreeCandidates:
    """Trees in groups, each group of which must carry the same.

    Attributes:
        rows: what they share; all rates and weights in here are parts of what its capacities are parts of.
        trees: to choose from.
    """

    rows: TreeRows
    trees: tuple[Choosable, ...]

    def only(self, kept: Sequence[int]) -> TreeCandidates:
        """The same choice among the trees of these indices, in ascending order."""
        return TreeCandidates(self.rows, tuple(self.trees[index] for index in sorted(kept)))

    @property
    def groups(self) -> int:
        """How many there are."""
        return len(self.rows.share_of)

    @property
    def is_complete(self) -> bool:
        """Whether each group has a tree."""
        return len({tree.group for tree in self.trees}) == self.groups

    @cached_property
    def best(self) -> Weighed:
        """The weights of the largest rate, in floating point."""
        return self._solved[1]

    @cached_property
    def _solved(self) -> tuple[TreeProgram, Weighed]:
        program = TreeProgram(self.rows, self.trees)
        return program, program.solve()

    def cheapest(self, prices: Floats, rate: float) -> Floats | None:
        """The weights that carry a rate at the least total price; None where they cannot carry it."""
        return TreeProgram(self.rows, self.trees).cheapest(prices, rate)

    def reaches(self, rate: Fraction) -> bool:
        """Whether the trees were found to reach a rate, exactly."""
        if not self.is_complete or self.best.rate < float(rate) * (1 - _CLEAR):
            return False
        return self.best.rate > float(rate) * (1 + _CLEAR) or self.rate >= rate

    def falls_short(self, rate: Fraction) -> bool:
        """Whether it is proved that the trees do not reach a rate."""
        return not self.is_complete or is_below(*self._solved, rate)

    @property
    def rate(self) -> Fraction:
        """What the exact weights add up to."""
        return self.rows.rate(self.trees, self.weights)

    @cached_property
    def weights(self) -> Sequence[Fraction]:
        """Exact weights of the largest rate that was found."""
        return self._solved[0].exact(self.best)
