"""Every question of the page, in its order: result file, command, sentence, compact table, picture.

A section that needs more than columns of its rows has its functions beside it; what it shows stands in the
table of `SECTIONS`. All figures come from the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from arborcast.bench.page.contest import Case, cases
from arborcast.bench.page.results import (
    Document,
    Row,
    first,
    groups,
    is_ours,
    middle,
    most,
    number,
)
from arborcast.bench.page.tables import (
    Column,
    Section,
    Table,
    column,
    columns,
    in_gigabytes,
    medians,
    missed,
    of_each,
    pivot,
    plain,
    strong,
    table,
)
from arborcast.bench.page.words import (
    DASH,
    Format,
    count,
    digits,
    duration,
    percent,
    plural,
    seconds,
    size,
    times,
    tiny,
    two_digits,
)

# ------------------------------------------------------------------------------------------- emulated links


def _along_cables(document: Document) -> Table:
    specs = (
        "topology | collective | >size: bytes | >time: time_us | >of the limit: share_of_optimum | "
        ">over gloo: speed_up_over_gloo"
    )
    return table(columns(specs), (row for row in document.rows if row.get("method") == "cables"))


def _testbed(document: Document) -> Table:
    of_ours = of_each(
        "topology | collective | >size: bytes | ours: method | >time: time_us | "
        ">of the limit: share_of_optimum",
        lambda case: case.ours,
    )
    limit = of_ours[">of the limit"]
    of_ours[">of the limit"] = lambda case: (
        limit(case) + (" *" if case.ours.get("cpu_limited") is True else "")
    )
    return table(
        {
            **of_ours,
            ">over the best baseline": _over_best,
            ">over multiring": lambda case: times(case.over("multiring")),
            ">over gloo": lambda case: times(case.over("gloo")),
            "left out of the headline": lambda case: (
                "" if case.is_whole else "; ".join(f"{name}: {why}" for name, why in case.missing.items())
            ),
        },
        cases(document),
    )


def _over_best(case: Case) -> str:
    """The speed-up, with the name of the baseline that is the fastest here."""
    return times(case.over_best) + (f" ({case.baselines[0].text('method')})" if case.baselines else "")


# ------------------------------------------------------------------------------------------------ synthesis


def _synthesis(document: Document) -> Table:
    machines = groups([row for row in document.rows if row.get("method") != "whole process"], "title")
    machines.sort(key=lambda rows: rows[0].figure("ranks"))

    def of(method: str, specs: str) -> dict[str, Column]:
        return of_each(specs, lambda rows: first(rows, method=method))

    return table(
        {
            "machine": lambda rows: rows[0].text("title"),
            **of("trees", ">ranks | >trees"),
            **of("bound", ">bound: seconds"),
            **of("trees", ">trees found in: seconds | >memory: peak_MB"),
        },
        machines,
    )


def _points(row: Row) -> str:
    points = row.get("points")
    if not isinstance(points, list) or not points:
        return DASH
    if len(points) > 4:
        return plural(len(points), "point")
    return " ".join(f"({','.join(map(str, point))})" for point in points if isinstance(point, list))


def _proved(row: Row) -> str:
    proved = row.get("proved")
    if not isinstance(proved, list):
        return DASH
    return "all" if all(proved) else f"{sum(map(bool, proved))} of {len(proved)}"


def _frontiers(document: Document) -> Table:
    rows = [row for row in document.rows if row.get("method") == "pareto"]
    return table(
        {
            **columns("frontier: title"),
            "(C, S, R)": _points,
            "proved": _proved,
            **columns(">call: call_seconds | >CPU, whole process: cpu_seconds"),
        },
        rows,
    )


def _growth(document: Document) -> Table:
    """A line per family: the ends of its curves, and its exponents."""
    exponents = document.entry("exponents")

    def slope(name: str) -> Column:
        return lambda rows: two_digits(number((exponents.get(rows[0].get("family")) or {}).get(name)))

    def ends(name: str, unit: Any) -> Column:
        return lambda rows: f"{unit(rows[0].figure(name))} to {unit(rows[-1].figure(name))}"

    return table(
        {
            "fabrics and method": lambda rows: rows[0].text("family"),
            ">ranks": ends("ranks", count),
            ">time": ends("seconds", seconds),
            ">its exponent": slope("seconds"),
            ">memory at the largest": lambda rows: in_gigabytes(rows[-1].figure("peak_MB")),
            ">exponent of memory": slope("peak_MB"),
        },
        groups(document.rows, "family"),
    )


def _contender(row: Row) -> str:
    """Who answered, without which of its answers it is."""
    return row.text("method").partition(" (")[0]


def _peers(document: Document) -> Table:
    names = sorted(dict.fromkeys(map(_contender, document.rows)), key=lambda name: not is_ours(name))
    return pivot({"question": column("case")}, ("topology", "collective"), _contender, _answer, values=names)(
        document
    )


def _answer(rows: Sequence[Row]) -> str:
    """The best answer of a contender: how long it took, and how good it is."""
    if not rows:
        return ""
    row = max(
        reversed(rows), key=lambda one: (one.figure("share_of_optimum") > 0, one.figure("share_of_optimum"))
    )
    taken, verdict = row.figure("seconds"), row.text("verdict")
    if not row.figure("share_of_optimum") >= 0:
        return f"{verdict}, {seconds(taken)}" if taken > 0 else verdict
    said = [seconds(taken), f"{percent(row.figure('share_of_optimum'))} of the limit"]
    if row.figure("call_seconds") > 0:
        said[0] += f" / {seconds(row.figure('call_seconds'))}"
    if row.figure("times_ours") > 0:
        said[0] += f" ({times(row.figure('times_ours'))} / {times(row.figure('call_times_ours'))} ours)"
    if row.figure("trees") >= 0:
        said.append(plural(row.figure("trees"), "tree"))
    elif row.figure("steps") >= 0:
        said.append(plural(row.figure("steps"), "step"))
    if row.figure("time_us_64MiB") > 0:
        said.append(f"{duration(row.figure('time_us_64MiB'))} for 64 MiB")
    return ", ".join([*said, *([verdict] if verdict != "found" else [])])


# ----------------------------------------------------------------------------------------- the process group


def _case(row: Row) -> str:
    busy = ", Python busy" if row.get("main_thread") == "computes" else ""
    return f"{row.text('collective')}, {count(row.figure('ranks'))} ranks{busy}"


def _in_memory_and_over_sockets(name: str, unit: Any) -> Any:
    return lambda rows: " / ".join(
        unit(first(rows, method=method).figure(name)) for method in ("shared memory", "sockets")
    )


def _targets_missed(rows: Sequence[Row]) -> str:
    verdicts = [row.get("met") for row in rows if isinstance(row.get("met"), bool)]
    return f"{verdicts.count(False)} of {len(verdicts)}" if verdicts else DASH


def _loopback(document: Document) -> Table:
    by = ("collective", "ranks", "main_thread")
    sizes = sorted({row["bytes"] for row in document.rows if row.figure("bytes") > 0})
    found = pivot(
        {"in memory / over sockets": _case},
        by,
        "bytes",
        _in_memory_and_over_sockets("times_gloo", digits),
        size,
        sizes,
    )(document)
    lines = zip(found.rows, groups(document.rows, *by), strict=True)
    return Table(
        (*found.head, ">targets missed"), tuple((*row, _targets_missed(alike)) for row, alike in lines)
    )


def _ddp(document: Document) -> Table:
    def over_gloo(method: str) -> Column:
        return lambda rows: times(first(rows, method=method).figure("times_gloo"))

    return table(
        {
            "": lambda rows: (
                f"{digits(rows[0].figure('parameters') / 1e6)} M parameters, "
                f"{count(rows[0].figure('ranks'))} ranks"
            ),
            ">in memory": over_gloo("shared memory"),
            ">over sockets": over_gloo("sockets"),
            ">targets missed": lambda rows: count(sum(row.get("met") is False for row in rows)),
        },
        groups(document.rows, "parameters", "ranks"),
    )


def _behind(document: Document) -> str:
    others = [row for row in document.rows if row.get("backend") != "gloo"]
    behind = sorted({name for row in others for name in row.get("behind") or ()})
    said = strong(plural(len(behind), "test") if behind else "none")
    named = f": {', '.join(behind)}" if behind else ""
    return (
        f"Of the tests that pass on gloo, {said} fails, or skips itself, for other reasons than the "
        f"backend's name{named}."
    )


# ------------------------------------------------------------------------------------------------- training

ORDERS = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "pe": "list order",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "zb-v": "ZB-V",
}
"""Names of orders; `pe` is SPP's."""


def _order(row: Row) -> str:
    return ORDERS.get(row.text("order"), row.text("order"))


def _shape(row: Row) -> str:
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


def _limited(name: str, limit: float, unit: Any) -> Column:
    """The largest of a group, marked where it is above a limit."""

    def shown(rows: list[Row]) -> str:
        largest = most(row.figure(name) for row in rows)
        return f"{unit(largest)} (missed)" if largest > limit else unit(largest)

    return shown


def _library(row: Row) -> str:
    home = row.text("model").partition(" ")[0]
    return home if home in ("transformers", "torchvision", "timm") else "in-house"


def _models(document: Document) -> Table:
    """A line per library: how many models train as in one piece."""
    limit = number(document.get("limit"))

    def models(of: Any) -> Column:
        return lambda rows: count(len({row.get("model") for row in rows if of(row.get("result"))}))

    def largest(name: str) -> Column:
        return lambda rows: tiny(most(row.figure(name) for row in rows))

    return table(
        {
            "models of": lambda rows: _library(rows[0]),
            ">cut in 2 and 4 and equal": models(lambda result: result == "equal"),
            ">refused": models(lambda result: result == "refused"),
            ">other": models(lambda result: result not in ("equal", "refused")),
            ">loss, largest difference": largest("loss_difference"),
            ">weights": largest("weight_difference"),
            ">limit": lambda rows: tiny(limit),
        },
        groups(document.rows, _library),
    )


def _memory(document: Document) -> Table:
    """A line per training, with its ranks in order."""

    def rank_by_rank(name: str, unit: Format | None = None) -> Column:
        return lambda rows: " ".join(map(column(name, unit), rows))

    return table(
        {
            "model": lambda rows: rows[0].text("model"),
            "plan": lambda rows: rows[0].text("plan"),
            ">predicted, rank by rank": rank_by_rank("predicted_bytes"),
            ">held": rank_by_rank("live_bytes"),
            ">held over predicted": rank_by_rank("ratio", digits),
            ">furthest off": _limited("off", number(document.get("limit")), percent),
        },
        groups(document.rows, "model", "plan"),
    )


def _predicted(document: Document) -> Callable[[Sequence[Row]], str]:
    """A cell: predicted and measured time of the first row, and the error, marked where it misses."""
    target = number(document.get("target"))

    def cell(rows: Sequence[Row]) -> str:
        if not rows:
            return DASH
        both = f"{column('predicted_us')(rows[0])} / {column('time_us')(rows[0])}"
        late = rows[0].figure("error") > target + rows[0].figure("error_spread")
        return f"{both}, {percent(rows[0].figure('error'))}{' (missed)' if late else ''}"

    return cell


def _prediction(document: Document) -> Table:
    """A line per plan, a column per model."""
    return pivot(columns("plan"), ("plan",), "model", _predicted(document))(document)


def _errors(document: Document) -> str:
    found, spreads = ([row.figure(name) for row in document.rows] for name in ("error", "error_spread"))
    asked = [percent(number(document.get(name))) for name in ("target_of_median", "target")]
    return (
        f"Of {plural(len(found), 'step')} the error is {strong(percent(middle(found)))} in the median (asked "
        f"for: {asked[0]}), at most {strong(percent(most(found)))} (asked for: {asked[1]} beyond what "
        f"repeats differ by, {percent(middle(spreads))} in the median)."
    )


def _steps(document: Document) -> Table:
    """A line per topology and plan."""
    cell = _predicted(document)

    def by(collectives: str) -> Column:
        return lambda rows: cell([row for row in rows if row.get("collectives") == collectives])

    return table(
        {
            **of_each("topology", lambda rows: rows[0]),
            "stages": lambda rows: _shape(rows[0]),
            "order": lambda rows: _order(rows[0]),
            ">largest gradients": lambda rows: column("gradient_bytes")(rows[0]),
            ">synthesized": by("synth"),
            ">gloo": by("gloo"),
            ">times as fast": lambda rows: column("times_faster_than_gloo")(first(rows, collectives="synth")),
        },
        groups(document.rows, "topology", _shape, "order"),
    )


def _over_target(name: str, target: str) -> Column:
    return missed(name, lambda row: row.figure(name) > row.figure(target))


def _planner_plan(row: Row) -> str:
    return f"{_shape(row)}, m {count(row.figure('microbatches'))}, {_order(row)}"


def _seconds_or_none(name: str) -> Column:
    return lambda row: seconds(row.figure(name)) if row.figure(name) > 0 else ""


def _runtimes(document: Document) -> Table:
    target = number(document.get("target"))
    return table(
        {
            "order": _order,
            **columns(
                "collectives | torch's: schedule | >samples/s: samples_per_second | "
                ">torch's samples/s: torch_samples_per_second"
            ),
            ">our time over torch's": missed("ratio", lambda row: row.figure("ratio") > target, digits),
        },
        document.rows,
    )


def _bubbles(document: Document) -> Table:
    target = number(document.get("target"))
    return table(
        {
            "order": _order,
            ">stages a rank": lambda row: count(row.figure("stages") / row.figure("ranks")),
            **columns(">step: time_us | >bubble | >by the simulator: predicted_bubble"),
            ">over 1F1B's": missed(
                "ratio", lambda row: row.get("order") == "zb-h1" and row.figure("ratio") > target, percent
            ),
        },
        document.rows,
    )


_TRAINING = "python bench/pipeline.py --only "
_SCALE = "python bench/scale.py --only "

SECTIONS: tuple[Section, ...] = (
    Section(
        "testbed",
        "Real processes and TCP on emulated links",
        "measured on emulated links",
        "python bench/testbed.py",
        "Real processes, real TCP, one rate-limited pair of network devices per link of the topology. The "
        "limit is what no schedule can pass at the rates that these links delivered in the same run, less "
        "what links carry at once after a pause. Each line is what the process group chooses by itself, or "
        "the fastest of ours where that was not measured, beside the fastest baseline of the case (named "
        "in brackets), multiring and unmodified gloo, whose ring follows the numbers of the ranks. A star "
        "marks what the processors may have limited.",
        _testbed,
    ),
    Section(
        "switchless",
        "The process group on hosts without a switch",
        "measured on emulated links",
        "python bench/switchless.py",
        "Each cable is a rate-limited pair of network devices with a subnet of its own, and no rank "
        "forwards. The limit is what no schedule can pass at the rates that these cables delivered alone "
        "before, which repeat to about 5 %: a share may lie that much above 100 %. Gloo cannot connect "
        "there: its time is that on the same links where all ranks forward, by the fastest where several "
        "cables join two ranks.",
        _along_cables,
    ),
    Section(
        "synthesis",
        "Time to find allgather trees that equal their bound",
        "measured",
        "python bench/synthesis.py",
        "Allgather trees that reach their proven limit exactly, on one core, kernels compiled before; every "
        "figure is a median. Other synthesizers are asked in the section of peers.",
        _synthesis,
    ),
    Section(
        "scale_targets",
        "Large fabrics: CPU time to load, solve and verify",
        "measured",
        _SCALE + "targets",
        "CPU time to load, solve and verify in one process, kernels compiled before. Symmetric: solved by "
        "orbits, kept as representatives and translations; verified on the representatives, or translate "
        "by translate. Written out: no use of symmetry. Repair: from the symmetric schedule of the fabric "
        "before the fault, and promised without verification. Partly symmetric: the same with the making "
        "of that schedule.",
        plain(
            "fabric: title | collective | method | >ranks",
            **{
                ">CPU time": lambda row: (
                    ("over " if row.get("timed_out") else "")
                    + missed("seconds", lambda one: one.get("kept") is False)(row)
                )
            },
            **columns(
                ">promised: target_seconds | >memory: peak_MB | >of the bound: share_of_bound | >height"
            ),
        ),
    ),
    Section(
        "scale_growth",
        "Growth over the ranks",
        "measured",
        _SCALE + "growth",
        "Load, solve and verify. The exponent is the slope from 64 ranks on, by least squares: 1 would be "
        "as many times as long as there are more ranks. A tree has as many edges as ranks, and there is "
        "one for each rank: written out, a schedule itself grows by 2.",
        _growth,
    ),
    Section(
        "frontier",
        "Whole frontiers of chunk schedules",
        "measured",
        "python bench/frontier.py",
        "Best trades between steps and rounds per chunk, (C, S, R); proved: no schedule is better. On one "
        "core, without the cache. SCCL's tool is asked in the section of peers.",
        _frontiers,
    ),
    Section(
        "peers",
        "Public synthesizers on the same questions, in turns on the same machine",
        "measured (rates exact, times of schedules simulated)",
        "python bench/peers.py",
        "Every contender is asked the same question in a process of its own, in turns with the others on "
        "the same machine. What it answers is turned into a schedule of ours, so that the same verifier "
        "computes its rate and the same simulator its time for 64 MiB. Two times before that: a whole "
        "process that asks once / a call in a process that has answered before; below 1× ours the other one "
        "is faster. ForestColl is compared with trees of the best rate, SCCL with whole frontiers, TACOS, "
        "which is compiled, with the schedule that takes the least time for 64 MiB.",
        _peers,
    ),
    Section(
        "loopback",
        "The process group on one machine, as multiples of gloo's speed",
        "measured on local processes",
        "python bench/loopback.py",
        "Speed as a multiple of gloo's in the same round, on local processes. Loopback has no links to use "
        "better, so that these are the costs of the runtime alone. Main threads wait for each call, or, "
        "where it says so, compute in Python until it has ended.",
        _loopback,
        medians("times_gloo", "method", ("shared memory", "sockets"), "Of gloo's speed"),
    ),
    Section(
        "ddp",
        "A step of DistributedDataParallel, as multiples of gloo's speed",
        "measured on local processes",
        "python bench/ddp.py",
        "Steps with gradients averaged by gloo and by the process group, each in turn on its own copy of one "
        "network, whose parameters are compared at the end. The time is the slowest rank's.",
        _ddp,
    ),
    Section(
        "torch_suite",
        "Torch's own tests of process groups: how many pass",
        "counted",
        "python bench/torch_suite.py",
        "The tests that ship with torch, and forms of `torch.compile`, run on forked ranks over each "
        "backend, all as those of gloo, whose place the group takes. Tests that want GPUs get CPU tensors; "
        "some fail on gloo as well.",
        pivot(
            columns("configuration"),
            ("configuration",),
            "backend",
            lambda rows: (
                f"{count(rows[0].figure('passed'))} of {count(rows[0].figure('tests'))}" if rows else DASH
            ),
        ),
        _behind,
    ),
    Section(
        "pipeline_models",
        "Models of libraries cut in 2 and in 4 stages beside serial training",
        "trained stage after stage in one process",
        _TRAINING + "models",
        "Models as their libraries give them, from small configurations: traced, cut in two and in four, and "
        "trained on padded batches in uneven microbatches beside the model itself, with the same weights.",
        _models,
    ),
    Section(
        "pipeline_memory",
        "Memory of ranks beside what their plan says",
        "measured on local processes",
        _TRAINING + "memory",
        "The same models and plans as for predicted steps: the memory behind torch's tensors at the fullest "
        "moment of three steps with AdamW, beside what the plan says.",
        _memory,
    ),
    Section(
        "pipeline_prediction",
        "Predicted / measured time of a training step, and the error",
        "measured on local processes",
        _TRAINING + "prediction",
        "Four models on two ranks with a core each: profiled by both ranks, their links measured, each plan "
        "predicted, and then trained one plan after another in the same processes. Nothing is fitted to what "
        "is predicted. A plan misses where its error is above the target by more than the repeats spread.",
        _prediction,
        _errors,
    ),
    Section(
        "pipeline_testbed",
        "A training step on emulated links",
        "measured on emulated links",
        _TRAINING + "testbed",
        "Whole steps on rate-limited links, forward to update, by layers that sleep, so that ranks do not "
        "wait for each other's cores: predicted / measured time, and the error, as in the section before. "
        "Of one plan only the allreduce of the gradients among the replicas of a stage differs, a "
        "synthesized schedule or gloo's. All plans of a topology take turns in the same processes.",
        _steps,
        _errors,
    ),
    Section(
        "pipeline_bubbles",
        "Bubbles of orders",
        "measured on local processes",
        _TRAINING + "bubbles",
        "Layers sleep as long in the forward pass as in each half of the backward pass, so that ranks do "
        "not wait for each other's cores. The bubble is the share of a step in which a rank does not "
        "sleep; what the trainer itself does counts.",
        _bubbles,
    ),
    Section(
        "pipeline_runtimes",
        "A step of the trainer beside torch's",
        "measured on local processes",
        _TRAINING + "runtimes",
        "The same layers on the same two ranks with the same microbatches, in the same processes, in "
        "turns: the trainer beside torch.distributed.pipelining, and for data parallel beside DDP over "
        "gloo. Whole steps with the update.",
        _runtimes,
    ),
    Section(
        "pipeline_planner",
        "Time to plan a pipeline",
        "measured",
        _TRAINING + "planner",
        "From profile and topology to plan, in processes of their own; the first plan of a process also "
        "loads compiled kernels. Layers are drawn at random, all different.",
        plain(
            "topology | >devices | >layers",
            **{
                ">seconds, median": _over_target("seconds", "target_s"),
                ">spread": column("spread", seconds),
            },
            **columns(">first of a process: first_seconds | >memory limit: limit_bytes"),
            **{">target": _seconds_or_none("target_s"), "plan": _planner_plan},
        ),
    ),
    Section(
        "pipeline_intra",
        "Time to plan inside a stage",
        "measured",
        _TRAINING + "intra",
        "From a module to the sharding of all its operators on the best of all meshes, layouts beside it, "
        "in a process of its own, imports left out. One thread works: CPU time is what an idle machine "
        "takes. One program is the best mesh solved once more with its prices known.",
        plain(
            "topology | >ranks: devices | >blocks: layers",
            **{">CPU time, one run": _over_target("cpu_seconds", "target_s")},
            **columns(">of that tracing: trace_seconds | >one program: program_seconds | >elapsed: seconds"),
            **{">target": column("target_s", seconds)},
            **columns("mesh"),
        ),
    ),
)
"""In the order of the page and of docs/figures.md."""
