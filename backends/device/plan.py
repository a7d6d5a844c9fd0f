"""From a schedule to the tables of all ranks: one instruction for each value that a chunk has on a rank.

A message has a ring of slots of its own, at its receiver, or at its sender where receivers pull. Two flags go
with it: one says that a piece is there, the other, the credit, that it has been read. Flags count pieces of
all calls and are never reset.

Times are such that all that an instruction waits for has a smaller one: what arrives, as its sender is
earlier; credits, as a ring has more slots than any message lags. Programs work in order of time, so the
earliest instruction that is left can always go on: nothing deadlocks, however few programs are resident, as
long as the same are on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import attrgetter

import numpy as np

from arborcast.backends.device.tables import (
    FIRST_STAGING,
    INPUT,
    ITEM,
    OUTPUT,
    ROW,
    SOURCES,
    TARGETS,
    Shape,
    Tables,
)
from arborcast.backends.lowering.layout import Layout, lay_out
from arborcast.backends.lowering.rank_view import refuse_switches
from arborcast.synth.collective import NAMED_KINDS
from arborcast.synth.errors import InputError
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.schedule import Schedule, Transfer


@dataclass(eq=False)
class _Message:
    """A value on its way from one instruction to another; of one rank to itself without flags."""

    sender: _Instruction
    receiver: _Instruction
    data: int = 0
    credit: int = 0
    host: int = 0  # whose staging has the slots
    start: int = 0  # of the first slot there

    @property
    def stays(self) -> bool:
        return self.sender.rank == self.receiver.rank


@dataclass(eq=False)
class _Instruction:
    """Makes one value of a chunk on one rank, of what arrives and, where `own`, of the rank's input."""

    rank: int
    chunk: int
    own: bool
    arrivals: list[_Message] = field(default_factory=list)
    sends: list[_Message] = field(default_factory=list)
    before: _Instruction | None = None
    exchanges: bool = False
    final: bool = False
    time: int = 0


class DevicePlan:
    """All ranks' instructions, and memory that does not depend on the length of buffers.

    Args:
        schedule: a correct one, in either form, of any kind but custom.
        groups: sets of chunks, each the work of programs of its own; at most one for each chunk.
        lanes: programs that share each chunk of a group.
        piece: the most elements of a piece of the largest chunk, before rounding to whole vectors.
        push: whether senders write to their receivers, else receivers read from their senders.
        itemsize: bytes of an element.

    Raises:
        InputError: a switch adds or copies, blocks have several sizes, or a number is too small.
    """

    def __init__(
        self,
        schedule: AnySchedule,
        groups: int = 1,
        lanes: int = 1,
        piece: int = 1 << 14,
        push: bool = True,
        itemsize: int = 4,
    ) -> None:
        refuse_switches(schedule, "device")
        collective = schedule.collective
        if collective.kind not in NAMED_KINDS or collective.sizes:
            raise InputError(
                f"device: must be a collective with blocks of one size, got {collective.kind} of "
                f"{'several sizes' if collective.sizes else 'its own demands'}"
            )
        for name, got in (("groups", groups), ("lanes", lanes), ("piece", piece)):
            if got < 1:
                raise InputError(f"device: {name} must be at least 1, got {got}")
        self.schedule: Schedule = schedule.expand()
        self.ranks = schedule.topology.ranks
        self._layout = lay_out(self.schedule, 0)
        self._instructions = self._values()
        self._set_times()
        vector = 16 // itemsize
        largest = max(chunk.share for chunk in self.schedule.chunks)
        self._slot = [
            vector * (1 + math.ceil(piece * it.share / largest / vector)) for it in self.schedule.chunks
        ]
        self._groups = self._share_out(groups)
        self.shape = self._place(lanes, vector, push)

    @property
    def programs(self) -> int:
        """Programs of each rank: one for each group and lane."""
        return len(self._groups) * self.shape.lanes

    def neighbours(self, rank: int) -> list[int]:
        """Ranks that a rank has messages with: it touches slots or flags of these alone, and these its own.

        The same whether it pushes or pulls, as both ends of a message raise flags at the other.
        """
        return sorted({other for pair in self._ends for other in pair if rank in pair} - {rank})

    @cached_property
    def _ends(self) -> set[tuple[int, int]]:
        """Sender and receiver of every message."""
        return {(m.sender.rank, m.receiver.rank) for it in self._instructions for m in it.sends}

    def _values(self) -> list[_Instruction]:
        """The instructions of all ranks; one that comes later is made of one that stands before it."""
        found: list[_Instruction] = []
        latest: dict[tuple[int, int], _Instruction] = {}

        def made(transfer_end: tuple[int, int], own: bool) -> _Instruction:
            new = _Instruction(*transfer_end, own, before=latest.get(transfer_end))
            found.append(new)
            latest[transfer_end] = new
            return new

        def holds(rank: int, chunk: int) -> bool:
            return self._layout.initial(rank, chunk) is not None

        for _, step in groupby(self.schedule.transfers, key=attrgetter("step")):
            transfers: list[Transfer] = list(step)
            ends = [(it.src, it.chunk) for it in transfers]  # all start from the state before the step
            senders = [latest.get(end) or made(end, own=True) for end in ends]
            summands = {(it.src, it.dst, it.chunk) for it in transfers if it.reduce}
            joined: dict[tuple[int, int], _Instruction] = {}
            for transfer, sender in zip(transfers, senders, strict=True):
                end = transfer.dst, transfer.chunk
                exchanges = transfer.reduce and (transfer.dst, transfer.src, transfer.chunk) in summands
                message = _Message(sender, sender)
                sender.sends.append(message)
                old = latest.get(end)
                if transfer.reduce and end in joined:
                    new = joined[end]
                elif (
                    transfer.reduce and old and old.arrivals and not (old.sends or old.exchanges or exchanges)
                ):
                    new = old
                else:
                    new = made(end, own=transfer.reduce and (not old or not old.arrivals) and holds(*end))
                    if transfer.reduce and old and old.arrivals:
                        kept = _Message(old, new)
                        old.sends.append(kept)
                        new.arrivals.append(kept)
                joined[end] = new
                new.exchanges |= exchanges
                new.arrivals.append(message)
                message.receiver = new
        for rank in range(self.ranks):
            for chunk in range(self.schedule.chunk_count):
                if self._layout.final(rank, chunk) is not None:
                    (latest.get((rank, chunk)) or made((rank, chunk), own=True)).final = True
        return found

    def _set_times(self) -> None:
        """As early as what arrives allows, then, but for what is only kept, as late as receivers allow.

        So a message lags by one time along a tree in either direction, and rings are short.
        """
        following = {id(it.before): it for it in self._instructions if it.before is not None}
        for it in self._instructions:  # each stands behind what it is made of, unless it was joined later
            it.time = 0
        moved = True
        while moved:
            moved = False
            for it in self._instructions:
                least = max((m.sender.time + (not m.stays) for m in it.arrivals), default=0)
                least = max(least, it.before.time if it.before else 0)
                moved |= least > it.time
                it.time = max(it.time, least)
        order = {id(it): at for at, it in enumerate(self._instructions)}
        for it in sorted(self._instructions, key=lambda it: (-it.time, -order[id(it)])):
            if it.sends:
                latest = min(m.receiver.time - (not m.stays) for m in it.sends)
                after = following.get(id(it))
                it.time = max(it.time, min(latest, after.time if after else latest))
        self._instructions.sort(key=lambda it: (it.time, order[id(it)]))

    def _share_out(self, groups: int) -> list[list[int]]:
        """Chunks of each group, which have about the same share of all that is done."""
        work = [0] * self.schedule.chunk_count
        for it in self._instructions:
            work[it.chunk] += 1 + len(it.arrivals) + len(it.sends)
        weights = [amount * chunk.share for amount, chunk in zip(work, self.schedule.chunks, strict=True)]
        shared: list[list[int]] = [[] for _ in range(min(groups, len(work)))]
        totals = [weights[0] * 0] * len(shared)
        for chunk in sorted(range(len(work)), key=lambda it: (-weights[it], it)):
            least = totals.index(min(totals))
            shared[least].append(chunk)
            totals[least] += weights[chunk]
        return shared

    def _place(self, lanes: int, vector: int, push: bool) -> Shape:
        """Number flags and lay out slots."""
        messages = [message for it in self._instructions for message in it.sends]
        lag = max((m.receiver.time - m.sender.time for m in messages), default=0)
        ring = 1 << (lag + 1).bit_length()
        flags, staging = [1] * self.ranks, [0] * self.ranks  # flag 0 aborts
        for message in messages:
            src, dst = message.sender.rank, message.receiver.rank
            if not message.stays:
                message.data, message.credit = flags[dst], flags[src]
                flags[dst] += 1
                flags[src] += 1
            message.host = dst if push else src
            message.start = staging[message.host]
            staging[message.host] += ring * lanes * self._slot[message.sender.chunk]
        depth = max((it.time for it in self._instructions), default=0)
        return Shape(lanes, ring, depth, vector, tuple(flags), tuple(staging))

    def tables(self, rank: int, count: int) -> Tables:
        """What one rank does for buffers of `count` elements (the whole buffer, as algbw counts it).

        Raises:
            CollectiveError: the count is no multiple of the collective's blocks.
        """
        layout = lay_out(self.schedule, count)
        lengths = {chunk: place.stop - place.start for chunk, place in layout.places.items()}
        rows: list[list[int]] = []
        items: list[list[int]] = []

        def add(time: int, length: int, *lists: Sequence[list[int]]) -> None:
            row = [time, length]
            for part in lists:
                row += [len(items), len(items) + len(part)]
                items.extend(part)
            rows.append(row)

        groups = [0]
        own_block = self._own_block(layout, rank)
        if own_block is not None:
            source, target, length = own_block
            add(0, length, [], [[INPUT, source, 0]], [[OUTPUT, target, 0]], [])
        for chunks in self._groups:
            for it in self._instructions:
                if it.rank == rank and it.chunk in chunks:
                    add(it.time, lengths[it.chunk], *self._lists(it, layout))
            groups.append(len(rows))
        pieces = max(
            -(-length // (self.shape.lanes * (self._slot[chunk] - self.shape.vector)))
            for chunk, length in lengths.items()
        )
        ends = [item for row in rows for at in (SOURCES, TARGETS) for item in items[row[at] : row[at + 1]]]
        return Tables(
            np.array(rows, dtype=np.int64).reshape(-1, ROW),
            np.array(items, dtype=np.int64).reshape(-1, ITEM),
            np.array(groups, dtype=np.int64),
            max(1, pieces),
            all(start % self.shape.vector == 0 for _, start, _ in ends),
        )

    def _lists(self, it: _Instruction, layout: Layout) -> tuple[list[list[int]], ...]:
        """Waits, sources, targets and signals of an instruction."""
        sources = [
            (m.sender.rank, [FIRST_STAGING + m.host, m.start, self._slot[it.chunk]]) for m in it.arrivals
        ]
        if it.own:
            initial = layout.initial(it.rank, it.chunk)
            assert initial is not None, "a rank sends and keeps what it holds"
            sources.insert(0, (it.rank, [INPUT, initial.start, 0]))
        if it.exchanges:  # all that exchange add in the order of ranks, and get the same bits
            sources.sort(key=lambda source: source[0])
        targets = [[FIRST_STAGING + m.host, m.start, self._slot[it.chunk]] for m in it.sends]
        if it.final:
            final = layout.final(it.rank, it.chunk)
            assert final is not None, "a final value has its place"
            targets.insert(0, [OUTPUT, final.start, 0])
        coming = [m for m in it.arrivals if not m.stays]
        going = [m for m in it.sends if not m.stays]
        waits = [[m.data, 0, 0] for m in coming] + [[m.credit, self.shape.ring, 0] for m in going]
        signals = [[m.receiver.rank, m.data, 0] for m in going]
        signals += [[m.sender.rank, m.credit, 0] for m in coming]
        return waits, [source for _, source in sources], targets, signals

    @staticmethod
    def _own_block(layout: Layout, rank: int) -> tuple[int, int, int] | None:
        """From, to and length of the block that a rank gives itself where that is no chunk's."""
        kept = layout.kept(rank)
        if kept is None or any(
            place.owner == layout.collective.ranks.index(rank) and layout.final(rank, chunk) is not None
            for chunk, place in layout.places.items()
        ):
            return None
        source, target = kept
        return source.start, target.start, source.length
