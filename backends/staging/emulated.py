"""A device for machines without one: host memory whose copies take as long as they are told to.

What overlaps with what can so be seen, tested and measured where there are only processors.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction

import torch
from torch import Tensor

from arborcast.backends.staging.device import CopyCosts, CopyDirection, CopyThread, Done


class EmulatedDevice:
    """All tensors in host memory lie on it; see `device.Device`.

    Each direction has a thread, as a GPU has an engine. A copy ends when those before it in its direction
    have and its own time has passed since; sleeping too long for one does not delay the next.

    Args:
        rate: of each direction, GB/s.
        each_us: what every copy takes besides its bytes.
    """

    def __init__(self, rate: Fraction, each_us: Fraction = Fraction(0)) -> None:
        self.costs = CopyCosts(rate, each_us)
        self._threads = {
            way: CopyThread(f"device-{way.name.lower()}") for way in (CopyDirection.IN, CopyDirection.OUT)
        }
        self._free_at = dict.fromkeys(self._threads, 0.0)

    def holds(self, tensor: Tensor) -> bool:
        """See `Device`."""
        return tensor.device.type == "cpu"

    def host_memory(self, nbytes: int) -> Tensor:
        """See `Device`."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, way: CopyDirection, into: Tensor, source: Tensor, done: Done) -> None:
        """See `Device`; from one place on the device to another a copy takes no time of its directions."""
        if way is CopyDirection.WITHIN:
            into.copy_(source)
            done(None)
            return
        took_us = self.costs.time_us(Fraction(into.numel() * into.itemsize), 1)
        end = max(self._free_at[way], time.perf_counter()) + float(took_us) / 1e6
        self._free_at[way] = end

        def finish() -> None:
            while (left := end - time.perf_counter()) > 0:
                time.sleep(left)
            into.copy_(source)

        self._threads[way].put(finish, done)

    def entering(self, tensor: Tensor) -> AbstractContextManager[None]:
        """See `Device`: there are no streams."""
        return nullcontext()

    def close(self) -> None:
        """See `Device`."""
        for thread in self._threads.values():
            thread.close()
