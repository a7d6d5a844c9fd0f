"""What must be true before and after: the kinds of collective, who takes part, whose data goes where.

The definitions here are the meaning of a schedule: the verifier replays against them, the lowering lays
buffers out by them. Nothing here knows how a schedule is found.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple, TypeAlias

from arborcast.synth.errors import CollectiveError
from arborcast.synth.topology import Topology

Contributors: TypeAlias = frozenset[int]

MOST_BYTES = 1 << 50
"""Of all blocks of an alltoall together, where they differ: what is made of their sizes must fit int64."""


class Block(NamedTuple):
    """Which part of the buffer.

    Attributes:
        owner: whose data it is or who gets the result; None where the kind does not divide by it.
        target: the destination for gather, scatter and alltoall, else None.
        demand: the index of the demand of a custom collective, else None.
    """

    owner: int | None
    target: int | None = None
    demand: int | None = None

    def __str__(self) -> str:
        """As messages show it."""
        text = f"owner {'any' if self.owner is None else self.owner}"
        text += "" if self.target is None else f" and target {self.target}"
        return text if self.demand is None else f"{text} of demand {self.demand}"


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

    @classmethod
    def named(cls, text: str) -> Kind | None:
        """The kind that a text means: `AllReduce` and `all_reduce` are `allreduce`; None if it means none."""
        plain = re.sub(r"[-_\s]", "", text.lower())
        by_name = {kind.value.replace("-", ""): kind for kind in cls} | {"bcast": cls.BROADCAST}
        return by_name.get(plain)

    @property
    def has_root(self) -> bool:
        """Whether one rank plays a part of its own."""
        return self in {Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER}

    @property
    def reduces(self) -> bool:
        """Whether contributions of several ranks are combined."""
        return self in {Kind.REDUCE, Kind.REDUCE_SCATTER, Kind.ALLREDUCE}

    @property
    def gathers(self) -> bool:
        """Whether each rank gives one block of the buffer, and blocks are put side by side."""
        return self in {Kind.ALLGATHER, Kind.GATHER}


TREE_KINDS = (Kind.BROADCAST, Kind.REDUCE, Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE)
"""The kinds of collective whose data is copied or combined on its way, which is what trees and rings do."""

NAMED_KINDS = tuple(kind for kind in Kind if kind is not Kind.CUSTOM)
"""The kinds that a name and the ranks say everything about; a custom collective has its blocks besides."""


def did_you_mean(text: str) -> str:
    """The end of a message about an unknown collective: the kind whose name is near, if there is one."""
    near = difflib.get_close_matches(text.lower().replace("_", "-"), NAMED_KINDS, n=1)
    return f"; did you mean {near[0]}?" if near else ""


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


def square_of_bytes(sizes: Sequence[Sequence[int]], count: int) -> tuple[tuple[int, ...], ...]:
    """Rows of plain integers, which neither overflow nor wrap, out of lists or arrays of whole numbers.

    Raises:
        CollectiveError: they are not `count` rows of `count` whole numbers.
    """
    rows = tuple(tuple(_whole_numbers(number, row)) for number, row in enumerate(sizes))
    lengths = {len(row) for row in rows}
    if len(rows) != count or lengths != {count}:
        longest = max(lengths, key=lambda length: abs(length - count), default=0)
        got = f"{len(rows)} rows, one of {longest}" if rows else "0 rows"
        raise CollectiveError(f"sizes: must be {count} rows of {count}, got {got}")
    return rows


def _whole_numbers(number: int, row: Sequence[int]) -> Iterator[int]:
    try:
        cells = list(row)
    except TypeError:
        raise CollectiveError(f"sizes: row {number} must be whole numbers, got {repr(row)[:60]}") from None
    for column, cell in enumerate(cells):
        try:
            yield operator.index(cell)
        except TypeError:
            place = f"row {number}, column {column}"
            raise CollectiveError(f"sizes: {place} must be a whole number, got {repr(cell)[:60]}") from None


@dataclass(frozen=True)
class Collective:
    """A collective among some ranks of a topology.

    Attributes:
        kind: which one.
        ranks: those that take part, in the order of their blocks in the buffer; at least two. Other ranks
            of the topology are relays: they may forward, copy and reduce on the way.
        root: the rank that has a part of its own, None for kinds without one.
        demands: the blocks of a custom collective, all of one size; empty for every other kind.
        sizes: bytes from each rank (row) to each (column), in the order of `ranks`, of an alltoall whose
            blocks differ; empty where all blocks of a collective are of one size.
        members: the ranks without their order. Who asks for every chunk of a thousand ranks whether a rank
            takes part must not look through all of them each time.

    Examples:
        >>> synth.Collective(synth.Kind.BROADCAST, ranks=(0, 2, 3), root=2).root
        2
    """

    kind: Kind
    ranks: tuple[int, ...]
    root: int | None = None
    demands: tuple[Demand, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()
    members: frozenset[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Work out the members; `check` says whether they fit a topology."""
        object.__setattr__(self, "members", frozenset(self.ranks))

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
            CollectiveError: unknown kind, a custom one (see `custom`), fewer than two ranks, ranks or a root
                that do not fit.
        """
        named = Kind.named(kind)
        if named is None:
            raise CollectiveError(
                f"collective {kind}: must be one of {', '.join(known.value for known in NAMED_KINDS)}, "
                f"or a .yaml or .json file of blocks{did_you_mean(kind)}"
            )
        kind = named
        taking_part = tuple(range(topology.ranks)) if ranks is None else tuple(ranks)
        collective = cls(kind, taking_part, root if kind.has_root else None)
        collective.check(topology)
        return collective

    @classmethod
    def custom(cls, topology: Topology, demands: Iterable[Demand]) -> Collective:
        """The collective that copies these blocks; the ranks they name take part, all others are relays.

        Raises:
            CollectiveError: there are none, or one of them does not fit.
        """
        demands = tuple(demands)
        named = frozenset[int]().union(*(demand.sources | demand.targets for demand in demands))
        collective = cls(Kind.CUSTOM, tuple(sorted(named)), demands=demands)
        collective.check(topology)
        return collective

    @classmethod
    def alltoallv(
        cls, topology: Topology, sizes: Sequence[Sequence[int]], *, ranks: Sequence[int] | None = None
    ) -> Collective:
        """The alltoall among `ranks` (all, where None) that sends `sizes[i][j]` bytes from rank i to rank j.

        The whole buffer, whose share a block is and whose size algbw counts, is that of one rank, as of every
        alltoall: what a rank holds at the start, its own block included, in the mean over the ranks.

        Raises:
            CollectiveError: sizes that are no square of whole numbers or send nothing, ranks that do not fit.
        """
        taking_part = tuple(range(topology.ranks)) if ranks is None else tuple(ranks)
        collective = cls(Kind.ALLTOALL, taking_part, sizes=square_of_bytes(sizes, len(taking_part)))
        collective.check(topology)
        return collective

    @cached_property
    def total(self) -> int:
        """Bytes of all blocks of an alltoall whose blocks differ."""
        return sum(map(sum, self.sizes))

    @property
    def mean_bytes(self) -> int:
        """The size of its whole buffer, rounded up: what one rank holds, in the mean."""
        return -(-self.total // len(self.ranks))

    def check(self, topology: Topology) -> None:
        """Raise CollectiveError unless this collective can be asked of the topology."""
        self._check_demands()
        self._check_sizes()
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

    def _check_demands(self) -> None:
        if self.kind is not Kind.CUSTOM:
            if self.demands:
                raise CollectiveError(f"{self.kind}: has no blocks of its own, got {len(self.demands)}")
            return
        if not self.demands:
            raise CollectiveError("custom: needs its blocks, who holds and who must get each, got none")
        taking_part = frozenset(self.ranks)
        for index, demand in enumerate(self.demands):
            if not demand.sources or not demand.targets:
                missing = "rank that holds it" if not demand.sources else "rank that must get it"
                raise CollectiveError(f"custom: block {index} needs at least one {missing}, got none")
            both = demand.sources & demand.targets
            if both:
                raise CollectiveError(
                    f"custom: block {index}: who must get it must not hold it before, got {_ranges(both)}"
                )
            strange = (demand.sources | demand.targets) - taking_part
            if strange:
                raise CollectiveError(
                    f"custom: block {index}: must name ranks that take part, got {_ranges(strange)}"
                )
        named = frozenset[int]().union(*(demand.sources | demand.targets for demand in self.demands))
        idle = taking_part - named
        if idle:
            raise CollectiveError(
                f"custom: ranks that take part must be named by a block, got {_ranges(idle)} besides"
            )

    def _check_sizes(self) -> None:
        if not self.sizes:
            return
        if self.kind is not Kind.ALLTOALL:
            raise CollectiveError(f"{self.kind}: all its blocks are of one size, got sizes")
        square_of_bytes(self.sizes, len(self.ranks))
        least = min(map(min, self.sizes))
        if least < 0:
            raise CollectiveError(f"sizes: must not be negative, got {least} bytes")
        if self.total > MOST_BYTES:
            raise CollectiveError(f"sizes: must not add up to more than {MOST_BYTES} bytes, got {self.total}")
        if self.total == sum(row[place] for place, row in enumerate(self.sizes)):
            raise CollectiveError("sizes: must send something from one rank to another, got 0 bytes")

    def check_is_even(self) -> None:
        """Raise CollectiveError where blocks differ in size, which few questions have an answer for."""
        if self.sizes:
            raise CollectiveError(
                "alltoall: its blocks differ in size; `synth alltoallv` plans it, `synth verify` and "
                "`synth simulate` take its file"
            )

    def relays(self, topology: Topology) -> tuple[int, ...]:
        """The ranks of the topology that take no part."""
        taking_part = set(self.ranks)
        return tuple(rank for rank in range(topology.ranks) if rank not in taking_part)

    def blocks(self, owners: Container[int] | None = None) -> dict[Block, Fraction]:
        """The parts of the buffer that a schedule must move, with the share of the buffer each holds.

        The buffer is the one whose size algbw counts (nccl-tests): the gathered one for allgather and
        gather, the input for reduce-scatter and scatter, one rank's n blocks for alltoall, all blocks in
        their order for a custom collective. Blocks that stay where they are (a root's own, a rank's own in
        alltoall) are not listed.

        Args:
            owners: where given, blocks of ranks that are not among them are left out, for allgather,
                reduce-scatter and alltoall. Where all others are images of theirs, nothing more is asked.
        """
        count = len(self.ranks)
        owning = self.ranks if owners is None else [rank for rank in self.ranks if rank in owners]
        match self.kind:
            case Kind.BROADCAST | Kind.REDUCE | Kind.ALLREDUCE:
                return {Block(self.root): Fraction(1)}  # an allreduce has no root
            case Kind.ALLGATHER | Kind.REDUCE_SCATTER:
                return {Block(rank): Fraction(1, count) for rank in owning}
            case Kind.GATHER:
                return {
                    Block(rank, self.root): Fraction(1, count) for rank in self.ranks if rank != self.root
                }
            case Kind.SCATTER:
                return {
                    Block(self.root, rank): Fraction(1, count) for rank in self.ranks if rank != self.root
                }
            case Kind.ALLTOALL:
                sizes = self.sizes or ((1,) * count,) * count
                total = self.total or count * count
                return {
                    Block(owner, target): Fraction(size * count, total)
                    for owner, row in zip(self.ranks, sizes, strict=True)
                    if owners is None or owner in owners
                    for target, size in zip(self.ranks, row, strict=True)
                    if owner != target and size
                }
            case Kind.CUSTOM:
                share = Fraction(1, len(self.demands))
                return {Block(demand.owner, demand=index): share for index, demand in enumerate(self.demands)}

    def block_of(self, owner: int, target: int | None = None, demand: int | None = None) -> Block:
        """The block to which a chunk that says so of itself belongs (an allreduce has only one)."""
        return Block(None if self.kind is Kind.ALLREDUCE else owner, target, demand)

    def before(self, rank: int, block: Block) -> Contributors:
        """Whose contributions to one of the `blocks` (or to a part of it) `rank` holds at the start.

        All sources of a block of a custom collective hold the same data, which counts as its owner's.
        """
        if self.kind.reduces:
            return frozenset({rank}) if rank in self.members else frozenset()
        assert block.owner is not None, "only an allreduce has a block without an owner"
        if block.demand is not None:
            holds = rank in self.demands[block.demand].sources
        else:
            holds = rank == block.owner
        return frozenset({block.owner}) if holds else frozenset()

    def after(self, rank: int, block: Block) -> Contributors | None:
        """Whose contributions to one of the `blocks` `rank` must hold at the end; None: does not matter."""
        if rank not in self.members:
            return None
        everyone = self.members
        owner = frozenset[int]() if block.owner is None else frozenset({block.owner})
        match self.kind:
            case Kind.BROADCAST | Kind.ALLGATHER:
                return owner
            case Kind.ALLREDUCE:
                return everyone
            case Kind.REDUCE | Kind.REDUCE_SCATTER:
                return everyone if rank == block.owner else None
            case Kind.GATHER | Kind.SCATTER | Kind.ALLTOALL:
                return owner if rank == block.target else None
            case Kind.CUSTOM:
                assert block.demand is not None, "blocks of a custom collective say which demand they are"
                return owner if rank in self.demands[block.demand].targets else None


Question: TypeAlias = Collective | Kind | str
"""A kind by name, or a whole `Collective`."""


def as_collective(
    topology: Topology,
    collective: Question,
    *,
    root: int = 0,
    ranks: Sequence[int] | None = None,
) -> Collective:
    """The collective that a caller means, checked against the topology; all blocks of one size."""
    if isinstance(collective, Collective):
        collective.check(topology)
        collective.check_is_even()
        return collective
    return Collective.on(topology, collective, root=root, ranks=ranks)


def busbw_factor(kind: Kind, ranks: int) -> Fraction:
    """What busbw is times algbw (nccl-tests, PERFORMANCE.md); 1 for custom ones, which have no rule."""
    match kind:
        case Kind.ALLREDUCE:
            return Fraction(2 * (ranks - 1), ranks)
        case Kind.BROADCAST | Kind.REDUCE | Kind.CUSTOM:
            return Fraction(1)
        case _:
            return Fraction(ranks - 1, ranks)


def bandwidths(kind: Kind, ranks: int, size_bytes: int, time_us: float) -> tuple[float, float]:
    """Algbw and busbw in GB/s of a buffer that took so long; 0 where it took no time."""
    algbw = size_bytes / (1000 * time_us) if time_us else 0.0
    return algbw, algbw * float(busbw_factor(kind, ranks))


def _ranges(ranks: Iterable[int]) -> str:
    ordered = sorted(ranks)
    if ordered == list(range(ordered[0], ordered[-1] + 1)) and len(ordered) > 2:
        return f"{ordered[0]}..{ordered[-1]}"
    return ", ".join(map(str, ordered))
