"""Long lists of whole numbers written short: a run of successive numbers is text such as "8..15"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from arborcast.synth.errors import InputError
from arborcast.synth.formats.numerals import shorten

SHORTEST = 3
"""Runs of fewer numbers are written out."""

_RUN = re.compile(r"(0|[1-9][0-9]{0,9})\.\.(0|[1-9][0-9]{0,9})")


def to_runs(numbers: Iterable[int]) -> list[int | str]:
    """The numbers in their order, with runs of ascending ones as text."""
    runs: list[int | str] = []
    first = last = None
    for number in numbers:
        if first is None or last is None or number != last + 1:
            runs += _run(first, last)
            first = number
        last = number
    return runs + _run(first, last)


def _run(first: int | None, last: int | None) -> list[int | str]:
    if first is None or last is None:
        return []
    if last - first + 1 < SHORTEST:
        return list(range(first, last + 1))
    return [f"{first}..{last}"]


def from_runs(runs: Sequence[int | str], most: int, place: str) -> list[int]:
    """The numbers of a list with runs; `place` begins every error.

    Raises:
        InputError: an entry is neither a whole number nor a run, or there are more than `most` numbers.
    """
    numbers: list[int] = []
    for index, entry in enumerate(runs):
        first, last = (entry, entry) if isinstance(entry, int) else _ends(entry, f"{place}[{index}]")
        if len(numbers) + last - first + 1 > most:
            raise InputError(f"{place}: must have at most {most} numbers, got more with entry {index}")
        numbers.extend(range(first, last + 1))
    return numbers


def _ends(entry: str, place: str) -> tuple[int, int]:
    match = _RUN.fullmatch(entry)
    if match is None or int(match[1]) > int(match[2]):
        raise InputError(f'{place}: must be a whole number or a run such as "8..15", got {shorten(entry)}')
    return int(match[1]), int(match[2])
