"""Writing files whole or not at all: to a temporary neighbour first, then renamed over the target.

Everything that leaves a result on disk goes through here, so that neither Ctrl-C nor a full disk leaves
half a file under the name that was asked for. Files named `.gz` are compressed.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from arborcast.synth.errors import InputError
from arborcast.synth.formats.reading import shorten_path

_GZIP_LEVEL = 4  # a third of the time of the highest, for a tenth more bytes of a schedule


def check_folder(folder: Path) -> None:
    """See that a folder can be made and written to, before any time is spent on what it shall hold.

    Raises:
        InputError: there is something else of that name, or its parent does not exist.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: must be a folder to write to, got a file")
    if not folder.parent.is_dir():
        raise InputError(f"{folder}: its parent folder {folder.parent} does not exist")


def make_folder(folder: Path, *, parents: bool = False) -> None:
    """Make a folder, unless it is there.

    Raises:
        InputError: it cannot be made.
    """
    try:
        folder.mkdir(parents=parents, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror or error}") from error


def write_atomically(path: Path | str, content: str | bytes) -> None:
    """Put `content` (text as UTF-8) into the file, replacing what was there.

    Raises:
        InputError: the file cannot be written.
    """
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path | str) -> Iterator[BinaryIO]:
    """A file open for writing that takes the place of `path` when the block ends without an exception.

    What exists and is no regular file (/dev/stdout, a named pipe) cannot be replaced and is written to
    directly. A symbolic link keeps pointing at its file, and a file that is replaced keeps its mode. What is
    written to a file named `.gz` is compressed, to the same bytes each time.

    Raises:
        InputError: the file cannot be written.
    """
    if "\0" in str(path):  # the operating system's calls would raise a bare ValueError
        raise InputError(f"{shorten_path(path)}: cannot be written: the name holds a NUL")
    try:
        target = Path(path).resolve()
        if target.is_dir():
            raise InputError(f"{shorten_path(path)}: must be a file to write to, got a directory")
        with _temporary(target) if target.is_file() or not target.exists() else target.open("wb") as file:
            if target.suffix == ".gz":
                with gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0) as packed:
                    yield cast(BinaryIO, packed)
            else:
                yield file
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"{shorten_path(path)}: cannot be written: {reason}") from error


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[BinaryIO]:
    draft = target.with_name(f".{target.name[:80]}.{secrets.token_hex(6)}.part")
    # Mode 0o666 is narrowed by the umask, as for any file a program makes (tempfile would give 0o600).
    mode = target.stat().st_mode & 0o777 if target.exists() else None
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            draft.chmod(mode)
        draft.replace(target)
    except BaseException:  # Ctrl-C too must leave nothing behind
        draft.unlink(missing_ok=True)
        raise
