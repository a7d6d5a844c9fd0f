"""Devices for tests: they note what they copy, hold back what they are told to, or fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from arborcast.backends.staging.device import CopyDirection, Done
from arborcast.backends.staging.emulated import EmulatedDevice


@dataclass(frozen=True)
class Event:
    """Something that happened to a copy: `what` is begin or end, `at` its first element on the device."""

    what: str
    way: CopyDirection
    at: int


class NotingDevice(EmulatedDevice):
    """Notes all events in their order, and how much host memory was asked for.

    Args:
        holds_back: asked at the begin of each copy; where it gives an event of threads, the copy does not
            begin before that is set.
        fails: the event at whose begin the copy is to fail.
        on_event: told of each.
    """

    def __init__(
        self,
        *,
        rate: Fraction = Fraction(1000),
        holds_back: Callable[[Event], threading.Event | None] = lambda event: None,
        fails: Event | None = None,
        on_event: Callable[[Event], object] = lambda event: None,
    ) -> None:
        super().__init__(rate)
        self.events: list[Event] = []
        self.host_bytes: list[int] = []
        self._holds_back = holds_back
        self._fails = fails
        self._on_event = on_event
        self._lock = threading.Lock()

    def host_memory(self, nbytes: int) -> Tensor:
        self.host_bytes.append(nbytes)
        return super().host_memory(nbytes)

    def copy(self, way: CopyDirection, into: Tensor, source: Tensor, done: Done) -> None:
        at = int((source if way is CopyDirection.IN else into).storage_offset())

        def ended(error: BaseException | None) -> None:
            self._note(Event("end", way, at))
            done(error)

        begun = Event("begin", way, at)
        self._note(begun)
        if begun == self._fails:
            self._threads[way].put(_fail, ended)
            return
        gate = self._holds_back(begun)
        if gate is not None:
            self._threads[way].put(lambda: _pass(gate), lambda error: None)
        super().copy(way, into, source, ended)

    def _note(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)
        self._on_event(event)


def _pass(gate: threading.Event) -> None:
    gate.wait(60)


def _fail() -> None:
    raise OSError("the cable is out")
