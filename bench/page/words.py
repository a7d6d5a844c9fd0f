"""Figures in words: three significant digits, the unit that fits, and a dash for what is not known (NaN)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from arborcast.synth.formats.sizes import format_size

DASH = "–"
Format: TypeAlias = Callable[[float], str]


def digits(value: float | None, significant: int = 3) -> str:
    """With so many significant digits and no exponent."""
    if value is None or not math.isfinite(value):
        return DASH
    if value == 0:
        return "0"
    exponent = int(f"{value:.{significant - 1}e}".partition("e")[2])
    places = max(0, significant - 1 - exponent)
    return f"{value:,.{places}f}"


def two_digits(value: float | None) -> str:
    """With two significant digits."""
    return digits(value, 2)


def scaled(unit: str, factor: float = 1.0, significant: int = 3) -> Format:
    """Of a unit that is so many of what is given, such as GB of bytes."""
    return lambda value: DASH if math.isnan(value) else f"{digits(value / factor, significant)} {unit}"


megabytes = scaled("MB", 1e6)
gigabytes = scaled("GB", 1e9)


def tiny(value: float) -> str:
    """A difference far below 1, with two significant digits and its power of ten."""
    if math.isnan(value):
        return DASH
    return "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def count(value: float) -> str:
    """A whole number."""
    return DASH if math.isnan(value) else f"{round(value):,}"


def duration(microseconds: float) -> str:
    """In microseconds, milliseconds or seconds."""
    for limit, unit in ((1e3, "us"), (1e6, "ms")):
        if microseconds < 0.9995 * limit:  # 999.6 us reads as 1.00 ms
            return f"{digits(microseconds * 1e3 / limit)} {unit}"
    return DASH if math.isnan(microseconds) else f"{digits(microseconds / 1e6)} s"


def seconds(value: float) -> str:
    """As `duration`, from seconds."""
    return duration(value * 1e6)


def times(ratio: float) -> str:
    """How many times as fast."""
    return DASH if math.isnan(ratio) else f"{digits(ratio)}×"


def percent(share: float) -> str:
    """A share of one."""
    return DASH if math.isnan(share) else f"{100 * share:.1f} %"


def size(size_bytes: float) -> str:
    """A message's size."""
    return DASH if math.isnan(size_bytes) else format_size(int(size_bytes))


def plural(number: float, thing: str) -> str:
    """A number of things."""
    return f"{int(number):,} {thing if number == 1 else thing + 's'}"


def listed(items: Sequence[str]) -> str:
    """Items with commas and an "and"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else DASH
