"""Results in words for people and as one JSON object for tools: topologies, bounds, solutions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from arborcast.synth.certificate import Bound, Scope
from arborcast.synth.cli.console import Columns, Json, table, table_of
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.formats.documents import picked
from arborcast.synth.formats.schedules import said_of
from arborcast.synth.formats.sizes import format_size
from arborcast.synth.formats.words import (
    MOST_NAMED,
    assumed,
    counted,
    every_schedule,
    gigabytes,
    proof,
    share,
)
from arborcast.synth.ports import ported
from arborcast.synth.schedule import Schedule
from arborcast.synth.simulation.service import EARLIEST
from arborcast.synth.topology import PLANNED, Hop, Topology

if TYPE_CHECKING:
    from arborcast.synth.baselines.comparison import BaselineTimings
    from arborcast.synth.chunks.allreduce.points import Point
    from arborcast.synth.chunks.frontier import Frontier
    from arborcast.synth.chunks.quantized_rates import QuantizedRates
    from arborcast.synth.implicit_schedule import AnySchedule
    from arborcast.synth.routes.reachability import Components
    from arborcast.synth.selection import Choice, Selection
    from arborcast.synth.solve_options import SolveOptions
    from arborcast.topologies.machine import Machine

SHOWN_SETTINGS = (
    "chunks",
    "steps",
    "rounds",
    "epsilon",
    "iterations",
    "tolerance",
    "max_trees",
    "max_height",
    "within_height",
    "few",
    "best_trees",
    "proved",
    "rings",
    "proved_largest",
    "proved_widest",
)
"""Settings that mean something to whoever asked; all of them stand in the JSON and in the file."""

TREE_METHODS = ("trees", "mwu", "symmetric")


def solution_document(schedule: AnySchedule, seconds: float, file: Path | None) -> Json:
    """What `solve --json` reports of a schedule that took so many seconds and was written to `file`."""
    is_of_trees = schedule.method.name in TREE_METHODS
    grid = _grid_behind(schedule)
    return {
        **said_of(schedule),
        "bound": str(schedule.bound.rate),
        "optimal": schedule.is_optimal,
        "scope": schedule.bound.scope.value,
        "model": model_of(schedule.topology),
        "assumed": assumptions_document(schedule.topology),
        "form": "explicit" if isinstance(schedule, Schedule) else "implicit",
        "trees": schedule.chunk_count if is_of_trees else None,
        "height": schedule.height,
        "rounds": None if schedule.rounds is None else sum(schedule.rounds),
        "chunks": schedule.chunk_count,
        "grid": None if grid is None else grid_document(*grid),
        "seconds": seconds,
        "file": None if file is None else str(file),
    }


def at_size(schedule: AnySchedule, options: SolveOptions) -> Json:
    """What a schedule takes at a size and all at least, by links alone and priced; empty without a size."""
    size_bytes = options.size_bytes
    if size_bytes is None:
        return {}
    from arborcast.synth.selection import PricedLimit
    from arborcast.synth.simulation.simulator import simulate

    said: Json = {"size": size_bytes}
    for priced, time, least in ((False, "time_us", "least_us"), (True, "priced_us", "priced_least_us")):
        run = simulate(schedule, size_bytes, min_piece_bytes=options.min_piece_bytes, priced=priced)
        said |= {time: run.time_us, least: PricedLimit.of(schedule, priced).at(size_bytes)}
    return said


def describe_solution(schedule: AnySchedule, solution: Json) -> list[str]:
    """What `solve` says of a schedule and its `solution_document`, with `at_size` if there is a size."""
    rate, limit = schedule.rate, schedule.bound.rate
    bound = f"limit by {PLANNED}" if schedule.topology.is_planned else "bound"
    if schedule.is_optimal:
        optimal = "" if schedule.topology.is_planned else "optimal: "
        quality = f"{optimal}equal to the {bound} over {_scope(schedule.bound, schedule.topology)}"
    else:
        quality = f"{share(rate, limit)} of the {bound}, {gigabytes(limit)}"
    what = f"{solution['trees']} trees" if solution["trees"] is not None else f"{solution['chunks']} chunks"
    settings = "".join(f", {key} {value}" for key, value in schedule.method.settings if key in SHOWN_SETTINGS)
    lines = [
        f"{schedule.topology.name} {schedule.collective.kind}",
        f"  method   {schedule.method.name}, seed {schedule.method.seed}{settings}",
        f"  rate     {gigabytes(rate)}, {quality}",
        *describe_bound(schedule.bound, schedule.topology),
        f"  shape    {what}, height {solution['height']}, {solution['steps']} steps",
        *_describe_form(schedule),
        *describe_grid(*(_grid_behind(schedule) or (None, rate, rate))),
        *_describe_at_size(solution, schedule.bound, schedule.topology),
        f"  time     {solution['seconds']} s, verified",
    ]
    return lines if solution["file"] is None else [*lines, f"  written  {solution['file']}"]


def _describe_at_size(solution: Json, bound: Bound, topology: Topology) -> list[str]:
    if "size" not in solution:
        return []
    size, every = format_size(solution["size"]), every_schedule(bound)

    def told(time: str, how: str, least: str) -> str:
        limit = f"{solution[least]:.1f} us"
        limit = f"{limit} by {PLANNED}" if topology.is_planned else f"{every} takes at least {limit}"
        return f"{solution[time]:.1f} us {how}; {limit}"

    if solution["priced_us"] == solution["time_us"]:
        lines = [f"  at       {size}: {told('time_us', 'simulated', 'least_us')}"]
    else:
        lines = [
            f"  at       {size}: {told('priced_us', 'priced', 'priced_least_us')}",
            f"           {told('time_us', 'simulated on links alone', 'least_us')}",
        ]
    return [*lines, *_assumed("latency", topology)]


def _grid_behind(schedule: AnySchedule) -> tuple[QuantizedRates, Fraction, Fraction] | None:
    """The grid that a schedule counts its rounds on, and the limits of the rate without and with it."""
    if not isinstance(schedule, Schedule) or schedule.unit is None:
        return None
    from arborcast.synth import bounds
    from arborcast.synth.chunks.quantized_rates import QuantizedRates

    grid = QuantizedRates(schedule.topology, schedule.unit)
    return grid, schedule.bound.rate, bounds.bound(grid.rounded, schedule.collective).rate


def _describe_form(schedule: AnySchedule) -> list[str]:
    if isinstance(schedule, Schedule):
        return []
    kept = f"{counted(len(schedule.chunks), 'representative')}, moved by {schedule.translations.order}"
    return [f"  form     implicit: {kept} translations"]


def choices_document(choices: Sequence[Choice]) -> list[Json]:
    """Which schedule is fastest from which size on; empty unless a size was asked for."""
    return [{"from_bytes": choice.from_bytes, **said_of(choice.schedule)} for choice in choices]


def describe_choices(choices: Sequence[Choice]) -> list[str]:
    """The same in words, as a table."""
    if not choices:
        return []
    columns: Columns = {
        "  from": lambda it: f"  {format_size(it.from_bytes)}",
        "method": lambda it: it.schedule.method.name,
        "shape": lambda it: _shape(it.schedule),
        "rate": lambda it: gigabytes(it.schedule.rate),
    }
    looked_at = "fastest by simulation, or within 1 % of it, at every size"
    return ["", looked_at, *table_of(choices, columns, left=4)]


def compared_document(selection: Selection | None) -> Json:
    """Which methods were compared, by how many schedules, and which were not and why."""
    if selection is None:
        return {}
    counts = Counter(schedule.method.name for schedule in selection.schedules)
    others = {"all others": selection.enough} if selection.enough else {}
    return {"compared": dict(counts), "left_out": {**selection.left_out, **others}}


def describe_compared(compared: Json) -> list[str]:
    """The same in words."""
    if not compared:
        return []
    counts: Mapping[str, int] = compared["compared"]
    tried = ", ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items())
    by_reason: dict[str, list[str]] = {}
    for name, reason in compared["left_out"].items():
        by_reason.setdefault(reason, []).append(name)
    left_out = [f"  not tried: {', '.join(names)} ({reason})" for reason, names in by_reason.items()]
    return ["", f"candidates: {tried}", *left_out]


def _shape(schedule: AnySchedule) -> str:
    settings = dict(schedule.method.settings)
    if schedule.rounds is not None and "chunks" in settings:
        return f"({settings['chunks']}, {len(schedule.rounds)}, {sum(schedule.rounds)})"
    return f"{schedule.chunk_count} chunks, {schedule.steps} steps"


def describe_bound(found: Bound, topology: Topology) -> list[str]:
    """The certificate in words, and for which rates it holds."""
    head = "limit" if topology.is_planned else "proof"
    return [
        f"  {head}    {proof(found, topology)}",
        f"  scope    {_scope(found, topology)}",
        *_assumed("rate", topology, "" if topology.is_planned else "proved for these rates, of which "),
    ]


def describe_assumptions(topology: Topology) -> list[str]:
    """Which rates and latencies are assumed, and why; nothing where all are stated or published."""
    return [*_assumed("rate", topology), *_assumed("latency", topology)]


def assumptions_document(topology: Topology) -> list[Json]:
    """The same for `--json`: how many links have an assumed "rate" or "latency", by why."""
    found = topology.assumptions.items()
    return [{"of": what, "links": count, "why": why} for (what, why), count in found]


def _assumed(what: str, topology: Topology, holds: str = "") -> list[str]:
    head = {"rate": "rates", "latency": "waits"}[what]
    said = assumed(what, topology)
    return [f"  {head}    {holds}{said}"] if said else []


def model_of(topology: Topology) -> str | None:
    """What every bound takes for granted; None without switches and streams."""
    said = []
    if topology.holders > topology.ranks:
        said.append("switches reduce and multicast as they can")
    elif len(topology.switches) > len(topology.parallels):
        said.append("switches only forward")
    if topology.streams:
        said.append("ranks have no more messages under way than streams")
    return " and ".join(said) or None


def describe_forwarding(topology: Topology) -> list[str]:
    """What an answer that asks switches only to forward leaves out; nothing where they can do no more."""
    is_able = topology.holders > topology.ranks
    return [f"  model    {model_of(topology.forwarding)} here, whatever else they can do"] if is_able else []


def _scope(found: Bound, topology: Topology) -> str:
    """Over which schedules a bound holds."""
    model = model_of(topology)
    return found.scope.value if model is None else f"{found.scope.value} where {model}"


def is_cut_off(error: InfeasibleError) -> bool:
    """Whether there is none because some rank cannot be reached."""
    return isinstance(error.proof, Bound) and error.proof.rate == 0


def infeasible_document(
    error: InfeasibleError, topology: Topology, collective: str, parts: Components | None = None
) -> Json:
    """What `--json` says where there is none: `certificate` is the exact limit, where one proves it.

    Args:
        error: says why; its notes, what would help.
        topology: on which there is none.
        collective: of which there is none.
        parts: into which the fabric falls, where that is why.
    """
    from arborcast.synth.formats import bound_to_document

    certificate: Json | None = None
    if isinstance(error.proof, Bound):
        certificate = bound_to_document(error.proof, topology)
    elif error.proof is not None:
        from arborcast.synth.chunks.limit_documents import limit_to_document
        from arborcast.synth.chunks.problem.time_reversal import IMAGES

        certificate = limit_to_document(error.proof, ported(topology), mirrored=collective in IMAGES)
    return {
        "infeasible": True,
        "proved": error.is_proved,
        "proved_by": [prover.value for prover in error.proved_by],
        "certificate": certificate,
        "why": str(error),
        **parts_document(parts, getattr(error, "__notes__", ())),
    }


def parts_document(parts: Components | None, helps: Iterable[str]) -> Json:
    """The parts into which a fabric falls, and what would help; none where all ranks reach each other."""
    return {
        "parts": None if parts is None else [list(ranks) for ranks in parts.ranks],
        "one_way": [] if parts is None else [list(pair) for pair in parts.one_way],
        "help": list(helps),
    }


def describe_parts(parts: Components | None, helps: Iterable[str]) -> list[str]:
    """The same in words."""
    if parts is None:
        return []
    told = "; ".join(helps)
    return [f"  apart    {parts}", *([f"  help     {told}"] if told else [])]


def describe_frontier(frontier: Frontier, folder: Path | None) -> list[str]:
    """A table of the points, and what is known beyond them."""
    from arborcast.synth.chunks.step_result import explain

    columns: Columns = {
        "(C, S, R)": lambda it: f"({it.chunks}, {it.steps}, {it.rounds})",
        "steps": lambda it: it.steps,
        "R/C": lambda it: it.ratio,
        "GB/s": lambda it: f"{float(it.schedule.rate):.4g}",
        "gap": _gap_of,
        "": _how_far_proved,
        "how": lambda it: it.proof,
    }
    open_steps = ", ".join(map(str, frontier.open_steps))
    is_no_less = f"by {PLANNED} is" if frontier.topology.is_planned else "is at least"
    at_least = (
        f"  in {steps} steps R/C {is_no_less} {limit.ratio} by {explain(limit)}"
        for steps, limit in sorted(frontier.limits.items())
        if steps in frontier.open_steps
    )
    lines = [
        f"{frontier.topology.name} {frontier.collective.kind}: C chunks, S steps, R rounds",
        "",
        *table_of(frontier.points, columns, left=len(columns)),
        "",
        *at_least,
        *describe_grid(frontier.grid, *frontier.limits_of_rate),
        f"  limit    R/C {frontier.static_ratio} for any number of steps",
        *_assumed("rate", frontier.topology),
        f"  ended    {frontier.why_stopped}",
        f"  complete {'yes' if frontier.complete else 'no'}{'' if frontier.grid is None else ', of the grid'}"
        + (f"; left to prove at {open_steps} steps" if open_steps else ""),
        f"  time     {frontier.seconds} s, every schedule verified",
    ]
    return lines if folder is None else [*lines, f"  written  {folder}"]


def _gap_of(point: Point) -> str:
    """By how much its R/C is more than the proved limit, which no schedule of so many steps falls below."""
    if point.gap is None:
        return "?"
    return "0" if not point.gap else f"{float(point.gap):.2%}"


def _how_far_proved(point: Point) -> str:
    from arborcast.synth.chunks.allreduce.points import ON_GRID

    _, on_grid, _ = point.scope.partition(f" {ON_GRID}")
    if point.is_proved:
        return f"{'least' if point.schedule.topology.is_planned else 'proved'}{on_grid}"
    return "open"


def grid_document(grid: QuantizedRates, real: Fraction, rounded: Fraction) -> Json:
    """What rates were rounded down to and what that costs: the limit of the real fabric and what is left."""
    return {
        "unit": str(grid.unit),
        "rates": {str(rate): str(kept) for rate, kept in grid.rates.items()},
        "bound": str(rounded),
        "true_bound": str(real),
    }


def describe_grid(grid: QuantizedRates | None, real: Fraction, rounded: Fraction) -> list[str]:
    """The same in words."""
    if grid is None:
        return []
    costs = f"then no more than {gigabytes(rounded)}, not {gigabytes(real)}"
    costs = costs if rounded < real else "the limit stays as it is"
    return [f"  grid     {grid}; {costs}; --rate-tolerance 0 takes them as they are"]


def describe_comparison(comparison: BaselineTimings, schedule: AnySchedule) -> list[str]:
    """Two tables over the sizes, a column per method: times and what none is below, then bus bandwidths."""
    from arborcast.synth.baselines.nccl_model import NOT_RUN

    methods = list(comparison.by_method)
    sizes = [timing.bytes for timing in comparison.by_method[methods[0]]]
    times = [
        (
            format_size(size),
            *(f"{comparison.by_method[method][row].time_us:.1f}" for method in methods),
            *([f"{comparison.least_us[size]:.1f}"] if comparison.least_us else []),
        )
        for row, size in enumerate(sizes)
    ]
    busbws = [
        (format_size(size), *(f"{comparison.by_method[method][row].busbw:.2f}" for method in methods))
        for row, size in enumerate(sizes)
    ]
    asked = [] if comparison.service == EARLIEST else [f"order of service: {comparison.service}", ""]
    least = f"by {PLANNED}" if schedule.topology.is_planned else "no less than"
    limit = [least] if comparison.least_us else []
    of_trees = limit and schedule.bound.scope is Scope.TREES
    scope = [f"{least}: of {every_schedule(schedule.bound)}", ""] if of_trees else []
    tables = [
        *table(("time (us)", *methods, *limit), times),
        "",
        *table(("busbw (GB/s)", *methods), busbws),
        "",
    ]
    note = [f"nccl: {NOT_RUN}", ""] if any(method.startswith("nccl-") for method in methods) else []
    return [*asked, *tables, *scope, *note]


def describe_topology(topology: Topology) -> list[str]:
    """The matrix of bandwidths where it fits a screen, otherwise how many vertices have which bandwidth."""
    headline = (
        f"{topology.name}: {counted(topology.ranks, 'rank')}, "
        f"{counted(len(topology.switches) - len(topology.parallels), 'switch')}, "
        f"{counted(len(topology.cables), 'directed link')}"
    )
    small = topology.size - len(topology.parallels) <= 20
    lines = [headline, *(_matrix(topology) if small else _summary(topology)), *_streams(topology)]
    return [*lines, *describe_assumptions(topology)]


def _streams(topology: Topology) -> list[str]:
    """How many messages ranks send and receive at once; nothing where none has a limit."""
    told = [
        f"{counted(ranks, 'rank')} of {limit or 'any number'}"
        for limit, ranks in sorted(Counter(topology.streams).items(), key=lambda each: each[0] or 0)
    ]
    return [f"  streams  {', '.join(told)}: messages sent, and received, at once"] if told else []


def describe_abilities(topology: Topology) -> list[str]:
    """What switches can do beside forwarding, those that are alike in one line; nothing where they cannot."""
    alike: dict[str, list[str]] = {}
    for switch in topology.switches[: topology.holders - topology.ranks]:
        words = [
            ("reduces", switch.reduces),
            ("multicasts", switch.multicasts),
            ("turns", switch.turns),
            ("loops back", switch.loopback),
            (f"adds {gigabytes(switch.adder or Fraction(0))}", switch.adder is not None),
            (counted(switch.trees or 0, "tree"), switch.trees is not None),
            (f"takes {float(switch.latency_us):g} us", switch.latency_us > 0),
            ("stores first", switch.stores),
        ]
        alike.setdefault(", ".join(word for word, is_so in words if is_so), []).append(switch.name)
    lines = []
    for what, names in alike.items():
        named = ", ".join(names[:4]) + (f", ... of {len(names)}" if len(names) > 4 else "")
        lines.append(f"  able     {named}: {what}")
    return lines


def machine_document(machine: Machine) -> Json:
    """What its ranks are and where NICs hang, beside the graph: for `show --json`."""
    label = machine.topology.label
    return {
        **({"gpu": machine.gpu or list(machine.gpus)} if any(machine.gpus) else {}),
        **picked(machine, "devices", "hosts", "notes"),
        "nics": [
            {**picked(nic, "name", "rate"), "near": [label(vertex) for vertex in nic.near]}
            for nic in machine.nics
        ],
    }


def describe_machine(machine: Machine) -> list[str]:
    """The same in words: a table of what the file calls the ranks, and one line on NICs."""
    several = len(set(machine.hosts)) > 1
    rows = [
        (f"  {rank}", device, machine.gpus[rank] or "", f"host {machine.hosts[rank]}" if several else "")
        for rank, device in enumerate(machine.devices[:MOST_NAMED])
        if device
    ]
    lines = ["", *table(("  rank", "device", "gpu", ""), rows, left=4)] if rows else []
    if rows and len(machine.devices) > MOST_NAMED:
        lines.append(f"  ... of {len(machine.devices)}; --json has all")
    if machine.nics:
        speeds = sorted(Counter(nic.rate or Fraction(0) for nic in machine.nics).items(), reverse=True)
        named = ", ".join(
            f"{count} of {gigabytes(rate) if rate else 'unknown rate'}" for rate, count in speeds
        )
        lines += ["", f"  nics     {named}"]
    return lines


def _matrix(topology: Topology) -> list[str]:
    shown = [vertex for vertex in range(topology.size) if vertex not in topology.parallels]
    rates: dict[Hop, list[str]] = {}
    for link in topology.cables:
        rates.setdefault((link.src, link.dst), []).append(str(link.bandwidth))
    labels = [str(topology.label(vertex)) for vertex in shown]
    rows = [
        (label, *("+".join(rates.get((src, dst), ".")) for dst in shown))
        for label, src in zip(labels, shown, strict=True)
    ]
    return ["", "GB/s from row to column", *table(("", *labels), rows)]


def _summary(topology: Topology) -> list[str]:
    out = [Fraction(0)] * topology.size
    into = [Fraction(0)] * topology.size
    for link in topology.cables:
        out[link.src] += link.bandwidth
        into[link.dst] += link.bandwidth
    kinds = Counter(
        (topology.is_switch(vertex), out[vertex], into[vertex])
        for vertex in range(topology.size)
        if vertex not in topology.parallels
    )
    lines = []
    for (is_switch, sent, received), count in kinds.items():
        vertices = counted(count, "switch") if is_switch else counted(count, "rank")
        lines.append(f"  {vertices} with {gigabytes(sent)} out, {gigabytes(received)} in")
    return lines
