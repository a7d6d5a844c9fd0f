"""Sends and receives of a gloo that connects two ranks at their first message: posted at once, begun later.

Gloo begins the first call with a peer only when the peer makes one with this rank, and keeps the thread that
calls until then. The peer may first wait for this rank, in a collective. So first calls are begun in threads
of their own, one for each peer, which end with what was posted meanwhile; later ones by the caller itself.
Receives from anybody do not come here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from arborcast.backends.errors import ExecutionError
from arborcast.backends.group.inner_gloo import InnerGloo
from arborcast.backends.group.work import SIGNALS_S

APART_S = 0.001
"""First calls begin so long one after another: gloo notes without a lock whom it connects with."""

SOONEST_S, LATEST_S = 0.0002, 0.02
"""Between two looks for a peer's gloo: the first pause and, growing, the last."""


class PostedWork(dist.Work):
    """A send or receive that gloo may not have begun yet.

    Args:
        begin: has gloo begin it.
    """

    def __init__(self, begin: Callable[[], Any]) -> None:
        super().__init__()
        self._begin = begin
        self._work: Any = None
        self._error: Exception | None = None
        self.begun = threading.Event()

    def begin(self, before: Callable[[], None]) -> bool:
        """Have it begun after something else; whether both went well."""
        try:
            before()
            self._work = self._begin()
        except Exception as error:
            self._error = error
        del self._begin  # and the tensors that it holds
        self.begun.set()
        return self._error is None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when the call has succeeded, within `timeout` where that is not 0; Ctrl-C interrupts.

        Raises:
            ExecutionError: it was not even begun in that time, or the group has ended.
            RuntimeError: of gloo.
        """
        end = time.monotonic() + (timeout.total_seconds() or float("inf"))
        while not self.begun.wait(min(SIGNALS_S, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                raise ExecutionError(f"waited {timeout} for a peer that has not made its call")
        if self._error is not None:
            raise self._error
        left = timedelta(seconds=max(0.001, end - time.monotonic())) if timeout else timeout
        return bool(self._work.wait(left))

    def is_completed(self) -> bool:
        """Whether the call has ended, in whatever way."""
        return self.begun.is_set() and (self._error is not None or bool(self._work.is_completed()))

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self.begun.is_set() and self._error is None and bool(self._work.is_success())

    def _source_rank(self) -> int:
        self.wait()
        return int(self._work._source_rank())


class Posting:
    """Begins one rank's sends and receives: those with one peer in their order.

    Args:
        gloo: what does them.
    """

    def __init__(self, gloo: InnerGloo) -> None:
        self._gloo = gloo
        self._lock = threading.Lock()
        self._lines: dict[int, deque[PostedWork]] = {}
        self._connected: set[int] = set()
        self._ended: str | None = None

    def post(self, peer: int, begin: Callable[[], Any], timeout_s: float) -> dist.Work:
        """Have a call with a peer begun: at once where gloo waits for nobody.

        Args:
            peer: with whom.
            begin: has gloo begin it.
            timeout_s: how long to wait for a peer that has not made its gloo.
        """
        with self._lock:
            if peer not in self._connected:
                return self._line_up(peer, PostedWork(begin), timeout_s)
        work: dist.Work = begin()
        return work

    def end(self, reason: str) -> None:
        """Have those fail that wait for peers, now and later."""
        self._ended = reason

    def _line_up(self, peer: int, work: PostedWork, timeout_s: float) -> dist.Work:
        line = self._lines.get(peer)
        if line is not None:
            line.append(work)
            return work
        self._lines[peer] = deque([work])
        thread = threading.Thread(
            target=self._serve, args=(peer, timeout_s), name=f"synth-peer-{peer}", daemon=True
        )
        thread.start()
        work.begun.wait(APART_S)
        return work

    def _serve(self, peer: int, timeout_s: float) -> None:
        line, is_well = self._lines[peer], True
        meet = partial(self._meet, peer, timeout_s, time.monotonic() + timeout_s)
        while True:
            with self._lock:
                if not line:
                    del self._lines[peer]
                    if is_well:
                        self._connected.add(peer)
                    return
                work = line.popleft()
            is_well = work.begin(meet) and is_well

    def _meet(self, peer: int, timeout_s: float, end: float) -> None:
        """Wait for the gloo of a peer, not in gloo: while that waits for one it connects with no other."""
        pause_s = SOONEST_S
        while not self._gloo.is_made_at(peer):
            if self._ended is not None:
                raise ExecutionError(self._ended)
            if time.monotonic() >= end:
                raise ExecutionError(f"rank {peer} made no send or receive within {timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LATEST_S)
