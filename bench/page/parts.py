"""What the report is made of, as values: a question, and the parts of its answer.

The template renders these as HTML, `render.py` the tables as Markdown, so that page, README and
docs/figures.md cannot differ. A column of a table is a function of what the line is about, so that its name
and its cells stand together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import pandas as pd

from arborcast.bench.page.charts import Chart
from arborcast.bench.page.results import FIGURES, Document, Row, is_ours, records
from arborcast.bench.page.words import (
    Format,
    billions,
    count,
    digits,
    duration,
    gigabytes,
    megabytes,
    percent,
    plural,
    scaled,
    seconds,
    size,
    times,
    tiny,
)

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


Column: TypeAlias = Callable[[Any], Cell]
"""What a table shows of each thing that a line is about."""


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
class Section:
    """A section of the page, and what docs/figures.md shows of it.

    Attributes:
        file: the results file, without its suffix.
        anchor: of its place in the page.
        title: the question.
        kind: how its figures came about, such as "simulated".
        command: that measures them.
        about: the first paragraph.
        answer: the parts below it.
        summary: the title in docs/figures.md and the table there; None where it is not shown.
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


def columns(specs: str) -> dict[str, Column]:
    """Columns of rows of results: "size: bytes | rounds" is bytes under the head "size", and rounds.

    A figure is shown in the unit of its name (`UNITS`), a method of ours is marked.
    """
    pairs = (spec.rpartition(": ") for spec in specs.split(" | "))
    return {head or name: column(name.removeprefix(">")) for head, _, name in pairs}


def column(name: str, tone: Tone = "", unit: Callable[[Any], Cell | str] | None = None) -> Column:
    """A column of rows of results, in another unit than its name's, or with a tone of its own."""
    shown = unit or _UNIT_OF.get(name, str)

    def one(row: Row) -> Cell:
        value = getattr(row, name)
        found = shown(value)
        told = found if isinstance(found, Cell) else Cell(found, value if name in FIGURES else math.nan)
        return replace(told, tone=tone) if tone else told

    return one


def _method(name: str) -> Cell:
    return Cell(name, tone="ours" if is_ours(name) else "")


in_gigabytes = scaled("GB", 1e3, 2)
"""Megabytes, in GB."""

UNITS: Mapping[Callable[[Any], Cell | str], str] = {
    _method: "method",
    count: (
        "allocations asked buffers calls chunks devices fragments height joined layers legal_cuts mbit "
        "microbatches nic_gbit paper_microbatches parts pieces ranks runs samples_each stages steps "
        "transfers trees width rounds left_ranks hangs wrong left_over"
    ),
    digits: "algbw busbw descriptors optimum rate ratio samples_per_second threads",
    duration: (
        "collectives_us computing_us cpu_us data_parallel_us each_us equation_us floor_us latency_us "
        "least_us planned_us predicted_us simulated_us spread time_us time_us_64KiB "
        "time_us_64MiB torch_us"
    ),
    seconds: (
        "call_seconds cpu_seconds first_seconds load_seconds program_seconds read_seconds seconds "
        "simulate_seconds solve_seconds spread_s target_seconds trace_seconds verify_seconds"
    ),
    percent: (
        "bubble burst_share equation_error error predicted_bubble rate_kept share_of_bound share_of_least "
        "share_of_nominal share_of_optimum"
    ),
    tiny: "evaluation_difference gradient_difference loss_difference weight_difference",
    times: "copies_over_link gain paper_speed_up speed_up",
    size: "buffer_bytes bytes",
    speed_up: (
        "cpu_saving over_nccl over_nccl_mean over_nccl_most over_nccl_relays over_nccl_relays_mean "
        "over_nccl_relays_most over_ring speed_up_over_gloo speed_up_over_ring times_faster_than_gloo "
        "times_gloo"
    ),
    in_gigabytes: "peak_MB",
    gigabytes: "limit_bytes memory_bytes",
    megabytes: (
        "predicted_bytes live_bytes resident_bytes parameters_bytes gradients_bytes optimizer_bytes "
        "activations_bytes boundary_bytes working_bytes"
    ),
    billions: "parameters",
}
"""How figures are shown, by the names of their columns."""

_UNIT_OF = {name: shown for shown, names in UNITS.items() for name in names.split()}


def table(
    columns: Mapping[str, Column], rows: pd.DataFrame | Iterable[Any], title: str = "", folded: str = ""
) -> Table:
    """A line for each row of results, or of whatever else the columns are functions of."""
    listed = records(rows) if isinstance(rows, pd.DataFrame) else rows
    return Table(
        tuple(columns), tuple(tuple(how(row) for how in columns.values()) for row in listed), title, folded
    )


def lines(head: Sequence[str], rows: Iterable[Sequence[Cell | str]], title: str = "") -> Table:
    """A table from its lines."""
    cells = (tuple(Cell(each) if isinstance(each, str) else each for each in row) for row in rows)
    return Table(tuple(head), tuple(cells), title)


def all_rows(columns: Mapping[str, Column], rows: pd.DataFrame) -> Table:
    """Every row, folded away below how many they are."""
    return table(columns, rows, folded=f"All {plural(len(rows), 'row')}")
