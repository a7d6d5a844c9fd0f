"""Models as their libraries give them, and the losses that they compute themselves."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from arborcast.bench.training.in_stages import deterministic, examine
from arborcast.bench.training.user_models import catalog
from arborcast.pipeline.costs.measured import profile
from arborcast.pipeline.errors import BatchError, PartitionError, ProfileError
from arborcast.pipeline.model.module_structure import flatten
from arborcast.pipeline.model.traced import Traced, trace
from arborcast.pipeline.run.losses import SHARE, check_reduction
from arborcast.pipeline.trainer import Trainer
from arborcast.synth.errors import InputError
from tests.support.ranks import run_ranks
from tests.support.training_cases import momentum, plan_of, said

RANKS_IMPORT = ("torch._dynamo", "torch.export._trace")

CATALOG = {model.name: model for model in catalog()}
QUICK = (
    "U-Net with skips",
    "control flow on shapes",
    "dataclass out, optional input",
    "masked mean by hand",
    "transformers GPT2LMHeadModel",
)
REFUSED = {
    "mixture of experts, load-balancing loss": "is not linear in sums over samples",
    "control flow on values": "control flow depends on the values of a tensor",
    "transformers CLIPModel": "allows only 5 samples",
    "transformers Qwen2MoeForCausalLM": "is neither a sum nor a mean over samples",
    "transformers LongformerForMaskedLM": "control flow depends on the values of a tensor",
    "transformers Wav2Vec2ForCTC": "control flow depends on the values of a tensor",
}


SEVERAL_LOSSES = "several losses with weights of classes"
UNEVALUATED = ("transformers MambaForCausalLM", "transformers RwkvForCausalLM")
"""They run other operators in evaluation."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Structures -----------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Frozen:
    value: Tensor
    rest: dict[str, Any]
    size: int = 3


class Named(dict[str, Any]):
    pass


A, B = torch.arange(2.0), torch.arange(3.0)


@pytest.mark.parametrize(
    ("value", "words", "paths"),
    [
        (A, "tensor", ("",)),
        ((A, None, [B]), "(tensor, None, (tensor))", ("0", "2.0")),
        ({"a": A, "use_cache": False}, "{a, use_cache=False}", ("a",)),
        (Named(a=A), "Named(a)", ("a",)),
        (Pair(A, B), "(tensor, tensor)", ("0", "1")),
        (Frozen(A, {"b": B}), "Frozen(value, rest={b}, size=3)", ("value", "rest.b")),
    ],
)
def test_structures(value: Any, words: str, paths: tuple[str, ...]) -> None:
    tensors, structure = flatten(value)
    assert (str(structure), structure.paths) == (words, paths)
    doubled = structure.rebuild(2 * tensor for tensor in tensors)
    assert type(doubled) is type(value)
    again, same = flatten(doubled)
    assert same == structure
    assert all(torch.equal(ours, 2 * theirs) for ours, theirs in zip(again, tensors, strict=True))


def test_inputs_must_be_as_in_the_trace() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
            return self.linear(x + y) * scale

    x, y = torch.randn(4, 3), torch.randn(4, 3)
    traced = trace(Scaled(), {"x": x, "y": y, "scale": 0.5}, evaluation=False)
    assert traced.tensors_of({"scale": 0.5, "y": y, "x": x}) == (x, y)  # in any order
    for given, words in (((x, y, 0.5), "(tensor, tensor, 0.5)"), ({"x": x, "scale": 0.5}, "{x, scale=0.5}")):
        with pytest.raises(BatchError) as caught:
            traced.tensors_of(given)
        assert str(caught.value) == (
            f"batch: inputs must be {{x, y, scale=0.5}}, as the model was traced with, got {words}"
        )


# Losses of shares -----------------------------------------------------------------------------------


class Model(nn.Module):
    """Some layers and a loss of their output, labels y and a mask of tokens."""

    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 5)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
        output = self.last(torch.tanh(self.first(x)))
        return {"loss": self.loss(output, y, mask), "output": output}


WEIGHTS = torch.tensor([0.1, 2.0, 0.5, 1.0, 3.0])


def tokens(output: Tensor, y: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), y.flatten(), **options)


def normalised(output: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Each token has its share of the whole batch's tokens before anything is summed."""
    return (output.square().sum(-1) * (mask / mask.sum())).sum()


def written_over(output: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    labels = y.clone()
    labels[mask == 0] = -100
    return tokens(output, labels)


def picked(output: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    keep = mask == 1
    return functional.mse_loss(output.sum(-1)[keep], y[keep].float())


def centred(difference: Tensor) -> Tensor:
    return (difference - difference.mean()).square().sum()


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token mean": lambda o, y, m: tokens(o, y),
    "token sum": lambda o, y, m: tokens(o, y, reduction="sum"),
    "weights of classes": lambda o, y, m: tokens(o, y, weight=WEIGHTS),
    "smoothed": lambda o, y, m: tokens(o, y, weight=WEIGHTS, label_smoothing=0.2),
    "likelihood": lambda o, y, m: functional.nll_loss(o.log_softmax(-1).transpose(1, 2), y),
    "probabilities": lambda o, y, m: functional.cross_entropy(
        o.flatten(0, 1), o.detach().flatten(0, 1).sigmoid()
    ),
    "squares": lambda o, y, m: functional.mse_loss(o.sum(-1), y.float()),
    "answers": lambda o, y, m: functional.binary_cross_entropy_with_logits(o.sum(-1), m.float()),
    "divergence": lambda o, y, m: functional.kl_div(o.log_softmax(-1), o.detach().softmax(-1) * m[..., None]),
    "mean by hand": lambda o, y, m: (o.square().mean(-1) * m).sum() / m.sum().clamp(min=1),
    "per sample": lambda o, y, m: o.square().sum() / o.shape[0],
    "normalised": normalised,
    "several": lambda o, y, m: (
        (tokens(o, y) + 0.5 * o.square().mean() - (o * m[..., None]).sum() / m.sum() + 2) / 3
    ),
    "stacked": lambda o, y, m: torch.stack([tokens(o, y), o.square().mean(), torch.tensor(1.0)]).mean(),
    "picked": picked,
    "written over": written_over,
}


def batch(samples: int = 5) -> dict[str, Tensor]:
    """Of unlike numbers of tokens; one sample has none."""
    torch.manual_seed(1)
    mask = (torch.rand(samples, 3) < 0.7).long()
    mask[0] = 0
    labels = torch.where(mask > 0, torch.randint(0, 5, (samples, 3)), -100)
    return {"x": torch.randn(samples, 3, 4), "y": labels, "mask": mask}


def in_shares(traced: Traced, given: dict[str, Tensor], sizes: tuple[int, ...]) -> Tensor:
    """The sum of what shares give."""
    values = traced.tensors_of(given)
    labels = [values[index] for index in traced.labels]
    last = traced.divide(0, traced.depth)
    last.begin_loss(labels, len(values[0]))
    parts = zip(*(value.split(sizes) for value in values), strict=True)
    shares = zip(*(label.split(sizes) for label in labels), strict=True)
    return sum(last.loss(last(*part), share) for part, share in zip(parts, shares, strict=True))


FEW = ("weights of classes", "normalised", "several", "picked", "written over")


@pytest.mark.parametrize(
    "name", [it if it in FEW else pytest.param(it, marks=pytest.mark.long) for it in LOSSES]
)
def test_losses_of_shares_add_up(name: str) -> None:
    """Values and gradients, for another number of samples than the trace had, and one sample in a share."""
    model = Model(LOSSES[name])
    traced = trace(model, batch(), evaluation=False)
    labels = [traced.training.inputs[index].name for index in traced.labels]
    assert ("x" not in labels) or labels == ["x"]  # of a loss that reads no labels
    given = batch(7)
    parameters = list(model.parameters())
    loss = model(**given)["loss"]
    expected = torch.autograd.grad(loss, parameters)
    for sizes in ((7,), (1, 4, 2), (3, 4)):
        found = in_shares(traced, given, sizes)
        torch.testing.assert_close(found, loss)
        for ours, theirs in zip(torch.autograd.grad(found, parameters), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda o, y, m: o.square().mean() * tokens(o, y), "aten.mul.Tensor at test_user_models.py:"),
        (lambda o, y, m: o.square().mean().sqrt(), "sqrt.default at test_user_models.py:"),
        (lambda o, y, m: o.amax(), "is neither a sum nor a mean over samples"),
        (lambda o, y, m: centred(o - y[..., None]), "uses a sum over all samples for each of them"),
        (
            lambda o, y, m: (o.sum((1, 2))[:, None] - o.sum((1, 2))).square().sum(),
            "compares samples with each",
        ),
        (lambda o, y, m: tokens(o, o.argmax(-1)), "has targets or weights that depend on parameters"),
        (lambda o, y, m: m.float().mean(), "its loss must depend on its parameters and samples"),
    ],
)
def test_losses_that_do_not_add_up(loss: Any, message: str) -> None:
    with pytest.raises(PartitionError) as caught:
        trace(Model(loss), batch(), evaluation=False)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# Whole models ---------------------------------------------------------------------------------------


def test_a_loss_that_compares_samples_is_seen_in_the_first_batches() -> None:
    """The graph does not tell: softmax over samples keeps their dimension."""
    for over, is_wrong in ((0, True), (-1, False)):
        model = Model(lambda o, y, m, over=over: (o.softmax(over) * o).sum())
        traced = trace(model, batch(), evaluation=False)
        last, x = traced.divide(0, traced.depth), batch(4)["x"]
        last.begin_loss([x], 4)
        output = last(*traced.tensors_of(batch(4)))
        try:
            check_reduction(last.loss, SHARE, output, (x,), (x[:1],), 4, traced.sample_dims(traced.depth))
        except InputError as error:
            assert is_wrong
            assert str(error).startswith(
                "model: its loss must be a sum or a mean over samples, got gradients"
            )
        else:
            assert not is_wrong


class Plain(nn.Module):
    """Without a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def test_a_loss_traced_with_the_model() -> None:
    """As written for serial training: a token mean with weights of classes, and a pair; names stay."""

    def loss_fn(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return tokens(output, targets["y"], weight=WEIGHTS) + 0.1 * output.square().mean()

    model = Plain()
    given = batch(7)
    x, targets = given.pop("x"), given
    pair = lambda output, y: (tokens(output, y, reduction="sum"), (y != -100).sum())  # noqa: E731
    for loss, wanted in ((loss_fn, targets), (pair, targets["y"])):
        traced = trace(model, (x, wanted), loss, layers=2, evaluation=False)
        assert {name for name, _ in traced.divide(0, 2).named_parameters()} == set(model.state_dict())
        assert traced.layer_names[0] == "first"
        expected: Any = loss(model(x), wanted)
        expected = expected[0] / expected[1] if loss is pair else expected
        values = traced.tensors_of(x, wanted)
        labels = [values[index] for index in traced.labels]
        last = traced.divide(0, 2)
        last.begin_loss(labels, 7)
        found = [last.loss(last(*(v[at] for v in values)), [v[at] for v in labels]) for at in _SHARES]
        torch.testing.assert_close(sum(found), expected)
    with pytest.raises(PartitionError, match=r"with a loss, example must be \(inputs, targets\)"):
        trace(model, x, pair)
    with pytest.raises(BatchError, match=r"must be \(tensor\) with targets tensor, as the model was traced"):
        traced.tensors_of(x)
    assert profile(traced, (x, targets["y"]), repeats=1).depth == 2


_SHARES = (slice(0, 1), slice(1, 5), slice(5, 7))


def slow(name: str) -> Any:
    return name if name in QUICK else pytest.param(name, marks=pytest.mark.long)


@pytest.mark.parametrize("name", [slow(name) for name in CATALOG])
def test_models_train_in_stages_as_serially(name: str) -> None:
    """Losses and weights of some steps in two and in four stages, then the loss in evaluation."""
    if name.startswith("transformers"):
        pytest.importorskip("transformers")
    for row in examine(CATALOG[name], steps=3):
        if name in REFUSED:
            assert REFUSED[name] in row["reason"]
        else:
            assert row["result"] == ("not evaluated" if name in UNEVALUATED else "equal"), row


STEPS = 3


def losses_of(name: str, trained: Callable[[nn.Module, Callable[[int], Any]], list[float]]) -> list[float]:
    """What training gives for a model of the catalog, whose batches differ by step."""
    model = CATALOG[name]

    def batch_of(step: int) -> Any:
        torch.manual_seed(1 + step)
        return model.batch()

    torch.manual_seed(0)
    return trained(deterministic(model.make()), batch_of)


def on_ranks(rank: int, size: int, name: str, accumulate: int) -> list[float]:
    torch.set_num_threads(1)

    def trained(model: nn.Module, batch_of: Callable[[int], Any]) -> list[float]:
        layered, plan = trace(model, batch_of(0), layers=3), plan_of([1, 2, 1], depth=3, microbatches=2)
        with Trainer(layered, plan, None, momentum, collectives="gloo", accumulate=accumulate) as trainer:
            return [*(trainer.step(batch_of(it)) for it in range(2 * STEPS)), trainer.evaluate(batch_of(0))]

    return losses_of(name, trained)


ON_RANKS = (
    "GPT2LMHeadModel",
    "T5ForConditionalGeneration",
    "BertForPreTraining",
    "ViTForImageClassification",
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "accumulate"),
    [(SEVERAL_LOSSES, 1), (SEVERAL_LOSSES, 2), *((f"transformers {it}", 1) for it in ON_RANKS)],
)
def test_a_models_own_loss_on_ranks(name: str, accumulate: int) -> None:
    """Weights of classes and a penalty, tied embeddings, two stacks: over unlike microbatches, replicas."""
    if name.startswith("transformers"):
        pytest.importorskip("transformers")

    def trained(model: nn.Module, batch_of: Callable[[int], Any]) -> list[float]:
        optimizer, losses = momentum(model.parameters()), []
        for step in range(2 * STEPS):
            loss = model(**batch_of(step))["loss"]
            (loss / accumulate).backward()
            if (step + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return [*losses, model.eval()(**batch_of(0))["loss"].item()]

    expected = losses_of(name, trained)
    settings = {"environ": {"ARBORCAST_TOPOLOGY": "full:4"}, "timeout_s": 280, "group_timeout_s": 200}
    for losses in run_ranks(4, on_ranks, name, accumulate, **settings):
        assert losses == pytest.approx(expected, abs=1e-6, rel=1e-6)


class Classifier(nn.Module):
    """Takes and returns dicts, and nobody has told it of a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 5)

    def forward(self, *, x: Tensor, mask: Tensor, doubled: bool = False) -> dict[str, Tensor]:
        hidden = torch.tanh(self.first(x))
        return {"logits": self.last(hidden) * (2 if doubled else 1), "kept": mask}


def counted(output: dict[str, Tensor], given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    each = output["logits"].square().sum(-1) * given["mask"]
    return each.sum(), output["kept"].sum()


def train_by_batches(rank: int, size: int) -> tuple[list[float], list[str]]:
    torch.set_num_threads(1)
    given = {name: value for name, value in batch(6).items() if name != "y"} | {"doubled": True}
    plan = plan_of([1, 2], depth=2, microbatches=2)
    traced = trace(Classifier(), given, layers=2, evaluation=False)
    with Trainer(traced, plan, counted, momentum, collectives="gloo") as trainer:
        losses = [trainer.step(given) for _ in range(STEPS)]
        errors = [said(lambda: trainer.step(given | {"doubled": False}))]
    with_loss = trace(Model(LOSSES["token mean"]), batch(), layers=2, evaluation=False)
    for it, loss_fn in ((traced, None), (with_loss, counted)):
        errors.append(said(lambda it=it, loss_fn=loss_fn: Trainer(it, plan, loss_fn, momentum)))
    return losses, errors


def test_a_loss_of_outputs_and_the_batch() -> None:
    """One dict for all; what the model is told in words must stay as it was traced."""
    model = Classifier()
    given = {name: value for name, value in batch(6).items() if name != "y"}
    optimizer = momentum(model.parameters())
    expected = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total, count = counted(model(**given, doubled=True), given)
        (total / count).backward()
        optimizer.step()
        expected.append((total / count).item())
    for losses, errors in run_ranks(3, train_by_batches, environ={"ARBORCAST_TOPOLOGY": "full:3"}):
        assert losses == pytest.approx(expected, abs=1e-6)
        assert errors == [
            "BatchError: batch: inputs must be {x, mask, doubled=True}, as the model was traced with, got "
            "{x, mask, doubled=False}",
            "InputError: loss_fn: must be a function of outputs and targets, as the model returns no loss",
            "InputError: loss_fn: must be None, as the model returns its loss (or leave the labels out of "
            "its inputs), got counted",
        ]


@pytest.mark.long
def test_profiles_of_dicts_and_own_losses() -> None:
    """The loss is a part of the last layer's time."""
    model, given = Model(LOSSES["token mean"]), batch()
    assert len(profile(model, given, repeats=1, fixed=False).layers) == trace(model, given).depth
    with pytest.raises(ProfileError, match="loss_fn must be None, as the model returns its loss"):
        profile(model, (given, given["y"]), counted, repeats=1)
    inputs = {name: value for name, value in given.items() if name != "y"}
    profile(Classifier(), (inputs, inputs), lambda output, it: counted(output, it)[0], repeats=1, fixed=False)


def test_rows_of_samples() -> None:
    """Views that keep a sample's rows together may be cut; those that mix them may not."""

    class Choices(nn.Module):
        def __init__(self, mixed: bool) -> None:
            super().__init__()
            self.first, self.last, self.mixed = nn.Linear(4, 4), nn.Linear(4, 1), mixed

        def forward(self, x: Tensor) -> Tensor:
            samples, choices, _ = x.shape
            x = (x.transpose(0, 1) if self.mixed else x).reshape(-1, 4)
            x = self.last(torch.tanh(self.first(x)))
            return x.view(choices, samples).t() if self.mixed else x.view(samples, choices)

    x = torch.randn(4, 3, 4)
    mixed, traced = (trace(Choices(it), x, layers="all", evaluation=False) for it in (True, False))
    assert not any(12 in it.shape for cut in range(mixed.depth) for it in mixed.crossing(cut))
    assert traced.depth == 5
    given: Any = torch.randn(7, 3, 4)
    expected = traced.model(given)
    for layer in range(traced.depth):
        given = traced.divide(layer, layer + 1)(given)
    assert torch.equal(given, expected)


def test_what_is_random_is_switched_off_for_comparisons() -> None:
    model = deterministic(nn.Sequential(nn.Dropout(0.3), nn.Linear(2, 2)))
    assert model[0].p == 0.0
