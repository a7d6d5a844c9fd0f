"""Channels and remote buffers: the lists of a rank, and of a thread block, which name entries of these."""

from __future__ import annotations

from collections import Counter

from arborcast.backends.programs.mscclpp import limits
from arborcast.backends.programs.mscclpp.entries import (
    MAX_NUMBER,
    Entry,
    Reading,
    a_list,
    a_memory,
    a_number,
    a_text,
    an_object,
    numbers_of,
    shown,
)
from arborcast.backends.programs.program import Connection, Memory, ProgramError
from arborcast.synth.formats.numerals import shorten


class RankLists:
    """Those of one entry of `gpus`."""

    def __init__(self, reading: Reading, rank: int, gpu: Entry, ranks: int) -> None:
        self.rank = rank
        self._reading = reading
        self.channels: dict[str, list[Connection]] = {"memory": [], "port": []}
        self.groups: list[tuple[Memory, tuple[int, ...]]] = []
        self.buffers: list[tuple[int, Memory, tuple[str, ...]]] = []
        self._read_channels(gpu, ranks)
        self._read_buffers(gpu, ranks)

    def _read_channels(self, gpu: Entry, ranks: int) -> None:
        where = f"rank {self.rank} channels"
        numbers: Counter[tuple[str, int]] = Counter()
        for one in a_list(gpu, "channels", f"rank {self.rank}", 4096):
            entry = an_object(one, where)
            kind = a_text(entry, "channel_type", where)
            if kind == "switch":
                memory = a_memory(entry.get("buffer_type"), f"{where}: buffer_type of a switch channel")
                for group in a_list(entry, "rank_groups", where, 4096):
                    members = numbers_of(an_object(group, where), "ranks", where, ranks)
                    self.groups.append((memory, members))
                    if self.rank not in members:
                        self._reading.fault(f"{where}: a switch channel is for ranks {shown(members)} alone")
            elif kind in self.channels:
                for peer in numbers_of(entry, "connected_to", where, ranks):
                    self.channels[kind].append(Connection(peer, kind, numbers[kind, peer]))
                    numbers[kind, peer] += 1
                    if peer == self.rank:
                        self._reading.fault(f"{where}: connected to itself")
            else:
                raise ProgramError(
                    f"{where}: channel_type must be memory, port or switch, got {shorten(kind)}"
                )

    def _read_buffers(self, gpu: Entry, ranks: int) -> None:
        where = f"rank {self.rank} remote_buffers"
        for one in a_list(gpu, "remote_buffers", f"rank {self.rank}", 4096):
            entry = an_object(one, where)
            kinds = tuple(map(str, a_list(entry, "access_channel_types", where, 8)))
            memory = a_memory(entry.get("type"), f"{where}: type")
            self.buffers.append((a_number(entry, "rank", where, 0, ranks - 1), memory, kinds))


class BlockLists:
    """Those of one thread block, by the numbers that its operations have for them."""

    def __init__(self, reading: Reading, rank: RankLists, entry: Entry, where: str) -> None:
        self._reading = reading
        self._rank = rank
        self.channels: dict[str, list[int]] = {"memory": [], "port": [], "switch": []}
        self._buffers: dict[str, list[tuple[int, Memory]]] = {"memory": [], "port": []}
        self._read_channels(entry, where)
        self._read_buffers(entry, where)

    @property
    def ends(self) -> tuple[Connection, ...]:
        """The block's connections: by memory, then those of proxies."""
        return tuple(
            self._rank.channels[kind][at] for kind in ("memory", "port") for at in self.channels[kind]
        )

    def connections(self, kind: str, entry: Entry, where: str) -> tuple[int, ...]:
        """Places among the block's connections."""
        known = len(self.channels[kind])
        first = 0 if kind == "memory" else len(self.channels["memory"])
        found = numbers_of(entry, "channel_ids", where, MAX_NUMBER)
        for number in found:
            if number >= known:
                raise ProgramError(f"{where}: {kind} channel {number} of the block, which has {known}")
        return tuple(first + number for number in found)

    def buffer(self, kind: str, number: int, where: str) -> tuple[int, Memory]:
        """Whose memory, and which, a `buffer_id` means."""
        known = self._buffers.get(kind, [])
        if number >= len(known):
            raise ProgramError(f"{where}: {kind} buffer {number} of the block, which has {len(known)}")
        return known[number]

    def group(self, entry: Entry, where: str) -> tuple[Memory, tuple[int, ...]]:
        """Which memory of which ranks a `switch_channel_id` means."""
        number = a_number(entry, "switch_channel_id", where, 0, MAX_NUMBER)
        known = len(self.channels["switch"])
        if number >= known:
            raise ProgramError(f"{where}: switch channel {number} of the block, which has {known}")
        return self._rank.groups[self.channels["switch"][number]]

    def _read_channels(self, entry: Entry, where: str) -> None:
        for one in a_list(entry, "channels", where, 4096):
            listed = an_object(one, where)
            kind = a_text(listed, "channel_type", where)
            if kind not in self.channels:
                raise ProgramError(
                    f"{where}: channel_type must be memory, port or switch, got {shorten(kind)}"
                )
            known = len(self._rank.groups if kind == "switch" else self._rank.channels[kind])
            for number in numbers_of(listed, "channel_ids", where, MAX_NUMBER):
                if number >= known:
                    raise ProgramError(
                        f"{where}: {kind} channel {number}, rank {self._rank.rank} has {known}"
                    )
                self.channels[kind].append(number)
            if len(self.channels[kind]) > limits.CHANNELS:
                self._reading.fault(
                    f"{where}: {len(self.channels[kind])} {kind} channels, the executor "
                    f"has room for {limits.CHANNELS}"
                )

    def _read_buffers(self, entry: Entry, where: str) -> None:
        for one in a_list(entry, "remote_buffer_refs", where, 4096, default=True):
            listed = an_object(one, where)
            kind = a_text(listed, "access_channel_type", where)
            if kind not in self._buffers:
                self._reading.note(f"{where}: remote buffers by {shorten(kind)} are passed over")
                continue
            for number in numbers_of(listed, "remote_buffer_ids", where, MAX_NUMBER):
                if number >= len(self._rank.buffers):
                    raise ProgramError(
                        f"{where}: remote buffer {number}, rank {self._rank.rank} has "
                        f"{len(self._rank.buffers)}"
                    )
                owner, memory, kinds = self._rank.buffers[number]
                if kind not in kinds:
                    self._reading.fault(
                        f"{where}: remote buffer {number} is not declared for {kind}; the "
                        "runtime takes another one"
                    )
                self._buffers[kind].append((owner, memory))
            if len(self._buffers[kind]) > limits.CHANNELS:
                self._reading.fault(
                    f"{where}: {len(self._buffers[kind])} remote buffers, the executor has "
                    f"room for {limits.CHANNELS}"
                )
