"""Allocations: what each set of GPUs of a DGX-1 can give, BLINK's question and figure."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from arborcast.bench.page.charts import DotChart, Dots
from arborcast.bench.page.parts import (
    Cell,
    Part,
    Picture,
    Section,
    Strong,
    all_rows,
    cell,
    columns,
    grid,
    lines,
    table,
    text,
)
from arborcast.bench.page.results import Document, frame, groups, records
from arborcast.bench.page.words import DASH, count, digits, plural, times
from arborcast.synth.baselines.nccl_model import NOT_RUN

MODEL = "nccl-ring-model"


def _answer(document: Document) -> Iterator[Part]:
    cases = groups(document.rows, "box", "collective")
    trees = document.rows[(document.rows["method"] == "trees") & (document.rows["optimum"] > 0)]
    if len(trees):
        reached, ratios = sum(trees["share_of_optimum"] >= 1), trees["over_nccl"].dropna()
        yield text(
            "Our trees reach the proven optimum on ",
            Strong(f"{reached} of {len(trees)}"),
            " sets of GPUs that links join",
            f"; {times(ratios.median())} the rate of NCCL's ring model in the median of "
            f"{plural(len(ratios), 'set')} that have one."
            if len(ratios)
            else ".",
        )
    # Sets of 3 GPUs and more that the links join.
    rows = []
    for (box, collective), found in cases:
        joined = found[(found["method"] == "trees") & (found["ranks"] >= 3) & (found["optimum"] > 0)]
        optimal = sum(joined["share_of_optimum"] >= 1)
        over = (_spread(joined[name]) for name in ("over_nccl", "over_nccl_relays", "over_ring"))
        rows.append((box, collective, cell(count, len(joined)), cell(count, optimal, "ours"), *over))
    yield lines(
        (
            *("machine", "collective", ">sets", ">optimum reached on", ">over NCCL's ring model"),
            *(">over that with relays", ">over the best single ring"),
        ),
        rows,
        "Our trees on sets of 3 GPUs and more that NVLinks join: median speed-up (least to most)",
    )
    yield grid([_picture(box, collective, found)] for (box, collective), found in cases)
    summary = [row | {"gpus": row.get("ranks")} for row in document.get("summary") or []]
    folded = frame(summary)
    if len(folded):
        told = "By number of GPUs: our trees over NCCL's ring model, geometric means over the joined sets"
        yield table(_SUMMARY, folded, folded=told)
    yield all_rows(_COLUMNS, document.rows)


def _spread(ratios: pd.Series[float]) -> Cell:
    if not ratios.notna().any():
        return Cell(DASH)
    return Cell(f"{times(ratios.median())} ({times(ratios.min())} to {times(ratios.max())})", ratios.median())


def _picture(box: str, collective: str, rows: pd.DataFrame) -> Picture:
    """A line for each set, smaller ones first, under the number of its GPUs."""
    dots, last = [], None
    for gpus, found in groups(rows.sort_values("ranks", kind="stable"), "gpus"):
        row, rates = records(found)[0], dict(zip(found["method"], found["algbw"], strict=True))
        values = {"quiet": row.optimum, "base": rates.get(MODEL, 0.0), "ours": rates.get("trees", 0.0)}
        told = ", ".join(f"{name} {digits(rate)}" for name, rate in rates.items())
        dots.append(
            Dots(
                gpus,
                tuple((tone, value) for tone, value in values.items() if value > 0),
                f"GPUs {gpus}: {told} GB/s",
                f"{count(row.ranks)} GPUs" if row.ranks != last else "",
            )
        )
        last = row.ranks
    return Picture(
        DotChart(f"rates of the allocations of {box}: {collective}", tuple(dots), unit="GB/s"),
        f"{box}, {collective}",
        "algbw. Blue: our trees. Grey: NCCL's ring model, hidden where equal. Stroke: the proven optimum.",
    )


_SUMMARY = columns(
    "machine: box | collective | GPUs: gpus | >different sets: fragments | "
    ">joined by NVLinks: joined | >over NCCL's model: over_nccl_mean | >most: over_nccl_most | "
    ">over it with relays: over_nccl_relays_mean | >most with relays: over_nccl_relays_most"
)
_COLUMNS = columns(
    "machine: box | GPUs: gpus | collective | method | >algbw GB/s: algbw | >optimum | "
    ">of the optimum: share_of_optimum | >over the best ring: over_ring | "
    ">over NCCL's model: over_nccl | >trees | >such sets: allocations"
)

SECTION = Section(
    "fragments",
    "allocations",
    "What does each allocation of a DGX-1 give?",
    f"computed exactly; {NOT_RUN}",
    "python bench/fragments.py",
    "A scheduler hands out any of a box's GPUs, and most sets of them are irregular. Every set that "
    "differs in its links is listed once. Rates of our trees, of rings and of the optimum are exact; "
    f"those of NCCL are of {NOT_RUN}. A set that NVLinks do "
    "not join has no optimum over them.",
    _answer,
)
