"""The one door to numba: typed, cached on disk, no global state at import besides the cache folder.

`ARBORCAST_CACHE` names the folder of all caches; the default is the user's cache folder. Kernels take and
return arrays: `Ints`, `Flags`, and float64 where a length may be either.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.kernels.cache_folder import cache_folder

Ints: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

log = logging.getLogger(__name__)


def _sources() -> str:
    """A name for the present state of all kernels.

    numba compiles a kernel anew when its own file changes, but not when a kernel it calls from another
    file does; machine code of two versions in one process gives wrong answers or errors.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        source = path.read_bytes()
        if b"kernel" in source:
            digest.update(source)
    return digest.hexdigest()[:16]


def _prepared(folder: Path) -> bool:
    """Whether machine code can be kept in the folder; where not, every process compiles for itself."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("kernels are compiled anew: %s (ARBORCAST_CACHE names another folder)", error)
        return False
    return os.access(folder, os.W_OK)


_folder = Path(os.environ.get("NUMBA_CACHE_DIR") or cache_folder() / "numba" / _sources())
_keeps = _prepared(_folder)
os.environ["NUMBA_CACHE_DIR"] = str(_folder)

KERNEL_FOLDER = _folder if _keeps else None
"""Where machine code is kept; None where it cannot be."""

import numba  # noqa: E402  (reads NUMBA_CACHE_DIR when it is imported)


def kernel(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function on first use, and keep the machine code on disk for the next process.

    With NUMBA_DISABLE_JIT=1 in the environment functions stay plain Python, for debuggers and mutation tests.
    """
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return function
    compiled: Any = numba.njit(cache=_keeps)(function)
    if _keeps:
        _forgive_damage(compiled._cache, function.__qualname__)
    return cast(Callable[Parameters, Result], compiled)


def _forgive_damage(cache: Any, name: str) -> None:
    """Let a file of the cache that cannot be read be a reason to compile, not an error."""
    load = cache.load_overload

    def load_overload(signature: Any, context: Any) -> Any:
        try:
            return load(signature, context)
        except Exception as error:  # whatever a damaged pickle may raise
            log.warning("kernel %s is compiled anew: its file in %s is damaged: %r", name, _folder, error)
            cache.flush()
            return None

    cache.load_overload = load_overload
