"""Programs in files, whatever the runtime: what a file is shows from its text."""

from __future__ import annotations

from pathlib import Path

from arborcast.backends.programs.msccl import reader, writer
from arborcast.backends.programs.program import GlobalProgram
from arborcast.synth.collective import Kind
from arborcast.synth.formats.atomic import write_atomically
from arborcast.synth.formats.reading import read_text, shorten_path


def read_program(path: Path | str, *, kind: Kind | None = None, root: int | None = None) -> GlobalProgram:
    """The program in a file: MSCCL's XML.

    Args:
        path: of the file.
        kind: what the program does, where the file's name for it is none that we know.
        root: of a kind that has one, where the file does not say it; 0 where None.

    Raises:
        InputError: it cannot be read, is too large, or holds no program that can be told.
    """
    return reader.read(
        read_text(path, max_bytes=reader.MAX_FILE_BYTES), shorten_path(path), kind=kind, root=root
    )


def write_program(program: GlobalProgram, path: Path | str) -> None:
    """Write MSCCL's XML, whole or not at all.

    Raises:
        InputError: the file cannot be written, or MSCCL has no such collective or operations.
    """
    write_atomically(path, writer.write(program))
