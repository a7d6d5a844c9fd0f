"""Where this project keeps everything that can be computed again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder that `ARBORCAST_CACHE` names, else our part of the user's cache folder."""
    chosen = os.environ.get("ARBORCAST_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "arborcast"
