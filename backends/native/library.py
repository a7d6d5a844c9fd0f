"""The built library with its structures and functions, read in `native.h`, which declares them.

Calls through `at_once` keep the interpreter's lock: they are short, and to take it again may cost a busy
interpreter's switch interval. Those through `in_peace` release it.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sysconfig
from collections.abc import Iterator
from ctypes import Structure, c_double, c_int32, c_int64, c_uint8, c_void_p
from enum import IntEnum
from keyword import iskeyword
from pathlib import Path
from typing import Any

import torch

_HEADER = re.sub(r"/\*.*?\*/", "", Path(__file__).with_name("native.h").read_text(), flags=re.DOTALL)
_DECLARATION = re.compile(r"(?:const )?(?:struct \{([^}]*)\}|(?:struct )?(\w+)) ([^;]+);")
_DECLARATOR = re.compile(r"(\*?)(\w+)(?:\[(\w+)\])?")
_FUNCTION = re.compile(r"^(\w+ \*?)(\w+)\(([^)]*)\);", re.MULTILINE)
_C_TYPES: dict[str, Any] = {
    "void": None,
    "int32_t": c_int32,
    "int64_t": c_int64,
    "uint8_t": c_uint8,
    "double": c_double,
}


def _constant(name: str) -> int:
    """A number that the header names."""
    found = re.search(rf"\b{name} (?:= )?(\w+)(?: << (\d+))?", _HEADER)
    assert found is not None, "the header has it"
    return int(found[1], 0) << int(found[2] or 0)


def _enumeration(name: str) -> Any:
    """The numbers of an enumeration of the header, by name."""
    found = re.search(rf"^enum {name} \{{(.*?)\}};", _HEADER, re.DOTALL | re.MULTILINE)
    assert found is not None, "the header has it"
    numbers: dict[str, int] = {}
    for word, number in re.findall(r"(\w+)(?: = (-?\d+))?", found[1]):
        numbers[word] = int(number) if number else len(numbers)
    return IntEnum(name, numbers)


def _structure(name: str) -> type[Structure]:
    """A structure of the header; a field whose name is a keyword of Python ends with an underscore."""
    found = re.search(rf"^struct {name} \{{(.*?)^\}};", _HEADER, re.DOTALL | re.MULTILINE)
    assert found is not None, "the header has it"
    return type(name, (Structure,), {"_fields_": tuple(_fields(found[1]))})


def _fields(body: str) -> Iterator[tuple[str, Any]]:
    for inner, base, declarators in _DECLARATION.findall(body):
        for star, name, room in _DECLARATOR.findall(declarators):
            if star:
                kind: Any = c_void_p
            elif inner:
                kind = type(name, (Structure,), {"_fields_": tuple(_fields(inner))})
            else:
                kind = _C_TYPES[base]
            count = int(room) if room.isdecimal() else _constant(room) if room else 0
            yield name + "_" * iskeyword(name), kind * count if count else kind


SOURCES = _constant("SOURCES")
"""The digest of the sources."""

LANDING_BYTES = _constant("LANDING_BYTES")
REASON_BYTES = _constant("REASON_BYTES")
"""Of what a rank that gives up says; the rest is cut."""

RING_AT = _constant("RING_AT")
"""Bytes before a ring in shared memory."""

SHELF_AT = _constant("SHELF_AT")
SHELF_PLACES = _constant("SHELF_PLACES")
"""Of a shelf: bytes before its places, and their number."""


FrameCode = _enumeration("frame_code")
"""What a frame is."""

Trouble = _enumeration("trouble")
"""What calls on channels return where they do not return a number of bytes."""

Gone = _enumeration("gone")
"""How the peer of a channel went."""

RunEvent = _enumeration("run_event")
"""What ends a call of `run_advance`."""

ChannelState = _structure("channel")
RunState = _structure("run")
PeerState = _structure("peer")
ActionState = _structure("action")
GraphState = _structure("graph")
ShelfState = _structure("shelf")
Moment = _structure("moment")
"""Bytes that went (or, negative, came) at a time of CLOCK_MONOTONIC."""

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
    for result, name, arguments in _FUNCTION.findall(_HEADER):
        function = getattr(found, name)
        function.restype = _type(result)
        function.argtypes = [_type(each) for each in arguments.split(",") if each != "void"]
    # Not of the header, as it is for tests alone.
    found.combine_once.argtypes = (c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_int64)
    if any(found.native_layout(at) != ctypes.sizeof(each) for at, each in enumerate(_STRUCTURES)):
        raise other
    return found


def _type(declared: str) -> Any:
    """Of a result, or of an argument."""
    return c_void_p if "*" in declared else _C_TYPES[declared.split(maxsplit=1)[0]]


at_once = _load(ctypes.PyDLL)
in_peace = _load(ctypes.CDLL)


@functools.cache
def combiner(operator: str, dtype: torch.dtype) -> int:
    """The address of what combines such elements so, truth values as bytes; 0 where there is none."""
    dtype = torch.uint8 if dtype is torch.bool else dtype
    return at_once.find_combine(TYPES.index(dtype), OPERATORS[operator]) or 0
