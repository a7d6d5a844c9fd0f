"""Where published planners gain: SPP's by links and batch, RaNNC's in the experiments of its own paper."""

from __future__ import annotations

from collections.abc import Iterator

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
    Tone,
    all_rows,
    cell,
    columns,
    grid,
    lines,
    table,
    text,
)
from arborcast.bench.page.results import Document, Row, first, groups
from arborcast.bench.page.training import COMMAND, named, points
from arborcast.bench.page.words import DASH, count, digits, listed, plural, scaled, times

# ------------------------------------------------------------------------------------- where SPP gains

LEVEL = 1e-3
"""Share of the time up to which two predicted times are one."""


def _gains(document: Document) -> Iterator[Part]:
    rows = document.rows
    known = rows[rows["gain"].notna()]
    if len(known):
        wins = known[known["gain"] > 1 + LEVEL]
        best = first(known.loc[[known["gain"].idxmax()]])
        by_rate = [
            f"{sum(alike['gain'] > 1 + LEVEL)} of {len(alike)} at {count(rate)} Gbit/s"
            for rate, alike in groups(known, "nic_gbit")
        ]
        yield text(
            "SPP's plan is faster than all others in ",
            Strong(f"{len(wins)} of {plural(len(known), 'setting')}"),
            f", by up to {times(best.gain)} ({best.model}, {count(best.nic_gbit)} Gbit/s, "
            f"{plural(best.samples_each, 'sample')} on each rank): {listed(by_rate)}. Elsewhere it is data "
            "parallelism: what that takes beyond the work of the batch is less than what bubbles cost.",
        )
    yield gains_table(document)
    yield all_rows(_GAINS, named(rows))


def gains_table(document: Document) -> Table:
    """A line per network and batch, a column per rate of the NICs: the gain, of what there is to gain."""
    rows = document.rows
    rates = list(dict.fromkeys(rows["nic_gbit"]))

    def at(rate: float) -> Column:
        def shown(alike: pd.DataFrame) -> Cell:
            row = first(alike[alike["nic_gbit"] == rate])
            if not row.gain > 0:
                return Cell(DASH)
            told = "tie" if abs(row.gain - 1) <= LEVEL else times(row.gain)
            left = row.data_parallel_us / row.floor_us
            beyond = f" of {times(left)}" if left > 0 else ""
            tone: Tone = "ours" if row.gain > 1 + LEVEL else "bad" if row.gain < 1 - LEVEL else "quiet"
            return Cell(f"{told}{beyond}", row.gain, tone)

        return shown

    head: dict[str, Column] = {
        "network": lambda alike: Cell(first(alike).model),
        ">samples on each rank": lambda alike: cell(count, first(alike).samples_each),
    }
    head |= {f">{count(rate)} Gbit/s": at(rate) for rate in rates}
    return table(head, (alike for _, alike in groups(rows, "model", "samples_each")))


_GAINS = columns(
    "network: model | >samples each: samples_each | >Gbit/s: nic_gbit | >SPP's step: time_us | "
    "stages: shape | >microbatches | >data parallel: data_parallel_us | >work over ranks: floor_us | "
    "best of the others: best_other | >gain"
)

# ---------------------------------------------------------------------------------- RaNNC's experiments

NAMES = {"rannc": "RaNNC", "megatron": "Megatron-LM", "data-parallel": "data parallel", "arborcast": "ours"}
SHORT = NAMES | {"megatron": "Megatron", "data-parallel": "data par."}
"""At the end of a curve, where there is little room."""


def _rannc(document: Document) -> Iterator[Part]:
    tall, large, largest = (_of(document, it) for it in ("tall", "large", "largest"))
    ours, theirs = (tall[tall["method"] == it].set_index("devices") for it in ("arborcast", "rannc"))
    ratios = (ours["samples_per_second"] / theirs["samples_per_second"]).dropna()
    if len(ratios):
        held = scaled("billion parameters", 1e9)(first(tall).parameters)
        on = listed([count(devices) for devices in ratios.index])
        yield text(
            f"BERT-Tall ({held}; published: 1.85) fits on no single device. On {on} devices our plan, the "
            "same on every host, ",
            Strong(f"is {times(ratios.min())} to {times(ratios.max())} as fast"),
            " as RaNNC's, which recomputes wherever there are several microbatches.",
        )
    yield tall_table(document)
    yield from _large_words(large)
    yield large_table(document)
    pictures = [
        [
            _over_layers(
                f"{count(parts)} parts", large[large["parts"].isin([1, parts]) | large["parts"].isna()]
            )
        ]
        for parts in sorted(set(large["parts"].dropna()) - {1.0})
    ]
    yield grid(pictures)
    yield largest_table(largest)
    yield all_rows(_RANNC, named(document.rows))


def _of(document: Document, experiment: str) -> pd.DataFrame:
    return document.rows[document.rows["experiment"] == experiment]


def _large_words(large: pd.DataFrame) -> Iterator[Part]:
    """RaNNC's claim: faster than Megatron-LM in 2 and 4 parts, slower in 8."""
    told = []
    for parts in sorted(set(large["parts"].dropna()) - {1.0}):
        alike = large[large["parts"] == parts]
        best = alike.pivot_table(index="layers", columns="method", values="samples_per_second", aggfunc="max")
        if {"rannc", "megatron"} <= set(best.columns):
            both = best[["rannc", "megatron"]].dropna()
            wins = sum(both["rannc"] > both["megatron"])
            told.append(f"in {count(parts)} parts with {wins} of {plural(len(both), 'number')} of layers")
    if told:
        yield text(
            "BERT-Large with more layers, on 8 devices: by our costs RaNNC is faster than Megatron-LM's "
            f"layout {listed(told)}. Published: in 2 and 4 parts, not in 8."
        )


def tall_table(document: Document) -> Table:
    """A line per number of devices: samples per second of each method, and the plans."""
    rows = named(_of(document, "tall"))

    def speed(method: str) -> Column:
        def shown(alike: pd.DataFrame) -> Cell:
            row = first(alike, method=method)
            if not row.samples_per_second > 0:
                return Cell("does not fit" if row.fits is False else DASH, tone="quiet")
            return cell(digits, row.samples_per_second, "ours" if method == "arborcast" else "")

        return shown

    def plan(method: str) -> Column:
        def shown(alike: pd.DataFrame) -> Cell:
            row = first(alike, method=method)
            again = ", recomputes" if row.recompute is True else ""
            each = row.stages / len(row.replicas) if isinstance(row.replicas, list) else 1
            more = f", {count(each)} stages each" if each > 1 else ""
            told = f"{row.shape}{more}, m {count(row.microbatches)}, {row.order}{again}"
            return Cell(told if row.time_us > 0 else DASH)

        return shown

    return table(
        {
            ">devices": lambda alike: cell(count, first(alike).devices),
            ">ours, samples/s": speed("arborcast"),
            ">RaNNC's": speed("rannc"),
            ">data parallel": speed("data-parallel"),
            "our plan": plan("arborcast"),
            "RaNNC's plan": plan("rannc"),
        },
        (alike for _, alike in groups(rows, "devices")),
    )


def large_table(document: Document) -> Table:
    """A line per way, a column per number of layers: samples per second."""
    rows = _of(document, "large")
    depths = list(dict.fromkeys(rows["layers"]))

    def at(depth: float) -> Column:
        def shown(alike: pd.DataFrame) -> Cell:
            row = first(alike[alike["layers"] == depth])
            if not row.samples_per_second > 0:
                return Cell("does not fit" if row.fits is False else DASH, tone="quiet")
            return cell(digits, row.samples_per_second, "ours" if row.method == "arborcast" else "")

        return shown

    head: dict[str, Column] = {"samples/s with so many layers": lambda alike: Cell(_way(first(alike)))}
    head |= {f">{count(depth)}": at(depth) for depth in depths}
    return table(head, (alike for _, alike in groups(rows, "method", "parts", "asked")))


def largest_table(rows: pd.DataFrame) -> Table:
    """A line per way: the most layers that fit into memory."""
    return lines(
        ("the largest BERT-Large that fits", ">layers", ">parameters", ">samples/s"),
        (
            (
                _way(row),
                cell(count, row.layers),
                cell(scaled("billion", 1e9), row.parameters),
                cell(digits, row.samples_per_second),
            )
            for _, alike in groups(rows, "method", "parts", "asked")
            for row in [first(alike)]
        ),
    )


def _way(row: Row) -> str:
    name = NAMES.get(row.method, row.method)
    if row.method == "rannc":
        return f"{name}, {count(row.parts)} stages, m {count(row.asked)}, batch {count(row.batch)}"
    return f"{name}, {count(row.parts)} parts" if row.parts > 1 else name


def _over_layers(what: str, rows: pd.DataFrame) -> Picture:
    curves = []
    for (method, _, asked), alike in groups(rows, "method", "parts", "asked"):
        name = SHORT.get(method, method) + (f" m {count(asked)}" if asked > 0 else "")
        curve = points(alike, "layers", "samples_per_second")
        curves.append(
            Line(name, curve, "ours" if method == "arborcast" else "base", dashed=method == "megatron")
        )
    chart = LineChart(
        f"samples per second over the layers of BERT-Large: {what}",
        tuple(curves),
        equal=None,
        across=count,
        upright=digits,
    )
    return Picture(chart, what, "Samples per second over layers; a curve ends where memory does.")


_RANNC = columns(
    "experiment | method | >parts | >devices | >layers | >parameters | >samples/s: samples_per_second | "
    "ranks: shape | >stages | >microbatches | order | >ranks idle: bubble | >fullest rank: memory_bytes | "
    "why not: why_not"
)

SECTIONS = (
    Section(
        "pipeline_gains",
        "gains",
        "With which links and batches does SPP gain over the others?",
        "predicted by our simulator",
        COMMAND + "gains",
        "Four hosts of two 1080 Ti as in the SPP paper, with faster and slower NICs and smaller batches. A "
        "figure is the time of the fastest of data parallelism, GPipe, PipeDream and HetPipe over SPP's, and "
        "behind it what data parallelism takes over the work of a batch divided by all ranks: the most that "
        "any plan could gain over it.",
        _gains,
        ("SPP's gain over the best of the others, of the most that any plan could gain", gains_table),
    ),
    Section(
        "pipeline_rannc",
        "rannc",
        "What does the partitioner of RaNNC give in its experiments?",
        "predicted by our simulator",
        COMMAND + "rannc",
        "Hosts of 8 V100 of 32 GB, NVLink inside, one port of 100 Gbit/s each. Costs are analytic, of "
        "float16 with 16 bytes a parameter and 128 tokens a sample; nothing is allocated or trained. "
        "Megatron-LM's layout is costed as the parts that its ranks compute, and their allreduces.",
        _rannc,
        ("BERT-Tall, samples per second, predicted", tall_table),
    ),
)
