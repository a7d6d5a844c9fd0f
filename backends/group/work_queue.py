"""Runs the calls of one group one after another, away from the threads that make them.

One thread at a time executes. When it has finished a call it hands the execution on before it calls back, as
callbacks of futures may make further calls and wait for them (PowerSGD's do): with a fixed thread they would
wait for themselves. Threads are made when they are missed, mostly one.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from arborcast.backends.errors import ExecutionError
from arborcast.backends.group.queued_work import QueuedWork

IDLE_S = 60.0
"""A thread that has had nothing to do for so long ends, unless it is the only one."""


class WorkQueue:
    """First in, first out.

    Args:
        name: of its threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._calls: deque[QueuedWork] = deque()
        self._is_executing = False
        self._idle = 0
        self._threads = 0
        self._closed: str | None = None

    def submit(self, function: Callable[[], Any], result: Any = None) -> QueuedWork:
        """Have the function called after all that were submitted before.

        Args:
            function: what to do; what it raises is raised where the work is waited for.
            result: what the work results in; what the function returned where None.
        """
        if os.getpid() != self._process:
            raise ExecutionError("a group cannot be used in a process that was forked after it was made")
        work = QueuedWork(function, result)
        with self._changed:
            if self._closed is None:
                self._calls.append(work)
                if not self._is_executing:
                    self._rouse()
                return work
        work.fail(ExecutionError(self._closed))
        return work

    def close(self, reason: str, *, wait_s: float) -> bool:
        """Take no more calls, and wait for those that were made.

        Args:
            reason: what later calls fail with.
            wait_s: how long to wait; after that, calls that have not begun fail with the reason.

        Returns:
            whether nothing is being executed any more.
        """
        end = time.monotonic() + wait_s
        with self._changed:
            self._closed = reason
            while (self._calls or self._is_executing) and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            dropped = list(self._calls)
            self._calls.clear()
            self._changed.notify_all()
            is_still = not self._is_executing
        for work in dropped:
            work.fail(ExecutionError(reason))
        return is_still

    def _rouse(self) -> None:
        """Let a thread take the next call; the lock is held."""
        if self._idle:
            self._changed.notify_all()
        else:
            self._threads += 1
            threading.Thread(target=self._serve, name=f"{self._name}-{self._threads}", daemon=True).start()

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            error: BaseException | None = None
            returned: Any = None
            try:
                # Callers may be in inference mode, whose tensors nothing else may write to.
                with torch.inference_mode():
                    returned = work.function()
            except BaseException as raised:
                error = raised
            work.settle(returned, error)  # before the next one begins: works end in their order
            with self._changed:
                self._is_executing = False
                if self._calls:
                    self._rouse()
                self._changed.notify_all()
            work.call_back()
            del work, returned, error  # while this thread sleeps, nobody's tensors live on in it

    def _next(self) -> QueuedWork | None:
        with self._changed:
            self._idle += 1
            try:
                while self._is_executing or not self._calls:
                    if self._closed is not None and not self._calls:
                        return None
                    if not self._changed.wait(IDLE_S) and self._idle > 1:
                        return None
                self._is_executing = True
                return self._calls.popleft()
            finally:
                self._idle -= 1
