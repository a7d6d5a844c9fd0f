"""The one door to numba: typed, cached on disk, no global state at import besides the cache folder.

`ARBORCAST_CACHE` names the folder of all caches; the default is the user's cache folder. Kernels take and
return int64 and float64 arrays only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def cache_folder() -> Path:
    """Where this project keeps everything that can be computed again."""
    chosen = os.environ.get("ARBORCAST_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "arborcast"


os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder() / "numba"))

import numba  # noqa: E402  (reads NUMBA_CACHE_DIR when it is imported)


def kernel(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function on first use, and keep the machine code on disk for the next process."""
    return cast(Callable[Parameters, Result], numba.njit(cache=True)(function))
