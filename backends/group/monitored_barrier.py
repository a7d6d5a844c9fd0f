"""A barrier that says who did not come; over the store, so that it works where connections do not.

Each rank leaves word that it has come, rank 0 looks for that of all others, and leaves its verdict for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from arborcast.backends.errors import ExecutionError
from arborcast.backends.tensors.torch_compat import Store

LOOK_S = 0.005
"""How often the store is asked: nobody else may use it while it is waited for."""

VERDICT_S = 30.0
"""So much longer than rank 0 may take do the others wait for its verdict."""

PASSED = b"passed"


class MonitoredBarrier:
    """One rank's; all ranks call it as often as each other.

    Args:
        store: for this barrier alone.
        rank: this one.
        size: ranks of the group.
        while_waiting: called again and again.
    """

    def __init__(self, store: Store, rank: int, size: int, while_waiting: Callable[[], None]) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._while_waiting = while_waiting
        self._calls = 0

    def wait(self, timeout_s: float, *, name_all: bool) -> None:
        """Return when all ranks have called it.

        Args:
            timeout_s: how long rank 0 waits for the others.
            name_all: whether to wait for all, and name all that did not come, or only the first.

        Raises:
            ExecutionError: with those that did not come, in the words that torch's own has for it.
        """
        self._calls += 1
        verdict = f"{self._calls}/verdict"
        if self._rank > 0:
            self._store.set(f"{self._calls}/{self._rank}", "here")
            came = self._comes(verdict, time.monotonic() + timeout_s + VERDICT_S)
            said = self._store.get(verdict) if came else b"rank 0 left no verdict"
            if said != PASSED:
                raise ExecutionError(
                    f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while "
                    f"waiting for send/recv from rank 0: {said.decode()}"
                )
            return
        end = time.monotonic() + timeout_s
        missing: list[int] = []
        for rank in range(1, self._size):
            if not self._comes(f"{self._calls}/{rank}", end):
                missing.append(rank)
                if not name_all:
                    break
        if not missing:
            self._store.set(verdict, PASSED.decode())
            return
        who = f"Rank{'s' * name_all} {', '.join(map(str, missing))} failed to pass monitoredBarrier"
        failure = f"Rank 0 timed out in monitoredBarrier after {timeout_s * 1e3:.0f} ms: {who}"
        self._store.set(verdict, failure)
        raise ExecutionError(failure)

    def _comes(self, key: str, end: float) -> bool:
        while not self._store.check([key]):
            if time.monotonic() >= end:
                return False
            self._while_waiting()
            time.sleep(LOOK_S)
        return True
