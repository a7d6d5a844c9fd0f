"""How far a long computation has come, for whoever wants to show it; silence otherwise.

The core calls `report`, which costs nothing unless somebody listens; the command listens and draws a bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

Listener: TypeAlias = Callable[[str, int, int], None]
"""Takes what is being done, how much of it is done, and how much there is."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def report(what: str, done: int, total: int) -> None:
    """Tell the listener, if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(what, done, total)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Hear every `report` of the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
