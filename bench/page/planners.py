"""Where planners gain: SPP by links and batch, RaNNC in its own experiments, ours where memory is short."""

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
from arborcast.bench.page.results import Document, Row, first, groups, number
from arborcast.bench.page.training import COMMAND, named, points
from arborcast.bench.page.words import (
    DASH,
    billions,
    count,
    digits,
    duration,
    listed,
    percent,
    plural,
    scaled,
    times,
)

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
            f"layout {listed(told)}. Published: in 2 and 4 parts, not in 8.",
            *_why(large),
        )


def _why(large: pd.DataFrame) -> Iterator[str]:
    """What either loses with the fewest parts and layers, where both have the same batch."""
    alike = large[(large["parts"] == 2) & (large["layers"] == large["layers"].min())]
    layout, plans = first(alike, method="megatron"), alike[alike["method"] == "rannc"].sort_values("asked")
    few, many = first(plans.head(1)), first(plans.tail(1))
    if not (layout.inside_us > 0 and few.batch == layout.batch):
        return
    others_us = layout.time_us - layout.inside_us
    yield (
        f" With {count(layout.layers)} layers in 2 parts it comes to "
        f"{percent(few.samples_per_second / layout.samples_per_second)}: its two stages idle "
        f"{percent(few.bubble)} of a step of {count(few.microbatches)} microbatches, while Megatron-LM's "
        f"ranks sum for {percent(layout.inside_us / layout.time_us)} of theirs. Both would be equal if those "
        f"sums took {times((few.time_us - others_us) / layout.inside_us)} as long as by our schedules."
    )
    if many.recompute is True:
        yield (
            f" With {count(many.microbatches)} microbatches the stages idle {percent(many.bubble)}, and "
            "repeat their forward passes."
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
                cell(billions, row.parameters),
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

# ------------------------------------------------------------------------------------ where memory is short

BY_LAYER, WHOLE = "by layer", ("keep all", "recompute all")


def _activations(document: Document) -> Iterator[Part]:
    told = []
    for limit, alike in groups(document.rows, "limit_gib"):
        chosen = first(alike, way=BY_LAYER)
        others = alike[alike["way"].isin(WHOLE) & alike["time_us"].notna()]
        if chosen.time_us > 0 and len(others):
            best = first(others.loc[[others["time_us"].idxmin()]])
            saved = 1 - chosen.time_us / best.time_us
            told.append(f"{percent(saved) if saved > LEVEL else 'nothing'} with {_gib(limit)}")
    if told:
        yield text(
            "A choice by layer saves, of the step of the faster of keeping all and recomputing all, ",
            Strong(listed(told)),
            ".",
        )
    offload = document.get("offload_gbps")
    kept = first(document.rows[document.rows["way"] == "offload by layer"].dropna(subset="time_us").tail(1))
    again = first(document.rows[document.rows["limit_gib"] == kept.limit_gib], way=BY_LAYER)
    if kept.time_us > 0 and again.time_us > 0:
        yield text(
            f"Offload instead of recomputation takes {times(kept.time_us / again.time_us)} as long with "
            f"{_gib(kept.limit_gib)}: at {count(number(offload))} GB/s a copy takes longer than the passes "
            "that it runs beside."
            if kept.time_us > again.time_us
            else f"Offload is no slower than recomputation with {_gib(kept.limit_gib)}."
        )
    yield activations_table(document)
    rows = named(document.rows)
    yield all_rows(_ACTIVATIONS, rows.assign(treated=rows["treated"].map(_treated)))


def activations_table(document: Document) -> Table:
    """A line per way, a column per limit: the time of a step, and the plan."""

    def at(limit: float) -> Column:
        def shown(alike: pd.DataFrame) -> Cell:
            row = first(alike[alike["limit_gib"] == limit])
            if not row.time_us > 0:
                return Cell("does not fit", tone="quiet")
            return cell(duration, row.time_us, "ours" if row.way == BY_LAYER else "")

        return shown

    head: dict[str, Column] = {"results of layers": lambda alike: Cell(first(alike).way)}
    head |= {f">{_gib(limit)}": at(limit) for limit in dict.fromkeys(document.rows["limit_gib"])}
    return table(head, (alike for _, alike in groups(document.rows, "way")))


def _gib(limit: float) -> str:
    return f"{limit:g} GiB"


def _treated(said: object) -> str:
    """What becomes of the results of each stage that does not keep all."""
    if not isinstance(said, dict) or not said:
        return DASH
    return "; ".join(f"stage {stage}: {words}" for stage, words in said.items())


_ACTIVATIONS = columns(
    "way | >GiB: limit_gib | >step: time_us | >fullest rank: memory_bytes | stages: shape | "
    ">microbatches | treated | why not: why_not"
)

SECTIONS = (
    Section(
        "pipeline_activations",
        "activations",
        "What do recomputation and offload by layer save where memory is short?",
        "predicted by our simulator",
        COMMAND + "activations",
        "BERT-Large on a DGX-1 in 1F1B, costs analytic, the best plan of each way under each limit of a "
        "rank's memory: all results of forward passes kept, all recomputed, or for each layer what costs "
        "least.",
        _activations,
        ("A step of BERT-Large by what becomes of results, predicted", activations_table),
    ),
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
