"""The one door to numba: typed, cached on disk, loaded only where a question is large enough.

`ARBORCAST_CACHE` names the folder of all caches; the default is the user's cache folder. Kernels take and
return arrays: `Ints`, `Flags`, and float64 where a length may be either.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.deadline import running
from arborcast.synth.errors import InputError, TimedOutError
from arborcast.synth.kernels.cache_folder import cache_folder, make_private

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
    home = Path(__file__).parents[1]
    digest.update(str(home).encode())  # numba keeps machine code by the path of its source
    for source in (Path(__file__).read_bytes(), *kernel_files(home).values()):
        digest.update(source)
    return digest.hexdigest()[:16]


def kernel_files(home: Path) -> dict[Path, bytes]:
    """Those below a folder that define kernels, which use nothing of ours from other files."""
    files = {path: path.read_bytes() for path in sorted(home.rglob("*.py"))}
    return {path: text for path, text in files.items() if b"@kernel" in text or b"= kernel(" in text}


def _prepared(folder: Path) -> bool:
    """Whether machine code may be taken from the folder; where not, every process compiles for itself.

    None is taken from a folder that others can write: it would run here.
    """
    try:
        make_private(folder)
    except (OSError, InputError) as error:
        log.warning("kernels are compiled anew: %s (ARBORCAST_CACHE names another folder)", error)
        return False
    return True


@cache
def _folder() -> Path | None:
    """Whence machine code may be taken, whether or not this process may write there."""
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or cache_folder() / "numba" / _sources())
    is_prepared = _prepared(folder)
    os.environ["NUMBA_CACHE_DIR"] = str(folder)  # read by numba when it is imported
    return folder if is_prepared else None


def kernel_folder() -> Path | None:
    """Where machine code is kept; None where it cannot be: what is not there is compiled by every process."""
    folder = _folder()
    return folder if folder is not None and os.access(folder, os.W_OK) else None


SMALL = 1600
"""Elements of all arrays that a call is given, up to which it may run as plain Python."""

PLAIN_S = 0.4
"""That a process may spend so; loading numba and the machine code of kernels takes about as long."""


COMPILE_S = 15
"""What the largest takes to be compiled, on a slow machine: with less left of a deadline none is begun."""

LARGEST_PLAIN = 16384
"""Elements of all arrays that a call is given, up to which it runs as plain Python where that is so."""


class _State:
    """Of this process: CPU time of plain calls, how many are on their way, whether any more may be plain."""

    plain_s: float = 0.0
    compiles: bool = False
    is_said: bool = False  # that kernels are being compiled
    is_late: bool = False  # there was no time to compile some
    is_compiling: bool = False  # then those that the kernel calls are, too

    def __init__(self) -> None:
        self._here = threading.local()

    @property
    def depth(self) -> int:
        """On their way in this thread."""
        return getattr(self._here, "depth", 0)

    @depth.setter
    def depth(self, value: int) -> None:
        self._here.depth = value


_state = _State()


def _never_compiles() -> bool:
    return os.environ.get("NUMBA_DISABLE_JIT", "0") != "0"


def compile_all() -> None:
    """From now on every kernel runs compiled, whatever its arguments; it is not said that that takes long."""
    _state.compiles = _state.is_said = True


class Kernel(Generic[Parameters, Result]):
    """A function that is compiled on first use, its machine code kept on disk for the next process.

    A process that asks little never loads numba: calls with small arrays run as plain Python until they
    have taken `PLAIN_S` together, or a larger one is compiled. Answers are the same. With NUMBA_DISABLE_JIT=1
    in the environment all calls do, for debuggers and mutation tests. Where the deadline that is `running`
    leaves no time to compile a kernel, calls up to `LARGEST_PLAIN` do, and larger ones raise TimedOutError.
    """

    def __init__(self, function: Callable[Parameters, Result]) -> None:
        self.function = function
        self._compiled: Callable[Parameters, Result] | None = None
        self._is_late = False  # there was no time to compile it
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        """What the function returns."""
        if self._is_plain(arguments):
            return self._plainly(*arguments, **named)
        _state.is_compiling = False
        try:
            return self.compiled()(*arguments, **named)
        except _NotInTimeError:
            self._is_late = _state.is_late = True
            if _elements(arguments) > LARGEST_PLAIN:
                raise
            return self._plainly(*arguments, **named)

    def _plainly(self, *arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        if (
            _state.is_late and not _never_compiles() and running().is_overdue
        ):  # slow, and otherwise not interrupted
            raise running().missed_by("plain Python in place of machine code, which is yet to be compiled,")
        begin = time.thread_time()
        _state.depth += 1
        try:
            if _state.depth > 1:
                return self.function(*arguments, **named)
            with np.errstate(over="ignore"):  # machine words wrap, as they do in machine code
                return self.function(*arguments, **named)
        finally:
            _state.depth -= 1
            if not _state.depth:  # kernels that it called are part of it
                _state.plain_s += time.thread_time() - begin

    def _is_plain(self, arguments: tuple[object, ...]) -> bool:
        if _never_compiles():
            return True
        if _state.depth:
            return True  # it may be given lists, which have types only in compiled code
        if self._is_late and not _is_time():
            return _elements(arguments) <= LARGEST_PLAIN
        if self._compiled is not None:
            return False
        if _state.compiles or _state.plain_s > PLAIN_S:
            return False
        return _elements(arguments) <= SMALL

    def compiled(self) -> Callable[Parameters, Result]:
        """The function in machine code."""
        if _never_compiles():
            return self.function
        if self._compiled is None:
            folder = _folder()
            import numba
            from numba.extending import typeof_impl

            if Kernel not in typeof_impl.registry:
                typeof_impl.register(Kernel)(_type_of_compiled)  # kernels may call kernels
            _state.compiles = True
            compiled: Any = numba.njit(cache=kernel_folder() is not None)(self.function)
            if folder is not None:
                if kernel_folder() is None:
                    compiled._cache = _read_only_cache()(self.function)
                _watch(compiled._cache, self.function.__qualname__, folder)
            self._compiled = cast(Callable[Parameters, Result], compiled)
        return self._compiled


@cache
def _read_only_cache() -> Any:
    """Numba's cache of a function where nothing can be written; its own is for folders that it can write."""
    from numba.core import caching

    theirs: Any = caching

    class Locator(theirs.UserProvidedCacheLocator):  # type: ignore[misc]
        def ensure_cache_path(self) -> None:
            """Nothing is to be written there."""

    class Implementation(theirs.CompileResultCacheImpl):  # type: ignore[misc]
        _locator_classes = [Locator]  # noqa: RUF012 - numba's way

    class ReadOnlyCache(theirs.FunctionCache):  # type: ignore[misc]
        _impl_class = Implementation

        def save_overload(self, signature: Any, data: Any) -> None:
            """What has been compiled serves this process alone."""

        def flush(self) -> None:
            """What is damaged stays so."""

    return ReadOnlyCache


def _elements(values: tuple[object, ...]) -> int:
    """Of all arrays, in tuples too."""
    arrays = sum(it.size for it in values if isinstance(it, np.ndarray))
    return arrays + sum(_elements(it) for it in values if isinstance(it, tuple))


def _type_of_compiled(value: Kernel[..., Any], context: object) -> object:
    import numba

    return numba.typeof(value.compiled())  # type: ignore[no-untyped-call]


def kernel(function: Callable[Parameters, Result]) -> Kernel[Parameters, Result]:
    """Make a kernel of a function of arrays and numbers."""
    return Kernel(function)


class _NotInTimeError(TimedOutError):
    """A kernel would be compiled that may not be ready by the deadline."""


def _is_time() -> bool:
    """Whether a kernel may be compiled, which cannot be interrupted."""
    left_s = running().left_s
    return left_s is None or left_s >= COMPILE_S


def _check_time(name: str) -> None:
    if not _is_time():
        raise _NotInTimeError(
            f"kernel {name} is not compiled yet, which may take {COMPILE_S} s of {running()}; "
            "without one, all are, once on this machine"
        )


def _watch(cache: Any, name: str, folder: Path) -> None:
    """Let a file of the cache that cannot be read be a reason to compile, no error; say what takes long."""
    load = cache.load_overload

    def load_overload(signature: Any, context: Any) -> Any:
        try:
            found = load(signature, context)
            if found is None and not _state.is_compiling:
                _check_time(name)
                _state.is_compiling = True
            if found is None and not _state.is_said:
                _state.is_said = True
                log.warning("kernels are being compiled, once on this machine; this may take a minute")
            return found
        except _NotInTimeError:
            raise
        except Exception as error:  # whatever a damaged pickle may raise
            log.warning("kernel %s is compiled anew: its file in %s is damaged: %r", name, folder, error)
            cache.flush()
            return None

    cache.load_overload = load_overload
