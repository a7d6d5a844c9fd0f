"""The last frames of a channel; `native.h` says what frames are, and the library makes the others."""

from __future__ import annotations

import struct
from enum import IntEnum


class FrameCode(IntEnum):
    """What a frame is."""

    PART = 1  # of a message
    LAID = 2  # the same, on the sender's shelf
    OPENING = 5  # of a collective, `OPENING_BYTES` long
    ABORT = 6  # the sender gives up: its reason in UTF-8
    BYE = 7  # the sender has left the group in good order


HEADER = struct.Struct("<BxxxI")  # code, bytes that follow
REASON_BYTES = 2048  # a longer reason is cut


def abort_frame(reason: str) -> bytes:
    """The last frame of a rank that gives up, cut to `REASON_BYTES` of text."""
    text = reason.encode()[:REASON_BYTES]
    return HEADER.pack(FrameCode.ABORT, len(text)) + text


def bye_frame() -> bytes:
    """The last frame of a rank that leaves."""
    return HEADER.pack(FrameCode.BYE, 0)
