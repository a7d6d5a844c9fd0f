"""A second connection to the store of a job, one for all groups of a process.

A connection to a TCP store serves one thread at a time, waits included: what waits in the thread of a group
must not keep the caller's thread, or another group's, from what the other rank waits for in turn. So this one
never waits in the store: it asks again and again.
"""

from __future__ import annotations

import os
import time
import weakref
from datetime import timedelta
from typing import Any, cast

from torch._C import _distributed_c10d as c10d

from arborcast.backends.tensors.torch_compat import DistStoreError, PrefixStore, Store, timeout_of

SOONEST_S, LATEST_S = 0.0002, 0.01
"""Between two questions: the first and, growing, the last."""


class SharedStore(c10d.Store):
    """A store that many threads may wait at.

    Args:
        connection: that nobody else uses.

    Attributes:
        underlying_store: the connection.
    """

    def __init__(self, connection: Store) -> None:
        super().__init__()
        self.underlying_store = connection

    def set(self, key: str, value: Any) -> None:
        """See torch's."""
        self.underlying_store.set(key, value)

    def get(self, key: str) -> bytes:
        """See torch's; waits for the key as long as the connection would."""
        self.wait([key])
        return self.underlying_store.get(key)

    def check(self, keys: list[str]) -> bool:
        """See torch's."""
        return self.underlying_store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See torch's.

        Raises:
            RuntimeError: not all keys are there in time.
        """
        seconds = (timeout_of(self.underlying_store) if timeout is None else timeout).total_seconds()
        end, pause = time.monotonic() + seconds, SOONEST_S
        while not self.check(keys):
            left = end - time.monotonic()
            if left <= 0:
                raise DistStoreError(f"waited {seconds:g} s for {', '.join(keys)}")
            time.sleep(min(pause, left))
            pause = min(2 * pause, LATEST_S)


_shared: weakref.WeakValueDictionary[tuple[int, str, int], SharedStore] = weakref.WeakValueDictionary()
"""Of this process (a child has none of its parent's), by the server."""


def shared_store(store: Store) -> Store:
    """Another connection to the same store without its prefixes; keep it as long as it is used.

    Args:
        store: any of torch's; only TCP stores have connections that are shared.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, c10d.TCPStore):
        return cast(Store, cast(Any, store).clone())
    key = os.getpid(), store.host, store.port
    found = _shared.get(key)
    try:
        if found is not None and not found.check(["arborcast"]):
            return found
    except RuntimeError:
        pass  # of a job that has ended
    made = _shared[key] = SharedStore(cast(Any, store).clone())
    return made
