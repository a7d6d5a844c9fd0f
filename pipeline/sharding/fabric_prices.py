"""Meshes of ranks, and what collectives cost along their axes: by `synth`, on exactly this fragment.

    ranks 4 5 6 7 as 2 x 2        axis 0: groups (4, 6) and (5, 7)
        4 5                       axis 1: groups (4, 5) and (6, 7)
        6 7                       both:   group (4, 5, 6, 7)

All groups of an axis communicate at once: their rate is that of the slowest where links are shared as fairly
as possible (`synth.groups`), or the bound where there is one group. Other ranks do not forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Protocol, TypeAlias

from arborcast.pipeline.errors import PlanError
from arborcast.synth.api import bound, solve
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.groups import GroupSchedules, solve_groups
from arborcast.synth.groups.shared_simulator import simulate_groups
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.topology import Topology

Axes = tuple[int, ...]
"""Axes of a mesh along which a collective goes, ascending."""

_Key: TypeAlias = tuple[Kind, tuple[int, ...], tuple[tuple[int, ...], ...]]
"""A kind, the ranks of the fragment, and the groups in it."""

PS_PER_NS = 1000
"""One byte at 1 GB/s takes one nanosecond."""


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
        others = [axis for axis in range(len(self.shape)) if axis not in axes]
        return tuple(
            tuple(self._place(dict(zip(others, fixed, strict=True)), axes, at) for at in self._walk(axes))
            for fixed in self._walk(others)
        )

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
        first = self.ranks.index(min(self.ranks))
        places = []
        for axis in range(len(self.shape)):
            (line,) = (it for it in self.groups((axis,)) if first in it)
            theirs = [self.ranks[place] for place in line]
            places.append([theirs.index(rank) for rank in sorted(theirs)])
        axes = tuple(range(len(places)))
        ranks = [self.ranks[self._place({}, axes, at)] for at in product(*places)]
        found = Mesh(self.shape, tuple(ranks))
        for axis in axes:
            for line in found.groups((axis,)):
                theirs = [ranks[place] for place in line]
                if theirs != sorted(theirs):
                    raise PlanError(
                        f"mesh {self} of ranks {list(self.ranks)}: must have an order of rows and columns in "
                        f"which ranks ascend along every axis, got {theirs} along axis {axis}"
                    )
        return found

    def _walk(self, axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
        return product(*(range(self.shape[axis]) for axis in axes))

    def _place(self, fixed: dict[int, int], axes: Axes, at: tuple[int, ...]) -> int:
        where = fixed | dict(zip(axes, at, strict=True))
        place = 0
        for axis, size in enumerate(self.shape):
            place = place * size + where[axis]
        return place

    def __str__(self) -> str:
        """As tables name it."""
        return "x".join(map(str, self.shape)) or "1"


def row_of(ranks: Sequence[int]) -> Mesh:
    """The mesh of one axis; of one rank that of none."""
    return Mesh((len(ranks),) if len(ranks) > 1 else (), tuple(ranks))


def meshes(ranks: Sequence[int]) -> tuple[Mesh, ...]:
    """Every mesh of some ranks with up to two axes, the ranks in this order: n, and each d x t."""
    count = len(ranks)
    shapes: list[tuple[int, ...]] = [(count,)] if count > 1 else [()]
    shapes += [(rows, count // rows) for rows in range(2, count) if count % rows == 0]
    return tuple(Mesh(shape, tuple(ranks)) for shape in shapes)


class CollectivePrices(Protocol):
    """What collectives cost along the axes of one mesh."""

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        ...

    def ps(self, kind: Kind, axes: Axes, size_bytes: int) -> int | None:
        """Picoseconds of a collective of every group at once; None where links do not connect them.

        Args:
            kind: of collective.
            axes: along which.
            size_bytes: the whole buffer of one group, as algbw counts it: gathered, or to be reduced, or what
                one rank sends to all.
        """
        ...


@dataclass(frozen=True)
class FabricPrices:
    """Prices on a fragment of a topology; answers are kept, and `dataclasses.replace` hands them on.

    Attributes:
        topology: whose ranks the mesh names.
        mesh: the mesh.
        by_schedule: whether a collective takes what its schedule takes when simulated, at sizes of powers of
            four and linear between; otherwise what its bytes take at the exact rate.
        collective_us: that each one costs besides (software).
    """

    topology: Topology
    mesh: Mesh
    by_schedule: bool = False
    collective_us: Fraction = Fraction(0)
    _rates: dict[_Key, Fraction] = field(default_factory=dict, repr=False, compare=False)
    _schedules: dict[_Key, AnySchedule | GroupSchedules] = field(
        default_factory=dict, repr=False, compare=False
    )
    _times: dict[tuple[_Key, int], int] = field(default_factory=dict, repr=False, compare=False)
    _keys: dict[tuple[Kind, Axes], _Key] = field(default_factory=dict, init=False, repr=False, compare=False)

    def ps(self, kind: Kind, axes: Axes, size_bytes: int) -> int | None:
        """As `CollectivePrices` says."""
        rate = self.rate(kind, axes)
        if not rate:
            return None
        if not size_bytes:
            return 0
        fixed = math.ceil(self.collective_us * 10**6)
        if not self.by_schedule:
            return fixed + math.ceil(size_bytes * PS_PER_NS / rate)
        power = (size_bytes.bit_length() - 1) // 2 * 2
        low, high = (self._simulated(self._key(kind, axes), power + more) for more in (0, 2))
        return fixed + low + (high - low) * (size_bytes - (1 << power)) // (3 << power)

    def schedules(self, needed: Iterable[tuple[Kind, Axes]]) -> tuple[GroupSchedules, ...]:
        """What the groups of axes run at once, of some collectives; those that all ranks do are left out."""
        found = []
        for kind, axes in needed:
            if self.rate(kind, axes) and isinstance(
                it := self._schedules.get(self._key(kind, axes)), GroupSchedules
            ):
                found.append(it)
        return tuple(found)

    def rate(self, kind: Kind, axes: Axes) -> Fraction:
        """GB/s of the slowest group while all run; 0 where links do not connect one."""
        key = self._key(kind, axes)
        if key not in self._rates:
            self._rates[key] = self._rate(key)
        return self._rates[key]

    def _key(self, kind: Kind, axes: Axes) -> _Key:
        if (kind, axes) not in self._keys:
            self._keys[kind, axes] = kind, self.mesh.ranks, self.mesh.groups(axes)
        return self._keys[kind, axes]

    def _rate(self, key: _Key) -> Fraction:
        kind, _, groups = key
        if len(groups) == 1:
            return bound(self._fragment, kind).rate
        try:
            found = solve_groups(self._fragment, [Collective(kind, group) for group in groups], relays=False)
        except InfeasibleError:
            return Fraction(0)
        self._schedules[key] = found
        return found.worst

    def _simulated(self, key: _Key, power: int) -> int:
        """Picoseconds of 2**power bytes."""
        if (key, power) not in self._times:
            if key not in self._schedules:
                self._schedules[key] = solve(self._fragment, key[0])
            schedule = self._schedules[key]
            if isinstance(schedule, GroupSchedules):
                timings = simulate_groups(schedule, [2**power] * len(schedule.groups))
                time_us = max(it.time_us for it in timings)
            else:
                time_us = simulate(schedule, 2**power).time_us
            self._times[key, power] = math.ceil(time_us * 10**6)
        return self._times[key, power]

    @property
    def _fragment(self) -> Topology:
        return self.topology.subset(self.mesh.ranks)
