"""Data x pipeline x tensor parallel: stages that ranks share in ways of torch, equal to serial training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arborcast import topologies
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.model.traced import trace
from arborcast.pipeline.run.prepared_layers import column
from arborcast.pipeline.stages import Plan
from arborcast.pipeline.trainer import Trainer
from arborcast.synth.groups import along, solve_groups
from arborcast.synth.groups.group_folder import write_groups
from tests.support.ranks import run_ranks, store_path
from tests.support.training_cases import (
    CLASSES,
    FEATURES,
    Case,
    Curve,
    batches,
    by_layer,
    check_close,
    cross_entropy,
    decaying,
    momentum,
    said,
    serial,
    tied,
    values_of,
)

RANKS_IMPORT = ("torch._dynamo", "torch.distributed.tensor.parallel", "torch.distributed.fsdp")
GIVEN = batches(4, (13, 17, 13, 12))
MESH = 2, 2, 2  # pipeline, data, tensor


class Block(nn.Module):
    """What is split along columns, then along rows; the norm stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 8), nn.Linear(8, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(torch.tanh(self.up(self.norm(x)))))


def blocks() -> Divisible:
    torch.manual_seed(0)
    return Divisible(Block(), Block(), Block(), nn.Linear(FEATURES, CLASSES))


def tensor_parallel(stage: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in stage.modules():
        if isinstance(layer, Block):
            parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return stage


def fully_sharded(stage: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in stage.children():
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh["data"])
    return fully_shard(stage, mesh=mesh["data"])


def both(stage: nn.Module, mesh: Any) -> nn.Module:
    return fully_sharded(tensor_parallel(stage, mesh), mesh)


def on_a_mesh(order: str = "1f1b", **more: Any) -> Plan:
    return Plan([(0, 2, range(4)), (2, 4, range(4, 8))], 3, order, **more)


ENDS = range(4), range(4, 8)
IN_TURN = Plan([(at, at + 1, ENDS[at % 2]) for at in range(4)], 4, "interleaved")
SYNTH = {"collectives": "synth"}
CASES: dict[str, tuple[Case, Any, int, int]] = {
    # a case, who divides a stage, among how many ranks, into how many parts
    "tensor": (Case(on_a_mesh(), blocks, {"optimizer": decaying} | SYNTH), tensor_parallel, 2, 2),
    "tensor of four, float16": (
        Case(on_a_mesh("gpipe"), blocks, {"precision": "float16"}),
        tensor_parallel,
        4,
        4,
    ),
    "fully sharded": (Case(on_a_mesh(), blocks, {"accumulate": 2}), fully_sharded, 1, 4),
    "both, in turn": (Case(IN_TURN, blocks), both, 2, 4),
    "both": (Case(on_a_mesh(recompute=True), blocks, {"clip_norm": 0.1} | SYNTH), both, 2, 4),
}


def shared(rank: int, size: int, name: str) -> dict[str, Any]:
    """Half of the steps, then the rest from a checkpoint."""
    case, prepare, tensor_ranks, _ = CASES[name]
    options = {"collectives": "gloo", "prepare": prepare, "tensor_ranks": tensor_ranks, **case.options}
    make_optimizer, losses = options.pop("optimizer", momentum), list[float]()
    state, sizes, norm, served = {}, {}, None, {}
    folder = store_path().with_name("half")
    for half in (GIVEN[:2], GIVEN[2:]):
        with Trainer(blocks(), case.plan, cross_entropy, make_optimizer, **options) as trainer:
            if state:
                trainer.load(folder)
            for inputs, targets in half:
                mine = inputs if trainer.needs_inputs else None, targets if trainer.needs_targets else None
                losses.append(trainer.step(*mine))
            trainer.save(folder)
            state = trainer.state_dict()
            norm = trainer.gradient_norm
            sizes = {
                key: it.to_local().numel()
                for key, it in trainer.module.named_parameters()
                if hasattr(it, "to_local")
            }
            if options["collectives"] == "synth":
                mesh = trainer._groups.mesh
                served = {axis: mesh.get_group(axis).counters() for axis in ("data", "tensor")}
                served["words"] = mesh.get_group("tensor").explain(4096)
    return {"curve": Curve(losses, {}, values_of(state)), "sizes": sizes, "norm": norm, "served": served}


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and tensor groups of a mesh that share the ports of a switch."""
    fabric = topologies.load("star:8,bandwidth=6")
    kinds = [(1, "allreduce"), (2, "allreduce"), (1, "allgather"), (1, "reduce-scatter")]
    lines = [it for axis, kind in kinds for it in along(fabric, MESH, axis, kind)]
    folder = tmp_path_factory.mktemp("groups")
    write_groups(solve_groups(fabric, lines, relays=False), folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_stages_on_meshes_train_as_serially(name: str, groups: Path) -> None:
    case, _, _, shards = CASES[name]
    expected = case.expected(GIVEN)
    found = run_ranks(
        8, shared, name, environ={"ARBORCAST_GROUPS": str(groups)}, timeout_s=500, group_timeout_s=200
    )
    for each in found:
        check_close(each["curve"], expected, 1e-3 if "precision" in case.options else 1e-6)
    assert len({each["norm"] for each in found}) == 1
    for each in found:
        held = {size for key, size in each["sizes"].items() if key.endswith("up.weight")}
        assert held <= {8 * FEATURES // shards}
        assert held
        if each["served"]:
            by_data = {kind: calls["schedule"] for kind, calls in each["served"]["data"].items()}
            assert all(by_data.values())
            assert by_data.keys() >= ({"allgather", "reduce-scatter"} if name == "both" else {"allreduce"})
            assert each["served"]["tensor"]["allreduce"]["schedule"]
            assert "with 15 other groups" in each["served"]["words"]


def wrapped(stage: nn.Module, mesh: Any) -> nn.Module:
    return nn.Sequential(stage)


def one_left_out(stage: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(next(iter(stage.children())), mesh=mesh["data"])
    return stage


def refused(rank: int, size: int) -> tuple[list[str], list[float]]:
    """On a mesh of two replicas, each of two ranks."""

    def make(model: nn.Module, plan: Plan, **options: Any) -> Trainer:
        return Trainer(model, plan, cross_entropy, momentum, collectives="gloo", timeout_s=120.0, **options)

    one, two = Plan([(0, 4, (0, 1, 2, 3))], 2), Plan([(0, 2, (0, 1)), (2, 4, (2, 3))], 2)
    found = [said(lambda it=it: make(blocks(), one, prepare=it)) for it in (wrapped, one_left_out)]
    found.append(said(lambda: make(tied(), Plan([(0, 2, (0, 1)), (2, 5, (2, 3))], 2), prepare=fully_sharded)))
    found.append(said(lambda: make(blocks(), two, tensor_ranks=2)))
    found.append(said(lambda: make(blocks(), two, tensor_ranks=0, prepare=both)))
    found.append(said(lambda: make(blocks(), Plan([(0, 4, (0, 1, 2))], 2), tensor_ranks=2, prepare=both)))
    halves = Plan(two.stages, 2, "zb-h1")
    found.append(said(lambda: make(blocks(), halves, prepare=both)))
    found.append(said(lambda: make(blocks(), by_layer(two, "kr"), prepare=both)))
    descending = Plan([(0, 2, (1, 0)), (2, 4, (2, 3))], 2)
    found.append(said(lambda: make(blocks(), descending, prepare=both)))
    model = blocks()
    with_optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found.append(
        said(lambda: Trainer(model, two, cross_entropy, with_optimizer, prepare=both, tensor_ranks=2))
    )
    inputs, targets = GIVEN[0]
    with make(blocks(), two, prepare=tensor_parallel, tensor_ranks=2) as trainer:
        trainer.step(inputs, targets)
        next(iter(trainer.module.parameters())).requires_grad_(False)
        found.append(said(lambda: trainer.step(inputs[:12], targets[:12])))
    with make(blocks(), two, prepare=tensor_parallel, tensor_ranks=2) as trainer:
        found.append(said(lambda: trainer.step(inputs + (rank == 1), targets)))
    with make(trace(nn.Sequential(*blocks()), inputs, layers=4), one, prepare=fully_sharded) as trainer:
        losses = [trainer.step(*batch) for batch in GIVEN]
    return found, losses


@pytest.mark.long
def test_what_cannot_be_shared_is_refused_in_a_line() -> None:
    """And a traced model, which has parameters without modules, can be sharded fully."""
    expected = serial(blocks, GIVEN).losses
    for each, losses in run_ranks(4, refused, timeout_s=300):
        assert losses == pytest.approx(expected, abs=1e-6)
        lines = iter(each)
        assert (
            "prepare: must keep the names and shapes of parameters and buffers, got none for 0.down.bias"
            in next(lines)
        )
        assert "fully_shard must shard all 20 parameters of a stage or none, got 14 left out" in next(lines)
        assert "must not share layers whose parameters several stages use, got 0.weight" in next(lines)
        assert next(lines) == "InputError: prepare: must share layers among tensor_ranks 2, got none"
        assert next(lines) == "InputError: tensor_ranks: must be at least 1, got 0"
        assert "stage 0 must have a multiple of tensor_ranks 2 as ranks, got 3" in next(lines)
        assert next(lines) == "PlanError: plan: order must have whole backward passes for prepare, got zb-h1"
        assert "stage 0 must keep or recompute all results for prepare, got keep 1, recompute 1" in next(
            lines
        )
        assert next(lines) == "PlanError: plan: ranks of stage 0 must ascend for prepare, got 1, 0"
        assert "optimizer: must be a function of parameters where prepare makes new ones" in next(lines)
        assert "must stay frozen or trained as they were when they were divided, got a change of" in next(
            lines
        )
        assert next(lines).endswith("values on some of ranks 0, 1, 2, 3 of the first and the last stage")


def test_columns_of_a_plan() -> None:
    """0 1   2 3      Each rank exchanges with the one at its own place; the last rank has no work.
    4 5   6 7
    """
    plan = Plan([(0, 1, (0, 1, 4, 5)), (1, 2, (2, 3, 6, 7))], 2)
    for rank in (1, 3, 5, 7):
        assert [stage.ranks for stage in column(plan, 2, rank).stages] == [(1, 5), (3, 7)]
    for rank in (0, 2, 8):
        assert [stage.ranks for stage in column(plan, 2, rank).stages] == [(0, 4), (2, 6)]
    assert column(plan, 1, 3) == plan
    with pytest.raises(PlanError, match="stage 0 must have a multiple of tensor_ranks 3 as ranks, got 4"):
        column(plan, 3, 0)
