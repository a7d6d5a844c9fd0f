"""The restricted master of all packings: column generation over trees.

The program weighs the trees known so far; its prices say which trees are missing, until none is. Sources of
trees are asked in turn, the quick ones first; exact ones also prove a limit.

Source: Ford and Fulkerson (1958), Gilmore and Gomory (1961); Farley (1990) for the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from fractions import Fraction
from typing import Generic, Protocol, TypeVar

import numpy as np

from arborcast.synth.deadline import Deadline
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.choice import Choosable
from arborcast.synth.lp.tree_program import CLOSE, TreeProgram, TreeRows, Weighable, Weighed


class Keyed(Choosable, Protocol):
    """A tree with what tells it apart from others."""

    @property
    def key(self) -> Hashable:
        """Equal where two trees do the same for the program."""


One = TypeVar("One", bound=Keyed)

_ROUNDS = 2000  # of weighing and pricing


class Master(Generic[One]):
    """Trees met so far, of each key the lowest, and the program over them.

    Attributes:
        rows: what they share.
        columns: the trees, in the order in which they were met.
        limit: the least rate that prices proved no trees to exceed; None before any proof.
        proof: those prices.
    """

    def __init__(self, rows: TreeRows) -> None:
        """Without trees."""
        self.rows = rows
        self.columns: list[One] = []
        self.limit: Fraction | None = None
        self.proof: Ints = np.zeros(len(rows.capacities), dtype=np.int64)
        self.program = TreeProgram(rows)
        self._place: dict[Hashable, int] = {}

    def add(self, column: One) -> bool:
        """Let a tree join the program; whether it is new. Of two of one key the lower is kept."""
        place = self._place.setdefault(column.key, len(self.columns))
        if place < len(self.columns):
            if column.height < self.columns[place].height:
                self.columns[place] = column
            return False
        self.columns.append(column)
        self.program.add(column)
        return True

    def add_helpful(self, columns: Iterable[One], weighed: Weighed | None) -> bool:
        """Add trees; whether a new one is cheaper than what its group pays (than anything without prices)."""
        helped = False
        for column in columns:
            helps = weighed is None or is_cheaper(column, weighed)
            helped |= self.add(column) and helps
        return helped

    def run(
        self,
        sources: Sequence[Callable[[Weighed], Iterable[One]]],
        deadline: Deadline,
        *,
        enough: float = 1 - CLOSE,
        rounds: int = _ROUNDS,
    ) -> Weighed:
        """Weigh and price until the rate is enough, no source helps or the deadline has passed."""
        weighed = self.program.solve()
        for _ in range(rounds):
            if weighed.rate >= enough or deadline.has_passed:
                break
            if not any(self.add_helpful(source(weighed), weighed) for source in sources):
                break
            weighed = self.program.solve()
        return weighed

    def prove(self, prices: Ints, cheapest: Sequence[int | None]) -> None:
        """Keep the limit that prices prove, where it is the least; see `TreeRows.limit`."""
        limit = self.rows.limit(prices.tolist(), cheapest)
        if limit is not None and (self.limit is None or limit <= self.limit):
            self.limit, self.proof = limit, prices

    def exact_prices(self, largest: int) -> Ints | None:
        """The prices of the last answer, exactly; None where they are no whole numbers up to `largest`."""
        vertex = self.program.vertex()
        if vertex is None or max(vertex.prices, default=0) > largest:
            return None
        return np.array(vertex.prices, dtype=np.int64)


def cost_of(column: Weighable, weighed: Weighed) -> float:
    """What a tree costs at the prices of a program; rounded once, which every machine does alike."""
    return math.fsum(count * float(weighed.prices[row]) for row, count in column.used.items())


def is_cheaper(column: Weighable, weighed: Weighed) -> bool:
    """Whether a tree costs less than the program believes that one of its group is worth."""
    value = float(weighed.values[column.group])
    return cost_of(column, weighed) < value - CLOSE * max(value, float(weighed.values.sum()))
