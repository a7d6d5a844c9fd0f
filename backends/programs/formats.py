"""Files of other runtimes and simulators: a row of `FORMATS` for each, from which the rest takes them.

What `synth export --to` offers and says, what `verify`, `run` and `import` recognize, and which tables become
folders (`folder`) comes of the rows. They name functions of this room instead of importing them, so that
the command can say which formats there are without what these need.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arborcast.backends.programs.program import GlobalProgram
    from arborcast.synth.collective import Kind
    from arborcast.synth.implicit_schedule import AnySchedule
    from arborcast.synth.schedule import Schedule
    from arborcast.synth.topology import Topology

MAX_FILE_BYTES = 64 << 20
"""Bytes beyond which a file is refused."""

_HEAD = 4096
"""Characters by which a file is recognized."""

OPTIONS = {
    "in_place": "--out-of-place",
    "protocol": "--protocol",
    "chunks": "--chunks",
    "channels": "--channels",
    "ranks_per_host": "--ranks-per-host",
    "least_bytes": "--sizes",
    "most_bytes": "--sizes",
    "pieces": "--pieces",
    "gpus": "--gpus",
}
"""What an export may be told, and the option of the command that says it."""


@dataclass(frozen=True, slots=True)
class Files:
    """What an export gives that is no program.

    Attributes:
        contents: of each file, by what follows the path that was asked for in its name.
        said: what it is, in words; where empty, the names of the first and the last file.
    """

    contents: Mapping[str, str | bytes]
    said: str = ""


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of file; functions are given as `module:function`.

    Attributes:
        about: what it is, for the help of the command.
        export: takes a schedule, and those of `OPTIONS` as keywords that the format knows; gives `Files`, or
            the program that `write` makes text of.
        write: takes a program, gives its text; empty where `export` gives `Files`.
        read: takes text, the place that errors begin with, kind and root where the file may leave them
            open, and gives a program; or takes the topology, too, and gives a schedule. Empty where nobody
            reads such files back.
        begins: the first character of such files.
        marks: one of these is among the first characters.
        table: the `folder.TableFolder` of those that tables are exported to.
    """

    about: str
    export: str
    write: str = ""
    read: str = ""
    begins: str = ""
    marks: tuple[str, ...] = ()
    table: str = ""

    def load(self, name: str) -> Any:
        """What one of its fields names."""
        module, _, function = getattr(self, name).partition(":")
        return getattr(import_module(f"{__package__}.{module}"), function)


FORMATS = {
    "msccl": Format(
        "its XML (legacy: Azure's executor reads it; RCCL has removed MSCCL)",
        export="exporting.export:export_program",
        write="msccl.writer:write",
        read="msccl.reader:read",
        begins="<",
        marks=("<",),
        table="folder:MSCCL",
    ),
    "mscclpp": Format(
        "an execution plan",
        export="exporting.one_sided:export_one_sided",
        write="mscclpp.writer:write",
        read="mscclpp.reader:read",
        begins="{",
        marks=('"gpus"', '"num_threads_per_block"', '"inplace"'),
        table="folder:MSCCLPP",
    ),
    "nccl-graph": Format(
        "rings and chains for stock NCCL",
        export="nccl_graph:export",
        read="nccl_graph:read_schedule",
        begins="<",
        marks=("<graphs",),
    ),
    "sccl": Format(
        "msccl-tools' JSON",
        export="sccl:export",
        read="sccl:read",
        begins="{",
        marks=('"msccl_type"',),
    ),
    "jax": Format(
        "a Python module of ppermutes; what JAX lowers is read",
        export="jax_module:export",
        read="stable_hlo:read",
        begins="module",
        marks=("sdy.mesh", "stablehlo."),
    ),
    "goal": Format("LogGOPSim", export="goal:export"),
    "chakra": Format("ASTRA-sim", export="chakra:export"),
}
"""Of two whose marks are in a file, the later one has it."""

TABLES = [name for name, row in FORMATS.items() if row.table]
"""Those that a table of schedules is exported to as a folder."""


def export_files(
    schedule: AnySchedule, target: str, path: Path, **wishes: Any
) -> tuple[str, GlobalProgram | None]:
    """Write a schedule in one of these formats; what was written, in words where it is no program.

    Args:
        schedule: a correct one.
        target: the format.
        path: of the file, or what the names of several begin with.
        wishes: some of `OPTIONS`.

    Raises:
        ProgramError: the target does not know a wish, or the schedule does not fit it.
        CollectiveError: blocks differ in size.
    """
    from arborcast.backends.programs.program import ProgramError
    from arborcast.synth.features import check_features
    from arborcast.synth.formats.atomic import write_atomically

    check_features(schedule.topology, "export")
    schedule.collective.check_is_even()
    row = FORMATS[target]
    export = row.load("export")
    for name in wishes:
        if name not in inspect.signature(export).parameters:
            raise ProgramError(f"{OPTIONS[name]}: is nothing that {target} knows")
    made = export(schedule, **wishes)
    if row.write:
        write_atomically(path, row.load("write")(made))
        return "", made
    names = [path.name + ending for ending in made.contents]
    for name, content in zip(names, made.contents.values(), strict=True):
        write_atomically(path.with_name(name), content)
    return made.said or f"{names[0]} to {names[-1]}", None


def write_program(program: GlobalProgram, path: Path | str) -> None:
    """Write MSCCL's XML, or MSCCL++'s plan of a one-sided program, whole or not at all.

    Raises:
        InputError: the file cannot be written, or the runtime has no such collective or operations.

    Examples:
        >>> program = backends.export_program(synth.solve(topologies.load("ring:4"), "allreduce"))
        >>> backends.write_program(program, "ring.xml")
        >>> backends.read_program("ring.xml") == program
        True
    """
    from arborcast.synth.formats.atomic import write_atomically

    write_atomically(path, FORMATS[runtime_of(program)].load("write")(program))


def runtime_of(program: GlobalProgram) -> str:
    """The format of a program."""
    return "mscclpp" if program.one_sided else "msccl"


def holds_program(head: str) -> bool:
    """Whether the beginning of a text is one of another runtime's file, not of a schedule of ours."""
    return '"arborcast.' not in head and _format_of(head) is not None


def holds_schedule(path: Path | str) -> bool:
    """Whether a file has rings for NCCL, or steps of SCCL: no thread blocks, but what a schedule says.

    Raises:
        InputError: it cannot be read, or is too large.
    """
    return _is_schedule(_text(path)[0])


def read_program(path: Path | str, *, kind: Kind | None = None, root: int | None = None) -> GlobalProgram:
    """The program in a file: MSCCL's XML or MSCCL++'s execution plan.

    Args:
        path: of the file.
        kind: what the program does, where the file's name for it is none that we know.
        root: of a kind that has one, where the file does not say it; 0 where None.

    Raises:
        InputError: it cannot be read, is too large, or holds no program that can be told.

    Examples:
        >>> program = backends.export_program(synth.solve(topologies.load("full:2"), "broadcast", root=1))
        >>> backends.write_program(program, "broadcast.xml")
        >>> backends.read_program("broadcast.xml").kind.value
        'broadcast'
    """
    from arborcast.backends.programs.program import ProgramError

    text, place = _text(path)
    if _is_schedule(text):
        raise ProgramError(f"{place}: holds a schedule, no program; `synth import` makes one of ours of it")
    if '"arborcast.' in text[:_HEAD]:
        raise ProgramError(f"{place}: must be a file of another runtime, got one of ours")
    row = _format_of(text) or FORMATS["mscclpp" if text.lstrip().startswith("{") else "msccl"]
    return row.load("read")(text, place, kind=kind, root=root)  # type: ignore[no-any-return]


def read_as_schedule(
    path: Path | str, topology: Topology | None, *, kind: Kind | None = None, root: int | None = None
) -> Schedule:
    """What a file of another runtime does on a topology: a program, rings for NCCL, or steps of SCCL.

    SCCL's files bring a topology of their own, which is taken where there is no other.

    Raises:
        InputError: it cannot be read, or does not run on the topology.
    """
    from arborcast.backends.programs.as_schedule import as_schedule
    from arborcast.backends.programs.program import ProgramError

    text, place = _text(path)
    row = _format_of(text)
    if row is not None and not row.write:
        return row.load("read")(text, place, topology=topology, kind=kind, root=root)  # type: ignore[no-any-return]
    if topology is None:
        raise ProgramError(f"{place}: {UNKNOWN_TOPOLOGY}")
    return as_schedule(read_program(path, kind=kind, root=root), topology)


UNKNOWN_TOPOLOGY = "does not say what it runs on; name the topology (--topology)"
"""What is wrong where a file needs one beside it."""


def _text(path: Path | str) -> tuple[str, str]:
    """The text of a file, and what errors about it begin with."""
    from arborcast.synth.formats.reading import read_text, shorten_path

    return read_text(path, max_bytes=MAX_FILE_BYTES), shorten_path(path)


def _format_of(text: str) -> Format | None:
    head = text[:_HEAD].lstrip()
    for row in reversed(FORMATS.values()):
        if row.read and head.startswith(row.begins) and any(mark in head for mark in row.marks):
            return row
    return None


def _is_schedule(text: str) -> bool:
    row = _format_of(text)
    return row is not None and not row.write
