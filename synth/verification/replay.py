"""Replays chunks with contributor sets: the part of the checker that says whether a schedule does its job.

What the collective demands is stated here again, on the checker's own account (a test compares it with
`synth.collective`). Chunks do not touch each other, so each is replayed alone. Switches that are able hold
what they are sent as ranks do; whether they can do what is asked of them is for
`synth.verification.switch_use`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.schedule import Chunk, Transfer
from arborcast.synth.topology import Topology, Vertex

if TYPE_CHECKING:
    from arborcast.synth.implicit_schedule import AnySchedule

Mask: TypeAlias = int
"""A set of contributors: bit i stands for rank i."""


@dataclass
class Errors:
    """Keeps the first lines and counts the rest."""

    limit: int
    lines: list[str] = field(default_factory=list)
    dropped: int = 0

    @property
    def count(self) -> int:
        """All of them, spelled out or not."""
        return len(self.lines) + self.dropped

    @property
    def is_full(self) -> bool:
        """Whether further lines are only counted."""
        return len(self.lines) >= self.limit

    def add(self, line: str) -> None:
        """Keep a line, or count it."""
        if len(self.lines) < self.limit:
            self.lines.append(line)
        else:
            self.dropped += 1

    def add_unspelled(self, count: int) -> None:
        """Count some more that nobody has spelled out."""
        self.dropped += count

    def all(self) -> tuple[str, ...]:
        """The lines, the last of which counts those that are not spelled out."""
        rest = (f"and {self.dropped} more",) if self.dropped else ()
        return (*self.lines, *rest)


def check_replay(schedule: AnySchedule, errors: Errors) -> None:
    """Replay every chunk alone: memory stays that of one. Of an implicit schedule, the representatives."""
    of_chunk: list[list[Transfer]] = [[] for _ in schedule.chunks]
    for transfer in schedule.transfers:
        of_chunk[transfer.chunk].append(transfer)
    everyone = mask_of(schedule.collective.ranks)
    for index, chunk in enumerate(schedule.chunks):
        replay_chunk(index, chunk, of_chunk[index], schedule.topology, schedule.collective, everyone, errors)


def replay_chunk(
    index: int,
    chunk: Chunk,
    transfers: Iterable[Transfer],
    topology: Topology,
    collective: Collective,
    everyone: Mask,
    errors: Errors,
) -> None:
    """Replay one chunk, whose number is `index`, by its own transfers in any order.

    `everyone` is the mask of all ranks that take part.
    """
    held = held_before(collective, chunk)
    sound = True
    for step, together in groupby(sorted(transfers, key=attrgetter("step")), key=attrgetter("step")):
        sound &= _replay_step(index, step, together, topology, held, errors)
    # Ends that are wrong only because of a transfer already reported would bury that report.
    if sound:
        _check_end(index, chunk, collective, held, everyone, errors)


def _replay_step(
    index: int,
    step: int,
    transfers: Iterable[Transfer],
    topology: Topology,
    held: dict[Vertex, Mask],
    errors: Errors,
) -> bool:
    """Apply the transfers of one chunk in one step, all from the state before it; whether all were legal."""
    arrived: dict[Vertex, Mask] = {}
    copied: set[Vertex] = set()
    before = errors.count
    for transfer in transfers:
        src, dst = transfer.src, transfer.dst
        sent = held.get(src, 0)
        if src == dst:
            errors.add(f"step {step}: {describe_vertex(topology, src)} sends chunk {index} to itself")
        elif not sent:
            sender = describe_vertex(topology, src)
            errors.add(f"step {step}: {sender} sends chunk {index} before it holds any of it")
        elif dst in copied or (dst in arrived and not transfer.reduce):
            errors.add(
                f"step {step}: {describe_vertex(topology, dst)} receives chunk {index} twice, last from "
                f"{describe_vertex(topology, src)}; "
                "only reductions may meet in one step"
            )
        elif transfer.reduce:
            present = arrived.get(dst, held.get(dst, 0))
            if present & sent:
                twice = _names(present & sent)
                errors.add(
                    f"chunk {index}: {describe_vertex(topology, dst)} would count {twice}'s contribution "
                    f"twice in step {step}"
                )
            arrived[dst] = present | sent
        else:
            arrived[dst] = sent
            copied.add(dst)
    held.update(arrived)
    return errors.count == before


def held_before(collective: Collective, chunk: Chunk) -> dict[int, Mask]:
    """Whose contributions each rank holds of a chunk at the start; who has none, as switches, is left out."""
    if collective.kind in {Kind.REDUCE, Kind.REDUCE_SCATTER, Kind.ALLREDUCE}:
        return {rank: 1 << rank for rank in collective.ranks}
    if collective.kind is Kind.CUSTOM and chunk.demand is not None:
        # Whoever holds a block holds the same data, which counts as that of the one it is named after.
        return dict.fromkeys(collective.demands[chunk.demand].sources, 1 << chunk.owner)
    return {chunk.owner: 1 << chunk.owner}


def needed_after(collective: Collective, chunk: Chunk, everyone: Mask) -> tuple[Iterable[int], Mask]:
    """Which ranks must hold a chunk at the end, and whose contributions it must then have."""
    match collective.kind:
        case Kind.BROADCAST | Kind.ALLGATHER:
            return collective.ranks, 1 << chunk.owner
        case Kind.ALLREDUCE:
            return collective.ranks, everyone
        case Kind.REDUCE | Kind.REDUCE_SCATTER:
            return (chunk.owner,), everyone
        case Kind.GATHER | Kind.SCATTER | Kind.ALLTOALL:
            return () if chunk.target is None else (chunk.target,), 1 << chunk.owner
        case Kind.CUSTOM:
            receivers = () if chunk.demand is None else collective.demands[chunk.demand].targets
            return sorted(receivers), 1 << chunk.owner


def _check_end(
    index: int,
    chunk: Chunk,
    collective: Collective,
    held: Mapping[int, Mask],
    everyone: Mask,
    errors: Errors,
) -> None:
    receivers, needed = needed_after(collective, chunk, everyone)
    wrong = [rank for rank in receivers if held.get(rank, 0) != needed]
    if wrong:
        more = f" (and {len(wrong) - 1} more ranks)" if len(wrong) > 1 else ""
        errors.add(
            f"chunk {index}: rank {wrong[0]} must end with the contribution of {_names(needed)}, "
            f"got that of {_names(held.get(wrong[0], 0))}{more}"
        )


def describe_vertex(topology: Topology, vertex: Vertex) -> str:
    """A rank or switch as error lines name it."""
    return f"{'switch' if topology.is_switch(vertex) else 'rank'} {topology.label(vertex)}"


def mask_of(ranks: Iterable[int]) -> Mask:
    """The set of some ranks."""
    return sum(1 << rank for rank in set(ranks))


def _members(mask: Mask) -> Iterator[int]:
    return (rank for rank in range(mask.bit_length()) if mask >> rank & 1)


def _names(mask: Mask, limit: int = 4) -> str:
    members = list(_members(mask))
    if len(members) <= 1:
        return f"rank {members[0]}" if members else "no rank"
    listed = ", ".join(map(str, members[:limit]))
    return f"ranks {listed}" + (f", ... ({len(members)} in all)" if len(members) > limit else "")
