"""MSCCL's XML to a program: strict where the runtime is, and naming what it would pass over in silence.

What makes a file unreadable raises. What the runtime refuses, or breaks on, in a file that can still be
understood becomes a fault of the program, and what it ignores a note, so that the checker can go on to judge
the algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from arborcast.backends.programs.limits import MSCCL
from arborcast.backends.programs.msccl.elements import Element, parse
from arborcast.backends.programs.program import (
    After,
    Code,
    GlobalProgram,
    Memory,
    ProgramError,
    RankPart,
    Span,
    Step,
    ThreadBlock,
    kind_of_file,
    plain_name,
    root_of_file,
)
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.nccl_protocol import Protocol

MAX_CELLS = 1 << 24
"""Chunks of all buffers of all ranks beyond which a file is refused: the checker keeps a value for each."""

_NEWER = ("outofplace", "minBytes", "maxBytes")
"""Attributes that the first MSCCL did not have; later ones refuse files without."""

_CODES = {code.value: code for code in Code}
_ATTRIBUTES = 16


def read(
    text: str, place: str = "program", *, kind: Kind | None = None, root: int | None = None
) -> GlobalProgram:
    """The program that a file holds.

    Args:
        text: the XML, as MSCCL's own parser takes it (`elements`).
        place: what errors begin with.
        kind: what the program does, where the file's name for it is none that we know.
        root: of a kind that has one, which MSCCL's files do not say; 0 where None.

    Raises:
        ProgramError: not such a file, or one whose steps cannot be told; one line.
    """
    try:
        return _ProgramReader(text, kind, root).program()
    except InputError as error:
        raise ProgramError(f"{place}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Line:
    """One `step` element, before dependencies are resolved; `after` names blocks and numbers of the file."""

    step: Step | None
    after: tuple[int, int] | None
    number: int


class _ProgramReader:
    def __init__(self, text: str, kind: Kind | None, root: int | None) -> None:
        self.faults: list[str] = []
        self.notes: list[str] = []
        self._algo = parse(text)
        self._kind = kind
        self._root = root

    def program(self) -> GlobalProgram:
        algo = self._algo
        if algo.tag != "algo":
            raise ProgramError(f"must begin with an element algo, got {shorten(algo.tag)}")
        missing = [name for name in _NEWER if algo.get(name) is None]
        if missing:
            self.notes.append(
                f"algo: {', '.join(missing)} missing: the first MSCCL runs it, executor and RCCL refuse it"
            )
        kind = self._kind_of(algo)
        ranks = algo.whole("ngpus", 1, 4096)
        per_loop = algo.whole("nchunksperloop", 1, MSCCL.offset)
        root = root_of_file(kind, self._root, ranks)
        if root is not None:
            self.notes.append(
                f"{kind}: the file does not name its root; MSCCL runs it whatever root a call names"
            )
        in_place = bool(algo.whole("inplace", 0, 1))
        out_of_place = bool(algo.whole("outofplace", 0, 1, default=not in_place))
        protocol = algo.get("proto")
        if protocol not in set(Protocol):
            raise ProgramError(f"algo: proto must be {', '.join(Protocol)}, got {shorten(protocol)}")
        chunks = per_loop * ranks if kind in {Kind.GATHER, Kind.SCATTER} else per_loop
        if chunks * ranks > MAX_CELLS:
            raise ProgramError(f"at most {MAX_CELLS} chunks on all ranks are read, got {chunks} on {ranks}")
        self._ignored(algo, "gpu")
        return GlobalProgram(
            name=algo.get("name") or "",
            kind=kind,
            root=root,
            chunks=chunks,
            parts=self._parts(algo, ranks),
            protocol=Protocol(protocol),
            in_place=in_place,
            out_of_place=out_of_place,
            least_bytes=algo.whole("minBytes", 0, 1 << 62, default=0),
            most_bytes=algo.whole("maxBytes", 0, 1 << 62, default=0) or None,
            channels=algo.whole("nchannels", 0, 1 << 20),
            faults=tuple(self.faults),
            notes=tuple(self.notes),
        )

    def _kind_of(self, algo: Element) -> Kind:
        name = algo.get("coll")
        if name is None:
            raise ProgramError("algo: coll is missing")
        kind = kind_of_file(
            name,
            self._kind,
            key="algo: coll",
            unknown=f"coll must be a known collective, got {shorten(name)}; --collective says what it is",
        )
        if Kind.named(name) is kind and name != plain_name(kind):
            self.notes.append(
                f"algo: coll {shorten(name)}: MSCCL's executor and RCCL write {plain_name(kind)}"
            )
        return kind

    def _parts(self, algo: Element, ranks: int) -> tuple[RankPart, ...]:
        parts: dict[int, RankPart] = {}
        for element in algo:
            if element.tag == "gpu":
                rank = element.whole("id", 0, ranks - 1)
                if rank in parts:
                    raise ProgramError(f"gpu {rank}: must stand once, got it again")
                parts[rank] = self._part(element, rank)
                nodes = 1 + ranks + sum(1 + len(block) for block in element)
                if nodes > MSCCL.elements:
                    self.faults.append(f"gpu {rank}: {nodes} elements, the parser keeps {MSCCL.elements}")
        cells = sum(part.scratch_chunks for part in parts.values())
        if cells > MAX_CELLS:
            raise ProgramError(f"at most {MAX_CELLS} chunks of scratch on all ranks are read, got {cells}")
        missing = [rank for rank in range(ranks) if rank not in parts]
        if missing:
            raise ProgramError(f"ngpus is {ranks}, gpu {missing[0]} is missing")
        return tuple(parts[rank] for rank in range(ranks))

    def _part(self, gpu: Element, rank: int) -> RankPart:
        where = f"gpu {rank}"
        self._ignored(gpu, "tb", where)
        sizes = {memory: gpu.whole(f"{memory}_chunks", 0, MSCCL.offset, where) for memory in Memory}
        found: dict[int, ThreadBlock] = {}
        lines: dict[int, list[_Line]] = {}
        elements = [element for element in gpu if element.tag == "tb"]
        if len(elements) > MSCCL.children:
            self.faults.append(
                f"{where}: {len(elements)} thread blocks, the parser has room for {MSCCL.children}"
            )
        for element in elements:
            number = element.whole("id", 0, 1 << 20, where)
            if number in found:
                raise ProgramError(f"{where}: tb {number} must stand once, got it again")
            block = f"{where}, tb {number}"
            send, receive = (_peer(element, name, rank, block) for name in ("send", "recv"))
            channel = element.whole("chan", -1, 1 << 20, block)
            found[number] = ThreadBlock((), send, receive, channel)
            lines[number] = self._lines(element, block)
        for number in range(len(found)):
            if number not in found:
                raise ProgramError(
                    f"{where}: tb {number} is missing; {len(found)} must be 0 to {len(found) - 1}"
                )
        blocks = tuple(
            replace(found[number], operations=tuple(self._resolved(lines, number, where)))
            for number in range(len(found))
        )
        return RankPart(blocks, sizes[Memory.INPUT], sizes[Memory.OUTPUT], sizes[Memory.SCRATCH])

    def _lines(self, block: Element, where: str) -> list[_Line]:
        """The steps of a block with the numbers that the device counts: nops count where they wait."""
        self._ignored(block, "step", where)
        if len(block) > MSCCL.children:
            self.faults.append(f"{where}: {len(block)} elements, the parser has room for {MSCCL.children}")
        lines: list[_Line] = []
        number, waits = 0, False
        for place, element in enumerate(element for element in block if element.tag == "step"):
            step_at = f"{where}, step {place}"
            said = element.whole("s", 0, 1 << 20, step_at)
            if said >= MSCCL.steps:
                self._once(f"{where}: step {said}, MSCCL is built for 0 to {MSCCL.steps - 1} by default")
            if said != place:
                self._note(f"{where}: step {place} is numbered {said}, which MSCCL does not use")
            depends = (
                element.whole("depid", -1, 1 << 20, step_at),
                element.whole("deps", -1, 1 << 20, step_at),
            )
            after = None if depends[0] < 0 else depends
            step = self._step(element, step_at)
            if step is None and after is None:
                self._note(f"{step_at}: a nop without a dependency does nothing and is not counted")
                continue
            if step is not None and waits and after is None:
                self._once(
                    f"{step_at}: must have a dependency of its own, as a nop before it has one (refused)"
                )
            waits = step is None
            lines.append(_Line(step, after, number))
            number += 1
        if waits:
            self._note(f"{where}: ends with a nop, whose dependency nobody waits for")
        self._check_fused(lines, where)
        return lines

    def _check_fused(self, lines: list[_Line], where: str) -> None:
        """Look at reductions into one place that follow each other: the runtime executes them as one."""
        run: list[Step] = []
        for line in (*lines, _Line(None, None, 0)):
            step = line.step if line.step is not None and line.step.code is Code.REDUCE else None
            goes_on = step is not None and run and line.after is None and not run[-1].posts
            if not goes_on or step is None or _place(step) != _place(run[-1]):
                if len(run) > MSCCL.fused:
                    self._once(
                        f"{where}: {len(run)} reductions into one place are fused, room is for {MSCCL.fused}"
                    )
                for one in run:
                    if one.count != run[-1].count:
                        self._once(f"{where}: reductions of {one.count} and {run[-1].count} chunks are fused")
                run = []
            if step is not None:
                run.append(step)

    def _step(self, element: Element, where: str) -> Step | None:
        name = element.get("type")
        spans = {
            end: (_memory(element, f"{end}buf", where), element.whole(f"{end}off", -1, MSCCL.offset, where))
            for end in ("src", "dst")
        }
        count = element.whole("cnt", 0 if name == "nop" else -1, MSCCL.offset, where)
        posts = bool(element.whole("hasdep", 0, 1, where))
        if name == "nop":
            if posts:
                self._note(f"{where}: a nop posts nothing, whatever its hasdep")
            return None
        if name not in _CODES:
            raise ProgramError(f"{where}: type must be {', '.join(_CODES)} or nop, got {shorten(name)}")
        code = _CODES[name]
        if count < 1 or count > MSCCL.count:
            what = "moves nothing" if count == 0 else f"the runtime takes 1 to {MSCCL.count}"
            self._once(f"{where}: cnt is {count}, {what}")
        count = max(count, 0)
        return Step(
            code,
            Span(*spans["src"], count) if code.reads else None,
            Span(*spans["dst"], count) if code.writes else None,
            posts=posts,
        )

    def _resolved(self, lines: dict[int, list[_Line]], number: int, where: str) -> Iterator[Step]:
        """Steps of a block, with those that they wait for by their place among steps that are no nops."""
        waited: list[After] = []
        for line in lines[number]:
            if line.after is not None:
                waited.append(self._after(lines, line.after, f"{where}, tb {number}, step {line.number}"))
            if line.step is not None:
                yield replace(line.step, after=tuple(waited))
                waited = []

    def _after(self, lines: dict[int, list[_Line]], named: tuple[int, int], where: str) -> After:
        block, number = named
        if block not in lines:
            raise ProgramError(f"{where}: waits for tb {block}, there are {len(lines)}")
        if block >= MSCCL.blocks_waited_for:
            self._once(
                f"{where}: waits for tb {block}, the runtime can name 0 to {MSCCL.blocks_waited_for - 1}"
            )
        steps = [line.number for line in lines[block] if line.step is not None]
        return After(block, sum(at < number for at in steps))

    def _ignored(self, element: Element, known: str, where: str = "algo") -> None:
        if len(element.attributes) > _ATTRIBUTES:
            self.faults.append(
                f"{where}: {len(element.attributes)} attributes, the parser keeps {_ATTRIBUTES}"
            )
        for child in element:
            if child.tag != known:
                self._note(f"{where}: element {shorten(child.tag)} is ignored")

    def _note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < 50:
            self.notes.append(text)

    def _once(self, text: str) -> None:
        if len(self.faults) < 50:
            self.faults.append(text)


def _place(reduction: Step) -> tuple[Memory, Memory, int]:
    """What reductions that are fused have alike."""
    source, target = reduction.source, reduction.target
    assert source is not None and target is not None, "a reduction has both"
    return source.memory, target.memory, target.start


def _peer(element: Element, name: str, rank: int, where: str) -> int | None:
    peer = element.whole(name, -1, 4095, where)
    if peer == rank:
        raise ProgramError(f"{where}: {name} must be another rank, got {peer}")
    return None if peer < 0 else peer


def _memory(element: Element, name: str, where: str) -> Memory:
    value = element.get(name)
    if value not in set(Memory):
        raise ProgramError(f"{where}: {name} must be {', '.join(Memory)}, got {shorten(value)}")
    return Memory(value)
