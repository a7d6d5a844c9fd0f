"""Where this project keeps everything that can be computed again.

Who can write there decides what runs here: compiled kernels are pickles and machine code. So our folders are
made for their owner alone, and one that others can write is not used.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from arborcast.synth.errors import InputError

PARTS = {
    "chunks": "answers of solvers",
    "tables": "schedules of process groups",
    "numba": "compiled kernels",
}
"""What is kept, by the name of its folder."""


def cache_folder() -> Path:
    """The folder that `ARBORCAST_CACHE` names, else our part of the user's cache folder."""
    chosen = os.environ.get("ARBORCAST_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "arborcast"


def make_private(folder: Path) -> None:
    """Make a folder, and those of the cache above it, for this user alone.

    Raises:
        InputError: see `check_private`.
        OSError: it cannot be made.
    """
    for each in _own(folder):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)


def check_private(folder: Path) -> None:
    """Refuse a folder if others can write to it, or to those of the cache above it; it may be missing.

    Raises:
        InputError: in one line, which folder and why.
    """
    for each in _own(folder):
        try:
            status = each.stat()
        except (FileNotFoundError, NotADirectoryError):
            return
        if status.st_uid not in (os.geteuid(), 0):
            raise InputError(f"{each}: must be of this user or of root, is of user {status.st_uid}")
        if status.st_mode & 0o022:
            mode = f"{stat.S_IMODE(status.st_mode):04o}"
            raise InputError(f"{each}: others must not be able to write there, mode is {mode}: chmod go-w")


def _own(folder: Path) -> list[Path]:
    """The folders of the cache down to one; that alone where it is elsewhere."""
    root = cache_folder()
    above = [each for each in folder.parents if each == root or root in each.parents]
    return [*reversed(above), folder]


def sizes() -> dict[str, tuple[int, int]]:
    """How many files each of the `PARTS` has, and how many bytes."""
    found = {}
    for part in PARTS:
        files = [path for path in (cache_folder() / part).rglob("*") if path.is_file()]
        found[part] = len(files), sum(path.stat().st_size for path in files)
    return found


def clear() -> None:
    """Delete all `PARTS`; whatever else stands in the folder stays."""
    for part in PARTS:
        shutil.rmtree(cache_folder() / part, ignore_errors=True)
