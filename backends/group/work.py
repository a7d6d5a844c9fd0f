"""The calls of one group, executed one after another away from the threads that make them.

Waiting for a `QueuedWork` raises what went wrong, and so does its future. Torch's own work of a future cannot
be used here: its `wait` ends without a word when the future holds an error, and what
`torch.futures.Future.set_exception` sets is a success to C++, which takes it for a result.

A caller that waits at once has its call executed in its own thread where nothing else is under way. Otherwise
one thread at a time executes, and a caller that finds nothing under way gives way until that thread has left
the interpreter. When it has finished a call it hands the execution on before it calls back, as callbacks of
futures may make further calls and wait for them (PowerSGD's do): with a fixed thread they would wait for
themselves. Threads start on demand, normally one. While one of them executes, threads of the process that
compute in Python hand over the interpreter after `SWITCH_S`, not after the 5 ms of Python's own.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from arborcast.backends.errors import ExecutionError
from arborcast.backends.tensors.torch_compat import outside_compilers

SIGNALS_S = 0.5
"""Ctrl-C is seen within so long."""

KEPT = 1024
"""So many works live on that nobody in Python holds any more."""

KEPT_BYTES = 1024
"""They keep results of tensors that together are not larger."""

_kept: deque[QueuedWork] = deque(maxlen=KEPT)
"""C++ may hold a work whose Python half is gone, and would wait for ever.

`ddp.join` gives DDP's reducer one of a single number, which that waits for and asks for its future. Whether
C++ holds a work cannot be asked, so that any lives on for a while without what is large.
"""


def _is_small(result: Any) -> bool:
    """Whether it may be kept: tensors (lists of them) of little memory, what they are views of included."""
    return _bytes_of(result) <= KEPT_BYTES


def _bytes_of(result: Any) -> float:
    match result:
        case None:
            return 0
        case torch.Tensor() if result.layout == torch.strided:
            return result.untyped_storage().nbytes()
        case list() | tuple():
            return sum(map(_bytes_of, result))
    return math.inf


@outside_compilers
class QueuedWork(dist.Work):
    """A queued collective: a torch Work.

    Args:
        function: what is to be executed.
        result: what the work results in; what the function returns where None.
    """

    def __init__(self, function: Callable[[], Any], result: Any = None) -> None:
        super().__init__()
        self.function = function
        self._result = result
        self._error: Exception | None = None
        self._is_freed = False
        self._lock = threading.Lock()
        # Whoever waits takes the latch, which is free once the call has ended, and gives it back. An Event
        # takes longer to make than most calls' other words.
        self._has_ended = False
        self._latch = threading.Lock()
        self._latch.acquire()
        self._leaves: threading.Lock | None = None
        self._trigger: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def __del__(self) -> None:
        if not sys.is_finalizing():
            if not _is_small(self._result):
                self._result, self._future, self._is_freed = None, None, True
            _kept.append(self)  # Python calls this once for each object

    def settle(self, returned: Any = None, error: BaseException | None = None) -> None:
        """Set what the function returned or raised, once: who waits goes on. `call_back` is to follow."""
        if error is not None:
            # Only exceptions proper may reach who waits; Ctrl-C in another thread is not one for this thread.
            self._error = error if isinstance(error, Exception) else ExecutionError(repr(error))
        elif self._result is None:
            self._result = returned
        del self.function  # and the tensors that it holds
        with self._lock:
            self._has_ended = True
        self._latch.release()
        self.leave()

    def departure(self) -> threading.Lock:
        """A lock that is free once `leave` was called, or the call has ended; to be made before it begins."""
        self._leaves = departure = threading.Lock()
        departure.acquire()
        return departure

    def leave(self) -> None:
        """The thread that executes it needs the interpreter no more until something has come."""
        leaves, self._leaves = self._leaves, None
        if leaves is not None:
            leaves.release()

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
        """Return True when the call has succeeded, within `timeout` where that is not 0; Ctrl-C interrupts.

        Raises:
            ExecutionError: it did not end in that time.
            Exception: what the call raised.
        """
        if not self._has_ended:
            self._sleep(timeout)
        if self._error is not None:
            raise self._error
        return True

    def _sleep(self, timeout: timedelta | None) -> None:
        end = time.monotonic() + timeout.total_seconds() if timeout else math.inf
        # A signal that arrives just before the thread blocks is seen only when it runs again.
        while not self._has_ended:
            if self._latch.acquire(timeout=min(SIGNALS_S, max(0.0, end - time.monotonic()))):
                self._latch.release()
            elif time.monotonic() >= end:
                raise ExecutionError(f"waited {timeout} for a collective that is still on its way")

    def synchronize(self) -> None:
        """The same as `wait`: there are no streams."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call has ended, in whatever way."""
        return self._has_ended

    def is_success(self) -> bool:
        """Whether the call has ended without an error."""
        return self._has_ended and self._error is None

    def exception(self) -> Any:
        """What the call raised; None while it is on its way, too."""
        return self._error if self._has_ended else None

    def result(self) -> Any:
        """The tensors that hold the result; raises what the call raised."""
        self.wait()
        return self._outcome()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result; an error is one for C++ too, a RuntimeError with its name and message."""
        with self._lock:
            if self._future is None:
                trigger: torch.futures.Future[None] = torch.futures.Future()
                # Errors of callbacks are the only ones that torch lets Python put into a future.
                self._future = trigger.then(self._outcome)
                if self._has_ended:
                    trigger.set_result(None)
                else:
                    self._trigger = trigger
            return self._future

    def _outcome(self, _: torch.futures.Future[None] | None = None) -> Any:
        if self._error is not None:
            raise self._error
        if self._is_freed:
            raise ExecutionError(
                "the result of a work that nobody held was freed: hold the work, or its future"
            )
        return self._result


SWITCH_S = 5e-5
"""After how long a busy thread hands over the interpreter.

Beside a loop in Python, a 16 MiB allreduce of 2 ranks takes 10 times as long with 5 ms.
"""


class _SwitchInterval:
    """Python's switch interval, which is one for the process: short while calls are under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._usual = 0.0

    def begin(self) -> None:
        with self._lock:
            self._calls += 1
            if self._calls == 1:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual, SWITCH_S))

    def end(self) -> None:
        with self._lock:
            self._calls -= 1
            # Whoever has set another one meanwhile shall keep it.
            if not self._calls and math.isclose(sys.getswitchinterval(), SWITCH_S):
                sys.setswitchinterval(self._usual)

    def forget(self) -> None:
        """In a child that was forked: no call of the parent's is under way here."""
        self._lock = threading.Lock()
        if self._calls:
            self._calls = 1
            self.end()


_switch_interval = _SwitchInterval()
os.register_at_fork(after_in_child=_switch_interval.forget)

DEPARTURE_S = 0.020
"""For so long at most a thread that makes a call gives way to the one that executes it.

That one needs the interpreter for some 0.1 ms. If both wanted it, the one that computes would have to be
interrupted several times, and each time it may hold the interpreter while other processes have its core.
"""

IDLE_S = 60.0
"""A thread that has had nothing to do for so long ends, unless it is the only one."""


END_S = 5.0
"""That the threads of all queues together may take to end when the process does."""

_queues: weakref.WeakSet[WorkQueue] = weakref.WeakSet()
"""Those of this process."""


def _end_threads() -> None:
    """At exit: C++ aborts a process whose interpreter ends while a thread is inside of it."""
    deadline = time.monotonic() + END_S
    for queue in list(_queues):
        queue.end_threads(deadline)


atexit.register(_end_threads)


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
        self._current: QueuedWork | None = None
        self._idle = 0
        self._threads = 0
        self._closed: str | None = None
        self._executors: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        _queues.add(self)

    def submit(self, function: Callable[[], Any], result: Any = None) -> QueuedWork:
        """Have the function called after all that were submitted before; arguments as for `QueuedWork`.

        Where nothing is under way, this thread gives way until the call has left the interpreter.
        """
        return self._enqueue(self._new(function, result))

    def _enqueue(self, work: QueuedWork) -> QueuedWork:
        departure: threading.Lock | None = None
        with self._changed:
            is_open = self._closed is None
            if is_open:
                _switch_interval.begin()
                if not self._is_executing and not self._calls:
                    departure = work.departure()
                self._calls.append(work)
                if not self._is_executing:
                    self._rouse()
        if not is_open:
            work.fail(ExecutionError(self._closed))
        elif departure is not None:
            departure.acquire(timeout=DEPARTURE_S)
        return work

    def execute(self, function: Callable[[], Any], result: Any = None) -> QueuedWork:
        """The same for a caller that waits at once: where nothing is under way, this thread calls it now."""
        work = self._new(function, result)
        with self._changed:
            is_free = self._closed is None and not self._is_executing and not self._calls
            if is_free:
                self._is_executing = True
        if not is_free:
            return self._enqueue(work)
        _switch_interval.begin()
        error = self._execute(work)
        work.call_back()
        if error is not None and not isinstance(error, Exception):
            raise error  # Ctrl-C is this thread's own
        return work

    def _new(self, function: Callable[[], Any], result: Any) -> QueuedWork:
        if os.getpid() != self._process:
            raise ExecutionError("a group cannot be used in a process that was forked after it was made")
        return QueuedWork(function, result)

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
            _switch_interval.end()
            work.fail(ExecutionError(reason))
        return is_still

    def end_threads(self, deadline: float) -> None:
        """Wait until the threads of a closed queue have ended, at most until then (of `time.monotonic`)."""
        if os.getpid() == self._process:
            for thread in list(self._executors):
                thread.join(max(0.0, deadline - time.monotonic()))

    def _rouse(self) -> None:
        """Let a thread take the next call; the lock is held."""
        if self._idle:
            self._changed.notify_all()
        else:
            self._threads += 1
            thread = threading.Thread(target=self._serve, name=f"{self._name}-{self._threads}", daemon=True)
            self._executors.add(thread)
            thread.start()

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            self._execute(work)
            work.call_back()
            del work  # while this thread sleeps, nobody's tensors live on in it

    def leave(self) -> None:
        """The call that is being executed needs the interpreter no more until something has come."""
        if self._current is not None:
            self._current.leave()

    def _execute(self, work: QueuedWork) -> BaseException | None:
        error: BaseException | None = None
        returned: Any = None
        self._current = work
        try:
            # Callers may be in inference mode, whose tensors nothing else may write to.
            with torch.inference_mode():
                returned = work.function()
        except BaseException as raised:
            error = raised
        finally:
            _switch_interval.end()  # first: whoever has waited for the call finds the usual interval
            self._hand_on(work, returned, error)
        return error

    def _hand_on(self, work: QueuedWork, returned: Any, error: BaseException | None) -> None:
        """Settle a call before the next one begins: works end in their order, and leave nothing under way."""
        with self._changed:
            work.settle(returned, error)
            self._current = None
            self._is_executing = False
            if self._calls:
                self._rouse()
            if self._closed is not None:  # nobody else waits for the end of a call
                self._changed.notify_all()

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
