"""What the report is made of, as values: a question, and the parts of its answer.

The template renders these as HTML, `render.py` the tables as Markdown, so that page and README cannot differ.
A column of a table is a function of what the line is about, so that its name and its cells stand together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import pandas as pd

from arborcast.bench.page.charts import Chart
from arborcast.bench.page.results import Document, Row, is_ours, records
from arborcast.bench.page.words import Format, count, digits, duration, percent, plural, seconds, size, times

Tone: TypeAlias = Literal["", "ours", "base", "good", "bad", "quiet"]
"""What a figure is: ours (the accent), a baseline (grey), good or bad news, or beside the point."""


@dataclass(frozen=True, slots=True)
class Strong:
    """A figure that a sentence is about."""

    text: str


Sentence: TypeAlias = tuple[str | Strong, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what is read.
        order: what the column is sorted by; NaN for the text.
        tone: of the text.
    """

    text: str
    order: float = math.nan
    tone: Tone = ""


Column: TypeAlias = Callable[[Any], Cell] | str
"""What a table shows of each thing that a line is about; a name alone is of a column of text."""


@dataclass(frozen=True)
class Table:
    """Rows under a head.

    Attributes:
        head: the columns' names; a name that starts with ">" is of a column of figures, set to the right.
        rows: as many cells as the head has.
        title: a line above it.
        folded: where it is long, the line that unfolds it.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    folded: str = ""
    kind: str = "table"


@dataclass(frozen=True)
class Bars:
    """Bars from 0 to 1 under a title: label, share, figure in words, tone, and what is told on pointing."""

    title: str
    bars: tuple[tuple[str, float, str, Tone, str], ...]
    kind: str = "bars"


@dataclass(frozen=True)
class Picture:
    """A chart with its title and a note below."""

    chart: Chart
    title: str = ""
    note: str = ""
    kind: str = "picture"


@dataclass(frozen=True)
class Text:
    """A paragraph; a quiet one explains, a bad one admits."""

    sentence: Sentence
    tone: Tone = ""
    kind: str = "text"


@dataclass(frozen=True)
class Grid:
    """Boxes of parts that stand side by side where there is room."""

    boxes: tuple[tuple[Part, ...], ...]
    kind: str = "grid"


Part: TypeAlias = Table | Bars | Picture | Text | Grid


@dataclass(frozen=True)
class Question:
    """A section of the page, and what the README shows of it.

    Attributes:
        file: the results file, without its suffix.
        anchor: of its place in the page.
        title: the question.
        kind: how its figures came about, such as "simulated".
        command: that measures them.
        about: the first paragraph.
        answer: the parts below it.
        summary: the title in the README and the table there; None where it is not shown.
    """

    file: str
    anchor: str
    title: str
    kind: str
    command: str
    about: str
    answer: Callable[[Document], Iterable[Part]]
    summary: tuple[str, Callable[[Document], Table]] | None = None


def text(*parts: str | Strong, tone: Tone = "") -> Text:
    """A paragraph from its pieces."""
    return Text(parts, tone)


def grid(boxes: Iterable[Iterable[Part]]) -> Grid:
    """Boxes from the parts of each."""
    return Grid(tuple(map(tuple, boxes)))


def cell(shown: Format, value: float, tone: Tone = "") -> Cell:
    """A figure."""
    return Cell(shown(value), value, tone)


def missed(shown: Format, value: float, is_missed: bool, mark: str = "missed") -> Cell:
    """A figure of ours, which says so where it misses its target."""
    return Cell(f"{shown(value)} ({mark})", value, "bad") if is_missed else cell(shown, value, "ours")


def verdict(told: str, is_good: bool) -> Cell:
    """Good or bad news in a word."""
    return Cell(told, tone="good" if is_good else "bad")


def speed_up(ratio: float) -> Cell:
    """A ratio of speeds, marked where it is a loss."""
    return cell(times, ratio, "bad" if ratio < 1 else "")


def column(shown: Format, name: str, tone: Tone = "") -> Column:
    """A column of figures."""
    return lambda row: cell(shown, getattr(row, name), tone)


counts, numbers, shares = partial(column, count), partial(column, digits), partial(column, percent)
durations, seconds_of, sizes = partial(column, duration), partial(column, seconds), column(size, "bytes")


def speed_ups(name: str) -> Column:
    """A column of `speed_up`."""
    return lambda row: speed_up(getattr(row, name))


def method(row: Row) -> Cell:
    """The method, marked where it is ours."""
    return Cell(row.method, tone="ours" if is_ours(row.method) else "")


def table(
    columns: Mapping[str, Column], rows: pd.DataFrame | Iterable[Any], title: str = "", folded: str = ""
) -> Table:
    """A line for each row of results, or of whatever else the columns are functions of."""
    listed = records(rows) if isinstance(rows, pd.DataFrame) else rows
    lines = (tuple(_cell(how, row) for how in columns.values()) for row in listed)
    return Table(tuple(columns), tuple(lines), title, folded)


def _cell(how: Column, row: Any) -> Cell:
    return Cell(getattr(row, how)) if isinstance(how, str) else how(row)


def lines(head: Sequence[str], rows: Iterable[Sequence[Cell | str]], title: str = "") -> Table:
    """A table from its lines."""
    cells = (tuple(Cell(each) if isinstance(each, str) else each for each in row) for row in rows)
    return Table(tuple(head), tuple(cells), title)


def all_rows(columns: Mapping[str, Column], rows: pd.DataFrame) -> Table:
    """Every row, folded away below how many they are."""
    return table(columns, rows, folded=f"All {plural(len(rows), 'row')}")
