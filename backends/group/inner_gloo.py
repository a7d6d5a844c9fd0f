"""The gloo of a group, which is there from the first call that needs it: most groups never make one.

A rank that makes its own waits for no other, and connects with another rank at the first message between them
(gloo's lazy way), so that two ranks may exchange a tensor while the others do something else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from arborcast.backends.errors import ExecutionError
from arborcast.backends.tensors.torch_compat import Store, break_gloo, new_gloo

_ALL = "all"
"""The key that says that a rank needs the gloo of all others."""


class InnerGloo:
    """Makes a gloo when it is first asked for; from any thread.

    Args:
        store: of the group, for this gloo alone; its threads wait there for other ranks, so that it must
            not be one that the caller's thread uses.
        rank: this one.
        size: ranks of the group.
        timeout: of its calls.
        has_ring: whether all ranks make its calls together.
        address: of this host, by which it is to be reached; None where that does not matter.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        has_ring: bool = False,
        address: str | None = None,
    ) -> None:
        self._timeout = timeout
        self._store = store
        self._rank = rank
        self._make: Callable[[], Any] = lambda: new_gloo(store, rank, size, self._timeout, address)
        self._has_ring = has_ring
        self._lock = threading.Lock()
        self._made: Any = None
        self._is_broken = False

    def get(self) -> Any:
        """It.

        Raises:
            ExecutionError: the group has failed before there was one.
        """
        with self._lock:
            if self._made is None:
                if self._is_broken:
                    raise ExecutionError("the group has failed, and starts nothing more")
                self._made = self._make()
                self._store.set(f"made/{self._rank}", "")
            return self._made

    def of_timeout(self, timeout_s: float) -> Any:
        """It, whose calls fail from now on after so many seconds; raises as `get`."""
        gloo = self.get()
        gloo._set_default_timeout(timedelta(seconds=timeout_s))
        return gloo

    @property
    def is_made(self) -> bool:
        """Whether this rank has made its own."""
        return self._made is not None

    def are_made_at(self, ranks: Iterable[int]) -> bool:
        """Whether other ranks have all made their own."""
        return bool(self._store.check([f"made/{rank}" for rank in ranks]))

    def ask_for_all(self) -> None:
        """Have all other ranks make their own, as soon as they `answer`."""
        self._store.set(_ALL, "")

    def answer(self) -> None:
        """Make it where a rank has asked for all."""
        if self._store.check([_ALL]):
            self.get()

    def set_timeout(self, timeout: timedelta) -> None:
        """That of its calls from now on."""
        with self._lock:
            made, is_new, self._timeout = self._made, timeout != self._timeout, timeout
        if made is not None and is_new:  # gloo tells the group, which tells this once more
            made._set_default_timeout(timeout)

    def end(self) -> None:
        """End all its calls, now and later, here and on ranks that wait for this one; once is enough."""
        with self._lock:
            made, self._is_broken = None if self._is_broken else self._made, True
        if made is not None:
            break_gloo(made, has_ring=self._has_ring)
