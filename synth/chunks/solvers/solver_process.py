"""The other side of `worker`: a process that does the tasks that come over a connection.

Run as `python -m arborcast.synth.chunks.solvers.solver_process DESCRIPTOR MEMORY_BYTES PARENT MODULE...`. It
imports next to nothing of its own: a solver comes in with the first task that needs it. It never outlives the
process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux
_OUT_OF_MEMORY = ("out of memory", "bad_alloc", "cannot allocate memory")


def main(descriptor: int, memory_bytes: int, parent: int, modules: Sequence[str]) -> None:
    """Do tasks until the connection ends.

    Args:
        descriptor: of the connection, over which tasks come as pickles and replies go.
        memory_bytes: of address space; 0 for no limit.
        parent: the id of the process that started this one.
        modules: to import before the first task, which would need them anyway.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    _die_with(parent)
    connection: Connection[Any, Any] = Connection(descriptor)
    _limit(memory_bytes)
    tasks: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, tasks), daemon=True).start()
    for module in modules:
        with contextlib.suppress(ImportError):  # the task that needs it will say so
            importlib.import_module(module)
    while True:
        reply, may_go_on = _reply(tasks.get())
        connection.send_bytes(reply)
        if not may_go_on:
            os._exit(1)


def _read(connection: Connection[Any, Any], tasks: SimpleQueue[bytes]) -> None:
    """Take in tasks; the end of them is the end of this process, whatever it is doing."""
    while True:
        try:
            tasks.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def _reply(task: bytes) -> tuple[bytes, bool]:
    """The pickle of "result", "error" or "memory" and what belongs to it, and whether to go on after it."""
    try:
        function, args, kwargs = pickle.loads(task)
        return pickle.dumps(("result", function(*args, **kwargs))), True
    except MemoryError as error:
        words = str(error)
    except Exception as error:
        words = str(error)
        if not any(sign in words.lower() for sign in _OUT_OF_MEMORY):  # z3 has an exception of its own
            return pickle.dumps(("error", _portable(error))), True
    # What a solver leaves behind after a failed allocation cannot be trusted.
    return pickle.dumps(("memory", words)), False


def _portable(error: Exception) -> Exception:
    """The error with its traceback as a note; its words alone where it cannot travel."""
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _die_with(parent: int) -> None:
    """Have the system end this process when its parent is gone, even while a solver is busy."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before we asked
        os._exit(1)


def _limit(memory_bytes: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        allowed = resource.getrlimit(resource.RLIMIT_AS)[1]
        if allowed != resource.RLIM_INFINITY:
            memory_bytes = min(memory_bytes, allowed)
        try:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, allowed))
        except (ValueError, OSError) as error:  # macOS knows the limit and does not always take it
            sys.stderr.write(f"no memory limit: {error}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
