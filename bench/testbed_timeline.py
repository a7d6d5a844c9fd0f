"""Where a run on emulated links loses its time: what each rank sent and received when, which links waited.

One contender runs a few times with its channels recorded; the run of the median time is drawn, a row per
link, with what the limit would need beside it.

    python bench/testbed_timeline.py full:4 allreduce --method trees --size 8MiB --mbit 200 -o timeline.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arborcast.bench.contest.cases import case_of
from arborcast.bench.contest.contenders import GLOO, KNOWN, TREES, line_up
from arborcast.bench.contest.ranks import Order, pieces_of
from arborcast.bench.contest.recording import Trace, trace_order
from arborcast.bench.contest.rows import Limits
from arborcast.bench.contest.timeline import Timeline
from arborcast.bench.contest.wires import Load, uses
from arborcast.bench.emulation import network
from arborcast.bench.emulation.delivery import check_delivery, delivered
from arborcast.bench.emulation.machine import check_machine
from arborcast.bench.emulation.plan import EmulationPlan, at_rates, plan_emulation
from arborcast.bench.emulation.processes import run_inside
from arborcast.bench.harness.script import command_line, one_line
from arborcast.synth.collective import Collective
from arborcast.synth.errors import InputError
from arborcast.synth.formats.atomic import write_atomically
from arborcast.synth.formats.sizes import format_size, parse_size
from arborcast.synth.topology import Topology


def record(
    topology: Topology,
    kind: str,
    size_bytes: int,
    *,
    slowest_mbit: int,
    method: str = TREES,
    root: int = 0,
    runs: int = 5,
    timeout_s: float = 60,
) -> Timeline:
    """Run a contender on the emulation of a topology and keep what its channels saw.

    Args:
        topology: the fabric.
        kind: of the collective.
        size_bytes: of the whole buffer.
        slowest_mbit: Mbit/s of the slowest link.
        method: one with schedules; of chunk schedules the one of the best rate.
        root: of a broadcast.
        runs: of which the one of the median time is kept.
        timeout_s: how long a rank may make no progress.

    Raises:
        InputError: the method has no schedule here, or what `bench.testbed.measure` raises it for.
        EmulationError: as there.
    """
    check_machine()
    topology = at_rates(topology, slowest_mbit)
    collective = Collective.on(topology, kind, root=root)
    line = line_up(topology, collective, [method])
    if not line.contenders:
        raise InputError(line.unavailable[method])
    plan = plan_emulation(topology, slowest_mbit)
    order = Order(collective, size_bytes, line.contenders[-1:], runs, timeout_s)
    with network.emulate(plan) as emulation:
        rates = delivered(emulation)
        check_delivery(plan, rates, lambda text: print(text, file=sys.stderr))
        seen: list[list[Trace]] = run_inside(emulation, trace_order, order)
    ends = [max(rank[run].seconds for rank in seen) for run in range(runs)]
    chosen = sorted(range(runs), key=ends.__getitem__)[runs // 2]
    traces = tuple(rank[chosen] for rank in seen)
    return Timeline(
        plan,
        order,
        Limits.of(order, plan, rates["alone"]),
        ends[chosen],
        tuple(ends),
        traces,
        uses(_loads(plan, traces), rates["alone"], ends[chosen]),
        rates["alone"],
    )


def _loads(plan: EmulationPlan, traces: Sequence[Trace]) -> list[Load]:
    return [
        Load(part.at_s, plan.path(part.src, part.dst), part.size_bytes, part.chunk)
        for trace in traces
        for part in trace.sent
    ]


def as_document(timeline: Timeline) -> dict[str, Any]:
    """What a program may want of it."""
    label, order = timeline.plan.topology.label, timeline.order
    schedule = timeline.contender.schedule
    assert schedule is not None
    return {
        "topology": timeline.plan.topology.name,
        "collective": order.collective.kind.value,
        "method": timeline.contender.name,
        "bytes": order.size_bytes,
        "pieces": pieces_of(schedule, order),
        "steps": schedule.steps,
        "run_s": timeline.run_s,
        "runs_s": timeline.runs_s,
        "optimum_s": timeline.optimum_s,
        "share_of_optimum": timeline.optimum_s / timeline.run_s,
        "cpu_s": [trace.cpu_seconds for trace in timeline.traces],
        "links": [
            {"from": label(hop[0]), "to": label(hop[1]), "mbit": timeline.rates[hop] / 1e6, **asdict(use)}
            for hop, use in sorted(timeline.uses.items())
        ],
        "ranks": [
            {
                "rank": rank,
                "seconds": trace.seconds,
                "sent": _listed(trace.sent),
                "received": _listed(trace.received),
            }
            for rank, trace in enumerate(timeline.traces)
        ],
    }


def _listed(parts: Sequence[Any]) -> list[dict[str, Any]]:
    return [asdict(part) for part in parts]


def format_links(timeline: Timeline) -> str:
    """A line per link: where its time went, in ms."""
    label, run = timeline.plan.topology.label, timeline.run_s
    best = timeline.optimum_s
    lines = [
        f"{timeline.plan.topology.name}, {timeline.order.collective.kind} of "
        f"{format_size(timeline.order.size_bytes)} by {timeline.contender.name}: {run * 1e3:.1f} ms, "
        f"{best / run:.3f} of the limit, which is {best * 1e3:.1f} ms",
        f"{'link':>12}{'busy':>9}{'start':>8}{'gaps':>8}{'end':>8}   ms",
    ]
    for (src, dst), use in sorted(timeline.uses.items()):
        figures = "".join(f"{each * 1e3:8.1f}" for each in (use.start_s, use.gaps_s, use.end_s))
        lines.append(f"{f'{label(src)} -> {label(dst)}':>12}{100 * use.busy_s / run:8.1f}%{figures}")
    for rank, trace in enumerate(timeline.traces):
        lines.append(
            f"rank {rank}: done after {trace.seconds * 1e3:.1f} ms, computed for "
            f"{trace.cpu_seconds * 1e3:.1f} ms, {sum(part.is_last for part in trace.sent)} messages out, "
            f"{sum(part.is_last for part in trace.received)} in"
        )
    return "\n".join(lines)


@one_line("testbed_timeline")
def main() -> None:
    """Record what the command line asks for, print where time went, draw it."""
    parser = command_line(__doc__)
    parser.add_argument("spec", help="a topology of the testbed, or any other with --mbit")
    parser.add_argument("collective")
    parser.add_argument("--ranks", metavar="R,R,...", help="the fragment of these ranks")
    parser.add_argument("--mbit", type=int, help="Mbit/s of the slowest link")
    parser.add_argument("--method", default=TREES, choices=[name for name in KNOWN if name != GLOO])
    parser.add_argument("--size", type=parse_size, default=8 << 20, help="of the whole buffer")
    parser.add_argument("--runs", type=int, default=5, help="of which the one of the median time is shown")
    parser.add_argument(
        "-o", "--output", type=Path, help="picture, .png or .svg; beside it, .json has the figures"
    )
    arguments = parser.parse_args()
    case = case_of(arguments.spec, arguments.ranks, arguments.mbit)
    timeline = record(
        case.topology,
        arguments.collective,
        arguments.size,
        slowest_mbit=case.slowest_mbit,
        method=arguments.method,
        runs=arguments.runs,
    )
    print(format_links(timeline))
    if arguments.output is not None:
        from arborcast.bench.contest.timeline_picture import draw

        draw(timeline, arguments.output)
        text = json.dumps(as_document(timeline))
        write_atomically(arguments.output.with_suffix(".json"), text + "\n")


if __name__ == "__main__":
    main()
