"""Pipelined training that ran: beside serial training, beside its prediction, beside gloo.

What is planned and computed without a trainer is in `bench.page.plans`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

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
    lines,
    missed,
    text,
)
from arborcast.bench.page.results import Document, first, groups, number, records
from arborcast.bench.page.words import (
    DASH,
    count,
    duration,
    megabytes,
    percent,
    plural,
    times,
    tiny,
    unit_time,
)

COMMAND = "python bench/pipeline.py --only "
ORDERS = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "pe": "list order",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "zb-v": "ZB-V",
}
"""Names of orders; `pe` is SPP's."""


def named(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with the names of their orders, and the shapes of their plans in words."""
    return rows.assign(order=rows["order"].replace(ORDERS), shape=rows["replicas"].map(_shape))


def _shape(said: object) -> str:
    """How a plan divides its ranks: stages of one rank each, one stage of replicas, or replicas of each."""
    replicas = [str(each) for each in said] if isinstance(said, list) else str(said or "").split("+")
    if replicas in ([], [""]):
        return DASH
    if len(replicas) > 1 and set(replicas) == {"1"}:
        return f"{len(replicas)} stages"
    if len(replicas) == 1:
        return "1 rank" if replicas == ["1"] else f"{replicas[0]} replicas"
    return "+".join(replicas)


# -------------------------------------------------------------------------------- equal to serial training


def _curves(document: Document) -> Iterator[Part]:
    limit, rows = number(document.get("limit")), named(document.rows)
    trained = rows[rows["loss_difference"].notna()]
    if len(trained):
        worst = records(trained.loc[[trained["loss_difference"].idxmax()]])[0]
        within = sum(trained["loss_difference"] <= limit)
        stay = f"; {within} of {plural(len(trained), 'training')} stay within the limit of {tiny(limit)}."
        yield text(
            f"Over {count(worst.steps)} steps no loss differs from the serial one by more than ",
            Strong(tiny(worst.loss_difference)),
            f" ({worst.order}, {worst.shape})",
            "." if math.isnan(limit) else stay,
            tone="bad" if within < len(trained) and not math.isnan(limit) else "",
        )
    yield curves_table(document)
    orders = list(dict.fromkeys(rows["order"]))
    losses = rows.pivot_table(
        index="shape", columns="order", values="loss_difference", aggfunc="last", sort=False
    ).reindex(index=list(dict.fromkeys(rows["shape"])), columns=orders)
    yield lines(
        ("replicas of each stage", *(f">{order}" for order in orders)),
        (
            (str(shape), *(missed(tiny, value, value > limit) for value in row))
            for shape, row in losses.iterrows()
        ),
        "Largest difference of a loss, by shape",
    )
    yield all_rows(_CURVES, rows)


def curves_table(document: Document) -> Table:
    """A line per order: the largest differences over all shapes."""
    limit = number(document.get("limit"))
    by_order = groups(named(document.rows), "order")
    head = ("order", ">shapes", ">steps", ">loss, largest difference", ">limit")
    return lines(
        (*head, ">gradients of the first step, relative"),
        (
            (
                order,
                cell(count, len(rows)),
                Cell(count(rows["steps"].max())),
                missed(tiny, rows["loss_difference"].max(), rows["loss_difference"].max() > limit),
                cell(tiny, limit),
                cell(tiny, rows["gradient_difference"].max()),
            )
            for order, rows in by_order
        ),
    )


def _loss(value: float) -> str:
    return DASH if math.isnan(value) else f"{value:.4f}"


_CURVES: dict[str, Column] = {
    **columns(
        "order | replicas: shape | >microbatches | >steps | collectives | >loss: loss_difference | "
        ">gradients: gradient_difference"
    ),
    ">first loss": column("first_loss", unit=_loss),
    ">last loss": column("last_loss", unit=_loss),
}


def _models(document: Document) -> Iterator[Part]:
    rows = document.rows
    equal, refused = (rows[rows["result"] == it] for it in ("equal", "refused"))
    yield text(
        Strong(f"{equal['model'].nunique()} of {plural(rows['model'].nunique(), 'model')}"),
        " train as in one piece, cut in two and in four; ",
        f"{refused['model'].nunique()} are refused, with the operator or the line.",
        tone="bad" if len(equal) + len(refused) < len(rows) else "",
    )
    yield models_table(document)
    yield lines(
        ("refused", "why"),
        ((str(row.model), str(row.reason)) for row in records(refused.drop_duplicates("model"))),
        "What is refused",
    )
    yield all_rows(_MODELS, rows)


def models_table(document: Document) -> Table:
    """A line per library: how many models train as in one piece."""
    rows = document.rows
    limit = number(document.get("limit"))
    homes = rows["model"].str.split(" ").str[0].where(lambda home: home.isin(LIBRARIES), "in-house")
    head = ("models of", ">cut in 2 and 4 and equal", ">refused", ">other", ">loss, largest difference")
    return lines(
        (*head, ">weights", ">limit"),
        (
            (
                home,
                *(
                    cell(count, chosen["model"].nunique())
                    for chosen in (
                        alike[alike["result"] == "equal"],
                        alike[alike["result"] == "refused"],
                        alike[~alike["result"].isin(("equal", "refused"))],
                    )
                ),
                *(cell(tiny, alike[name].max()) for name in ("loss_difference", "weight_difference")),
                cell(tiny, limit),
            )
            for home, alike in groups(rows.assign(home=homes), "home")
        ),
    )


LIBRARIES = ("transformers", "torchvision", "timm")
_MODELS = columns(
    "model | >stages | result | >loss: loss_difference | >weights: weight_difference | "
    ">evaluation: evaluation_difference | >microbatches | >legal cuts: legal_cuts | reason"
)


# ------------------------------------------------------------------------------- predicted beside measured


def _prediction(document: Document) -> Iterator[Part]:
    rows = _pipelines(document)
    yield from _accuracy(rows, number(document.get("target")))
    yield prediction_table(document)
    yield grid([_over_microbatches(name, alike)] for name, alike in groups(rows, "pipeline"))
    yield all_rows(_PREDICTION, rows)


def _pipelines(document: Document) -> pd.DataFrame:
    rows = named(document.rows)
    return rows.assign(pipeline=rows["order"] + ", " + rows["stages"].map(count) + " stages")


def _accuracy(rows: pd.DataFrame, target: float) -> Iterator[Part]:
    rows = rows[rows["error"].notna()]
    if not len(rows):
        return
    errors = rows["error"]
    worst = records(rows.loc[[errors.idxmax()]])[0]
    above = rows[errors > target]
    said = ""
    if not math.isnan(target):
        met = len(rows) - len(above)
        said = f" {met} of {plural(len(rows), 'step')} within the target of {percent(target)}."
    if len(above):  # how many of them the spread of the runs could explain
        unclear = sum(above["spread"].fillna(0) > above["error"] * above["time_us"].fillna(0))
        said += f" In {unclear or 'none'} of the others the measured runs differ by more than the error."
    yield text(
        "The simulator is off by ",
        Strong(percent(errors.median())),
        f" in the median and {percent(errors.max())} at the most ({worst.pipeline}, "
        f"m = {count(worst.microbatches)}).{said}",
        tone="bad" if len(above) else "",
    )


def prediction_table(document: Document) -> Table:
    """A line per order and number of stages: the errors over all numbers of microbatches."""
    target = number(document.get("target"))
    rows = []
    for name, alike in groups(_pipelines(document), "pipeline"):
        errors = alike["error"]
        most = errors.max()
        largest = missed(percent, most, True) if most > target else cell(percent, most)
        equation = alike["equation_error"][alike["fitted"].ne(True)].max()
        rows.append(
            (
                name,
                ", ".join(map(count, alike["microbatches"].dropna())) or DASH,
                cell(percent, errors.median(), "ours"),
                largest,
                cell(percent, equation),
            )
        )
    head = ("order and stages", "microbatches", ">simulator, median error", ">largest")
    return lines((*head, ">equation (3), largest"), rows)


def _over_microbatches(name: str, rows: pd.DataFrame) -> Picture:
    curve = partial(points, rows, "microbatches")
    chart = LineChart(
        f"time of a step over the number of microbatches: {name}",
        (
            Line("equation (3)", curve("equation_us", 1e-6), dashed=True, drawn="curve"),
            Line("simulator", curve("predicted_us", 1e-6), "ours", drawn="curve"),
            Line("", curve("time_us", 1e-6), "quiet", drawn="points"),
        ),
        equal=None,
        across=count,
        upright=unit_time,
    )
    return Picture(chart, name, f"Off by {percent(rows['error'].max())} at the most.")


def points(rows: pd.DataFrame, across: str, up: str, factor: float = 1.0) -> tuple[tuple[float, float], ...]:
    """A curve of one column over another, from left to right."""
    found = rows[[across, up]].dropna()
    return tuple(sorted(zip(found[across], found[up] * factor, strict=True)))


_PREDICTION: dict[str, Column] = {
    **columns(
        "order | >stages | >microbatches | >measured: time_us | >spread | >simulator: predicted_us | "
        ">error | >equation (3): equation_us | >its error: equation_error"
    ),
    "": lambda row: Cell("fitted to this" if row.fitted is True else "", tone="quiet"),
}


# ---------------------------------------------------------------------------------- a step on emulated links


def _steps(document: Document) -> Iterator[Part]:
    ours = document.rows[document.rows["collectives"] == "synth"]["times_faster_than_gloo"].dropna()
    if len(ours):
        yield text(
            "A whole step with our allreduce is ",
            Strong(f"{times(ours.min())} to {times(ours.max())}"),
            f" as fast as with gloo's, on {plural(len(ours), 'plan')}.",
        )
    yield steps_table(document)
    yield all_rows(_STEPS, named(document.rows))


def steps_table(document: Document) -> Table:
    """A line per topology and plan."""
    rows = []
    for (topology, shape), alike in groups(named(document.rows), "topology", "shape"):
        ours, gloo = first(alike, collectives="synth"), first(alike, collectives="gloo")
        ratio = ours.times_faster_than_gloo
        rows.append(
            (
                topology,
                shape,
                cell(megabytes, first(alike).gradient_bytes),
                cell(duration, ours.time_us, "ours"),
                cell(duration, gloo.time_us),
                missed(times, ratio, True, mark="slower") if ratio < 1 else cell(times, ratio),
            )
        )
    head = ("topology", "stages", ">largest gradients", ">step, synthesized", ">step, gloo")
    return lines((*head, ">times as fast"), rows)


_STEPS = columns(
    "topology | stages: shape | >microbatches | order | >Mbit/s, slowest link: mbit | collectives | "
    ">step: time_us | >spread | >runs | >over gloo: times_faster_than_gloo"
)


# ------------------------------------------------------------------------------------------ divided steps


def _sharded(document: Document) -> Iterator[Part]:
    rows = _with_same_plans(document)
    own = rows[rows["same_plan"] == DASH]
    case = ["topology", "model", "batch"]
    errors = rows.drop_duplicates([*case, "mesh", "time_us"])["error"].dropna()  # every measurement once
    behind = []
    for (topology, model, batch), alike in groups(own, *case):
        chosen = first(alike, layout="chosen")
        spread = alike["spread"].fillna(0).clip(lower=chosen.spread)  # the larger of both
        faster = alike["time_us"][alike["time_us"] + spread < chosen.time_us]
        if len(faster):
            ratio = times(chosen.time_us / faster.min())
            behind.append(f"{model} of {count(batch)} samples on {topology} ({ratio} of the fastest)")
    yield text(
        "Predictions are off by ",
        Strong(percent(errors.median())),
        f" in the median and {percent(errors.max())} at the most. The choice takes longer than a fixed "
        f"layout, by more than the spread of the runs, for {', '.join(behind) or 'none'}.",
        tone="bad" if behind else "",
    )
    yield sharded_table(document)
    yield all_rows(_SHARDED, rows)


def _with_same_plans(document: Document) -> pd.DataFrame:
    """Rows whose `same_plan` names the layout with the same plan that came before, or is a dash.

    Files without that column measured such plans twice: equal meshes, calls and times tell them there.
    """
    rows = document.rows
    if any("same_plan" in row for row in document.content["rows"]):
        return rows
    alike = ["topology", "model", "batch", "mesh", "calls", "planned_us", "predicted_us"]
    before = rows.groupby(alike, sort=False, dropna=False)["layout"].transform("first")
    return rows.assign(
        same_plan=before.where((before != rows["layout"]) & rows["predicted_us"].notna(), DASH)
    )


def sharded_table(document: Document) -> Table:
    """A line per model, topology and layout: planned, predicted and measured."""
    rows = [
        (
            row.topology,
            f"{row.model}, {count(row.batch)} samples",
            row.layout,
            row.mesh,
            cell(duration, row.predicted_us, "ours"),
            *(
                (cell(duration, row.time_us), cell(percent, row.error), cell(times, row.ratio))
                if row.same_plan == DASH
                else (f"the same plan as {row.same_plan}", DASH, DASH)
            ),
        )
        for row in records(_with_same_plans(document))
    ]
    head = ("topology", "model", "layout", "mesh", ">predicted", ">measured", ">error", ">over the choice")
    return lines(head, rows)


_SHARDED = columns(
    "topology | model | >batch | layout | the same plan as: same_plan | mesh | >calls | "
    ">planned: planned_us | >collectives: collectives_us | >computing: computing_us | >each call: each_us | "
    ">predicted: predicted_us | >measured: time_us | >spread | >runs | >error"
)


def _memory(document: Document) -> Iterator[Part]:
    limit, rows = number(document.get("limit")), document.rows
    above = rows[rows["ratio"] > limit]
    yield text(
        "Of what its plan says, a rank holds between ",
        Strong(percent(rows["ratio"].min())),
        " and ",
        Strong(percent(rows["ratio"].max())),
        f" at most; {plural(len(above), 'rank')} of {len(rows)} above the limit.",
        tone="bad" if len(above) else "",
    )
    yield memory_table(document)
    yield all_rows(_MEMORY, rows)


def memory_table(document: Document) -> Table:
    """A line per training, with its stages in order."""
    limit = number(document.get("limit"))
    return lines(
        ("model", "order", ">predicted, stage by stage", ">held", ">largest ratio"),
        (
            (
                str(model),
                str(order),
                *(Cell(" ".join(map(megabytes, alike[it]))) for it in ("predicted_bytes", "live_bytes")),
                missed(percent, alike["ratio"].max(), alike["ratio"].max() > limit, mark="too much"),
            )
            for (model, order), alike in groups(document.rows, "model", "order")
        ),
    )


_MEMORY = columns(
    "model | order | >stage | >layers | >ratio | >predicted: predicted_bytes | >held: live_bytes | "
    ">resident: resident_bytes | >parameters: parameters_bytes | >gradients: gradients_bytes | "
    ">optimizer: optimizer_bytes | >activations: activations_bytes | >messages: boundary_bytes | "
    ">operators: working_bytes"
)


SECTIONS = (
    Section(
        "pipeline_curves",
        "equal",
        "Is pipelined training equal to serial training?",
        "trained on local processes",
        COMMAND + "curves",
        "scikit-learn's digits: the same weights and batches on one process, and on one process per rank "
        "of a plan; every gradient goes over a synthesized allreduce where a stage has replicas.",
        _curves,
        ("Pipelined training on digits beside serial training", curves_table),
    ),
    Section(
        "pipeline_models",
        "models",
        "Which models train in stages, unmodified?",
        "trained stage after stage in one process",
        COMMAND + "models",
        "models as their libraries give them, from small configurations: traced, cut in two and in four, and "
        "trained on padded batches in uneven microbatches beside the model itself, with the same weights.",
        _models,
        ("Models of libraries cut in 2 and in 4 stages beside serial training", models_table),
    ),
    Section(
        "pipeline_memory",
        "memory",
        "Does a rank need as much memory as its plan says?",
        "measured on local processes",
        COMMAND + "memory",
        'A GPT-2 built on "meta", of which every rank makes its own stage: the memory behind torch\'s '
        "tensors at the fullest moment of three steps with AdamW, beside what the plan says without "
        "allocating anything.",
        _memory,
        ("Memory of ranks that make their stages of a model on meta", memory_table),
    ),
    Section(
        "pipeline_prediction",
        "predicted",
        "How far is the predicted time of a training step from the measured one?",
        "measured on local processes",
        COMMAND + "prediction",
        "Layers sleep as long as they would compute, so that ranks do not wait for each other's cores. "
        "What layers and messages cost is measured beforehand, and what the trainer takes for one on "
        "one plan for each number of stages (GPipe with the most microbatches): all others are "
        "predictions. Equation (3) of the Divisible paper is "
        "fitted to three points of each curve, which do not count below. Pictures show the time of a "
        "step over the number of microbatches: dots are measured, blue is the simulator, grey is the "
        "equation.",
        _prediction,
        ("Predicted time of a training step, errors", prediction_table),
    ),
    Section(
        "pipeline_testbed",
        "steps",
        "What do synthesized allreduces give a training step?",
        "measured on emulated links",
        COMMAND + "testbed",
        "Whole steps on rate-limited links, forward to update. The same plan, model and messages between "
        "stages; only the allreduce of the gradients among the replicas of a stage is a synthesized "
        "schedule or gloo's. Both take turns in the same processes.",
        _steps,
        ("A training step on emulated links", steps_table),
    ),
    Section(
        "pipeline_sharded",
        "sharded",
        "Is a divided step as fast as its plan says?",
        "measured on emulated links",
        COMMAND + "sharded",
        "Models whose operators are divided over all ranks, whole steps: by the choice of the integer "
        "program, and by the best data parallelism and the best of Megatron's layout on the same costs. "
        "All take turns in the same processes; what is the same plan is measured once. Collectives are "
        "predicted by simulating their schedules at the rates that links delivered, computing by a serial "
        "step.",
        _sharded,
        ("Steps of divided models on emulated links", sharded_table),
    ),
)
