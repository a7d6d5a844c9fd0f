"""Waiting for what has happened, never for a time: conditions, ends of processes, and where a thread is."""

from __future__ import annotations

import gc
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

PATIENCE_S = 90.0  # no test passes or fails by it but one whose condition never comes


def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.001)


_LOOKING = threading.Lock()


def _frames() -> dict[int, FrameType]:
    """What each thread of this process runs.

    No garbage is looked for meanwhile: tensors that end so give the interpreter's lock away, and a thread
    that then asks the same would hold it and wait for the lock of this call, for ever.
    """
    with _LOOKING:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if was_on:
                gc.enable()


def is_inside(function: str, thread: int | None) -> bool:
    """Whether a thread of this process, told by its identity, is inside a Python function of that name."""
    frame = _frames().get(thread or 0)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def any_inside(function: str) -> bool:
    """Whether any thread of this process is inside a Python function of that name."""
    return any(is_inside(function, thread) for thread in _frames())


def mark_inside(function: str, mark: Path, text: str = "") -> None:
    """Write a file, from a thread of its own, as soon as the main thread is inside such a function."""

    has_started = threading.Event()

    def watch() -> None:
        has_started.wait()  # `Thread.start` itself is inside a `wait`
        until(lambda: is_inside(function, threading.main_thread().ident))
        mark.write_text(text)

    threading.Thread(target=watch, daemon=True).start()
    has_started.set()


def wait_for_end(pid: int) -> None:
    """Until a process, not yet waited for by its parent, has ended."""
    end = os.pidfd_open(pid)
    try:
        assert select.select([end], [], [], PATIENCE_S)[0], f"process {pid} goes on"
    finally:
        os.close(end)
