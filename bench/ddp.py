"""How fast is a training step of DistributedDataParallel beside gloo? On local processes.

One set of processes holds a copy of one network for every contender, and in each round each of them takes a
step (forward, backward with gradients averaged, update) on the same data, in an order that rotates. At the
end all parameters are those of gloo's copy. Results go to `bench/results/ddp.json`.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from arborcast.bench.contenders import BASELINE, Contender
from arborcast.bench.harness.document import RUNTIME
from arborcast.bench.harness.processes import run_ranks
from arborcast.bench.harness.script import KEPT, command_line, keep, ranks_and_runs
from arborcast.bench.harness.turns import MEASURES, UNITS, Sample, beside_gloo, sample
from arborcast.bench.page.console import print_results
from arborcast.synth.formats.results import TIME, document

RESULTS = KEPT / "ddp.json"
CONTENDERS = (BASELINE, "sockets", "shared memory")
TARGETS = {"sockets": 1.0, "shared memory": 1.2}  # times gloo's speed
WIDTH = 1024  # of each layer
BATCH = 16  # on each rank
RATE = 1e-3  # of learning
WARM_UPS = 2  # DDP orders its buckets after the first step
TOLERANCE = 1e-5  # of parameters: several orders of adding float32 are right
TIMEOUT_S = 1200.0


def main() -> None:
    """Measure what the command line asks for, print the table, write the results."""
    arguments = _arguments()
    rows = []
    for ranks in arguments.ranks:
        for millions in arguments.millions:
            asked = millions * 10**6 // WIDTH**2 + 1, arguments.runs
            samples = run_ranks(ranks, _measure, *asked, timeout_s=TIMEOUT_S)[0]
            rows += [_row(ranks, millions, name, samples) for name in CONTENDERS]
    found = _document(rows)
    print_results(found, "target", "met", section="ddp")
    keep(arguments.json, found)


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, RESULTS)
    parser.add_argument(
        "--millions", type=int, nargs="+", default=[10, 50], help="numbers of parameters / 1e6, rounded up"
    )
    return ranks_and_runs(parser, [2, 4], 15)


def _measure(rank: int, layers: int, runs: int) -> dict[str, list[Sample]]:
    """On one rank, the same result on all: of each step the slowest rank's seconds, and all ranks' of CPU."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    def network(group: Any) -> DistributedDataParallel:
        torch.manual_seed(0)
        blocks = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)]
        parts = [part for block in blocks for part in (block, torch.nn.ReLU())]
        return DistributedDataParallel(torch.nn.Sequential(*parts), process_group=group)

    networks = {name: network(Contender(name).group) for name in CONTENDERS}
    samples: dict[str, list[Sample]] = {name: [] for name in CONTENDERS}
    for turn in range(WARM_UPS + runs):
        torch.manual_seed(1000 * turn + rank)
        data = torch.randn(BATCH, WIDTH)
        at = turn % len(CONTENDERS)
        for name in CONTENDERS[at:] + CONTENDERS[:at]:
            taken = sample(partial(_step, networks[name], data))
            if turn >= WARM_UPS:
                samples[name].append(taken)
    for name in CONTENDERS:
        for ours, theirs in zip(networks[name].parameters(), networks[BASELINE].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    return samples


def _step(network: Any, data: Any) -> None:
    import torch

    network.zero_grad()
    network(data).square().mean().backward()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.sub_(parameter.grad, alpha=RATE)


def _row(ranks: int, millions: int, name: str, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    return {
        "topology": f"full:{ranks}",
        "ranks": ranks,
        "parameters": (millions * 10**6 // WIDTH**2 + 1) * (WIDTH**2 + WIDTH),
        "method": name,
        **beside_gloo(samples[BASELINE], samples[name], TARGETS.get(name)),
    }


def _document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return document(
        "How fast is a step of DistributedDataParallel beside gloo on local processes?",
        rows,
        keys=("topology", "ranks", "parameters", "method"),
        measures={"time_us": TIME["time_us"], **MEASURES},
        units={
            "time_us": f"of one step (layers of {WIDTH} x {WIDTH}, {BATCH} samples a rank), "
            "the slowest rank's; median over the rounds",
            "cpu_us": "of one step, all threads of all ranks together; median over the rounds",
            **UNITS,
        },
        packages=("arborcast", "torch", "numpy"),
        code=RUNTIME,
    )


if __name__ == "__main__":
    main()
