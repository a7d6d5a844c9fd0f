"""Work of a queue, as torch and callers see it: waiting raises what went wrong, and so does the future.

torch's own work of a future cannot be used here: its `wait` ends without a word when the future holds an
error, and what `torch.futures.Future.set_exception` sets is a success to C++, which takes it for a result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from arborcast.backends.errors import ExecutionError


class QueuedWork(dist.Work):
    """A call that somebody else executes.

    Args:
        function: what is to be executed.
        result: what the work results in; what the function returns where None.
    """

    def __init__(self, function: Callable[[], Any], result: Any = None) -> None:
        super().__init__()
        self.function = function
        self._result = result
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._trigger: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def settle(self, returned: Any = None, error: BaseException | None = None) -> None:
        """Set the outcome, once: who waits goes on. `call_back` is to follow.

        Args:
            returned: by the function.
            error: that it raised instead.
        """
        if error is not None:
            # Only exceptions proper may reach who waits; Ctrl-C in another thread is not one for this thread.
            self._error = error if isinstance(error, Exception) else ExecutionError(repr(error))
        elif self._result is None:
            self._result = returned
        del self.function  # and the tensors that it holds
        with self._lock:
            self._done.set()

    def call_back(self) -> None:
        """Have the future done; its callbacks run in this thread and may take long."""
        with self._lock:
            trigger, self._trigger = self._trigger, None
        if trigger is not None:
            trigger.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End without having been executed."""
        self.settle(error=error)
        self.call_back()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the call has succeeded; Ctrl-C interrupts.

        Args:
            timeout: how long to wait; as long as it takes where None or 0, which is what torch passes.

        Raises:
            ExecutionError: it did not end in that time.
            Exception: what the call raised.
        """
        if not self._done.wait(timeout.total_seconds() if timeout else None):
            raise ExecutionError(f"waited {timeout} for a collective that is still on its way")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """The same as `wait`: there are no streams."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call has ended, in whatever way."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether the call has ended without an error."""
        return self._done.is_set() and self._error is None

    def exception(self) -> Any:
        """What the call raised; None while it is on its way, too."""
        return self._error if self._done.is_set() else None

    def result(self) -> Any:
        """The tensors that hold the result.

        Raises:
            Exception: what the call raised.
        """
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result.

        An error is one for C++ as well: it is a RuntimeError with the name and the message of what the call
        raised.
        """
        with self._lock:
            if self._future is None:
                trigger: torch.futures.Future[None] = torch.futures.Future()
                # Errors of callbacks are the only ones that torch lets Python put into a future.
                self._future = trigger.then(self._outcome)
                if self._done.is_set():
                    trigger.set_result(None)
                else:
                    self._trigger = trigger
            return self._future

    def _outcome(self, _: torch.futures.Future[None]) -> Any:
        if self._error is not None:
            raise self._error
        return self._result
