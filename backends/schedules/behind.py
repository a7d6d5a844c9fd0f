"""Work that a process does behind its calls: one thing after another, on one thread that starts on demand.

What is on its way when the process ends is given up, as the thread keeps nobody from ending and the child
process that it waits for ends with its parent.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Result = TypeVar("Result")


class BackgroundQueue(Generic[Result]):
    """First in, first out; the thread ends when there is nothing left to do."""

    def __init__(self) -> None:
        self._changed = threading.Lock()
        self._waiting: deque[tuple[Future[Result], Callable[[], Result]]] = deque()
        self._has_thread = False
        os.register_at_fork(
            before=self._changed.acquire, after_in_parent=self._changed.release, after_in_child=self._forget
        )

    def add(self, function: Callable[[], Result]) -> Future[Result]:
        """Have a function called; its future says what came of it, and can be cancelled until it begins."""
        future: Future[Result] = Future()
        with self._changed:
            self._waiting.append((future, function))
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._serve, name="synth-behind", daemon=True).start()
        return future

    def _serve(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._has_thread = False
                    return
                future, function = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            del future, function

    def _forget(self) -> None:
        """In a child, which has no threads of its parent's."""
        self._waiting.clear()
        self._has_thread = False
        self._changed.release()
