"""The trees known so far: columns of the linear program that weighs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from arborcast.synth.packing.symmetric.growth import Grown


@dataclass(frozen=True, eq=False)
class Column:
    """A tree of a group.

    Attributes:
        group: its index in the problem.
        grown: the tree.
    """

    group: int
    grown: Grown

    @property
    def height(self) -> int:
        """Of the tree."""
        return self.grown.height

    @property
    def uses(self) -> tuple[int, ...]:
        """How often it uses each orbit; of a mirrored tree, both ways together."""
        return self.grown.uses

    @cached_property
    def used(self) -> Mapping[int, int]:
        """The same for the orbits that it uses at all."""
        return {orbit: count for orbit, count in enumerate(self.uses) if count}


@dataclass
class Pool:
    """All trees met so far; of those that a group cannot tell apart by their uses, the lowest."""

    columns: list[Column] = field(default_factory=list)
    _place: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)

    def add(self, column: Column) -> bool:
        """Put a tree in; whether its uses are new. A lower tree takes the place of a higher one."""
        key = (column.group, column.uses)
        if key in self._place:
            place = self._place[key]
            if column.height < self.columns[place].height:
                self.columns[place] = column
            return False
        self._place[key] = len(self.columns)
        self.columns.append(column)
        return True

    def up_to(self, height: int) -> list[Column]:
        """The trees of at most a height."""
        return [column for column in self.columns if column.height <= height]
