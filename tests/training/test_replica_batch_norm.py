"""Batch norm over replicas against torch's own over the whole microbatch; statistics of repeated passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from arborcast.pipeline.errors import BatchError, PartitionError
from arborcast.pipeline.run.batch_norm import (
    BatchNorms,
    _merge,
    find_batch_norm,
    statistics_once,
)
from arborcast.pipeline.stages import shares
from tests.support.packed import pack, unpack
from tests.support.ranks import run_ranks

RANKS_IMPORT = ("torch._dynamo",)

CASES: tuple[tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype], ...] = (
    (lambda: nn.BatchNorm1d(3), (7, 3), torch.float32),
    (lambda: nn.BatchNorm1d(3, momentum=None), (8, 3, 5), torch.float64),
    (lambda: nn.BatchNorm2d(3, momentum=0.3), (5, 3, 2, 4), torch.float32),
    (lambda: nn.BatchNorm2d(2, affine=False), (4, 2, 3, 3), torch.float64),
    (lambda: nn.BatchNorm2d(2, track_running_stats=False), (4, 2, 3, 3), torch.float64),
    (lambda: nn.BatchNorm2d(2, eps=0.1), (3, 2, 1, 1), torch.float64),
    (lambda: nn.BatchNorm3d(2), (7, 2, 2, 1, 3), torch.float32),
)


class Traced(nn.Module):
    """Two layers with batch norm in between, the second norm called as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        return nn.functional.batch_norm(x, self.mean, self.var, training=True, momentum=0.2)


def aten_graph() -> fx.GraphModule:
    """What torch.export makes of `Traced`, by hand: exporting takes seconds."""
    torch.manual_seed(3)
    model = Traced()
    graph = fx.Graph()
    names = ("first.weight", "first.bias", "norm.weight", "norm.bias")
    first, bias, weight, shift = (graph.get_attr(name) for name in names)
    mean, var = graph.get_attr("norm.running_mean"), graph.get_attr("norm.running_var")
    count, mean2, var2 = (graph.get_attr(name) for name in ("norm.num_batches_tracked", "mean", "var"))
    x = graph.placeholder("x")
    aten = torch.ops.aten
    linear = graph.call_function(aten.linear.default, (x, first, bias))
    graph.call_function(aten.add_.Tensor, (count, 1))
    norm = (linear, weight, shift, mean, var, True, 0.1, 1e-5, False)
    relu = graph.call_function(aten.relu.default, (graph.call_function(aten.batch_norm.default, norm),))
    last = (relu, None, None, mean2, var2, True, 0.2, 1e-5, True)
    graph.output(graph.call_function(aten.batch_norm.default, last))
    return fx.GraphModule(model, graph)


def fx_graph() -> fx.GraphModule:
    torch.manual_seed(3)
    return fx.symbolic_trace(Traced())


def made(case: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A norm with drawn weights, inputs of three microbatches, and the gradients of its outputs."""
    make, shape, dtype = CASES[case]
    torch.manual_seed(case)
    norm = make().to(dtype)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    return norm, torch.randn(3, *shape, dtype=dtype) * 3 + 5, torch.randn(3, *shape, dtype=dtype)


def passes(module: nn.Module, x: Tensor, gradient: Tensor | None = None, **how: Any) -> list[Tensor]:
    """Outputs of all microbatches, gradients of their inputs, one tensor for each."""
    inputs = [part.clone().requires_grad_() for part in x]
    run = how.get("run", module)
    outputs = [run(part) for part in inputs]
    for number, output in enumerate(outputs):
        output.backward(torch.ones_like(output) if gradient is None else gradient[number])
    gradients = [part.grad for part in inputs]
    assert all(value is not None for value in gradients)
    return [torch.stack([it.detach() for it in outputs]), torch.stack(gradients)]  # type: ignore[arg-type]


def facts(module: nn.Module) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    return module.state_dict(), [parameter.grad for parameter in module.parameters()]


def replica(rank: int, size: int) -> bytes:
    """Everything that needs replicas, on one of them: inputs are shares, answers are this one's own."""
    group = dist.group.WORLD
    answers: dict[str, Any] = {}

    def mine(x: Tensor) -> Tensor:
        start, stop = shares(x.shape[1], size)[rank]
        return x[:, start:stop]

    for case in range(len(CASES)):
        norm, x, gradient = made(case)
        assert len(find_batch_norm(norm)) == 1
        with BatchNorms(norm, group, is_deferred=False):
            answers[f"case {case}"] = passes(norm, mine(x), mine(gradient)), facts(norm)
    for name, graph in (("aten", aten_graph()), ("fx", fx_graph())):
        x = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(9))
        assert len(find_batch_norm(graph)) == 2
        with BatchNorms(graph, group, is_deferred=False):
            answers[name] = passes(graph, mine(x), mine(weights_like(x))), facts(graph)
    norm, x, gradient = made(2)
    norms = BatchNorms(norm, group, is_deferred=False)

    def recomputed(part: Tensor) -> Tensor:
        with norms:
            again: Any = checkpoint(
                norm,
                part,
                use_reentrant=False,
                context_fn=lambda: (nullcontext(), statistics_once(norm, norms)),
            )
        return again

    answers["recomputed"] = passes(norm, mine(x), mine(gradient), run=recomputed), facts(norm)
    norm, x, gradient = made(2)
    norms = BatchNorms(norm, group, is_deferred=False)
    with norms, torch.no_grad():  # far from zero: sums of squares would lose all digits
        answers["far"] = norm(mine(x)[0] + 1e4)
    with norms, torch.autocast("cpu", torch.bfloat16):
        answers["half"] = norm(mine(x)[0].bfloat16()).dtype
    if rank == 0:  # nobody else takes part
        norm.eval()
        with norms:
            answers["eval"] = norm(x[0])
        norm.train()
        answers["restored"] = norm(x[0])
    tiny = nn.BatchNorm1d(2)
    alone = BatchNorms(tiny, dist.new_group([rank], use_local_synchronization=True), is_deferred=False)
    message = r"must have more than 1 value per channel, got \(1, 2\)"
    with alone, pytest.raises(BatchError, match=message):
        tiny(torch.ones(1, 2))
    return pack(answers)


def weights_like(x: Tensor) -> Tensor:
    return torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(8))


def check(answers: list[Any], module: nn.Module, x: Tensor, gradient: Tensor) -> None:
    """All replicas' answers together against the module in this process."""
    precise = {"rtol": 1e-5, "atol": 2e-6} if x.dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    want = passes(module, x, gradient)
    for index in range(2):
        got = torch.cat([replicas[index] for replicas, _ in answers], dim=1)
        torch.testing.assert_close(got, want[index], **precise)
    state, gradients = facts(module)
    for _, (theirs, _) in answers:
        assert list(theirs) == list(state)
        for name, value in state.items():
            torch.testing.assert_close(
                theirs[name], value, **(precise | {"rtol": min(precise["rtol"], 1e-6)})
            )
    for index, value in enumerate(gradients):
        if value is not None:
            total = sum(theirs[index] for _, (_, theirs) in answers)
            torch.testing.assert_close(total, value, **precise)


def test_replicas_normalise_over_the_whole_microbatch() -> None:
    answers = [unpack(answer) for answer in run_ranks(3, replica)]
    for case in range(len(CASES)):
        check([answer[f"case {case}"] for answer in answers], *made(case))
    x = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(9))
    for name, graph in (("aten", aten_graph()), ("fx", fx_graph())):
        check([answer[name] for answer in answers], graph, x, weights_like(x))
    check([answer["recomputed"] for answer in answers], *made(2))
    norm, x, _ = made(2)
    exact = norm.double()(x[0].double() + 1e4)
    far = torch.cat([answer["far"] for answer in answers])
    torch.testing.assert_close(far.double(), exact, rtol=1e-3, atol=5e-3)  # x itself has lost three digits
    assert {answer["half"] for answer in answers} == {torch.bfloat16}
    assert answers[0]["eval"].shape == x[0].shape
    norm = made(2)[0]
    torch.testing.assert_close(answers[0]["restored"], norm(x[0]))


@given(
    st.lists(
        st.lists(st.integers(-1000, 1000), min_size=1, max_size=5),
        min_size=1,
        max_size=5,
    )
)
def test_merged_statistics_are_those_of_all_samples(parts: list[list[int]]) -> None:
    tensors = [torch.tensor(part, dtype=torch.float64) for part in parts]
    rows = [
        torch.stack([t.mean(), (t - t.mean()).square().sum(), torch.tensor(float(len(t)))]) for t in tensors
    ]
    mean, squares, total = _merge(torch.stack(rows).double(), 1)
    whole = torch.cat(tensors)
    torch.testing.assert_close(mean[0], whole.mean(), rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(squares[0], (whole - whole.mean()).square().sum(), rtol=1e-12, atol=1e-6)
    assert total.item() == len(whole)


def test_what_is_found_and_what_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.InstanceNorm2d(2), nn.SyncBatchNorm(2))
    assert find_batch_norm(model[:3]) == ("1",)
    with pytest.raises(
        PartitionError,
        match=r"batch norm 3: on a replicated stage, or deferred, must be nn.BatchNorm1d, 2d or",
    ):
        find_batch_norm(model)
    graph = aten_graph()
    assert find_batch_norm(graph) == ("batch_norm_default", "batch_norm_default_1")
    call = next(at for at in graph.graph.nodes if at.name == "batch_norm_default_1")
    call.target = torch.ops.aten._native_batch_norm_legit.default
    with pytest.raises(
        PartitionError,
        match=r"batch_norm_default_1: on a replicated stage, or deferred, must be a call of aten.batch",
    ):
        find_batch_norm(graph)
    lazy = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(PartitionError, match="got LazyBatchNorm1d"):
        find_batch_norm(lazy)


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), aten_graph])
def test_recomputation_counts_each_microbatch_once(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make()
    serial = copy.deepcopy(module)
    x = torch.randn(3, 5, 3)

    def recomputed(part: Tensor) -> Tensor:
        again: Any = checkpoint(
            module, part, use_reentrant=False, context_fn=lambda: (nullcontext(), statistics_once(module))
        )
        return again

    gradient = weights_like(x)
    got, want = passes(module, x, gradient, run=recomputed), passes(serial, x, gradient)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for (name, value), theirs in zip(serial.state_dict().items(), module.state_dict().values(), strict=True):
        assert torch.equal(value, theirs), name


def test_statistics_come_back_between_passes_in_flight() -> None:
    # F0, F1, then B0 with its repeated pass, then B1: the second backward pass holds the same buffers.
    norm = nn.BatchNorm1d(2)
    first, second = torch.randn(2, 4, 2)
    outputs = [norm(first.requires_grad_()), norm(second.requires_grad_())]
    before = copy.deepcopy(norm.state_dict())
    with statistics_once(norm):
        norm(first)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    for output in outputs:
        output.square().sum().backward()


class Counts(nn.Module):
    """Puts a new tensor where its buffer was, as some moving averages do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x


def test_buffers_that_are_replaced_come_back_too() -> None:
    module = nn.Sequential(Counts())
    with pytest.raises(KeyError), statistics_once(module):  # as recomputation, which ends early by an error
        module(torch.ones(1))
        raise KeyError
    assert module[0].count.item() == 0
