"""Ranks as a grid, and how a tensor lies on it: for each axis, which of its dimensions is divided along it.

ranks 4 5 6 7 as 2 x 2        axis 0: groups (4, 6) and (5, 7)
4 5                       axis 1: groups (4, 5) and (6, 7)
6 7                       both:   group (4, 5, 6, 7)

(0, None)      rows divided along axis 0, the same along axis 1
(0, 0)         rows divided along axis 0, and each part along axis 1
(None, SUM)    along axis 1 every rank has a summand of the tensor
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arborcast.pipeline.errors import PlanError

Axes = tuple[int, ...]
"""Axes of a mesh along which a collective goes, ascending."""

SUM = -1
"""The ranks along an axis hold summands."""

Spec = tuple[int | None, ...]
"""For each axis a dimension, None for replicas, or `SUM`."""


def shown(spec: Spec) -> str:
    """As DTensor writes placements: R, S(0), P for each axis."""
    words = ("R" if at is None else "P" if at == SUM else f"S({at})" for at in spec)
    return " ".join(words) or "-"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks as a grid.

    Attributes:
        shape: ranks along each axis, each at least 2; () for one rank.
        ranks: row by row.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that the shape has room for exactly the ranks."""
        if math.prod(self.shape) != len(self.ranks) or any(size < 2 for size in self.shape):
            raise PlanError(f"mesh {self}: axes must be at least 2 long and hold {len(self.ranks)} ranks")

    @property
    def ways(self) -> tuple[Axes, ...]:
        """Along which axes collectives may go: each alone, and all together."""
        count = len(self.shape)
        return (*((axis,) for axis in range(count)), *([tuple(range(count))] if count > 1 else []))

    def size(self, axes: Iterable[int]) -> int:
        """Ranks of a group along some axes."""
        return math.prod(self.shape[axis] for axis in axes)

    def groups(self, axes: Axes) -> tuple[tuple[int, ...], ...]:
        """The groups along some axes, as places of their ranks in `ranks`."""
        places = np.arange(len(self.ranks)).reshape(self.shape)
        rows = np.moveaxis(places, axes, range(-len(axes), 0)).reshape(-1, self.size(axes))
        return tuple(map(tuple, rows.tolist()))

    @property
    def can_ascend(self) -> bool:
        """Whether `ascending` has a mesh, as process groups number their ranks in ascending order."""
        try:
            self.ascending()
        except PlanError:
            return False
        return True

    def ascending(self) -> Mesh:
        """The same groups along every axis, named so that ranks ascend along each: places on axes swapped.

        Raises:
            PlanError: no names of the places do.
        """
        if not self.shape:
            return self
        grid = np.array(self.ranks).reshape(self.shape)
        axes = range(len(self.shape))
        firsts = [next(it for it in _lines(grid, axis) if grid.min() in it) for axis in axes]
        found = grid[np.ix_(*(line.argsort() for line in firsts))]
        for axis in axes:
            for theirs in _lines(found, axis).tolist():
                if theirs != sorted(theirs):
                    raise PlanError(
                        f"mesh {self} of ranks {list(self.ranks)}: must have an order of rows and columns in "
                        f"which ranks ascend along every axis, got {theirs} along axis {axis}"
                    )
        return Mesh(self.shape, tuple(found.ravel().tolist()))

    def __str__(self) -> str:
        """As tables name it."""
        return "x".join(map(str, self.shape)) or "1"


def _lines(grid: NDArray[np.int64], axis: int) -> NDArray[np.int64]:
    """What lies along an axis, one line a row."""
    return np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])


def row_of(ranks: Sequence[int]) -> Mesh:
    """The mesh of one axis; of one rank that of none."""
    return Mesh((len(ranks),) if len(ranks) > 1 else (), tuple(ranks))


def meshes(ranks: Sequence[int]) -> tuple[Mesh, ...]:
    """Every mesh of some ranks with up to two axes, the ranks in this order: n, and each d x t."""
    count = len(ranks)
    shapes: list[tuple[int, ...]] = [(count,)] if count > 1 else [()]
    shapes += [(rows, count // rows) for rows in range(2, count) if count % rows == 0]
    return tuple(Mesh(shape, tuple(ranks)) for shape in shapes)
