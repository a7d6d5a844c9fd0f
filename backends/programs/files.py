"""Programs in files, whatever the runtime: what a file is shows from its text."""

from __future__ import annotations

from pathlib import Path

from arborcast.backends.programs import mscclpp, nccl_graph, sccl
from arborcast.backends.programs.as_schedule import as_schedule
from arborcast.backends.programs.msccl import reader, writer
from arborcast.backends.programs.program import GlobalProgram, ProgramError
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.formats.atomic import write_atomically
from arborcast.synth.formats.reading import read_text, shorten_path
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Topology

_MARKS = ('"gpus"', '"num_threads_per_block"', '"inplace"', '"msccl_type"')


def holds_program(head: str) -> bool:
    """Whether the beginning of a text is one of another runtime's file, not of a schedule of ours."""
    text = head.lstrip()
    if '"arborcast.' in text:
        return False
    return text.startswith("<") or (text.startswith("{") and any(mark in text for mark in _MARKS))


def read_program(path: Path | str, *, kind: Kind | None = None, root: int | None = None) -> GlobalProgram:
    """The program in a file: MSCCL's XML or MSCCL++'s execution plan.

    Args:
        path: of the file.
        kind: what the program does, where the file's name for it is none that we know.
        root: of a kind that has one, where the file does not say it; 0 where None.

    Raises:
        InputError: it cannot be read, is too large, or holds no program that can be told.
    """
    text, place = read_text(path, max_bytes=reader.MAX_FILE_BYTES), shorten_path(path)
    if _is_schedule(text):
        raise ProgramError(f"{place}: holds a schedule, no program; `synth import` makes one of ours of it")
    if '"arborcast.' in text[:4096]:
        raise ProgramError(f"{place}: must be a file of another runtime, got one of ours")
    if text.lstrip().startswith("{"):
        return mscclpp.read(text, place, kind=kind, root=root)
    return reader.read(text, place, kind=kind, root=root)


def holds_schedule(path: Path | str) -> bool:
    """Whether a file has rings for NCCL, or steps of SCCL: no thread blocks, but what a schedule says.

    Raises:
        InputError: it cannot be read, or is too large.
    """
    return _is_schedule(read_text(path, max_bytes=reader.MAX_FILE_BYTES))


def _is_schedule(text: str) -> bool:
    return "<graphs" in text[:4096] or '"msccl_type"' in text[:4096]


def read_as_schedule(
    path: Path | str, topology: Topology | None, *, kind: Kind | None = None, root: int | None = None
) -> Schedule:
    """What a file of another runtime does on a topology: a program, rings for NCCL, or steps of SCCL.

    SCCL's files bring a topology of their own, which is taken where there is no other.

    Raises:
        InputError: it cannot be read, or does not run on the topology.
    """
    text, place = read_text(path, max_bytes=reader.MAX_FILE_BYTES), shorten_path(path)
    if '"msccl_type"' in text[:4096]:
        found = sccl.read(text, place, topology=topology)
        does = found.collective
        if (kind is not None and kind is not does.kind) or (root is not None and root != does.root):
            wanted = f"{kind or does.kind}" + ("" if root is None else f" from {root}")
            has = f"{does.kind}" + ("" if does.root is None else f" from {does.root}")
            raise ProgramError(f"{place}: does {has}, not {wanted}")
        return found
    if topology is None:
        raise ProgramError(f"{place}: does not say what it runs on; name the topology (--topology)")
    if "<graphs" in text[:4096]:
        graphs = nccl_graph.read(text, place)
        if root is not None and not (kind or Kind.ALLREDUCE).has_root:
            raise ProgramError(f"{place}: {kind or Kind.ALLREDUCE} has no root, got {root}")
        asked = Collective.on(topology, kind or Kind.ALLREDUCE, root=root or 0)
        return nccl_graph.rings_as_schedule(graphs, topology, asked)
    return as_schedule(read_program(path, kind=kind, root=root), topology)


def write_program(program: GlobalProgram, path: Path | str) -> None:
    """Write MSCCL's XML, or MSCCL++'s plan of a one-sided program, whole or not at all.

    Raises:
        InputError: the file cannot be written, or the runtime has no such collective or operations.
    """
    write_atomically(path, mscclpp.write(program) if program.one_sided else writer.write(program))
