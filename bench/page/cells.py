"""Columns of tables, each by what it shows of a row, so that a column's name and its cells stand together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from arborcast.bench.page.parts import Cell, Table, Tone
from arborcast.bench.page.results import Row, figure, is_ours, word
from arborcast.bench.page.words import count, digits, duration, percent, plural, seconds, size, times

Column: TypeAlias = Callable[[Row], Cell]


def words(*names: str) -> Column:
    """The first of these columns of a row that is not empty, as it stands there."""
    return lambda row: Cell(word(row, *names))


def method(row: Row) -> Cell:
    """The method, marked where it is ours."""
    return Cell(word(row, "method"), tone="ours" if is_ours(row.get("method")) else "")


def sizes(row: Row) -> Cell:
    """The size of the buffer."""
    return Cell(size(figure(row, "bytes")), figure(row, "bytes"))


def durations(*names: str, tone: Tone = "") -> Column:
    """Microseconds."""
    return lambda row: Cell(duration(figure(row, *names)), figure(row, *names), tone)


def seconds_of(*names: str, tone: Tone = "") -> Column:
    """Seconds."""
    return lambda row: Cell(seconds(figure(row, *names)), figure(row, *names), tone)


def numbers(*names: str) -> Column:
    """Three significant digits."""
    return lambda row: Cell(digits(figure(row, *names)), figure(row, *names))


def counts(*names: str) -> Column:
    """Whole numbers."""
    return lambda row: Cell(count(figure(row, *names)), figure(row, *names))


def shares(*names: str, tone: Tone = "") -> Column:
    """Shares of a whole."""
    return lambda row: Cell(percent(figure(row, *names)), figure(row, *names), tone)


def speed_ups(*names: str) -> Column:
    """Ratios of speeds, marked where they are losses."""

    def cell(row: Row) -> Cell:
        ratio = figure(row, *names)
        return Cell(times(ratio), ratio, "bad" if ratio is not None and ratio < 1 else "")

    return cell


def table_of(columns: Mapping[str, Column], rows: Iterable[Row], title: str = "", folded: str = "") -> Table:
    """A line per row. Names of columns as `Table.head` has them."""
    lines = tuple(tuple(cell(row) for cell in columns.values()) for row in rows)
    return Table(tuple(columns), lines, title, folded)


def all_rows(columns: Mapping[str, Column], rows: Iterable[Row]) -> Table:
    """Every row, folded away below how many they are."""
    listed = list(rows)
    return table_of(columns, listed, folded=f"All {plural(len(listed), 'row')}")
