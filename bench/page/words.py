"""Figures in words: three significant digits, the unit that fits, and a dash for what is not known."""

from __future__ import annotations

import math

from arborcast.synth.formats.sizes import format_size

DASH = "–"


def digits(value: float | None, significant: int = 3) -> str:
    """With so many significant digits and no exponent."""
    if value is None or not math.isfinite(value):
        return DASH
    if value == 0:
        return "0"
    exponent = int(f"{value:.{significant - 1}e}".partition("e")[2])
    places = max(0, significant - 1 - exponent)
    return f"{value:,.{places}f}"


def tiny(value: float | None) -> str:
    """A difference far below 1, with two significant digits and its power of ten."""
    if value is None or not math.isfinite(value):
        return DASH
    return "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def count(value: float | None) -> str:
    """A whole number."""
    return DASH if value is None else f"{round(value):,}"


def duration(microseconds: float | None) -> str:
    """In microseconds, milliseconds or seconds."""
    if microseconds is None:
        return DASH
    for limit, unit in ((1e3, "us"), (1e6, "ms")):
        if microseconds < 0.9995 * limit:  # 999.6 us reads as 1.00 ms
            return f"{digits(microseconds * 1e3 / limit)} {unit}"
    return f"{digits(microseconds / 1e6)} s"


def seconds(value: float | None) -> str:
    """As `duration`, from seconds."""
    return duration(None if value is None else value * 1e6)


def times(ratio: float | None) -> str:
    """How many times as fast."""
    return DASH if ratio is None else f"{digits(ratio)}×"


def percent(share: float | None) -> str:
    """A share of one."""
    return DASH if share is None else f"{100 * share:.1f} %"


def size(size_bytes: float | None) -> str:
    """A message's size."""
    return DASH if size_bytes is None else format_size(int(size_bytes))


def plural(number: int, thing: str) -> str:
    """A number of things."""
    return f"{number:,} {thing if number == 1 else thing + 's'}"


def listed(items: list[str]) -> str:
    """Items with commas and an "and"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else DASH
