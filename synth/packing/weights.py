"""A choice of trees or pairs on the links of a topology, and how much each of them should carry, exactly.

The floating solver finds which carriers and which full links make the optimum; the weights themselves are
whole parts of a small number where those reach the same rate, else the exact vertex, so that no rounding
error reaches a schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np

from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.tree_program import CLOSE, Floats, TreeProgram, TreeRows, Weighed, is_below
from arborcast.synth.topology import Topology

_LARGEST_DENOMINATOR = 64  # weights are looked for as whole parts of up to this before equations are solved
_CLEAR = 1e-6  # relative: a floating rate that is so far from another one tells which is larger


class Weighted(Protocol):
    """A tree or pair that carries a weight: a `Carrier`, or one that forks at switches."""

    @property
    def weight(self) -> Fraction:
        """GB/s that it carries."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Tells apart those of any weight."""

    @property
    def height(self) -> int:
        """Steps from the first that sends to the last that receives."""

    @property
    def uses(self) -> Ints:
        """How often it uses each row."""


One = TypeVar("One", bound=Weighted)


@dataclass(frozen=True, slots=True)
class Use:
    """What a carrier uses of the links, by their index, and the group it belongs to."""

    group: int
    used: Mapping[int, int]

    @classmethod
    def of(cls, group: int, carrier: Weighted) -> Use:
        """Counted on its links."""
        links = np.flatnonzero(carrier.uses)
        return cls(group, dict(zip(links.tolist(), carrier.uses[links].tolist(), strict=True)))


@dataclass(frozen=True, eq=False)
class Choice(Generic[One]):
    """Carriers in groups, each group of which must carry the same: one per root, or a single one.

    Attributes:
        topology: what they share.
        groups: the carriers to choose from; their weights mean nothing here.
        target: GB/s that no group can exceed; all rates and weights in here are parts of it.
        known: what each carrier uses, where that was counted before.
        adders: GB/s of the rows behind the links; see `synth.in_network.steiner_tree.Rows`.
    """

    topology: Topology
    groups: tuple[tuple[One, ...], ...]
    target: Fraction
    known: tuple[Use, ...] = ()
    adders: tuple[Fraction, ...] = ()

    @cached_property
    def carriers(self) -> tuple[One, ...]:
        """All of them, group after group."""
        return tuple(chain.from_iterable(self.groups))

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """The group of each of `carriers`."""
        return tuple(index for index, group in enumerate(self.groups) for _ in group)

    @cached_property
    def rows(self) -> TreeRows:
        """The links."""
        return rows_of(self.topology, self.target, len(self.groups), self.adders)

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """What each carrier uses."""
        if self.known:
            return self.known
        return tuple(map(Use.of, self.group_of, self.carriers))

    def only(self, kept: Sequence[int]) -> Choice[One]:
        """The same choice among the carriers of these indices."""
        members: list[list[One]] = [[] for _ in self.groups]
        chosen = sorted(kept)
        for index in chosen:
            members[self.group_of[index]].append(self.carriers[index])
        uses = tuple(self.uses[index] for index in chosen)
        return replace(self, groups=tuple(map(tuple, members)), known=uses)

    @cached_property
    def best(self) -> Weighed:
        """The weights of the largest rate, in floating point."""
        return self._solved[1]

    @cached_property
    def _solved(self) -> tuple[TreeProgram, Weighed]:
        program = TreeProgram(self.rows, self.uses)
        return program, program.solve()

    def cheapest(self, prices: Floats, rate: float) -> Floats | None:
        """The weights that carry a rate at the least total price; None where they cannot carry it."""
        return TreeProgram(self.rows, self.uses).cheapest(prices, rate)

    def reaches(self, rate: Fraction) -> bool:
        """Whether the carriers were found to reach a rate, exactly."""
        if not all(self.groups) or self.best.rate < float(rate) * (1 - _CLEAR):
            return False
        return self.best.rate > float(rate) * (1 + _CLEAR) or self.rate >= rate

    def falls_short(self, rate: Fraction) -> bool:
        """Whether it is proved that the carriers do not reach a rate."""
        return not all(self.groups) or is_below(*self._solved, rate)

    @property
    def rate(self) -> Fraction:
        """What the exact weights of a group add up to."""
        return self.rows.rate(self.uses, self.weights)

    @cached_property
    def weights(self) -> Sequence[Fraction]:
        """Exact weights of the largest rate that was found: of the vertex, or simpler ones as good."""
        simple = self._simple()
        if simple is not None and self._rate(simple) == 1:
            return simple  # nothing carries more than the target
        exact = self._solved[0].exact(self.best)
        return max(simple or exact, exact, key=self._rate)

    def weighed(self) -> tuple[One, ...]:
        """The carriers with exact weights in GB/s at which each group carries the largest rate.

        Carriers that get nothing are left out. The weights are whole parts of the rate with a small
        denominator where such weights reach it.
        """
        return tuple(
            cast(One, replace(cast(Any, carrier), weight=weight * self.target))
            for carrier, weight in zip(self.carriers, self.weights, strict=True)
            if weight
        )

    def _rate(self, weights: Sequence[Fraction]) -> Fraction:
        return self.rows.rate(self.uses, weights)

    def _simple(self) -> list[Fraction] | None:
        """Whole parts of the smallest denominator that come near the rate of the floating weights."""
        least = self.best.rate * (1 - CLOSE)
        for denominator in range(1, _LARGEST_DENOMINATOR + 1):
            parts = self._whole_parts(denominator)
            fullest = self.rows.fullest(self.uses, parts)
            if denominator / fullest >= least:
                return [part / fullest for part in parts]
        return None

    def _whole_parts(self, denominator: int) -> list[int]:
        """Weights rounded to whole parts that add up to `denominator` in each group (largest remainder)."""
        parts = [0] * len(self.carriers)
        for group in range(len(self.groups)):
            members = [index for index, its_group in enumerate(self.group_of) if its_group == group]
            total = sum(float(self.best.weights[index]) for index in members)
            # Rounded first: weights that are alike must stay alike whatever the solver's last digits.
            exact = {
                index: round(denominator * float(self.best.weights[index]) / total, 6) for index in members
            }
            for index in members:
                parts[index] = int(exact[index])
            missing = denominator - sum(parts[index] for index in members)
            by_remainder = sorted(members, key=lambda index: (int(exact[index]) - exact[index], index))
            for index in by_remainder[:missing]:
                parts[index] += 1
        return parts


def rows_of(topology: Topology, target: Fraction, groups: int, adders: Sequence[Fraction] = ()) -> TreeRows:
    """The links of a topology for groups that carry the same; capacities as parts of a rate in GB/s."""
    rates = chain((link.bandwidth for link in topology.links), adders)
    return TreeRows(tuple(rate / target for rate in rates), (0,) * groups)
