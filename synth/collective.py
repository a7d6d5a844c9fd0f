"""What must be true before and after: the kinds of collective, who takes part, whose data goes where.

The definitions here are the meaning of a schedule: the verifier replays against them, the lowering lays
buffers out by them. Nothing here knows how a schedule is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TypeAlias

from synth.errors import CollectiveError
from synth.topology import Topology

Contributors: TypeAlias = frozenset[int]
Block: TypeAlias = tuple[int | None, int | None]
"""Which part of the buffer, as (owner, target); None where the kind does not divide by it."""


class Kind(StrEnum):
    """The kinds of collective, under the names that commands and files use."""

    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALLGATHER = "allgather"
    REDUCE_SCATTER = "reduce-scatter"
    ALLREDUCE = "allreduce"
    GATHER = "gather"
    SCATTER = "scatter"
    ALLTOALL = "alltoall"
    CUSTOM = "custom"

    @property
    def has_root(self) -> bool:
        """Whether one rank plays a part of its own."""
        return self in {Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER}

    @property
    def reduces(self) -> bool:
        """Whether contributions of several ranks are combined."""
        return self in {Kind.REDUCE, Kind.REDUCE_SCATTER, Kind.ALLREDUCE}


TREE_KINDS = (Kind.BROADCAST, Kind.REDUCE, Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE)
"""The kinds of collective whose data is copied or combined on its way, which is what trees and rings do."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One block that is only copied: who holds it at the start, who must hold it at the end.

    Attributes:
        sources: ranks that hold the block before; at least one.
        targets: ranks that must hold it after and do not hold it before; at least one.
    """

    sources: frozenset[int]
    targets: frozenset[int]

    @property
    def owner(self) -> int:
        """The source whose name the block bears in schedules: the one of the least number."""
        return min(self.sources)


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective among some ranks of a topology.

    Attributes:
        kind: which one.
        ranks: those that take part, in the order of their blocks in the buffer; at least two. Other ranks
            of the topology are relays: they may forward, copy and reduce on the way.
        root: the rank that has a part of its own, None for kinds without one.
        demands: the blocks of a custom collective, all of one size; empty for every other kind.
    """

    kind: Kind
    ranks: tuple[int, ...]
    root: int | None = None
    demands: tuple[Demand, ...] = ()

    @classmethod
    def on(
        cls,
        topology: Topology,
        kind: Kind | str,
        *,
        root: int = 0,
        ranks: Sequence[int] | None = None,
    ) -> Collective:
        """The collective among `ranks` (all, where None) of a topology; `root` is ignored by kinds without.

        Raises:
            CollectiveError: unknown kind, fewer than two ranks, ranks or a root that do not fit, or a
                reduction over a switch that reduces in the network (reserved).
        """
        if kind not in [known.value for known in Kind]:
            raise CollectiveError(
                f"collective {kind}: must be one of {', '.join(known.value for known in Kind)}"
            )
        kind = Kind(kind)
        taking_part = tuple(range(topology.ranks)) if ranks is None else tuple(ranks)
        collective = cls(kind, taking_part, root if kind.has_root else None)
        collective.check(topology)
        return collective

    def check(self, topology: Topology) -> None:
        """Raise CollectiveError unless this collective can be asked of the topology."""
        if len(self.ranks) < 2:
            raise CollectiveError(f"{self.kind}: needs at least 2 ranks, got {len(self.ranks)}")
        if len(set(self.ranks)) < len(self.ranks):
            raise CollectiveError(f"{self.kind}: ranks must be named once, got {list(self.ranks)}")
        for rank in self.ranks:
            if not 0 <= rank < topology.ranks:
                raise CollectiveError(f"{self.kind}: rank must be in 0..{topology.ranks - 1}, got {rank}")
        if self.kind.has_root != (self.root is not None):
            raise CollectiveError(
                f"{self.kind}: {'needs a root' if self.kind.has_root else 'has no root'}, got {self.root}"
            )
        if self.root is not None and self.root not in self.ranks:
            raise CollectiveError(
                f"{self.kind}: root must be one of the ranks {_ranges(self.ranks)}, got {self.root}"
            )
        reducing = [switch.name for switch in topology.switches if switch.reduces]
        if self.kind.reduces and reducing:
            raise CollectiveError(
                f"{self.kind}: switch {reducing[0]} reduces in the network, which is reserved "
                "and not yet supported"
            )

    def relays(self, topology: Topology) -> tuple[int, ...]:
        """The ranks of the topology that take no part."""
        taking_part = set(self.ranks)
        return tuple(rank for rank in range(topology.ranks) if rank not in taking_part)

    def blocks(self) -> dict[Block, Fraction]:
        """The parts of the buffer that a schedule must move, with the share of the buffer each holds.

        The buffer is the one whose size algbw counts (nccl-tests): the gathered one for allgather and
        gather, the input for reduce-scatter and scatter, one rank's n blocks for alltoall. Blocks that
        stay where they are (a root's own, a rank's own in alltoall) are not listed.
        """
        count = len(self.ranks)
        match self.kind:
            case Kind.BROADCAST | Kind.REDUCE:
                return {(self.root, None): Fraction(1)}
            case Kind.ALLREDUCE:
                return {(None, None): Fraction(1)}
            case Kind.ALLGATHER | Kind.REDUCE_SCATTER:
                return {(rank, None): Fraction(1, count) for rank in self.ranks}
            case Kind.GATHER:
                return {(rank, self.root): Fraction(1, count) for rank in self.ranks if rank != self.root}
            case Kind.SCATTER:
                return {(self.root, rank): Fraction(1, count) for rank in self.ranks if rank != self.root}
            case Kind.ALLTOALL:
                return {
                    (owner, target): Fraction(1, count)
                    for owner in self.ranks
                    for target in self.ranks
                    if owner != target
                }

    def block_of(self, owner: int, target: int | None) -> Block:
        """The block to which a chunk with this owner and target belongs (an allreduce has only one)."""
        return (None if self.kind is Kind.ALLREDUCE else owner, target)

    def before(self, rank: int, owner: int) -> Contributors:
        """Whose contributions `rank` holds at the start, of a chunk with this owner."""
        if self.kind.reduces:
            return frozenset({rank}) if rank in self.ranks else frozenset()
        return frozenset({owner}) if rank == owner else frozenset()

    def after(self, rank: int, owner: int, target: int | None) -> Contributors | None:
        """Whose contributions `rank` must hold at the end; None where it does not matter."""
        if rank not in self.ranks:
            return None
        everyone = frozenset(self.ranks)
        match self.kind:
            case Kind.BROADCAST | Kind.ALLGATHER:
                return frozenset({owner})
            case Kind.ALLREDUCE:
                return everyone
            case Kind.REDUCE | Kind.REDUCE_SCATTER:
                return everyone if rank == owner else None
            case Kind.GATHER | Kind.SCATTER | Kind.ALLTOALL:
                return frozenset({owner}) if rank == target else None


def busbw_factor(kind: Kind, ranks: int) -> Fraction:
    """What busbw is times algbw (nccl-tests, PERFORMANCE.md)."""
    match kind:
        case Kind.ALLREDUCE:
            return Fraction(2 * (ranks - 1), ranks)
        case Kind.BROADCAST | Kind.REDUCE:
            return Fraction(1)
        case _:
            return Fraction(ranks - 1, ranks)


def bandwidths(kind: Kind, ranks: int, size_bytes: int, time_us: float) -> tuple[float, float]:
    """Algbw and busbw in GB/s of a buffer that took so long; 0 where it took no time."""
    algbw = size_bytes / (1000 * time_us) if time_us else 0.0
    return algbw, algbw * float(busbw_factor(kind, ranks))


def _ranges(ranks: Sequence[int]) -> str:
    ordered = sorted(ranks)
    if ordered == list(range(ordered[0], ordered[-1] + 1)) and len(ordered) > 2:
        return f"{ordered[0]}..{ordered[-1]}"
    return ", ".join(map(str, ordered))
