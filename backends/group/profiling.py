"""Collectives as torch's profilers show them: an event from the call to its end, with its inputs' shapes.

Torch's own backends begin such an event where they are called and end it in a thread of theirs, to which C++
takes what says that a profiler is on. Python can begin one and has no such means to end it elsewhere, but for
scripts of `torch.jit`, which take it along. So a script waits for the call and then ends the event. Where no
profiler is on nothing of this happens.
"""

# torch.jit takes comments behind lines of a script for types of its own.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import functools
import itertools
import threading
import warnings
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE_S = 1.0
"""How long the end of a call waits for that of its event."""


class Event:
    """A call that a profiler of this thread sees.

    Args:
        title: such as "synth:all_reduce".
        inputs: whose shapes it has.
    """

    def __init__(self, title: str, inputs: Sequence[Tensor]) -> None:
        self._number = next(_numbers)
        self._record = cast(Any, torch._C)._profiler._RecordFunctionFast(title, tuple(inputs), {})
        self._has_ended = threading.Event()
        self._is_done: torch.futures.Future[int] = torch.futures.Future()
        self._record.__enter__()
        _open[self._number] = self
        # Until `close` has returned its thread writes to the profiler, which may be torn down after `end`.
        # Of the script itself nothing may be recorded: its frames end behind its future, which crashes.
        record = cast(Any, torch._C)._autograd._enable_record_function
        record(False)
        try:
            ending = _waiting()(self._is_done)
        finally:
            record(True)
        ending.add_done_callback(lambda _: self._has_ended.set())

    def end(self) -> None:
        """The call has ended, or will never be served; may be said again."""
        if self._number in _open and not self._is_done.done():
            self._is_done.set_result(self._number)
            self._has_ended.wait(PATIENCE_S)

    def end_with(self, holder: object) -> None:
        """End at the latest when that is gone: open events keep their tensors."""
        weakref.finalize(holder, self.end)

    def close(self) -> None:
        """Called by the script, in a thread that knows of the profiler."""
        self._record.__exit__(None, None, None)


def event_of(title: str, inputs: Sequence[Tensor]) -> Event | None:
    """The event of a call that begins; None where no profiler is on."""
    return Event(title, inputs) if cast(Any, torch._C)._autograd._profiler_enabled() else None


class ObservedWork(dist.Work):
    """Work of another backend whose event ends when it has been waited for.

    Args:
        work: the other's.
        event: of the call.
    """

    def __init__(self, work: dist.Work, event: Event) -> None:
        super().__init__()
        self._work: Any = work
        self._event: Event | None = event
        event.end_with(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """The other's."""
        try:
            return cast(bool, self._work.wait(timeout))
        finally:
            event, self._event = self._event, None
            if event is not None:
                event.end()

    def is_completed(self) -> bool:
        """The other's."""
        return cast(bool, self._work.is_completed())

    def is_success(self) -> bool:
        """The other's."""
        return cast(bool, self._work.is_success())

    def _source_rank(self) -> int:
        return cast(int, self._work._source_rank())


_numbers = itertools.count()
_open: dict[int, Event] = {}


@torch.jit.ignore  # type: ignore[untyped-decorator]
def _close(number: int) -> None:
    _open.pop(number).close()


_close.__annotations__ = {"number": int, "return": None}  # scripts read no strings here


def _end_event(done: torch.jit.Future[int]) -> None:
    _close(done.wait())


def _begin_waiting(done: torch.jit.Future[int]) -> torch.jit.Future[None]:
    return torch.jit.fork(_end_event, done)


@functools.cache
def _waiting() -> Any:
    """A script that returns at once, and closes the event whose number the future will have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # nothing that is to replace it does this
        return torch.jit.script(_begin_waiting)
