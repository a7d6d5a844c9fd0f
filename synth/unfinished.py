"""A collective that was broken off, as values: what lies where, and how it is finished on what is left.

A lot is a run of elements of one chunk whose contributions lie alike on all ranks. What a rank holds of a
lot are sums, each known by the set of ranks that it adds up; of data that is only copied, by its owner.

    allreduce of 3 ranks along 2 -> 1 -> 0 -> 1 -> 2, broken off      held (bit i stands for rank i)
    elements 0..3 have come back to rank 1                            {0: 111, 1: 111, 2: 100}
    elements 4..7 have reached rank 1 from rank 2                     {0: 001, 1: 110, 2: 100}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

from arborcast.synth.collective import Collective
from arborcast.synth.schedule import Chunk, Transfer
from arborcast.synth.topology import Hop, Topology

Mask: TypeAlias = int
"""A set of contributors: bit i stands for rank i."""


@dataclass(frozen=True, slots=True)
class Lot:
    """Consecutive elements of a chunk.

    Attributes:
        chunk: which.
        start: the first element, from the start of the chunk.
        stop: the one after the last.
        held: for each rank that holds something the sums that lie there, one beside the other.
    """

    chunk: int
    start: int
    stop: int
    held: Mapping[int, tuple[Mask, ...]]

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Unfinished:
    """What lies where in a collective that was broken off.

    Attributes:
        collective: what was to be done.
        chunks: as its schedule cut the buffer; their owners say who must have what.
        lengths: elements of each chunk.
        lots: they make up all chunks, each element once.
    """

    collective: Collective
    chunks: tuple[Chunk, ...]
    lengths: tuple[int, ...]
    lots: tuple[Lot, ...]

    @classmethod
    def drawn(
        cls,
        collective: Collective,
        chunks: Iterable[Chunk],
        lengths: Iterable[int],
        held: Mapping[int, Iterable[tuple[int, int, int, Mask]]],
    ) -> Unfinished:
        """Put together what ranks say that they hold, each sum as its chunk, start, stop and contributors."""
        chunks, lengths = tuple(chunks), tuple(lengths)
        of_chunk: list[list[tuple[int, int, int, Mask]]] = [[] for _ in chunks]
        for rank, sums in sorted(held.items()):
            for chunk, start, stop, mask in sums:
                of_chunk[chunk].append((start, stop, rank, mask))
        lots: list[Lot] = []
        for chunk, sums_of_all in enumerate(of_chunk):
            cuts = {0, lengths[chunk], *(it[0] for it in sums_of_all), *(it[1] for it in sums_of_all)}
            for start, stop in pairwise(sorted(cuts)):
                there: dict[int, set[Mask]] = {}
                for first, last, rank, mask in sums_of_all:
                    if first <= start and stop <= last:
                        there.setdefault(rank, set()).add(mask)
                lots.append(Lot(chunk, start, stop, {rank: tuple(sorted(it)) for rank, it in there.items()}))
        return cls(collective, chunks, lengths, tuple(lots))


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of a lot that travel as one.

    Attributes:
        lot: its number.
        start: the first element, from the start of the chunk.
        stop: the one after the last.
        used: for each rank the sums that it begins with, already or yet to be added to each other; whatever
            else lies there counts for nothing. Who holds what it must end with is among them.
    """

    lot: int
    start: int
    stop: int
    used: Mapping[int, tuple[Mask, ...]]

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Finish:
    """How a collective that was broken off is brought to its end.

    Attributes:
        state: what lies where.
        topology: what is left of the fabric.
        closed: pairs of ranks that cannot reach each other without a third, in both directions.
        parts: they make up all lots, each element once.
        transfers: in order of step; their chunks are parts.
    """

    state: Unfinished
    topology: Topology
    closed: frozenset[Hop]
    parts: tuple[Part, ...]
    transfers: tuple[Transfer, ...]

    @cached_property
    def elements_sent(self) -> int:
        """By all ranks together."""
        return sum(self.parts[transfer.chunk].length for transfer in self.transfers)

    @cached_property
    def load(self) -> dict[Hop, int]:
        """Elements that pass each link."""
        found: dict[Hop, int] = {}
        for transfer in self.transfers:
            for hop in transfer.hops:
                found[hop] = found.get(hop, 0) + self.parts[transfer.chunk].length
        return found

    def busy_us(self, item_bytes: int) -> Fraction:
        """How long the link that has most to do is busy."""
        bandwidth = self.topology.bandwidth
        return max(
            (elements * item_bytes / (bandwidth[hop] * 1000) for hop, elements in self.load.items()),
            default=Fraction(0),
        )
