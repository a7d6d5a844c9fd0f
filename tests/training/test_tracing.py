"""Unmodified models cut at every legal place: the halves together are the model, in both modes."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from arborcast.pipeline.errors import PartitionError
from arborcast.pipeline.model.layered import Layered
from arborcast.pipeline.model.traced import Traced, trace
from tests.support.traced_models import Choosing, Language, Recurrent, Regularised, Residual


def words(samples: int) -> tuple[Tensor, ...]:
    return torch.randint(0, 11, (samples, 5)), torch.rand(samples, 5)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "residual": (Residual, lambda samples: (torch.randn(samples, 2, 4, 4),)),
    "language": (Language, words),
    "recurrent": (Recurrent, lambda samples: (torch.randn(samples, 3, 3),)),
    "regularised": (Regularised, lambda samples: (torch.randn(samples, 4),)),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are tiny: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def traced() -> dict[str, Traced]:
    torch.manual_seed(0)
    return {name: trace(make(), inputs(4), layers="all") for name, (make, inputs) in MODELS.items()}


def several(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, tuple) else (value,)


def run(model: nn.Module, forward: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Outputs, gradients and buffers of one pass, from the same state every time."""
    state = copy.deepcopy(model.state_dict())
    model.zero_grad()
    torch.manual_seed(1)
    outputs = several(forward(*(value.clone() for value in inputs)))
    sum(value.square().sum() for value in outputs).backward()  # type: ignore[union-attr]
    gradients = {name: None if it.grad is None else it.grad.clone() for name, it in model.named_parameters()}
    buffers = {name: it.clone() for name, it in model.named_buffers()}
    model.load_state_dict(state)
    return outputs, gradients, buffers


def in_parts(layered: Layered, *cuts: int) -> nn.Module:
    """The parts between cuts, one after the other; checks what crosses."""
    bounds = [0, *cuts, layered.depth]

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(layered.divide(*it) for it in pairwise(bounds))

        def forward(self, *inputs: Tensor) -> Any:
            values: Any = inputs
            for cut, part in zip(bounds, self.parts, strict=False):
                crossing = several(values)
                counts = [it.shape[dim] for it, dim in zip(crossing, layered.sample_dims(cut), strict=True)]
                assert counts == [len(inputs[0])] * len(crossing)
                values = part(*crossing)
            return values

    return Parts()


@pytest.mark.parametrize("name", MODELS)
def test_parts_are_the_model(traced: dict[str, Traced], name: str) -> None:
    """Halves at every legal cut, and each layer alone; with other numbers of samples than traced, also 1."""
    layered, model = traced[name], traced[name].model
    cases = [(training, MODELS[name][1](samples)) for training, samples in ((True, 3), (True, 1), (False, 2))]
    expected = [run(model.train(training), model, inputs) for training, inputs in cases]
    legal = range(1, layered.depth)
    for cut in (*((it,) for it in legal), tuple(legal)):
        parts = in_parts(layered, *cut)
        for (training, inputs), (outputs, gradients, buffers) in zip(cases, expected, strict=True):
            found = run(model, parts.train(training), inputs)
            for ours, theirs in zip(found[0], outputs, strict=True):
                assert torch.equal(ours, theirs), cut
            for key, gradient in gradients.items():
                assert (found[1][key] is None) == (gradient is None), (cut, key)
                if gradient is not None:
                    # Sums over the places where a parameter is used may go in another order.
                    torch.testing.assert_close(found[1][key], gradient, rtol=1e-5, atol=1e-6)
            for key, buffer in buffers.items():
                assert torch.equal(found[2][key], buffer), (cut, key)


@pytest.mark.parametrize("name", MODELS)
def test_names_and_states(traced: dict[str, Traced], name: str) -> None:
    """States of all layers together have the keys of the model; parameters are the model's own."""
    layered, model = traced[name], traced[name].model
    assert isinstance(layered, Layered)
    assert len(set(layered.layer_names)) == layered.depth
    whole = model.state_dict()
    assert list(layered.divide(0, layered.depth).state_dict()) == list(whole)
    states = [layered.divide(layer, layer + 1).state_dict() for layer in range(layered.depth)]
    assert set().union(*states) == set(whole)
    mine = dict(model.named_parameters(remove_duplicate=False))
    for layer in range(layered.depth):
        for key, parameter in layered.divide(layer, layer + 1).named_parameters(remove_duplicate=False):
            assert parameter is mine[key]


def test_layer_names_and_crossings(traced: dict[str, Traced]) -> None:
    """
    cut          1        2         3                4        5
    crosses      first    relu      relu and second  relu     mean
    """
    layered = traced["residual"]
    assert layered.layer_names == ("first", "norms.0", "second", "norms.1", "mean", "head")
    shapes = [[it.shape for it in layered.crossing(cut)] for cut in range(1, 6)]
    wide = (4, 4, 4, 4)
    assert shapes == [[wide], [wide], [wide, wide], [wide], [(4, 4)]]
    assert layered.crossing(1)[0].size_bytes == 4**4 * 4
    assert "norms.0.num_batches_tracked" in layered.divide(1, 2).state_dict()


def test_ties(traced: dict[str, Traced]) -> None:
    language = traced["language"]
    (tie,) = language.ties
    assert tie[0] == "words.weight"
    assert tie[1][0] == 0
    last = language.divide(tie[1][1], language.depth)
    assert {"words.weight", "head.weight"} <= set(last.state_dict())
    assert [name for name, _ in last.named_parameters()] == ["words.weight"]
    # Layers that compute something of a parameter for themselves use it too.
    assert [name for name, _ in traced["regularised"].ties] == ["weight"]
    assert not traced["residual"].ties


def test_masks_are_made_by_every_stage(traced: dict[str, Traced]) -> None:
    """A cut inside the attention is crossed by queries and the like, not by the mask."""
    language = traced["language"]
    crossing = {it.name for cut in range(1, language.depth) for it in language.crossing(cut)}
    copied = {it.name for it in language.training.items if it.copied}
    assert any("triu" in name for name in copied)
    assert not crossing & copied


def test_random_numbers_for_all_samples_are_drawn_once(traced: dict[str, Traced]) -> None:
    """`noise` of Regularised is used on both sides of all the cuts that are not legal."""
    faults = [cut.fault for cut in traced["regularised"].training.cuts]
    assert faults == ["rand is not made of samples"] * 5 + [""] * 4


def test_segments_stand_alone(traced: dict[str, Traced]) -> None:
    segment = traced["residual"].divide(0, 3)
    x = torch.randn(2, 2, 4, 4)
    for other in (copy.deepcopy(segment), pickle.loads(pickle.dumps(segment))):
        assert list(other.state_dict()) == list(segment.state_dict())
        for ours, theirs in zip(several(other(x)), several(segment(x)), strict=True):
            assert torch.equal(ours, theirs)


def test_checkpointing_repeats_dropout(traced: dict[str, Traced]) -> None:
    language = traced["language"]
    model = language.model.train()
    whole = language.divide(0, language.depth)
    inputs = words(3)
    plain = run(model, model, inputs)
    repeated = run(model, lambda *given: checkpoint(whole, *given, use_reentrant=False), inputs)
    assert torch.equal(plain[0][0], repeated[0][0])
    for name, gradient in plain[1].items():
        if gradient is not None:
            torch.testing.assert_close(repeated[1][name], gradient)


def test_autocast(traced: dict[str, Traced]) -> None:
    layered = traced["residual"]
    layered.model.train()
    x = torch.randn(3, 2, 4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = layered.divide(0, 1)(x)
        theirs = run(layered.model, layered.model, (x,))
        ours = run(layered.model, in_parts(layered, 3), (x,))
    assert first.dtype == torch.bfloat16
    assert ours[0][0].dtype == theirs[0][0].dtype
    assert torch.equal(ours[0][0], theirs[0][0])


def test_training_the_layers_trains_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    layered = trace(model.eval(), torch.randn(4, 3))
    assert not model.training
    assert not layered.divide(0, 1).training  # the mode of the model
    segment = layered.divide(0, layered.depth)
    optimizer = torch.optim.SGD(segment.parameters(), 0.1)
    before = model[0].weight.clone()
    segment(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


def test_tracing_leaves_the_model_and_the_random_state_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), Regularised())
    model[1].eval()
    example = torch.randn(4, 3)
    state, weights = torch.random.get_rng_state(), copy.deepcopy(model.state_dict())
    trace(model, example)
    assert torch.equal(state, torch.random.get_rng_state())
    assert [module.training for module in model] == [True, False, True, True]
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])


# How many layers ------------------------------------------------------------------------------------


def deep(layers: int, width: int = 16) -> nn.Module:
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))


def test_number_of_layers() -> None:
    model, example = deep(6, 512), torch.randn(2, 512)
    few, three, every = (trace(model, example, layers=it, evaluation=False) for it in (None, 3, "all"))
    assert few.layer_names == ("0", "2", "4", "6", "8", "10")  # ReLUs stay with theirs
    assert three.layer_names == ("0", "4", "8")
    assert every.depth == 12
    with pytest.raises(
        PartitionError, match=r"Sequential: layers must be in 1\.\.12, as it has 11 legal cuts, got 13"
    ):
        trace(model, example, layers=13, evaluation=False)


@pytest.mark.long
def test_layers_do_not_depend_on_the_number_of_samples() -> None:
    few, many = (trace(Language(), words(samples)) for samples in (2, 50))
    assert few.layer_names == many.layer_names
    assert few.cuts == many.cuts
    assert [it.shape[0] for it in many.crossing(1)] == [50] * len(many.crossing(1))


def test_at_most_64_layers() -> None:
    depth = trace(deep(80), torch.randn(16, 16), evaluation=False).depth
    assert 32 <= depth <= 64


@pytest.mark.parametrize(("start", "end"), [(0, 0), (3, 2), (-1, 2), (0, 99)])
def test_bad_ranges(traced: dict[str, Traced], start: int, end: int) -> None:
    with pytest.raises(PartitionError, match="layers must be 0 <= start < end <= 6"):
        traced["residual"].divide(start, end)


def test_no_such_boundary(traced: dict[str, Traced]) -> None:
    with pytest.raises(PartitionError, match=r"cut must be in 0\.\.6, got 7"):
        traced["residual"].sample_dims(7)


# What cannot be traced ------------------------------------------------------------------------------


class Written(nn.Module):
    """A linear layer, and a function of the module and its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(3))
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def behind(function: Callable[..., Any]) -> Written:
    """A function of what the linear layer makes."""
    return Written(lambda module, x, *others: function(module.linear(x), *others))


def error_of(model: nn.Module, *example: Tensor) -> str:
    with pytest.raises(PartitionError) as caught:
        trace(model, example)
    assert "\n" not in str(caught.value)
    return str(caught.value)


X = torch.randn(4, 3)


def test_control_flow_that_depends_on_data(capfd: pytest.CaptureFixture[str]) -> None:
    message = error_of(Choosing(), X)
    assert "model Choosing: cannot be traced at traced_models.py:" in message
    assert "(if x.sum() > 0:): control flow depends on the values of a tensor; rewrite it" in message
    assert "for an nn.Sequential, Divisible(*model)" in message
    assert capfd.readouterr().err == ""  # torch says the same on a page


def test_a_loss_inside_the_model() -> None:
    """It may be used, but no cut parts it from what uses it.

    linear | broadcast its parts | mse_loss cos sin tanh mul
    """
    target = torch.rand(4, 3)

    def scaled(y: Tensor, t: Tensor) -> Tensor:
        penalty = nn.functional.mse_loss(y, t)
        return torch.tanh(torch.sin(torch.cos(y))) * penalty

    layered = trace(behind(scaled), (X, target), layers="all", evaluation=False)
    crossing = {it.name for cut in range(layered.depth + 1) for it in layered.crossing(cut)}
    assert "mse_loss" not in crossing
    assert layered.depth == 3


class Answer(dict[str, Any]):
    """Named values, as some models return them."""


class KeyCache:
    """What is no tensor, and holds some."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda y: y.mean(0), "output 0 (mean) must have one dimension as long as there are samples"),
        (lambda y: (y, y.t() @ y), "output 1 (matmul) must have one dimension"),
        (lambda y: y.repeat_interleave(2, 0), "must have one dimension as long as there are samples"),
        (lambda y: {"a": y, "b": y.t() @ y}, "output b (matmul) must have one dimension"),
        (lambda y: (None, "words"), "must return tensors, got (None, 'words')"),
        (
            lambda y: Answer(start=y, past_key_values=KeyCache()),
            "must return tensors, got Answer(start, past_key_values=KeyCache) (pass use_cache=False)",
        ),
        (
            lambda y: {"a": y.sum(), "b": y.mean()},
            "must call the loss among the numbers that it returns `loss`",
        ),
        (lambda y: y.view(4, 3), "it allows only 4 samples; take the number from the input's shape"),
    ],
)
def test_what_does_not_fit(function: Callable[..., Any], message: str) -> None:
    assert message in error_of(behind(function), X)


def test_an_operator_without_a_shape_function() -> None:
    @torch.library.custom_op("arborcast_test::opaque", mutates_args=())
    def opaque(x: Tensor) -> Tensor:
        return x.clone()

    message = error_of(behind(opaque), X)
    assert "test_tracing.py:" in message
    assert "operator arborcast_test::opaque has no shape function; register one with torch.library" in message


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ((), "example must have at least one input, got none"),
        ((torch.randn(1, 3),), "example must have at least 2 samples, got 1"),
        ((X, torch.randn(5, 3)), r"as many samples as the first (4), got 5 for input 1"),
        ((torch.tensor(1.0),), "input 0 of the example must have a sample dimension"),
        ((X, KeyCache()), "input 1 of the example must be a tensor, got KeyCache"),
        ((X, 3), "forward does not take the example, (tensor, 3): too many positional arguments"),
        ({"x": X}, "forward does not take the example, {x}: missing a required argument: 'input'"),
    ],
)
def test_bad_examples(example: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PartitionError, match=re.escape(message)):
        trace(nn.Linear(3, 3), example)


def test_a_buffer_that_forward_replaces_is_changed_in_place() -> None:
    def counting(module: nn.Module, x: Tensor) -> Tensor:
        module.seen = module.seen + x.detach().mean(0)
        return x + module.seen

    model = Written(counting)
    layered = trace(model, X, layers="all", evaluation=False)
    model.train()
    layered.divide(0, layered.depth)(X)
    torch.testing.assert_close(model.seen, X.mean(0))


def test_evaluation_with_other_operators() -> None:
    """Training works; evaluation says which operator is in the way."""

    model = Written(
        lambda it, x: torch.tanh(it.linear(x) * 0.5) if it.training else torch.sigmoid(it.linear(x))
    )
    layered = trace(model, X)
    segment = layered.divide(0, layered.depth)
    assert torch.equal(segment(X), model(X))
    with pytest.raises(
        PartitionError, match=r"cannot be evaluated in stages: in training it runs aten\.mul\.Tensor"
    ):
        segment.eval()(X)
    once = trace(model, X, evaluation=False).divide(0, layered.depth)
    assert torch.equal(once(X), model(X))
    with pytest.raises(PartitionError, match="Written: must be traced with evaluation=True to be evaluated"):
        once.eval()(X)


def test_training_may_ask_for_contiguous_values() -> None:
    """As attention does that is given dropout."""

    def transposed(module: nn.Module, x: Tensor) -> Tensor:
        x = torch.stack([module.linear(x), x], 1).transpose(1, 2)
        return torch.tanh((x.contiguous() if module.training else x) * 0.5)

    model = Written(transposed)
    layered = trace(model, X, layers="all")
    for mode in (True, False):
        model.train(mode)
        values: Any = (X,)
        for layer in range(layered.depth):
            values = layered.divide(layer, layer + 1)(*values)
            values = values if isinstance(values, tuple) else (values,)
        assert torch.equal(values[0], model(X))


class Attention(nn.Module):
    """With the weights of attention asked for, evaluation leaves dropout out."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x, x, x)[0]
        return torch.tanh(result)


def twice(module: nn.Module, x: Tensor) -> Tensor:
    """A batch norm applied twice, which counts twice in training."""
    return torch.relu(module.norm(torch.tanh(module.norm(x))))


def nested(module: nn.Module, x: Tensor) -> Tensor:
    """Control flow that torch can express, recomputation and casts of its own."""
    x = checkpoint(module.linear, x, use_reentrant=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.sigmoid(module.linear(x))
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (torch.tanh(x),)).float()


def pasted(module: nn.Module, x: Tensor) -> Tensor:
    """Parts of batches written into zeros, and a mask made by writing into ones."""
    out = torch.zeros(x.shape[0], 6)
    out[:, :3] = torch.tanh(x)
    out[:, 3:] = torch.sin(x)
    mask = torch.ones(6)
    mask[2:] = 0.5
    return torch.tanh(torch.sigmoid(out * mask) + mask)


LEAST = {twice: 2, nested: 3, pasted: 4}
"""Layers, at least."""


@pytest.mark.parametrize(
    ("model", "shape", "least"),
    [
        pytest.param(Attention(), (3, 4), 4, id="attention"),
        *(pytest.param(Written(it), (3,), least, id=it.__name__) for it, least in LEAST.items()),
    ],
)
def test_what_can_be_cut_all_the_same(model: nn.Module, shape: tuple[int, ...], least: int) -> None:
    layered = trace(model, torch.randn(4, *shape), layers="all")
    assert layered.depth >= least
    state = copy.deepcopy(model.state_dict())
    inputs = torch.randn(3, *shape, requires_grad=True)
    for training in (True, False):
        for cut in range(1, layered.depth):
            found = []
            for module in (model.train(training), in_parts(layered, cut).train(training)):
                model.load_state_dict(state)
                torch.manual_seed(0)
                output = module(inputs)
                found.append((output, *torch.autograd.grad(output.sum(), inputs), *model.buffers()))
                found[-1] = tuple(value.clone() for value in found[-1])
            for ours, theirs in zip(*found, strict=True):
                assert torch.equal(ours, theirs), (cut, training)


def test_tokens_of_several_samples_in_one_dimension() -> None:
    """Token after token, each of all samples: what belongs to some samples lies apart, so no cut there."""

    def flattened(x: Tensor) -> Tensor:
        turned = x.transpose(0, 1)
        return torch.tanh(torch.sin(turned.reshape(-1, 3))).view(turned.shape).transpose(0, 1)

    with pytest.raises(
        PartitionError,
        match=r"as it has 3 legal cuts, got 5 .*reshape has no one dimension that counts samples",
    ):
        trace(behind(flattened), torch.randn(4, 5, 3), layers=5, evaluation=False)


class ProductOfThree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("sd,ed,sd->se", x, self.weight, x)


def test_a_product_of_three_is_traced_for_any_number_of_samples() -> None:
    """Where opt_einsum is installed, torch has it choose an order for the sizes that are there."""
    model, inputs = ProductOfThree(), torch.randn(3, 8)
    torch.testing.assert_close(in_parts(trace(model, torch.randn(5, 8)))(inputs), model(inputs))
