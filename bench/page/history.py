"""History: the figures of the headline from commit to commit, as bench/history.py keeps them."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from arborcast.bench.page.charts import Steps
from arborcast.bench.page.headline import MEASURES
from arborcast.bench.page.parts import Cell, Column, Part, Picture, Section, grid, table, text
from arborcast.bench.page.results import Document, number, records
from arborcast.bench.page.words import plural


def _rows(document: Document) -> pd.DataFrame:
    """Those of figures that the headline still has, with the place of their commit."""
    found = pd.DataFrame(
        [
            {"commit": row.get("commit"), "date": row.get("date"), "measure": row.get("measure")}
            | {"value": number(row.get("value"))}
            for row in document.content["rows"]
        ],
        columns=["commit", "date", "measure", "value"],
    )
    found = found[found["measure"].isin(list(MEASURES)) & found["value"].notna()]
    return found.assign(place=pd.factorize(found["commit"])[0])


def _answer(document: Document) -> Iterator[Part]:
    rows = _rows(document)
    of_place = rows.drop_duplicates("place").sort_values("place")
    places = tuple(f"{row.date} {row.commit}" for row in records(of_place))
    yield text(f"{plural(len(places), 'commit')} changed a figure.")
    pictures = []
    for name, (title, shown) in MEASURES.items():
        points = tuple((int(row.place), row.value) for row in records(rows[rows["measure"] == name]))
        if points:
            pictures.append((Picture(Steps(title, places, points, shown), title),))
    yield grid(pictures)
    yield table(_COLUMNS, rows[::-1], folded=f"All {plural(len(rows), 'change')}, the newest first")


_COLUMNS: dict[str, Column] = {
    "date": lambda row: Cell(row.date),
    "commit": lambda row: Cell(row.commit),
    "figure": lambda row: Cell(MEASURES[row.measure][0]),
    ">from then on": lambda row: Cell(MEASURES[row.measure][1](row.value), row.value),
}

SECTION = Section(
    file="history",
    anchor="history",
    title="How have these figures changed?",
    kind="read from the history of bench/results",
    command="python bench/history.py",
    about=(
        "Each figure of the headline, worked out by today's report from the results of each commit that "
        "changed them. Cases, machines and targets were added on the way, so that a step is a change of "
        "what was measured as often as of the code; the results of that commit say which."
    ),
    answer=_answer,
)
