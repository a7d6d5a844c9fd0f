"""The section of the Divisible paper's sweeps: the model's curves and optima beside the published figures.

What the model was calibrated on is told before what it predicts, and claims that it does not repeat as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from arborcast.bench.page.cells import Column, all_rows, counts, durations, words
from arborcast.bench.page.parts import Cell, Part, Picture, Section, Strong, Table, grid, missing, text
from arborcast.bench.page.results import Document, Row, figure, figures, grouped, word
from arborcast.bench.page.svg import Line, line_chart
from arborcast.bench.page.training import COMMAND
from arborcast.bench.page.words import DASH, count, digits, listed, percent, plural, times

NAME, TITLE = "divisible", "Does the model repeat the sweeps of the Divisible paper?"


def section(document: Document | None) -> Section:
    """The simulator at the paper's sweeps, beside the published figures."""
    if document is None:
        return missing(NAME, TITLE, f"{COMMAND}divisible")
    sweep = [row for row in document.rows if row.get("sweep") == "microbatches"]
    widths = [row for row in document.rows if row.get("sweep") == "width"]
    pictures = [[_over_microbatches(sweep, _best(document))]] if sweep else []
    pictures += [
        [_over_width(count(stages), rows)]
        for stages, rows in grouped(widths, lambda row: figure(row, "stages")).items()
    ]
    parts: list[Part] = [
        text(
            "32 fully connected layers, a batch of 1200 on 1 to 32 P100, by our simulator; we measured none "
            "of it. Speed-ups are over one process that does not divide its batch, in the pictures over the "
            "width over as many processes that do not.",
            tone="quiet",
        ),
        *_calibration(document),
        table(document),
        grid(pictures),
        *_claims(document),
        all_rows(_COLUMNS, document.rows),
    ]
    return Section(NAME, TITLE, "computed, beside published figures", tuple(parts), (document,))


def _best(document: Document) -> list[Row]:
    return [row for row in document.rows if row.get("sweep") == "best"]


def _calibration(document: Document) -> list[Part]:
    best = _best(document)
    predicted = [
        abs(value)
        for row in best
        if row.get("calibrated") is not True and (value := figure(row, "difference")) is not None
    ]
    found = document.get("calibration")
    if not best or not predicted or not isinstance(found, Mapping):
        return []
    tried = [count(tile) for tile in found.get("tiles_tried") or []]
    same = sum(row.get("best_of_named") == row.get("paper_microbatches") for row in best)
    return [
        text(
            "At the published best numbers of microbatches the model is ",
            Strong(f"{percent(max(predicted))} off at the most"),
            f"; its own best of those that the paper's text names is the same in {same} of "
            f"{plural(len(best), 'case')}. Two things are set to published figures: "
            f"{digits(figure(found, 'message_us'))} us per message and end, so that the speed-up of "
            f"{count(figure(found, 'processes'))} processes is met, and the kernels' tile of "
            f"{count(figure(found, 'tile_samples'))} samples, which of {listed(tried)} comes closest. The "
            "differences below are therefore of a model that has seen these figures.",
        )
    ]


def table(document: Document) -> Table:
    """A line per number of processes: published and predicted speed-up, and the best microbatches."""
    lines = []
    for row in _best(document):
        difference = figure(row, "difference")
        is_set = row.get("calibrated") is True
        off = "set to it" if is_set else DASH if difference is None else f"{100 * difference:+.1f} %"
        lines.append(
            (
                Cell(count(figure(row, "stages")), figure(row, "stages")),
                Cell(count(figure(row, "paper_microbatches")), figure(row, "paper_microbatches")),
                Cell(times(figure(row, "paper_speed_up")), figure(row, "paper_speed_up")),
                Cell(times(figure(row, "speed_up")), figure(row, "speed_up"), "ours"),
                Cell(off, difference, "quiet" if is_set else ""),
                _own_best(row, "best_of_named"),
                _own_best(row, "best_of_all"),
            )
        )
    head = (">processes", ">published best m", ">published speed-up", ">model there", ">difference")
    return Table((*head, ">model's best m of those named", ">model's best m of all"), tuple(lines))


def _own_best(row: Row, column: str) -> Cell:
    best, published = figure(row, column), figure(row, "paper_microbatches")
    speed_up = times(figure(row, f"{column}_speed_up"))
    is_other = best is not None and published is not None and best != published
    return Cell(DASH if best is None else f"{count(best)} ({speed_up})", best, "bad" if is_other else "")


def _over_microbatches(sweep: Sequence[Row], best: Sequence[Row]) -> Picture:
    lines = [
        Line(f"{count(stages)}", _curve(rows, "microbatches"), "ours", drawn="curve")
        for stages, rows in grouped(sweep, lambda row: figure(row, "stages")).items()
    ]
    lines += [
        Line("", ((published, speed_up),), "quiet", drawn="points")
        for row in best
        if (published := figure(row, "paper_microbatches")) and (speed_up := figure(row, "paper_speed_up"))
    ]
    drawn = line_chart(
        [line for line in lines if line.points],
        below="slower than 1",
        size_name=count,
        description="speed-up over the number of microbatches, by processes",
    )
    return Picture(
        drawn,
        "Over microbatches, by processes",
        "Dots are the published best; the rest of the published curves is only drawn in the paper.",
    )


def _over_width(stages: str, rows: Sequence[Row]) -> Picture:
    by_count = grouped(rows, lambda row: figure(row, "microbatches"))
    best = max(by_count, key=lambda number: max(figures(by_count[number], "speed_up"), default=0.0))
    lines = [
        Line(f"m {count(number)}", _curve(found, "width"), "ours" if number == best else "base")
        for number, found in by_count.items()
    ]
    drawn = line_chart(
        [line for line in lines if line.points],
        below="slower",
        size_name=count,
        description=f"speed-up over the width of the layers, {stages} processes",
    )
    return Picture(drawn, f"Over the layers' width, {stages} processes")


def _curve(rows: Sequence[Row], column: str) -> tuple[tuple[float, float], ...]:
    found = [(figure(row, column), figure(row, "speed_up")) for row in rows]
    return tuple(sorted((at, value) for at, value in found if at and value))


def _claims(document: Document) -> list[Part]:
    claims: list[dict[str, Any]] = [one for one in document.get("claims") or [] if isinstance(one, dict)]
    if not claims or not document.rows:
        return []
    lines = tuple(
        (
            Cell(word(one, "claim")),
            Cell(word(one, "model")),
            Cell("holds", tone="good") if one.get("holds") is True else Cell("does not", tone="bad"),
        )
        for one in claims
    )
    held = sum(one.get("holds") is True for one in claims)
    title = f"What else the paper says: {held} of {plural(len(claims), 'claim')} hold in the model"
    return [Table(("the paper", "the model", "verdict"), lines, title)]


_COLUMNS: dict[str, Column] = {
    "sweep": words("sweep"),
    ">processes": counts("stages"),
    ">microbatches": counts("microbatches"),
    ">width": counts("width"),
    "network": words("network"),
    ">step": durations("time_us"),
    ">speed-up": lambda row: Cell(times(figure(row, "speed_up")), figure(row, "speed_up")),
}
