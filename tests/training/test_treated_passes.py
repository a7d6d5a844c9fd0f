"""Stages that keep, recompute or offload: gradients to the bit, and bytes exactly as predicted."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arborcast.pipeline.costs.analytic import analyse
from arborcast.pipeline.costs.devices import V100
from arborcast.pipeline.costs.saved_bytes import Segment, Treatment, described, moments
from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.run.activation_treatment import TreatedPasses, divided
from arborcast.pipeline.run.batch_norm import statistics_once

KEEP, RECOMPUTE, OFFLOAD = Treatment
WIDTH, SAMPLES, FIRST = 16, 4, 1
CHOICES = [
    ((KEEP, 5),),
    ((RECOMPUTE, 5),),
    ((RECOMPUTE, 1), (RECOMPUTE, 2), (RECOMPUTE, 2)),
    ((KEEP, 1), (RECOMPUTE, 2), (KEEP, 1), (RECOMPUTE, 1)),
    ((OFFLOAD, 5),),
    ((KEEP, 2), (OFFLOAD, 1), (KEEP, 1), (OFFLOAD, 1)),
    ((OFFLOAD, 2), (RECOMPUTE, 2), (OFFLOAD, 1)),
]


def segments_of(choice, start=FIRST):
    made = []
    for treatment, layers in choice:
        made.append(Segment(start, start + layers, treatment))
        start += layers
    return tuple(made)


def named(choice):
    return described(segments_of(choice))


def block(factor):
    """What autograd keeps of it: the input, twice what the middle is, and the mask of the dropout."""
    wide = factor * WIDTH
    return nn.Sequential(nn.Linear(WIDTH, wide), nn.Tanh(), nn.Dropout(0.3), nn.Linear(wide, WIDTH))


def model():
    torch.manual_seed(0)
    normed = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))
    return Divisible([nn.Linear(WIDTH, WIDTH), block(2), normed, block(3), nn.ReLU(inplace=True), block(1)])


class LiveBytes(TorchDispatchMode):
    """The memory that forward passes have made: now, and at most during backward passes.

    A forward pass runs with gradients enabled, when it is repeated too; a backward pass does not.
    """

    def __init__(self, *without: Tensor) -> None:
        super().__init__()
        self.without = {it.untyped_storage()._cdata for it in without}
        self.made: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            for it in tree_leaves(result):
                if isinstance(it, Tensor) and it.untyped_storage()._cdata not in self.without:
                    self.made[StorageWeakRef(it.untyped_storage())] = it.untyped_storage().nbytes()
        else:
            self.most = max(self.most, self.now())
        return result

    def now(self) -> int:
        self.made = {it: size for it, size in self.made.items() if not it.expired()}
        return sum(self.made.values())

    def leave_out(self, tensor: Tensor) -> None:
        self.made.pop(StorageWeakRef(tensor.untyped_storage()), None)


def once(module):
    """Running statistics count a microbatch once."""
    return nullcontext(), statistics_once(module)


def twice(module):
    """They count it again, and need no copies meanwhile."""
    return nullcontext(), nullcontext()


def run(choice, contexts=once, microbatches=3, end=lambda made: made):
    """Forward and backward passes of the stage: gradients and buffers, bytes kept, at most and moved."""
    whole, segments = model(), segments_of(choice)
    stage = divided(whole, segments)
    treated = TreatedPasses(stage, segments, contexts)
    inputs = [torch.rand(SAMPLES, WIDTH, requires_grad=True) for _ in range(microbatches)]
    state = [it for module in whole.children() for it in (*module.parameters(), *module.buffers())]
    live = LiveBytes(*inputs, *state)
    with live:
        ends = []
        for number, one in enumerate(inputs):
            torch.manual_seed(number)
            ends.append(treated.forward((one,), lambda again, it: (it.view_as(it),), end))
            live.leave_out(ends[-1])  # counted where it is taken
        kept = live.now()
        with torch.no_grad():
            while ends:
                end = ends.pop(0)
                torch.autograd.backward(end, end.detach().cos())
                del end
        assert live.now() == 0
    gradients = [it.grad for it in (*inputs, *stage.parameters())]
    return gradients, list(stage.buffers()), kept, live.most, treated.moved_bytes


@pytest.mark.parametrize("choice", CHOICES[1:], ids=named)
def test_gradients_and_statistics_are_equal_to_the_bit(choice):
    torch.manual_seed(7)
    expected = run(CHOICES[0])
    torch.manual_seed(7)
    found = run(choice)
    for one, other in zip((*expected[0], *expected[1]), (*found[0], *found[1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("choice", CHOICES, ids=named)
def test_bytes_are_those_of_the_prediction(choice):
    """Of what the stage takes in, which the caller holds, the prediction counts the bytes as well."""
    profile = analyse(model(), torch.rand(SAMPLES, WIDTH), V100)
    segments = segments_of(choice)
    predicted = moments(profile, segments, SAMPLES)
    _, _, kept, most, moved = run(choice, twice)
    taken = SAMPLES * WIDTH * 4
    assert kept == 3 * (predicted[-1].kept - taken)
    if OFFLOAD not in dict(choice):  # what comes back is not made by the thread that counts
        fullest = max(it.held for it in predicted)  # what is saved alone
        assert most == 2 * predicted[-1].kept + fullest - 3 * taken
    if all(treatment is OFFLOAD for treatment, _ in choice):
        assert moved == 3 * (moments(profile, segments_of(CHOICES[0]), SAMPLES)[-1].kept - taken)
    else:
        assert (moved > 0) == (OFFLOAD in dict(choice))


@pytest.mark.parametrize("choice", CHOICES[1:3], ids=named)
def test_a_loss_belongs_to_the_last_segment(choice):
    """Of which a checkpoint keeps what it takes in: nothing of the loss, which is larger than all else."""

    def loss(made):
        return torch.outer(made.flatten(), made.flatten()).logsumexp(0).mean()

    torch.manual_seed(7)
    expected = run(CHOICES[0], end=loss)
    torch.manual_seed(7)
    found = run(choice, twice, end=loss)
    assert found[2] == run(choice, twice)[2]
    assert expected[2] - run(CHOICES[0])[2] > 3 * (SAMPLES * WIDTH) ** 2
    for one, other in zip(expected[0], found[0], strict=True):
        assert torch.equal(one, other)


def test_a_segment_that_changes_what_it_takes_begins_again_with_the_same():
    """A ReLU in place at the head of a checkpoint, of a tensor that another layer gave."""
    torch.manual_seed(0)
    layers = [
        nn.Linear(4, 4),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
    ]
    found = []
    for treatment in (KEEP, RECOMPUTE):
        whole = copy.deepcopy(Divisible(layers))
        segments = Segment(0, 1, KEEP), Segment(1, 2, treatment)
        treated = TreatedPasses(divided(whole, segments), segments, once)
        for _ in range(2):  # the second time it is known whether a copy is needed
            made = treated.forward(
                (torch.ones(3, 4),), lambda again, it: (it,), lambda made: made.square().sum()
            )
            made.backward()
        found.append([it.grad for it in whole.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("first", [KEEP, OFFLOAD])
def test_what_layers_behind_kept_is_gone_when_a_layer_goes_back(first):
    """Also where others of the stage are offloaded, whose hooks autograd has until the last is through."""
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            made = x.tanh()
            made.register_hook(lambda _: seen.append(live.now()))
            return made

    whole = Divisible([nn.Identity(), Look(), nn.Tanh(), nn.Tanh()])
    segments = segments_of(((first, 1), (KEEP, 2)))
    treated = TreatedPasses(divided(whole, segments), segments, once)
    x = torch.rand(SAMPLES, WIDTH, requires_grad=True)
    live = LiveBytes(x)
    with live:
        root = torch.autograd.graph.get_gradient_edge(
            treated.forward((x,), lambda _, it: (it,), lambda it: it)
        )
        with torch.no_grad():
            torch.autograd.backward([root], [torch.ones(SAMPLES, WIDTH)])
    assert seen == [SAMPLES * WIDTH * 4]  # what the first tanh has made, which it needs itself
