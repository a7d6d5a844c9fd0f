"""A symmetric schedule in implicit form: the chunks and transfers of representatives, and what moves them.

The whole schedule is every image of every representative chunk, with its transfers, under every translation.
Rank `r` of an orbit does what the orbit's first rank does, moved there. What grows with the number of ranks
is one tree, not one for each of them; `expand` writes all of them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TypeAlias

import numpy as np

from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective
from arborcast.synth.errors import ScheduleError
from arborcast.synth.schedule import Chunk, Method, Playable, Schedule, Transfer
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Topology
from arborcast.synth.transfers import Transfers, Way, in_order


@dataclass(frozen=True)
class ImplicitSchedule(Playable):
    """A collective algorithm that its translations map to itself.

    Chunk `c` moved by element `g` is chunk `c * translations.order + g` of the whole schedule; transfer `t`
    of the representatives moved by `g` is its transfer `t * translations.order + g`.

    Attributes:
        topology: the whole fabric.
        collective: what it does; one without a root, whose ranks the translations permute.
        method: what made it.
        bound: the proven limit of its rate.
        translations: automorphisms of the topology.
        chunks: the representatives; each owner is the first rank of its orbit.
        transfers: those of the representatives, in order of step, chunk, src and dst.
        rate: algbw in GB/s of the whole buffer, as declared by whoever made it; the verifier recomputes.

    Raises:
        ScheduleError: an index or number is out of its range, or the collective has a root.
        TopologyError: the translations are no automorphisms of the topology.
    """

    topology: Topology
    collective: Collective
    method: Method
    bound: Bound
    translations: Translations
    chunks: tuple[Chunk, ...]
    transfers: Sequence[Transfer]
    rate: Fraction

    @classmethod
    def build(
        cls,
        topology: Topology,
        collective: Collective,
        method: Method,
        bound: Bound,
        translations: Translations,
        chunks: Iterable[Chunk],
        transfers: Iterable[Transfer],
    ) -> ImplicitSchedule:
        """Make one with its transfers in order and its rate worked out from the loads of link orbits."""
        ordered = in_order(transfers)
        draft = cls(topology, collective, method, bound, translations, tuple(chunks), ordered, Fraction(0))
        # Nobody else has seen the draft yet; making another would check everything a second time.
        object.__setattr__(draft, "rate", draft._rate_of_loads())
        return draft

    def __post_init__(self) -> None:
        """Check the form; the representatives by the rules of `Schedule`."""
        kind = self.collective.kind
        if self.collective.root is not None or self.collective.demands:
            raise ScheduleError(f"{kind}: has no implicit form, which is for collectives without a root")
        if self.topology.streams:
            raise ScheduleError(f"topology {self.topology.name}: the implicit form knows no streams of ranks")
        self.collective.check(self.topology)
        self.translations.check_automorphisms(self.topology)
        members = np.zeros(self.topology.ranks, dtype=np.bool_)
        members[list(self.collective.ranks)] = True
        for images in self.translations.generators:
            moved = members[list(images[: self.topology.ranks])]
            if not np.array_equal(moved, members):
                raise ScheduleError(f"{kind}: its ranks must be mapped to each other by every translation")
        representatives = frozenset(self.translations.representatives)
        for index, chunk in enumerate(self.chunks):
            if chunk.owner not in representatives:
                raise ScheduleError(
                    f"chunk {index}: owner must be the first rank of an orbit, one of "
                    f"{list(self.translations.representatives)[:8]}, got {chunk.owner}"
                )
        # The representatives alone have the form of a schedule, whose rules are stated once.
        Schedule(
            self.topology, self.collective, self.method, self.bound, self.chunks, self.transfers, self.rate
        )

    @property
    def chunk_count(self) -> int:
        """Chunks of the whole schedule."""
        return len(self.chunks) * self.translations.order

    @property
    def transfer_count(self) -> int:
        """Transfers of the whole schedule."""
        return len(self.transfers) * self.translations.order

    @property
    def rounds(self) -> None:
        """Steps of an implicit schedule only order: it has no rounds."""
        return None

    @cached_property
    def representative(self) -> Schedule:
        """The representatives alone, as a schedule that moves only their chunks."""
        return Schedule(
            self.topology, self.collective, self.method, self.bound, self.chunks, self.transfers, self.rate
        )

    @property
    def columns(self) -> Transfers:
        """The transfers of the representatives as columns."""
        return self.representative.columns

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.representative.steps

    @property
    def height(self) -> int:
        """The longest chain of transfers that one chunk takes in one direction (see `Schedule.height`)."""
        return self.representative.height

    @property
    def uses_switches(self) -> bool:
        """Whether transfers start or end at switches."""
        return self.representative.uses_switches

    @property
    def is_optimal(self) -> bool:
        """Whether the rate equals the bound."""
        return self.rate == self.bound.rate

    @property
    def gap(self) -> Fraction:
        """The part of the bound that the rate misses; 0 where the two are equal."""
        return 1 - self.rate / self.bound.rate if self.bound.rate else Fraction(0)

    @cached_property
    def link_orbits(self) -> tuple[int, ...]:
        """The number of the orbit of each link of the topology (see `Translations.link_orbits`)."""
        return tuple(self.translations.link_orbits(self.topology).tolist())

    @cached_property
    def orbit_load(self) -> tuple[Fraction, ...]:
        """The share of the buffer that passes each link of an orbit.

        The images of one hop are spread evenly over its orbit: of a link that k translations keep in its
        place, each representative's hop onto the orbit loads it k times.
        """
        number = {
            (link.src, link.dst): orbit
            for link, orbit in zip(self.topology.links, self.link_orbits, strict=True)
        }
        sizes = np.bincount(np.array(self.link_orbits, dtype=np.int64))
        load = [Fraction(0)] * len(sizes)
        for transfer in self.transfers:
            for hop in transfer.hops:
                load[number[hop]] += self.chunks[transfer.chunk].share
        return tuple(
            amount * self.translations.order / int(size) for amount, size in zip(load, sizes, strict=True)
        )

    def _rate_of_loads(self) -> Fraction:
        first: dict[int, Fraction] = {}
        for link, orbit in zip(self.topology.links, self.link_orbits, strict=True):
            first.setdefault(orbit, link.bandwidth)
        busy = max((load / first[orbit] for orbit, load in enumerate(self.orbit_load)), default=Fraction(0))
        orbits = self.translations.orbit_of.tolist()
        adding: dict[int, Fraction] = {}  # the images of a sum are spread evenly over its switch's orbit
        for vertex, time in self.representative.adding.items():
            adding[orbits[vertex]] = adding.get(orbits[vertex], Fraction(0)) + time
        for orbit, time in adding.items():
            busy = max(busy, time * self.translations.order / orbits.count(orbit))
        return 1 / busy if busy else Fraction(0)

    def expand(self) -> Schedule:
        """The whole schedule, every chunk and transfer written out; a million transfers take seconds.

        Numbered as the class says, so that the index of each chunk and transfer tells which representative
        and which element it comes from.
        """
        elements = np.arange(self.translations.order, dtype=np.int64)
        written_out = Schedule(
            self.topology,
            self.collective,
            self.method,
            self.bound,
            tuple(self._all_chunks(elements)),
            self._all_transfers(elements),
            self.rate,
        )
        object.__setattr__(written_out, "expanded_from", self)  # nobody else has seen it yet
        return written_out

    def _all_chunks(self, elements: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Iterator[Chunk]:
        for chunk in self.chunks:
            owners = self.translations.apply(elements, chunk.owner).tolist()
            if chunk.target is None:
                yield from (Chunk(chunk.share, owner) for owner in owners)
            else:
                targets = self.translations.apply(elements, chunk.target).tolist()
                yield from (Chunk(chunk.share, *pair) for pair in zip(owners, targets, strict=True))

    def _all_transfers(self, elements: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Transfers:
        moves, move = self.representative.columns, self.translations.apply
        starts, path = moves.paths
        order, count = self.translations.order, len(moves)
        images = move(elements[:, None], path).T  # of each vertex of a path all its images
        sizes = np.diff(starts)
        way = np.zeros((count, order), dtype=np.int64)
        number: dict[Way, int] = {(): 0}
        for size in np.flatnonzero(np.bincount(sizes, minlength=3)[3:]).tolist():
            rows = np.flatnonzero(sizes == size + 3)
            inner = images[(starts[rows] + 1)[:, None] + np.arange(size + 1)]
            passed = inner.transpose(0, 2, 1).reshape(-1, size + 1)
            distinct, which = np.unique(passed, axis=0, return_inverse=True)
            known = [number.setdefault(tuple(each), len(number)) for each in distinct.tolist()]
            way[rows] = np.array(known, dtype=np.int64)[which.reshape(-1)].reshape(len(rows), order)
        return Transfers(
            (moves.chunk[:, None] * order + elements).reshape(-1),
            images[starts[:-1]].reshape(-1),
            images[starts[1:] - 1].reshape(-1),
            np.repeat(moves.step, order),
            np.repeat(moves.reduce, order),
            way.reshape(-1),
            tuple(number),
        )


AnySchedule: TypeAlias = Schedule | ImplicitSchedule
"""A schedule in either form: what files hold, and what is verified and simulated."""
