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


@dataclass(frozen=True, slots=True)
class _Where:
    """A place of a plan, and what is said of all places: what the runtime breaks on, what it passes over."""

    name: str
    faults: dict[str, None]
    notes: dict[str, None]

    def within(self, name: str) -> _Where:
        """Another place of the plan."""
        return _Where(name, self.faults, self.notes)

    def fault(self, text: str) -> None:
        """The runtime breaks on it."""
        self.faults.setdefault(f"{self.name}: {text}")

    def note(self, text: str) -> None:
        """The runtime passes over it."""
        self.notes.setdefault(f"{self.name}: {text}")

    def error(self, text: str) -> ProgramError:
        """It cannot be told what is meant."""
        return ProgramError(f"{self.name}: {text}")

    def ignored(self, entry: Any, shape: type) -> None:
        """Keys that nobody reads."""
        strange = sorted(set(entry) - set(shape.__annotations__))
        if strange:
            self.note(f"{', '.join(map(shorten, strange[:8]))} passed over by the runtime")

    def needed(self, entry: Any, key: str) -> Any:
        """What stands under a key."""
        if key not in entry:
            raise self.error(f"needs {key}")
        return entry[key]

    def named(self, row: Sequence[_T], number: int, what: str) -> _T:
        """The entry of a list that a number names; `what` of whom it is."""
        if number >= len(row):
            raise self.error(f"{what} {number}, there are {len(row)}")
        return row[number]

    def ranks(self, found: list[int], ranks: int) -> list[int]:
        """Ranks of which there are so many."""
        if any(rank >= ranks for rank in found):
            raise self.error(f"must be ranks from 0 to {ranks - 1}, got {max(found)}")
        return found


class _Plan:
    def __init__(self, plan: PlanShape, kind: Kind | None, root: int | None) -> None:
        self._plan = plan
        self._gpus = plan["gpus"]
        self.ranks = len(self._gpus)
        self.where = _Where("plan", {}, {})
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

    def program(self) -> GlobalProgram:
        plan = self._plan
        self.where.ignored(plan, PlanShape)
        protocol = plan["protocol"]
        if protocol not in {"Simple", "LL"}:
            self.where.note(f"protocol {shorten(protocol)} is taken for Simple")
            protocol = "Simple"
        self._check_numbers()
        first = self._gpus[0]
        whole = "output_chunks" if self._kind.gathers else "input_chunks"
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
        return replace(program, faults=tuple(self.where.faults), notes=tuple(self.where.notes))

    def _part(self, rank: int, gpu: GpuShape) -> RankPart:
        where, finer = self.where.within(f"rank {rank}"), self.finer
        if gpu["id"] != rank:
            raise ProgramError(f"gpus must be in the order of their ids: entry {rank} has id {gpu['id']}")
        where.ignored(gpu, GpuShape)
        lists = _Rank(self, rank, gpu)
        blocks = tuple(
            _BlockReader(self, lists, place, block).block() for place, block in enumerate(gpu["threadblocks"])
        )
        if len(blocks) > limits.BLOCKS:
            where.note(
                f"{len(blocks)} thread blocks must be resident at once; not every GPU has room for them"
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
            self.where.fault(
                f"num_threads_per_block is {threads}, kernels are built for 1 to {limits.THREADS}"
            )
        alignment = self._plan.get("buffer_alignment", limits.ALIGNMENT)
        if not alignment or alignment % limits.ALIGNMENT:
            self.where.fault(
                f"buffer_alignment is {alignment}; device code moves {limits.ALIGNMENT} bytes at a time"
            )
        if self._plan.get("reuse_resources", False):
            self.where.note(
                f"reuses {limits.SCRATCH_BYTES >> 20} MiB of scratch; judged for sizes at "
                "which that is enough"
            )

    def _check_chunks(self, program: GlobalProgram) -> None:
        for rank, part in enumerate(program.parts):
            size = sizes(program, rank)
            for memory, said in ((Memory.INPUT, part.input_chunks), (Memory.OUTPUT, part.output_chunks)):
                where, name = self.where.within(f"rank {rank}"), f"{memory.name.lower()}_chunks is"
                if not said:
                    where.fault(f"{name} 0, by which the runtime divides")
                elif said != size[memory]:
                    where.fault(
                        f"{name} {said // self.finer}, {program.kind} of {program.chunks // self.finer} "
                        f"chunks has {size[memory] // self.finer}: sizes of chunks differ, or "
                        "chunks end elsewhere"
                    )


class _Rank:
    """Channels and remote buffers of a rank, which the lists of its blocks name by number."""

    def __init__(self, plan: _Plan, rank: int, gpu: GpuShape) -> None:
        where = plan.where.within(f"rank {rank} channels")
        self.number = rank
        self.channels: dict[str, list[Connection]] = {"memory": [], "port": []}
        self.groups: list[tuple[Memory, tuple[int, ...]]] = []
        numbers: Counter[tuple[str, int]] = Counter()
        for entry in gpu["channels"]:
            kind = entry["channel_type"]
            if kind == "switch":
                for group in where.needed(entry, "rank_groups"):
                    members = tuple(where.ranks(group["ranks"], plan.ranks))
                    self.groups.append((Memory(where.needed(entry, "buffer_type")), members))
                    if rank not in members:
                        shown = ", ".join(map(str, members[:8]))
                        where.fault(f"a switch channel is for ranks {shown} alone")
                continue
            for peer in where.ranks(where.needed(entry, "connected_to"), plan.ranks):
                self.channels[kind].append(Connection(peer, kind, numbers[kind, peer]))
                numbers[kind, peer] += 1
                if peer == rank:
                    where.fault("connected to itself")
        self.buffers = gpu["remote_buffers"]
        where.within(f"rank {rank} remote_buffers").ranks(
            [entry["rank"] for entry in self.buffers], plan.ranks
        )


class _BlockReader:
    """One thread block: its lists of connections and buffers, and its operations."""

    def __init__(self, plan: _Plan, rank: _Rank, place: int, entry: BlockShape) -> None:
        self._plan = plan
        self._entry = entry
        self._where = where = plan.where.within(f"rank {rank.number} block {place}")
        if entry["id"] != place:
            raise where.error(f"ids must be 0, 1, 2 in the order of the list, got {entry['id']}")
        where.ignored(entry, BlockShape)
        self._ends: dict[str, list[Connection]] = {"memory": [], "port": []}
        self._groups: list[tuple[Memory, tuple[int, ...]]] = []
        self._buffers: dict[str, list[tuple[int, Memory]]] = {"memory": [], "port": []}
        for listed in entry["channels"]:
            kind, what = listed["channel_type"], f"{listed['channel_type']} channel of the rank"
            for number in listed["channel_ids"]:
                if kind == "switch":
                    self._groups.append(where.named(rank.groups, number, what))
                else:
                    self._ends[kind].append(where.named(rank.channels[kind], number, what))
            self._fits(self._groups if kind == "switch" else self._ends[kind], f"{kind} channels")
        for references in entry.get("remote_buffer_refs", []):
            access = references["access_channel_type"]
            if access not in self._buffers:
                where.note(f"remote buffers by {shorten(access)} are passed over")
                continue
            for number in references["remote_buffer_ids"]:
                buffer = where.named(rank.buffers, number, "remote buffer")
                if access not in buffer["access_channel_types"]:
                    where.fault(
                        f"remote buffer {number} is not declared for {access}; the runtime takes another one"
                    )
                self._buffers[access].append((buffer["rank"], Memory(buffer["type"])))
            self._fits(self._buffers[access], "remote buffers")

    def _fits(self, row: Sequence[object], what: str) -> None:
        if len(row) > limits.CHANNELS:
            self._where.fault(f"{len(row)} {what}, the executor has room for {limits.CHANNELS}")

    def block(self) -> ThreadBlock:
        """All operations."""
        operations: list[Operation] = []
        count = 0
        for place, entry in enumerate(self._entry["ops"]):
            where = f"{self._where.name} op {place}"
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
                raise self._where.error(f"at most {MAX_OPERATIONS} operations are read")
        if count > limits.OPERATIONS:
            self._where.fault(f"{count} operations, the executor takes {limits.OPERATIONS}")
        return ThreadBlock(tuple(operations), connections=(*self._ends["memory"], *self._ends["port"]))

    def _operations(self, entry: OperationShape, place: str, looped: int | None) -> Iterator[OneTime]:
        """What the device code does for an entry; `looped`: the chunks of the pipeline that it is in."""
        name, kind = entry["name"], entry.get("channel_type", "none")
        where = self._where.within(f"{place} ({name})")
        where.ignored(entry, OperationShape)
        self._check(entry, where)
        match name:
            case "nop":
                yield Synchronize()
            case "barrier":
                number = where.needed(entry, "barrier_id")
                if number >= limits.BARRIERS:
                    where.fault(f"barrier {number}, the executor has {limits.BARRIERS}")
                yield Barrier(number, where.needed(entry, "num_threadblocks"))
            case "sem_acquire" | "sem_release":
                make = Acquire if name == "sem_acquire" else Release
                yield make(tuple(where.needed(entry, "semaphore_ids")))
            case "flush":
                where.note("the runtime takes its count from dst_buff, and flushes nothing")
            case "signal" | "rlxsignal" | "wait" | "rlxwait":
                if kind not in self._ends:
                    where.note(f"does nothing with channel_type {kind}")
                    return
                relaxed = name.startswith("rlx") and kind == "memory"
                channels = self._connections(kind, entry, where)
                yield Signal(channels, relaxed) if name.endswith("signal") else Wait(channels, relaxed)
            case _:
                yield from self._moves(entry, kind, where, looped)

    def _check(self, entry: OperationShape, where: _Where) -> None:
        if entry.get("reduce_op", "sum") != "sum":
            where.note(f"reduce_op {shorten(entry['reduce_op'])} is passed over; the runtime adds")
        for what, row, most in (
            ("channels", entry.get("channel_ids", []), limits.CHANNELS_OF_OPERATION),
            ("buffers", entry.get("src_buff", []), limits.BUFFERS_OF_OPERATION),
            ("buffers", entry.get("dst_buff", []), limits.BUFFERS_OF_OPERATION),
            ("semaphores", entry.get("semaphore_ids", []), limits.SEMAPHORES_OF_OPERATION),
        ):
            if len(row) > most:
                where.fault(f"more than {most} {what} write past their array")

    def _connections(self, kind: str, entry: OperationShape, where: _Where) -> tuple[int, ...]:
        """Places among the block's connections: by memory, then those of proxies."""
        first = 0 if kind == "memory" else len(self._ends["memory"])
        numbers = where.needed(entry, "channel_ids")
        for number in numbers:
            where.named(self._ends[kind], number, f"{kind} channel of the block")
        return tuple(first + number for number in numbers)

    # ---- what moves data

    def _moves(
        self, entry: OperationShape, kind: str, where: _Where, looped: int | None
    ) -> Iterator[OneTime]:
        name = entry["name"]
        if not entry.get("src_buff") or not entry.get("dst_buff"):
            raise where.error("needs src_buff and dst_buff")
        if name.endswith("pkt") and looped is not None:
            where.note("packets know nothing of iterations; each handles all")
            looped = None
        group = None
        if "tbg_info" in entry:
            info = entry["tbg_info"]
            if info["tb_id"] >= info["tbg_size"]:
                raise where.error(f"tb_id must be below {info['tbg_size']}, got {info['tb_id']}")
            group = info["tb_id"], info["tbg_size"]
            if looped is not None:
                where.fault("tbg_info in a pipeline; later iterations run beyond the block's part")
                looped = None
        cut = _SpanReader(self._plan.finer, where, self._buffers.get(kind, []), self._groups, group, looped)
        if FORMS[name].own:
            yield self._move(entry, kind, cut)
        else:
            yield from self._puts(entry, kind, cut)

    def _move(self, entry: OperationShape, kind: str, cut: _SpanReader) -> Move:
        """What threads do for one entry of dst_buff, or in sums for several."""
        sources, targets, name, where = entry["src_buff"], entry["dst_buff"], entry["name"], cut.where
        form, ends = FORMS[name], len(sources) + len(targets)
        if not form.others and ends > 2:
            where.note("only the first of src_buff and dst_buff are looked at")
        if kind != "memory" and (name == "get" or ("far" in form.others + form.sent and ends > 2)):
            raise where.error(f"is for memory channels, got {kind}")
        if len(targets) < len(form.own):
            raise where.error("needs two local buffers in dst_buff")
        count = cut.count(sources[0])
        if name == "get" and sources[0]["index"] != targets[0]["index"]:
            where.note("the runtime exchanges where source and target begin")
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
            where.note("writes the first of dst_buff alone")
        return Move(read, written, switch="group" in form.own[0])

    def _puts(  # noqa: PLR0912  (a rule a branch)
        self, entry: OperationShape, kind: str, cut: _SpanReader
    ) -> Iterator[OneTime]:
        """What threads or proxies do for each entry of dst_buff."""
        sources, targets, name, where = entry["src_buff"], entry["dst_buff"], entry["name"], cut.where
        if kind not in self._ends:
            where.note(f"does nothing with channel_type {kind}")
            return
        of_targets = not name.endswith("pkt")  # which of the two sizes the runtime takes
        form, port = FORMS[name], kind == "port"
        channels = self._connections("port", entry, where) if port else ()
        if port and not channels:
            raise where.error("needs a port channel, channel_ids names none")
        if port and len(channels) < len(targets):
            where.fault(
                f"{len(channels)} channel_ids for {len(targets)} buffers; others use the first channel"
            )
            channels += channels[:1] * len(targets)
        if name == "ppkt" and port:
            where.note("sends packets as they are, from the executor's first plan")
        for at, target in enumerate(targets):
            source = sources[0] if name == "rppkt" or at >= len(sources) else sources[at]
            if name != "rppkt" and at >= len(sources):
                where.note(f"src_buff has {len(sources)} entries, dst_buff {len(targets)}; others begin at 0")
                if not of_targets:
                    continue
                source = {**sources[0], "index": 0, "size": 0}
            elif not port and source.get("type") != sources[0].get("type"):
                where.note("the runtime reads all from the kind of buffer of the first src_buff")
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
            where.note("signals nothing on memory channels")
        elif name in {"pws", "pwsf"}:
            yield Signal(channels[: len(targets)])
            if name == "pwsf":
                yield Flush(channels[: len(targets)])


@dataclass(slots=True)
class _SpanReader:
    """Entries of src_buff and dst_buff to spans: a block's part of its group, or the chunks of a pipeline."""

    finer: int
    where: _Where
    buffers: Sequence[tuple[int, Memory]]
    groups: Sequence[tuple[Memory, tuple[int, ...]]]
    part: tuple[int, int] | None
    looped: int | None
    counts: set[int] = field(default_factory=set)

    def count(self, entry: BufferShape) -> int:
        """How many chunks the operation handles, by the entry that the runtime looks at."""
        size = entry["size"]
        if not size:
            raise self.where.error(f"size must be at least 1, got {size}")
        chunks = size if self.looped is None else self.looped
        if size < chunks:
            self.where.fault(
                f"{size} of the {chunks} chunks of its pipeline; later iterations run beyond its end"
            )
        elif size > chunks:
            self.where.note(f"{size} chunks, of which the pipeline handles {chunks}")
        return self._cut(size)[1]

    def spans(self, end: str, entry: BufferShape, count: int, *, writes: bool = False) -> tuple[Span, ...]:
        """What an entry is at an end of an operation, as `MoveForm` names it."""
        where, _, packets = end.partition(" ")
        if where == "group":
            number = self.where.needed(entry, "switch_channel_id")
            memory, ranks = self.where.named(self.groups, number, "switch channel of the block")
            start = self._start(entry)
            return tuple(Span(memory, start, count, rank, bool(packets)) for rank in ranks)
        if where == "far":
            if "buffer_id" not in entry:
                raise self.where.error("must be a buffer of another rank, with buffer_id")
            rank, memory = self.where.named(self.buffers, entry["buffer_id"], "buffer of the block")
            return (Span(memory, self._start(entry), count, rank, bool(packets)),)
        of_scratch = end == "own packets" and not writes
        if of_scratch and entry.get("type", "s") != "s":
            self.where.note("packets are read from scratch, whatever type says")
        if "type" not in entry:
            raise self.where.error("must be a buffer of the rank itself, with type")
        memory = Memory.SCRATCH if of_scratch else Memory(entry["type"])
        return (Span(memory, self._start(entry), count, None, bool(packets)),)

    def _start(self, entry: BufferShape) -> int:
        """The first chunk of the part."""
        self.counts.add(entry["size"])
        if len(self.counts - {0}) > 1:
            self.where.note("sizes differ; the runtime takes one of them for all")
        return entry["index"] * self.finer + self._cut(entry["size"])[0]

    def _cut(self, size: int) -> tuple[int, int]:
        """Where the part begins, and how long it is."""
        whole = size * self.finer
        if self.part is not None:
            number, of = self.part
            return whole * number // of, whole * (number + 1) // of - whole * number // of
        return 0, whole if self.looped is None else self.looped * self.finer
