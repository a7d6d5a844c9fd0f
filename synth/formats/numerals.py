"""Exact numbers from text: whole numbers, decimals and fractions, read without ever passing a float.

What is read here comes from strangers' files, so lengths and exponents are limited before any number is
made: `Fraction("1e999999999")` alone would fill the memory.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 400
MAX_EXPONENT = 60

_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([+-]?[0-9]+))?")
_RATIO = re.compile(r"[+-]?[0-9]+/[0-9]+")


def parse_number(value: object) -> Fraction:
    """The exact value of a whole number, a decimal (0.7 means 7/10) or text such as "25/2" or "0.7".

    A float counts as the decimal it is printed as.

    Raises:
        ValueError: it is none of these; the message is the rule and the value, without the place.
    """
    match value:
        case bool() | None:
            raise ValueError(f"must be a number, got {shorten(value)}")
        case Fraction():
            return value
        case int():
            number = Fraction(value)
        case float() | str():
            number = _parse_text(str(value).strip())
        case _:
            raise ValueError(f"must be a number, got {shorten(value)}")
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > MAX_DIGITS * 10 // 3:
        raise ValueError(f"must have at most {MAX_DIGITS} digits, got {shorten(value)}")
    return number


def _parse_text(text: str) -> Fraction:
    if len(text) > 2 * MAX_DIGITS + 2:
        raise ValueError(f"must have at most {MAX_DIGITS} digits, got {shorten(text)}")
    if _RATIO.fullmatch(text):
        numerator, denominator = text.split("/")
        if not int(denominator):
            raise ValueError(f"must not divide by zero, got {shorten(text)}")
        return Fraction(int(numerator), int(denominator))
    decimal = _DECIMAL.fullmatch(text)
    if decimal is None:
        raise ValueError(f"must be a number such as 25, 0.7 or 25/2, got {shorten(text)}")
    if abs(int(decimal[1] or 0)) > MAX_EXPONENT:
        raise ValueError(f"must have an exponent of at most {MAX_EXPONENT}, got {shorten(text)}")
    return Fraction(text)


def shorten(value: object, limit: int = 60) -> str:  # noqa: PLR0911  (a table of cases)
    """A value on one line and not too long, for error messages; what is large is only described."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case int() if value.bit_length() > 4 * limit:
            return f"a whole number of {value.bit_length()} bits"
        case Fraction() if value.denominator == 1:
            return shorten(value.numerator, limit)
        case Fraction():
            return f"{shorten(value.numerator, limit)}/{shorten(value.denominator, limit)}"
        case dict():
            return "a mapping"
        case list() | tuple():
            if len(value) <= 8 and all(isinstance(item, int | str) for item in value):
                return f"[{', '.join(shorten(item, limit // 4) for item in value)}]"
            return f"a list of {len(value)}"
        case str() if len(value) > limit:
            return f"{value[:limit]!a}..."
    return ascii(value)
