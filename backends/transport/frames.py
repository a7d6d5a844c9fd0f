"""The last frames of a channel; `native.h` says what frames are, and the library makes the others."""

from __future__ import annotations

import struct

from arborcast.backends.native.library import REASON_BYTES, FrameCode

HEADER = struct.Struct("<BxxxI")  # code, bytes that follow


def abort_frame(reason: str) -> bytes:
    """The last frame of a rank that gives up, cut to `REASON_BYTES` of text."""
    text = reason.encode()[:REASON_BYTES]
    return HEADER.pack(FrameCode.ABORT, len(text)) + text


def bye_frame() -> bytes:
    """The last frame of a rank that leaves."""
    return HEADER.pack(FrameCode.BYE, 0)
