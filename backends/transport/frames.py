"""The bytes between two ends of a channel that are not the caller's: codes, lengths, openings, last words.

Both kinds of channel use the same codes; a stream puts them into headers of one size, so that a header can
be read ahead with the bytes before it, shared memory into single bytes wherever one will do.
"""

from __future__ import annotations

import struct
from enum import IntEnum


class Code(IntEnum):
    """What a frame is."""

    PART = 1  # of a message: its length, then (stream) its bytes or (shared memory) the next slot
    WHOLE_SLOT = 2  # shared memory: a part that fills the next slot
    INLINE = 3  # shared memory: a short part, its bytes behind its length
    GIVEN_BACK = 4  # shared memory: the oldest slot in use is free again
    OPENING = 5  # of a collective, `OPENING_BYTES` long
    ABORT = 6  # the sender gives up: its reason in UTF-8
    BYE = 7  # the sender has left the group in good order


HEADER = struct.Struct("<BxxxI")  # code, bytes that follow
REASON_BYTES = 2048  # a longer reason is cut


GOOD_TRAILERS = tuple(b"\1" * (8 - length) for length in range(8))
"""What ends a part in a stream, by its length modulo 8; all zeros say that the part is not what it should be.

Its own length makes that of the frame a multiple of 8, as those of headers and openings are.
"""


def part_frame_bytes(length: int) -> int:
    """Of the frame of a part of that length in a stream: header, part and trailer."""
    return HEADER.size + (length | 7) + 1


def abort_frame(reason: str) -> bytes:
    """The last frame of a rank that gives up, cut to `REASON_BYTES` of text."""
    text = reason.encode()[:REASON_BYTES]
    return HEADER.pack(Code.ABORT, len(text)) + text


def bye_frame() -> bytes:
    """The last frame of a rank that leaves."""
    return HEADER.pack(Code.BYE, 0)


def opening_frame(opening: bytes) -> bytes:
    """The frame of an opening."""
    return HEADER.pack(Code.OPENING, len(opening)) + opening
