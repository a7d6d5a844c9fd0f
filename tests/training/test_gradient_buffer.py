"""The gradients of a stage in one tensor: views, one collective, and what no backward pass touched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from arborcast.pipeline.run.gradients import (
    GradientBuffer,
    Gradients,
    ShardedGradients,
    SummedGradients,
)
from arborcast.pipeline.stages import shares
from tests.support.packed import pack, unpack
from tests.support.ranks import run_ranks

RANKS_IMPORT = ("torch._dynamo",)


class Forked(nn.Module):
    """Which of two layers a sample goes through is a matter of its first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.low = nn.Linear(4, 2)
        self.high = nn.Linear(4, 2)
        self.never = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        high = x[:, 0] > 0
        parts = [layer(hidden[here]) for layer, here in ((self.low, ~high), (self.high, high)) if here.any()]
        return torch.cat(parts)


def forked() -> Forked:
    torch.manual_seed(1)
    return Forked()


def sgd(model: nn.Module) -> torch.optim.SGD:
    # Weight decay moves a parameter whose gradient is 0, and not one whose gradient is None.
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)


def batch(step: int) -> Tensor:
    """Five samples; only in step 1 does any of them, the last one, go through the layer `high`."""
    x = -torch.rand(5, 3, generator=torch.Generator().manual_seed(step)) - 0.1
    if step == 1:
        x[4, 0] = 1.0
    return x


def train_serially() -> dict[str, Tensor]:
    model = forked()
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step)).square().sum().backward()
        optimizer.step()
    return model.state_dict()


def test_gradients_are_views_of_one_tensor_per_type() -> None:
    first = nn.Parameter(torch.randn(2, 3))
    double = nn.Parameter(torch.randn(4, dtype=torch.float64))
    images = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    transposed = nn.Parameter(torch.randn(3, 5).t())
    scalar = nn.Parameter(torch.tensor(2.0))
    frozen = nn.Parameter(torch.randn(7), requires_grad=False)
    buffer = GradientBuffer([first, double, images, first, frozen, transposed, scalar])
    single, exact = buffer.tensors
    assert (single.numel(), exact.numel()) == (6 + 120 + 15 + 1, 4)
    assert all(parameter.grad is not None for parameter in buffer.parameters)
    single.copy_(torch.arange(142))
    assert first.grad is not None and first.grad.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert scalar.grad is not None and scalar.grad.item() == 141
    for parameter in (images, transposed):
        assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
        assert set(range(6, 141)) >= set(parameter.grad.flatten().int().tolist())
    assert frozen.grad is None
    assert len(buffer.parameters) == 5


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((3, 4), (4, 1), True),
        ((2, 3), (1, 2), True),
        ((1, 3), (7, 1), True),  # no step is taken along one element
        ((1, 3), (1, 2), False),
        ((4, 3), (6, 2), False),  # every other column of a wider matrix
    ],
)
def test_gradients_have_the_strides_of_dense_parameters(
    shape: tuple[int, ...], strides: tuple[int, ...], dense: bool
) -> None:
    odd = nn.Parameter(torch.empty_strided(shape, strides).fill_(1.0))
    before, after = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(40))
    buffer = GradientBuffer([before, odd, after])
    factors = torch.arange(1.0, 1 + odd.numel()).reshape(shape)
    (before.sum() + (odd * factors).sum() + after.sum()).backward()
    assert before.grad is not None and odd.grad is not None and after.grad is not None
    assert before.grad.tolist() == [1.0] * 5 and torch.equal(odd.grad, factors)
    assert after.grad.tolist() == [1.0] * 40
    assert buffer.tensors[0].sum() == 5 + factors.sum() + 40
    assert (odd.grad.stride() == strides) == dense


def test_backward_passes_add_up_in_the_buffer() -> None:
    model, serial = forked(), forked()
    buffer = GradientBuffer(model.parameters())
    buffer.tensors[0].fill_(7.0)
    buffer.zero()
    for step in range(2):
        model(batch(step)).square().sum().backward()
        serial(batch(step)).square().sum().backward()
    want = [p.grad for p in serial.parameters() if p.grad is not None]
    assert torch.equal(buffer.tensors[0][:36], torch.cat([g.flatten() for g in want])[:36])
    assert [p for p in buffer.parameters if p not in set(buffer.used())] == list(model.never.parameters())
    buffer.detach_unused()
    assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in serial.parameters()]


def test_without_replicas_gradients_are_as_in_serial_training() -> None:
    """No memory of our own, so that the first backward pass has nothing to add to."""
    model, serial = forked(), forked()
    gradients = Gradients(model.parameters())
    for _ in range(2):
        gradients.zero()
        assert gradients.tensors == () and gradients.used() == ()
        for step in range(2):
            model(batch(step)).square().sum().backward()
    for step in range(2):
        serial(batch(step)).square().sum().backward()
    assert [it.grad is None for it in model.parameters()] == [it.grad is None for it in serial.parameters()]
    found = {id(it): it for it in gradients.tensors}
    for ours, theirs in zip(model.parameters(), serial.parameters(), strict=True):
        if ours.grad is not None and theirs.grad is not None:
            assert torch.equal(found.pop(id(ours.grad)), theirs.grad)
    assert not found and set(gradients.used()) == set(model.parameters()) - set(model.never.parameters())
    gradients.close()
    assert all(it.grad is None for it in model.parameters()) and gradients.parameters == ()


def test_a_gradient_that_comes_summed_is_used() -> None:
    used, unused, frozen = (nn.Parameter(torch.ones(2), requires_grad=grows) for grows in (True, True, False))
    gradients = SummedGradients([used, unused, frozen])
    used.sum().backward()
    gradients.detach_unused()
    assert list(map(id, gradients.used())) == [id(used)] and used.grad is not None


def test_sharded_gradients_are_summed_in_the_last_pass_of_their_stage() -> None:
    said: list[tuple[str, str, bool]] = []

    class Sharded(nn.Linear):
        """Stands for a module that FSDP2 sharded."""

        def __init__(self, name: str) -> None:
            super().__init__(1, 1)
            self.name = name

        def set_requires_gradient_sync(self, value: bool) -> None:
            said.append((self.name, "sums", value))

        def set_is_last_backward(self, value: bool) -> None:
            said.append((self.name, "last", value))

    stages = {0: nn.Sequential(nn.Linear(1, 1), Sharded("a")), 1: Sharded("b")}
    gradients = ShardedGradients(stages[0].parameters(), stages)
    assert list(map(id, gradients.parameters)) == list(map(id, stages[0].parameters()))
    gradients.hold()
    assert said == [(name, what, False) for name in "ab" for what in ("sums", "last")]
    said.clear()
    with gradients.last_pass(1):
        assert said == [("b", "sums", True), ("b", "last", True)]
    assert len(said) == 2


def test_attach_brings_back_what_zero_grad_took() -> None:
    model = nn.Linear(2, 2)
    buffer = GradientBuffer(model.parameters())
    model.zero_grad(set_to_none=True)
    assert model.weight.grad is None
    buffer.attach()
    model(torch.ones(1, 2)).sum().backward()
    assert buffer.tensors[0].tolist() == [1.0] * 6


def test_closed_buffer_lets_go_of_parameters() -> None:
    model = nn.Linear(2, 1)
    buffer = GradientBuffer(model.parameters())
    buffer.close()
    model(torch.ones(1, 2)).sum().backward()
    assert buffer.used() == () and buffer.tensors == ()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[1.0, 1.0]]
    copy.deepcopy(model)


def test_closed_buffer_is_told_of_no_more_gradients() -> None:
    told = []

    class Told(GradientBuffer):
        def _add(self, parameter: Tensor) -> None:
            told.append(parameter)

    parameter = nn.Parameter(torch.ones(2))
    buffer = Told([parameter])
    parameter.sum().backward()
    buffer.close()
    parameter.sum().backward()
    assert len(told) == 1


GROUP: Any = "replicas"


class Calls:
    """Stands for torch.distributed: which buckets have begun to be summed, by how many elements they have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[int] = []
        self.summed: list[Tensor] = []
        monkeypatch.setattr(dist, "all_reduce", self)

    def __call__(self, tensor: Tensor, group: object, async_op: bool) -> Calls:
        self.begun.append(tensor.numel())
        self.summed.append(tensor)
        return self

    def wait(self) -> None:
        """The other replica has used all parameters and has gradients of 1."""
        for tensor in self.summed:
            tensor.add_(1.0)
        self.summed.clear()


def sizes_of(counts: list[int], bucket_bytes: int | None = None) -> list[int]:
    """Elements of each bucket, for parameters of so many; without memory."""
    buffer = GradientBuffer([nn.Parameter(torch.empty(it, device="meta")) for it in counts], bucket_bytes)
    return [it.numel() for it in buffer.tensors]


def test_buckets_are_filled_from_the_last_parameter_on() -> None:
    """Parameters of 4 and 8 bytes into 8 bytes each; one that is larger has a bucket for itself."""
    assert sizes_of([1, 1, 1, 2, 1, 1], 8) == [2, 2, 2, 1]
    assert sizes_of([1, 5, 1], 8) == [1, 5, 1]
    most = 25 * 2**20 // 4  # as many as torch's DistributedDataParallel sums at once
    assert sizes_of([1, most - 1]) == [most]
    assert sizes_of([1, most]) == [most, 1]


def test_what_another_replica_used_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    Calls(monkeypatch)
    here, there = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    buffer = GradientBuffer([here, there])
    buffer.zero()
    buffer.expect(GROUP, [[here, there]])
    with buffer.last_pass([here, there]):
        here.sum().backward()
    began_ns = buffer.began_ns
    assert began_ns is not None and list(map(id, buffer.used())) == [id(here)]
    buffer.start_allreduce(GROUP)
    assert buffer.began_ns == began_ns
    buffer.wait()
    assert buffer.began_ns is None and list(map(id, buffer.used())) == [id(here), id(there)]
    assert here.grad is not None and here.grad.tolist() == [2.0] * 2
    assert there.grad is not None and there.grad.tolist() == [1.0] * 3


def test_buckets_begin_within_the_last_pass_from_the_last_layer_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    weights = [nn.Parameter(torch.ones(n)) for n in (1, 2, 3)]
    buffer = GradientBuffer(weights, bucket_bytes=1)
    seen: list[list[int]] = []

    class Watch(torch.autograd.Function):
        """What has begun when the backward pass comes by."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append(list(calls.begun))
            return gradient

    def passed() -> None:
        x = torch.ones(1, requires_grad=True)
        for weight in weights:
            x = Watch.apply(x) * weight.sum()  # type: ignore[no-untyped-call]
        x.sum().backward()

    for update in range(2):
        calls.begun.clear()
        seen.clear()
        buffer.zero()
        buffer.expect(GROUP, [weights])
        passed()
        assert not calls.begun, "another pass is to come"
        with buffer.last_pass(weights):
            passed()
        assert calls.begun == [4, 3, 2], "of 3, 2 and 1 elements, with a flag each"
        buffer.start_allreduce(GROUP)
        assert len(calls.begun) == 3
        buffer.wait()
        # In the first update nobody knows yet whether gradients come in parts.
        assert seen[-3:] == ([[], [], []] if update == 0 else [[4], [4, 3], [4, 3, 2]])


def test_a_bucket_waits_for_all_stages_that_hold_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 1 ends first but its bucket comes second; the shared one is done when both are."""
    calls = Calls(monkeypatch)
    shared, first, second, unused = (nn.Parameter(torch.ones(n)) for n in (1, 2, 3, 4))
    buffer = GradientBuffer([shared, second, first, unused], bucket_bytes=1)
    for _ in range(2):
        calls.begun.clear()
        buffer.zero()
        buffer.expect(GROUP, [[shared, first, unused], [second, shared, shared]])
        with buffer.last_pass([second, shared]):
            (shared.sum() * second.sum()).backward()
        assert calls.begun == []
        with buffer.last_pass([shared, first, unused]):
            (shared.sum() * first.sum()).backward()
        assert calls.begun == [5, 3, 4, 2]
        assert set(map(id, buffer.used())) == set(map(id, (shared, second, first)))
        began_ns = buffer.began_ns
        buffer.start_allreduce(GROUP)
        assert buffer.began_ns == began_ns is not None
        buffer.wait()


def test_gradients_in_parts_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As reentrant checkpoints give them; where they begin late, nothing wrong is summed."""
    calls = Calls(monkeypatch)
    weight = nn.Parameter(torch.ones(2))
    buffer = GradientBuffer([weight])

    def update(parts: int) -> None:
        buffer.zero()
        buffer.expect(GROUP, [[weight]])
        with buffer.last_pass([weight]):
            for _ in range(parts):
                weight.sum().backward()
                begun.append(len(calls.begun))
        buffer.start_allreduce(GROUP)
        buffer.wait()
        calls.begun.clear()

    begun: list[int] = []
    for parts in (2, 2, 1):
        update(parts)
    assert begun == [0, 0, 0, 0, 0]

    weight = nn.Parameter(torch.ones(2))
    buffer = GradientBuffer([weight])
    update(1)
    with pytest.raises(
        RuntimeError, match=r"a parameter of shape \(2,\) must come at once, got a second part"
    ):
        update(2)


def train_replica(rank: int, size: int) -> bytes:
    model = forked()
    optimizer = sgd(model)
    buffer = GradientBuffer(model.parameters())
    group = dist.group.WORLD
    collectives = 0
    plain = dist.all_reduce

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal collectives
        collectives += 1
        return plain(*arguments, **named)

    dist.all_reduce = counted
    used = []
    for step in range(4):
        buffer.zero()
        start, stop = shares(5, size)[rank]
        model(batch(step)[start:stop]).square().sum().backward()
        buffer.start_allreduce(group)
        buffer.wait()
        buffer.wait()  # nothing left to wait for
        buffer.detach_unused()
        used.append(len(buffer.used()))
        optimizer.step()
    buffer.start_allreduce(group)
    try:
        buffer.start_allreduce(group)
    except RuntimeError as error:
        message = str(error)
    buffer.wait()
    return pack((model.state_dict(), collectives, used, message))


def test_replicas_train_as_one() -> None:
    want = train_serially()
    for state, collectives, used, message in map(unpack, run_ranks(2, train_replica)):
        for name, value in want.items():
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-7)
        assert collectives == 4 + 1
        # first and low, in step 1 high too: only the second replica has that sample.
        assert used == [4, 6, 4, 4]
        assert "must be followed by wait, got a second start" in message


def test_parameter_of_one_replica_is_not_decayed_before() -> None:
    # What the test above relies on: serial training does not touch `high` in step 0, nor `never` at all.
    want, begin = train_serially(), forked().state_dict()
    assert torch.equal(want["never.weight"], begin["never.weight"])
    assert not torch.equal(want["high.weight"], begin["high.weight"])
