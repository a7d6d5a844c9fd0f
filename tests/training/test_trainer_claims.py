"""What the trainer promises beyond plain training: losses of tokens, dropout, running statistics, unfreezing.

Each is either equal to serial training or refused in one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.run.losses import Losses, check_reduction
from arborcast.pipeline.run.precision import Precision
from arborcast.pipeline.trainer import Trainer
from arborcast.synth.errors import InputError
from tests.support.ranks import run_ranks, store_path
from tests.support.training_cases import (
    CLASSES,
    FEATURES,
    Curve,
    batches,
    check_close,
    cross_entropy,
    curve_of,
    merged,
    momentum,
    network,
    plan_of,
    said,
    serial,
    trained,
)

RANKS_IMPORT = ("torch._dynamo", "torch.export._trace")

TOKENS, PADDING = 5, -100


# Losses that are no mean over samples ----------------------------------------------------------------


def padded(count: int) -> list[tuple[Tensor, Tensor]]:
    """Sequences of 1 to 5 tokens, filled up with padding; the first microbatch has the short ones."""
    given = []
    for inputs, _ in batches(count):
        generator = torch.Generator().manual_seed(len(given))
        targets = torch.randint(0, CLASSES, (len(inputs), TOKENS), generator=generator)
        for sample, row in enumerate(targets):
            row[1 + sample * TOKENS // len(inputs) :] = PADDING
        given.append((inputs, targets))
    return given


def of_tokens(seed: int = 0) -> Divisible:
    """A class for each token of a sample."""
    torch.manual_seed(seed)
    return Divisible(
        nn.Linear(FEATURES, 8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, TOKENS * CLASSES),
        nn.Unflatten(1, (TOKENS, CLASSES)),
    )


def mean_of_tokens(output: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=PADDING)


def sum_of_tokens(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    loss = cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")
    return loss, (targets != PADDING).sum()


def sum_of_heavy_tokens(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same mean by larger sums, which overflow in float16 at the scale that it begins with."""
    loss, weight = sum_of_tokens(output, targets)
    return loss * 4096, weight * 4096


def pair_or_not(output: Tensor, targets: Tensor) -> Any:
    """As the first target says."""
    loss, count = first_token(output, targets[:, 0]), len(targets)
    return (loss * count, count) if targets[0, 0] else loss


def large(steps: Sequence[tuple[Tensor, Tensor]], each: int) -> list[tuple[Tensor, Tensor]]:
    """Every few batches as one."""
    groups = [steps[start : start + each] for start in range(0, len(steps), each)]
    return [(torch.cat([x for x, _ in group]), torch.cat([y for _, y in group])) for group in groups]


def other_data(rank: int, size: int) -> dict[str, str]:
    """Drawn without a common seed: inputs on one rank, targets on the last; the middle uses none."""
    said_by = {"overwriting": overwriting()}
    for name, differing in (("inputs", 0), ("targets", 3), ("unused", 1)):
        inputs, targets = (it.clone() for it in batches(1)[0])
        if rank == differing:
            inputs += 1
            targets = targets.flip(0)
        plan = plan_of([1, 2, 1], depth=6)
        with Trainer(of_tokens(), plan, first_token, momentum, collectives="gloo") as it:
            if name == "unused":
                said_by[name] = f"{it.step(inputs, targets):.6f}"
                continue
            before = it.state_dict()
            said_by[name] = said(lambda: it.step(inputs, targets))  # noqa: B023
            assert all(torch.equal(before[key], value) for key, value in it.module.state_dict().items())
    return said_by


def first_token(output: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(output[:, 0], targets)


def test_ranks_with_different_data_are_told_before_weights_change_and_batches_stay_as_given() -> None:
    expected = first_token(of_tokens()(batches(1)[0][0]), batches(1)[0][1]).item()
    for each in run_ranks(4, other_data):
        assert each["inputs"] == each["targets"]
        assert each["inputs"] == (
            "BatchError: batch: all ranks must be given the same data (random ones by the same seed), got "
            "other values on some of ranks 0, 3 of the first and the last stage"
        )
        assert float(each["unused"]) == pytest.approx(expected, abs=1e-6)
        assert each["overwriting"] == "stays"


def overwriting() -> str:
    """A first layer that works in place must not change what the caller will give again."""
    model = Divisible(nn.ReLU(inplace=True), nn.Linear(FEATURES, CLASSES))
    inputs, targets = batches(1)[0]
    before = inputs.clone()
    with Trainer(model, plan_of([1, 1], depth=2), cross_entropy, momentum, collectives="gloo") as trainer:
        trainer.step(inputs, targets)
        trainer.step(inputs, targets)
    return "stays" if torch.equal(inputs, before) else "changed"


def token_losses(rank: int, size: int) -> dict[str, Any]:
    given, plan = padded(4), plan_of([1, 2, 1], depth=6)
    on_replicas = plan_of([1, 3], depth=6, microbatches=2)
    options = {"loss_fn": sum_of_tokens}
    with Trainer(of_tokens(), plan, sum_of_tokens, momentum, collectives="gloo") as trainer:
        evaluated = [trainer.evaluate(*batch) for batch in given[:3]]
    none = given[0][0], torch.full_like(given[0][1], PADDING)
    first, rest = torch.zeros_like(given[0][1]), torch.zeros_like(given[0][1])
    first[0] = 1
    mixed = [(given[0][0], first)]
    turns = [(given[0][0], rest + 1), (given[0][0], rest)]
    return {
        "curves": {
            "1-2-1": trained(plan, of_tokens, given, **options),
            "1-3": trained(on_replicas, of_tokens, given, **options),
            "accumulated": trained(plan, of_tokens, given, accumulate=2, **options),
            "float16": trained(plan, of_tokens, given, precision="float16", **options),
            "heavy": trained(plan, of_tokens, given, precision="float16", loss_fn=sum_of_heavy_tokens),
        },
        "evaluated": evaluated,
        "refused": said(lambda: trained(plan, of_tokens, given, loss_fn=mean_of_tokens)),
        "nothing counts": said(lambda: trained(plan, of_tokens, [none], **options)),
        "sum and pair": said(lambda: trained(plan, of_tokens, given, loss_reduction="sum", **options)),
        "mixed": said(lambda: trained(plan, of_tokens, mixed, loss_fn=pair_or_not)),
        "by turns": said(lambda: trained(plan, of_tokens, turns, loss_fn=pair_or_not, accumulate=2)),
    }


def test_losses_over_tokens_are_those_of_serial_training() -> None:
    """The sum and the weight of every share make the mean of the whole batch, or of all that accumulate."""
    given = padded(4)
    found = run_ranks(4, token_losses)
    expected = serial(of_tokens, given, loss_fn=mean_of_tokens)
    curves = {name: merged([each["curves"][name] for each in found]) for name in found[0]["curves"]}
    check_close(curves["1-2-1"], expected)
    check_close(curves["1-3"], expected)
    in_float16 = serial(of_tokens, given, loss_fn=mean_of_tokens, autocast=torch.float16)
    np.testing.assert_allclose(curves["float16"].losses, in_float16.losses, atol=5e-4)
    # The first step overflows and is skipped; by its weight the next ones are scaled.
    later = serial(of_tokens, given[1:], loss_fn=mean_of_tokens, autocast=torch.float16)
    np.testing.assert_allclose(curves["heavy"].losses[1:], later.losses, atol=1e-4)
    at_once = serial(of_tokens, large(given, 2), loss_fn=mean_of_tokens)
    check_close(Curve(at_once.losses, curves["accumulated"].gradients, curves["accumulated"].state), at_once)
    before = of_tokens()
    assert found[0]["evaluated"] == pytest.approx(
        [mean_of_tokens(before(x), y).item() for x, y in given[:3]], abs=1e-6
    )
    for rank, each in enumerate(found):
        own = each["refused"]
        assert own.startswith("InputError: loss_fn" if rank == 3 else f"TrainingError: rank {rank}"), own
        assert "loss_fn: must be the mean over all of its samples, got gradients that change" in own
        assert "let it return a pair" in own
        assert each["nothing counts"] == (
            "InputError: loss_fn: weights must add up to a positive number over a batch, got 0"
        )
        assert "must return one number for loss_reduction sum, got a pair" in each["sum and pair"]
        assert each["mixed"] == (
            "InputError: loss_fn: must return one number always or a pair always, got "
            "1 pairs for 3 calls in a batch"
        )
        assert each["by turns"] == (
            "InputError: loss_fn: must return one number always or a pair always, got "
            "both in the 2 batches of an update"
        )


def contrastive(output: Tensor, targets: Tensor) -> Tensor:
    """Every sample is compared with all others."""
    return cross_entropy(output @ output.T, torch.arange(len(output)))


def at_rest(output: Tensor, targets: Tensor) -> Tensor:
    """Equal losses of all samples, whatever their weights, as by an output layer of zeros."""
    return mean_of_tokens(output * 0 + (output - output.detach()), targets)


def mean_and_count(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return mean_of_tokens(output, targets), (targets != PADDING).sum()


def sum_and_one(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    return sum_of_tokens(output, targets)[0], 1.0


mse, huber = nn.functional.mse_loss, nn.functional.huber_loss
WHOLE = torch.arange(12 * TOKENS).reshape(12, TOKENS) % CLASSES
SHORT = torch.where(torch.arange(TOKENS) < 3, WHOLE, PADDING)
WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0, 1.0]))

CHECKED: list[tuple[str, Any, str, Tensor, Tensor, bool]] = [
    # name, function, reduction, targets of the share, targets of another sample, whether it is what it says
    ("all tokens", mean_of_tokens, "mean", WHOLE, WHOLE[:1], True),
    ("as many tokens of each", mean_of_tokens, "mean", SHORT, SHORT[:1], True),
    ("fewer than of others", mean_of_tokens, "mean", SHORT, WHOLE[:1], False),
    ("equal losses", at_rest, "mean", SHORT, WHOLE[:1], False),
    ("classes that weigh", lambda o, t: WEIGHTED(o[:, 0], t[:, 0]), "mean", WHOLE, WHOLE[:1], False),
    (
        "smoothed",
        lambda o, t: cross_entropy(o[:, 0], t[:, 0], label_smoothing=0.1),
        "mean",
        WHOLE,
        WHOLE[:1],
        True,
    ),
    ("squares", lambda o, t: mse(o[:, :, 0], t.float()), "mean", WHOLE, WHOLE[:1], True),
    ("root", lambda o, t: mse(o[:, :, 0], t.float()).sqrt(), "mean", WHOLE, WHOLE[:1], False),
    ("sum for mean", lambda o, t: huber(o[:, :, 0], t.float(), "sum"), "mean", WHOLE, WHOLE[:1], False),
    ("sum", lambda o, t: huber(o[:, :, 0], t.float(), "sum"), "sum", WHOLE, WHOLE[:1], True),
    ("mean for sum", lambda o, t: huber(o[:, :, 0], t.float()), "sum", WHOLE, WHOLE[:1], False),
    ("contrastive", lambda o, t: contrastive(o.flatten(1), t), "mean", WHOLE, WHOLE[:1], False),
    ("in place", lambda o, t: o.mul_(2).square().mean(), "mean", WHOLE, WHOLE[:1], True),
    ("constant", lambda o, t: torch.tensor(3.0), "mean", WHOLE, WHOLE[:1], True),
    ("pair", sum_of_tokens, "pair", SHORT, WHOLE[:1], True),
    ("pair of a mean", mean_and_count, "pair", SHORT, WHOLE[:1], False),
    ("weight that stays", sum_and_one, "pair", WHOLE, WHOLE[:1], False),
    ("nothing counts here", mean_of_tokens, "mean", torch.full_like(WHOLE, PADDING), WHOLE[:1], False),
    ("fixed size", lambda o, t: o.view(12, TOKENS, CLASSES).square().mean(), "mean", WHOLE, WHOLE[:1], False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CHECKED, ids=[case[0] for case in CHECKED])
def test_losses_are_what_they_are_said_to_be(case: Any, dtype: torch.dtype) -> None:
    _, function, reduction, targets, reference, holds = case
    output = torch.randn(12, TOKENS, CLASSES, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = output.clone()
    if holds:
        check_reduction(function, reduction, output, targets, reference, 12, (0,))
    else:
        with pytest.raises(InputError, match=r"loss_fn: (must|the weight)"):
            check_reduction(function, reduction, output, targets, reference, 12, (0,))
    assert torch.equal(output, before)


def test_one_token_among_a_thousand_is_noticed() -> None:
    targets = torch.zeros(64, 16, dtype=torch.long)
    reference, targets[5, 3] = targets[:1].clone(), PADDING
    output = torch.randn(64, 16, CLASSES, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match=r"change by 0\.00049 of themselves"):
        check_reduction(mean_of_tokens, "mean", output, targets, reference, 64, (0,))


def counted(targets: Sequence[Tensor]) -> list[int]:
    """How often a mean over tokens was called for each of these, each a batch of one share."""
    calls = 0

    def function(output: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return mean_of_tokens(output, targets)

    output = torch.randn(6, TOKENS, CLASSES, generator=torch.Generator().manual_seed(0), requires_grad=True)
    losses = Losses(function, "mean", [6], 6, lambda it: it, nullcontext, check=True)
    found = []
    for each in targets:
        losses.begin(each[:1], 1.0)
        losses.add(losses.of(each, 0, output), each, 0)
        found.append(calls)
        calls = 0
    return found


def test_losses_are_checked_as_often_as_promised() -> None:
    """The first four shares, those with targets beyond all before, and each seventeenth."""
    low = torch.zeros(6, TOKENS, dtype=torch.long)
    low[0] = 1
    high, padded, uneven = low + 2, low.clone(), low.clone()
    padded[:, -1], uneven[2:, -1] = PADDING, PADDING
    once, checked = 1, 3
    assert counted([low] * 20) == [checked] * 4 + [once] * 12 + [checked] + [once] * 3
    assert counted([low] * 6 + [high, low, high]) == [checked] * 4 + [once] * 2 + [checked, once, once]
    with pytest.raises(InputError, match="loss_fn: must be the mean over all"):
        counted([low] * 6 + [uneven])  # the first padding there is
    assert counted([low] * 6 + [padded, uneven])[-2:] == [checked, once]
    with pytest.raises(InputError, match="loss_fn: must be the mean over all"):
        counted([low] * 6 + [padded] + [uneven] * 10)


# Dropout -----------------------------------------------------------------------------------------------


class Masks(nn.Module):
    """Dropout of ones: what comes out, beyond the first samples' noise, is the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.dropout = nn.Dropout(0.5)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask: Tensor = self.dropout(torch.ones(len(x), 64))
        self.seen.append(mask)
        return x + self.weight * mask[:, :1]


def masks_of(plan: Any, steps: int, **options: Any) -> list[list[Any]]:
    """The masks of this rank, by step; those of recomputation too."""
    model = Divisible(nn.Linear(FEATURES, CLASSES), Masks(), Masks())
    masks = [layer for layer in model if isinstance(layer, Masks)]
    found = []
    with Trainer(model, plan, cross_entropy, momentum, collectives="gloo", **options) as trainer:
        for batch in batches(steps, sizes=(16,)):
            torch.manual_seed(7)
            trainer.step(*batch)
            trainer.evaluate(*batch)
            found.append([mask.numpy() for layer in masks for mask in layer.seen if (mask != 1).any()])
            assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))
            for layer in masks:
                layer.seen.clear()
    return found


def dropped(rank: int, size: int) -> dict[str, Any]:
    plan = plan_of([1, 3], depth=3, microbatches=2)
    again = plan_of([1, 3], depth=3, microbatches=2, recompute=True)
    return {
        "first": masks_of(plan, 2),
        "again": masks_of(plan, 2),
        "other seed": masks_of(plan, 2, seed=1),
        "recomputed": masks_of(again, 2),
    }


def test_every_replica_and_microbatch_drops_others() -> None:
    """2 steps of 2 microbatches of two layers that drop, of which the last lies on three replicas."""
    found = run_ranks(4, dropped)
    everything = [
        mask for each in found for name in ("first", "other seed") for step in each[name] for mask in step
    ]
    assert len(everything) == 2 * 2 * 2 * (1 + 3)
    rows = np.concatenate(everything)
    assert len(np.unique(rows, axis=0)) == len(rows)  # of 64 numbers each
    assert 0.45 < (rows == 0).mean() < 0.55
    for each in found:
        for first, again, recomputed in zip(each["first"], each["again"], each["recomputed"], strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
            # Each pass is made twice; both times it drops the same.
            assert sorted(it.tobytes() for it in recomputed) == sorted(
                it.tobytes() for it in (*first, *first)
            )


# Freezing and unfreezing ------------------------------------------------------------------------------


FOUR = plan_of([4], microbatches=1)


def frozen_by(step: int) -> range:
    """The layers that are frozen: the first three, then none, then the last one, then the first three."""
    return (range(3), range(3), range(0), range(0), range(7, 8), range(3))[step]


def freeze(model: Divisible, step: int) -> None:
    for index, layer in enumerate(model):
        layer.requires_grad_(index not in frozen_by(step))


def refrozen(rank: int, size: int) -> dict[str, Any]:
    given = batches(6, sizes=(13,))
    curves = {}
    for plan in (plan_of([1, 2, 1], "pe"), FOUR):
        model = network()
        freeze(model, 0)
        with Trainer(model, plan, cross_entropy, momentum, collectives="gloo") as trainer:
            losses = []
            for step, batch in enumerate(given):
                freeze(model, step)
                losses.append(trainer.step(*batch))
                trainer.evaluate(*batch)
            curves[str(plan.stages)] = curve_of(trainer, losses)
    model = network()
    with Trainer(model, FOUR, cross_entropy, momentum, collectives="gloo") as trainer:
        trainer.step(*given[0])
        model[2 if rank else 0].requires_grad_(False)
        apart = said(lambda: trainer.step(*given[0]))
    model = network()
    with Trainer(model, FOUR, cross_entropy, momentum, collectives="gloo", accumulate=2) as trainer:
        trainer.step(*given[0])
        model[0].requires_grad_(False)
        within = said(lambda: trainer.step(*given[0]))
        model[0].requires_grad_(True)
        trainer.step(*given[0])
    model = network()
    with Trainer(model, FOUR, cross_entropy, momentum, collectives="gloo") as trainer:
        trainer.step(*given[0])
        trainer._agreement._timeout_s = 1.0  # the first step may take as long as it likes
        model[0].requires_grad_(rank != 2)
        alone = said(lambda: trainer.step(*given[0]))
    return {"curves": curves, "apart": apart, "within": within, "alone": alone}


def test_parameters_are_frozen_and_unfrozen_as_serially() -> None:
    found = run_ranks(4, refrozen)
    expected = serial(network, batches(6, sizes=(13,)), before=freeze)
    for name in found[0]["curves"]:
        check_close(merged([each["curves"][name] for each in found]), expected)
    for rank, each in enumerate(found):
        batch = "train inputs float32[13, 6], targets int64[13], frozen"
        assert each["apart"] == (
            f"BatchError: batch: all ranks must be given the same one, got {batch} 0.weight 0.bias on rank 0 "
            f"and {batch} 2.weight 2.bias on rank 1"
        )
        assert each["within"] == (
            "InputError: trainer: parameters must be frozen or unfrozen between updates, got it after "
            "1 of the 2 batches of one"
        )
        assert each["alone"].startswith(f"TrainingError: rank {rank}"), each["alone"]
        assert "frozen 0.weight 0.bias" in each["alone"]


# Resuming ----------------------------------------------------------------------------------------------


def resumed(rank: int, size: int) -> tuple[list[float], list[float]]:
    """The second training goes on from the scale, which an overflow halves and two good steps double."""
    given, plan = batches(5, sizes=(13,)), plan_of([1, 1], depth=4)
    folder, scales = store_path().with_name("scaled"), []

    def started() -> tuple[Trainer, Precision]:
        torch.manual_seed(0)
        model = Divisible(nn.Linear(FEATURES, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, CLASSES))
        precision = Precision("float16", init_scale=2.0**22, growth_interval=2)
        made = Trainer(model, plan, cross_entropy, momentum, precision=precision, collectives="gloo")
        return made, precision

    trainer, precision = started()
    with trainer:
        straight = [trainer.step(*batch) for batch in given]
        scales.append(precision.current_scale)
    trainer, precision = started()
    with trainer:
        losses = [trainer.step(*batch) for batch in given[:3]]
        trainer.save(folder)
        scales.append(precision.current_scale)
    trainer, precision = started()
    with trainer:
        trainer.load(folder)
        scales.append(precision.current_scale)
        losses += [trainer.step(*batch) for batch in given[3:]]
        assert losses == straight
        scales.append(precision.current_scale)
    return losses, scales


def test_scale_and_dropout_go_on_from_a_checkpoint() -> None:
    for losses, (straight, before, loaded, after) in run_ranks(2, resumed):
        assert len(losses) == 5
        assert before == loaded == 2.0**19  # after three steps, each skipped
        assert after == straight == 2.0**18  # after a fourth, and one that was not


# Batch norm ----------------------------------------------------------------------------------------------


def normed(momentum: float | None = 0.1) -> Divisible:
    """The first norm sees the batch itself, the second what the first one gave."""
    torch.manual_seed(0)
    return Divisible(
        nn.BatchNorm1d(FEATURES, momentum=momentum),
        nn.Linear(FEATURES, 8),
        nn.BatchNorm1d(8, momentum=momentum),
        nn.Linear(8, CLASSES),
    )


class Twice(nn.Module):
    """Calls one norm twice, not as a module of its own kind: as a graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(x) + self.norm(2 * x))
        return result


def twice() -> Divisible:
    torch.manual_seed(0)
    return Divisible(Twice(), nn.Identity())


def cumulative() -> Divisible:
    return normed(None)


def deferring(rank: int, size: int) -> dict[str, Curve]:
    given = batches(4, sizes=(13, 12))
    options: dict[str, Any] = {"batch_norm": "deferred"}
    return {
        "1-2": trained(plan_of([1, 2], depth=4), normed, given, **options),
        "recomputed": trained(plan_of([2, 1], "gpipe", depth=4, recompute=True), normed, given, **options),
        "cumulative": trained(plan_of([1, 2], depth=4), cumulative, given, **options),
        "twice": trained(plan_of([2, 1], depth=2), twice, given, **options),
        "serial": trained(plan_of([1], depth=4, microbatches=1), normed, given, **options),
    }


def test_deferred_statistics_are_those_of_serial_training() -> None:
    """Of the first norm in every step, of all norms where a batch is not divided; the losses stay those of
    microbatches."""
    given = batches(4, sizes=(13, 12))
    found = run_ranks(3, deferring)
    curves = {name: merged([each[name] for each in found]) for name in found[0]}
    whole, in_parts = serial(normed, given), serial(normed, given, microbatches=3)
    check_close(curves["serial"], whole)
    for name in ("1-2", "recomputed"):
        np.testing.assert_allclose(curves[name].losses, in_parts.losses, atol=1e-6)
        check_statistics(curves[name], whole, "0")
        assert curves[name].state["2.num_batches_tracked"] == 4
    check_statistics(curves["cumulative"], serial(cumulative, given), "0")
    check_statistics(curves["twice"], serial(twice, given), "0.norm")
    apart = np.abs(in_parts.state["0.running_var"] - whole.state["0.running_var"])
    assert apart.max() > 0.05


def check_statistics(found: Curve, expected: Curve, norm: str) -> None:
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        np.testing.assert_allclose(
            found.state[f"{norm}.{name}"], expected.state[f"{norm}.{name}"], atol=1e-6, err_msg=name
        )
