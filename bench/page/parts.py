"""What the report is made of, as values: a section is a title and parts, and a part is a table or a picture.

Sections make these from results; `report_html` and `report_markdown` render the same values, so that the page
and the README cannot say different things.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from arborcast.bench.page.results import Document

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
        order: what the column is sorted by; None for the text.
        tone: of the text.
    """

    text: str
    order: float | None = None
    tone: Tone = ""


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


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from 0 to `share` of the whole width, with its figure in words behind it."""

    label: str
    share: float
    text: str
    tone: Tone = "base"
    hint: str = ""


@dataclass(frozen=True)
class Bars:
    """Bars of one scale under a title, whose right end is what the picture's caption says."""

    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Picture:
    """A drawing, as markup of `report_svg` with everything in it escaped."""

    svg: str
    title: str = ""
    note: str = ""


@dataclass(frozen=True)
class Text:
    """A paragraph; a quiet one explains, a bad one admits."""

    sentence: Sentence
    tone: Tone = ""


@dataclass(frozen=True)
class Group:
    """Parts that belong together in a box; boxes stand side by side where there is room."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Grid:
    """Boxes side by side."""

    groups: tuple[Group, ...]


Part: TypeAlias = Table | Bars | Picture | Text | Group | Grid


@dataclass(frozen=True)
class Section:
    """One question and its answer.

    Attributes:
        name: of its place in the page.
        title: the question.
        kind: how its figures came about, such as "simulated"; nothing where nothing was found.
        parts: the answer.
        sources: the results that it is made from, for the circumstances below it.
    """

    name: str
    title: str
    kind: str
    parts: tuple[Part, ...]
    sources: tuple[Document, ...] = field(default=())


def text(*parts: str | Strong, tone: Tone = "") -> Text:
    """A paragraph from its pieces."""
    return Text(parts, tone)


def grid(groups: Iterable[Iterable[Part]]) -> Grid:
    """Boxes from the parts of each."""
    return Grid(tuple(Group(tuple(parts)) for parts in groups))


def missing(name: str, title: str, command: str) -> Section:
    """The section of a question that nobody has asked on this machine yet."""
    return Section(name, title, "", (text(f"Not measured yet: run `{command}`.", tone="quiet"),))
