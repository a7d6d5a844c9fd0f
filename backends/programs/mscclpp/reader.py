"""MSCCL++'s execution plan (JSON) to a program: what its device code does with it, not what it may mean.

Where fields contradict each other, operations become what the runtime does with them, and a note says so;
what it breaks on becomes a fault. Thread block groups and pipelines are resolved: chunks are cut so small
that each part is whole chunks, and pipelines are gone through a fixed number of times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from arborcast.backends.programs.checking.memory import sizes
from arborcast.backends.programs.mscclpp import limits
from arborcast.backends.programs.program import (
    Acquire,
    Barrier,
    Connection,
    Flush,
    GlobalProgram,
    Memory,
    Move,
    Operation,
    ProgramError,
    Protocol,
    RankPart,
    Release,
    Signal,
    Span,
    Synchronize,
    ThreadBlock,
    Wait,
)
from arborcast.synth.collective import NAMED_KINDS, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.reading import parse_json

Entry: TypeAlias = Mapping[str, Any]

MAX_FILE_BYTES = 64 << 20
"""Bytes beyond which a file is refused."""

MAX_CELLS = 1 << 22
MAX_OPERATIONS = 1 << 18
_MAX_NUMBER = (1 << 31) - 1
_MAX_FINER = 1 << 10

_PLAN = {
    "name", "collective", "protocol", "inplace", "gpus", "reuse_resources", "use_double_scratch_buffer",
    "buffer_alignment", "min_message_size", "max_message_size", "num_threads_per_block",
}  # fmt: skip
_GPU = {
    "id", "input_chunks", "output_chunks", "scratch_chunks",
    "threadblocks", "channels", "remote_buffers", "semaphores",
}  # fmt: skip
_BLOCK = {"id", "ops", "channels", "remote_buffer_refs"}
_OPERATION = {
    "name", "channel_type", "channel_ids", "src_buff", "dst_buff", "barrier_id", "num_threadblocks",
    "semaphore_ids", "tbg_info", "iter_context", "ops", "reduce_op",
}  # fmt: skip

_SIGNALS = {"signal", "rlxsignal"}
_WAITS = {"wait", "rlxwait"}
_PUTS = {"put", "pws", "pwsf", "ppkt", "rppkt"}
_LOCAL = {"copy", "cpkt", "upkt"}
_SUMS = {"re", "res", "rre", "rres", "repkt", "respkt", "recpkt", "recspkt"}
_SWITCHED = {"glres", "gstore", "gstorepkt"}
_PACKETS = {"ppkt", "rppkt", "cpkt", "upkt", "repkt", "respkt", "recpkt", "recspkt", "gstorepkt"}
_MOVES = _PUTS | _LOCAL | _SUMS | _SWITCHED | {"get"}
_NAMES = _MOVES | _SIGNALS | _WAITS | {"nop", "barrier", "flush", "sem_acquire", "sem_release", "pipeline"}


def read(
    text: str, place: str = "plan", *, kind: Kind | None = None, root: int | None = None, iterations: int = 2
) -> GlobalProgram:
    """The program that a plan is.

    Args:
        text: the JSON.
        place: what errors begin with.
        kind: what the plan does, where its own name for it is none that we know.
        root: of a kind that has one, which plans do not say; 0 where None.
        iterations: how often pipelines are gone through; at run time it depends on the size.

    Raises:
        ProgramError: not such a file, or operations that cannot be told; one line.
    """
    try:
        return _Plan(_object(parse_json(text, place), "plan"), kind, root, iterations).program()
    except ProgramError as error:
        raise ProgramError(f"{place}: {error}") from error
    except InputError as error:
        raise ProgramError(str(error)) from error


class _Plan:
    def __init__(self, plan: Entry, kind: Kind | None, root: int | None, iterations: int) -> None:
        self.faults: list[str] = []
        self.notes: list[str] = []
        self._plan = plan
        self._gpus = [
            _object(gpu, f"gpus[{rank}]") for rank, gpu in enumerate(_list(plan, "gpus", "plan", 4096))
        ]
        if len(self._gpus) < 2:
            raise ProgramError(f"gpus must be at least 2, got {len(self._gpus)}")
        self._kind = self._kind_of(kind)
        self._root = self._root_of(root)
        self.iterations = iterations
        self.finer = self._finer()
        self.double = _flag(plan, "use_double_scratch_buffer", "plan", default=False)

    def program(self) -> GlobalProgram:
        plan = self._plan
        self.ignored(plan, _PLAN, "plan")
        protocol = _text(plan, "protocol", "plan")
        if protocol not in {"Simple", "LL"}:
            self.note(f"plan: protocol {shorten(protocol)} is taken for Simple")
            protocol = "Simple"
        self._check_numbers()
        in_place = _flag(plan, "inplace", "plan")
        wanted = self._gpus[0]
        whole = "output_chunks" if self._kind in {Kind.ALLGATHER, Kind.GATHER} else "input_chunks"
        chunks = _number(wanted, whole, "gpus[0]", 0, MAX_CELLS) * self.finer
        if not chunks:
            raise ProgramError(f"gpus[0]: {whole} is 0, by which the runtime divides")
        if chunks * len(self._gpus) > MAX_CELLS:
            raise ProgramError(
                f"at most {MAX_CELLS} chunks on all ranks are read, got {chunks} on {len(self._gpus)}"
            )
        readers = [_Rank(self, rank, gpu) for rank, gpu in enumerate(self._gpus)]
        parts = tuple(reader.part(self._gpus) for reader in readers)
        least = _number(plan, "min_message_size", "plan", 0, 1 << 64, default=0)
        most = _number(plan, "max_message_size", "plan", 0, 1 << 64, default=1 << 64)
        program = GlobalProgram(
            name=_text(plan, "name", "plan"),
            kind=self._kind,
            root=self._root,
            chunks=chunks,
            parts=parts,
            protocol=Protocol(protocol),
            in_place=in_place,
            out_of_place=not in_place,
            least_bytes=least,
            most_bytes=None if most >= (1 << 64) - 1 else most,
            double_scratch=self.double,
        )
        self._check_chunks(program)
        if program.operation_count > MAX_OPERATIONS:
            raise ProgramError(f"at most {MAX_OPERATIONS} operations are read, got {program.operation_count}")
        return replace(
            program, faults=tuple(dict.fromkeys(self.faults)), notes=tuple(dict.fromkeys(self.notes))
        )

    def note(self, text: str) -> None:
        self.notes.append(text)

    def fault(self, text: str) -> None:
        self.faults.append(text)

    def ignored(self, entry: Entry, known: set[str], where: str) -> None:
        strange = sorted(set(entry) - known)
        if strange:
            self.note(f"{where}: {', '.join(map(shorten, strange[:8]))} passed over by the runtime")

    def _kind_of(self, kind: Kind | None) -> Kind:
        name = _text(self._plan, "collective", "plan")
        found = kind or Kind.named(name)
        if found is None or found is Kind.CUSTOM:
            raise ProgramError(
                f"plan: collective {shorten(name)} is none of {', '.join(NAMED_KINDS)}; name the "
                "one it does (--collective)"
            )
        return found

    def _root_of(self, root: int | None) -> int | None:
        if not self._kind.has_root:
            return None
        root = root or 0
        if not 0 <= root < len(self._gpus):
            raise ProgramError(f"root must be in 0..{len(self._gpus) - 1}, got {root}")
        return root

    def _finer(self) -> int:
        """In how many parts chunks are cut, so that groups of blocks and pipelines handle whole ones."""
        parts = {1}
        for gpu in self._gpus:
            for block in _list(gpu, "threadblocks", "gpu", 4096):
                for one in _list(_object(block, "threadblock"), "ops", "threadblock", MAX_OPERATIONS):
                    operation = _object(one, "op")
                    if "tbg_info" in operation:
                        parts.add(
                            _number(
                                _object(operation["tbg_info"], "tbg_info"), "tbg_size", "tbg_info", 1, 4096
                            )
                        )
                    if operation.get("name") == "pipeline":
                        parts.add(self.iterations)
        finer = math.lcm(*parts)
        if finer > _MAX_FINER:
            raise ProgramError(
                f"thread block groups cut chunks in {finer} parts, at most {_MAX_FINER} are read"
            )
        return finer

    def _check_numbers(self) -> None:
        threads = _number(self._plan, "num_threads_per_block", "plan", 0, _MAX_NUMBER, default=limits.THREADS)
        if not 0 < threads <= limits.THREADS:
            self.fault(
                f"plan: num_threads_per_block is {threads}, kernels are built for 1 to {limits.THREADS}"
            )
        alignment = _number(self._plan, "buffer_alignment", "plan", 0, _MAX_NUMBER, default=limits.ALIGNMENT)
        if not alignment or alignment % limits.ALIGNMENT:
            self.fault(
                f"plan: buffer_alignment is {alignment}; device code moves {limits.ALIGNMENT} bytes at a time"
            )
        if _flag(self._plan, "reuse_resources", "plan", default=False):
            self.note(
                f"plan: reuses {limits.SCRATCH_BYTES >> 20} MiB of scratch; judged for sizes at "
                "which that is enough"
            )

    def _check_chunks(self, program: GlobalProgram) -> None:
        for rank, part in enumerate(program.parts):
            size = sizes(program, rank)
            for memory, said in ((Memory.INPUT, part.input_chunks), (Memory.OUTPUT, part.output_chunks)):
                name = "input_chunks" if memory is Memory.INPUT else "output_chunks"
                if not said:
                    self.fault(f"rank {rank}: {name} is 0, by which the runtime divides")
                elif said != size[memory]:
                    self.fault(
                        f"rank {rank}: {name} is {said // self.finer}, {program.kind} of "
                        f"{program.chunks // self.finer} "
                        f"chunks has {size[memory] // self.finer}: sizes of chunks differ, or "
                        "chunks end elsewhere"
                    )


class _Rank:
    """One entry of `gpus`."""

    def __init__(self, plan: _Plan, rank: int, gpu: Entry) -> None:
        self.plan = plan
        self.rank = rank
        self._gpu = gpu
        where = f"rank {rank}"
        if _number(gpu, "id", where, 0, _MAX_NUMBER) != rank:
            raise ProgramError(f"gpus must be in the order of their ids: entry {rank} has id {gpu['id']}")
        plan.ignored(gpu, _GPU, where)
        self.channels: dict[str, list[Connection]] = {"memory": [], "port": []}
        self.groups: list[tuple[Memory, tuple[int, ...]]] = []
        self.buffers: list[tuple[int, Memory, tuple[str, ...]]] = []

    def part(self, gpus: Sequence[Entry]) -> RankPart:
        gpu, where, finer = self._gpu, f"rank {self.rank}", self.plan.finer
        self._read_channels(len(gpus))
        self._read_buffers(len(gpus))
        blocks = []
        for place, block in enumerate(_list(gpu, "threadblocks", where, 4096)):
            blocks.append(_Block(self, place, _object(block, f"{where} threadblock")).block())
        if len(blocks) > limits.BLOCKS:
            self.plan.note(
                f"rank {self.rank}: {len(blocks)} thread blocks must be resident at once; not "
                "every GPU has room for them"
            )
        semaphores = tuple(
            _number(_object(entry, "semaphore"), "init_value", f"{where} semaphores", 0, _MAX_NUMBER)
            for entry in _list(gpu, "semaphores", where, 4096, default=True)
        )
        return RankPart(
            tuple(blocks),
            _number(gpu, "input_chunks", where, 0, MAX_CELLS) * finer,
            _number(gpu, "output_chunks", where, 0, MAX_CELLS) * finer,
            _number(gpu, "scratch_chunks", where, 0, MAX_CELLS // finer) * finer,
            semaphores,
        )

    def _read_channels(self, ranks: int) -> None:
        where = f"rank {self.rank} channels"
        numbers: Counter[tuple[str, int]] = Counter()
        for one in _list(self._gpu, "channels", f"rank {self.rank}", 4096):
            entry = _object(one, where)
            kind = _text(entry, "channel_type", where)
            if kind == "switch":
                memory = _memory(entry.get("buffer_type"), f"{where}: buffer_type of a switch channel")
                for group in _list(entry, "rank_groups", where, 4096):
                    members = _numbers(_object(group, where), "ranks", where, ranks)
                    self.groups.append((memory, members))
                    if self.rank not in members:
                        self.plan.fault(f"{where}: a switch channel is for ranks {_shown(members)} alone")
            elif kind in self.channels:
                for peer in _numbers(entry, "connected_to", where, ranks):
                    self.channels[kind].append(Connection(peer, kind, numbers[kind, peer]))
                    numbers[kind, peer] += 1
                    if peer == self.rank:
                        self.plan.fault(f"{where}: connected to itself")
            else:
                raise ProgramError(
                    f"{where}: channel_type must be memory, port or switch, got {shorten(kind)}"
                )

    def _read_buffers(self, ranks: int) -> None:
        where = f"rank {self.rank} remote_buffers"
        for one in _list(self._gpu, "remote_buffers", f"rank {self.rank}", 4096):
            entry = _object(one, where)
            kinds = tuple(map(str, _list(entry, "access_channel_types", where, 8)))
            memory = _memory(entry.get("type"), f"{where}: type")
            self.buffers.append((_number(entry, "rank", where, 0, ranks - 1), memory, kinds))


class _Block:
    """One thread block: its lists of connections and buffers, and its operations."""

    def __init__(self, rank: _Rank, place: int, entry: Entry) -> None:
        self._rank = rank
        self._plan = rank.plan
        self._entry = entry
        self._where = f"rank {rank.rank} block {place}"
        number = _number(entry, "id", self._where, 0, _MAX_NUMBER)
        if number != place:
            raise ProgramError(f"{self._where}: ids must be 0, 1, 2 in the order of the list, got {number}")
        self._plan.ignored(entry, _BLOCK, self._where)
        self._channels: dict[str, list[int]] = {"memory": [], "port": [], "switch": []}
        self._buffers: dict[str, list[tuple[int, Memory]]] = {"memory": [], "port": []}
        self._read_channels()
        self._read_buffers()

    def block(self) -> ThreadBlock:
        operations: list[Operation] = []
        entries = _list(self._entry, "ops", self._where, MAX_OPERATIONS)
        count = 0
        for place, one in enumerate(entries):
            entry = _object(one, self._where)
            where = f"{self._where} op {place}"
            count += 1
            if entry.get("name") == "pipeline":
                inner = [_object(each, where) for each in _list(entry, "ops", where, MAX_OPERATIONS)]
                count += len(inner)
                context = _object(entry.get("iter_context"), f"{where}: iter_context")
                chunks = _number(context, "num_chunks", where, 1, MAX_CELLS)
                _number(context, "unit_size", where, 1, _MAX_NUMBER)
                for iteration in range(self._plan.iterations):
                    for at, each in enumerate(inner):
                        operations += self._operations(each, f"{where}.{at}", (iteration, chunks))
            else:
                operations += self._operations(entry, where, None)
            if len(operations) > MAX_OPERATIONS:
                raise ProgramError(f"{self._where}: at most {MAX_OPERATIONS} operations are read")
        if count > limits.OPERATIONS:
            self._plan.fault(f"{self._where}: {count} operations, the executor takes {limits.OPERATIONS}")
        ends = [*(self._rank.channels["memory"][at] for at in self._channels["memory"])]
        ends += [self._rank.channels["port"][at] for at in self._channels["port"]]
        return ThreadBlock(tuple(operations), connections=tuple(ends))

    def _read_channels(self) -> None:
        for one in _list(self._entry, "channels", self._where, 4096):
            entry = _object(one, self._where)
            kind = _text(entry, "channel_type", self._where)
            if kind not in self._channels:
                raise ProgramError(
                    f"{self._where}: channel_type must be memory, port or switch, got {shorten(kind)}"
                )
            known = len(self._rank.groups if kind == "switch" else self._rank.channels[kind])
            for number in _numbers(entry, "channel_ids", self._where, _MAX_NUMBER):
                if number >= known:
                    raise ProgramError(
                        f"{self._where}: {kind} channel {number}, rank {self._rank.rank} has {known}"
                    )
                self._channels[kind].append(number)
            if len(self._channels[kind]) > limits.CHANNELS:
                self._plan.fault(
                    f"{self._where}: {len(self._channels[kind])} {kind} channels, the executor "
                    f"has room for {limits.CHANNELS}"
                )

    def _read_buffers(self) -> None:
        for one in _list(self._entry, "remote_buffer_refs", self._where, 4096, default=True):
            entry = _object(one, self._where)
            kind = _text(entry, "access_channel_type", self._where)
            if kind not in self._buffers:
                self._plan.note(f"{self._where}: remote buffers by {shorten(kind)} are passed over")
                continue
            for number in _numbers(entry, "remote_buffer_ids", self._where, _MAX_NUMBER):
                if number >= len(self._rank.buffers):
                    raise ProgramError(
                        f"{self._where}: remote buffer {number}, rank {self._rank.rank} has "
                        f"{len(self._rank.buffers)}"
                    )
                owner, memory, kinds = self._rank.buffers[number]
                if kind not in kinds:
                    self._plan.fault(
                        f"{self._where}: remote buffer {number} is not declared for {kind}; the "
                        "runtime takes another one"
                    )
                self._buffers[kind].append((owner, memory))
            if len(self._buffers[kind]) > limits.CHANNELS:
                self._plan.fault(
                    f"{self._where}: {len(self._buffers[kind])} remote buffers, the executor has "
                    f"room for {limits.CHANNELS}"
                )

    def _operations(self, entry: Entry, where: str, part: tuple[int, int] | None) -> Iterator[Operation]:
        name = entry.get("name")
        if not isinstance(name, str) or name not in _NAMES or name == "pipeline":
            raise ProgramError(
                f"{where}: there is no operation {shorten(name)}" + (" here" if name == "pipeline" else "")
            )
        where = f"{where} ({name})"
        self._plan.ignored(entry, _OPERATION, where)
        kind = entry.get("channel_type", "none")
        if not isinstance(kind, str) or kind not in {"memory", "port", "switch", "none"}:
            raise ProgramError(f"{where}: channel_type must be memory, port or switch, got {shorten(kind)}")
        self._check_entry(entry, where)
        if name == "nop":
            yield Synchronize()
        elif name == "barrier":
            number = _number(entry, "barrier_id", where, 0, _MAX_NUMBER)
            if number >= limits.BARRIERS:
                self._plan.fault(f"{where}: barrier {number}, the executor has {limits.BARRIERS}")
            yield Barrier(number, _number(entry, "num_threadblocks", where, 1, _MAX_NUMBER))
        elif name in {"sem_acquire", "sem_release"}:
            semaphores = _numbers(entry, "semaphore_ids", where, _MAX_NUMBER)
            yield Acquire(semaphores) if name == "sem_acquire" else Release(semaphores)
        elif name == "flush":
            self._plan.note(f"{where}: the runtime takes its count from dst_buff, and flushes nothing")
        elif name in _SIGNALS | _WAITS:
            yield from self._signals(str(name), kind, entry, where)
        else:
            yield from self._moves(str(name), kind, entry, where, part)

    def _check_entry(self, entry: Entry, where: str) -> None:
        if entry.get("reduce_op", "sum") != "sum":
            self._plan.note(
                f"{where}: reduce_op {shorten(entry['reduce_op'])} is passed over; the runtime adds"
            )
        if len(_list(entry, "channel_ids", where, 256, default=True)) > limits.CHANNELS_OF_OPERATION:
            self._plan.fault(
                f"{where}: more than {limits.CHANNELS_OF_OPERATION} channels write past their array"
            )
        for name in ("src_buff", "dst_buff"):
            if len(_list(entry, name, where, 256, default=True)) > limits.BUFFERS_OF_OPERATION:
                self._plan.fault(
                    f"{where}: more than {limits.BUFFERS_OF_OPERATION} buffers write past their array"
                )
        if len(_list(entry, "semaphore_ids", where, 256, default=True)) > limits.SEMAPHORES_OF_OPERATION:
            self._plan.fault(
                f"{where}: more than {limits.SEMAPHORES_OF_OPERATION} semaphores write past their array"
            )

    def _connections(self, kind: str, entry: Entry, where: str) -> tuple[int, ...]:
        """Places among the block's connections."""
        known = len(self._channels[kind])
        first = 0 if kind == "memory" else len(self._channels["memory"])
        found = _numbers(entry, "channel_ids", where, _MAX_NUMBER)
        for number in found:
            if number >= known:
                raise ProgramError(f"{where}: {kind} channel {number} of the block, which has {known}")
        return tuple(first + number for number in found)

    def _signals(self, name: str, kind: str, entry: Entry, where: str) -> Iterator[Operation]:
        if kind not in {"memory", "port"}:
            self._plan.note(f"{where}: does nothing with channel_type {kind}")
            return
        channels = self._connections(kind, entry, where)
        relaxed = name.startswith("rlx") and kind == "memory"
        yield Signal(channels, relaxed) if name in _SIGNALS else Wait(channels, relaxed)

    def _moves(
        self, name: str, kind: str, entry: Entry, where: str, part: tuple[int, int] | None
    ) -> Iterator[Operation]:
        sources = [_object(one, where) for one in _list(entry, "src_buff", where, 256)]
        targets = [_object(one, where) for one in _list(entry, "dst_buff", where, 256)]
        if not sources or not targets:
            raise ProgramError(f"{where}: needs src_buff and dst_buff")
        if name in _PACKETS and part is not None:
            self._plan.note(f"{where}: packets know nothing of iterations; each handles all")
            part = None
        group = None
        if "tbg_info" in entry:
            info = _object(entry["tbg_info"], where)
            size = _number(info, "tbg_size", where, 1, 4096)
            group = _number(info, "tb_id", where, 0, size - 1), size
            if part is not None:
                self._plan.fault(
                    f"{where}: tbg_info in a pipeline; later iterations run beyond the block's part"
                )
                part = None
        cut = _Cut(self, kind, where, group, part)
        if name in _PUTS:
            yield from self._puts(name, kind, sources, targets, entry, where, cut)
        elif name == "get":
            yield self._get(kind, sources, targets, where, cut)
        elif name in _LOCAL:
            count = cut.count(sources[0])
            self._one(sources, targets, where)
            first = cut.local(
                sources[0], count, packets=name == "upkt", always=Memory.SCRATCH if name == "upkt" else None
            )
            yield Move((first,), (cut.local(targets[0], count, packets=name == "cpkt"),))
        elif name in _SUMS:
            yield self._sum(name, kind, sources, targets, where, cut)
        else:
            yield self._switched(name, sources, targets, where, cut)

    def _one(self, sources: Sequence[Entry], targets: Sequence[Entry], where: str) -> None:
        if len(sources) > 1 or len(targets) > 1:
            self._plan.note(f"{where}: only the first of src_buff and dst_buff are looked at")

    def _puts(  # noqa: PLR0912  (a rule a branch)
        self,
        name: str,
        kind: str,
        sources: Sequence[Entry],
        targets: Sequence[Entry],
        entry: Entry,
        where: str,
        cut: _Cut,
    ) -> Iterator[Operation]:
        if kind not in {"memory", "port"}:
            self._plan.note(f"{where}: does nothing with channel_type {kind}")
            return
        of_targets = not name.endswith("pkt")  # which of the two sizes the runtime takes
        channels = self._connections("port", entry, where) if kind == "port" else ()
        if kind == "port" and len(channels) < len(targets):
            self._plan.fault(
                f"{where}: {len(channels)} channel_ids for {len(targets)} buffers; others use the "
                "first channel"
            )
            channels += (channels or (0,)) * len(targets)
        if name == "ppkt" and kind == "port":
            self._plan.note(f"{where}: sends packets as they are, from the executor's first plan")
        packed = name == "rppkt" or (name == "ppkt" and kind == "port")
        for at, target in enumerate(targets):
            source = sources[0] if name == "rppkt" else sources[at] if at < len(sources) else None
            if source is None:
                self._plan.note(
                    f"{where}: src_buff has {len(sources)} entries, dst_buff {len(targets)}; "
                    "others begin at 0"
                )
                source = {**sources[0], "index": 0, "size": 0}
                if not of_targets:
                    continue
            elif kind == "memory" and source.get("type") != sources[0].get("type"):
                self._plan.note(
                    f"{where}: the runtime reads all from the kind of buffer of the first src_buff"
                )
                source = {**source, "type": sources[0].get("type")}
            count = cut.count(target if of_targets else source)
            read = cut.local(
                source, count, packets=packed, always=Memory.SCRATCH if name == "rppkt" else None
            )
            write = cut.remote(target, count, packets=not of_targets)
            if kind == "memory":
                yield Move((read,), (write,))
            else:
                if name == "rppkt" and not at:
                    yield Move((read,), ())
                    yield Synchronize()
                yield Move((read,), (write,), channels[at], at)
        if name in {"pws", "pwsf"}:
            if kind == "memory":
                self._plan.note(f"{where}: signals nothing on memory channels")
                return
            yield Signal(channels[: len(targets)])
            if name == "pwsf":
                yield Flush(channels[: len(targets)])

    def _get(
        self, kind: str, sources: Sequence[Entry], targets: Sequence[Entry], where: str, cut: _Cut
    ) -> Move:
        if kind != "memory":
            raise ProgramError(f"{where}: is for memory channels, got {kind}")
        self._one(sources, targets, where)
        count = cut.count(sources[0])
        if sources[0].get("index") != targets[0].get("index"):
            self._plan.note(f"{where}: the runtime exchanges where source and target begin")
        source = {**sources[0], "index": targets[0].get("index")}
        target = {**targets[0], "index": sources[0].get("index")}
        return Move((cut.remote(source, count),), (cut.local(target, count),))

    def _sum(
        self, name: str, kind: str, sources: Sequence[Entry], targets: Sequence[Entry], where: str, cut: _Cut
    ) -> Move:
        packets = name.endswith("pkt")
        sends = name in {"res", "rres", "respkt", "recspkt"}
        if (sends or name in {"rre", "rres"}) and kind != "memory" and len(sources) + len(targets) > 2:
            raise ProgramError(f"{where}: is for memory channels, got {kind}")
        count = cut.count(sources[0])
        read = [cut.local(sources[0], count)]
        for source in sources[1:]:
            if packets:
                read.append(cut.local(source, count, packets=True, always=Memory.SCRATCH))
            else:
                read.append(
                    cut.remote(source, count) if name in {"rre", "rres"} else cut.local(source, count)
                )
        write = [cut.local(targets[0], count)]
        rest = list(targets[1:])
        if name in {"recpkt", "recspkt"}:
            if not rest:
                raise ProgramError(f"{where}: needs two local buffers in dst_buff")
            write.append(cut.local(rest.pop(0), count, packets=True))
        if rest and not sends:
            self._plan.note(f"{where}: writes the first of dst_buff alone")
        write += [cut.remote(target, count, packets=packets) for target in rest if sends]
        return Move(tuple(read), tuple(write))

    def _switched(
        self, name: str, sources: Sequence[Entry], targets: Sequence[Entry], where: str, cut: _Cut
    ) -> Move:
        self._one(sources, targets, where)
        count = cut.count(sources[0])
        if name == "glres":
            read = self._group(sources[0], count, where, cut)
        else:
            read = (cut.local(sources[0], count, packets=name == "gstorepkt"),)
        write = self._group(targets[0], count, where, cut, packets=name == "gstorepkt")
        return Move(read, write, switch=True)

    def _group(
        self, entry: Entry, count: int, where: str, cut: _Cut, *, packets: bool = False
    ) -> tuple[Span, ...]:
        number = _number(entry, "switch_channel_id", where, 0, _MAX_NUMBER)
        if number >= len(self._channels["switch"]):
            raise ProgramError(
                f"{where}: switch channel {number} of the block, which has {len(self._channels['switch'])}"
            )
        memory, ranks = self._rank.groups[self._channels["switch"][number]]
        start = cut.start(entry)
        return tuple(Span(memory, start, count, rank, packets) for rank in ranks)

    def buffer(self, kind: str, number: int, where: str) -> tuple[int, Memory]:
        """Whose memory, and which, a `buffer_id` means."""
        known = self._buffers.get(kind, [])
        if number >= len(known):
            raise ProgramError(f"{where}: {kind} buffer {number} of the block, which has {len(known)}")
        return known[number]

    @property
    def plan(self) -> _Plan:
        """The plan that it is of."""
        return self._plan


class _Cut:
    """Entries of src_buff and dst_buff to spans, cut to the part of a block of a group or of an iteration."""

    def __init__(
        self,
        block: _Block,
        kind: str,
        where: str,
        group: tuple[int, int] | None,
        part: tuple[int, int] | None,
    ) -> None:
        self._block = block
        self._kind = kind
        self._where = where
        self._group = group
        self._part = part
        self._finer = block.plan.finer
        self._counts: set[int] = set()

    def count(self, entry: Entry) -> int:
        """How many chunks the operation handles, by the entry that the runtime looks at."""
        size = _number(entry, "size", self._where, 0, MAX_CELLS)
        if not size:
            raise ProgramError(f"{self._where}: size must be at least 1, got {size}")
        self._check_part(size)
        return self._cut(size)[1]

    def local(self, entry: Entry, count: int, *, packets: bool = False, always: Memory | None = None) -> Span:
        """Of the rank itself."""
        if "type" not in entry:
            raise ProgramError(f"{self._where}: must be a buffer of the rank itself, with type")
        memory = _memory(entry["type"], f"{self._where}: type")
        if always is not None and memory is not always:
            self._block.plan.note(f"{self._where}: packets are read from scratch, whatever type says")
            memory = always
        return Span(memory, self.start(entry), count, None, packets)

    def remote(self, entry: Entry, count: int, *, packets: bool = False) -> Span:
        """Of another rank."""
        if "buffer_id" not in entry:
            raise ProgramError(f"{self._where}: must be a buffer of another rank, with buffer_id")
        number = _number(entry, "buffer_id", self._where, 0, _MAX_NUMBER)
        rank, memory = self._block.buffer(self._kind, number, self._where)
        return Span(memory, self.start(entry), count, rank, packets)

    def start(self, entry: Entry) -> int:
        """The first chunk of the part."""
        index = _number(entry, "index", self._where, 0, MAX_CELLS)
        size = _number(entry, "size", self._where, 0, MAX_CELLS)
        self._counts.add(size)
        if len(self._counts - {0}) > 1:
            self._block.plan.note(f"{self._where}: sizes differ; the runtime takes one of them for all")
        return index * self._finer + self._cut(size)[0]

    def _cut(self, size: int) -> tuple[int, int]:
        """Where the part begins, and how long it is."""
        whole = size * self._finer
        if self._group is not None:
            number, of = self._group
            return whole * number // of, whole * (number + 1) // of - whole * number // of
        if self._part is not None:
            iteration, chunks = self._part
            unit = chunks * self._finer // self._block.plan.iterations
            return iteration * unit, min(unit, whole - iteration * unit) if whole > iteration * unit else unit
        return 0, whole

    def _check_part(self, size: int) -> None:
        if self._part is None:
            return
        chunks = self._part[1]
        if size < chunks:
            self._block.plan.fault(
                f"{self._where}: {size} of the {chunks} chunks of its pipeline; later iterations "
                "run beyond its end"
            )
        elif size > chunks:
            self._block.plan.note(f"{self._where}: {size} chunks, of which the pipeline handles {chunks}")


def _object(value: object, where: str) -> Entry:
    if not isinstance(value, dict):
        raise ProgramError(f"{where}: must be an object, got {shorten(value)}")
    return value


def _list(entry: Entry, name: str, where: str, most: int, *, default: bool = False) -> list[Any]:
    value = entry.get(name, [] if default else None)
    if not isinstance(value, list):
        raise ProgramError(f"{where}: {name} must be a list, got {shorten(value)}")
    if len(value) > most:
        raise ProgramError(f"{where}: {name} has {len(value)} entries, at most {most} are read")
    return value


def _number(entry: Entry, name: str, where: str, least: int, most: int, *, default: int | None = None) -> int:
    value = entry.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ProgramError(
            f"{where}: {name} must be a whole number from {least} to {most}, got {shorten(value)}"
        )
    return value


def _numbers(entry: Entry, name: str, where: str, beyond: int) -> tuple[int, ...]:
    values = _list(entry, name, where, 4096)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < beyond:
            raise ProgramError(
                f"{where}: {name} must be whole numbers from 0 to {beyond - 1}, got {shorten(value)}"
            )
    return tuple(values)


def _text(entry: Entry, name: str, where: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str):
        raise ProgramError(f"{where}: {name} must be a text, got {shorten(value)}")
    return value


def _flag(entry: Entry, name: str, where: str, *, default: bool | None = None) -> bool:
    value = entry.get(name, default)
    if not isinstance(value, bool):
        raise ProgramError(f"{where}: {name} must be true or false, got {shorten(value)}")
    return value


def _memory(value: object, where: str) -> Memory:
    if not isinstance(value, str) or value not in set(Memory):
        raise ProgramError(f"{where} must be i, o or s, got {shorten(value)}")
    return Memory(str(value))


def _shown(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8]))
