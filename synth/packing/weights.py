"""How much each of some given carriers should carry: linear programs over their weights, made exact.

The floating solver (HiGHS) finds which carriers and which full links make the optimum; the weights
themselves are then whole parts of a small number, or else the exact solution of the equations of the full
links, so that no rounding error reaches a schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from synth.bounds.exact_system import ExactSystem
from synth.highs import limit_time, new_model
from synth.packing.carrier import AnyCarrier, congestion, hops, with_weight
from synth.topology import Topology

Floats = NDArray[np.float64]

_CLOSE = 1e-9  # relative: the accuracy to which the floating solver's rate is believed
_LARGEST_DENOMINATOR = 64  # weights are looked for as whole parts of up to this before equations are solved
_FINE_DENOMINATOR = 1 << 20  # used where even the equations give no legal weights


@dataclass(frozen=True, eq=False)
class Choice(Generic[AnyCarrier]):
    """Carriers in groups, each group of which must carry the same: one per root, or a single one.

    Attributes:
        topology: what they share.
        groups: the carriers to choose from; their weights mean nothing here.
    """

    topology: Topology
    groups: tuple[tuple[AnyCarrier, ...], ...]

    @cached_property
    def carriers(self) -> tuple[AnyCarrier, ...]:
        """All of them, group after group."""
        return tuple(chain.from_iterable(self.groups))

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """The group of each of `carriers`."""
        return tuple(index for index, group in enumerate(self.groups) for _ in group)

    @cached_property
    def uses(self) -> tuple[dict[int, int], ...]:
        """For each carrier, how often it passes the links, by their index."""
        position = {(link.src, link.dst): index for index, link in enumerate(self.topology.links)}
        return tuple(
            {position[hop]: count for hop, count in sorted(hops(carrier).items())}
            for carrier in self.carriers
        )

    @cached_property
    def most(self) -> Floats:
        """What each carrier could carry alone, in units of capacity."""
        capacity = self.topology.capacities
        return np.array([min(capacity[link] / count for link, count in uses.items()) for uses in self.uses])

    def only(self, kept: Sequence[int]) -> Choice[AnyCarrier]:
        """The same choice among the carriers of these indices."""
        members: list[list[AnyCarrier]] = [[] for _ in self.groups]
        for index in sorted(kept):
            members[self.group_of[index]].append(self.carriers[index])
        return Choice(self.topology, tuple(map(tuple, members)))

    def program(self, *, seed: int = 0, deadline_s: float | None = None) -> Any:
        """A HiGHS model: a column per carrier and one for the rate, a row per link and per group.

        Columns 0 to n-1 are the weights in units of capacity and column n is the rate of every group.
        """
        model = new_model(seed=seed)
        limit_time(model, deadline_s)
        _add_program(model, self.topology.capacities, self.group_of, self.uses)
        return model

    def best(self) -> Optimum:
        """The weights of the largest rate."""
        model = self.program()
        model.changeColCost(len(self.carriers), -1.0)
        model.run()
        weights = np.array(model.getSolution().col_value)
        basis = model.getBasis()
        return Optimum(
            float(weights[-1]),
            weights[:-1],
            tuple(index for index, status in enumerate(basis.col_status) if status.name == "kBasic"),
            tuple(index for index, status in enumerate(basis.row_status) if status.name != "kBasic"),
        )

    def cheapest(self, prices: Floats, rate: float) -> Floats | None:
        """The weights that carry a rate at the least total price; None where they cannot carry it."""
        model = self.program()
        for index, price in enumerate(prices):
            model.changeColCost(index, float(price))
        model.changeColBounds(len(self.carriers), rate, rate)
        model.run()
        if model.modelStatusToString(model.getModelStatus()) != "Optimal":
            return None
        return np.array(model.getSolution().col_value)[:-1]

    def weighed(self) -> tuple[AnyCarrier, ...]:
        """The carriers with exact weights in GB/s at which each group carries the largest rate.

        Carriers that get nothing are left out. The weights are whole parts of the rate with a small
        denominator where such weights reach it.
        """
        optimum = self.best()
        for denominator in range(1, _LARGEST_DENOMINATOR + 1):
            carriers = self._filled(self._whole_parts(optimum.weights, denominator))
            if self._rate(carriers) >= optimum.rate * (1 - _CLOSE):
                return carriers
        solved = self._filled(self._solved(optimum))
        fine = self._filled(self._whole_parts(optimum.weights, _FINE_DENOMINATOR))
        return max(solved, fine, key=self._rate)

    def _rate(self, carriers: Sequence[AnyCarrier]) -> Fraction:
        """What each group carries, in units of capacity."""
        total = sum((carrier.weight for carrier in carriers), Fraction(0))
        return total / len(self.groups) / self.topology.bandwidth_unit

    def _filled(self, parts: Sequence[Fraction]) -> tuple[AnyCarrier, ...]:
        """The carriers that have a part, weighted in proportion and so that the fullest link is full."""
        carriers = [
            with_weight(carrier, part) for carrier, part in zip(self.carriers, parts, strict=True) if part
        ]
        fullest = congestion(carriers, self.topology.bandwidth)
        return tuple(with_weight(carrier, carrier.weight / fullest) for carrier in carriers)

    def _whole_parts(self, weights: Floats, denominator: int) -> list[Fraction]:
        """Weights rounded to whole parts that add up to `denominator` in each group (largest remainder)."""
        parts = [0] * len(weights)
        for group in range(len(self.groups)):
            members = [index for index, its_group in enumerate(self.group_of) if its_group == group]
            total = sum(float(weights[index]) for index in members)
            # Rounded first: weights that are alike must stay alike whatever the solver's last digits.
            exact = {
                index: round(denominator * max(float(weights[index]), 0.0) / total, 6) for index in members
            }
            for index in members:
                parts[index] = int(exact[index])
            missing = denominator - sum(parts[index] for index in members)
            by_remainder = sorted(members, key=lambda index: (int(exact[index]) - exact[index], index))
            for index in by_remainder[:missing]:
                parts[index] += 1
        return [Fraction(part) for part in parts]

    def _solved(self, optimum: Optimum) -> list[Fraction]:
        """The vertex that the solver names, computed exactly; zeros where its basis is no solution."""
        links, rate = len(self.topology.links), len(self.carriers)
        place = {row: position for position, row in enumerate(optimum.tight)}
        matrix = np.zeros((len(optimum.tight), len(optimum.basic)), dtype=np.int64)
        for position, column in enumerate(optimum.basic):
            if column == rate:
                entries = {links + group: -1 for group in range(len(self.groups))}
            else:
                entries = {**self.uses[column], links + self.group_of[column]: 1}
            for row in entries.keys() & place.keys():
                matrix[place[row], position] = entries[row]
        right = [self.topology.capacities[row] if row < links else 0 for row in optimum.tight]
        parts = [Fraction(0)] * rate
        try:
            solution = ExactSystem(matrix).solve(right)
        except ArithmeticError:
            return parts  # degenerate for the solver: `weighed` has fine parts to fall back on
        for column, value in zip(optimum.basic, solution, strict=True):
            if column != rate:
                parts[column] = value
        return parts if min(parts) >= 0 else [Fraction(0)] * rate


@dataclass(frozen=True, eq=False)
class Optimum:
    """The floating solver's answer.

    Attributes:
        rate: of every group, in units of capacity.
        weights: of every carrier, in units of capacity.
        basic: columns of the basis (see `Choice.program`).
        tight: rows that hold with equality because they are not in the basis.
    """

    rate: float
    weights: Floats
    basic: tuple[int, ...]
    tight: tuple[int, ...]


def _add_program(
    model: Any, capacities: Sequence[int], group_of: Sequence[int], uses: Sequence[Mapping[int, int]]
) -> None:
    """Rows: links, then groups. Columns: carriers, then the rate."""
    nothing = (0, np.array([], dtype=np.int32), np.array([], dtype=np.float64))
    for capacity in capacities:
        model.addRow(-np.inf, float(capacity), *nothing)
    links, groups = len(capacities), max(group_of) + 1
    for _ in range(groups):
        model.addRow(0.0, 0.0, *nothing)
    for group, passed in zip(group_of, uses, strict=True):
        rows = np.array([*passed, links + group], dtype=np.int32)
        counts = np.array([*passed.values(), 1], dtype=np.float64)
        model.addCol(0.0, 0.0, np.inf, len(rows), rows, counts)
    rows = np.arange(links, links + groups, dtype=np.int32)
    model.addCol(0.0, 0.0, np.inf, groups, rows, np.full(groups, -1.0))
