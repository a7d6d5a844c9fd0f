"""Which sizes does our selection win, on which machine? Size sweeps by simulation, beside NCCL's models.

Nothing is timed here: schedules run in our simulator, NCCL's ring and tree are its planning model (without
NVLS, and named "model" in every row), both on links of NCCL's own rates, so that the figures are the same on
every machine. Each row has two times. `time_us` counts bandwidth and latency of links only, which flatters
whatever is simulated beside NCCL's model, most of all at small sizes. `time_us_with_nccl_overhead` charges
our schedules what NCCL charges itself (`bench/clusters/overhead.py`); speed-ups are computed from that one.

"selection" is the product's choice by `time_us`; "selection-with-overhead" is the choice that one makes who
knows the overhead. Both choose among what `synth solve` compares: above `LARGEST_EXPLICIT` ranks the named
baselines are no part of that. Where `speed_up` is below 1, the best other method is faster: those rows stay,
and the summary counts them. `least_us` is what any schedule takes at least (`synth.bounds.time_limits`). Runs
whose latency and rate alone say that they are nobody's best at a size are left out: no choice and no speed-up
depends on them. What else could not be simulated is listed under `skipped` with its reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arborcast.bench.clusters.candidates import Candidate, candidates
from arborcast.bench.clusters.machines import QUICK, SPECS, Planning, load, network_switches, planning
from arborcast.bench.clusters.overhead import Charge, Overhead, wire_time_us
from arborcast.bench.clusters.words import (
    SELECTION,
    WITH_OVERHEAD,
    Sweep,
    format_summary,
    format_table,
    results_document,
)
from arborcast.bench.harness.document import timed_row
from arborcast.bench.harness.processes import ChildError, answer
from arborcast.bench.harness.script import KEPT, command_line, keep, one_line
from arborcast.synth.api import LARGEST_EXPLICIT
from arborcast.synth.baselines import BASELINES
from arborcast.synth.baselines.nccl_model import TREE, ModelTime, nccl_times
from arborcast.synth.bounds import bound
from arborcast.synth.bounds.time_limits import TimeLimit, time_limit
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import CollectiveError
from arborcast.synth.simulation.simulator import sweep as simulate_sizes
from arborcast.synth.simulation.timing import Timing
from arborcast.synth.topology import Topology

RESULTS = KEPT / "sweeps.json"
SIZES = tuple(1 << power for power in range(10, 31, 2))
"""1 KiB to 1 GiB, every power of 4."""

DEADLINE_S = 600.0
"""Of one machine and collective; a run that has begun is finished, and killed at `KILL_AT` times it."""

KILL_AT = 2.0
BROADCAST_UP_TO = 16
"""Ranks up to which broadcasts are swept too."""

MANY_HOPS, VERY_MANY_HOPS = 700_000, 1_500_000
"""Hops of a schedule from which every second, and every fifth size is simulated: a run takes seconds."""

SLACK = 1e-9
"""Part by which a least time that is added up in floating point may be above the simulated one."""


@dataclass(frozen=True)
class _Run:
    """One simulated size of one candidate."""

    name: str
    timing: Timing
    charge: Charge | None


@dataclass
class _Found:
    """What a sweep has gathered so far."""

    topology: Topology
    collective: Collective
    limit: Bound
    planning: Planning
    least: TimeLimit
    runs: dict[tuple[str, int], _Run] = field(default_factory=dict)
    models: dict[tuple[str, int], ModelTime] = field(default_factory=dict)
    skipped: list[dict[str, Any]] = field(default_factory=list)

    def skip(self, method: str, reason: str, sizes: Sequence[int] | None = None) -> None:
        self.skipped.append(
            {
                "topology": self.topology.name,
                "collective": str(self.collective.kind),
                "method": method,
                "sizes": None if sizes is None else list(sizes),
                "reason": reason,
            }
        )


def sweep(
    topology: Topology, collective: Collective, sizes: Sequence[int], *, deadline_s: float | None
) -> Sweep:
    """Our selection, the baselines and NCCL's models over message sizes.

    Args:
        topology: the fabric; `bench.clusters.machines.load` gives machines their planning rates.
        collective: among all ranks, one that is done along trees.
        sizes: of the whole buffer, in bytes, ascending.
        deadline_s: after which nothing more is begun and what is left is listed as skipped; None for no
            limit.

    Raises:
        CollectiveError: a collective that is not done along trees.
    """
    deadline = Deadline.after(deadline_s)
    limit = bound(topology, collective)
    least = time_limit(topology, collective, limit)
    found = _Found(topology, collective, limit, planning(topology, collective), least)
    _add_models(found, sizes)
    incomplete: set[int] = set()
    for candidate in candidates(topology, collective, limit, deadline):
        incomplete |= _simulate(found, candidate, sizes, deadline)
    if incomplete:
        missing = "of some candidate there is no figure at these sizes"
        found.skip(SELECTION, missing, sorted(incomplete))
        found.skip(WITH_OVERHEAD, missing, sorted(incomplete))
    complete = [size for size in sizes if size not in incomplete]
    return Sweep(list(_rows(found, sizes, complete)), found.skipped)


def _add_models(found: _Found, sizes: Sequence[int]) -> None:
    plan = found.planning.plan
    if plan is None:
        found.skip("nccl-ring-model", found.planning.why_not or "")
        return
    try:
        times = nccl_times(found.topology, found.collective, sizes, plan=plan)
    except CollectiveError as error:
        found.skip("nccl-ring-model", str(error))
        return
    for row in times:
        if row.method != TREE or found.planning.why_no_tree is None:
            found.models[row.method, row.bytes] = row
    if found.collective.kind is Kind.ALLREDUCE and found.planning.why_no_tree is not None:
        found.skip(TREE, found.planning.why_no_tree)


def _simulate(found: _Found, candidate: Candidate, sizes: Sequence[int], deadline: Deadline) -> set[int]:
    """Simulate one candidate at all sizes; returns those at which it should have run and did not."""
    if candidate.schedule is None:
        found.skip(candidate.name, candidate.why_not or "")
        return set()
    hops = sum(len(transfer.via) + 1 for transfer in candidate.schedule.transfers)
    every = 5 if hops > VERY_MANY_HOPS else 2 if hops > MANY_HOPS else 1
    left_out = [size for index, size in enumerate(sizes) if index % every]
    if left_out:
        found.skip(candidate.name, f"not simulated: a run of {hops} hops takes seconds", left_out)
    plan = found.planning.plan
    network = network_switches(found.topology)
    overhead = None if plan is None else Overhead(candidate.schedule, plan, network)
    wire_us = wire_time_us(candidate.schedule)
    late = []
    for size in sizes[::every]:
        least_us = max(wire_us, size / (1000 * float(candidate.schedule.rate))) * (1 - SLACK)
        if _is_beaten(found, candidate.name, size, least_us, overhead):
            continue
        if deadline.has_passed:
            late.append(size)
            continue
        timing = simulate_sizes(candidate.schedule, [size])[0]
        charge = None if overhead is None else overhead.charge(timing.time_us)
        found.runs[candidate.name, size] = _Run(candidate.name, timing, charge)
    if late:
        found.skip(candidate.name, f"the deadline of {deadline.allowed_s:g} s had passed", late)
    return {*left_out, *late}


def _is_ours(found: _Found, name: str) -> bool:
    """Whether `synth solve` compares it on so many ranks."""
    return name not in BASELINES or found.topology.ranks <= LARGEST_EXPLICIT


def _is_beaten(found: _Found, name: str, size: int, least_us: float, overhead: Overhead | None) -> bool:
    """Whether something else of each group that it belongs to is faster than it can be, on both clocks."""
    runs = [run for (_, its_size), run in found.runs.items() if its_size == size]
    groups = [[run for run in runs if _is_ours(found, run.name)]] if _is_ours(found, name) else []
    if name in BASELINES:
        groups.append([run for run in runs if run.name in BASELINES])
    charged_us = None if overhead is None else overhead.charge(least_us).time_us
    for group in groups:
        if not any(run.timing.time_us < least_us for run in group):
            return False
        if charged_us is None:
            continue
        if not any(run.charge is not None and run.charge.time_us < charged_us for run in group):
            return False
    return True


def _rows(found: _Found, sizes: Sequence[int], complete: Sequence[int]) -> Iterable[dict[str, Any]]:
    names = list(dict.fromkeys(name for name, _ in found.runs if _is_ours(found, name)))
    for method in (SELECTION, WITH_OVERHEAD):
        if method == WITH_OVERHEAD and found.planning.plan is None:
            continue
        for size in complete:
            runs = [found.runs[name, size] for name in names if (name, size) in found.runs]
            if runs:
                best = min(runs, key=lambda run: _cost(run, method))
                yield _row(found, method, best, served_by=best.name, **_speed_ups(found, best))
    for name in BASELINES:
        yield from (_row(found, name, found.runs[name, size]) for size in sizes if (name, size) in found.runs)
    for model in found.models.values():
        yield _model_row(found, model)


def _cost(run: _Run, method: str) -> float:
    return run.timing.time_us if method == SELECTION or run.charge is None else run.charge.time_us


def _speed_ups(found: _Found, ours: _Run) -> dict[str, float | None]:
    size = ours.timing.bytes
    models = [model.time_us for (_, its_size), model in found.models.items() if its_size == size]
    others = [found.runs[name, size] for name in BASELINES if (name, size) in found.runs]
    charged = [run.charge.time_us for run in others if run.charge is not None]
    total_us = None if ours.charge is None else ours.charge.time_us
    return {
        "speed_up": _ratio(charged + models, total_us),
        "speed_up_over_nccl": _ratio(models, total_us),
        "speed_up_over_nccl_links_only": _ratio(models, ours.timing.time_us),
        "speed_up_over_baselines_links_only": _ratio(
            [run.timing.time_us for run in others], ours.timing.time_us
        ),
    }


def _ratio(others_us: Sequence[float], ours_us: float | None) -> float | None:
    return min(others_us) / ours_us if others_us and ours_us else None


def _row(found: _Found, method: str, run: _Run, **more: Any) -> dict[str, Any]:
    charge = run.charge
    return _timed(found, method, run.timing.bytes, run.timing.time_us) | {
        "pieces": run.timing.pieces,
        "time_us_with_nccl_overhead": None if charge is None else charge.time_us,
        "protocol": None if charge is None else str(charge.protocol),
        "least_us": float(found.least.at(run.timing.bytes)),
        **more,
    }


def _model_row(found: _Found, model: ModelTime) -> dict[str, Any]:
    return _timed(found, model.method, model.bytes, model.time_us) | {
        "time_us_with_nccl_overhead": model.time_us,
        "protocol": str(model.protocol),
        "model": f"model, without NVLS; {model.plan.source}",
    }


def _timed(found: _Found, method: str, size: int, time_us: float) -> dict[str, Any]:
    return timed_row(
        topology=found.topology.name,
        ranks=len(found.collective.ranks),
        collective=found.collective.kind,
        root=found.collective.root,
        method=method,
        size_bytes=size,
        times_us=[time_us],
        optimum_us=size / (1000 * float(found.limit.rate)),
    )


# ----------------------------------------------------------------------------------- the command


@one_line("sweeps")
def main() -> None:
    """Sweep what the command line asks for, print the tables, write the results."""
    arguments = _arguments()
    if arguments.child:
        print(json.dumps(_child(*arguments.child, deadline_s=arguments.deadline)))
        return
    specs = arguments.only or (QUICK if arguments.quick else SPECS)
    sweeps: list[Sweep] = []
    for spec in specs:
        for kind in arguments.collectives or _kinds(spec):
            start = time.perf_counter()
            sweeps.append(in_own_process(spec, kind, arguments.deadline))
            print(f"{spec} {kind}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
            print(format_table(sweeps[-1]), end="\n\n", flush=True)
    found = results_document(sweeps)
    print("\n".join(format_summary(found["summary"])))
    is_part = arguments.quick or bool(arguments.only or arguments.collectives)
    keep(arguments.json, found, is_part=is_part)


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, RESULTS)
    parser.add_argument("--quick", action="store_true", help="one small machine of each family")
    parser.add_argument("--only", nargs="+", metavar="SPEC", help="these machines instead of the full set")
    parser.add_argument("--collectives", nargs="+", type=Kind, metavar="KIND", help="instead of the usual")
    parser.add_argument(
        "--deadline", type=float, default=DEADLINE_S, help="seconds for each machine and collective"
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def _kinds(spec: str) -> tuple[Kind, ...]:
    small = load(spec).ranks <= BROADCAST_UP_TO
    return (Kind.ALLREDUCE, Kind.ALLGATHER, *((Kind.BROADCAST,) if small else ()))


def _child(spec: str, kind: str, *, deadline_s: float) -> dict[str, Any]:
    topology = load(spec)
    swept = sweep(topology, Collective.on(topology, kind), SIZES, deadline_s=deadline_s)
    return {"rows": swept.rows, "skipped": swept.skipped}


def in_own_process(spec: str, kind: Kind, deadline_s: float) -> Sweep:
    """One machine and collective in a process of its own: what becomes of it costs one line, not the run."""
    child = ("--child", spec, str(kind), "--deadline", str(deadline_s))
    try:
        found = answer([str(Path(__file__).resolve()), *child], KILL_AT * deadline_s)
    except ChildError as error:
        return _nothing(spec, kind, str(error).splitlines()[0].partition(": ")[2])
    if "timed_out" in found:
        return _nothing(spec, kind, f"killed after {KILL_AT * deadline_s:g} s")
    return Sweep(found["rows"], found["skipped"])


def _nothing(spec: str, kind: Kind, reason: str) -> Sweep:
    entry = {"topology": spec, "collective": str(kind), "method": "all", "sizes": None, "reason": reason}
    return Sweep([], [entry])


if __name__ == "__main__":
    main()
