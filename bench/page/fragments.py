"""The section of allocations: what each set of GPUs of a DGX-1 can give, BLINK's question and figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from arborcast.bench.page.cells import (
    Column,
    all_rows,
    counts,
    method,
    numbers,
    shares,
    speed_ups,
    table_of,
    words,
)
from arborcast.bench.page.parts import Cell, Part, Picture, Section, Table, Tone, grid, missing, text
from arborcast.bench.page.results import Document, Row, figure, figures, grouped, median, word
from arborcast.bench.page.svg import Dots, dot_chart
from arborcast.bench.page.words import DASH, count, digits, times

NAME, TITLE = "allocations", "What does each allocation of a DGX-1 give?"
COMMAND = "python bench/fragments.py"
MODEL, RELAYS = "nccl-ring-model", "nccl-relay-model"


def section(document: Document | None) -> Section:
    """What the survey of fragments computed."""
    if document is None:
        return missing(NAME, TITLE, COMMAND)
    cases = grouped(document.rows, _case)
    parts: list[Part] = [
        text(
            "A scheduler hands out any of a box's GPUs, and most sets of them are irregular. Every set that "
            "differs in its links is listed once. Rates of our trees, of rings and of the optimum are exact; "
            "NCCL's are figures of its planning model, and nothing here ran on a GPU. A set that NVLinks do "
            "not join has no optimum over them.",
            tone="quiet",
        ),
        _overview(cases),
        grid([_picture(machine, collective, rows)] for (machine, collective), rows in cases.items()),
        *_summary(document.get("summary")),
        all_rows(_COLUMNS, document.rows),
    ]
    return Section(NAME, TITLE, "computed exactly; NCCL by its planning model", tuple(parts), (document,))


def _case(row: Row) -> tuple[str, str]:
    return word(row, "box", "machine"), word(row, "collective")


def _gpus(row: Row) -> str:
    return word(row, "gpus", "fragment", "topology")


def _fragments(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """By fragment, the row of each method, smaller fragments first."""
    ordered = sorted(rows, key=lambda row: figure(row, "ranks") or 0)
    return {
        gpus: {word(row, "method"): row for row in found} for gpus, found in grouped(ordered, _gpus).items()
    }


def _overview(cases: Mapping[tuple[str, str], Sequence[Row]]) -> Table:
    """A line per machine and collective, over the sets of 3 GPUs and more that the links join."""
    lines = []
    for (machine, collective), rows in cases.items():
        trees = [row for row in rows if row.get("method") == "trees" and (figure(row, "ranks") or 0) >= 3]
        joined = [row for row in trees if figure(row, "optimum")]
        optimal = sum((figure(row, "share_of_optimum") or 0) >= 1 for row in joined)
        ratios = [_spans(figures(joined, name)) for name in ("over_nccl", "over_nccl_relays", "over_ring")]
        sets = Cell(count(len(joined)), len(joined))
        lines.append((Cell(machine), Cell(collective), sets, Cell(count(optimal), optimal, "ours"), *ratios))
    head = ("machine", "collective", ">sets", ">optimum reached on", ">over NCCL's ring model")
    more = (">over that with relays", ">over the best single ring")
    title = "Our trees on sets of 3 GPUs and more that NVLinks join: median speed-up (least to most)"
    return Table((*head, *more), tuple(lines), title)


def _spans(ratios: Sequence[float]) -> Cell:
    middle = median(ratios)
    if middle is None:
        return Cell(DASH)
    return Cell(f"{times(middle)} ({times(min(ratios))} to {times(max(ratios))})", middle)


def _picture(machine: str, collective: str, rows: Sequence[Row]) -> Picture:
    dots, last = [], None
    for gpus, found in _fragments(rows).items():
        any_row = next(iter(found.values()))
        optimum = figure(any_row, "optimum")
        values: list[tuple[Tone, float]] = [("quiet", optimum)] if optimum else []
        contenders: tuple[tuple[Tone, str], ...] = (("base", MODEL), ("ours", "trees"))
        for tone, name in contenders:
            rate = figure(found.get(name, {}), "algbw")
            if rate:
                values.append((tone, rate))
        ranks = figure(any_row, "ranks")
        heading = f"{count(ranks)} GPUs" if ranks != last else ""
        last = ranks
        dots.append(Dots(gpus, tuple(values), _hint(gpus, found), heading))
    note = "algbw. Blue: our trees. Grey: NCCL's ring model, hidden where equal. Stroke: the proven optimum."
    drawn = dot_chart(dots, unit="GB/s", description=f"rates of the allocations of {machine}: {collective}")
    return Picture(drawn, f"{machine}, {collective}", note)


def _hint(gpus: str, found: dict[str, Row]) -> str:
    rates = ", ".join(f"{name} {digits(figure(row, 'algbw'))}" for name, row in found.items())
    return f"GPUs {gpus}: {rates} GB/s"


def _summary(summary: Any) -> list[Part]:
    rows = [row for row in summary or [] if isinstance(row, dict)]
    columns: dict[str, Column] = {
        "machine": words("box", "machine"),
        "collective": words("collective"),
        "GPUs": words("ranks"),
        ">different sets": counts("fragments"),
        ">joined by NVLinks": counts("joined"),
        ">over NCCL's model": speed_ups("over_nccl_mean"),
        ">most": speed_ups("over_nccl_most"),
        ">over it with relays": speed_ups("over_nccl_relays_mean"),
        ">most with relays": speed_ups("over_nccl_relays_most"),
    }
    folded = "By number of GPUs: our trees over NCCL's ring model, geometric means over the joined sets"
    return [table_of(columns, rows, folded=folded)] if rows else []


_COLUMNS: dict[str, Column] = {
    "machine": words("box", "machine"),
    "GPUs": words("gpus"),
    "collective": words("collective"),
    "method": method,
    ">algbw GB/s": numbers("algbw"),
    ">optimum": numbers("optimum"),
    ">of the optimum": shares("share_of_optimum"),
    ">over the best ring": speed_ups("over_ring"),
    ">over NCCL's model": speed_ups("over_nccl"),
    ">trees": counts("trees"),
    ">such sets": counts("allocations"),
}
