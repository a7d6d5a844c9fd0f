"""What the page is made of: a section per question, tables whose columns are functions of a line.

A table says its columns as "head: column | column"; a head that begins with ">" is of figures. The unit of a
figure follows from its column's name. The page and the terminal show the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from arborcast.bench.page.results import Document, Row, groups, known, middle
from arborcast.bench.page.words import (
    Format,
    count,
    digits,
    duration,
    gigabytes,
    listed,
    megabytes,
    percent,
    scaled,
    seconds,
    size,
    times,
    tiny,
)

Column: TypeAlias = Callable[[Any], str]
"""What a table shows of each thing that a line is about."""


@dataclass(frozen=True)
class Table:
    """Rows under a head; a name of the head that begins with ">" is of a column of figures."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """What the page, docs/figures.md, shows of one question.

    Attributes:
        file: the results file, without its suffix.
        title: the heading.
        kind: how its figures came about, such as "simulated".
        command: that measures them.
        about: what the figures are of.
        table: the compact table.
        answer: a sentence before all else.
    """

    file: str
    title: str
    kind: str
    command: str
    about: str
    table: Callable[[Document], Table]
    answer: Callable[[Document], str] | None = None


def strong(words: str) -> str:
    """Words of a sentence that are set in bold."""
    return f"\x02{words}\x03"


in_gigabytes = scaled("GB", 1e3, 2)
"""Megabytes, in GB."""

UNITS: Mapping[Format, str] = {
    count: (
        "chunks devices failed height hung layers legal_cuts mbit microbatches parameters passed pieces "
        "ranks rounds runs skipped stage stages steps tests transfers trees"
    ),
    digits: "algbw busbw rate samples_per_second torch_samples_per_second",
    duration: "cpu_us predicted_us spread time_us time_us_64KiB time_us_64MiB torch_us",
    seconds: (
        "call_seconds cpu_seconds first_seconds load_seconds program_seconds seconds solve_seconds "
        "target_seconds trace_seconds verify_seconds"
    ),
    percent: (
        "bubble burst_share error off predicted_bubble share_of_bound share_of_nominal share_of_optimum"
    ),
    tiny: "evaluation_difference loss_difference weight_difference",
    times: "cpu_saving speed_up_over_gloo speed_up_over_ring times_faster_than_gloo times_gloo",
    size: "bytes",
    in_gigabytes: "peak_MB",
    gigabytes: "limit_bytes memory_bytes",
    megabytes: (
        "activations_bytes boundary_bytes buffers_bytes gradient_bytes gradients_bytes live_bytes "
        "optimizer_bytes parameters_bytes predicted_bytes resident_bytes working_bytes"
    ),
}
"""How figures are shown, by the names of their columns."""

_UNIT_OF = {name: shown for shown, names in UNITS.items() for name in names.split()}


def column(name: str, unit: Format | None = None) -> Column:
    """A column of rows of results, in another unit than its name's."""
    shown = unit or _UNIT_OF.get(name)
    return lambda row: row.text(name) if shown is None else shown(row.figure(name))


def columns(specs: str) -> dict[str, Column]:
    """Columns of rows of results: "size: bytes | >rounds" is bytes under the head "size", and rounds."""
    pairs = (spec.rpartition(": ") for spec in specs.split(" | "))
    return {head or name: column(name.removeprefix(">")) for head, _, name in pairs}


def of_each(specs: str, row: Callable[[Any], Row]) -> dict[str, Column]:
    """Columns of rows, for lines each of which has such a row."""
    return {head: _of(row, how) for head, how in columns(specs).items()}


def _of(row: Callable[[Any], Row], how: Column) -> Column:
    return lambda line: how(row(line))


def missed(name: str, is_missed: Callable[[Row], bool], unit: Format | None = None) -> Column:
    """A column of figures that have a target, and say so where they miss it."""
    shown = column(name, unit)
    return lambda row: f"{shown(row)} (missed)" if is_missed(row) else shown(row)


def table(columns: Mapping[str, Column], lines: Iterable[Any]) -> Table:
    """A line for each row of results, or of whatever else the columns are functions of."""
    return Table(tuple(columns), tuple(tuple(how(line) for how in columns.values()) for line in lines))


def plain(specs: str, **more: Column) -> Callable[[Document], Table]:
    """The table of every row of a document."""
    return lambda document: table(columns(specs) | more, document.rows)


def pivot(
    lines: Mapping[str, Column],
    by: Sequence[str | Callable[[Row], Any]],
    across: str | Callable[[Row], Any],
    cell: Callable[[Sequence[Row]], str],
    heads: Callable[[Any], str] = str,
    values: Sequence[Any] | None = None,
) -> Callable[[Document], Table]:
    """A table with a line for the rows that agree in some columns, and a column for each value of another.

    Args:
        lines: the columns before: of the first row of a line.
        by: what the rows of a line agree in.
        across: what the columns are the values of.
        cell: from the rows of a line with one of these values; there may be none.
        heads: the head of a value's column.
        values: of these columns; those of the document, in its order, where none are given.
    """

    def value(row: Row) -> Any:
        return row.get(across) if isinstance(across, str) else across(row)

    def where(one: Any) -> Column:
        return lambda alike: cell([row for row in alike if value(row) == one])

    def made(document: Document) -> Table:
        wanted = list(dict.fromkeys(map(value, document.rows))) if values is None else values
        shown = {head: _of(lambda alike: alike[0], how) for head, how in lines.items()}
        shown |= {f">{heads(one)}": where(one) for one in wanted}
        return table(shown, groups(document.rows, *by))

    return made


def medians(name: str, by: str, of: Sequence[str], said: str) -> Callable[[Document], str]:
    """A sentence: of a column the median, the least and the most, for some values of another column."""

    def sentence(document: Document) -> str:
        shown = _UNIT_OF.get(name, digits)
        parts = []
        for one in of:
            found = known(row.figure(name) for row in document.rows if row.get(by) == one)
            if found:
                median = strong(shown(middle(found)))
                parts.append(
                    f"{one} {median} ({shown(min(found))} to {shown(max(found))}, {len(found)} rows)"
                )
        return f"{said}, in the median: {listed(parts)}." if parts else ""

    return sentence


def all_rows(document: Document, *more: str) -> Table:
    """Every row with its keys, its measures and further columns; what all rows lack is left out."""
    keys = document.get("keys") or list(dict.fromkeys(name for row in document.rows for name in row))
    named = [*keys, *(document.get("measures") or {}), *more]
    simple = [name for name in named if any(_is_simple(row.get(name)) for row in document.rows)]
    heads = {name: name if name in keys else f">{name}" for name in simple}
    return table({heads[name]: column(name) for name in simple}, document.rows)


def _is_simple(value: Any) -> bool:
    return isinstance(value, str | int | float)
