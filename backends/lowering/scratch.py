"""Working space for what arrives before it may go where it belongs, and for what only passes through.

Slots of one chunk are all of one size and are used again in the order in which they were given back: the
oldest is the one whose last reader has most likely finished, so that a receive into it need not wait.
"""

from __future__ import annotations

from collections import defaultdict, deque

from arborcast.backends.lowering.layout import Buffer, Slice


class Scratch:
    """Hands out slots, new ones while the limits allow, used ones after that.

    Args:
        limit: elements after which slots are used again wherever one is free; a need that cannot be met so
            is met beyond it.
        window: slots that each chunk may have before it uses the first again, so that as many receives
            can be posted ahead of time.
    """

    def __init__(self, limit: int, window: int) -> None:
        self.elements = 0
        self._limit = limit
        self._window = window
        self._free: dict[int, deque[int]] = defaultdict(deque)
        self._slots: dict[int, int] = defaultdict(int)

    def take(self, chunk: int, length: int, slot_length: int) -> Slice:
        """A slice of `length` elements in a slot of `slot_length`, which is the same for all of a chunk."""
        free = self._free[chunk]
        full = self._slots[chunk] >= self._window or self.elements + slot_length > self._limit
        if free and full:
            start = free.popleft()
        else:
            start = self.elements
            self.elements += slot_length
            self._slots[chunk] += 1
        return Slice(Buffer.SCRATCH, start, start + length)

    def give_back(self, chunk: int, taken: Slice) -> None:
        """The slice will not be read again by operations that are yet to be written."""
        self._free[chunk].append(taken.start)
