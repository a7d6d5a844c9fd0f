"""Loops of users: data on the ranks that need it, what is told of a batch, averages, and going on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from arborcast.pipeline.model.traced import trace
from arborcast.pipeline.run.batches import said_differently, said_of, told, words_of
from arborcast.pipeline.stages import Plan
from arborcast.pipeline.trainer import Trainer
from tests.support.ranks import run_ranks, store_path
from tests.support.training_cases import (
    CLASSES,
    FEATURES,
    Unmodified,
    around,
    batches,
    check_close,
    cross_entropy,
    curve_of,
    momentum,
    network,
    normalised,
    plan_of,
    said,
    serial,
    values_of,
)

RANKS_IMPORT = ("torch._dynamo",)
SIZES = (13, 7, 9, 7)
EPOCHS, STOP = 2, 3
DECAY = 0.5


def right(output: Tensor, targets: Tensor) -> Tensor:
    """The share of samples that are told right: a mean."""
    return (output.argmax(1) == targets).float().mean()


def of_small(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same of the lower classes: a sum, and what divides it."""
    counts = targets < CLASSES // 2
    return ((output.argmax(1) == targets) & counts).sum(), counts.sum()


METRICS = {"right": right, "of small": of_small}


# Only the ends are given data -----------------------------------------------------------------------


def needed(trainer: Trainer, batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """What a rank must be given of a batch."""
    return batch[0] if trainer.needs_inputs else None, batch[1] if trainer.needs_targets else None


def at_the_ends(rank: int, size: int) -> list[dict[str, Any]]:
    """Shapes that come again, evaluation between steps, ranks with several stages and with none."""
    found = []
    for plan in (plan_of([2, 1]), around([1, 2], "zb-v", depth=8)):
        with Trainer(
            network(), plan, cross_entropy, momentum, collectives="gloo", metrics=METRICS, keep_outputs=True
        ) as trainer:
            given = [needed(trainer, batch) for batch in batches(len(SIZES), SIZES)]
            losses, told_of, outputs = [], [], []
            for batch in given:
                losses.append(trainer.step(*batch))
                told_of.append(trainer.metrics)
                outputs.append(trainer.outputs().numpy())
            evaluated = trainer.evaluate(*given[1]), trainer.metrics, trainer.outputs().numpy()
            curve = curve_of(trainer, losses)
        found.append({"curve": curve, "told": told_of, "outputs": outputs, "evaluated": evaluated})
    return found


def test_only_the_ends_are_given_data_and_all_hear_what_came_of_it() -> None:
    given = batches(len(SIZES), SIZES)
    expected = serial(network, given)
    model = network()
    optimizer = momentum(model.parameters())
    outputs: list[Tensor] = []
    for inputs, targets in given:
        outputs.append(model(inputs))
        optimizer.zero_grad()
        cross_entropy(outputs[-1], targets).backward()
        optimizer.step()
    for found in run_ranks(4, at_the_ends):
        for each in found:
            check_close(each["curve"], expected)
            for told_of, theirs, output, (_, targets) in zip(
                each["told"], each["outputs"], outputs, given, strict=True
            ):
                assert theirs == pytest.approx(output.detach().numpy(), abs=1e-6)
                sums, counts = of_small(output, targets)
                wanted = {"right": right(output, targets).item(), "of small": (sums / counts).item()}
                assert told_of == pytest.approx(wanted, abs=1e-6, nan_ok=True)  # one batch has none
            loss, told_of, theirs = each["evaluated"]
            output = model(given[1][0])
            assert loss == pytest.approx(cross_entropy(output, given[1][1]).item(), abs=1e-6)
            assert told_of["right"] == pytest.approx(right(output, given[1][1]).item(), abs=1e-6)
            assert theirs == pytest.approx(output.detach().numpy(), abs=1e-6)


def of_one_shape(rank: int, size: int) -> list[tuple[float, int]]:
    """Losses of steps and evaluations at the ends, and how often ranks told each other of shapes in words."""
    count, in_words = [0], dist.all_gather_object

    def counted(*arguments: Any, **named: Any) -> None:
        count[0] += 1
        in_words(*arguments, **named)

    dist.all_gather_object = counted
    found = []
    with Trainer(network(), plan_of([1, 1]), cross_entropy, momentum, collectives="gloo") as trainer:
        for batch in batches(7, [SIZES[0]] * 3 + [SIZES[1]] * 2 + [SIZES[0]] * 2):
            for call in (trainer.step, trainer.evaluate):
                count[0] = 0
                found.append((call(*needed(trainer, batch)), count[0]))
    return found


def test_ranks_tell_each_other_in_words_of_new_shapes_alone() -> None:
    given = batches(7, [SIZES[0]] * 3 + [SIZES[1]] * 2 + [SIZES[0]] * 2)
    expected = serial(network, given)
    for found in run_ranks(2, of_one_shape):
        assert [loss for loss, _ in found[::2]] == pytest.approx(expected.losses, abs=1e-6)
        # The first is told by other means; then each change of shape once, by a step and an evaluation.
        assert [count for _, count in found[2:]] == [0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0]


class Labelled(nn.Module):
    """Returns its loss, and a second output that no stage gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.last(torch.tanh(self.first(x)))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def with_its_own_loss(rank: int, size: int) -> tuple[list[float], str]:
    """The last stage needs the labels, which are among the inputs."""
    given = [{"x": x, "labels": y} for x, y in batches(3)]
    traced, plan = trace(Labelled(), given[0], layers=2), plan_of([1, 1], depth=2, first=1)
    with Trainer(traced, plan, None, momentum, collectives="gloo") as trainer:
        losses = [trainer.step(batch if trainer.needs_inputs else None) for batch in given]
    return losses, said(lambda: Trainer(traced, plan, None, momentum, metrics=METRICS, keep_outputs=True))


@pytest.mark.long
def test_a_model_that_returns_its_loss_needs_the_batch_at_both_ends() -> None:
    model, expected = Labelled(), []
    optimizer = momentum(model.parameters())
    for x, y in batches(3):
        optimizer.zero_grad()
        loss = model(x, y)["loss"]
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses, refused in run_ranks(3, with_its_own_loss):
        assert losses == pytest.approx(expected, abs=1e-6)
        assert refused == (
            "InputError: metrics and keep_outputs: must be left out for a model that returns its loss, as "
            "its stages give no other output; leave the labels out of its inputs and pass a loss_fn"
        )


# What does not go together --------------------------------------------------------------------------


class Broken(TensorDataset):
    """Cannot be read to its end."""

    def __getitem__(self, index: Any) -> Any:
        if index == 20:
            raise OSError("no such block")
        return super().__getitem__(index)


def loader(count: int, kind: Callable[..., Any] = TensorDataset) -> DataLoader[Any]:
    """Batches of 8 samples."""
    inputs, targets = batches(1, (24,))[0]
    return DataLoader(kind(inputs[:count], targets[:count]), batch_size=8)


def disagreeing(rank: int, size: int) -> dict[str, Any]:
    """What each rank says of others' data; the first ones can be gone on after."""

    def fed(trainer: Trainer, data: Any) -> None:
        for batch in trainer.feed(data if trainer.needs_inputs or trainer.needs_targets else None):
            trainer.step(*batch)

    def make() -> Trainer:
        return Trainer(
            network(), plan_of([1, 2, 1]), cross_entropy, momentum, collectives="gloo", timeout_s=120.0
        )

    (inputs, targets), found = batches(1)[0], {}
    with make() as trainer:
        mine = needed(trainer, (inputs, targets))
        found["first batch"] = said(lambda: trainer.step(mine[0]))
        trainer.step(*mine)
        found["missing"] = said(lambda: trainer.step(mine[0]))
        found["samples"] = said(lambda: trainer.step(mine[0], None if mine[1] is None else mine[1][1:]))
        found["no samples"] = said(lambda: trainer.step(mine[0], None if mine[1] is None else mine[1][0]))
        found["other call"] = said(lambda: (trainer.evaluate if rank == 3 else trainer.step)(*mine))
        found["ends early"] = said(lambda: fed(trainer, loader(16 if rank == 3 else 24)))
        found["no loader"] = said(lambda: fed(trainer, None))
        trainer.step(*mine)
        both = (inputs, targets.flip(0) if rank == 3 else targets) if mine != (None, None) else mine
        found["other data"] = said(lambda: trainer.step(*both))
    with make() as trainer:
        found["breaks"] = said(lambda: fed(trainer, loader(24, Broken if rank == 3 else TensorDataset)))
    trainer = make()
    trainer.step(inputs, targets)
    if rank:
        found["leaves"] = said(lambda: trainer.step(inputs, targets))
    trainer.close()
    with Trainer(
        Unmodified(), plan_of([2, 2], depth=4), cross_entropy, momentum, collectives="gloo"
    ) as trainer:
        found["unmodified"] = said(lambda: trainer.step(*mine))
    return found


def test_data_that_do_not_go_together_are_told_by_all_ranks_in_a_line() -> None:
    shapes = "float32[13, 6]", "int64[13]"
    for rank, found in enumerate(run_ranks(4, disagreeing)):
        for name, line in found.items():
            assert not line or "\n" not in line, name
        for name in ("first batch", "missing"):
            assert "batch: rank 3 (stage 2) must be given the targets, got none" in found[name]
            assert found[name].startswith("BatchError: batch: ")
        assert (
            found["samples"]
            == "BatchError: batch: targets[0] must have as many samples as inputs[0], 13, got 12"
        )
        assert found["no samples"].startswith("BatchError: batch: targets[0] must have a dimension 0")
        assert found["other call"] == (
            f"BatchError: batch: all ranks must be given the same one, got train inputs {shapes[0]}, targets "
            f"not given on rank 0 and evaluate inputs not given, targets {shapes[1]} on rank 3"
        )
        assert found["ends early"] == (
            "BatchError: loader: must end on all ranks at once, got an end after 2 batches on rank 3 and "
            "another batch on rank 0"
        )
        assert found["no loader"] == (
            "InputError: feed: ranks of the first and the last stage must have a loader, got none on rank "
            "0, 3"
        )
        assert found["other data"].endswith(
            "other values on some of ranks 0, 3 of the first and the last stage"
        )
        assert "rank 3 (stage 2): reading batch 2 of epoch 0: OSError: no such block" in found["breaks"]
        assert rank == 0 or "rank 0 (stage 0) closed its trainer after 1 steps" in found["leaves"]
        assert (
            "an unmodified model is traced with the first batch, which every rank must" in found["unmodified"]
        )


def test_words_of_batches() -> None:
    """What ranks say goes together, part by part; shapes come out of words as they went in."""
    tensors = [torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 1, 1, dtype=torch.bool)]
    words = " ".join(words_of(tensors))
    whole = f"train inputs {words}, targets int64[3]"
    parts = [f"train inputs {words}, targets not given", "train inputs not given, targets int64[3]"]
    nothing = "train inputs not given, targets not given"
    assert said_differently([nothing, *parts, whole]) is None
    assert said_differently([nothing, whole, parts[0].replace("3, 2", "4, 2")]) == (1, 2)
    assert said_differently([nothing, whole, f"{whole}, frozen 0.weight"]) == (0, 2)
    assert said_differently([parts[1], "what is refused: batch: inputs none, targets 3"]) == (0, 1)
    assert said_of("inputs", [nothing]) is None
    named = said_of("inputs", [nothing, *parts])
    assert named == words_of(tensors) == words_of(told(named))


# Schedulers, averages, going on in the middle ---------------------------------------------------------


def shuffled(seed: int) -> DataLoader[Any]:
    """Seven batches an epoch, in another order each."""
    inputs, targets = batches(1, (70,))[0]
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(inputs, targets), batch_size=10, shuffle=True, generator=generator)


def learning(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def averaged(module: nn.Module) -> AveragedModel:
    return AveragedModel(module, avg_fn=get_ema_avg_fn(DECAY))


def rates(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * EPOCHS * 7)


def serially() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], float]:
    """Losses, weights, their average, and the loss by that: an ordinary loop."""
    model = normalised()
    optimizer = learning(model.parameters())
    schedule, ema, data, losses = rates(optimizer), averaged(model), shuffled(3), []
    for _ in range(EPOCHS):
        for inputs, targets in data:
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            ema.update_parameters(model)
            losses.append(loss.item())
    inputs, targets = batches(1)[0]
    return (
        losses,
        model.state_dict(),
        ema.module.state_dict(),
        cross_entropy(ema.module.eval()(inputs), targets).item(),
    )


def in_a_loop(rank: int, size: int, plans: Sequence[Plan], whole: bool) -> Any:
    """The same on some plans, one after the other: each goes on where the one before stopped."""
    losses: list[float] = []
    saved: dict[str, Any] = {}
    for number, plan in enumerate(plans):
        model = normalised()
        optimizer = learning(model.parameters()) if whole else learning
        with Trainer(model, plan, cross_entropy, optimizer, collectives="gloo") as trainer:
            data = shuffled(3 + number) if trainer.needs_inputs or trainer.needs_targets else None
            feed = trainer.feed(data)
            mine = optimizer if whole else trainer.optimizer  # None on a rank without parameters
            schedule = None if mine is None else rates(mine)
            ema = averaged(trainer.module)
            if saved:
                trainer.load(store_path().with_name("stopped"))
                feed.load_state_dict(saved["feed"])
                if schedule is not None:
                    schedule.load_state_dict(saved["schedule"])
                names = ema.module.state_dict().keys()
                ema.module.load_state_dict({name: saved["average"][name] for name in names})
                ema.n_averaged.fill_(len(losses))
            while feed.epoch < EPOCHS:
                for batch in feed:
                    losses.append(trainer.step(*batch))
                    if schedule is not None:
                        schedule.step()
                    ema.update_parameters(trainer.module)
                    if number + 1 < len(plans) and len(losses) == (number + 1) * STOP:
                        break
                else:
                    continue
                break
            trainer.save(store_path().with_name("stopped"))
            saved = {
                "weights": trainer.state_dict(),
                "feed": feed.state_dict(),
                "schedule": schedule.state_dict() if schedule is not None else saved.get("schedule"),
                "average": trainer.state_dict(ema.module),
            }
            if number + 1 == len(plans):
                trainer.load_state_dict(saved["average"])
                evaluated = trainer.evaluate(*needed(trainer, batches(1)[0]))
    return losses, values_of(saved["weights"]), values_of(saved["average"]), evaluated


@pytest.mark.long
@pytest.mark.parametrize("whole", [False, True])
def test_rates_averages_and_positions_go_on_by_another_plan(whole: bool) -> None:
    """Stopped in the middle of the first epoch and of the second, on other stages and replicas each time."""
    expected = serially()
    plans = [plan_of([1, 2, 1], depth=5, microbatches=1), plan_of([2, 2], depth=5, microbatches=1)]
    plans += [plan_of([1, 1, 1], depth=5, microbatches=1)]
    for losses, weights, average, evaluated in run_ranks(4, in_a_loop, plans, whole):
        assert losses == pytest.approx(expected[0], abs=1e-6)
        for found, wanted in ((weights, expected[1]), (average, expected[2])):
            assert found.keys() == wanted.keys()
            for name, value in found.items():
                assert value == pytest.approx(wanted[name].numpy(), abs=2e-6), name
        assert evaluated == pytest.approx(expected[3], abs=1e-6)
