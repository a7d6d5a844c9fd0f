"""What collectives cost along the axes of a mesh: by `synth`, on exactly this fragment.

All groups of an axis communicate at once: their rate is that of the slowest where links are shared as fairly
as possible (`synth.groups`), or the bound where there is one group. Other ranks do not forward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

from arborcast.pipeline.answers import kept
from arborcast.pipeline.meshes import Axes, Mesh
from arborcast.synth.api import bound, solve
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.groups import GroupSchedules, solve_groups
from arborcast.synth.groups.shared_simulator import simulate_groups
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.topology import Topology

_Key: TypeAlias = tuple[Kind, tuple[int, ...], tuple[tuple[int, ...], ...]]
"""A kind, the ranks of the fragment, and the groups in it."""

PS_PER_NS = 1000
"""One byte at 1 GB/s takes one nanosecond."""


@dataclass(frozen=True)
class FabricPrices:
    """Prices on a fragment of a topology; answers are kept, and `dataclasses.replace` hands them on.

    Attributes:
        topology: whose ranks the mesh names.
        mesh: the mesh.
        by_schedule: whether a collective takes what its schedule takes when simulated, at sizes of powers of
            four and linear between; otherwise what its bytes take at the exact rate.
        collective_us: that each one costs besides (software), per rank of a group.
        sum_gbps: GB/s of an allreduce, half of those of a reduce-scatter, that ranks' own work allows
            whatever the links; None where links alone limit them.
    """

    topology: Topology
    mesh: Mesh
    by_schedule: bool = False
    collective_us: float = 0.0
    sum_gbps: float | None = None
    _rates: dict[_Key, Fraction] = field(default_factory=dict, repr=False, compare=False)
    _schedules: dict[_Key, AnySchedule | GroupSchedules] = field(
        default_factory=dict, repr=False, compare=False
    )
    _times: dict[tuple[_Key, int], int] = field(default_factory=dict, repr=False, compare=False)
    _keys: dict[tuple[Kind, Axes], _Key] = field(default_factory=dict, init=False, repr=False, compare=False)

    def ps(self, kind: Kind, axes: Axes, size_bytes: int) -> int | None:
        """Picoseconds of a collective of every group at once; None where links do not connect them.

        Args:
            kind: of collective.
            axes: along which.
            size_bytes: the whole buffer of one group, as algbw counts it: gathered, or to be reduced, or what
                one rank sends to all.
        """
        rate = self.rate(kind, axes)
        if not rate:
            return None
        if not size_bytes:
            return 0
        fixed = math.ceil(self.mesh.size(axes) * self.collective_us * 10**6)
        own, added = 0, {Kind.ALLREDUCE: 1, Kind.REDUCE_SCATTER: 0.5}.get(kind)
        if added is not None and self.sum_gbps is not None:
            own = math.ceil(size_bytes * added * PS_PER_NS / self.sum_gbps)
        if not self.by_schedule:
            return fixed + max(math.ceil(size_bytes * PS_PER_NS / rate), own)
        power = (size_bytes.bit_length() - 1) // 2 * 2
        low, high = (self._simulated(self._key(kind, axes), power + more) for more in (0, 2))
        return fixed + max(low + (high - low) * (size_bytes - (1 << power)) // (3 << power), own)

    def rate(self, kind: Kind, axes: Axes) -> Fraction:
        """GB/s of the slowest group while all run; 0 where links do not connect one."""
        key = self._key(kind, axes)
        return kept(self._rates, key, lambda: self._rate(key))

    def _key(self, kind: Kind, axes: Axes) -> _Key:
        return kept(self._keys, (kind, axes), lambda: (kind, self.mesh.ranks, self.mesh.groups(axes)))

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

        def found() -> int:
            schedule = kept(self._schedules, key, lambda: solve(self._fragment, key[0]))
            if isinstance(schedule, GroupSchedules):
                timings = simulate_groups(schedule, [2**power] * len(schedule.groups))
                return math.ceil(max(it.time_us for it in timings) * 10**6)
            return math.ceil(simulate(schedule, 2**power).time_us * 10**6)

        return kept(self._times, (key, power), found)

    @property
    def _fragment(self) -> Topology:
        return self.topology.subset(self.mesh.ranks)
