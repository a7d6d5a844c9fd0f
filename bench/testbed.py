"""How close to the limit, on links that are real? And how much faster than gloo and the ring.

Each topology becomes network namespaces with a rate-limited pair of devices for every link, and each rank a
process in one of them. Unmodified gloo and the engine with the schedules of every method take turns on it, in
rounds; every element of every result is checked. Needs root and iproute2. Results go to
`bench/results/testbed.json`.

    python bench/testbed.py --quick
    python bench/testbed.py --only "dgx1[0,1,2,3,4,5]" --collectives allreduce --sizes 8MiB
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arborcast.bench.contest.cases import (
    CASES,
    KINDS,
    MIB,
    SIZES,
    Case,
    case_of,
    targets_of,
)
from arborcast.bench.contest.contenders import GLOO, KNOWN, METHODS, RING, RIVALS, line_up
from arborcast.bench.contest.ranks import Order, run_order
from arborcast.bench.contest.rows import Limits, links_of, rows_of
from arborcast.bench.emulation import network
from arborcast.bench.emulation.delivery import check_delivery, delivered
from arborcast.bench.emulation.machine import check_machine, real_time
from arborcast.bench.emulation.plan import EmulationPlan, at_rates, plan_emulation
from arborcast.bench.emulation.processes import run_inside
from arborcast.bench.harness.document import RUNTIME
from arborcast.bench.harness.script import KEPT, command_line, keep, one_line
from arborcast.bench.page.console import print_results
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats.results import TIME, Measure, Row, document
from arborcast.synth.formats.sizes import format_size, parse_size
from arborcast.synth.topology import Hop, Topology

RESULTS = KEPT / "testbed.json"
LEAST_RUNS = 5
"""Of results that are kept: medians of fewer runs say little."""

SLOW_BYTES, FEWER_RUNS = 32 * MIB, 3
"""From which size on how many runs are enough: each takes seconds there, and is the like of the next."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """What was measured on one or more topologies.

    Attributes:
        rows: of the results file.
        links: by topology, what each link was set to and what it delivered.
        unavailable: the methods without a schedule, why, and whether that rules out that there is one.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    links: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    unavailable: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Result) -> None:
        """Put another topology's behind these."""
        self.rows.extend(other.rows)
        self.links.update(other.links)
        self.unavailable.extend(other.unavailable)


def measure(
    topology: Topology,
    kinds: Iterable[Kind | str],
    sizes: Sequence[int],
    *,
    slowest_mbit: int,
    methods: Sequence[str] | None = None,
    runs: int = LEAST_RUNS,
    root: int = 0,
    say: Say = print,
    timeout_s: float = 120,
) -> Result:
    """Measure collectives on an emulation of a topology.

    Args:
        topology: up to 64 ranks and switches.
        kinds: of `KINDS`.
        sizes: bytes of the whole buffer; every contender runs at each of them.
        slowest_mbit: Mbit/s of the slowest link; the others are in proportion.
        methods: of `bench.contest.contenders.KNOWN`; `METHODS` where None.
        runs: rounds after the first, which warms up and is not counted; at most `FEWER_RUNS` of them from
            `SLOW_BYTES` on.
        root: of a broadcast.
        say: told in a line what happens, and what warns.
        timeout_s: how long a rank may make no progress.

    Raises:
        InputError: an unknown collective or method, a size or rate that is not positive, not root, no
            iproute2, or a kernel without what is needed.
        EmulationError: a link does not deliver its rate, a rank failed, or a result is wrong.
    """
    check_machine()
    with real_time() as is_allowed:
        if not is_allowed:
            say("warning: no real-time priority here: what else the machine does will slow the ranks down")
    wanted = [_collective(topology, kind, root) for kind in kinds]
    if slowest_mbit <= 0:
        raise InputError(f"rate {slowest_mbit}: must be a positive number of Mbit/s")
    if runs < 1 or min(sizes, default=0) < 1:
        raise InputError(f"runs and sizes must be positive, got {runs} and {list(sizes)}")
    topology = at_rates(topology, slowest_mbit)
    plan = plan_emulation(topology, slowest_mbit)
    result = Result()
    lines = {}
    for collective in wanted:
        lines[collective] = line_up(topology, collective, methods or METHODS)
        result.unavailable.extend(
            {
                "topology": topology.name,
                "collective": collective.kind.value,
                "method": method,
                "why": why,
                "ruled_out": method not in lines[collective].unknown,
            }
            for method, why in lines[collective].unavailable.items()
        )
    with network.emulate(plan) as emulation:
        rates = delivered(emulation)
        check_delivery(plan, rates, say)
        result.links[topology.name] = links_of(plan, rates)
        for collective, line in lines.items():
            for size in sizes:
                contenders = tuple(each.at(size) for each in line.contenders)
                rounds = min(runs, FEWER_RUNS) if size >= SLOW_BYTES else runs
                order = Order(collective, size, contenders, rounds, timeout_s)
                found = _rows(emulation, order, rates["alone"])
                _report(found, order, plan, say)
                result.rows.extend(found)
    return result


def _collective(topology: Topology, kind: Kind | str, root: int) -> Collective:
    collective = Collective.on(topology, kind, root=root)
    if collective.kind not in KINDS:
        raise InputError(f"collective {kind}: the testbed measures {', '.join(KINDS)}")
    return collective


def _rows(emulation: network.Emulation, order: Order, alone: Mapping[Hop, float]) -> list[dict[str, Any]]:
    plan = emulation.plan
    limits = Limits.of(order, plan, alone)
    slowest = 4 * plan.topology.ranks * limits.nominal_us * order.size_bytes / 1e6  # of any contender, once
    whole_s = 60 + 4 * (1 + order.runs) * len(order.contenders) * (0.1 + slowest)
    seen = run_inside(emulation, run_order, order, timeout_s=whole_s)
    return rows_of(order, plan, limits, seen)


def _report(rows: Sequence[Row], order: Order, plan: EmulationPlan, say: Say) -> None:
    what = f"{plan.topology.name}, {order.collective.kind} of {format_size(order.size_bytes)}"
    best = min(rows, key=lambda row: row["time_us"])
    say(f"{what}: {best['method']} is the fastest, {best['time_us'] / 1e3:.1f} ms")
    limited = [row["method"] for row in rows if row["cpu_limited"]]
    if limited:
        say(f"warning: {what}: the processors, not the links, may be the limit of {', '.join(limited)}")


# --------------------------------------------------------------------------------------- the command


@one_line("testbed")
def main() -> None:
    """Measure what the command line asks for, print the table, write the results."""
    arguments = _arguments()
    check_machine()
    result = Result()
    for case in arguments.cases:
        result.add(_measure_case(case, arguments))
    found = results_document(result)
    print_results(found, "spread", "cpu_limited", section="testbed")
    keep(arguments.json, found, is_part=arguments.quick or arguments.only is not None)


def _measure_case(case: Case, arguments: argparse.Namespace) -> Result:
    return measure(
        case.topology,
        arguments.collectives,
        arguments.sizes or SIZES,
        slowest_mbit=arguments.mbit or case.slowest_mbit,
        methods=arguments.methods,
        runs=arguments.runs,
        root=arguments.root,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )


def results_document(result: Result) -> dict[str, Any]:
    """The results file."""
    return document(
        "How close to the limit are schedules on real links, and how much faster than gloo and the ring?",
        result.rows,
        keys=("topology", "collective", "method", "bytes"),
        measures={
            **TIME,
            "share_of_optimum": Measure("more", follows="time_us"),
            "share_of_nominal": Measure("more", follows="time_us"),
            "speed_up_over_gloo": Measure("more", follows="time_us"),
            "speed_up_over_ring": Measure("more", follows="time_us"),
        },
        units=UNITS,
        packages=("arborcast", "torch", "numpy"),
        code=RUNTIME,
        emulation=_emulation(),
        links=result.links,
        targets=targets_of(result.rows),
        unavailable=result.unavailable,
        rivals=list(RIVALS),
    )


UNITS: Mapping[str, str] = {
    "bytes": "asked for; the buffer of an allgather is rounded up to whole elements of every rank's block",
    "time_us": "from the instant at which all ranks begin until the last one is done; median over the rounds",
    "spread": "largest minus smallest, us",
    "share_of_optimum": "of the proven limit at the rates that each link delivered alone before the runs, "
    "less what links that have paused may carry at once (burst_share)",
    "share_of_nominal": "the same at the rates that the links were set to, headers not deducted",
    "speed_up_over_gloo": "gloo's time over this one's in the same round; median over the rounds",
    "speed_up_over_ring": "the same over the best single ring",
    "burst_share": "part of the proven limit that bursts after a pause may have carried, which the shares "
    "of the optimum do not count; the speed-ups over gloo and the ring do",
    "rate_of_schedule": "what the schedule itself can reach of the limit, were links always busy",
    "served_by": "what the schedule is, in words",
    "pieces": "into how many each chunk is cut",
    "strays": "pairs of ranks whose packets take another way through switches than the schedule says",
    "idle": "share of the processors that nobody used during the runs, or only niced processes; "
    "null where they are too short to see",
    "busiest_rank": "share of the time for which the busiest rank computed; median over the rounds",
    "cpu_limited": "whether idle or busiest_rank say that the links need not have been the limit",
    "slowest_mbit": "Mbit/s that the slowest link was set to",
    "links": "Mbit/s: set to; of TCP payload, each alone; the same, all at once",
}


def _emulation() -> dict[str, Any]:
    with real_time() as is_allowed:
        pass
    return {
        "real_time": is_allowed,
        "mtu": network.MTU,
        "burst": f"{network.BURST_S * 1e3:g} ms of a link's rate, {network.LEAST_BURST_BYTES} bytes at "
        "least: what a link that was idle before a run may carry on top",
        "queue_bytes": network.QUEUE_BYTES,
        "settings": network.SETTINGS,
    }


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, RESULTS)
    names = ", ".join(case.topology.name for case in CASES)
    parser.add_argument("--only", metavar="SPEC", help=f"one of {names}; or any other topology, with --mbit")
    parser.add_argument("--ranks", metavar="R,R,...", help="with --only SPEC: the fragment of these ranks")
    parser.add_argument("--mbit", type=int, help="Mbit/s of the slowest link")
    parser.add_argument(
        "--collectives", nargs="+", choices=[str(kind) for kind in KINDS], default=list(KINDS)
    )
    parser.add_argument("--sizes", type=_size, nargs="+", help="of the whole buffer")
    parser.add_argument("--methods", nargs="+", choices=KNOWN, help=f"{GLOO} and {RING} are compared with")
    parser.add_argument("--root", type=int, default=0, help="of collectives that have one")
    parser.add_argument("--runs", type=int, default=LEAST_RUNS, help="rounds, after one that warms up")
    parser.add_argument("--quick", action="store_true", help="one topology, one collective, one size")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.collectives, arguments.sizes = arguments.collectives[:1], arguments.sizes or [8 * MIB]
    arguments.cases = _cases(arguments)
    if arguments.runs < LEAST_RUNS and arguments.json == RESULTS:
        parser.error(
            f"--runs {arguments.runs}: results that are kept need at least {LEAST_RUNS}; or say --json PATH"
        )
    return arguments


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _cases(arguments: argparse.Namespace) -> Sequence[Case]:
    if arguments.only is None:
        if arguments.ranks is not None:
            raise InputError("--ranks: is for the topology of --only, and there is none")
        return CASES[:1] if arguments.quick else CASES
    return [case_of(arguments.only, arguments.ranks, arguments.mbit)]


if __name__ == "__main__":
    main()
