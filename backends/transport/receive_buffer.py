"""Where the bytes of a stream land and wait to be used: many short frames by one read.

    buffer    ....| header | part | trailer | header | part | trailer | header | pa|.......
                  ^ at                                                       ^ end

Every frame begins at a multiple of 8 (see `frames.trailer_bytes`), so that the elements of a part can be
computed on where they lie.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from arborcast.backends.transport.frames import HEADER, Code

READ_BYTES = 256 << 10  # at most by one read, unless a frame is longer
LONG_BYTES = 64 << 10  # a frame of more is read alone


class ReceiveBuffer:
    """A buffer with unread bytes in it.

    Args:
        frame_bytes: of the longest frame that it must hold.

    Attributes:
        memory: all of it.
        at: where the first unread byte is.
        end: behind the last one.
    """

    __slots__ = ("at", "end", "memory")

    def __init__(self, frame_bytes: int) -> None:
        # Not `bytearray`, which would touch all of it now.
        memory: Any = np.empty(max(frame_bytes + HEADER.size, READ_BYTES), np.uint8)
        self.memory = memoryview(memory)
        self.at = self.end = 0

    def part(self, length: int) -> memoryview | None:
        """The next frame's bytes if it is a part of that length, whole and good; it is then done with.

        It may be read until the next call of `room`.
        """
        at = self.at
        after = at + (length | 7) + 9  # `part_frame_bytes`, in line: this is called for each part
        if after > self.end:
            return None
        buffer = self.memory
        if buffer[after - 1] != 1 or HEADER.unpack_from(buffer, at) != (Code.PART, length):
            return None
        self.at = after
        return buffer[at + 8 : at + 8 + length]

    def header(self) -> tuple[int, int] | None:
        """Code and length of the next frame, where its header is here."""
        if self.end - self.at < HEADER.size:
            return None
        code, length = HEADER.unpack_from(self.memory, self.at)
        return code, length

    def room(self, frame_bytes: int, *, alone: bool) -> memoryview:
        """Where to read to, so that the rest of a frame of that length fits; never empty.

        Args:
            frame_bytes: of the frame, or the trailer, that begins at `at`.
            alone: whether to read only the header of the next frame with it: for long ones, since what is
                read ahead of a long part must be copied.
        """
        held = self.end - self.at
        start = self.at & 7  # of a frame 0; of a trailer what lets the next frame begin at a multiple of 8
        if not held:
            self.at = self.end = start
        stop = self.at + frame_bytes + HEADER.size
        if stop > (len(self.memory) if alone else READ_BYTES):
            self.memory[start : start + held] = self.memory[self.at : self.end]
            self.at, self.end, stop = start, start + held, stop - self.at + start
        return self.memory[self.end : stop if alone else READ_BYTES]

    def behind(self, trailer_bytes: int) -> memoryview:
        """Where to read a trailer and the next header to, when a part is read to another place.

        Nothing else may be here.
        """
        self.at = self.end = HEADER.size - trailer_bytes
        return self.memory[self.at : 2 * HEADER.size]

    def clear(self) -> None:
        """Forget what is unread."""
        self.at = self.end = 0

    def drop(self, size: int) -> memoryview:
        """The first `size` unread bytes, which are done with."""
        at = self.at
        self.at = at + size
        return self.memory[at : self.at]
