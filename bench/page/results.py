"""The results that a report is made from: every file of a folder, and figures read out of its rows.

Nothing is demanded of a row but what is shown of it: what a row lacks is a dash.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from arborcast.bench.document import read_document
from arborcast.synth.errors import InputError

Row: TypeAlias = Mapping[str, Any]
_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Document:
    """A results file.

    Attributes:
        name: of the file, without its suffix.
        content: what it holds.
    """

    name: str
    content: Mapping[str, Any]

    @property
    def rows(self) -> list[Row]:
        """What was asked and found, in the order in which it is to be read."""
        return list(self.content["rows"])

    def get(self, key: str) -> Any:
        """An entry beside the rows; None where there is none."""
        return self.content.get(key)


def read_results(folder: Path) -> dict[str, Document]:
    """Every results file of a folder by its name.

    Raises:
        InputError: no such folder, or a file that is no results file.
    """
    if not folder.is_dir():
        raise InputError(f"results {folder}: must be a folder of results files")
    return {path.stem: Document(path.stem, read_document(path)) for path in sorted(folder.glob("*.json"))}


def number(value: Any) -> float | None:
    """A figure, which may be a fraction in text; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        try:
            return float(Fraction(value))
        except (ValueError, ZeroDivisionError):
            return None
    return None


def figure(row: Row, *names: str) -> float | None:
    """The first of these columns that holds a figure."""
    return next((found for name in names if (found := number(row.get(name))) is not None), None)


def figures(rows: Iterable[Row], *names: str) -> list[float]:
    """That of every row that has one."""
    return [found for row in rows if (found := figure(row, *names)) is not None]


def word(row: Row, *names: str) -> str:
    """The first of these columns that is not empty, as text."""
    return next((str(row[name]) for name in names if row.get(name) not in (None, "")), "–")


def grouped(rows: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Rows by a key, both in the order in which they come."""
    found: dict[_K, list[_T]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def median(values: Sequence[float]) -> float | None:
    """The median; None of nothing."""
    return statistics.median(values) if values else None


OURS = (
    "trees",
    "mwu",
    "chunks",
    "selection",
    "synth",
    "arborcast",
    "shared memory",
    "sockets",
    "as it comes",
    "pareto",
    "torch messages",
)
"""First words of the names of what this package makes."""


def is_ours(method: Any) -> bool:
    """Whether a method is one of this package's and not a baseline or a peer."""
    return str(method).lower().startswith(OURS)
