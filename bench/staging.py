"""Tensors on a device: what 1 to 8 host buffers leave of a link's rate, beside copying whole tensors.

Workers around a switch, as network namespaces with links of a given rate (see `bench/testbed.py`), run an
allreduce on data that lie on an emulated device, whose copies take their time on threads of their own. All
contenders take turns; every element of every result is checked. Needs root and iproute2. Results go to
`bench/results/staging.json`.

    python bench/staging.py            # about two minutes
    python bench/staging.py --sizes 64KiB 1MiB 16MiB --copies 1 --mbit 100
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from arborcast import topologies
from arborcast.backends.staging.device import CopyCosts
from arborcast.backends.staging.ring import Pipeline, Ring
from arborcast.bench.contest.contenders import Contender, Copies
from arborcast.bench.contest.ranks import Order, run_order
from arborcast.bench.contest.rows import Limits, rows_of
from arborcast.bench.emulation import network
from arborcast.bench.emulation.delivery import check_delivery, delivered
from arborcast.bench.emulation.machine import check_machine
from arborcast.bench.emulation.plan import at_rates, plan_emulation
from arborcast.bench.emulation.processes import run_inside
from arborcast.bench.harness.document import RUNTIME
from arborcast.bench.harness.script import KEPT, command_line, keep, one_line
from arborcast.synth.api import solve
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.formats.results import TIME, Measure, Row, document
from arborcast.synth.formats.sizes import format_size, parse_size
from arborcast.synth.schedule import Schedule

RESULTS = KEPT / "staging.json"
LEAST_RUNS = 5
DEPTHS = (1, 2, 4, 8)
IN_HOST_MEMORY, WHOLE, CHOSEN = "host memory", "whole tensors", "chosen"


@dataclass(frozen=True)
class Entry:
    """A contender with what its row says beside the times.

    Attributes:
        method: as the row calls it.
        contender: what runs.
        buffer_bytes: of the tensor in one host buffer; None where there is none.
    """

    method: str
    contender: Contender
    buffer_bytes: int | None

    @property
    def columns(self) -> dict[str, Any]:
        """Those of its row."""
        ring = None if self.contender.copies is None else self.contender.copies.ring
        pieces = {} if ring is None else {"pieces": ring.pieces}
        return {
            "method": self.method,
            "buffers": None if ring is None else ring.depth,
            "buffer_bytes": self.buffer_bytes,
            **pieces,
        }


def entries(
    schedule: Schedule, nbytes: int, copying: CopyCosts, buffer_sizes: Sequence[int]
) -> Iterator[Entry]:
    """What is compared at a size: no device, whole tensors, what is chosen, each depth, each buffer's size.

    Args:
        schedule: that all run.
        nbytes: of the whole buffer.
        copying: what the device's copies take.
        buffer_sizes: to be tried with every depth.
    """
    find = Pipeline.of(schedule, nbytes, copying).choose
    rings: dict[tuple[str, Ring], None] = {(CHOSEN, find()): None}
    for depth in DEPTHS:
        for buffer_bytes in (None, *(it for it in buffer_sizes if it <= nbytes)):
            ring = find(buffer_bytes=buffer_bytes, depth=depth)
            if ring.depth == depth:  # where there are as many pieces
                rings[f"{depth} buffer{'s' * (depth > 1)}", ring] = None
    yield Entry(IN_HOST_MEMORY, Contender(IN_HOST_MEMORY, schedule), None)
    whole = Copies(copying.rate, copying.each_us)
    yield Entry(WHOLE, Contender(WHOLE, schedule, copies=whole), None)
    for method, ring in rings:
        copies = Copies(copying.rate, copying.each_us, ring)
        yield Entry(
            method, Contender(f"{method}, {ring}", schedule, copies=copies), -(-nbytes // ring.pieces)
        )


def measure(arguments: argparse.Namespace) -> list[Row]:
    """The rows that the command line asks for."""
    topology = at_rates(topologies.load(arguments.topology), arguments.mbit)
    collective = Collective.on(topology, Kind.ALLREDUCE)
    schedule = solve(topology, Kind.ALLREDUCE, method="trees")
    assert isinstance(schedule, Schedule), "a testbed has few ranks: its schedules are written out"
    plan = plan_emulation(topology, arguments.mbit)
    rows: list[Row] = []
    with network.emulate(plan) as emulation:
        rates = delivered(emulation)
        check_delivery(plan, rates, _say)
        for times_link in arguments.copies:
            copying = CopyCosts(times_link * Fraction(arguments.mbit, 8000), Fraction(arguments.each_us))
            for size in arguments.sizes:
                buffer_sizes = arguments.buffers if size == max(arguments.sizes) else ()
                asked = list(entries(schedule, size, copying, buffer_sizes))
                contenders = tuple(each.contender for each in asked)
                order = Order(collective, size, contenders, arguments.runs, 120)
                limits = Limits.of(order, plan, rates["alone"])
                slowest_s = 1 + 20 * limits.nominal_us * size / 1e6
                seen = run_inside(
                    emulation,
                    run_order,
                    order,
                    timeout_s=60 + slowest_s * len(contenders) * (1 + order.runs),
                )
                more = {"copies_over_link": float(times_link), "copy_us": float(copying.each_us)}
                found = rows_of(order, plan, limits, seen)
                rows += [row | more | each.columns for row, each in zip(found, asked, strict=True)]
                best = max(found[2:], key=lambda row: row["share_of_optimum"])
                _say(
                    f"{format_size(size)}, copies at {float(times_link):g} of the link: whole tensors "
                    f"{found[1]['share_of_optimum']:.3f} of the optimum, {best['method']} "
                    f"{best['share_of_optimum']:.3f}"
                )
    return rows


def results_document(rows: Sequence[Row]) -> dict[str, Any]:
    """The results file."""
    return document(
        "What share of a link do 1 to 8 host buffers leave to tensors on a device, beside whole copies?",
        rows,
        keys=("topology", "collective", "copies_over_link", "method", "bytes", "buffer_bytes"),
        measures={
            **TIME,
            "share_of_optimum": Measure("more", follows="time_us"),
            "share_of_nominal": Measure("more", follows="time_us"),
        },
        units={
            "time_us": "from the instant at which all ranks begin until the last one is done; median",
            "spread": "largest minus smallest, us",
            "share_of_optimum": "of the proven limit at the rates that each link delivered alone, data in "
            "host memory",
            "copies_over_link": "rate of the emulated device's copies, each way, over that of a rank's link",
            "copy_us": "what each copy takes besides its bytes",
            "buffers": "of the ring; null where there is none",
            "buffer_bytes": "of the tensor in one of them",
        },
        packages=("arborcast", "torch", "numpy"),
        code=RUNTIME,
    )


def format_table(rows: Sequence[Row]) -> str:
    """The rows for a reader at a terminal."""
    layout = "{:>6} {:>8} {:14}{:>10}{:>8}{:>10}{:>8}{:>9}  {}"
    lines = [layout.format("copies", "size", "method", "buffer", "pieces", "ms", "spread", "optimum", "")]
    for row in rows:
        lines.append(
            layout.format(
                f"x{row['copies_over_link']:g}",
                format_size(row["bytes"]),
                row["method"],
                "-" if row["buffer_bytes"] is None else format_size(row["buffer_bytes"]),
                row["pieces"],
                f"{row['time_us'] / 1e3:.1f}",
                f"{row['spread'] / 1e3:.1f}",
                f"{row['share_of_optimum']:.3f}",
                "CPU!" if row["cpu_limited"] else "",
            ).rstrip()
        )
    return "\n".join([*lines, "spread in ms; optimum: share of the proven limit of data in host memory"])


def _arguments() -> argparse.Namespace:
    kib = 1 << 10
    parser = command_line(__doc__, RESULTS)
    parser.add_argument("--topology", default="star:4", help="what the ranks are joined by")
    parser.add_argument("--mbit", type=int, default=200, help="Mbit/s of the slowest link")
    parser.add_argument(
        "--copies",
        type=Fraction,
        nargs="+",
        default=[Fraction(1), Fraction(4)],
        help="rates of the device's copies over that of the slowest link; PCIe 2.0 beside 10 Gbit/s: 4",
    )
    parser.add_argument("--each-us", type=int, default=10, help="what each copy takes besides its bytes")
    sizes = [kib * each for each in (64, 256, 1024, 4096)]
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=sizes, help="of the whole buffer")
    buffers = [kib * each for each in (32, 128, 512)]
    parser.add_argument(
        "--buffers", type=parse_size, nargs="*", default=buffers, help="tried at the largest size"
    )
    parser.add_argument("--runs", type=int, default=LEAST_RUNS, help="rounds, after one that warms up")
    arguments = parser.parse_args()
    if arguments.runs < LEAST_RUNS and arguments.json == RESULTS:
        parser.error(f"--runs {arguments.runs}: kept results need at least {LEAST_RUNS}; or say --json PATH")
    if min(arguments.copies) <= 0 or arguments.each_us < 0 or arguments.mbit <= 0:
        parser.error("--copies and --mbit must be positive, --each-us at least 0")
    return arguments


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@one_line("staging")
def main() -> None:
    """Measure what the command line asks for, print the table, write the results."""
    arguments = _arguments()
    check_machine()
    rows = measure(arguments)
    print(format_table(rows))
    keep(arguments.json, results_document(rows))


if __name__ == "__main__":
    main()
