"""What groups cost beside gloo's: descriptors, threads and time, and the first step of a job."""

from __future__ import annotations

from collections.abc import Iterator

from arborcast.bench.page.parts import Part, Section, Strong, Table, cell, columns, lines, table, text
from arborcast.bench.page.results import Document, records
from arborcast.bench.page.words import count, digits, seconds


def _answer(document: Document) -> Iterator[Part]:
    rows = document.rows
    more = rows[rows["what"].str.endswith("more groups")].set_index("method")
    for method in more.index:
        row = more.loc[method]
        yield text(
            f"{method}: {row['what']} of {count(row['ranks'])} ranks in ",
            Strong(seconds(row["seconds"])),
            ", each with ",
            Strong(digits(row["descriptors"], 2)),
            f" descriptors and {digits(row['threads'], 2)} threads",
        )
    yield table(_COLUMNS, rows)


def summary(document: Document) -> Table:
    """A line for each thing that was done: time, descriptors and threads of both."""
    drawn = [
        (
            f"{row.what}, {count(row.ranks)} ranks",
            row.method,
            cell(seconds, row.seconds),
            cell(_few, row.descriptors),
            cell(_few, row.threads),
        )
        for row in records(document.rows)
    ]
    return lines(("", "group", ">time", ">descriptors", ">threads"), drawn)


def _few(number: float) -> str:
    return digits(number, 2)


_COLUMNS = columns(
    "what | group: method | >ranks | >time: seconds | >spread, s: spread_s | >descriptors | >threads | >runs"
)

SECTION = Section(
    "starting",
    "starting",
    "What do groups cost, and how long does the first step take?",
    "measured on one machine",
    "python bench/starting.py",
    "Descriptors and threads that a process holds beyond what it held before: of the first group all, "
    "of more groups those of each once it has done an allreduce. The first step is the time from "
    "init_process_group to the end of an allreduce of 1 MiB; where nothing is kept, it goes by a simple "
    "schedule, and all ranks change to others when they are found. Of synth it is imports for the most part, "
    "which ranks of a host make at the same time. In 20 more groups lies one full run of Python's garbage "
    "collector, which importing torch leaves all but due and which looks through all of torch's objects.",
    _answer,
    ("What groups cost", summary),
)
