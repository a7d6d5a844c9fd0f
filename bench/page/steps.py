"""Steps of the trainer by order: the bubbles, the time beside torch's, and accuracy over time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas as pd

from arborcast.bench.page.charts import Line, LineChart
from arborcast.bench.page.parts import (
    Cell,
    Part,
    Picture,
    Section,
    Strong,
    Table,
    all_rows,
    cell,
    columns,
    grid,
    lines,
    missed,
    text,
)
from arborcast.bench.page.results import Document, Row, first, groups, number, records
from arborcast.bench.page.training import COMMAND, ORDERS
from arborcast.bench.page.words import DASH, count, digits, duration, percent, plural

ASYNCHRONOUS = "PipeDream, asynchronous"
SYNCHRONOUS = "1F1B"


def _named(document: Document) -> pd.DataFrame:
    rows = document.rows
    return rows.assign(order=rows["order"].replace(ORDERS))


# ----------------------------------------------------------------------------------------------- bubbles


def _bubbles(document: Document) -> Iterator[Part]:
    rows, target = _named(document), number(document.get("target"))
    split = rows[rows["order"] == "ZB-H1"]
    for row in records(split):
        yield text(
            "ZB-H1 leaves ",
            Strong(percent(row.ratio)),
            f" of 1F1B's bubble ({plural(row.ranks, 'rank')}, m = {count(row.microbatches)}); the target is "
            f"at most {percent(target)}.",
            tone="bad" if row.ratio > target else "",
        )
    yield bubbles_table(document)
    yield all_rows(_BUBBLES, rows)


def bubbles_table(document: Document) -> Table:
    """A line per order: its bubble, measured and predicted, and over 1F1B's."""
    target = number(document.get("target"))
    head = ("order", ">stages a rank", ">step", ">bubble", ">by the simulator", ">over 1F1B's")
    return lines(
        head,
        (
            (
                row.order,
                count(row.stages / row.ranks),
                cell(duration, row.time_us),
                cell(percent, row.bubble, "ours"),
                cell(percent, row.predicted_bubble),
                missed(percent, row.ratio, row.order == "ZB-H1" and row.ratio > target),
            )
            for row in records(_named(document))
        ),
    )


_BUBBLES = columns(
    "order | >stages | >ranks | >microbatches | >step: time_us | >bubble | >simulator: predicted_bubble | "
    ">over 1F1B's: ratio"
)


# -------------------------------------------------------------------------------------- beside torch's own


def _runtimes(document: Document) -> Iterator[Part]:
    rows, target = _named(document), number(document.get("target"))
    pipelines = rows[rows["order"] != "data parallel"]
    met = sum(pipelines["ratio"] <= target)
    yield text(
        Strong(f"{met} of {plural(len(pipelines), 'order')}"),
        " take no longer than torch's own schedule for the same plan.",
        tone="bad" if met < len(pipelines) else "",
    )
    yield runtimes_table(document)
    yield all_rows(_RUNTIMES, rows)


def runtimes_table(document: Document) -> Table:
    """A line per order: samples per second, ours and torch's."""
    target = number(document.get("target"))
    head = ("order", "collectives", "torch's", ">samples/s", ">torch's samples/s", ">our time over torch's")
    return lines(
        head,
        (
            (
                row.order,
                row.collectives,
                row.schedule,
                cell(digits, row.samples_per_second, "ours"),
                cell(digits, row.torch_samples_per_second),
                missed(digits, row.ratio, row.ratio > target),
            )
            for row in records(_named(document))
        ),
    )


_RUNTIMES = columns(
    "order | collectives | torch's: schedule | >ranks | >microbatches | >step: time_us | "
    ">torch's step: torch_us | >ratio"
)


# ------------------------------------------------------------------------------------ accuracy over time


def _convergence(document: Document) -> Iterator[Part]:
    rows, target = document.rows, number(document.get("target"))
    best = {method: _soonest(alike) for method, alike in groups(rows, "method")}
    ours, theirs = best.get(SYNCHRONOUS), best.get(ASYNCHRONOUS)
    if ours is not None and theirs is not None:
        yield text(
            f"To {percent(target)} of the test images, each with the learning rate that suits it best, "
            "PipeDream without waiting takes ",
            Strong(f"{digits(theirs.passes_to_target / ours.passes_to_target)} times as long"),
            f" as 1F1B: its batches take {percent(theirs.epoch_passes / ours.epoch_passes)} of the time, but "
            f"{count(theirs.epochs_to_target)} epochs instead of {count(ours.epochs_to_target)}.",
        )
    yield convergence_table(document)
    yield grid([_curves(f"learning rate {rate:g}", alike)] for rate, alike in groups(rows, "learning_rate"))


def _soonest(rows: pd.DataFrame) -> Row | None:
    reached = rows[rows["passes_to_target"].notna()]
    return records(reached.loc[[reached["passes_to_target"].idxmin()]])[0] if len(reached) else None


def convergence_table(document: Document) -> Table:
    """A line per learning rate: when each method reaches the target, in passes of a batch."""
    methods = list(dict.fromkeys(document.rows["method"]))
    by_rate = groups(document.rows, "learning_rate")
    return lines(
        (">learning rate", *(f">{method}" for method in methods)),
        (
            (f"{rate:g}", *(_reached(first(alike, method=method)) for method in methods))
            for rate, alike in by_rate
        ),
        "Passes of a batch through the model until the target, and the epochs",
    )


def _reached(row: Row) -> Cell:
    if math.isnan(row.passes_to_target):
        return Cell(f"{DASH} (best {percent(row.best)})", tone="quiet")
    return Cell(
        f"{count(row.passes_to_target)} ({plural(row.epochs_to_target, 'epoch')})", row.passes_to_target
    )


def _curves(name: str, rows: pd.DataFrame) -> Picture:
    """Errors, so that a logarithmic axis shows the end."""
    curves = [
        Line(
            "PipeDream" if row.method == ASYNCHRONOUS else row.method,
            tuple(
                (row.epoch_passes * epoch, 1 - share)
                for epoch, share in enumerate(row.accuracy or (), start=1)
            ),
            "ours" if row.method == SYNCHRONOUS else "base",
            dashed=row.method == "one process",
            drawn="curve",
        )
        for row in records(rows)
    ]
    chart = LineChart(
        f"share of test images classified wrongly over time, {name}",
        tuple(curves),
        equal=None,
        across=count,
        upright=percent,
    )
    return Picture(chart, name)


SECTIONS = (
    Section(
        "pipeline_bubbles",
        "bubbles",
        "How much of the bubble of 1F1B do other orders leave?",
        "measured on local processes",
        COMMAND + "bubbles",
        "Layers sleep as long in the forward pass as in each half of the backward pass, so that ranks do "
        "not wait for each other's cores. The bubble is the share of a step in which a rank does not sleep; "
        "what the trainer itself does counts.",
        _bubbles,
    ),
    Section(
        "pipeline_runtimes",
        "runtimes",
        "Is a step as fast as under torch.distributed.pipelining?",
        "measured on local processes",
        COMMAND + "runtimes",
        "The same layers on the same two ranks with the same microbatches, in the same processes, in turns: "
        "the trainer beside torch.distributed.pipelining, and for data parallel beside DDP over gloo. Whole "
        "steps with the update.",
        _runtimes,
        ("A step of the trainer beside torch's", runtimes_table),
    ),
    Section(
        "pipeline_convergence",
        "convergence",
        "Does training end sooner without waiting for each update?",
        "trained, times computed",
        COMMAND + "convergence",
        "scikit-learn's digits, one image of five to test with, four stages, a batch of 60. 1F1B trains on "
        "four processes, PipeDream in one that keeps the old weights. The time is counted in passes of a "
        "batch through the whole model, for stages of equal times and free links. Pictures show the share of "
        "test images that are classified wrongly over that time.",
        _convergence,
    ),
)
