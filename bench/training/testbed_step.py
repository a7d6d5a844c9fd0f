"""A pipelined training step on emulated links: replicas synchronised by synthesized schedules, or by gloo.

Everything but the allreduce of the gradients is the same: model, plan, messages between stages. The two take
turns in the same processes on the same links, so that their ratio is what the schedules give a training.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from arborcast.bench.emulation import network
from arborcast.bench.emulation.plan import at_rates, plan_emulation
from arborcast.bench.emulation.processes import run_inside
from arborcast.bench.harness.turns import in_turns

if TYPE_CHECKING:
    from arborcast.pipeline.stages import Plan
    from arborcast.synth.topology import Topology

WAYS = ("synth", "gloo")


@dataclass(frozen=True)
class Case:
    """A training on a topology.

    Attributes:
        spec: of the topology.
        replicas: of each stage, whose ranks follow each other in the planner's order of the devices.
        ranks: the fragment; None for all.
        mbit: rate of the slowest link.
        width: of the fully connected layers.
        layers: their number.
        batch: samples of a step.
        microbatches: of a step.
    """

    spec: str
    replicas: tuple[int, ...]
    ranks: tuple[int, ...] | None = None
    mbit: int = 100
    width: int = 768
    layers: int = 4
    batch: int = 64
    microbatches: int = 4

    def topology(self) -> Topology:
        """At the rates of the emulation."""
        from arborcast import topologies

        whole = topologies.load(self.spec)
        return at_rates(whole if self.ranks is None else whole.subset(self.ranks), self.mbit)


CASES = (
    Case("dgx1", (4, 4)),
    Case("dgx1", (1, 4), ranks=(1, 4, 5, 6, 7)),
    Case("dgx1", (6,), ranks=(0, 1, 2, 3, 4, 5)),
)


def step_rows(case: Case, *, steps: int = 6, timeout_s: float = 120) -> list[dict[str, Any]]:
    """The time of a training step by each way of the gradients, on the same links, in turns.

    Raises:
        InputError: the machine cannot emulate links, or the topology has too many vertices.
        EmulationError: a rank failed.
    """
    topology = case.topology()
    plan = plan_of(case, topology)
    with network.emulate(plan_emulation(topology, case.mbit)) as emulation:
        found = run_inside(emulation, measure, case, plan, steps, timeout_s=timeout_s * (steps + 2))
    rows = []
    for way in WAYS:
        # A step ends when the last rank has ended it.
        times = [max(run) for run in zip(*(each[way]["seconds"] for each in found), strict=True)]
        losses = {each[way]["loss"] for each in found}
        assert len(losses) == 1, f"ranks must see the same loss, got {losses}"
        rows.append(
            {
                "topology": topology.name,
                "replicas": "+".join(str(stage.replicas) for stage in plan.stages),
                "ranks": [list(stage.ranks) for stage in plan.stages],
                "microbatches": plan.microbatches,
                "order": plan.order,
                "gradient_bytes": max(each[way]["gradient_bytes"] for each in found),
                "mbit": case.mbit,
                "collectives": way,
                "time_us": statistics.median(times) * 1e6,
                "spread": (max(times) - min(times)) * 1e6,
                "runs": len(times),
                "last_loss": losses.pop(),
            }
        )
    for row in rows:
        row["times_faster_than_gloo"] = rows[-1]["time_us"] / row["time_us"]
    return rows


def plan_of(case: Case, topology: Topology) -> Plan:
    """Stages of equal layers with the asked replicas."""
    from arborcast.pipeline.planning.device_order import device_order
    from arborcast.pipeline.stages import Plan, divided

    order = device_order(topology)
    stages, start, rank = [], 0, 0
    for size, replicas in zip(divided(case.layers, len(case.replicas)), case.replicas, strict=True):
        stages.append((start, start + size, order[rank : rank + replicas]))
        start, rank = start + size, rank + replicas
    return Plan(stages, microbatches=case.microbatches, order="1f1b", topology=topology)


def measure(
    rank: int, address: str, store_path: str, case: Case, plan: Plan, steps: int
) -> dict[str, dict[str, Any]]:
    """What one rank saw of the steps of each way; the first of each is not counted."""
    import torch
    import torch.distributed as dist

    from arborcast.backends.tensors.torch_compat import FileStore

    os.environ |= {"ARBORCAST_TRANSPORT": "sockets", "ARBORCAST_START": "wait"}  # not memory that ranks share
    assert plan.topology is not None, "the plan is for an emulation"
    size = plan.topology.ranks
    dist.init_process_group("gloo", store=FileStore(store_path, size), rank=rank, world_size=size)
    torch.manual_seed(0)
    inputs = torch.randn(case.batch, case.width)
    targets = torch.randn(case.batch, case.width)
    trainers = {way: _trainer(case, plan, way) for way in WAYS}
    seconds, losses = in_turns({way: partial(trainers[way].step, inputs, targets) for way in WAYS}, steps)
    return {
        way: {
            "seconds": seconds[way],
            "loss": losses[way],
            "gradient_bytes": sum(it.nbytes for it in trainers[way].module.parameters()),
        }
        for way in WAYS
    }


def _trainer(case: Case, plan: Plan, way: str) -> Any:
    import torch
    from torch import nn

    from arborcast import pipeline

    torch.manual_seed(1)
    layers: Sequence[nn.Module] = [
        nn.Sequential(nn.Linear(case.width, case.width), nn.Tanh()) for _ in range(case.layers)
    ]
    return pipeline.Trainer(
        pipeline.Divisible(layers),
        plan,
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, 0.01),
        collectives=way,
        check_loss=False,
    )
