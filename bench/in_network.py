"""An allreduce through switches that add and multicast, beside the rate of a link.

Stars and a two-level tree of emulated links, where each able switch is an aggregating process in a namespace
of its own: each piece is added and goes on as soon as all its inputs are there. Beside it run gloo, the
schedule that the process group would choose if switches only forwarded, and the same trees with switches that
store a message before they pass it on, as a check: those must take twice as long. A link must carry the whole
buffer once each way, so that the share is that of the busiest link at the rate that it delivered. Needs root
and iproute2. Results go to `bench/results/in_network.json`.

    python bench/in_network.py
    python bench/in_network.py --sizes 1MiB --runs 3 --json /tmp/quick.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from arborcast.bench.contest.contenders import GLOO, SELECTION, Contender, line_up
from arborcast.bench.contest.ranks import Order, run_order
from arborcast.bench.contest.rows import Limits, links_of, rows_of
from arborcast.bench.emulation import network
from arborcast.bench.emulation.delivery import check_delivery, delivered
from arborcast.bench.emulation.machine import EmulationError, check_machine
from arborcast.bench.emulation.plan import at_rates, plan_emulation
from arborcast.bench.emulation.processes import run_inside
from arborcast.bench.harness.document import TIME, Measure, document, write_document
from arborcast.bench.harness.provenance import RUNTIME
from arborcast.synth.api import solve
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats.sizes import format_size, parse_size
from arborcast.synth.topology import Link, Switch, Topology

RESULTS = Path(__file__).resolve().parent / "results" / "in_network.json"
LEAST_RUNS = 5
MBIT = 100
SIZES = tuple(parse_size(text) for text in ("64KiB", "256KiB", "1MiB", "8MiB"))
TARGETS = {(1, 1 << 20): 0.92, (1, 8 << 20): 0.95, (2, 8 << 20): 0.93}
"""By levels and bytes, the least share of the delivered link."""

CUT_THROUGH, STORING, FORWARDING = "cut-through", "store-and-forward", "forwarding"


@dataclass(frozen=True)
class Case:
    """A fabric.

    Attributes:
        levels: of switches between two ranks and the one that turns.
        topology: whose last switch is the highest.
    """

    levels: int
    topology: Topology


def tree_of_switches(leaves: int, each: int) -> Topology:
    """Switches with `each` ranks below one switch that joins them; one star where `leaves` is 1."""
    ranks = leaves * each
    count = leaves + 1 if leaves > 1 else 1
    switches = [Switch(f"s{number}", reduces=True, multicasts=True, turns=True) for number in range(count)]
    pairs = [(rank, ranks + rank // each) for rank in range(ranks)]
    pairs += [(ranks + leaf, ranks + leaves) for leaf in range(leaves) if leaves > 1]
    links = [Link(a, b, Fraction(1)) for pair in pairs for a, b in (pair, pair[::-1])]
    name = f"star:{ranks}" if leaves == 1 else f"{leaves} stars of {each} below a switch"
    return Topology.build(name, ranks, links, switches)


CASES = (
    Case(1, tree_of_switches(1, 4)),
    Case(1, tree_of_switches(1, 8)),
    Case(2, tree_of_switches(4, 2)),
)


def contenders(topology: Topology) -> tuple[Contender, ...]:
    """All that are compared on a fabric, at the rates that it has."""
    collective = Collective.on(topology, Kind.ALLREDUCE)
    chosen = line_up(topology.forwarding, collective, [SELECTION]).contenders[0]
    storing = replace(topology, switches=tuple(replace(one, stores=True) for one in topology.switches))
    return (
        Contender(GLOO),
        replace(chosen, name=FORWARDING),
        Contender(STORING, solve(storing, collective, form="explicit")),
        Contender(CUT_THROUGH, solve(topology, collective, form="explicit")),
    )


def measure(case: Case, sizes: Sequence[int], runs: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of a fabric, and what its links delivered.

    Raises:
        InputError: not root, no iproute2, or a kernel without what is needed.
        EmulationError: a link does not deliver its rate, a process failed, or a result is wrong.
    """
    topology = at_rates(case.topology, MBIT)
    plan = plan_emulation(topology, MBIT)
    collective = Collective.on(topology, Kind.ALLREDUCE)
    compared = contenders(topology)
    rows: list[dict[str, Any]] = []
    with network.emulate(plan) as emulation:
        rates = delivered(emulation)
        check_delivery(plan, rates, _say)
        slowest = min(rates["alone"].values())
        limits = Limits(8e6 / slowest, 8 / MBIT, network.burst_bytes(MBIT * 1e6) * 8 / MBIT)
        for size in sizes:
            order = Order(collective, size, tuple(each.at(size) for each in compared), runs, timeout_s=60)
            seen = run_inside(emulation, run_order, order, vertices=topology.holders)
            found = rows_of(order, plan, limits, seen[: topology.ranks])
            rows += [{**row, "levels": case.levels, **_target(case, row)} for row in found]
            shares = ", ".join(f"{row['method']} {row['share_of_optimum']:.3f}" for row in found)
            _say(f"{topology.name}, {format_size(size)}: share of the delivered link: {shares}")
    return rows, links_of(plan, rates)


def _target(case: Case, row: Mapping[str, Any]) -> dict[str, Any]:
    target = TARGETS.get((case.levels, row["bytes"])) if row["method"] == CUT_THROUGH else None
    return {} if target is None else {"target": target, "met": row["share_of_optimum"] >= target}


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=SIZES, help="of the whole buffer")
    parser.add_argument("--runs", type=int, default=LEAST_RUNS, help="rounds, after one that warms up")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    arguments = parser.parse_args()
    if arguments.runs < LEAST_RUNS and arguments.json == RESULTS:
        parser.error(
            f"--runs {arguments.runs}: results that are kept need at least {LEAST_RUNS}; or say --json PATH"
        )
    try:
        check_machine()
        rows: list[dict[str, Any]] = []
        links = {}
        for case in CASES:
            found, links[case.topology.name] = measure(case, arguments.sizes, arguments.runs)
            rows += found
    except (InputError, EmulationError) as error:
        _say(str(error))
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    write_document(arguments.json, results_document(rows, links))
    print(f"written: {arguments.json}")


def results_document(rows: Sequence[dict[str, Any]], links: dict[str, Any]) -> dict[str, Any]:
    """The results file."""
    return document(
        "How near to a link's rate is an allreduce through switches that add and multicast?",
        rows,
        keys=("topology", "method", "bytes"),
        measures={
            **TIME,
            "share_of_optimum": Measure("more", follows="time_us"),
            "share_of_nominal": Measure("more", follows="time_us"),
            "speed_up_over_gloo": Measure("more", follows="time_us"),
        },
        units={
            "time_us": "from the instant at which all ranks begin until the last one is done; median",
            "spread": "largest minus smallest, us",
            "share_of_optimum": "of the time that the slowest link, at the rate that it delivered alone, "
            "needs for the buffer once, less what links that have paused may carry at once (burst_share)",
            "share_of_nominal": "the same at the rate that links were set to, headers not deducted",
            "speed_up_over_gloo": "gloo's time over this one's in the same round; median over the rounds",
            "target": "the least share_of_optimum that is aimed for",
            "levels": "of switches between a rank and the one that turns, that one included",
            "links": "Mbit/s: set to; of TCP payload, each alone; the same, all at once",
        },
        packages=("arborcast", "torch", "numpy"),
        code=RUNTIME,
        links=links,
    )


def _say(line: str) -> None:
    print(f"in_network: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
