"""Planning: plans beside other plans, predicted; time to plan; the model beside a paper's figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from arborcast.bench.page.charts import Line, LineChart
from arborcast.bench.page.parts import (
    Cell,
    Column,
    Part,
    Picture,
    Section,
    Strong,
    Table,
    all_rows,
    cell,
    column,
    columns,
    grid,
    missed,
    table,
    text,
    verdict,
)
from arborcast.bench.page.results import Document, Row, first, frame, groups, number
from arborcast.bench.page.targets import tally
from arborcast.bench.page.training import COMMAND, named, points
from arborcast.bench.page.words import (
    DASH,
    count,
    digits,
    duration,
    listed,
    percent,
    plural,
    seconds,
    times,
)

# ------------------------------------------------------------------------------------- plans beside others

SPP, PIPELINE, FREE, UNFLUSHED = "spp", "spp, several stages", "any order", "pipedream-async"
OTHERS = {
    "data-parallel": "data parallel",
    "gpipe": "GPipe",
    "pipedream": "PipeDream",
    "hetpipe": "HetPipe",
    "rannc": "RaNNC",
}
TIE = 1e-3
"""Share of the time up to which two predicted times are one: mostly they are of one plan."""


def _plans(document: Document) -> Iterator[Part]:
    rows = named(document.rows)
    others = rows[rows["method"].isin(list(OTHERS))]
    least = others.groupby(["testbed", "model"])["speed_up"].min().dropna()
    if len(least):
        lost, ties = sum(least < 1 - TIE), sum((least - 1).abs() <= TIE)
        alone = len(least) - lost - ties
        unfit = sum(others["fits"].eq(False))
        cannot = f" In {plural(unfit, 'comparison')} the other has no plan that fits into memory."
        yield text(
            "SPP's plan is alone the fastest in ",
            Strong(f"{alone or 'none'} of {plural(len(least), 'case')}"),
            f", level with the best of the others in {ties or 'none'} (within {percent(TIE)}: mostly the "
            f"same plan) and slower in {lost or 'none'}; single comparisons go from "
            f"{times(others['speed_up'].min())} to {times(others['speed_up'].max())}."
            f"{cannot if unfit else ''}{_free(rows)}",
            tone="bad" if lost else "",
        )
    yield from _why_ties(rows)
    yield plans_table(document)
    yield all_rows(_PLANS, rows)


def _why_ties(rows: pd.DataFrame) -> Iterator[Part]:
    """Why SPP's plan is data parallelism: what is left to gain over that, and what a pipeline would cost."""
    cases = rows.pivot_table(
        index=["testbed", "model"], columns="method", values="time_us", aggfunc="first", sort=False
    )
    if not {SPP, "data-parallel", PIPELINE} <= set(cases.columns):
        return
    floor = rows.groupby(["testbed", "model"], sort=False)["floor_us"].first()
    ties = cases[(cases["data-parallel"] / cases[SPP] - 1).abs() <= TIE]
    for testbed, alike in groups(ties.reset_index(), "testbed"):
        index = list(zip(alike["testbed"], alike["model"], strict=True))
        beyond = alike["data-parallel"].to_numpy() / floor.loc[index].to_numpy() - 1
        more = (alike[PIPELINE] / alike["data-parallel"] - 1).dropna()
        yield text(
            f"{testbed}: in {plural(len(alike), 'case')} SPP's plan is data parallelism. That takes "
            f"{_span(beyond.min(), beyond.max())} longer than the work of the batch divided by all ranks, "
            f"which no plan can go below; SPP's best plan of several stages takes "
            f"{_span(more.min(), more.max())} longer than data parallelism, for bubbles and uneven stages."
        )
    if UNFLUSHED in cases.columns:
        ratio = (cases[SPP] / cases[UNFLUSHED]).dropna()
        row = first(rows[(rows["testbed"] == "4 V100") & (rows["model"] == "vgg19")], method=UNFLUSHED)
        told = f" (VGG-19 on 4 V100, as in the paper: {times(1 / row.speed_up)})" if row.speed_up > 0 else ""
        yield text(
            f"PipeDream without a flush is {times(ratio.min())} to {times(ratio.max())} as fast as SPP's "
            f"plan per sample{told}; the 9 % that the paper gains over it to an accuracy are of what older "
            "weights do to training, which times do not show."
        )


def _span(low: float, high: float) -> str:
    return percent(low) if percent(low) == percent(high) else f"{percent(low)} to {percent(high)}"


def _free(rows: pd.DataFrame) -> str:
    """What our planner finds where it may choose the order as well."""
    found = 1 / rows["speed_up"][(rows["method"] == FREE) & (rows["speed_up"] > 0)]
    if not len(found):
        return ""
    better, worse = sum(found > 1 + TIE), sum(found < 1 - TIE)
    most = f" (up to {times(found.max())})" if better else ""
    return (
        f" Free to choose the order as well, our planner is faster than SPP's plan in {better or 'none'} of "
        f"{plural(len(found), 'case')}{most} and slower in {worse or 'none'}."
    )


def plans_table(document: Document) -> Table:
    """A line per testbed and network, a column per method."""
    columns: dict[str, Column] = {
        "testbed": lambda rows: Cell(first(rows).testbed),
        "network": lambda rows: Cell(first(rows).model),
        "SPP's plan": lambda rows: Cell(_plan(first(rows, method=SPP))),
        ">its step": lambda rows: cell(duration, first(rows, method=SPP).time_us, "ours"),
    }
    columns |= {f">{name}": _over_spp(method) for method, name in OTHERS.items()}
    return table(columns, (rows for _, rows in groups(named(document.rows), "testbed", "model")))


def _over_spp(method: str) -> Column:
    return lambda rows: _ratio(first(rows, method=method))


def _plan(row: Row) -> str:
    return f"{row.shape}, m {count(row.microbatches)}" if row.microbatches > 0 else DASH


def _ratio(row: Row) -> Cell:
    if not row.speed_up > 0:
        return Cell("does not fit" if row.fits is False else DASH, tone="quiet")
    if abs(row.speed_up - 1) <= TIE:
        return Cell("tie", row.speed_up, "quiet")
    return missed(times, row.speed_up, True, mark="lost") if row.speed_up < 1 else cell(times, row.speed_up)


_PLANS: dict[str, Column] = {
    **columns("testbed | network: model"),
    "method": lambda row: Cell(
        OTHERS.get(row.method, row.method), tone="ours" if row.method in (SPP, FREE) else ""
    ),
    **columns(">step: time_us"),
    ">over SPP's": _ratio,
    **columns("stages: shape | >microbatches | order"),
    "recomputes": lambda row: Cell("yes" if row.recompute is True else ""),
    **columns(">ranks idle: bubble | >fullest rank: memory_bytes"),
    "why not": lambda row: Cell(row.why_not if row.fits is False else ""),
}


# ---------------------------------------------------------------------------------------- the planner's time


def _planner(document: Document) -> Iterator[Part]:
    counted = tally(document)
    if counted.all:
        targets = listed([seconds(target) for target in sorted(set(document.rows["target_s"].dropna()))])
        all_met = counted.met == counted.all
        told = f" ({targets}, in the median)."
        yield text(Strong(counted.words), told, tone="good" if all_met else "bad")
    yield planner_table(document)


def planner_table(document: Document) -> Table:
    """A line per case."""
    return table(
        {
            **columns("topology | >devices | >layers"),
            ">seconds, median": lambda row: missed(seconds, row.seconds, row.seconds > row.target_s),
            ">spread": column("spread", unit=seconds),
            **columns(">first of a process: first_seconds | >memory limit: limit_bytes"),
            ">target": lambda row: cell(seconds, row.target_s) if row.target_s > 0 else Cell(""),
            "plan": lambda row: Cell(f"{_plan(row)}, {row.order}"),
        },
        named(document.rows),
    )


# ------------------------------------------------------------------------------- the Divisible paper's sweeps


def _divisible(document: Document) -> Iterator[Part]:
    """What the model was calibrated on before what it predicts; claims that it does not repeat as well."""
    rows = document.rows
    best = rows[rows["sweep"] == "best"]
    yield from _calibration(document, best)
    yield divisible_table(document)
    sweep, widths = rows[rows["sweep"] == "microbatches"], rows[rows["sweep"] == "width"]
    pictures = [[_over_microbatches(sweep, best)]] if len(sweep) else []
    yield grid(pictures + [[_over_width(count(stages), alike)] for stages, alike in groups(widths, "stages")])
    claims = [one for one in document.get("claims") or [] if isinstance(one, dict)]
    if claims and len(rows):
        held = sum(one.get("holds") is True for one in claims)
        yield table(
            {
                **columns("the paper: claim | the model: model"),
                "verdict": lambda row: verdict("holds" if row.holds else "does not", row.holds is True),
            },
            frame(claims),
            f"What else the paper says: {held} of {plural(len(claims), 'claim')} hold in the model",
        )
    yield all_rows(_DIVISIBLE, rows)


def _calibration(document: Document, best: pd.DataFrame) -> Iterator[Part]:
    predicted = best["difference"][best["calibrated"].ne(True)].abs()
    found = document.get("calibration")
    if not predicted.notna().any() or not isinstance(found, Mapping):
        return
    same = sum(best["best_of_named"] == best["paper_microbatches"])
    tried = listed([count(number(tile)) for tile in found.get("tiles_tried") or []])
    yield text(
        "At the published best numbers of microbatches the model is ",
        Strong(f"{percent(predicted.max())} off at the most"),
        f"; its own best of those that the paper's text names is the same in {same} of "
        f"{plural(len(best), 'case')}. Two things are set to published figures: "
        f"{digits(number(found.get('message_us')))} us per message and end, so that the speed-up of "
        f"{count(number(found.get('processes')))} processes is met, and the kernels' tile of "
        f"{count(number(found.get('tile_samples')))} samples, which of {tried} comes closest. The "
        "differences below are therefore of a model that has seen these figures.",
    )


def divisible_table(document: Document) -> Table:
    """A line per number of processes: published and predicted speed-up, and the best microbatches."""
    return table(
        {
            **columns(
                ">processes: stages | >published best m: paper_microbatches | "
                ">published speed-up: paper_speed_up"
            ),
            ">model there": column("speed_up", "ours"),
            ">difference": _difference,
            ">model's best m of those named": _own_best("best_of_named"),
            ">model's best m of all": _own_best("best_of_all"),
        },
        document.rows[document.rows["sweep"] == "best"],
    )


def _difference(row: Row) -> Cell:
    if row.calibrated is True:
        return Cell("set to it", row.difference, "quiet")
    return (
        cell(lambda value: f"{100 * value:+.1f} %", row.difference)
        if row.difference == row.difference
        else Cell(DASH)
    )


def _own_best(name: str) -> Column:
    def shown(row: Row) -> Cell:
        best, published = getattr(row, name), row.paper_microbatches
        is_other = best != published and best > 0 and published > 0
        told = f"{count(best)} ({times(getattr(row, f'{name}_speed_up'))})" if best > 0 else DASH
        return Cell(told, best, "bad" if is_other else "")

    return shown


def _over_microbatches(sweep: pd.DataFrame, best: pd.DataFrame) -> Picture:
    curves = [
        Line(count(stages), points(alike, "microbatches", "speed_up"), "ours", drawn="curve")
        for stages, alike in groups(sweep, "stages")
    ]
    published = points(best, "paper_microbatches", "paper_speed_up")
    return Picture(
        LineChart(
            "speed-up over the number of microbatches, by processes",
            (*curves, Line("", published, "quiet", drawn="points")),
            below="slower than 1",
            across=count,
        ),
        "Over microbatches, by processes",
        "Dots are the published best; the rest of the published curves is only drawn in the paper.",
    )


def _over_width(stages: str, rows: pd.DataFrame) -> Picture:
    by_count = groups(rows, "microbatches")
    best = max(by_count, key=lambda pair: pair[1]["speed_up"].fillna(0).max())[0]
    curves = (
        Line(f"m {count(number)}", points(alike, "width", "speed_up"), "ours" if number == best else "base")
        for number, alike in by_count
    )
    description = f"speed-up over the width of the layers, {stages} processes"
    chart = LineChart(description, tuple(curves), below="slower", across=count)
    return Picture(chart, f"Over the layers' width, {stages} processes")


_DIVISIBLE = columns(
    "sweep | >processes: stages | >microbatches | >width | network | >step: time_us | >speed-up: speed_up"
)

SECTIONS = (
    Section(
        "pipeline_plans",
        "plans",
        "On the testbeds of the SPP paper, is its plan the fastest?",
        "predicted by our simulator",
        COMMAND + "plans",
        "Predicted times of a step: nothing here ran. All plan for one analytic profile of the network, "
        "SPP and RaNNC as published, and all are simulated on the same links, each at the number of "
        "microbatches that suits it best. A figure is the other method's time over the time of SPP's plan; "
        "below 1× SPP loses.",
        _plans,
        ("SPP's plan, predicted: the others' time over its own", plans_table),
    ),
    Section(
        "pipeline_divisible",
        "divisible",
        "Does the model repeat the sweeps of the Divisible paper?",
        "computed, beside published figures",
        COMMAND + "divisible",
        "32 fully connected layers, a batch of 1200 on 1 to 32 P100, by our simulator; we measured none "
        "of it. Speed-ups are over one process that does not divide its batch, in the pictures over the "
        "width over as many processes that do not.",
        _divisible,
        ("The Divisible paper's speed-ups by the model", divisible_table),
    ),
    Section(
        "pipeline_planner",
        "planning",
        "How long does planning a pipeline take?",
        "measured",
        COMMAND + "planner",
        "From profile and topology to plan, in processes of their own; the first plan of a process also "
        "loads compiled kernels. Layers are drawn at random, all different.",
        _planner,
        ("Time to plan a pipeline", planner_table),
    ),
)
