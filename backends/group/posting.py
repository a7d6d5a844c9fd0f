"""Sends and receives of a gloo that connects two ranks at their first message: posted at once, begun later.

Gloo begins the first call with a peer only when the peer makes one with this rank, and keeps the thread that
calls until then. The peer may first wait for this rank, in a collective. So first calls are begun in threads
of their own, one for each peer, which end with what was posted meanwhile; later ones by the caller itself.
(That threads begin calls with different peers at once, gloo's lazy way allows for: it locks its list of
connections, https://github.com/pytorch/gloo/pull/427, which torch's lazy way was made upon.)

A receive from anybody needs the gloo of all ranks, those included that never send: who posts one asks for
them, and a rank that waits long in a collective, and so may wait for the one that asks, answers.
Receives by the same tag that the same message could go to are begun in the order in which they were posted;
gloo itself then fills one from a certain rank before an earlier one from anybody, where both wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from arborcast.backends.errors import ExecutionError
from arborcast.backends.group.inner_gloo import InnerGloo
from arborcast.backends.group.work import SIGNALS_S
from arborcast.backends.tensors.torch_compat import PrefixStore, Store
from arborcast.synth.errors import InputError

SOONEST_S, LATEST_S = 0.0002, 0.02
"""Between two looks for a peer's gloo: the first pause and, growing, the last."""

ANSWER_S = 1.0
"""A rank that waits in a collective looks so often whether another one needs its gloo."""

END_S = 0.5
"""How long a group that ends waits for threads that look for peers."""

ANYBODY = -1
"""In the place of a peer."""


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
        self._has_ended = False
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
        if self._has_ended:  # gloo would wait for another message
            return True
        end = time.monotonic() + (timeout.total_seconds() or float("inf"))
        while not self.begun.wait(min(SIGNALS_S, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                raise ExecutionError(f"waited {timeout} for a peer that has not made its call")
        if self._error is not None:
            raise self._error
        left = timedelta(seconds=max(0.001, end - time.monotonic())) if timeout else timeout
        self._has_ended = bool(self._work.wait(left))
        return self._has_ended

    def is_completed(self) -> bool:
        """Whether the call has ended, in whatever way."""
        return self.begun.is_set() and (self._error is not None or bool(self._work.is_completed()))

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self.begun.is_set() and self._error is None and bool(self._work.is_success())

    def _source_rank(self) -> int:  # of a work that has been waited for
        return int(self._work._source_rank())


class Posting:
    """Begins one rank's sends and receives: those with one peer in their order.

    Args:
        gloo: what does them.
        others: all other ranks.
    """

    def __init__(self, gloo: InnerGloo, others: Iterable[int]) -> None:
        self._gloo = gloo
        self._others = tuple(others)
        self._lock = threading.Lock()
        self._lines: dict[int, deque[tuple[PostedWork, list[PostedWork], float]]] = {}
        self._receives: list[tuple[int, int, PostedWork]] = []  # peer, tag, work; not begun yet
        self._connected: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._next_answer = 0.0
        self._ended: str | None = None

    def post(
        self, method: str, tensors: Sequence[Tensor], peer: int, tag: int, timeout_s: float
    ) -> dist.Work:
        """Have a call begun: at once where gloo waits for nobody.

        Args:
            method: "send", "recv" or "recv_anysource".
            tensors: of the call.
            peer: with whom; `ANYBODY` for a receive from whoever sends.
            tag: of the message.
            timeout_s: how long to wait for a peer that has not made its gloo.
        """
        arguments = (tensors, tag) if peer == ANYBODY else (tensors, peer, tag)
        begin = partial(getattr(self._gloo.get(), method), *arguments)
        received_by = None if method == "send" else tag
        with self._lock:
            earlier = [] if received_by is None else self._rivals(peer, received_by)
            if earlier or peer in self._lines or peer not in self._connected:
                work = PostedWork(begin)
                if received_by is not None:
                    self._receives.append((peer, received_by, work))
                self._line_up(peer, work, earlier, timeout_s)
                return work
        begun: dist.Work = begin()
        return begun

    def answer(self) -> None:
        """Make this rank's gloo where another one needs that of all; called while a collective waits.

        In a thread of its own: the store may be on a host that is gone.
        """
        now = time.monotonic()
        if now < self._next_answer or self._gloo.is_made or self._ended is not None:
            return
        self._next_answer = now + ANSWER_S
        with self._lock:
            if not any(thread.name == _ANSWERS and thread.is_alive() for thread in self._threads):
                self._start(self._make_if_asked, name=_ANSWERS)

    def set_timeout(self, timeout: timedelta) -> None:
        """Of calls from now on."""
        self._gloo.set_timeout(timeout)

    def end(self, reason: str) -> None:
        """Have those fail that wait for peers, now and later."""
        self._ended = reason

    def fail(self) -> None:
        """Those that have begun, too, here and on the other ranks."""
        self._gloo.end()

    def join(self) -> None:
        """Once that has been said, wait for the threads: none should be in C++ when the process ends."""
        end = time.monotonic() + END_S
        for thread in list(self._threads):
            thread.join(max(0.0, end - time.monotonic()))

    def _rivals(self, peer: int, tag: int) -> list[PostedWork]:
        """Receives that come before one from that peer, and have not begun; those of its own line come so."""
        self._receives = [it for it in self._receives if not it[2].begun.is_set()]
        return [
            work
            for other, by, work in self._receives
            if by == tag and other != peer and ANYBODY in (other, peer)
        ]

    def _line_up(self, peer: int, work: PostedWork, earlier: list[PostedWork], timeout_s: float) -> None:
        entry = work, earlier, time.monotonic() + timeout_s
        if peer in self._lines:
            self._lines[peer].append(entry)
            return
        self._lines[peer] = deque([entry])
        self._start(self._serve, peer, timeout_s, name=f"synth-peer-{'any' if peer == ANYBODY else peer}")

    def _start(self, function: Callable[..., None], *arguments: Any, name: str) -> None:
        self._threads = [it for it in self._threads if it.is_alive()]
        thread = threading.Thread(target=function, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _make_if_asked(self) -> None:
        with suppress(RuntimeError, ExecutionError):  # the store, or the group, has ended
            self._gloo.answer()

    def _serve(self, peer: int, timeout_s: float) -> None:
        line, is_well = self._lines[peer], True
        while True:
            with self._lock:
                self._receives = [it for it in self._receives if not it[2].begun.is_set()]
                if not line:
                    del self._lines[peer]
                    if is_well:
                        self._connected.add(peer)
                    return
                work, earlier, end = line.popleft()
            is_well = work.begin(partial(self._meet, peer, earlier, timeout_s, end)) and is_well
            del work, earlier  # and the tensors that gloo's works hold

    def _meet(self, peer: int, earlier: Sequence[PostedWork], timeout_s: float, end: float) -> None:
        """Wait for the gloo of a peer, not in gloo: while that waits for one it connects with no other."""
        if peer == ANYBODY and self._others and not self._gloo.are_made_at(self._others):
            self._gloo.ask_for_all()
        for one in self._others if peer == ANYBODY else (peer,):
            pause_s = SOONEST_S
            while not self._gloo.are_made_at([one]):
                if self._ended is not None:
                    raise ExecutionError(self._ended)
                if time.monotonic() >= end:
                    raise ExecutionError(f"rank {one} made no send or receive within {timeout_s:g} s")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LATEST_S)
        for work in earlier:
            work.begun.wait()


_ANSWERS = "synth-answers"
"""The name of a thread."""


class CablePosting:
    """Sends and receives along cables: a gloo of two ranks on each, as one gloo would connect all ranks.

    Args:
        store: of the group, for these alone.
        rank: this one.
        ends: with whom there is a link, and the addresses of its ends, this rank's first.
        timeout: of calls.
    """

    def __init__(
        self, store: Store, rank: int, ends: Mapping[int, tuple[str, str] | None], timeout: timedelta
    ) -> None:
        self._rank = rank
        self._of: dict[int, Posting] = {}
        for peer, addresses in ends.items():
            own = PrefixStore(f"{min(rank, peer)}-{max(rank, peer)}", store)
            address = None if addresses is None else addresses[0]
            gloo = InnerGloo(own, int(rank > peer), 2, timeout, address=address)
            self._of[peer] = Posting(gloo, [int(rank < peer)])

    def post(
        self, method: str, tensors: Sequence[Tensor], peer: int, tag: int, timeout_s: float
    ) -> dist.Work:
        """Have `send` or `recv` begun; see `Posting.post`.

        Raises:
            InputError: there is no link to that rank, or none is named.
        """
        if peer not in self._of:
            whom = "whoever sends" if peer == ANYBODY else f"rank {peer}"
            raise InputError(
                f"{method}: must be with a rank that a link joins with rank {self._rank}, as links have "
                f"addresses, got {whom}"
            )
        return self._of[peer].post(method, tensors, int(self._rank < peer), tag, timeout_s)

    def answer(self) -> None:
        """Nothing: whoever posts a receive names the rank."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Of calls from now on."""
        for posting in self._of.values():
            posting.set_timeout(timeout)

    def end(self, reason: str) -> None:
        """Have those fail that wait for peers, now and later."""
        for posting in self._of.values():
            posting.end(reason)

    def fail(self) -> None:
        """See `Posting.fail`."""
        for posting in self._of.values():
            posting.fail()

    def join(self) -> None:
        """See `Posting.join`."""
        for posting in self._of.values():
            posting.join()
