"""What a divided stage does on its rank, without processes: changes in place, random numbers, bad indices."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.meshes import Mesh
from arborcast.pipeline.model.traced import Traced, trace
from arborcast.pipeline.model.traced.means import why_no_mean
from arborcast.pipeline.model.traced.operator_reader import kind_of, operator_trace
from arborcast.pipeline.operators import Operand, Primitive
from arborcast.pipeline.run.intra.divided_operators import AGREEING, Division, run
from arborcast.pipeline.run.intra.divided_stage import DividedStage, undivided
from arborcast.pipeline.run.intra.mesh_collectives import MeshCollectives
from arborcast.pipeline.run.intra.slice_messages import CrossingTensor, slices_of
from arborcast.pipeline.run.stage_messages import BoundaryMessages
from arborcast.pipeline.sharding import graph
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.pipeline.sharding.graph import merged
from arborcast.pipeline.sharding.layouts import data_parallel
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.sharding_program import shard
from tests.sharding.examples import UNIT, ring


class Alone(MeshCollectives):
    """Of a rank without others: sums are its own."""

    def __init__(self, mesh: Mesh, place: int) -> None:
        self.mesh, self.lines = mesh, {}
        self.coordinates = (place,) if mesh.shape else ()

    def allreduce(self, tensor: Tensor, axes: Any, op: str = "sum") -> Tensor:
        return tensor


class Layer(nn.Module):
    """A linear layer, and what is done with its result and its input."""

    count: Tensor

    def __init__(self, then: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.norm, self.then = nn.Linear(8, 8), nn.BatchNorm1d(8), then
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.linear(x), x)


def stages(model: nn.Module, x: Tensor, ranks: int = 1) -> list[DividedStage]:
    """Of each rank, by data parallelism; instead of a loss they give what the model makes."""
    return divided_stages(trace(model, x, evaluation=False), x.size(0), ranks)


def divided_stages(traced: Traced, samples: int, ranks: int = 1, microbatches: int = 1) -> list[DividedStage]:
    """Of each rank, by data parallelism."""
    operators = operator_trace(traced, samples)
    whole = merged(operators)
    mesh = Mesh((ranks,) if ranks > 1 else (), tuple(range(ranks)))
    setting = Setting(FabricPrices(ring(max(ranks, 2)), mesh), UNIT, microbatches)
    chosen = shard(whole, setting, allowed=data_parallel(setting.sizes)).chosen
    made = [
        DividedStage(
            traced,
            operators,
            whole,
            chosen,
            setting,
            Alone(mesh, rank),
            values={},
            rest=undivided(traced, operators),
        )
        for rank in range(ranks)
    ]
    for stage in made:
        stage.distribute(None)
    return made


SAMPLES = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def column(self: Any, y: Tensor, x: Tensor) -> Tensor:
    y[:, 0] = 0
    return y


def view(self: Any, y: Tensor, x: Tensor) -> Tensor:
    y.view(-1).mul_(3)
    return y + 1


def before(self: Any, y: Tensor, x: Tensor) -> Tensor:
    first = y[:, :4]
    return torch.cat([y.mul_(3)[:, 4:], first], 1)


def seen(self: Any, y: Tensor, x: Tensor) -> Tensor:
    mask = torch.zeros(8)
    none = y * mask
    mask[2:4] = 1
    return y * mask + none


def filled(self: Any, y: Tensor, x: Tensor) -> Tensor:
    whole = torch.zeros(x.size(0), 8)
    whole[:, :4] = y[:, :4]
    return whole * x


def counted(self: Any, y: Tensor, x: Tensor) -> Tensor:
    return y * self.count.add_(1)


def given(self: Any, y: Tensor, x: Tensor) -> Tensor:
    return y + x.mul_(2)


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (seen, "fill_: cannot .* slice_. in place, whose memory mul_. reads afterwards as zeros$"),
        (column, "fill_: cannot be run on parts, as it changes select in place, whose memory .* as linear$"),
        (view, "mul_: cannot .* view in place, whose memory add reads afterwards as linear$"),
        (before, "mul_: cannot .* linear in place, whose memory cat reads afterwards as slice_.$"),
        (filled, "copy_: cannot .* in place, whose memory mul reads afterwards as zeros$"),
        (counted, "add_: cannot .* in place, which belongs to the model or its inputs and add_ reads"),
        (given, "mul_: cannot .* in place, which belongs to the model or its inputs and"),
    ],
)
def test_changes_in_place_that_others_would_see_are_refused(then: Callable[..., Tensor], said: str) -> None:
    with pytest.raises(PlanError, match=f"^operator {said}"):
        stages(Layer(then), SAMPLES)


def rectified(self: Any, y: Tensor, x: Tensor) -> Tensor:
    return functional.relu(self.norm(y), inplace=True).mul_(2) * x


def constants(self: Any, y: Tensor, x: Tensor) -> Tensor:
    ones = torch.ones(8)
    twice = ones * 2
    return y * (ones.add_(4) + twice) + torch.tensor(3.0)  # 7, though twice is asked for last


def mask(self: Any, y: Tensor, x: Tensor) -> Tensor:
    mask = torch.zeros(8)
    mask[2:4] = 1
    mask[3] = 2
    return y * mask[:] + mask[3]


def one_of_two(self: Any, y: Tensor, x: Tensor) -> Tensor:
    values, order = y.topk(8)
    return values.div_(2) + order


@pytest.mark.parametrize("then", [rectified, constants, mask, one_of_two])
def test_changes_in_place_that_nobody_else_sees_are_made(then: Callable[..., Tensor]) -> None:
    model = Layer(then)
    (stage,) = stages(model, SAMPLES)
    for turn in range(2):
        torch.testing.assert_close(stage.forward([SAMPLES], {}, turn=turn)[1], model(SAMPLES))


def test_what_is_made_of_buffers_follows_their_new_values() -> None:
    model = Layer(lambda self, y, x: y * torch.exp(self.count))
    (stage,) = stages(model, SAMPLES)
    torch.testing.assert_close(stage.forward([SAMPLES], {})[1], model(SAMPLES))
    model.count.fill_(1)
    stage.rest["count"].copy_(model.count)
    stage.spread_updates()  # as after loading
    torch.testing.assert_close(stage.forward([SAMPLES], {})[1], model(SAMPLES))


def cross(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(logits, target.abs().long() % 8, **options)


def at_risk(y: Tensor, t: Tensor) -> Tensor:
    mask = (t > 0).float()
    return ((y - t) ** 2 * mask).sum() / mask.sum()


mse = functional.mse_loss
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "mean": (mse, ""),
    "by hand": (lambda y, t: ((y - t) ** 2).mean(0).sum() / 8, ""),
    "sum over count": (lambda y, t: (y - t).abs().sum() / y.size(0), ""),
    "counting targets": (lambda y, t: cross(y, t[:, 0], ignore_index=0), ""),
    "of both": (lambda y, t: 2 * y.square().mean() + cross(y, t[:, 0]) / 3 + 1, ""),
    "sum": (lambda y, t: mse(y, t, reduction="sum"), "it is the sum of theirs"),
    "sum of rows": (lambda y, t: cross(y, t[:, 0], reduction="none").sum() / 4, "it is the sum of theirs"),
    "masked": (at_risk, "aten.div.Tensor is not linear in the sums"),
    "product": (lambda y, t: y.mean() * t.mean(), "aten.mul.Tensor is not linear in the means"),
    "sum and mean": (
        lambda y, t: y.sum() + t.mean(),
        "aten.add.Tensor is neither a mean over samples nor linear in such means",
    ),
    "weighed by count": (lambda y, t: (y * y.size(0)).mean(), "computes with the number of samples"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_the_mean_of_their_microbatches(name: str) -> None:
    """What the graph says, and what microbatches give."""
    loss, said = LOSSES[name]
    targets = SAMPLES.flip(0)
    captured = trace(nn.Linear(8, 8), (SAMPLES, targets), loss, evaluation=False).training.captured
    found = why_no_mean(captured, lambda node: kind_of(node) in AGREEING)
    assert bool(found) == bool(said)
    assert re.search(said, found)
    assert why_no_mean(captured, lambda node: False) if name == "counting targets" else True
    parts = [loss(y, t) for y, t in zip(SAMPLES.chunk(2), targets.chunk(2), strict=True)]
    if name != "counting targets":
        assert torch.isclose(sum(parts) / 2, loss(SAMPLES, targets)) == (not said)


class Wrong(nn.Module):
    """Replaces some labels, which then are not counted, by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        kept = torch.rand_like(x[:, 0]) < 0.5
        return functional.cross_entropy(self.linear(x), target.masked_fill(kept, -100))


def test_targets_known_only_in_a_pass_cannot_weigh_microbatches() -> None:
    target = torch.arange(4)
    traced = trace(Wrong(), (SAMPLES, target), evaluation=False)
    said = (
        "^operator cross_entropy_loss: must have 1 microbatch, as its target .* numbers of rand_like, got 2$"
    )
    with pytest.raises(PlanError, match=said):
        divided_stages(traced, 2, microbatches=2)
    (stage,) = divided_stages(traced, 4)
    stage.begin((SAMPLES, target))
    rows = functional.cross_entropy(stage_linear(stage, SAMPLES), target, reduction="none")
    loss = stage.forward([SAMPLES, target], {})[1]
    means = [rows[[at for at in range(4) if which >> at & 1]].mean() for which in range(1, 16)]
    assert any(torch.isclose(loss, it) for it in means)  # of those that count in this very pass


def stage_linear(stage: DividedStage, x: Tensor) -> Tensor:
    state = stage.module.state_dict()
    return functional.linear(x, state["linear.weight"], state["linear.bias"])


def test_gradients_scaled_by_how_often_tokens_come_are_of_all_tokens() -> None:
    tokens = torch.tensor([[1, 1], [1, 2], [3, 1], [0, 0]])
    traced = trace(nn.Embedding(8, 4, scale_grad_by_freq=True), tokens, evaluation=False)
    for ranks, microbatches in ((2, 1), (1, 2)):
        got = f"got {ranks} parts and {microbatches} microbatches$"
        with pytest.raises(PlanError, match=rf"^operator embedding \(embedding\): must be whole .*, {got}"):
            divided_stages(traced, 4 // microbatches, ranks, microbatches)
    divided_stages(traced, 4)


def stochastic_depth(self: Any, y: Tensor, x: Tensor) -> Tensor:
    noise = torch.empty(x.size(0), 1).bernoulli_(0.5)
    return y * noise.div_(0.5)


def dropout(self: Any, y: Tensor, x: Tensor) -> Tensor:
    return functional.dropout(y)


@pytest.mark.parametrize("then", [stochastic_depth, dropout])
def test_random_numbers_are_others_for_each_turn_and_rank(then: Callable[..., Tensor]) -> None:
    """Whatever generators the ranks have, and the same for a turn that comes again."""
    x = torch.ones(64, 8)
    model = Layer(then)
    turns = [0, 1, 2, 0]
    whole, *halves = (
        [stage.forward([x], {}, turn=turn)[1] for turn in turns]
        for stage in (*stages(model, x), *stages(model, x, 2))
    )
    for first, second, third, again in (whole, *halves):
        assert torch.equal(first, again)
        assert not (torch.equal(first, second) or torch.equal(first, third) or torch.equal(second, third))
    assert not torch.equal(halves[0][0], halves[1][0])
    joined = torch.cat([halves[0][0], halves[1][0]])
    # what depends on sizes alone is drawn whole, so that divisions change nothing
    assert torch.equal(joined, whole[0]) == (then is stochastic_depth)
    kept = (joined != 0).float().mean().item()
    assert 0.25 < kept < 0.75
    torch.testing.assert_close(joined, (joined != 0) * 2 * model.linear(x))


def divided(kind: str, rank: int, *shape: int) -> Division:
    """Of rows or classes over two ranks."""
    primitive = Primitive(kind, kind, (), Operand(kind, (), shape, 0, False), {"v": 8}, frozenset())
    return Division(primitive, {"v": 0}, (0,), shape, Alone(Mesh((2,), (0, 1)), rank))


def looked_up(indices: Tensor, ranks: Sequence[int] = (0, 1)) -> list[Tensor]:
    """The rows of each rank."""
    table = torch.arange(1.0, 9).view(8, 1)
    return [
        run(
            torch.ops.aten.embedding.default,
            {"weight": table.chunk(2)[rank], "indices": indices},
            divided("embedding", rank, 3, 1),
        )
        for rank in ranks
    ]


def test_tokens_and_targets_that_no_rank_has_are_refused_by_all_alike() -> None:
    assert sum(looked_up(torch.tensor([0, 7, 3]))).flatten().tolist() == [1, 8, 4]  # type: ignore[union-attr]
    for rank in range(2):
        for wrong in (8, -1):
            with pytest.raises(IndexError, match=f"index must be at least 0 and below 8, got {wrong}$"):
                looked_up(torch.tensor([0, wrong, 3]), [rank])
        division = divided("cross_entropy_loss", rank, 3)
        for wrong in (8, -1, -100):
            given = {"self": torch.zeros(3, 4), "target": torch.tensor([0, wrong, 3]), "reduction": 0}
            if wrong == -100:  # is ignored
                assert run(None, given, division)[1] == 0
                continue
            with pytest.raises(IndexError, match=f"target must be at least 0 and below 8, got {wrong}$"):
                run(None, given, division)


TYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn),
)


def test_values_of_every_type_cross_together() -> None:
    """What one rank sends is what the other one finds, in the type that it was sent in."""
    sent: dict[tuple[int, int], Tensor] = {}

    class Links:
        device = torch.device("cpu")

        def send(self, tensor: Tensor, peer: int, tag: int, **_: Any) -> Any:
            sent[peer, tag] = tensor.clone()
            return Done()

        def receive(self, tensor: Tensor, peer: int, tag: int, **_: Any) -> Any:
            tensor.copy_(sent[1, tag])
            return Done()

    class Done:
        def wait(self) -> None:
            return

    values = [(torch.arange(4) % 2).to(it) for it in TYPES]
    crossing = [
        CrossingTensor(graph.Tensor(str(number), (None,), (4,), 4 * it.element_size()), it.dtype, False)
        for number, it in enumerate(values)
    ]
    ends = Mesh((), (0,)), Mesh((), (1,))
    front, behind = (
        BoundaryMessages(
            "stage",
            [it.spec for it in crossing],
            slices_of([it.tensor for it in crossing], *ends, rank),
            Links(),  # type: ignore[arg-type]
            lambda *at: hash(at),
        )
        for rank in range(2)
    )
    front.send(0, values, back=False)
    behind.receive(0, back=False)
    for value, found in zip(values, behind.arrived(0, back=False), strict=True):
        assert (
            found is not None
            and found.dtype == value.dtype
            and torch.equal(found.view(torch.uint8), value.view(torch.uint8))
        )
