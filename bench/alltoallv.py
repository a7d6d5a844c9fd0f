"""How fast is an alltoall of blocks of any sizes, planned at each step? Beside pairwise sends and FAST.

Patterns are those that experts of a mixture make: one hot expert, Zipf's law over experts in another order on
each rank, and sizes drawn from a heavy tail. Times are simulated on the machines' links; planning takes the
CPU time of this process, warm: the median over matrices not seen before. On emulated links (which need
root and iproute2, and are left out otherwise) the engine runs both. Results: `bench/results/alltoallv.json`.

    python bench/alltoallv.py
    python bench/alltoallv.py --steps 3 --no-links --json /tmp/quick.json
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from arborcast import topologies
from arborcast.bench.adapters.balanced import balanced
from arborcast.bench.emulation.machine import EmulationError, check_machine
from arborcast.bench.harness.document import RUNTIME
from arborcast.bench.harness.script import KEPT, command_line, keep
from arborcast.synth.alltoallv.block_plan import pieces_of
from arborcast.synth.alltoallv.block_planner import AlltoallvPlanner
from arborcast.synth.alltoallv.pairwise import pairwise
from arborcast.synth.errors import CollectiveError, InputError
from arborcast.synth.formats.results import Measure, document
from arborcast.synth.kernels.compiled import compile_all
from arborcast.synth.schedule import Schedule
from arborcast.synth.simulation.pieces import SEVERAL_HOSTS
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.topology import Topology
from arborcast.synth.verification.verifier import verify

RESULTS = KEPT / "alltoallv.json"
MACHINES = (
    "dgx1",
    "dgx-a100",
    "mi250",
    "dgx-a100:boxes=2",
    "dgx-h100:boxes=2",
    "dgx-a100:boxes=8",
    "dgx-h100:boxes=8",
    "torus:8x8",
)
MEAN_BYTES = 16 << 20
"""What each rank holds, in the mean."""

LEAST_STEPS = 15
TARGET_MS = {8: 5.0, 64: 50.0}
"""For a plan, by ranks."""

LINKS = {"dgx1": 25, "boxes:2,gpus=4,inside=48,nic=4": 20}
"""Mbit/s of the slowest link of fabrics that are emulated."""

LINKS_BYTES = 1 << 20
PLANNED = "planned"

Sizes: TypeAlias = list[list[int]]
Row: TypeAlias = dict[str, Any]


def _scaled(weights: Any, mean: int) -> Sizes:
    found: Sizes = (weights / weights.sum() * mean * len(weights)).astype(np.int64).tolist()
    return found


def even(ranks: int, draw: np.random.Generator, mean: int) -> Sizes:
    """All blocks alike."""
    return _scaled(np.ones((ranks, ranks)), mean)


def hot(ranks: int, draw: np.random.Generator, mean: int) -> Sizes:
    """Half of everything goes to one rank."""
    weights = np.full((ranks, ranks), 1 / ranks)
    weights[:, draw.integers(ranks)] += 1
    return _scaled(weights, mean)


def zipf(ranks: int, draw: np.random.Generator, mean: int) -> Sizes:
    """Each rank's experts by Zipf's law with exponent 1.2, in an order of its own."""
    shares = 1 / np.arange(1, ranks + 1) ** 1.2
    return _scaled(np.array([draw.permutation(shares) for _ in range(ranks)]), mean)


def heavy(ranks: int, draw: np.random.Generator, mean: int) -> Sizes:
    """Sizes of Pareto's law with exponent 1.1: a few pairs have most of it."""
    return _scaled(draw.pareto(1.1, (ranks, ranks)) + 0.01, mean)


PATTERNS: Mapping[str, Callable[[int, np.random.Generator, int], Sizes]] = {
    "even": even,
    "one hot expert": hot,
    "zipf": zipf,
    "heavy tail": heavy,
}


def simulated(spec: str, steps: int) -> list[Row]:
    """The rows of one machine.

    Raises:
        AssertionError: the verifier objects.
    """
    topology = topologies.load(spec)
    planner = AlltoallvPlanner(topology)
    rows = []
    for pattern, make in PATTERNS.items():
        draw = np.random.default_rng(7)
        planner.plan(make(topology.ranks, draw, MEAN_BYTES))  # warms up
        planning, ordering = [], []
        for _ in range(steps):
            sizes = make(topology.ranks, draw, MEAN_BYTES)
            begin = time.thread_time()
            plan = planner.plan(sizes)
            planned = time.thread_time()
            pieces_of(plan)
            planning.append(1000 * (planned - begin))
            ordering.append(1000 * (time.thread_time() - planned))
        bytes_of_rank = plan.collective.mean_bytes
        limit_us = float(plan.time_us * (1 - plan.gap))
        contenders = {PLANNED: plan.schedule(), "pairwise": pairwise(planner, sizes, plan.bound)}
        with suppress(CollectiveError):  # where there are no boxes
            contenders["balanced"] = balanced(planner, sizes, plan.bound)
        for method, schedule in contenders.items():
            verdict = verify(schedule)
            assert verdict.correct, f"{spec}, {pattern}, {method}: {verdict.errors[0]}"
            time_us = simulate(schedule, bytes_of_rank).time_us
            row: Row = {
                "topology": spec,
                "ranks": topology.ranks,
                "pattern": pattern,
                "method": method,
                "on": "simulated links",
                "bytes": bytes_of_rank,
                "time_us": time_us,
                "share_of_limit": limit_us / time_us,
            }
            if method == PLANNED:
                target = TARGET_MS.get(topology.ranks)
                taken = statistics.median(planning)
                row |= {
                    "gap": float(plan.gap),
                    "certificate": type(plan.bound.certificate).__name__.lower(),
                    "planning_ms": taken,
                    "planning_spread": max(planning) - min(planning),
                    "ordering_ms": statistics.median(ordering),
                }
                row |= {} if target is None else {"target_ms": target, "met": taken <= target}
            rows.append(row)
        told = ", ".join(f"{row['method']} {row['share_of_limit']:.3f}" for row in rows[-len(contenders) :])
        _say(f"{spec}, {pattern}: {statistics.median(planning):.2f} ms; share of the limit: {told}")
    return rows


@dataclass(frozen=True)
class Job:
    """What ranks on emulated links run: one matrix by each of two programs."""

    sizes: tuple[tuple[int, ...], ...]
    schedule: Schedule
    runs: int


def run_exchange(rank: int, address: str, store_path: str, job: Job) -> list[list[tuple[float, float]]]:
    """When each run began and ended here, of pairwise sends and of the plan; for `run_inside`.

    Raises:
        RuntimeError: a byte is wrong.
    """
    import torch

    from arborcast.backends.dataflow.engine import Engine
    from arborcast.backends.dataflow.task_graph import compile_graph
    from arborcast.backends.lowering.layout import Buffer
    from arborcast.backends.lowering.lower import lower_rank
    from arborcast.backends.schedules import exchange
    from arborcast.backends.tensors.torch_compat import FileStore
    from arborcast.backends.transport.fingerprint import CollectiveFingerprint
    from arborcast.backends.transport.network import Network
    from arborcast.synth.collective import Kind

    size = len(job.sizes)
    network = Network(
        FileStore(store_path, size), rank, size, timeout_s=60, transport="sockets", address=address
    )
    network.connect(set(range(size)) - {rank})
    engine = Engine(rank, network, timeout_s=60)
    count = job.schedule.collective.mean_bytes
    cut = SEVERAL_HOSTS.pieces(job.schedule, count)
    graphs = [
        compile_graph(exchange.pairwise(job.sizes, rank)),
        compile_graph(lower_rank(job.schedule, rank, count, pieces=cut)),
    ]

    def block(source: int, target: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(source * size + target)
        return torch.randint(256, (job.sizes[source][target],), dtype=torch.uint8, generator=made)

    given = torch.cat([block(rank, other) for other in range(size)])
    wanted = torch.cat([block(other, rank) for other in range(size)])
    seen: list[list[tuple[float, float]]] = [[], []]
    for turn in range(job.runs + 1):
        for way, graph in enumerate(graphs):
            output = torch.zeros_like(wanted)
            number = 2 * turn + way
            opening = CollectiveFingerprint(2 * number, count, -1, Kind.ALLTOALL, "uint8", b"exchange")
            engine.agree(CollectiveFingerprint(2 * number + 1, 0, -1, Kind.ALLTOALL, "begin"))
            begin = time.monotonic()
            engine.run(graph, {Buffer.INPUT: given, Buffer.OUTPUT: output}, opening, None)
            seen[way].append((begin, time.monotonic()))
            if not torch.equal(output, wanted):
                raise RuntimeError(f"rank {rank}: {('pairwise', PLANNED)[way]} moved a byte wrongly")
    engine.agree(CollectiveFingerprint(0, 0, -1, Kind.ALLTOALL, "end"))
    network.close()
    engine.close()
    return [times[1:] for times in seen]


def measured(spec: str, slowest_mbit: int, runs: int) -> list[Row]:
    """The rows of one emulated fabric.

    Raises:
        EmulationError: a link does not deliver its rate, a process failed, or a byte is wrong.
    """
    from arborcast.bench.emulation import network
    from arborcast.bench.emulation.plan import at_rates, plan_emulation
    from arborcast.bench.emulation.processes import run_inside

    topology: Topology = at_rates(topologies.load(spec), slowest_mbit)
    planner = AlltoallvPlanner(topology)
    rows = []
    with network.emulate(plan_emulation(topology, slowest_mbit)) as emulation:
        for pattern in ("one hot expert", "zipf"):
            sizes = PATTERNS[pattern](topology.ranks, np.random.default_rng(7), LINKS_BYTES)
            plan = planner.plan(sizes)
            job = Job(tuple(map(tuple, sizes)), plan.schedule(), runs)
            seen = run_inside(emulation, run_exchange, job)
            for way, method in enumerate(("pairwise", PLANNED)):
                times = [
                    1e6 * (max(ends for _, ends in run) - max(begins for begins, _ in run))
                    for run in zip(*(of_rank[way] for of_rank in seen), strict=True)
                ]
                time_us = statistics.median(times)
                rows.append(
                    {
                        "topology": spec,
                        "ranks": topology.ranks,
                        "pattern": pattern,
                        "method": method,
                        "on": "emulated links",
                        "bytes": plan.collective.mean_bytes,
                        "time_us": time_us,
                        "spread": max(times) - min(times),
                        "share_of_limit": float(plan.time_us * (1 - plan.gap)) / time_us,
                        "runs": runs,
                    }
                )
                _say(f"{spec}, {pattern}, emulated: {method} {rows[-1]['share_of_limit']:.3f} of the limit")
    return rows


def main() -> None:
    """Simulate, time, measure, and write the results."""
    parser = command_line(__doc__, RESULTS)
    parser.add_argument("--steps", type=int, default=LEAST_STEPS, help="matrices that are timed per pattern")
    parser.add_argument("--machines", nargs="+", default=MACHINES, help="names of the catalog")
    parser.add_argument("--no-links", action="store_true", help="nothing on emulated links")
    arguments = parser.parse_args()
    if arguments.json == RESULTS and arguments.steps < LEAST_STEPS:
        parser.error(
            f"--steps {arguments.steps}: results that are kept need {LEAST_STEPS}; or say --json PATH"
        )
    compile_all()
    rows = [row for spec in arguments.machines for row in simulated(spec, arguments.steps)]
    if not arguments.no_links:
        try:
            check_machine()
            rows += [row for spec, mbit in LINKS.items() for row in measured(spec, mbit, runs=5)]
        except InputError as error:
            _say(f"no emulated links: {error}")
        except EmulationError as error:
            _say(str(error))
            raise SystemExit(1) from None
    keep(arguments.json, results_document(rows))


def results_document(rows: Sequence[Row]) -> dict[str, Any]:
    """The results file."""
    return document(
        "How fast is an alltoall of blocks of any sizes, planned for each step?",
        rows,
        keys=("topology", "pattern", "method", "on"),
        measures={
            "time_us": Measure("less", "spread"),
            "share_of_limit": Measure("more", follows="time_us"),
            "planning_ms": Measure("less", "planning_spread"),
        },
        units={
            "time_us": "simulated; on emulated links from the last rank's begin to the last one's end",
            "bytes": "what each rank holds, in the mean",
            "share_of_limit": "the time that the plan's certificate proves, over time_us",
            "gap": "what the plan's busiest link is above that time, as a part; 0: proved optimal",
            "planning_ms": "CPU time from sizes to ways, bound and certificate; warm, median over matrices",
            "ordering_ms": "from there to rounds",
            "target_ms": "that planning may take",
        },
        packages=("arborcast", "numpy", "numba", "highspy"),
        code=RUNTIME,
    )


def _say(line: str) -> None:
    print(f"alltoallv: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
