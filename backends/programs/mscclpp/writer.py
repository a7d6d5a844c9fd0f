"""A one-sided program as MSCCL++'s execution plan (JSON), by operations that its executor does rightly.

Others are `flush` (it flushes nothing), `get` of different places (it exchanges them) and `ppkt` through
proxies (from the scratch of the executor's first plan).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from arborcast.backends.programs.mscclpp import limits
from arborcast.backends.programs.mscclpp.shapes import FORMS, MoveForm
from arborcast.backends.programs.program import (
    Acquire,
    Barrier,
    Flush,
    GlobalProgram,
    Loop,
    Memory,
    Move,
    Operation,
    ProgramError,
    Release,
    Signal,
    Span,
    Step,
    Synchronize,
    ThreadBlock,
    Wait,
    plain_name,
)
from arborcast.synth.collective import Kind
from arborcast.synth.nccl_protocol import Protocol

Entry: TypeAlias = dict[str, Any]

KINDS = (Kind.BROADCAST, Kind.REDUCE, Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE, Kind.ALLTOALL)
"""Those whose buffers are the same on all ranks, as MSCCL++ divides by their chunks."""

_NO_LIMIT = (1 << 64) - 1


def write(program: GlobalProgram) -> str:
    """The plan's text.

    Raises:
        ProgramError: the collective has no name there, or the executor has no operation for something.
    """
    if program.kind not in KINDS:
        raise ProgramError(f"{program.kind}: MSCCL++ plans do {', '.join(KINDS)}")
    plan = {
        "name": program.name,
        "collective": plain_name(program.kind),  # of these the executor itself looks at allgather alone
        "protocol": str(Protocol.SIMPLE if program.protocol is Protocol.SIMPLE else Protocol.LL),
        "inplace": program.in_place,
        "reuse_resources": False,
        "num_threads_per_block": limits.THREADS,
        "use_double_scratch_buffer": program.double_scratch,
        "buffer_alignment": limits.ALIGNMENT,
        "min_message_size": program.least_bytes,
        "max_message_size": _NO_LIMIT if program.most_bytes is None else program.most_bytes,
        "gpus": [_Gpu(program, rank).entry() for rank in range(program.ranks)],
    }
    return json.dumps(plan, indent=1) + "\n"


class _Gpu:
    """One rank: its lists of channels and buffers, which blocks refer to by number."""

    def __init__(self, program: GlobalProgram, rank: int) -> None:
        self._part = program.parts[rank]
        ends = {(end.kind, end.peer, end.number) for block in self._part.blocks for end in block.connections}
        self._channels: dict[str, list[tuple[str, int, int]]] = {"memory": [], "port": []}
        for kind, peer, number in sorted(ends):
            # Channels of a pair are told apart by their place in the list, so that none may be left out.
            row = self._channels[kind]
            before = sum(1 for _, other, _ in row if other == peer)
            row += [(kind, peer, missing) for missing in range(before, number + 1)]
        self._groups: list[tuple[Memory, tuple[int, ...]]] = []
        self._buffers: list[tuple[int, Memory, str]] = []
        self._rank = rank

    def entry(self) -> Entry:
        """What stands in `gpus`."""
        blocks = [_BlockWriter(self, number, block).entry() for number, block in enumerate(self._part.blocks)]
        channels: list[Entry] = [
            {"channel_type": kind, "connected_to": [peer for _, peer, _ in row]}
            for kind, row in self._channels.items()
            if row
        ]
        channels += [
            {
                "channel_type": "switch",
                "buffer_type": memory,
                "rank_groups": [{"size": len(ranks), "ranks": list(ranks)}],
            }
            for memory, ranks in self._groups
        ]
        return {
            "id": self._rank,
            "input_chunks": self._part.input_chunks,
            "output_chunks": self._part.output_chunks,
            "scratch_chunks": self._part.scratch_chunks,
            "threadblocks": blocks,
            "channels": channels,
            "remote_buffers": [
                {"rank": owner, "type": memory, "access_channel_types": [kind]}
                for owner, memory, kind in self._buffers
            ],
            "semaphores": [{"init_value": value} for value in self._part.semaphores],
        }

    def channel(self, key: tuple[str, int, int]) -> int:
        """The number of a connection."""
        return self._channels[key[0]].index(key)

    def buffer(self, span: Span, kind: str) -> int:
        """The number of a remote buffer."""
        assert span.rank is not None, "it is of another rank"
        return _place(self._buffers, (span.rank, span.memory, kind))

    def group(self, spans: Sequence[Span]) -> int:
        """The number of a switch channel."""
        return _place(self._groups, (spans[0].memory, tuple(span.rank or 0 for span in spans)))


class _BlockWriter:
    def __init__(self, gpu: _Gpu, number: int, block: ThreadBlock) -> None:
        self._gpu = gpu
        self._number = number
        self._block = block
        self._memory = [at for at, end in enumerate(block.connections) if end.kind == "memory"]
        self._port = [at for at, end in enumerate(block.connections) if end.kind == "port"]
        self._switch: list[int] = []
        self._buffers: dict[str, list[int]] = {"memory": [], "port": []}

    def entry(self) -> Entry:
        """What stands in `threadblocks`."""
        operations = list(self._operations(self._block.operations))
        channels = [
            {"channel_type": kind, "channel_ids": numbers}
            for kind, numbers in (
                ("memory", self._ids(self._memory)),
                ("port", self._ids(self._port)),
                ("switch", self._switch),
            )
            if numbers
        ]
        references = [
            {"access_channel_type": kind, "remote_buffer_ids": numbers}
            for kind, numbers in self._buffers.items()
            if numbers
        ]
        return {"id": self._number, "ops": operations, "channels": channels, "remote_buffer_refs": references}

    def _ids(self, places: Sequence[int]) -> list[int]:
        ends = [self._block.connections[at] for at in places]
        return [self._gpu.channel((end.kind, end.peer, end.number)) for end in ends]

    def _operations(self, operations: Sequence[Operation]) -> Iterator[Entry]:
        at = 0
        while at < len(operations):
            operation = operations[at]
            at += 1
            match operation:
                case Synchronize():
                    yield {"name": "nop"}
                case Barrier(number=number, blocks=blocks):
                    yield {"name": "barrier", "barrier_id": number, "num_threadblocks": blocks}
                case Acquire(semaphores=semaphores):
                    yield {"name": "sem_acquire", "semaphore_ids": list(semaphores)}
                case Release(semaphores=semaphores):
                    yield {"name": "sem_release", "semaphore_ids": list(semaphores)}
                case Signal(relaxed=relaxed) | Wait(relaxed=relaxed):
                    name = "signal" if isinstance(operation, Signal) else "wait"
                    yield self._named(("rlx" if relaxed else "") + name, operation.channels)
                case Move(targets=()):
                    yield self._packets_by_proxy(operation, operations[at : at + 2])
                    at += 2
                case Move(channel=None):
                    yield self._by_threads(operation)
                case Move():
                    entry, used = self._by_proxy(operation, operations[at : at + 2])
                    at += used
                    yield entry
                case Loop(operations=inner, chunks=chunks, piece_bytes=piece_bytes):
                    context = {"num_chunks": chunks, "unit_size": piece_bytes}
                    yield {"name": "pipeline", "iter_context": context, "ops": list(self._operations(inner))}
                case Flush():
                    raise ProgramError("the executor's flush flushes nothing; only a put with its signal can")
                case Step():
                    raise ProgramError(f"MSCCL++ has no {operation.code}; its operations are one-sided")

    def _named(self, name: str, channels: Sequence[int]) -> Entry:
        kind = self._block.connections[channels[0]].kind
        row = self._memory if kind == "memory" else self._port
        if any(channel not in row for channel in channels):
            raise ProgramError(f"{name}: one operation is for channels of one kind")
        return {
            "name": name,
            "channel_type": kind,
            "channel_ids": [row.index(channel) for channel in channels],
        }

    def _by_proxy(self, move: Move, following: Sequence[Operation]) -> tuple[Entry, int]:
        """A put on a port channel, with the signal and the flush that follow it; how many these are."""
        channel = move.channel
        assert channel is not None, "a proxy does it"
        if len(move.sources) > 1 or len(move.targets) > 1 or move.packets or move.thread:
            raise ProgramError(f"{move}: proxies put one span of data at a time")
        name, used = "put", 0
        if following and following[0] == Signal((channel,)):
            name, used = "pws", 1
            if following[1:] and following[1] == Flush((channel,)):
                name, used = "pwsf", 2
        return self._put(name, channel, move.sources[0], move.targets[0]), used

    def _packets_by_proxy(self, read: Move, following: Sequence[Operation]) -> Entry:
        """Packets of the rank's scratch, all of them awaited, as a proxy puts them elsewhere."""
        match following:
            case [Synchronize(), Move(sources=sources, targets=(far,), channel=channel, thread=0)] if (
                sources == read.sources and len(sources) == 1 and far.packets and channel is not None
            ):
                return self._put("rppkt", channel, sources[0], far)
        raise ProgramError(f"{read}: is only read where a proxy then puts it")

    def _put(self, name: str, channel: int, source: Span, target: Span) -> Entry:
        ends = {"src_buff": [_local(source)], "dst_buff": [self._remote(target, "port")]}
        return {**self._named(name, [channel]), **ends}

    def _by_threads(self, move: Move) -> Entry:
        if move.switch:
            return self._by_switch(move)
        name = _name(move)
        sources, targets = list(move.sources), list(move.targets)
        if name in {"put", "ppkt"}:
            sources *= len(targets)
        entry: Entry = {"name": name}
        if any(span.rank is not None for span in (*sources, *targets)):
            entry["channel_type"] = "memory"
        entry["src_buff"] = [self._end(span) for span in sources]
        entry["dst_buff"] = [self._end(span) for span in targets]
        return entry

    def _by_switch(self, move: Move) -> Entry:
        packets = move.packets
        adds = move.sources[0].rank is not None
        if adds and packets:
            raise ProgramError(f"{move}: switches add no packets")
        return {
            "name": "glres" if adds else "gstorepkt" if packets else "gstore",
            "channel_type": "switch",
            "src_buff": [self._group(move.sources) if adds else _local(move.sources[0])],
            "dst_buff": [self._group(move.targets)],
        }

    def _group(self, spans: Sequence[Span]) -> Entry:
        number = _place(self._switch, self._gpu.group(spans))
        return {"switch_channel_id": number, "index": spans[0].start, "size": spans[0].count}

    def _end(self, span: Span) -> Entry:
        return _local(span) if span.rank is None else self._remote(span, "memory")

    def _remote(self, span: Span, kind: str) -> Entry:
        number = _place(self._buffers[kind], self._gpu.buffer(span, kind))
        return {"buffer_id": number, "index": span.start, "size": span.count}


_NAMES = {form: name for name, form in reversed(FORMS.items())} | {
    MoveForm("own", "", ("own",), "far"): "res"
}


def _name(move: Move) -> str:
    """The operation that does a move by the threads of a block."""
    first, *more = map(_where, move.sources)
    near = tuple(_where(span) for span in move.targets if span.rank is None)
    others, sent = {*more}, {_where(span) for span in move.targets if span.rank is not None}
    if len(others) < 2 and len(sent) < 2:
        name = _NAMES.get(MoveForm(first, "".join(others), near, "".join(sent)))
        if name is not None and (name != "get" or move.sources[0].start == move.targets[0].start):
            return name
    what = "for these packets" if move.packets else "that does this rightly"
    raise ProgramError(f"{move}: MSCCL++ has no operation {what}")


def _where(span: Span) -> str:
    """An end of a move, as forms name it."""
    return ("own" if span.rank is None else "far") + " packets" * span.packets


def _local(span: Span) -> Entry:
    return {"type": span.memory, "index": span.start, "size": span.count}


def _place(row: list[Any], value: Any) -> int:
    """Where a value stands in a list, at its end where it is new."""
    if value not in row:
        row.append(value)
    return row.index(value)
