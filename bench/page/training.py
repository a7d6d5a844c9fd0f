"""The sections of pipelined training that ran: beside serial training, beside its prediction, beside gloo.

What is planned and computed without a trainer is in `bench.page.plans`.
"""

from __future__ import annotations

from collections.abc import Sequence

from arborcast.bench.page.cells import Column, all_rows, counts, durations, shares, speed_ups, words
from arborcast.bench.page.parts import Cell, Part, Picture, Section, Strong, Table, grid, missing, text
from arborcast.bench.page.results import Document, Row, figure, figures, grouped, median, number, word
from arborcast.bench.page.svg import Line, line_chart, unit_time
from arborcast.bench.page.words import DASH, count, digits, duration, percent, plural, times, tiny

COMMAND = "python bench/pipeline.py --only "
ORDERS = {"gpipe": "GPipe", "1f1b": "1F1B", "pe": "list order"}
"""Names of orders; `pe` is SPP's."""


def order_of(row: Row) -> str:
    """The order's name."""
    return ORDERS.get(word(row, "order"), word(row, "order"))


def shape_of(row: Row) -> str:
    """How a plan divides its ranks: stages of one rank each, one stage of replicas, or replicas of each."""
    said = row.get("replicas")
    replicas = [str(each) for each in said] if isinstance(said, list) else str(said or "").split("+")
    if replicas in ([], [""]):
        return DASH
    if len(replicas) > 1 and set(replicas) == {"1"}:
        return f"{len(replicas)} stages"
    if len(replicas) == 1:
        return "1 rank" if replicas == ["1"] else f"{replicas[0]} replicas"
    return "+".join(replicas)


def _only(name: str, title: str, part: str) -> Section:
    return missing(name, title, COMMAND + part)


# -------------------------------------------------------------------------------- equal to serial training

CURVES = "equal", "Is pipelined training equal to serial training?"


def curves(document: Document | None) -> Section:
    """The largest differences from serial training."""
    if document is None:
        return _only(*CURVES, "curves")
    parts: list[Part] = [
        text(
            "scikit-learn's digits: the same weights and batches on one process, and on one process per rank "
            "of a plan; every gradient goes over a synthesized allreduce where a stage has replicas.",
            tone="quiet",
        ),
        *_equality(document),
        table_of_curves(document),
        _by_shape(document),
        all_rows(_CURVE_COLUMNS, document.rows),
    ]
    return Section(*CURVES, "trained on local processes", tuple(parts), (document,))


def _equality(document: Document) -> list[Part]:
    rows = [row for row in document.rows if figure(row, "loss_difference") is not None]
    if not rows:
        return []
    worst = max(rows, key=lambda row: figure(row, "loss_difference") or 0)
    limit = number(document.get("limit"))
    difference = figure(worst, "loss_difference") or 0.0
    within = sum(limit is not None and (figure(row, "loss_difference") or 0) <= limit for row in rows)
    said = (
        f"; {within} of {plural(len(rows), 'training')} stay within the limit of {tiny(limit)}."
        if limit is not None
        else "."
    )
    return [
        text(
            f"Over {count(figure(worst, 'steps'))} steps no loss differs from the serial one by more than ",
            Strong(tiny(difference)),
            f" ({order_of(worst)}, {shape_of(worst)})",
            said,
            tone="bad" if limit is not None and within < len(rows) else "",
        )
    ]


def table_of_curves(document: Document) -> Table:
    """A line per order: the largest differences over all shapes."""
    limit = number(document.get("limit"))
    lines = []
    for order, rows in grouped(document.rows, order_of).items():
        losses, gradients = figures(rows, "loss_difference"), figures(rows, "gradient_difference")
        lines.append(
            (
                Cell(order),
                Cell(str(len(rows)), len(rows)),
                Cell(count(max(figures(rows, "steps"), default=None))),
                _difference(max(losses, default=None), limit),
                Cell(tiny(limit), limit),
                Cell(tiny(max(gradients, default=None)), max(gradients, default=None)),
            )
        )
    head = ("order", ">shapes", ">steps", ">loss, largest difference", ">limit")
    return Table((*head, ">gradients of the first step, relative"), tuple(lines))


def _difference(value: float | None, limit: float | None) -> Cell:
    is_over = value is not None and limit is not None and value > limit
    return Cell(tiny(value) + (" (missed)" if is_over else ""), value, "bad" if is_over else "ours")


def _by_shape(document: Document) -> Table:
    """A line per shape, a column per order."""
    limit = number(document.get("limit"))
    orders = list(grouped(document.rows, order_of))
    lines = []
    for shape, rows in grouped(document.rows, shape_of).items():
        found = {order_of(row): figure(row, "loss_difference") for row in rows}
        lines.append((Cell(shape), *(_difference(found.get(order), limit) for order in orders)))
    head = ("replicas of each stage", *(f">{order}" for order in orders))
    return Table(head, tuple(lines), "Largest difference of a loss, by shape")


_CURVE_COLUMNS: dict[str, Column] = {
    "order": lambda row: Cell(order_of(row)),
    "replicas": lambda row: Cell(shape_of(row)),
    ">microbatches": counts("microbatches"),
    ">steps": counts("steps"),
    "collectives": words("collectives"),
    ">loss": lambda row: Cell(tiny(figure(row, "loss_difference")), figure(row, "loss_difference")),
    ">gradients": lambda row: Cell(
        tiny(figure(row, "gradient_difference")), figure(row, "gradient_difference")
    ),
    ">first loss": lambda row: Cell(_loss(row, "first_loss"), figure(row, "first_loss")),
    ">last loss": lambda row: Cell(_loss(row, "last_loss"), figure(row, "last_loss")),
}


def _loss(row: Row, column: str) -> str:
    value = figure(row, column)
    return DASH if value is None else f"{value:.4f}"


# ------------------------------------------------------------------------------- predicted beside measured

PREDICTION = "predicted", "How far is the predicted time of a training step from the measured one?"


def prediction(document: Document | None) -> Section:
    """The simulator and equation (3) over the number of microbatches."""
    if document is None:
        return _only(*PREDICTION, "prediction")
    cases = grouped(document.rows, _pipeline)
    parts: list[Part] = [
        text(
            "Layers sleep as long as they would compute, so that ranks do not wait for each other's cores. "
            "What layers and messages cost is measured beforehand, and what the trainer takes for one on "
            "one plan for each number of stages (GPipe with the most microbatches): all others are "
            "predictions. Equation (3) of the Divisible paper is "
            "fitted to three points of each curve, which do not count below. Pictures show the time of a "
            "step over the number of microbatches: dots are measured, blue is the simulator, grey is the "
            "equation.",
            tone="quiet",
        ),
        *_accuracy(document),
        table_of_prediction(document),
        grid([_over_microbatches(name, rows)] for name, rows in cases.items()),
        all_rows(_PREDICTION_COLUMNS, document.rows),
    ]
    return Section(*PREDICTION, "measured on local processes", tuple(parts), (document,))


def _pipeline(row: Row) -> str:
    return f"{order_of(row)}, {count(figure(row, 'stages'))} stages"


def _accuracy(document: Document) -> list[Part]:
    rows = [row for row in document.rows if figure(row, "error") is not None]
    if not rows:
        return []
    errors = figures(rows, "error")
    worst = max(rows, key=lambda row: figure(row, "error") or 0)
    target = number(document.get("target"))
    met = sum(target is not None and error <= target for error in errors)
    said = (
        f" {met} of {plural(len(rows), 'step')} within the target of {percent(target)}."
        if target is not None
        else ""
    )
    return [
        text(
            "The simulator is off by ",
            Strong(percent(median(errors))),
            f" in the median and {percent(max(errors))} at the most ({_pipeline(worst)}, "
            f"m = {count(figure(worst, 'microbatches'))}).{said}{_restless(rows, target)}",
            tone="bad" if target is not None and met < len(rows) else "",
        )
    ]


def _restless(rows: Sequence[Row], target: float | None) -> str:
    """How many of the errors above the target the spread of the runs could explain."""
    missed = [row for row in rows if target is not None and (figure(row, "error") or 0) > target]
    if not missed:
        return ""
    unclear = sum(
        (figure(row, "spread") or 0) > (figure(row, "error") or 0) * (figure(row, "time_us") or 0)
        for row in missed
    )
    return f" In {unclear or 'none'} of the others the measured runs differ by more than the error."


def table_of_prediction(document: Document) -> Table:
    """A line per order and number of stages: the errors over all numbers of microbatches."""
    target = number(document.get("target"))
    lines = []
    for name, rows in grouped(document.rows, _pipeline).items():
        errors = figures(rows, "error")
        equation = figures([row for row in rows if row.get("fitted") is not True], "equation_error")
        most = max(errors, default=None)
        is_over = target is not None and most is not None and most > target
        numbers = [count(value) for value in figures(rows, "microbatches")]
        lines.append(
            (
                Cell(name),
                Cell(", ".join(numbers) or DASH),
                Cell(percent(median(errors)), median(errors), "ours"),
                Cell(percent(most) + (" (missed)" if is_over else ""), most, "bad" if is_over else ""),
                Cell(percent(max(equation, default=None)), max(equation, default=None)),
            )
        )
    head = ("order and stages", "microbatches", ">simulator, median error", ">largest")
    return Table((*head, ">equation (3), largest"), tuple(lines))


def _over_microbatches(name: str, rows: Sequence[Row]) -> Picture:
    lines = [
        Line("equation (3)", _points(rows, "equation_us"), dashed=True, drawn="curve"),
        Line("simulator", _points(rows, "predicted_us"), "ours", drawn="curve"),
        Line("", _points(rows, "time_us"), "quiet", drawn="points"),
    ]
    drawn = line_chart(
        [line for line in lines if line.points],
        equal=None,
        size_name=count,
        value_name=unit_time,
        description=f"time of a step over the number of microbatches: {name}",
    )
    largest = max(figures(rows, "error"), default=None)
    return Picture(drawn, name, f"Off by {percent(largest)} at the most.")


def _points(rows: Sequence[Row], column: str) -> tuple[tuple[float, float], ...]:
    found = [
        (at, time_us / 1e6)
        for row in rows
        if (at := figure(row, "microbatches")) and (time_us := figure(row, column))
    ]
    return tuple(sorted(found))


_PREDICTION_COLUMNS: dict[str, Column] = {
    "order": lambda row: Cell(order_of(row)),
    ">stages": counts("stages"),
    ">microbatches": counts("microbatches"),
    ">measured": durations("time_us"),
    ">spread": durations("spread"),
    ">simulator": durations("predicted_us"),
    ">error": shares("error"),
    ">equation (3)": durations("equation_us"),
    ">its error": shares("equation_error"),
    "": lambda row: Cell("fitted to this" if row.get("fitted") is True else "", tone="quiet"),
}


# ---------------------------------------------------------------------------------- a step on emulated links

STEP = "steps", "What do synthesized allreduces give a training step?"


def step(document: Document | None) -> Section:
    """A training step by synthesized schedules and by gloo."""
    if document is None:
        return _only(*STEP, "testbed")
    parts: list[Part] = [
        text(
            "Whole steps on rate-limited links, forward to update. The same plan, model and messages between "
            "stages; only the allreduce of the gradients among the replicas of a stage is a synthesized "
            "schedule or gloo's. Both take turns in the same processes.",
            tone="quiet",
        ),
        table_of_step(document),
        all_rows(_STEP_COLUMNS, document.rows),
    ]
    return Section(*STEP, "measured on emulated links", tuple(parts), (document,))


def table_of_step(document: Document) -> Table:
    """A line per topology and plan."""
    lines = []
    for rows in grouped(document.rows, lambda row: (word(row, "topology"), shape_of(row))).values():
        ours, gloo = _by_way(rows, "synth"), _by_way(rows, "gloo")
        lines.append(
            (
                Cell(word(rows[0], "topology")),
                Cell(shape_of(rows[0])),
                _megabytes(figure(rows[0], "gradient_bytes")),
                Cell(duration(figure(ours, "time_us")), figure(ours, "time_us"), "ours"),
                Cell(duration(figure(gloo, "time_us")), figure(gloo, "time_us")),
                _faster(figure(ours, "times_faster_than_gloo")),
            )
        )
    head = ("topology", "stages", ">largest gradients", ">step, synthesized", ">step, gloo")
    return Table((*head, ">times as fast"), tuple(lines))


def _megabytes(size_bytes: float | None) -> Cell:
    return Cell(DASH if size_bytes is None else f"{digits(size_bytes / 1e6)} MB", size_bytes)


def _by_way(rows: Sequence[Row], way: str) -> Row:
    return next((row for row in rows if row.get("collectives") == way), {})


def _faster(ratio: float | None) -> Cell:
    is_slower = ratio is not None and ratio < 1
    return Cell(times(ratio) + (" (slower)" if is_slower else ""), ratio, "bad" if is_slower else "")


_STEP_COLUMNS: dict[str, Column] = {
    "topology": words("topology"),
    "stages": lambda row: Cell(shape_of(row)),
    ">microbatches": counts("microbatches"),
    "order": lambda row: Cell(order_of(row)),
    ">Mbit/s, slowest link": counts("mbit"),
    "collectives": words("collectives"),
    ">step": durations("time_us"),
    ">spread": durations("spread"),
    ">runs": counts("runs"),
    ">over gloo": speed_ups("times_faster_than_gloo"),
}
