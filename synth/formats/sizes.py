"""Message sizes as people write them: `64KiB`, `16MiB`, `1e6`, `128M`, and ranges of them.

Every command that takes a size reads it here, so that a size means the same everywhere. K, M, G alone are
powers of 1024, as in nccl-tests; kB, MB, GB are powers of 1000.
"""

from __future__ import annotations

import re
from fractions import Fraction

from arborcast.synth.errors import InputError

LARGEST_SIZE = 1 << 60
"""Bytes; above it the readers of sizes refuse (a slip of the keyboard, not a message)."""

_BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_UNITS = (
    {f"{prefix}ib" if prefix else "b": factor for prefix, factor in _BINARY.items()}
    | _BINARY
    | {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
)
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?(?:e\+?\d{1,2})?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_RULE = "must be a whole number of bytes from 1 to 1 EiB such as 65536, 64KiB, 16M, 1.5MB or 1e6"


def parse_size(text: str) -> int:
    """Bytes of a size such as `64KiB`, `16M`, `1.5MB` or `1e6`; upper and lower case mean the same.

    Raises:
        InputError: not a number with a known unit, not a whole number of bytes, zero, or above 1 EiB.
    """
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise InputError(f"size {text!r}: {_RULE}")
    size = Fraction(match[1]) * factor
    if size.denominator != 1 or not 1 <= size <= LARGEST_SIZE:
        raise InputError(f"size {text!r}: {_RULE}")
    return int(size)


def size_range(text: str) -> tuple[int, ...]:
    """The sizes of a range: `64KiB:256MiB` doubles from the first while not above the last; `16MiB` is one.

    Raises:
        InputError: a part is no size, there are more than two parts, or the last is below the first.
    """
    first, *rest = (parse_size(part) for part in text.split(":", maxsplit=1))
    last = rest[0] if rest else first
    if last < first:
        raise InputError(
            f"sizes {text!r}: the last must not be below the first, got {first} and {last} bytes"
        )
    return tuple(first << doublings for doublings in range((last // first).bit_length()))


def format_size(size_bytes: int) -> str:
    """A size such as `64 KiB`, in the largest unit that divides it; `parse_size` reads it back."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size_bytes % 1024 or not size_bytes:
            break
        size_bytes //= 1024
        unit = larger
    return f"{size_bytes} {unit}"
