"""Where this project keeps everything that can be computed again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

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
