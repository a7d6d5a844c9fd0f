"""MSCCL++'s execution plan (JSON) to a program: what its device code does with it, not what it may mean.

Where fields contradict each other, operations become what the runtime does with them, and a note says so;
what it breaks on becomes a fault. Thread block groups and pipelines are resolved: chunks are cut so small
that each part is whole chunks, and pipelines are gone through a fixed number of times.
"""

from __future__ import annotations

import math
from dataclasses import replace

from arborcast.backends.programs.checking.memory import sizes
from arborcast.backends.programs.mscclpp import limits
from arborcast.backends.programs.mscclpp.blocks import BlockReader
from arborcast.backends.programs.mscclpp.entries import (
    MAX_CELLS,
    MAX_NUMBER,
    MAX_OPERATIONS,
    Entry,
    Reading,
    a_flag,
    a_list,
    a_number,
    a_text,
    an_object,
)
from arborcast.backends.programs.mscclpp.lists import RankLists
from arborcast.backends.programs.program import GlobalProgram, Memory, ProgramError, Protocol, RankPart
from arborcast.synth.collective import NAMED_KINDS, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.reading import parse_json

MAX_FILE_BYTES = 64 << 20
"""Bytes beyond which a file is refused."""

_MAX_FINER = 1 << 10

_PLAN = {
    "name", "collective", "protocol", "inplace", "gpus", "reuse_resources", "use_double_scratch_buffer",
    "buffer_alignment", "min_message_size", "max_message_size", "num_threads_per_block",
}  # fmt: skip
_GPU = {
    "id", "input_chunks", "output_chunks", "scratch_chunks",
    "threadblocks", "channels", "remote_buffers", "semaphores",
}  # fmt: skip


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
        return _Plan(an_object(parse_json(text, place), "plan"), kind, root, iterations).program()
    except ProgramError as error:
        raise ProgramError(f"{place}: {error}") from error
    except InputError as error:
        raise ProgramError(str(error)) from error


class _Plan:
    def __init__(self, plan: Entry, kind: Kind | None, root: int | None, iterations: int) -> None:
        self._plan = plan
        self._gpus = [
            an_object(gpu, f"gpus[{rank}]") for rank, gpu in enumerate(a_list(plan, "gpus", "plan", 4096))
        ]
        if len(self._gpus) < 2:
            raise ProgramError(f"gpus must be at least 2, got {len(self._gpus)}")
        self._kind = self._kind_of(kind)
        self._root = self._root_of(root)
        self._reading = Reading(self._finer(iterations), iterations)
        self._double = a_flag(plan, "use_double_scratch_buffer", "plan", default=False)

    def program(self) -> GlobalProgram:
        plan = self._plan
        self._reading.ignored(plan, _PLAN, "plan")
        protocol = a_text(plan, "protocol", "plan")
        if protocol not in {"Simple", "LL"}:
            self._reading.note(f"plan: protocol {shorten(protocol)} is taken for Simple")
            protocol = "Simple"
        self._check_numbers()
        in_place = a_flag(plan, "inplace", "plan")
        wanted = self._gpus[0]
        whole = "output_chunks" if self._kind in {Kind.ALLGATHER, Kind.GATHER} else "input_chunks"
        chunks = a_number(wanted, whole, "gpus[0]", 0, MAX_CELLS) * self._reading.finer
        if not chunks:
            raise ProgramError(f"gpus[0]: {whole} is 0, by which the runtime divides")
        if chunks * len(self._gpus) > MAX_CELLS:
            raise ProgramError(
                f"at most {MAX_CELLS} chunks on all ranks are read, got {chunks} on {len(self._gpus)}"
            )
        parts = tuple(self._part(rank, gpu) for rank, gpu in enumerate(self._gpus))
        scratch = sum(part.scratch_chunks for part in parts)
        if scratch > MAX_CELLS:
            raise ProgramError(f"at most {MAX_CELLS} chunks of scratch on all ranks are read, got {scratch}")
        least = a_number(plan, "min_message_size", "plan", 0, 1 << 64, default=0)
        most = a_number(plan, "max_message_size", "plan", 0, 1 << 64, default=1 << 64)
        program = GlobalProgram(
            name=a_text(plan, "name", "plan"),
            kind=self._kind,
            root=self._root,
            chunks=chunks,
            parts=parts,
            protocol=Protocol(protocol),
            in_place=in_place,
            out_of_place=not in_place,
            least_bytes=least,
            most_bytes=None if most >= (1 << 64) - 1 else most,
            double_scratch=self._double,
        )
        self._check_chunks(program)
        if program.operation_count > MAX_OPERATIONS:
            raise ProgramError(f"at most {MAX_OPERATIONS} operations are read, got {program.operation_count}")
        return replace(
            program,
            faults=tuple(dict.fromkeys(self._reading.faults)),
            notes=tuple(dict.fromkeys(self._reading.notes)),
        )

    def _part(self, rank: int, gpu: Entry) -> RankPart:
        where, finer = f"rank {rank}", self._reading.finer
        if a_number(gpu, "id", where, 0, MAX_NUMBER) != rank:
            raise ProgramError(f"gpus must be in the order of their ids: entry {rank} has id {gpu['id']}")
        self._reading.ignored(gpu, _GPU, where)
        lists = RankLists(self._reading, rank, gpu, len(self._gpus))
        blocks = [
            BlockReader(self._reading, lists, place, an_object(block, f"{where} threadblock")).block()
            for place, block in enumerate(a_list(gpu, "threadblocks", where, 4096))
        ]
        if len(blocks) > limits.BLOCKS:
            self._reading.note(
                f"{where}: {len(blocks)} thread blocks must be resident at once; not every GPU "
                "has room for them"
            )
        semaphores = tuple(
            a_number(an_object(entry, "semaphore"), "init_value", f"{where} semaphores", 0, MAX_NUMBER)
            for entry in a_list(gpu, "semaphores", where, 4096, default=True)
        )
        return RankPart(
            tuple(blocks),
            a_number(gpu, "input_chunks", where, 0, MAX_CELLS) * finer,
            a_number(gpu, "output_chunks", where, 0, MAX_CELLS) * finer,
            a_number(gpu, "scratch_chunks", where, 0, MAX_CELLS // finer) * finer,
            semaphores,
        )

    def _kind_of(self, kind: Kind | None) -> Kind:
        name = a_text(self._plan, "collective", "plan")
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

    def _finer(self, iterations: int) -> int:
        """In how many parts chunks are cut, so that groups of blocks and pipelines handle whole ones."""
        parts = {1}
        for gpu in self._gpus:
            for block in a_list(gpu, "threadblocks", "gpu", 4096):
                for one in a_list(an_object(block, "threadblock"), "ops", "threadblock", MAX_OPERATIONS):
                    operation = an_object(one, "op")
                    if "tbg_info" in operation:
                        parts.add(
                            a_number(
                                an_object(operation["tbg_info"], "tbg_info"), "tbg_size", "tbg_info", 1, 4096
                            )
                        )
                    if operation.get("name") == "pipeline":
                        parts.add(iterations)
        finer = math.lcm(*parts)
        if finer > _MAX_FINER:
            raise ProgramError(
                f"thread block groups cut chunks in {finer} parts, at most {_MAX_FINER} are read"
            )
        return finer

    def _check_numbers(self) -> None:
        threads = a_number(self._plan, "num_threads_per_block", "plan", 0, MAX_NUMBER, default=limits.THREADS)
        if not 0 < threads <= limits.THREADS:
            self._reading.fault(
                f"plan: num_threads_per_block is {threads}, kernels are built for 1 to {limits.THREADS}"
            )
        alignment = a_number(self._plan, "buffer_alignment", "plan", 0, MAX_NUMBER, default=limits.ALIGNMENT)
        if not alignment or alignment % limits.ALIGNMENT:
            self._reading.fault(
                f"plan: buffer_alignment is {alignment}; device code moves {limits.ALIGNMENT} bytes at a time"
            )
        if a_flag(self._plan, "reuse_resources", "plan", default=False):
            self._reading.note(
                f"plan: reuses {limits.SCRATCH_BYTES >> 20} MiB of scratch; judged for sizes at "
                "which that is enough"
            )

    def _check_chunks(self, program: GlobalProgram) -> None:
        for rank, part in enumerate(program.parts):
            size = sizes(program, rank)
            for memory, said in ((Memory.INPUT, part.input_chunks), (Memory.OUTPUT, part.output_chunks)):
                name = "input_chunks" if memory is Memory.INPUT else "output_chunks"
                if not said:
                    self._reading.fault(f"rank {rank}: {name} is 0, by which the runtime divides")
                elif said != size[memory]:
                    self._reading.fault(
                        f"rank {rank}: {name} is {said // self._reading.finer}, {program.kind} of "
                        f"{program.chunks // self._reading.finer} "
                        f"chunks has {size[memory] // self._reading.finer}: sizes of chunks differ, or "
                        "chunks end elsewhere"
                    )
