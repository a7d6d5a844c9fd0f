"""The sections of planning: plans beside other plans, predicted, and how long planning takes.

What was trained is in `bench.page.training`.
"""

from __future__ import annotations

from collections.abc import Sequence

from arborcast.bench.page.cells import Column, all_rows, counts, durations, shares, words
from arborcast.bench.page.parts import Cell, Part, Section, Strong, Table, missing, text
from arborcast.bench.page.results import Document, Row, figure, figures, grouped, word
from arborcast.bench.page.targets import tally
from arborcast.bench.page.training import COMMAND, order_of, shape_of
from arborcast.bench.page.words import DASH, count, digits, duration, listed, percent, plural, seconds, times

# ------------------------------------------------------------------------------------- plans beside others

PLANS = "plans", "On the testbeds of the SPP paper, is its plan the fastest of five?"
SPP, FREE = "spp", "any order"
OTHERS = {
    "data-parallel": "data parallel",
    "gpipe": "GPipe",
    "pipedream": "PipeDream",
    "hetpipe": "HetPipe",
}
TIE = 1e-3
"""Share of the time up to which two predicted times are one: mostly they are of one plan."""


def plans(document: Document | None) -> Section:
    """SPP's plan against four others."""
    if document is None:
        return missing(*PLANS, f"{COMMAND}plans")
    parts: list[Part] = [
        text(
            "Predicted times of a step: nothing here ran. All five plan for one analytic profile of the "
            "network, and all are simulated on the same links, each at the number of microbatches that suits "
            "it best. A figure is the other method's time over the time of SPP's plan; below 1× SPP loses.",
            tone="quiet",
        ),
        *_verdict(document),
        table_of_plans(document),
        all_rows(_PLAN_COLUMNS, document.rows),
    ]
    return Section(*PLANS, "predicted by our simulator", tuple(parts), (document,))


def _verdict(document: Document) -> list[Part]:
    models = [rows for rows in grouped(document.rows, _model).values() if _least(rows) is not None]
    if not models:
        return []
    least = [_least(rows) or 0.0 for rows in models]
    lost = sum(ratio < 1 - TIE for ratio in least)
    ties = sum(abs(ratio - 1) <= TIE for ratio in least)
    alone = len(models) - lost - ties
    ratios = [ratio for rows in models for ratio in _ratios(rows).values()]
    return [
        text(
            "SPP's plan is alone the fastest in ",
            Strong(f"{alone or 'none'} of {plural(len(models), 'case')}"),
            f", level with the best of the others in {ties or 'none'} (within {percent(TIE)}: mostly the "
            f"same plan) and slower in {lost or 'none'}; single comparisons go from {times(min(ratios))} to "
            f"{times(max(ratios))}.{_unfit(models)}{_free(models)}",
            tone="bad" if lost else "",
        )
    ]


def _model(row: Row) -> tuple[str, str]:
    return word(row, "testbed"), word(row, "model")


def _ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Of each of the others that has a plan."""
    return {
        word(row, "method"): ratio
        for row in rows
        if row.get("method") in OTHERS and (ratio := figure(row, "speed_up")) is not None
    }


def _least(rows: Sequence[Row]) -> float | None:
    """The ratio of the fastest of the others."""
    return min(_ratios(rows).values(), default=None)


def _unfit(models: Sequence[Sequence[Row]]) -> str:
    unfit = sum(row.get("fits") is False and row.get("method") in OTHERS for rows in models for row in rows)
    return f" In {plural(unfit, 'comparison')} the other has no plan that fits into memory." if unfit else ""


def _free(models: Sequence[Sequence[Row]]) -> str:
    """What our planner finds where it may choose the order as well."""
    found = [
        1 / ratio
        for rows in models
        for row in rows
        if row.get("method") == FREE and (ratio := figure(row, "speed_up"))
    ]
    if not found:
        return ""
    better = sum(ratio > 1 + TIE for ratio in found)
    worse = sum(ratio < 1 - TIE for ratio in found)
    most = f" (up to {times(max(found))})" if better else ""
    return (
        f" Free to choose the order as well, our planner is faster than SPP's plan in {better or 'none'} of "
        f"{plural(len(found), 'case')}{most} and slower in {worse or 'none'}."
    )


def table_of_plans(document: Document) -> Table:
    """A line per testbed and network, a column per method."""
    lines = []
    for (testbed, model), rows in grouped(document.rows, _model).items():
        by_method = {word(row, "method"): row for row in rows}
        spp = by_method.get(SPP, {})
        lines.append(
            (
                Cell(testbed),
                Cell(model),
                Cell(_plan_words(spp)),
                Cell(duration(figure(spp, "time_us")), figure(spp, "time_us"), "ours"),
                *(_ratio_cell(by_method.get(method, {})) for method in OTHERS),
            )
        )
    head = ("testbed", "network", "SPP's plan", ">its step", *(f">{name}" for name in OTHERS.values()))
    return Table(head, tuple(lines))


def _plan_words(row: Row) -> str:
    microbatches = figure(row, "microbatches")
    return DASH if microbatches is None else f"{shape_of(row)}, m {count(microbatches)}"


def _ratio_cell(row: Row) -> Cell:
    ratio = figure(row, "speed_up")
    if ratio is None:
        return Cell("does not fit" if row.get("fits") is False else DASH, tone="quiet")
    if abs(ratio - 1) <= TIE:
        return Cell("tie", ratio, "quiet")
    return Cell(f"{times(ratio)} (lost)", ratio, "bad") if ratio < 1 else Cell(times(ratio), ratio)


def _gigabytes(size_bytes: float | None) -> Cell:
    return Cell(DASH if size_bytes is None else f"{digits(size_bytes / 1e9)} GB", size_bytes)


_PLAN_COLUMNS: dict[str, Column] = {
    "testbed": words("testbed"),
    "network": words("model"),
    "method": lambda row: Cell(
        OTHERS.get(word(row, "method"), word(row, "method")),
        tone="ours" if row.get("method") in (SPP, FREE) else "",
    ),
    ">step": durations("time_us"),
    ">over SPP's": _ratio_cell,
    "stages": lambda row: Cell(shape_of(row)),
    ">microbatches": counts("microbatches"),
    "order": lambda row: Cell(order_of(row)),
    "recomputes": lambda row: Cell("yes" if row.get("recompute") is True else ""),
    ">ranks idle": shares("bubble"),
    ">fullest rank": lambda row: _gigabytes(figure(row, "memory_bytes")),
    "why not": lambda row: Cell(word(row, "why_not") if row.get("fits") is False else ""),
}


# ---------------------------------------------------------------------------------------- the planner's time

PLANNER = "planning", "How long does planning a pipeline take?"


def planner(document: Document | None) -> Section:
    """Seconds from profile and topology to plan."""
    if document is None:
        return missing(*PLANNER, f"{COMMAND}planner")
    parts: list[Part] = [
        text(
            "From profile and topology to plan, in processes of their own; the first plan of a process also "
            "loads compiled kernels. Layers are drawn at random, all different.",
            tone="quiet",
        ),
        *_targets(document),
        table_of_planner(document),
    ]
    return Section(*PLANNER, "measured", tuple(parts), (document,))


def _targets(document: Document) -> list[Part]:
    counted = tally(document)
    if not counted.all:
        return []
    targets = listed([seconds(target) for target in sorted(set(figures(document.rows, "target_s")))])
    return [
        text(
            Strong(counted.words),
            f" ({targets}, in the median).",
            tone="good" if counted.met == counted.all else "bad",
        )
    ]


def table_of_planner(document: Document) -> Table:
    """A line per case."""
    lines = []
    for row in document.rows:
        took, target = figure(row, "seconds"), figure(row, "target_s")
        is_over = took is not None and target is not None and took > target
        lines.append(
            (
                Cell(word(row, "topology")),
                Cell(count(figure(row, "devices")), figure(row, "devices")),
                Cell(count(figure(row, "layers")), figure(row, "layers")),
                Cell(seconds(took) + (" (missed)" if is_over else ""), took, "bad" if is_over else "ours"),
                Cell(seconds(figure(row, "spread")), figure(row, "spread")),
                Cell(seconds(figure(row, "first_seconds")), figure(row, "first_seconds")),
                _gigabytes(figure(row, "limit_bytes")),
                Cell("" if target is None else seconds(target), target),
                Cell(f"{_plan_words(row)}, {order_of(row)}"),
            )
        )
    measured = ">seconds, median", ">spread", ">first of a process"
    head = ("topology", ">devices", ">layers", *measured, ">memory limit", ">target", "plan")
    return Table(head, tuple(lines))
