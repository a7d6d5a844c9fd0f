"""The results that a report is made from: files of a folder, whose rows may lack any column."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from arborcast.bench.harness.document import read_document
from arborcast.bench.harness.standing import Standing
from arborcast.bench.page.words import DASH
from arborcast.synth.errors import InputError


class Row(dict[str, Any]):
    """What was asked and found; no section asks first whether a column is there."""

    def text(self, name: str) -> str:
        """A column in words, a dash where there is none; the title is the topology where none is given."""
        value = self.get(name)
        if name == "title" and not value:
            value = self.get("topology")
        if name == "case":
            return f"{self.text('title')}, {self.text('collective')}"
        return DASH if value is None or value == "" else str(value)

    def figure(self, name: str) -> float:
        """A column as a number, NaN where it is none."""
        return number(self.get(name))


@dataclass(frozen=True)
class Document:
    """A results file.

    Attributes:
        name: of the file, without its suffix.
        content: what it holds.
        standing: what speaks against it.
    """

    name: str
    content: Mapping[str, Any]
    standing: Standing = field(default_factory=Standing)

    @cached_property
    def rows(self) -> list[Row]:
        """In the order in which they are to be read."""
        return rows_of(self.content["rows"])

    def get(self, key: str) -> Any:
        """An entry beside the rows; None where there is none."""
        return self.content.get(key)

    def entry(self, key: str) -> Mapping[str, Any]:
        """An entry of several values; an empty one where there is none."""
        found = self.content.get(key)
        return found if isinstance(found, Mapping) else {}


def rows_of(listed: Any) -> list[Row]:
    """The objects of a list; of anything else none."""
    return [Row(row) for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []


def read_results(folder: Path) -> dict[str, Document]:
    """Every results file of a folder by its name.

    Raises:
        InputError: no such folder, or a file that is no results file.
    """
    if not folder.is_dir():
        raise InputError(f"results {folder}: must be a folder of results files")
    return {path.stem: Document(path.stem, read_document(path)) for path in sorted(folder.glob("*.json"))}


def number(value: Any) -> float:
    """A figure, which may be a fraction in text; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(Fraction(value)) if isinstance(value, str) else float(value)
    except (ValueError, ZeroDivisionError):
        return math.nan


def known(values: Iterable[float]) -> list[float]:
    """Those that are no NaN."""
    return [value for value in values if not math.isnan(value)]


def middle(values: Iterable[float]) -> float:
    """The median of those that are known; NaN of none."""
    return median(found) if (found := known(values)) else math.nan


def least(values: Iterable[float]) -> float:
    """NaN of none."""
    return min(known(values), default=math.nan)


def most(values: Iterable[float]) -> float:
    """NaN of none."""
    return max(known(values), default=math.nan)


def groups(rows: Iterable[Row], *by: str | Callable[[Row], Any]) -> list[list[Row]]:
    """Rows that agree in columns, in the order in which they come."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = tuple(str(row.get(one)) if isinstance(one, str) else one(row) for one in by)
        found.setdefault(key, []).append(row)
    return list(found.values())


def first(rows: Iterable[Row], **equal: Any) -> Row:
    """The first row with these values; one of dashes where there is none."""
    return next((row for row in rows if all(row.get(name) == one for name, one in equal.items())), Row())


OURS = (
    *("trees", "mwu", "chunks", "selection", "synth", "arborcast", "shared memory", "sockets"),
    *("pareto", "torch messages"),
)
"""First words of the names of what this package makes."""


def is_ours(method: Any) -> bool:
    """Whether a method is one of this package's and not a baseline or a peer."""
    return str(method).lower().startswith(OURS)
