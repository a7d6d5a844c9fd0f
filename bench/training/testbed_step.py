"""Training steps on emulated links, predicted and measured: orders, replicas, and who sums their gradients.

More ranks than cores train layers that sleep, so that links and orders decide, not who gets a core. What a
user would do: profile the model on the ranks that will train it, measure what messages and sums cost beside
the links, and predict each plan. All plans take turns in the same processes, so that the ratio of those that
differ in nothing but the allreduce of the gradients is what the schedules give a training.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from arborcast.bench.emulation import network
from arborcast.bench.emulation.plan import at_rates, plan_emulation
from arborcast.bench.emulation.processes import run_inside
from arborcast.bench.harness.turns import beside_prediction, in_turns
from arborcast.bench.training.laid_out import evenly, laid_out

if TYPE_CHECKING:
    from torch import nn

    from arborcast.pipeline.model.divisible import Divisible
    from arborcast.pipeline.stages import Plan
    from arborcast.synth.topology import Topology

LAYERS, WIDTH, ROWS = 12, 768, 128
"""Of the model: a layer's output for a sample has `WIDTH` numbers, its weight `ROWS` times as many."""
SAMPLES, MICROBATCHES = 128, 8
"""Of a step."""
SAMPLE_US = 500.0
"""That a layer sleeps for a sample in each pass, three times in a step."""
TIMEOUT_S = 600


@dataclass(frozen=True)
class Trained:
    """A plan: its order, the replicas of each worker in the planner's order of the devices, who sums."""

    order: str
    replicas: tuple[int, ...]
    collectives: str = "gloo"

    def plan(self, topology: Topology) -> Plan:
        """Stages of equal layers."""
        from arborcast.pipeline.planning.device_order import device_order

        order = device_order(topology)
        ranks = [order[start:end] for start, end in pairwise(accumulate(self.replicas, initial=0))]
        return laid_out(self.order, ranks, evenly(LAYERS), MICROBATCHES, topology=topology)


@dataclass(frozen=True)
class Case:
    """Trainings on a topology.

    Attributes:
        spec: of the topology.
        plans: that are trained.
        ranks: the fragment; None for all.
        mbit: rate of the slowest link.
    """

    spec: str
    plans: Sequence[Trained]
    ranks: tuple[int, ...] | None = None
    mbit: int = 100

    def topology(self) -> Topology:
        """At the rates of the emulation."""
        from arborcast import topologies

        return at_rates(topologies.load(self.spec, ranks=self.ranks), self.mbit)


def _both(order: str, *replicas: int) -> tuple[Trained, Trained]:
    return Trained(order, replicas, "synth"), Trained(order, replicas, "gloo")


def _alone(ranks: int, *orders: str) -> tuple[Trained, ...]:
    """Workers of one rank each, of which no gradients are summed."""
    return tuple(Trained(order, (1,) * ranks) for order in orders)


CASES = (
    Case(
        "dgx1",
        (
            *_alone(8, "1f1b", "zb-h1"),
            *_both("1f1b", 4, 4),
            *_both("gpipe", 2, 2, 2, 2),
            *_both("1f1b", 8),
        ),
    ),
    Case(
        "dgx1",
        (*_alone(6, "gpipe", "interleaved"), *_both("zb-h1", 2, 2, 2), *_both("1f1b", 6)),
        ranks=(0, 1, 2, 3, 4, 5),
    ),
    Case(
        "dgx1",
        (*_alone(4, "gpipe", "1f1b", "zb-h1", "zb-v"), *_both("1f1b", 1, 3), *_both("1f1b", 4)),
        ranks=(1, 4, 5, 6),
    ),
)


def step_rows(case: Case, *, turns: int = 5) -> list[dict[str, Any]]:
    """A row for each plan: the time of its training step, in turns with the others, and what was predicted.

    Raises:
        InputError: the machine cannot emulate links, or the topology has too many vertices.
        EmulationError: a rank failed.
    """
    topology = case.topology()
    with network.emulate(plan_emulation(topology, case.mbit)) as emulation:
        found = run_inside(emulation, measure, case, turns, timeout_s=TIMEOUT_S)
    seen = [loss for of_rank in found for _, _, loss in of_rank]
    assert max(seen) - min(seen) < 1e-5 * max(seen), f"all plans must train alike, got losses {seen}"
    rows = []
    for number, each in enumerate(case.plans):
        plan = each.plan(topology)
        replicas = [len(it.ranks) for it in plan.stages]
        held = max(sum(end - start for start, end in plan.layers_of(it)) for it in plan.workers)
        rows.append(
            {
                "topology": topology.name,
                "replicas": "+".join(map(str, replicas)),
                "order": each.order,
                "collectives": each.collectives,
                "ranks": [list(it.ranks) for it in plan.stages],
                "microbatches": MICROBATCHES,
                "gradient_bytes": 4 * held * WIDTH * ROWS if max(replicas) > 1 else None,
                "mbit": case.mbit,
                "last_loss": seen[number],
                **beside_prediction(found[0][number][0], [of_rank[number][1] for of_rank in found]),
            }
        )
    by_gloo = {
        (row["replicas"], row["order"]): row["time_us"] for row in rows if row["collectives"] == "gloo"
    }
    for row in rows:
        row["times_faster_than_gloo"] = by_gloo[row["replicas"], row["order"]] / row["time_us"]
    return rows


def measure(
    rank: int, address: str, store_path: str, case: Case, turns: int
) -> list[tuple[float, list[float], float]]:
    """Of each plan what is predicted of it in us (on the first rank), this rank's seconds, the last loss."""
    import torch
    import torch.distributed as dist

    from arborcast import pipeline
    from arborcast.backends.tensors.torch_compat import FileStore

    os.environ |= {"ARBORCAST_TRANSPORT": "sockets", "ARBORCAST_START": "wait"}  # not memory that ranks share
    topology = case.topology()
    dist.init_process_group(
        "gloo", store=FileStore(store_path, topology.ranks), rank=rank, world_size=topology.ranks
    )
    torch.manual_seed(0)
    inputs, targets = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    loss = torch.nn.functional.mse_loss
    # Of samples a rank alone has four times as many, 8 replicas half. Ranks are machines of their own, which
    # do not crowd each other.
    share, batch = SAMPLES // MICROBATCHES // 4, (inputs, targets)
    profile = pipeline.profile(_model(), batch, loss, at=share, optimizer=_optimizer) if rank == 0 else None
    networks = {it: pipeline.measure_links(topology, collectives=it) for it in ("gloo", "synth")}
    predicted, trainers = [], []
    for each in case.plans:
        plan, by = each.plan(topology), each.collectives
        if profile is not None:
            predicted.append(pipeline.predict(plan, profile, networks[by], batch=SAMPLES).time_us)
        dist.barrier()
        trainers.append(pipeline.Trainer(_model(), plan, loss, _optimizer, collectives=by, check_loss=False))
    steps = {number: partial(it.step, inputs, targets) for number, it in enumerate(trainers)}
    seconds, losses = in_turns(steps, turns, warm_ups=2)
    return [
        (predicted[number] if rank == 0 else 0.0, seconds[number], float(losses[number])) for number in steps
    ]


def _model() -> Divisible:
    from arborcast.bench.training.sleeping import Nap
    from arborcast.pipeline.model.divisible import Divisible

    return Divisible([Nap(WIDTH, SAMPLE_US, ROWS) for _ in range(LAYERS)])


def _optimizer(parameters: list[nn.Parameter]) -> Any:
    import torch

    return torch.optim.SGD(parameters, 0.01)
