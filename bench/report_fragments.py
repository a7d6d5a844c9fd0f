"""The section of allocations: what each set of GPUs of a DGX-1 can give, BLINK's question and figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.report_parts import Cell, Part, Picture, Section, Strong, Table, Tone, grid, missing, text
from bench.report_results import Document, Row, figure, grouped, median, number, word
from bench.report_svg import Dots, dot_chart
from bench.report_words import digits, percent, plural, times

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
            "NCCL's are figures of its planning model, and nothing here ran on a GPU. A set that NVLinks do not "
            "join has no optimum over them.",
            tone="quiet",
        ),
        *(text(*sentence) for sentence in _sentences(cases)),
        grid([_picture(machine, collective, rows)] for (machine, collective), rows in cases.items()),
        *_summary(document.get("summary")),
        _everything(document.rows),
    ]
    return Section(NAME, TITLE, "computed exactly; NCCL by its planning model", tuple(parts), (document,))


def _case(row: Row) -> tuple[str, str]:
    return word(row, "machine"), word(row, "collective")


def _gpus(row: Row) -> str:
    return word(row, "gpus", "fragment", "topology")


def _fragments(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """By fragment, the row of each method, smaller fragments first."""
    ordered = sorted(rows, key=lambda row: figure(row, "ranks") or 0)
    return {
        gpus: {word(row, "method"): row for row in found} for gpus, found in grouped(ordered, _gpus).items()
    }


def _ratios(rows: Sequence[Row]) -> list[float]:
    """Our trees over NCCL's ring model, of fragments that the links join."""
    ratios = []
    for found in _fragments(rows).values():
        ours, theirs = (figure(found.get(method, {}), "algbw") for method in ("trees", MODEL))
        if ours and theirs:
            ratios.append(ours / theirs)
    return ratios


def _sentences(cases: dict[tuple[str, str], list[Row]]) -> list[tuple[str | Strong, ...]]:
    said = []
    for (machine, collective), rows in cases.items():
        ratios = _ratios(rows)
        if ratios:
            said.append(
                (
                    f"{machine}, {collective}: our trees give ",
                    Strong(times(median(ratios))),
                    f" the rate of NCCL's ring model in the median of {plural(len(ratios), 'allocation')} "
                    f"({times(min(ratios))} to {times(max(ratios))}); {_losing(ratios)}.",
                )
            )
    return said


def _losing(ratios: Sequence[float]) -> str:
    less = sum(ratio < 1 - 1e-9 for ratio in ratios)
    return f"less in {less}" if less else "less in none"


def _picture(machine: str, collective: str, rows: Sequence[Row]) -> Picture:
    dots, last = [], None
    for gpus, found in _fragments(rows).items():
        any_row = next(iter(found.values()))
        optimum = figure(any_row, "optimum")
        values: list[tuple[Tone, float]] = [("quiet", optimum)] if optimum else []
        for tone, method in (("base", MODEL), ("ours", "trees")):
            rate = figure(found.get(method, {}), "algbw")
            if rate:
                values.append((tone, rate))  # type: ignore[arg-type]
        ranks = figure(any_row, "ranks")
        heading = f"{digits(ranks, 2)} GPUs" if ranks != last else ""
        last = ranks
        dots.append(Dots(gpus, tuple(values), _hint(gpus, found), heading))
    note = "GB/s of the buffer (algbw). Blue: our trees. Grey: NCCL's ring model. Stroke: the proven optimum."
    drawn = dot_chart(dots, unit="GB/s", description=f"rates of the allocations of {machine}: {collective}")
    return Picture(drawn, f"{machine}, {collective}", note)


def _hint(gpus: str, found: dict[str, Row]) -> str:
    rates = ", ".join(f"{method} {digits(figure(row, 'algbw'))}" for method, row in found.items())
    return f"GPUs {gpus}: {rates} GB/s"


def _summary(summary: Any) -> list[Part]:
    rows = [row for row in summary or [] if isinstance(row, dict)]
    if not rows:
        return []
    ratios = ("over_nccl_mean", "over_nccl_most", "over_nccl_relays_mean", "over_nccl_relays_most")
    lines = [
        (
            *(Cell(word(row, name), number(row.get(name))) for name in ("machine", "collective", "ranks")),
            *(Cell(digits(figure(row, name), 4), figure(row, name)) for name in ("fragments", "joined")),
            *(Cell(times(figure(row, name)), figure(row, name)) for name in ratios),
        )
        for row in rows
    ]
    head = ("machine", "collective", "GPUs", ">different sets", ">joined by NVLinks", ">over NCCL's model")
    head += (">most", ">over it with relays", ">most")
    title = "Our trees over NCCL's ring model, geometric means over the sets that NVLinks join"
    return [Table(head, tuple(lines), title)]


def _everything(rows: Sequence[Row]) -> Table:
    lines = [
        (
            *(Cell(word(row, name)) for name in ("machine", "gpus", "collective", "method")),
            *(Cell(digits(figure(row, name)), figure(row, name)) for name in ("algbw", "optimum")),
            Cell(percent(figure(row, "share_of_optimum")), figure(row, "share_of_optimum")),
            *(Cell(times(figure(row, name)), figure(row, name)) for name in ("over_ring", "over_nccl")),
            *(Cell(digits(figure(row, name), 4), figure(row, name)) for name in ("trees", "allocations")),
        )
        for row in rows
    ]
    head = ("machine", "GPUs", "collective", "method", ">algbw GB/s", ">optimum", ">of the optimum")
    head += (">over the best ring", ">over NCCL's model", ">trees", ">such sets")
    return Table(head, tuple(lines), folded=f"All {plural(len(lines), 'row')}")
