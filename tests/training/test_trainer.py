"""Training by a plan, in real processes: equal to serial training, whatever the plan."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from arborcast import topologies
from arborcast.pipeline.errors import BatchError
from arborcast.pipeline.model.traced import trace
from arborcast.pipeline.run import boundary, executor, gradients
from arborcast.pipeline.stages import Plan, overlaps, shares
from arborcast.pipeline.trainer import Trainer
from arborcast.synth.errors import InputError
from tests.support.ranks import run_ranks, store_path
from tests.support.traced_models import Language
from tests.support.training_cases import (
    LAYERS,
    Case,
    Curve,
    Unmodified,
    around,
    aside,
    batches,
    branching,
    by_layer,
    check_close,
    cross_entropy,
    curve_of,
    decaying,
    frozen,
    merged,
    momentum,
    network,
    normalised,
    plan_of,
    serial,
    stopped,
    tied,
    trained,
)

RANKS_IMPORT = ("torch._dynamo", "torch.export._trace")

FABRIC = {"ARBORCAST_TOPOLOGY": "full:4", "ARBORCAST_METHOD": "trees", "ARBORCAST_GLOO_BELOW": "0"}
"""Gradients of a few bytes go by schedules too."""


# Plans, models and options ---------------------------------------------------------------------------

UNMODIFIED = 7  # layers that it is traced as
SYNTH = {"collectives": "synth"}


def summed(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target, reduction="sum")


FEW = {
    "replicas only, summed": Case(
        plan_of([4], "gpipe", microbatches=1), network, {"loss_fn": summed, "loss_reduction": "sum"}
    ),
    "four stages, capped, bfloat16": Case(
        plan_of([1, 1, 1, 1], "pe", microbatches=5, max_in_flight=2), network, {"precision": "bfloat16"}
    ),
    "1-2-1 list order, accumulated": Case(plan_of([1, 2, 1], "pe"), network, {"accumulate": 2} | SYNTH),
    "2-1-1, frozen": Case(plan_of([2, 1, 1]), frozen, SYNTH),
    "1-3, clipped": Case(plan_of([1, 3], microbatches=2), network, {"clip_norm": 0.1}),
    "1-2-1, by layer": Case(by_layer(plan_of([1, 2, 1]), "rko"), network, SYNTH),
    "branching, recomputed": Case(plan_of([2, 1, 1], "pe", depth=4, recompute=True), branching),
    "branching, in turn": Case(around([2, 1], "interleaved", depth=4), branching),
    "in turn on four, ragged, float16": Case(
        around([1, 1, 1, 1], "interleaved", depth=LAYERS, microbatches=5), network, {"precision": "float16"}
    ),
    "normalised, split": Case(plan_of([1, 2, 1], "zb-h1", depth=5), normalised, SYNTH),
    "normalised, deferred": Case(
        around([2, 2], "zb-v", depth=5), normalised, {"batch_norm": "deferred", "accumulate": 2}
    ),
    "unused, split": Case(plan_of([1, 2, 1], "zb-h1", depth=3), aside, {"optimizer": decaying}),
    "stopped, V": Case(around([2, 2], "zb-v", depth=5), stopped, {"optimizer": decaying}),
    "unmodified, V": Case(around([2, 1], "zb-v", depth=UNMODIFIED), Unmodified),
    "V on one rank, float16": Case(around([1], "zb-v", depth=LAYERS), network, {"precision": "float16"}),
    "tied, clipped": Case(plan_of([1, 2, 1], depth=5), tied, {"clip_norm": 0.1}),
    "ranks in any order": Case(Plan([(0, 3, (3,)), (3, 5, (2, 0)), (5, LAYERS, (1,))], 3, "1f1b")),
}
"""Each order, each way to treat results, replicas at each place, each model, each option."""

OTHERS = {
    "two stages": Case(plan_of([1, 1], "gpipe", first=1)),
    "in turn, replicas, recomputed": Case(
        around([2, 1], "interleaved", depth=LAYERS, each=3, recompute=True), network, SYNTH
    ),
    "normalised, by layer": Case(by_layer(plan_of([1, 2], depth=5), "r+ok"), normalised),
    "V, uneven replicas": Case(around([1, 2, 1], "zb-v", depth=LAYERS, microbatches=2)),
    "tied on one rank": Case(around([2, 1], "zb-v", depth=5), tied, {"clip_norm": 0.1}),
    "in turn, by layer, clipped": Case(
        by_layer(around([1, 1], "interleaved", depth=LAYERS), "or+ko"), network, {"clip_norm": 0.1}
    ),
    "one rank": Case(plan_of([1], first=2)),
    "three stages": Case(plan_of([1, 1, 1], "pe")),
    "1-1-2, recomputed": Case(plan_of([1, 1, 2], "gpipe", recompute=True)),
    "2-2": Case(plan_of([2, 2], "pe")),
    "split": Case(plan_of([1, 1, 1, 1], "zb-h1", microbatches=5)),
    "V": Case(around([1, 1, 1], "zb-v", depth=LAYERS), network, {"accumulate": 2}),
    "unmodified": Case(plan_of([1, 2, 1], depth=UNMODIFIED), Unmodified),
    "unmodified, by layer": Case(by_layer(plan_of([1, 2], depth=UNMODIFIED), "or+k"), Unmodified),
    "unmodified, split": Case(plan_of([1, 2, 1], "zb-h1", depth=UNMODIFIED), Unmodified),
    "branching, by layer": Case(by_layer(plan_of([2, 1], depth=4), "ok"), branching),
    "branching, V": Case(around([1, 2], "zb-v", depth=4), branching),
    "frozen, V": Case(around([1, 1], "zb-v", depth=LAYERS), frozen),
    "normalised, recomputed": Case(plan_of([1, 2, 1], "gpipe", depth=5, recompute=True), normalised, SYNTH),
    "normalised, in turn": Case(around([2, 2], "interleaved", depth=5, recompute=True), normalised),
    "tied, by layer": Case(by_layer(plan_of([1], depth=5), "rok"), tied),
    "tied, split": Case(plan_of([1, 2, 1], "zb-h1", depth=5), tied),
    "stopped": Case(plan_of([2, 1, 1], depth=5), stopped, {"optimizer": decaying}),
    "clipped, split": Case(plan_of([1, 2, 1], "zb-h1"), network, {"clip_norm": 0.1}),
}


def by_cases(rank: int, size: int, cases: Mapping[str, Case]) -> dict[str, Curve]:
    return {name: trained(it.plan, it.make, batches(4), **it.options) for name, it in cases.items()}


@pytest.mark.parametrize("cases", [FEW, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["few", "others"])
def test_any_plan_trains_any_model_as_serially(cases: Mapping[str, Case]) -> None:
    """Losses of steps with 13 or 7 samples, and gradients; ranks outside a plan hear of losses too."""
    found = run_ranks(4, by_cases, cases, environ=FABRIC, timeout_s=280)
    for name, case in cases.items():
        curve, expected = merged([curves[name] for curves in found]), case.expected(batches(4))
        if "batch_norm" in case.options:  # statistics are others, losses before and after an update are not
            np.testing.assert_allclose(curve.losses, expected.losses, atol=1e-6, rtol=0, err_msg=name)
            continue
        check_close(curve, expected, tolerance=1e-5 if "summed" in name else 1e-6)  # losses of about 18
        if case.make in (network, frozen):
            assert curve.gradients.keys() == expected.gradients.keys(), name


def language() -> nn.Module:
    """Two inputs, weights tied between both ends; without dropout, whose draws differ from rank to rank."""
    torch.manual_seed(0)
    model = Language()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def sentences() -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(size, 5) for size in (9, 6, 9, 6)]
    return [
        (
            (torch.randint(0, 11, shape, generator=generator), torch.rand(shape, generator=generator)),
            torch.randn((*shape, 11), generator=generator),
        )
        for shape in shapes
    ]


def trained_on_sentences(rank: int, size: int) -> list[float]:
    traced = trace(language(), sentences()[0][0])
    plan = plan_of([1, 1, 2], depth=traced.depth, microbatches=2)
    with Trainer(traced, plan, nn.functional.mse_loss, momentum, collectives="gloo") as trainer:
        return [trainer.step(*batch) for batch in sentences()]


@pytest.mark.long
def test_a_model_of_two_inputs_trains_as_serially() -> None:
    model = language()
    optimizer = momentum(model.parameters())
    losses = []
    for inputs, targets in sentences():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(*inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found in run_ranks(4, trained_on_sentences, environ=FABRIC):
        np.testing.assert_allclose(found, losses, atol=1e-6, rtol=0)


# Messages ------------------------------------------------------------------------------------------

CALLS = ("isend", "irecv", "send", "recv", "all_reduce", "broadcast", "all_gather_into_tensor", "barrier")


def counted_calls(rank: int, size: int) -> dict[str, Any]:
    """What a step on known shapes asks of torch.distributed, and what it counts itself."""
    seen: Counter[str] = Counter()

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            seen[name] += 1
            return call(*arguments, **named)

        return counted

    with Trainer(network(), plan_of([1, 2, 1]), cross_entropy, momentum, collectives="gloo") as trainer:
        inputs, targets = batches(1)[0]
        trainer.step(inputs, targets)
        before = vars(trainer.messages).copy()
        originals = {name: getattr(dist, name) for name in CALLS}
        store = dist.distributed_c10d._get_default_store()
        for name, call in originals.items():
            setattr(dist, name, counting(name, call))
        keys = store.num_keys()
        trainer.step(inputs, targets)
        assert store.num_keys() == keys
        for name, call in originals.items():
            setattr(dist, name, call)
        dist.barrier()  # who closes its trainer says so in the store
        after = vars(trainer.messages)
    return {"calls": dict(seen), "messages": {name: after[name] - before[name] for name in after}}


def test_one_message_per_transfer_and_none_else() -> None:
    """13 samples in microbatches of 5, 4 and 4, each of 8 floats per sample at both boundaries.

    Rank 0 sends 3 and 2, 2 and 2, 2 and 2 samples to ranks 1 and 2, which send as many to rank 3.
    """
    sizes = (5, 4, 4)
    per_rank: list[dict[str, int]] = []
    for replica in (None, 0, 1, None):
        parts = [shares(size, 2) if replica is None else (shares(size, 2)[replica],) * 2 for size in sizes]
        moved = [stop - start for part in parts for start, stop in part]
        # An end sends outputs (or gradients) only, the middle sends both.
        per_rank.append({"messages": len(moved), "bytes": sum(moved) * 8 * 4})
    assert [it["messages"] for it in per_rank] == [6, 6, 6, 6]
    assert sum(len(overlaps(size, 1, 2)) for size in sizes) == 6
    for rank, found in enumerate(run_ranks(4, counted_calls)):
        expected = per_rank[rank]
        assert found["messages"] == {
            "sent": expected["messages"],
            "received": expected["messages"],
            "sent_bytes": expected["bytes"],
            "received_bytes": expected["bytes"],
        }, rank
        # The losses on all ranks, the gradients of the replicas; nothing tells shapes.
        allreduces = 2 if rank in (1, 2) else 1
        assert found["calls"] == {"isend": 6, "irecv": 6, "all_reduce": allreduces}, rank


# What else a trainer does --------------------------------------------------------------------------


def continued(rank: int, size: int) -> Curve:
    """From three stages to a V with split backward passes, to stages in turn: two steps by each."""
    given, losses = batches(6), list[float]()
    plans = plan_of([1, 1, 1]), around([1, 2], "zb-v", depth=LAYERS)
    for plan in (*plans, around([2, 1], "interleaved", depth=LAYERS)):
        with Trainer(network(len(losses)), plan, cross_entropy, momentum, collectives="gloo") as trainer:
            if losses:
                trainer.load(folder("continued"))
            losses += [trainer.step(*batch) for batch in given[len(losses) :][:2]]
            trainer.save(folder("continued"))
            curve = curve_of(trainer, losses)
    return curve


def folder(name: str) -> Path:
    """Of a checkpoint, the same on all ranks."""
    return store_path().with_name(name)


def evaluated(rank: int, size: int) -> list[tuple[float, float, bool]]:
    """Evaluation in the middle of an accumulation changes nothing, also on ranks with several stages."""
    several = [around([2, 1], order, depth=5) for order in ("zb-v", "interleaved")]
    return [evaluated_by(plan) for plan in (plan_of([1, 2, 1], depth=5), *several)]


def evaluated_by(plan: Plan) -> tuple[float, float, bool]:
    inputs, targets = batches(1)[0]
    model = normalised()
    with Trainer(model, plan, cross_entropy, momentum, collectives="gloo", accumulate=2) as trainer:
        trainer.step(inputs, targets)
        before = trainer.state_dict()
        gradients = [it.grad.clone() for it in trainer.module.parameters() if it.grad is not None]
        loss = trainer.evaluate(inputs, targets)
        after = trainer.state_dict()
        kept = all(torch.equal(before[name], after[name]) for name in before) and all(
            torch.equal(old, new.grad)
            for old, new in zip(gradients, trainer.module.parameters(), strict=False)
            if new.grad is not None
        )
        assert all(layer.training for layer in trainer.module.modules())
    whole = normalised()
    whole.load_state_dict(after)
    with torch.no_grad():
        return loss, cross_entropy(whole.eval()(inputs), targets).item(), kept


def in_many_shapes(rank: int, size: int) -> list[tuple[Curve, int]]:
    """More shapes than are kept, and than there are tags for without using them again; in buckets."""
    for module in (executor, boundary):
        vars(module)["KEPT_SHAPES"] = 2
    vars(gradients)["BUCKET_BYTES"] = 128
    given, found = batches(len(MANY), MANY), []
    for order, collectives in (("zb-h1", "gloo"), ("1f1b", "synth")):
        plan = plan_of([1, 2, 1], order)
        with Trainer(network(), plan, cross_entropy, momentum, collectives=collectives) as trainer:
            losses = [trainer.step(*batch) for batch in given]
            found.append((curve_of(trainer, losses), len(trainer._ready().executor._loops)))
    return found


MANY = (13, 7, 9, 13, 13, 8, 10, 11, 7, 12)


def test_shapes_come_and_go_and_buckets_are_summed_while_gradients_come() -> None:
    expected = serial(network, batches(len(MANY), MANY))
    for found in zip(*run_ranks(4, in_many_shapes, environ=FABRIC), strict=True):
        check_close(merged([curve for curve, _ in found]), expected)
        assert {kept for _, kept in found} == {2}


def last_in_first_out(rank: int, size: int) -> Curve:
    """Gradients of microbatches in reverse, as torchgpipe has them: not the order in which losses came."""
    from arborcast.pipeline.order import ORDERS
    from arborcast.pipeline.order.actions import Passes, PassOrder, parse

    def made(stages: int, *_: int) -> Passes:
        return tuple(parse("F0 F1 F2 B2 B1 B0", stage) for stage in range(stages))

    ORDERS["reverse"] = PassOrder(made, in_flight=lambda _, count: count)
    try:
        return trained(replace(plan_of([1, 2, 1]), order="reverse"), network, batches(4))
    finally:
        del ORDERS["reverse"]


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that has state for all parameters from the start."""
    return torch.optim.Adagrad(parameters, 0.1)


def moved_with_state_from_the_start(rank: int, size: int) -> Curve:
    """An optimizer of the whole model, whose state goes on to another plan."""
    given = batches(4)
    losses: list[float] = []
    for plan in (plan_of([1, 1, 1]), plan_of([2, 1])):
        model = network()
        optimizer = adagrad(model.parameters())
        with Trainer(model, plan, cross_entropy, optimizer, collectives="gloo") as trainer:
            if losses:
                trainer.load(folder("adagrad"))
            losses += [trainer.step(*batch) for batch in given[len(losses) :][:2]]
            trainer.save(folder("adagrad"))
            curve = curve_of(trainer, losses)
    return curve


def by_an_optimizer_of_the_whole(rank: int, size: int) -> Curve:
    """Made before the trainer, with a schedule of its learning rate."""
    model = network()
    optimizer = momentum(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    losses = []
    with Trainer(model, plan_of([1, 1, 1, 1]), cross_entropy, optimizer, collectives="gloo") as trainer:
        for batch in batches(6):
            losses.append(trainer.step(*batch))
            schedule.step()
        return curve_of(trainer, losses)


def disagreeing(rank: int, size: int) -> list[str]:
    """A batch that is another on one rank, then one that is too small on all, then a good one."""
    said = []
    inputs, targets = batches(1)[0]
    with Trainer(network(), plan_of([1, 2, 1]), cross_entropy, momentum, collectives="gloo") as trainer:
        mine = inputs[:11] if rank == 2 else inputs
        for bad in ((mine, targets[: len(mine)]), (inputs[:5], targets[:5]), (inputs, targets[1:])):
            with pytest.raises(BatchError) as caught:
                trainer.step(*bad)
            said.append(str(caught.value))
        said.append(f"{trainer.step(inputs, targets):.6f}")
    return said


def recorded(rank: int, size: int) -> dict[str, int]:
    inputs, targets = batches(1)[0]
    plan = plan_of([1, 2, 1])
    with Trainer(network(), plan, cross_entropy, momentum, collectives="gloo", record=True) as trainer:
        trainer.step(inputs, targets)
        trainer.step(inputs, targets)
        found = trainer.timeline()
    return dict(Counter(interval.kind for interval in found.intervals if interval.kind != "waiting"))


def on_its_fabric(rank: int, size: int) -> str:
    """What the replicas' group knows of the links between them."""
    plan = plan_of([1, 2, 1], topology=topologies.load("ring:4"))
    with Trainer(network(), plan, cross_entropy, momentum) as trainer:
        trainer.step(*batches(1)[0])
        group: Any = trainer._groups.stage
        return "" if group is None else group.fabric


def other_things(rank: int, size: int) -> dict[str, Any]:
    calls = (
        continued,
        evaluated,
        last_in_first_out,
        by_an_optimizer_of_the_whole,
        moved_with_state_from_the_start,
        disagreeing,
        recorded,
        on_its_fabric,
        refused,
    )
    return {call.__name__: call(rank, size) for call in calls}


def refused(rank: int, size: int) -> list[str]:
    """What a trainer cannot be made with; nothing is left behind."""
    model = network()
    topology = topologies.load("full:4")
    cases: list[tuple[Plan, dict[str, Any]]] = [
        (plan_of([1, 1], depth=7), {}),
        (plan_of([1, 1], first=3), {}),
        (plan_of([1, 1], topology=topology), {"topology": "ring:4"}),
        (plan_of([1, 1], topology=topologies.load("full:2")), {}),
        (plan_of([1, 1]), {"collectives": "nccl"}),
        (plan_of([1, 1]), {"loss_reduction": "none"}),
        (plan_of([1, 1]), {"accumulate": 0}),
        (plan_of([1, 1]), {"clip_norm": -1.0}),
        (plan_of([1, 1]), {"timeout_s": 0}),
        (plan_of([1, 1]), {"device": "cuda"}),
        (plan_of([1, 1]), {"precision": "float8"}),
        (plan_of([1, 1]), {"optimizer": momentum(network(3).parameters())}),
    ]
    said = []
    for plan, options in cases:
        with pytest.raises(InputError) as caught:
            Trainer(model, plan, cross_entropy, options.pop("optimizer", momentum), **options)
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    return said


def test_what_else_a_trainer_does() -> None:
    found = run_ranks(4, other_things)
    by_name = {name: [each[name] for each in found] for name in found[0]}
    given = batches(6)
    expected = serial(network, given)
    check_close(merged(by_name["continued"]), expected)
    for loss, of_serial, kept in itertools.chain(*by_name["evaluated"]):
        assert loss == pytest.approx(of_serial, abs=1e-6)
        assert kept
    check_close(merged(by_name["last_in_first_out"]), serial(network, given[:4]))
    check_close(merged(by_name["by_an_optimizer_of_the_whole"]), serial(network, given, halve_every=2))
    of_adagrad = serial(network, given[:4], optimizer=adagrad)
    check_close(merged(by_name["moved_with_state_from_the_start"]), of_adagrad)
    for lines in by_name["disagreeing"]:
        assert lines == by_name["disagreeing"][0]
    apart, small, uneven, loss = by_name["disagreeing"][0]
    assert apart == (
        "batch: all ranks must be given the same one, got train inputs float32[13, 6], targets int64[13] on "
        "rank 0 and train inputs float32[11, 6], targets int64[11] on rank 2"
    )
    assert small.startswith("batch of 5 samples: must have at least 6")
    assert uneven == "batch: targets[0] must have as many samples as inputs[0], 13, got 12"
    assert float(loss) == pytest.approx(expected.losses[0], abs=1e-6)
    # 3 microbatches on 4 ranks; messages over two boundaries, to both replicas, in both directions.
    assert by_name["recorded"][0] == {
        "forward": 12,
        "backward": 12,
        "communication": 24,
        "allreduce": 2,
        "update": 4,
    }
    assert [line[:11] for line in by_name["on_its_fabric"]] == ["", "ring:4[1,2]", "ring:4[1,2]", ""]
    for lines in by_name["refused"]:
        assert lines == REFUSALS


REFUSALS = [
    "PlanError: plan: must have as many layers as the model, 8, got 7",
    "PlanError: plan: ranks must be in 0..3 of the job, got 4",
    "PlanError: plan: must be for topology ring:4, got one for full:4",
    "PlanError: topology full:2: must have a rank for each of the 4 of the job, got 2",
    "InputError: collectives: must be one of synth, gloo, got nccl",
    "InputError: loss_reduction: must be one of mean, sum, got none",
    "InputError: accumulate: must be at least 1, got 0",
    "InputError: clip_norm: must not be negative, got -1.0",
    "InputError: timeout_s: must be positive, got 0",
    "InputError: device: must be cpu, or one that there is and torch can send from, got cuda",
    "InputError: precision: dtype must be one of float32, bfloat16, float16, got float8",
    "InputError: optimizer: must hold parameters of the model, got none of its 8 that are trained",
]


def test_a_job_is_needed() -> None:
    with pytest.raises(InputError, match=r"torch\.distributed must be initialised"):
        Trainer(network(), plan_of([1]), cross_entropy, momentum)
