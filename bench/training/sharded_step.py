"""Steps of divided models on emulated links beside what their plans say: fixed layouts and the choice.

Layouts that come to the same plan are measured once. Plans of one stage run with the
schedules that priced them: groups of an axis, which share links, run what was made for all of them; groups of
several stages run schedules of their own. What collectives and messages between stages
take is simulated at the rates that the links delivered, with what a collective costs besides as measured;
what computing takes is a serial step of all ranks at once, which share the processors, times the part of it
that the plan gives each. Stages come together as the planner has it (`planning.joint`).
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborcast import topologies
from arborcast.bench.contest.rows import delivered_fabric
from arborcast.bench.emulation import network
from arborcast.bench.emulation.delivery import check_delivery, delivered
from arborcast.bench.emulation.plan import at_rates, plan_emulation
from arborcast.bench.emulation.processes import run_inside
from arborcast.bench.training.testbed_step import in_turns
from arborcast.pipeline.costs.devices import DeviceRates

if TYPE_CHECKING:
    from arborcast.pipeline.meshes import Mesh
    from arborcast.pipeline.model.traced.model import Traced
    from arborcast.pipeline.sharding.graph import Graph
    from arborcast.pipeline.sharding.setting import Setting
    from arborcast.pipeline.sharding.sharding_program import Sharding
    from arborcast.pipeline.stages import Plan
    from arborcast.synth.groups import GroupSchedules
    from arborcast.synth.topology import Topology

CHOSEN = "chosen"
LAYOUTS = (CHOSEN, "data-parallel", "megatron")
STAGED = {CHOSEN: "both levels", "one stage": "one stage", "data-parallel": "data-parallel"}
"""Layouts of cases with microbatches, and the ways of `choose_both` that they are."""

_CORE = DeviceRates("a core", {"float32": 6e10}, 12, 2**33, efficiency=1, memory_efficiency=1, launch_us=20)
"""About what a rank of the bench is: plans are chosen for it, and predictions divide measured time by it."""


@dataclass(frozen=True)
class Case:
    """A model on a topology.

    Attributes:
        spec: of the topology.
        model: one of `MODELS`.
        batch: samples of a step.
        ranks: the fragment; None for all.
        mbit: rate of the slowest link.
        microbatches: of a step; of several, stages are cut too.
    """

    spec: str
    model: str
    batch: int
    ranks: tuple[int, ...] | None = None
    mbit: int = 100
    microbatches: int = 1

    def topology(self) -> Topology:
        """At the rates of the emulation."""
        whole = topologies.load(self.spec)
        return at_rates(whole if self.ranks is None else whole.subset(self.ranks), self.mbit)


_TWO_BOXES = str(Path(topologies.__file__).parent / "examples" / "two-boxes.yaml")

CASES = (
    Case("dgx1", "mlp", 4096, (0, 1, 2, 3)),
    Case("dgx1", "mlp", 384, (0, 1, 2, 3)),
    Case("dgx1", "gpt-block", 48, (0, 1, 2, 3)),
    Case(_TWO_BOXES, "mlp", 768),
    Case(_TWO_BOXES, "gpt-block", 144),
    Case("dgx-a100:boxes=2", "gpt-2-blocks", 144, (0, 1, 8, 9), microbatches=8),
    Case("dgx1", "gpt-2-blocks", 144, (0, 1, 2, 3), microbatches=8),
)


def _mlp(batch: int) -> tuple[Any, Any, Any, Callable[..., Any]]:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(384, 1536), nn.GELU(), nn.Linear(1536, 384))
    return model, torch.randn(batch, 384), torch.randn(batch, 384), nn.functional.mse_loss


def _gpt(batch: int, blocks: int = 1) -> tuple[Any, Any, Any, Callable[..., Any]]:
    import torch
    from torch import Tensor, nn

    from arborcast.bench.training.sharded import Block

    def loss(scores: Tensor, following: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())

    inner = (Block(384, 12) for _ in range(blocks))
    model = nn.Sequential(nn.Embedding(768, 384), *inner, nn.LayerNorm(384), nn.Linear(384, 768))
    tokens = torch.randint(0, 768, (2, batch, 32))
    return model, tokens[0], tokens[1], loss


MODELS: Mapping[str, Callable[[int], tuple[Any, Any, Any, Callable[..., Any]]]] = {
    "mlp": _mlp,
    "gpt-block": _gpt,
    "gpt-2-blocks": partial(_gpt, blocks=2),
}
"""From samples to model, inputs, targets and loss."""


def _made(case: Case) -> tuple[Traced, Any, Any, Any, Callable[..., Any]]:
    """Alike in every process."""
    import torch

    from arborcast.pipeline import trace

    torch.manual_seed(0)
    model, inputs, targets, loss = MODELS[case.model](case.batch)
    return trace(model, (inputs, targets), loss, evaluation=False), model, inputs, targets, loss


@dataclass(frozen=True)
class LayoutPlan:
    """A layout of a model on the meshes where it is fastest.

    Attributes:
        layout: one of `LAYOUTS`, or of `STAGED`.
        sharding: what ranks do.
        total_us: of a step, planned.
        groups: schedules of axes.
    """

    layout: str
    sharding: Plan
    total_us: float
    groups: tuple[GroupSchedules, ...]

    @property
    def mesh(self) -> str:
        """Those of the stages."""
        return " + ".join(str(it.mesh) for it in self.sharding.stages)


def step_rows(case: Case, *, steps: int = 6, timeout_s: float = 120) -> list[dict[str, Any]]:
    """Predicted and measured time of a step by each layout, on the same links, in turns.

    A layout with the plan of an earlier one has that one's row, and its name as `same_plan`.

    Raises:
        InputError: the machine cannot emulate links, or the topology has too many vertices.
        EmulationError: a rank failed, or a link does not deliver its rate.
    """
    topology = case.topology()
    found = plans(case, topology)
    original = {it.layout: next(to.layout for to in found if to.sharding == it.sharding) for it in found}
    wiring = plan_emulation(topology, case.mbit)
    with network.emulate(wiring) as emulation:
        rates = delivered(emulation)
        check_delivery(wiring, rates, print)
        seen = run_inside(
            emulation,
            measure,
            case,
            topology,
            [it for it in found if original[it.layout] == it.layout],
            steps,
            timeout_s=timeout_s * steps,
        )
    fabric = delivered_fabric(topology, rates["alone"])
    serial_us = max(rank["serial"] for rank in seen) * 1e6
    each_us = statistics.median(max(run) for run in zip(*(rank["small"] for rank in seen), strict=True)) * 1e6
    rows: dict[str, dict[str, Any]] = {}
    graph = graph_of(case)
    for plan in found:
        if original[plan.layout] in rows:
            same = original[plan.layout]
            rows[plan.layout] = {**rows[same], "layout": plan.layout, "same_plan": same}
            continue
        runs = [max(run) for run in zip(*(rank[plan.layout]["seconds"] for rank in seen), strict=True)]
        losses = [rank[plan.layout]["loss"] for rank in seen]
        assert len(set(losses)) == 1, f"ranks must see the same loss, got {losses}"
        # Layouts cut sums in other places, and are rounded differently.
        chosen = rows[CHOSEN]["last_loss"] if rows else losses[0]
        assert math.isclose(losses[0], chosen, rel_tol=1e-5), f"layouts must agree, got {losses[0]}, {chosen}"
        calls = [rank[plan.layout]["calls"] for rank in seen]
        predicted_us, computing_us, collectives_us = predicted(
            plan.sharding, graph, fabric, serial_us, [count * each_us for count in calls]
        )
        time_us = statistics.median(runs) * 1e6
        rows[plan.layout] = {
            "topology": topology.name,
            "model": case.model,
            "batch": case.batch,
            "layout": plan.layout,
            "same_plan": None,
            "mesh": plan.mesh,
            "calls": max(calls),
            "mbit": case.mbit,
            "planned_us": plan.total_us,
            "collectives_us": collectives_us,
            "computing_us": computing_us,
            "each_us": each_us,
            "predicted_us": predicted_us,
            "time_us": time_us,
            "spread": (max(runs) - min(runs)) * 1e6,
            "runs": len(runs),
            "error": abs(predicted_us - time_us) / time_us,
            "last_loss": losses[0],
            "ratio": time_us / rows[CHOSEN]["time_us"] if rows else 1.0,
        }
    return list(rows.values())


def graph_of(case: Case) -> Graph:
    """The operators of a case, for a microbatch; with their layers where stages are cut."""
    from arborcast.pipeline.model.traced.operator_reader import operator_trace
    from arborcast.pipeline.sharding.graph import merged

    samples = case.batch // case.microbatches
    return merged(operator_trace(_made(case)[0], samples, by_layer=case.microbatches > 1))


def plans(case: Case, topology: Topology) -> list[LayoutPlan]:
    """The best of each layout over all meshes."""
    return _in_stages(case, topology) if case.microbatches > 1 else _of_one_stage(case, topology)


def _in_stages(case: Case, topology: Topology) -> list[LayoutPlan]:
    from arborcast.pipeline.planning.sharded_planning import choose_both

    choice = choose_both(graph_of(case), topology, _CORE, microbatches=case.microbatches)
    found = []
    for layout, name in STAGED.items():
        plan, priced = choice.plan_by(name), choice.ways[name].scheduled
        assert priced is not None, "it has a plan"
        groups: tuple[GroupSchedules, ...] = ()
        if len(plan.stages) == 1:
            stage, sharding = plan.stages[0], priced.stages[0].priced.sharding
            groups = _groups(sharding, topology, stage.mesh)
        found.append(LayoutPlan(layout, plan, priced.step_ps() / 1e6, groups))
    return found


def _of_one_stage(case: Case, topology: Topology) -> list[LayoutPlan]:
    from arborcast.pipeline.errors import PlanError
    from arborcast.pipeline.meshes import meshes
    from arborcast.pipeline.sharding.fabric_prices import FabricPrices
    from arborcast.pipeline.sharding.layouts import LAYOUTS as FIXED
    from arborcast.pipeline.sharding.plan_strategies import stage_sharding
    from arborcast.pipeline.sharding.setting import Setting
    from arborcast.pipeline.sharding.sharding_program import shard
    from arborcast.pipeline.stages import Plan, Stage

    graph = graph_of(case)
    tried = [FabricPrices(topology, mesh, by_schedule=True) for mesh in meshes(range(topology.ranks))]
    found = []
    for layout in LAYOUTS:
        best: tuple[Sharding, Mesh] | None = None
        for prices in tried:
            allowed = None if layout == CHOSEN else FIXED[layout](prices.mesh.shape)
            try:
                sharding = shard(graph, Setting(prices, _CORE), allowed=allowed)
            except PlanError:
                continue  # this layout has no links on this mesh
            if best is None or sharding.total_ps < best[0].total_ps:
                best = sharding, prices.mesh
        assert best is not None, "every layout has the mesh of one axis"
        sharding, mesh = best
        stage = Stage.divided(0, 1, stage_sharding(graph, sharding.chosen, mesh))
        value = Plan([stage], 1, topology=topology, model=graph.name, batch=case.batch)
        found.append(LayoutPlan(layout, value, sharding.total_ps / 1e6, _groups(sharding, topology, mesh)))
    return found


def _groups(sharding: Sharding, topology: Topology, mesh: Mesh) -> tuple[GroupSchedules, ...]:
    """What the groups of its axes run at once."""
    from arborcast.pipeline.sharding.evaluation import calls
    from arborcast.pipeline.sharding.fabric_prices import FabricPrices
    from arborcast.pipeline.sharding.setting import Setting

    prices = FabricPrices(topology, mesh, by_schedule=True)
    needed = calls(sharding.graph, sharding.chosen, Setting(prices, _CORE))
    return prices.schedules(sorted({(it.kind, it.axes) for it in needed}))


def predicted(
    plan: Plan, graph: Graph, fabric: Topology, serial_us: float, besides_us: Sequence[float]
) -> tuple[float, float, float]:
    """What a step takes on links of other rates, and of that computing and collectives of the longest stage.

    Args:
        plan: of the step.
        graph: of the model.
        fabric: the links.
        serial_us: of a step of the undivided model.
        besides_us: by rank, what its collectives cost besides.
    """
    from arborcast.pipeline.meshes import Mesh
    from arborcast.pipeline.planning.sharded_planning import priced_plan
    from arborcast.pipeline.sharding.fabric_prices import FabricPrices
    from arborcast.pipeline.sharding.setting import Setting
    from arborcast.pipeline.sharding.sharding_program import shard

    whole = shard(graph, Setting(FabricPrices(fabric, Mesh((), (0,))), _CORE)).cost
    joint, parts = priced_plan(plan, graph, fabric, _CORE), []
    for stage in joint.stages:
        sharding, setting = stage.priced.sharding, stage.priced.setting
        cost, count = sharding.cost, joint.microbatches
        moved = count * (cost.communication_ps + stage.crossing_ps) + cost.step_ps
        collectives_us = (moved - _updates(sharding, setting)) / 1e6
        parts.append(
            (serial_us * cost.compute_ps / whole.compute_ps, collectives_us, besides_us[stage.ranks[0]])
        )
    longest = max(parts, key=sum)
    return joint.step_ps([round(sum(it) * 1e6) for it in parts]) / 1e6, *longest[:2]


def _updates(sharding: Sharding, setting: Setting) -> int:
    """Picoseconds of updates, which are in the serial step too."""
    from arborcast.pipeline.sharding.specs import local_bytes

    return sum(
        setting.update_ps(local_bytes(it.given.size_bytes, way.update, setting.sizes))
        for it, way in zip(sharding.graph.operators, sharding.chosen, strict=True)
        if way is not None and way.update is not None and it.given is not None
    )


def _serial_s(case: Case, runs: int = 5) -> float:
    """Seconds of a step of the undivided model."""
    import torch

    _, model, inputs, targets, loss = _made(case)
    optimizer, seconds = torch.optim.SGD(model.parameters(), 0.01), []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def measure(
    rank: int,
    address: str,
    store_path: str,
    case: Case,
    topology: Topology,
    found: Sequence[LayoutPlan],
    steps: int,
) -> dict[str, Any]:
    """What one rank saw of the steps of each layout; the first of each is not counted."""
    import torch
    import torch.distributed as dist

    from arborcast import pipeline
    from arborcast.backends.tensors.torch_compat import FileStore

    os.environ |= {"ARBORCAST_TRANSPORT": "sockets", "ARBORCAST_START": "wait"}  # not memory that ranks share
    size = topology.ranks
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store_path, size), rank=rank, world_size=size)
    traced, _, inputs, targets, _ = _made(case)
    trainers = {
        plan.layout: pipeline.Trainer(
            traced,
            plan.sharding,
            None,
            lambda parameters: torch.optim.SGD(parameters, 0.01),
            groups=plan.groups,
            timeout_s=300,
        )
        for plan in found
    }
    seconds, losses = in_turns({it: partial(trainers[it].step, inputs, targets) for it in trainers}, steps)
    dist.barrier()
    serial = _serial_s(case)  # on all ranks at once, which share the processors
    small = []
    alone = next(it for it in found if len(it.sharding.stages) == 1)  # on all ranks
    line = trainers[alone.layout].line(alone.sharding.stages[0].mesh.ways[-1])
    for _ in range(20):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(torch.zeros(256), group=line)
        small.append(time.perf_counter() - begin)
    dist.barrier()
    return {
        "small": small,
        "serial": serial,
        **{
            layout: {
                "seconds": seconds[layout],
                "loss": losses[layout],
                "calls": sum(it.per_microbatch * case.microbatches + it.per_step for it in trainer.calls),
            }
            for layout, trainer in trainers.items()
        },
    }
