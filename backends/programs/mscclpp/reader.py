"""MSCCL++'s execution plan (JSON) to a program: what its device code does with it, not what it may mean.

Where fields contradict each other, operations become what the runtime does with them, and a note says so;
what it breaks on becomes a fault. Thread block groups are resolved: chunks are cut so small that each part is
whole chunks. Pipelines are loops.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from arborcast.backends.programs.checking.memory import sizes
from arborcast.backends.programs.mscclpp import limits
from arborcast.backends.programs.mscclpp.shapes import (
    FORMS,
    MAX_CELLS,
    MAX_OPERATIONS,
    BlockShape,
    BufferShape,
    GpuShape,
    OperationShape,
    PlanShape,
    passed_over,
)
from arborcast.backends.programs.program import (
    Acquire,
    Barrier,
    Connection,
    Flush,
    GlobalProgram,
    Loop,
    Memory,
    Move,
    OneTime,
    Operation,
    ProgramError,
    RankPart,
    Release,
    Signal,
    Span,
    Synchronize,
    ThreadBlock,
    Wait,
    kind_of_file,
    root_of_file,
)
from arborcast.synth.collective import NAMED_KINDS, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.reading import parse_json
from arborcast.synth.formats.shapes import check_shape
from arborcast.synth.nccl_protocol import Protocol

_MAX_FINER = 1 << 10
_T = TypeVar("_T")


def read(
    text: str, place: str = "plan", *, kind: Kind | None = None, root: int | None = None
) -> GlobalProgram:
    """The program that a plan is.

    Args:
        text: the JSON.
        place: what errors begin with.
        kind: what the plan does, where its own name for it is none that we know.
        root: of a kind that has one, which plans do not say; 0 where None.

    Raises:
        ProgramError: not such a file, or operations that cannot be told; one line.
    """
    try:
        plan = cast("PlanShape", check_shape(PlanShape, parse_json(text, place), place))
        try:
            return _Plan(plan, kind, root).program()
        except ProgramError as error:
            raise ProgramError(f"{place}: {error}") from error
    except InputError as error:
        raise ProgramError(str(error)) from error


def _named(row: Sequence[_T], number: int, what: str) -> _T:
    """The entry of a list that a number names; `what` of whom it is."""
    if number >= len(row):
        raise ProgramError(f"{what} {number}, there are {len(row)}")
    return row[number]


class _Plan:
    def __init__(self, plan: PlanShape, kind: Kind | None, root: int | None) -> None:
        self._plan = plan
        self._gpus = plan["gpus"]
        self.ranks = len(self._gpus)
        self.faults: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        name = plan["collective"]
        self._kind = kind_of_file(
            name,
            kind,
            key="plan: collective",
            unknown=f"plan: collective {shorten(name)} is none of {', '.join(NAMED_KINDS)}; name the one it "
            "does (--collective)",
        )
        self._root = root_of_file(self._kind, root, self.ranks)
        self.finer = self._finer()

    def fault(self, text: str) -> None:
        """The runtime breaks on it."""
        self.faults.setdefault(text)

    def note(self, text: str) -> None:
        """The runtime passes over it."""
        self.notes.setdefault(text)

    def ignored(self, entry: Any, shape: type, where: str) -> None:
        """Keys that nobody reads."""
        for line in passed_over(entry, shape, where):
            self.note(line)

    def program(self) -> GlobalProgram:
        plan = self._plan
        self.ignored(plan, PlanShape, "plan")
        protocol = plan["protocol"]
        if protocol not in {"Simple", "LL"}:
            self.note(f"plan: protocol {shorten(protocol)} is taken for Simple")
            protocol = "Simple"
        self._check_numbers()
        first = self._gpus[0]
        whole = "output_chunks" if self._kind in {Kind.ALLGATHER, Kind.GATHER} else "input_chunks"
        chunks = (first["output_chunks"] if whole[0] == "o" else first["input_chunks"]) * self.finer
        if not chunks:
            raise ProgramError(f"gpus[0]: {whole} is 0, by which the runtime divides")
        if chunks * self.ranks > MAX_CELLS:
            raise ProgramError(
                f"at most {MAX_CELLS} chunks on all ranks are read, got {chunks} on {self.ranks}"
            )
        parts = tuple(self._part(rank, gpu) for rank, gpu in enumerate(self._gpus))
        scratch = sum(part.scratch_chunks for part in parts)
        if scratch > MAX_CELLS:
            raise ProgramError(f"at most {MAX_CELLS} chunks of scratch on all ranks are read, got {scratch}")
        most = plan.get("max_message_size", 1 << 64)
        program = GlobalProgram(
            name=plan["name"],
            kind=self._kind,
            root=self._root,
            chunks=chunks,
            parts=parts,
            protocol=Protocol(protocol),
            in_place=plan["inplace"],
            out_of_place=not plan["inplace"],
            least_bytes=plan.get("min_message_size", 0),
            most_bytes=None if most >= (1 << 64) - 1 else most,
            double_scratch=plan.get("use_double_scratch_buffer", False),
        )
        self._check_chunks(program)
        if program.operation_count > MAX_OPERATIONS:
            raise ProgramError(f"at most {MAX_OPERATIONS} operations are read, got {program.operation_count}")
        return replace(program, faults=tuple(self.faults), notes=tuple(self.notes))

    def _part(self, rank: int, gpu: GpuShape) -> RankPart:
        where, finer = f"rank {rank}", self.finer
        if gpu["id"] != rank:
            raise ProgramError(f"gpus must be in the order of their ids: entry {rank} has id {gpu['id']}")
        self.ignored(gpu, GpuShape, where)
        lists = _Rank(self, rank, gpu)
        blocks = tuple(
            _BlockReader(self, lists, place, block).block() for place, block in enumerate(gpu["threadblocks"])
        )
        if len(blocks) > limits.BLOCKS:
            self.note(
                f"{where}: {len(blocks)} thread blocks must be resident at once; not every GPU "
                "has room for them"
            )
        return RankPart(
            blocks,
            gpu["input_chunks"] * finer,
            gpu["output_chunks"] * finer,
            gpu["scratch_chunks"] * finer,
            tuple(entry["init_value"] for entry in gpu.get("semaphores", [])),
        )

    def _finer(self) -> int:
        """In how many parts chunks are cut, so that blocks of groups handle whole ones."""
        parts = {1}
        for gpu in self._gpus:
            for operation in (operation for block in gpu["threadblocks"] for operation in block["ops"]):
                if operation["name"] != "pipeline" and "tbg_info" in operation:
                    parts.add(operation["tbg_info"]["tbg_size"])
        finer = math.lcm(*parts)
        if finer > _MAX_FINER:
            raise ProgramError(
                f"thread block groups cut chunks in {finer} parts, at most {_MAX_FINER} are read"
            )
        return finer

    def _check_numbers(self) -> None:
        threads = self._plan.get("num_threads_per_block", limits.THREADS)
        if not 0 < threads <= limits.THREADS:
            self.fault(
                f"plan: num_threads_per_block is {threads}, kernels are built for 1 to {limits.THREADS}"
            )
        alignment = self._plan.get("buffer_alignment", limits.ALIGNMENT)
        if not alignment or alignment % limits.ALIGNMENT:
            self.fault(
                f"plan: buffer_alignment is {alignment}; device code moves {limits.ALIGNMENT} bytes at a time"
            )
        if self._plan.get("reuse_resources", False):
            self.note(
                f"plan: reuses {limits.SCRATCH_BYTES >> 20} MiB of scratch; judged for sizes at "
                "which that is enough"
            )

    def _check_chunks(self, program: GlobalProgram) -> None:
        for rank, part in enumerate(program.parts):
            size = sizes(program, rank)
            for memory, said in ((Memory.INPUT, part.input_chunks), (Memory.OUTPUT, part.output_chunks)):
                name = f"rank {rank}: {memory.name.lower()}_chunks is"
                if not said:
                    self.fault(f"{name} 0, by which the runtime divides")
                elif said != size[memory]:
                    self.fault(
                        f"{name} {said // self.finer}, {program.kind} of {program.chunks // self.finer} "
                        f"chunks has {size[memory] // self.finer}: sizes of chunks differ, or "
                        "chunks end elsewhere"
                    )


class _Rank:
    """Channels and remote buffers of a rank, which the lists of its blocks name by number."""

    def __init__(self, plan: _Plan, rank: int, gpu: GpuShape) -> None:
        where = f"rank {rank} channels"
        self.number = rank
        self.channels: dict[str, list[Connection]] = {"memory": [], "port": []}
        self.groups: list[tuple[Memory, tuple[int, ...]]] = []
        numbers: Counter[tuple[str, int]] = Counter()
        for entry in gpu["channels"]:
            kind = entry["channel_type"]
            if kind == "switch":
                for group in _needed(entry, "rank_groups", where):
                    members = tuple(_ranks(group["ranks"], plan.ranks, where))
                    self.groups.append((Memory(_needed(entry, "buffer_type", where)), members))
                    if rank not in members:
                        shown = ", ".join(map(str, members[:8]))
                        plan.fault(f"{where}: a switch channel is for ranks {shown} alone")
                continue
            for peer in _ranks(_needed(entry, "connected_to", where), plan.ranks, where):
                self.channels[kind].append(Connection(peer, kind, numbers[kind, peer]))
                numbers[kind, peer] += 1
                if peer == rank:
                    plan.fault(f"{where}: connected to itself")
        self.buffers = gpu["remote_buffers"]
        _ranks([entry["rank"] for entry in self.buffers], plan.ranks, f"rank {rank} remote_buffers")


def _ranks(found: list[int], ranks: int, where: str) -> list[int]:
    if any(rank >= ranks for rank in found):
        raise ProgramError(f"{where}: must be ranks from 0 to {ranks - 1}, got {max(found)}")
    return found


def _needed(entry: Any, name: str, where: str) -> Any:
    if name not in entry:
        raise ProgramError(f"{where}: needs {name}")
    return entry[name]


class _BlockReader:
    """One thread block: its lists of connections and buffers, and its operations."""

    def __init__(self, plan: _Plan, rank: _Rank, place: int, entry: BlockShape) -> None:
        self._plan = plan
        self._entry = entry
        self._where = where = f"rank {rank.number} block {place}"
        if entry["id"] != place:
            raise ProgramError(f"{where}: ids must be 0, 1, 2 in the order of the list, got {entry['id']}")
        plan.ignored(entry, BlockShape, where)
        self._ends: dict[str, list[Connection]] = {"memory": [], "port": []}
        self._groups: list[tuple[Memory, tuple[int, ...]]] = []
        self._buffers: dict[str, list[tuple[int, Memory]]] = {"memory": [], "port": []}
        for listed in entry["channels"]:
            kind, what = listed["channel_type"], f"{where}: {listed['channel_type']} channel of the rank"
            for number in listed["channel_ids"]:
                if kind == "switch":
                    self._groups.append(_named(rank.groups, number, what))
                else:
                    self._ends[kind].append(_named(rank.channels[kind], number, what))
            self._fits(self._groups if kind == "switch" else self._ends[kind], f"{kind} channels")
        for references in entry.get("remote_buffer_refs", []):
            access = references["access_channel_type"]
            if access not in self._buffers:
                plan.note(f"{where}: remote buffers by {shorten(access)} are passed over")
                continue
            for number in references["remote_buffer_ids"]:
                buffer = _named(rank.buffers, number, f"{where}: remote buffer")
                if access not in buffer["access_channel_types"]:
                    plan.fault(
                        f"{where}: remote buffer {number} is not declared for {access}; the "
                        "runtime takes another one"
                    )
                self._buffers[access].append((buffer["rank"], Memory(buffer["type"])))
            self._fits(self._buffers[access], "remote buffers")

    def _fits(self, row: Sequence[object], what: str) -> None:
        if len(row) > limits.CHANNELS:
            self._plan.fault(f"{self._where}: {len(row)} {what}, the executor has room for {limits.CHANNELS}")

    def block(self) -> ThreadBlock:
        """All operations."""
        operations: list[Operation] = []
        count = 0
        for place, entry in enumerate(self._entry["ops"]):
            where = f"{self._where} op {place}"
            count += 1
            if entry["name"] == "pipeline":
                count += len(entry["ops"])
                chunks, unit = entry["iter_context"]["num_chunks"], entry["iter_context"]["unit_size"]
                inner: list[OneTime] = []
                for at, each in enumerate(entry["ops"]):
                    inner += self._operations(each, f"{where}.{at}", chunks)
                operations.append(Loop(tuple(inner), chunks * self._plan.finer, unit))
            else:
                operations += self._operations(entry, where, None)
            if len(operations) > MAX_OPERATIONS:
                raise ProgramError(f"{self._where}: at most {MAX_OPERATIONS} operations are read")
        if count > limits.OPERATIONS:
            self._plan.fault(f"{self._where}: {count} operations, the executor takes {limits.OPERATIONS}")
        return ThreadBlock(tuple(operations), connections=(*self._ends["memory"], *self._ends["port"]))

    def _operations(self, entry: OperationShape, where: str, looped: int | None) -> Iterator[OneTime]:
        """What the device code does for an entry; `looped`: the chunks of the pipeline that it is in."""
        name, kind = entry["name"], entry.get("channel_type", "none")
        where = f"{where} ({name})"
        self._plan.ignored(entry, OperationShape, where)
        self._check(entry, where)
        match name:
            case "nop":
                yield Synchronize()
            case "barrier":
                number = _needed(entry, "barrier_id", where)
                if number >= limits.BARRIERS:
                    self._plan.fault(f"{where}: barrier {number}, the executor has {limits.BARRIERS}")
                yield Barrier(number, _needed(entry, "num_threadblocks", where))
            case "sem_acquire" | "sem_release":
                make = Acquire if name == "sem_acquire" else Release
                yield make(tuple(_needed(entry, "semaphore_ids", where)))
            case "flush":
                self._plan.note(f"{where}: the runtime takes its count from dst_buff, and flushes nothing")
            case "signal" | "rlxsignal" | "wait" | "rlxwait":
                if kind not in self._ends:
                    self._plan.note(f"{where}: does nothing with channel_type {kind}")
                    return
                relaxed = name.startswith("rlx") and kind == "memory"
                channels = self._connections(kind, entry, where)
                yield Signal(channels, relaxed) if name.endswith("signal") else Wait(channels, relaxed)
            case _:
                yield from self._moves(entry, kind, where, looped)

    def _check(self, entry: OperationShape, where: str) -> None:
        if entry.get("reduce_op", "sum") != "sum":
            self._plan.note(
                f"{where}: reduce_op {shorten(entry['reduce_op'])} is passed over; the runtime adds"
            )
        for what, row, most in (
            ("channels", entry.get("channel_ids", []), limits.CHANNELS_OF_OPERATION),
            ("buffers", entry.get("src_buff", []), limits.BUFFERS_OF_OPERATION),
            ("buffers", entry.get("dst_buff", []), limits.BUFFERS_OF_OPERATION),
            ("semaphores", entry.get("semaphore_ids", []), limits.SEMAPHORES_OF_OPERATION),
        ):
            if len(row) > most:
                self._plan.fault(f"{where}: more than {most} {what} write past their array")

    def _connections(self, kind: str, entry: OperationShape, where: str) -> tuple[int, ...]:
        """Places among the block's connections: by memory, then those of proxies."""
        first = 0 if kind == "memory" else len(self._ends["memory"])
        numbers = _needed(entry, "channel_ids", where)
        for number in numbers:
            _named(self._ends[kind], number, f"{where}: {kind} channel of the block")
        return tuple(first + number for number in numbers)

    # ---- what moves data

    def _moves(self, entry: OperationShape, kind: str, where: str, looped: int | None) -> Iterator[OneTime]:
        name = entry["name"]
        if not entry.get("src_buff") or not entry.get("dst_buff"):
            raise ProgramError(f"{where}: needs src_buff and dst_buff")
        if name.endswith("pkt") and looped is not None:
            self._plan.note(f"{where}: packets know nothing of iterations; each handles all")
            looped = None
        group = None
        if "tbg_info" in entry:
            info = entry["tbg_info"]
            if info["tb_id"] >= info["tbg_size"]:
                raise ProgramError(f"{where}: tb_id must be below {info['tbg_size']}, got {info['tb_id']}")
            group = info["tb_id"], info["tbg_size"]
            if looped is not None:
                self._plan.fault(
                    f"{where}: tbg_info in a pipeline; later iterations run beyond the block's part"
                )
                looped = None
        cut = _SpanReader(self._plan, where, self._buffers.get(kind, []), self._groups, group, looped)
        if FORMS[name].own:
            yield self._move(entry, kind, cut)
        else:
            yield from self._puts(entry, kind, cut)

    def _move(self, entry: OperationShape, kind: str, cut: _SpanReader) -> Move:
        """What threads do for one entry of dst_buff, or in sums for several."""
        sources, targets, name, where = entry["src_buff"], entry["dst_buff"], entry["name"], cut.where
        form, ends = FORMS[name], len(sources) + len(targets)
        if not form.others and ends > 2:
            self._plan.note(f"{where}: only the first of src_buff and dst_buff are looked at")
        if kind != "memory" and (name == "get" or ("far" in form.others + form.sent and ends > 2)):
            raise ProgramError(f"{where}: is for memory channels, got {kind}")
        if len(targets) < len(form.own):
            raise ProgramError(f"{where}: needs two local buffers in dst_buff")
        count = cut.count(sources[0])
        if name == "get" and sources[0]["index"] != targets[0]["index"]:
            self._plan.note(f"{where}: the runtime exchanges where source and target begin")
            begins = (
                {**sources[0], "index": targets[0]["index"]},
                {**targets[0], "index": sources[0]["index"]},
            )
            sources, targets = ([cast("BufferShape", entry)] for entry in begins)
        read = cut.spans(form.first, sources[0], count)
        for source in sources[1:] if form.others else ():
            read += cut.spans(form.others, source, count)
        written: tuple[Span, ...] = ()
        for end, target in zip(form.own, targets, strict=False):
            written += cut.spans(end, target, count, writes=True)
        for target in targets[len(form.own) :] if form.sent else ():
            written += cut.spans(form.sent, target, count, writes=True)
        if form.others and not form.sent and targets[len(form.own) :]:
            self._plan.note(f"{where}: writes the first of dst_buff alone")
        return Move(read, written, switch="group" in form.own[0])

    def _puts(  # noqa: PLR0912  (a rule a branch)
        self, entry: OperationShape, kind: str, cut: _SpanReader
    ) -> Iterator[OneTime]:
        """What threads or proxies do for each entry of dst_buff."""
        sources, targets, name, where = entry["src_buff"], entry["dst_buff"], entry["name"], cut.where
        if kind not in self._ends:
            self._plan.note(f"{where}: does nothing with channel_type {kind}")
            return
        of_targets = not name.endswith("pkt")  # which of the two sizes the runtime takes
        form, port = FORMS[name], kind == "port"
        channels = self._connections("port", entry, where) if port else ()
        if port and not channels:
            raise ProgramError(f"{where}: needs a port channel, channel_ids names none")
        if port and len(channels) < len(targets):
            self._plan.fault(
                f"{where}: {len(channels)} channel_ids for {len(targets)} buffers; others use the "
                "first channel"
            )
            channels += channels[:1] * len(targets)
        if name == "ppkt" and port:
            self._plan.note(f"{where}: sends packets as they are, from the executor's first plan")
        for at, target in enumerate(targets):
            source = sources[0] if name == "rppkt" or at >= len(sources) else sources[at]
            if name != "rppkt" and at >= len(sources):
                self._plan.note(
                    f"{where}: src_buff has {len(sources)} entries, dst_buff {len(targets)}; "
                    "others begin at 0"
                )
                if not of_targets:
                    continue
                source = {**sources[0], "index": 0, "size": 0}
            elif not port and source.get("type") != sources[0].get("type"):
                self._plan.note(
                    f"{where}: the runtime reads all from the kind of buffer of the first src_buff"
                )
                source = cast("BufferShape", {**source, "type": sources[0].get("type")})
            count = cut.count(target if of_targets else source)
            read = cut.spans("any packets" if name == "ppkt" and port else form.first, source, count)
            write = cut.spans(form.sent, target, count)
            if not port:
                yield Move(read, write)
                continue
            if name == "rppkt" and not at:
                yield Move(read, ())
                yield Synchronize()
            yield Move(read, write, channels[at], at)
        if name in {"pws", "pwsf"} and not port:
            self._plan.note(f"{where}: signals nothing on memory channels")
        elif name in {"pws", "pwsf"}:
            yield Signal(channels[: len(targets)])
            if name == "pwsf":
                yield Flush(channels[: len(targets)])


@dataclass(slots=True)
class _SpanReader:
    """Entries of src_buff and dst_buff to spans: a block's part of its group, or the chunks of a pipeline."""

    plan: _Plan
    where: str
    buffers: Sequence[tuple[int, Memory]]
    groups: Sequence[tuple[Memory, tuple[int, ...]]]
    part: tuple[int, int] | None
    looped: int | None
    counts: set[int] = field(default_factory=set)

    def count(self, entry: BufferShape) -> int:
        """How many chunks the operation handles, by the entry that the runtime looks at."""
        size = entry["size"]
        if not size:
            raise ProgramError(f"{self.where}: size must be at least 1, got {size}")
        chunks = size if self.looped is None else self.looped
        if size < chunks:
            self.plan.fault(
                f"{self.where}: {size} of the {chunks} chunks of its pipeline; later iterations "
                "run beyond its end"
            )
        elif size > chunks:
            self.plan.note(f"{self.where}: {size} chunks, of which the pipeline handles {chunks}")
        return self._cut(size)[1]

    def spans(self, end: str, entry: BufferShape, count: int, *, writes: bool = False) -> tuple[Span, ...]:
        """What an entry is at an end of an operation, as `Form` names it."""
        where, _, packets = end.partition(" ")
        if where == "group":
            number = _needed(entry, "switch_channel_id", self.where)
            memory, ranks = _named(self.groups, number, f"{self.where}: switch channel of the block")
            start = self._start(entry)
            return tuple(Span(memory, start, count, rank, bool(packets)) for rank in ranks)
        if where == "far":
            if "buffer_id" not in entry:
                raise ProgramError(f"{self.where}: must be a buffer of another rank, with buffer_id")
            rank, memory = _named(self.buffers, entry["buffer_id"], f"{self.where}: buffer of the block")
            return (Span(memory, self._start(entry), count, rank, bool(packets)),)
        of_scratch = end == "own packets" and not writes
        if of_scratch and entry.get("type", "s") != "s":
            self.plan.note(f"{self.where}: packets are read from scratch, whatever type says")
        if "type" not in entry:
            raise ProgramError(f"{self.where}: must be a buffer of the rank itself, with type")
        memory = Memory.SCRATCH if of_scratch else Memory(entry["type"])
        return (Span(memory, self._start(entry), count, None, bool(packets)),)

    def _start(self, entry: BufferShape) -> int:
        """The first chunk of the part."""
        self.counts.add(entry["size"])
        if len(self.counts - {0}) > 1:
            self.plan.note(f"{self.where}: sizes differ; the runtime takes one of them for all")
        return entry["index"] * self.plan.finer + self._cut(entry["size"])[0]

    def _cut(self, size: int) -> tuple[int, int]:
        """Where the part begins, and how long it is."""
        whole = size * self.plan.finer
        if self.part is not None:
            number, of = self.part
            return whole * number // of, whole * (number + 1) // of - whole * number // of
        return 0, whole if self.looped is None else self.looped * self.plan.finer
