"""The built library with its structures and functions, as `native.h` declares them.

Calls through `at_once` keep the interpreter's lock: they are short, and to take it again may cost a busy
interpreter's switch interval. Those through `in_peace` release it.
"""

from __future__ import annotations

import ctypes
import functools
import sysconfig
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_uint8, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

SOURCES = 0x4C863C2
"""The digest in `native.h`."""

LANDING_BYTES = 256 << 10
RING_AT = 4096
"""Bytes before a ring in shared memory."""

SHELF_AT = 4096
SHELF_PLACES = 32
"""Of a shelf: bytes before its places, and their number."""


class Trouble(IntEnum):
    """What calls on channels return where they do not return a number of bytes."""

    CLOSED = -1
    DISAGREES = -2
    STRANGE = -3
    NO_MEMORY = -4
    BROKEN = -5


class Gone(IntEnum):
    """How the peer of a channel went."""

    HERE = 0
    DIED = 1
    LEFT = 2
    GAVE_UP = 3


class News(IntEnum):
    """What ends a call of `run_advance`."""

    OVER = 0
    WOKE = 1
    TIMED = 2
    INTERRUPTED = 3
    STEPPED = 4
    RUNG = 5
    ASKED = 6
    ENDED = 7
    FAILED = 8
    DIFFERS = 9


class Moment(Structure):
    """Bytes that went (or, negative, came) at a time of CLOCK_MONOTONIC."""

    _fields_ = (("seconds", c_double), ("bytes", c_int64))


class ChannelState(Structure):
    """See `struct channel`."""

    _fields_ = (
        ("fd", c_int32),
        ("gone", c_int32),
        ("part_bytes", c_int64),
        ("ring_bytes", c_int64),
        ("out_ring", c_void_p),
        ("in_ring", c_void_p),
        ("shelf", c_void_p),
        ("their_shelf", c_void_p),
        ("place_bytes", c_int64),
        ("landing", c_void_p),
        ("most", c_int64),
        ("moments", POINTER(Moment)),
        ("moments_room", c_int64),
        ("moments_count", c_int64),
        ("moved", c_int64),
        ("outbox", c_void_p),
        ("outbox_bytes", c_int64),
        ("outbox_room", c_int64),
        ("owed", c_int64),
        ("owed_trailer", c_int32),
        ("is_full", c_int32),
        ("awaits_shelf", c_int32),
        ("place", c_int32),
        ("landed_at", c_int64),
        ("landed_end", c_int64),
        ("part_left", c_int64),
        ("trailer_left", c_int32),
        ("header_have", c_int32),
        ("opening_have", c_int32),
        ("is_dry", c_int32),
        ("low_water", c_int32),
        ("code", c_int32),
        ("length", c_int32),
        ("due", c_int32),
        ("missing", c_int64),
        ("words_have", c_int32),
        ("reason_have", c_int32),
        ("header", c_uint8 * 8),
        ("opening", c_uint8 * 64),
        ("words", c_uint8 * 8),
        ("reason", c_uint8 * 2048),
    )


class ShelfState(Structure):
    """See `struct shelf`."""

    _fields_ = (
        ("readers", c_void_p),
        ("place_bytes", c_int64),
        ("least_bytes", c_int64),
        ("next", c_int64),
        ("run", c_int64),
        ("lies", c_int64 * (4 * SHELF_PLACES)),
    )


class ActionState(Structure):
    """See `struct action`."""

    _fields_ = (
        ("act", c_int32),
        ("peer", c_int32),
        ("into_buffer", c_int32),
        ("source_buffer", c_int32),
        ("into", c_int64),
        ("source", c_int64),
        ("length", c_int64),
        ("first_waiter", c_int32),
        ("waiters", c_int32),
        ("share", c_int32),
    )


class GraphState(Structure):
    """See `struct graph`."""

    _fields_ = (
        ("actions", c_int32),
        ("peers", c_int32),
        ("action", c_void_p),
        ("waits", c_void_p),
        ("waiters", c_void_p),
        ("orders", c_void_p),
    )


class PeerState(Structure):
    """See `struct peer`."""

    _fields_ = (
        ("channel", c_void_p),
        ("first_send", c_int32),
        ("sends", c_int32),
        ("first_receive", c_int32),
        ("receives", c_int32),
        ("is_told", c_int32),
        ("tells", c_int32),
        ("awaits_opening", c_int32),
        ("sent", c_int32),
        ("received", c_int32),
        ("outgoing", c_int64),
        ("incoming", c_int64),
        ("is_gone", c_int32),
    )


class RunState(Structure):
    """See `struct run`."""

    _fields_ = (
        ("graph", c_void_p),
        ("peers", c_void_p),
        ("peer_count", c_int32),
        ("missing", c_int32),
        ("left", c_void_p),
        ("local", c_void_p),
        ("local_first", c_int32),
        ("local_count", c_int32),
        ("memory", c_void_p * 4),
        ("item_bytes", c_int64),
        ("combine", c_void_p),
        ("opening", c_void_p),
        ("polls", c_void_p),
        ("bell", c_int32),
        ("steps", c_int32),
        ("progress", c_int32),
        ("moved", c_int32),
        ("asked_action", c_int32),
        ("asked_peer", c_int32),
        ("trouble", c_int32),
    )


POLL_BYTES = 8  # of a `struct pollfd`

TYPES = (
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
"""Elements that the library combines, in its order."""

OPERATORS = {
    **dict.fromkeys(("sum", "avg", "premul_sum"), 0),  # with a division after it, or a factor before
    **{name: 1 + at for at, name in enumerate(("product", "min", "max", "band", "bor", "bxor"))},
}
"""What it combines them by, as `tensors.torch_reduction` names it."""

_STRUCTURES = (ChannelState, RunState, PeerState, ActionState, GraphState, ShelfState, Moment)
"""In the order in which the library knows their sizes."""

_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "channel_open": (c_int32, (c_void_p, ctypes.c_char_p, c_int32)),
    "channel_send": (c_int64, (c_void_p, c_void_p, c_int64)),
    "channel_send_all": (c_int64, (c_void_p, c_void_p, c_int32, c_int64)),
    "channel_send_laid": (c_int64, (c_void_p, c_int64, c_int64, c_void_p, c_int64)),
    "channel_receive": (c_int64, (c_void_p, c_void_p, c_int64)),
    "channel_combine": (c_int64, (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64)),
    "channel_opening": (c_int32, (c_void_p,)),
    "channel_look": (c_int32, (c_void_p,)),
    "channel_last_words": (c_int32, (c_void_p,)),
    "channel_wanted": (c_int32, (c_void_p, c_int32, c_int32)),
    "channel_release": (None, (c_void_p,)),
    "find_combine": (c_void_p, (c_int32, c_int32)),
    "combine_once": (c_int32, (c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_int64)),
    "run_begin": (c_int32, (c_void_p,)),
    "run_advance": (c_int32, (c_void_p, c_int32, c_int32)),
    "run_complete": (None, (c_void_p, c_int32)),
    "native_layout": (c_int64, (c_int32,)),
    "native_sources": (c_int64, ()),
}


def _load(kind: type[ctypes.CDLL]) -> ctypes.CDLL:
    """The library that was built beside this file.

    Raises:
        ImportError: it was not, or of other sources.
    """
    path = Path(__file__).with_name("built" + str(sysconfig.get_config_var("EXT_SUFFIX")))
    remedy = "install arborcast again (`make install`), which needs a C compiler"
    if not path.exists():
        raise ImportError(f"{path} was not built: {remedy}")
    found = kind(str(path))
    other = ImportError(f"{path} was built of other sources than these: {remedy}")
    if not hasattr(found, "native_sources") or found.native_sources() != SOURCES:
        raise other
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    if any(found.native_layout(at) != ctypes.sizeof(each) for at, each in enumerate(_STRUCTURES)):
        raise other
    return found


at_once = _load(ctypes.PyDLL)
in_peace = _load(ctypes.CDLL)


@functools.cache
def combiner(operator: str, dtype: torch.dtype) -> int:
    """The address of what combines such elements so; 0 where there is none."""
    return at_once.find_combine(TYPES.index(dtype), OPERATORS[operator]) or 0
