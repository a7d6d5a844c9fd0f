"""How long an implicit schedule takes: the run of the representatives, on the orbits of their links.

A symmetric schedule does the same on all links of an orbit, so that one link stands for each orbit, and one
passage for all images of a hop. Where k translations keep a link in its place, it is passed by k images of
each hop onto its orbit; they are taken to arrive together and are served as one, k times as long. The adder
of a switch is one link more, with the orbit of the switch.

What comes out equals the run of the expanded schedule wherever no translation but the identity keeps a used
link in its place, no transfer passes two links of one orbit, and the pieces are as many. Otherwise the k
images move on only when all of them have passed, or those that tie are served in another order; the time is
then never below what the fullest link needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.simulation.hops import Hops, Told, occupied
from arborcast.synth.topology import Hop

if TYPE_CHECKING:
    from arborcast.synth.implicit_schedule import ImplicitSchedule


def lay_out_orbits(schedule: ImplicitSchedule) -> Hops:
    """The representatives' hops, each on the orbit of its link, in time linear in their number."""
    hops, orbit = Hops.of(schedule), _orbits(schedule)
    sizes = np.bincount(orbit)
    firsts = np.unique(orbit, return_index=True)[1].tolist()
    return replace(
        hops,
        layout=hops.layout._replace(link=orbit[hops.layout.link]),
        latencies_us=tuple(hops.latencies_us[first] for first in firsts),
        together=(schedule.translations.order // sizes).astype(np.int64),
        images=schedule.translations.order,
    )


def told_by_orbits(schedule: ImplicitSchedule, hops: Hops) -> tuple[list[Hop], Told]:
    """The first link of each orbit, or the first adder, and what `Hops.occupations` is told of it.

    Chunks are numbered as `ImplicitSchedule.expand` does; those that are served as one come one after the
    other, in the order of their numbers.
    """
    topology = schedule.topology
    ends = [(link.src, link.dst) for link in topology.links]
    ends += [(switch, switch) for switch in range(topology.ranks, topology.holders) for _ in range(2)]
    firsts = [ends[first] for first in np.unique(_orbits(schedule), return_index=True)[1].tolist()]

    def told(index: int, chunk: int, hop: Hop) -> tuple[Hop, Sequence[int]]:
        first = firsts[hops.layout.link[index]]
        return first, (chunk * schedule.translations.order + _elements(schedule, hop, first)).tolist()

    return [hop for hop in firsts if hop in occupied(topology)], told


def _orbits(schedule: ImplicitSchedule) -> Ints:
    """The number of the orbit of each link of `Hops`."""
    topology, orbit = schedule.topology, np.array(schedule.link_orbits, dtype=np.int64)
    able = schedule.translations.orbit_of[topology.ranks : topology.holders]
    inside = 2 * np.unique(able, return_inverse=True)[1].reshape(-1, 1) + (0, 1)
    return np.append(orbit, 1 + orbit.max(initial=-1) + inside)


def _elements(schedule: ImplicitSchedule, hop: Hop, image: Hop) -> Ints:
    """The elements that take a link to another of its orbit, in ascending order."""
    translations = schedule.translations
    every = np.arange(translations.order, dtype=np.int64)
    taken = [translations.apply(every, end) == to for end, to in zip(hop, image, strict=True)]
    return np.flatnonzero(taken[0] & taken[1]).astype(np.int64)
