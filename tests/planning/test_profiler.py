"""Measured profiles: bytes as drawn, times of the right layers, and a model that is afterwards as before."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import arborcast.pipeline.costs.layer_pass
import arborcast.pipeline.costs.measured
from arborcast.pipeline.costs.analytic import analyse
from arborcast.pipeline.costs.devices import device_named
from arborcast.pipeline.costs.live import LiveBytes
from arborcast.pipeline.costs.measured import profile
from arborcast.pipeline.costs.saved_bytes import Segment, Treatment, held_bytes
from arborcast.pipeline.errors import ProfileError
from arborcast.pipeline.model.deferred_init import on_meta
from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.model.traced import trace
from arborcast.pipeline.profiles import Tie
from tests.support.ranks import run_ranks

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Clock:
    """Time that passes only where a test says so."""

    now = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return cls.now


class Takes(nn.Module):
    """A layer that takes `fixed` + `per_sample` * samples us forward, and three times as long backward."""

    def __init__(self, fixed: float, per_sample: float) -> None:
        super().__init__()
        self.fixed, self.per_sample = fixed, per_sample

    def forward(self, values: Tensor) -> Tensor:
        return _Pass.apply(values, (self.fixed + self.per_sample * len(values)) * 1e-6)


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, seconds):
        ctx.seconds = seconds
        Clock.now += seconds
        return values * 1

    @staticmethod
    def backward(ctx, gradient):
        Clock.now += 3 * ctx.seconds
        return gradient, None


@pytest.fixture
def clock(monkeypatch):
    Clock.now = 0.0
    monkeypatch.setattr(arborcast.pipeline.costs.measured, "time", Clock)


def test_bytes_as_drawn():
    model = Divisible(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2, bias=False), nn.Flatten())
    found = profile(model, torch.randn(6, 8), repeats=1, optimizer=SGD)
    # floats:   output  saved (input, not what is handed on)  parameters  gradients  momentum
    drawn = [
        (6 * 4, 6 * 8, 8 * 4 + 4),
        (6 * 4, 6 * 4, 0),
        (6 * 2, 6 * 4, 4 * 2),
        (6 * 2, 6 * 2, 0),  # the last layer's own output stays on its rank
    ]
    got = [(it.output_bytes // 4, it.saved_bytes // 4, it.parameter_bytes // 4) for it in found.layers]
    assert got == drawn
    assert all(it.gradient_bytes == it.optimizer_bytes == it.parameter_bytes for it in found.layers)
    assert found.samples == 6
    assert found.source.startswith("measured on cpu")


def test_what_is_kept_is_counted_once():
    class Twice(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            part = values[:, :2]  # keeps the whole of `values`
            return (part * part).exp().sum(1, keepdim=True)

    found = profile(Divisible(nn.Linear(4, 4), Twice()), torch.randn(5, 4), repeats=1)
    # input 5 x 4 once, though its view is kept twice, and the result of exp, 5 x 2
    assert found.layers[1].saved_bytes == 4 * (5 * 4 + 5 * 2)


def test_memory_is_followed_until_it_is_let_go_of():
    before = torch.zeros(500)
    with LiveBytes() as live:
        whole = torch.zeros(1000)
        part = whole[10:]
        before.add_(1)  # made before: not seen
        assert live.now == 4000
        del whole
        assert live.now == 4000
        doubled = part * 2
        del part, doubled
        assert (live.now, live.peak) == (0, 4000 + 4 * 990)
    with FakeTensorMode(), LiveBytes("meta") as live:
        values = torch.zeros(1000, requires_grad=True)
        values.exp().sum().backward()
        assert (live.now, live.peak) == (8000, 3 * 4000 + 2 * 4)  # exp, its gradient; the sum, and its


def test_of_a_divided_tensor_its_part_here_counts():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,))
        divided = DTensor.from_local(torch.zeros(250), mesh, [Shard(0)])
        with LiveBytes() as live:
            moments = torch.zeros_like(divided)
            assert (moments.shape, live.now) == ((1000,), 1000)
            del moments
            assert live.now == 0
    finally:
        dist.destroy_process_group()


class Wide(nn.Module):
    """Keeps nothing, and needs ten times its input for a moment, backward twice."""

    def forward(self, values: Tensor) -> Tensor:
        return values.expand(10, *values.shape).neg().mean(0)


def test_what_passes_need_besides_what_is_kept():
    model = Divisible(
        nn.Linear(4, 4, bias=False), Wide(), nn.ReLU(), nn.Linear(4, 4, bias=False), nn.Flatten()
    )
    found = analyse(model, torch.randn(6, 4), device_named("v100"), optimizer=torch.optim.Adam)
    one = 4 * 6 * 4
    first, wide, relu, last, flat = found.layers
    # backward: the gradient of its result, which becomes ten, and the ten gradients of neg
    assert wide.working_bytes == (1 + 10 + 10) * one
    assert wide.working_fixed_bytes == 0
    assert last.working_fixed_bytes == 4 * 4 * 4  # the weight's gradient, before it is added
    assert last.update_bytes == 2 * 4 * 4 * 4  # two temporaries of Adam
    assert [it.update_bytes for it in (wide, relu, flat)] == [0, 0, 0]
    # What the linear layer gives is kept by nobody; what the ReLU gives, by itself and by the next one.
    assert [it.passing_bytes for it in found.layers] == [0, one, one, 0, one]
    assert found.kept_bytes(0, 5) == sum(it.saved_bytes for it in found.layers) - 3 * one
    assert found.kept_bytes(1, 3) == wide.saved_bytes + relu.saved_bytes - one  # a stage keeps its input
    keep = Segment(0, 3, Treatment.KEEP)
    assert held_bytes(found, (keep,), 6, 1) == first.saved_bytes + wide.working_bytes
    assert found.update_bytes(0, 2) == first.update_bytes == last.update_bytes


def test_values_of_several_rows_a_sample_are_narrowed():
    class Rows(nn.Module):
        def __init__(self, flat: bool) -> None:
            super().__init__()
            self.flat = flat

        def forward(self, values: Tensor) -> Tensor:
            return values.flatten(0, 1) if self.flat else values.view(-1, 3, 4)

    found = profile(Divisible(Rows(True), nn.Linear(4, 4), Rows(False)), torch.randn(6, 3, 4), repeats=1)
    assert [it.output_bytes for it in found.layers] == [6 * 3 * 4 * 4] * 3


def test_a_model_without_values_is_measured_layer_by_layer():
    def made():
        return Divisible(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    with on_meta():
        model = made()
    found, expected = (profile(it, torch.randn(6, 4), repeats=1) for it in (model, made()))
    assert all(it.is_meta for it in model.parameters())
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert (ours.saved_bytes, ours.parameter_bytes) == (theirs.saved_bytes, theirs.parameter_bytes)


def test_frozen_parameters_have_no_gradient_and_need_no_backward():
    model = Divisible(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    found = profile(model, torch.randn(6, 4), repeats=1, optimizer=SGD)
    assert [it.gradient_bytes for it in found.layers] == [0, 4 * 16, 4 * 8]
    assert [it.parameter_bytes for it in found.layers] == [4 * 20, 4 * 20, 4 * 16 + 8]  # and a counter
    assert [it.optimizer_bytes for it in found.layers] == [0, 4 * 16, 4 * 8]


def test_the_line_through_two_measurements(clock):
    model = Divisible(nn.Linear(3, 3), Takes(100, 2), Takes(0, 5))
    found = profile(model, torch.randn(8, 3), repeats=3)
    middle, last = found.layers[1:]
    assert (middle.forward_us, middle.forward_fixed_us) == pytest.approx((116, 100))
    assert (middle.backward_us, middle.backward_fixed_us) == pytest.approx((348, 300))
    assert (last.forward_us, last.forward_fixed_us) == pytest.approx((40, 0), abs=1e-6)
    assert found.forward_us(1, 3, 2) == pytest.approx(100 + 2 * 2 + 5 * 2)
    without = profile(model, torch.randn(8, 3), repeats=1, fixed=False)
    assert without.layers[1].forward_fixed_us == 0
    assert profile(model, torch.randn(8, 3), repeats=1, at=4).layers[1].forward_us == pytest.approx(108)


def test_a_fixed_part_is_within_its_time():
    assert (
        arborcast.pipeline.costs.layer_pass._fixed_part(8, 10.0, 4, 12.0) == 10.0
    )  # fewer samples took longer
    assert arborcast.pipeline.costs.layer_pass._fixed_part(8, 10.0, 4, 1.0) == 0.0
    assert arborcast.pipeline.costs.layer_pass._fixed_part(1, 10.0, 0, 0.0) == 0.0


def test_the_median_leaves_out_what_is_slow_once(clock):
    class Stumbles(nn.Module):
        runs = 0

        def forward(self, values: Tensor) -> Tensor:
            Stumbles.runs += 1
            Clock.now += 1.0 if Stumbles.runs in (1, 2, 5) else 7e-6
            return values * 1

    found = profile(Divisible(Stumbles()), torch.randn(8, 3), repeats=5, warmups=1, fixed=False)
    assert found.layers[0].forward_us == pytest.approx(7)
    assert Stumbles.runs == 1 + 1 + 5


def crowded_profile(rank, size):
    layers = [Takes(0.0, 10.0), nn.Linear(4, 4), Takes(0.0, 20.0)]
    return profile(
        Divisible(layers), torch.randn(6, 4), repeats=1, fixed=False, optimizer=SGD, group=dist.group.WORLD
    )


def test_ranks_of_one_machine_get_one_profile():
    one, other = run_ranks(2, crowded_profile)
    assert one == other
    assert one.crowding >= 1
    assert one.layers[1].update_us > 0 == one.layers[0].update_us


def test_the_loss_belongs_to_the_last_layer(clock):
    def loss(output: Tensor, target: Tensor) -> Tensor:
        assert len(output) == len(target)
        Clock.now += 1e-6 * len(target)
        return functional.mse_loss(output, target)

    model = Divisible(nn.Linear(3, 3), Takes(0, 1))
    found = profile(model, (torch.randn(8, 3), torch.randn(8, 3)), loss, repeats=1)
    assert found.layers[1].forward_us == pytest.approx(16)
    assert found.layers[0].forward_us == 0
    assert found.layers[1].saved_bytes >= 4 * 8 * 3 * 2  # what is compared


def test_the_model_is_afterwards_as_before():
    model = Divisible(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(4, 2)
    )
    model[1].eval()
    model[4].requires_grad_(False)
    functional.mse_loss(model(torch.randn(6, 4)), torch.zeros(6, 2)).backward()
    model[1].train()
    stepped = torch.optim.SGD(model.parameters(), lr=0.5)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: stepped.step())
    inputs, targets = torch.randn(6, 4), torch.randn(6, 2)
    before = copy.deepcopy(model.state_dict())
    gradients = [None if it.grad is None else it.grad.clone() for it in model.parameters()]
    modes = [it.training for it in model.modules()]
    kept, state = inputs.clone(), torch.get_rng_state()

    profile(model, (inputs, targets), functional.mse_loss, repeats=2, optimizer=SGD)

    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(kept, inputs)
    assert modes == [it.training for it in model.modules()]
    assert all(torch.equal(it, before[name]) for name, it in model.state_dict().items())
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)


def test_layers_see_the_values_that_really_reach_them():
    seen: dict[str, tuple[Tensor, bool]] = {}

    class Watch(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
            seen.setdefault(self.name, (second.detach().clone(), first.requires_grad))
            return first * 2, second + 1

    layers = Divisible(Watch("a"), Watch("b"))
    numbers = torch.arange(6)
    found = profile(layers, (torch.randn(6, 4, requires_grad=True), numbers), repeats=1)
    assert torch.equal(seen["b"][0], numbers + 1)
    assert seen["a"][1] and seen["b"][1]
    assert found.layers[0].output_bytes == 4 * 6 * 4 + 8 * 6


def test_shared_parameters_are_ties():
    model = Divisible(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[3].bias = model[0].bias
    model[0].bias.requires_grad_(False)  # frozen: there is no gradient to sum
    found = profile(model, torch.randn(2, 4), repeats=1)
    assert found.ties == (Tie("0.weight", 64, (0, 2)),)
    assert found.parameter_bytes(0, 3) == 64 + 16 + 16
    assert found.ties_across((1,)) == found.ties


def test_any_module_is_traced():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, values: Tensor) -> Tensor:
            return self.second(self.first(values).relu())

    found = profile(Net(), torch.randn(6, 4), repeats=1)
    assert found.model == "Net"
    assert profile(trace(Net(), torch.randn(6, 4)), torch.randn(6, 4), repeats=1).model == "Net"
    assert found.parameter_bytes(0, found.depth) == 4 * (4 * 8 + 8 + 8 * 2 + 2)


@pytest.mark.parametrize(
    ("model", "example", "options", "message"),
    [
        (
            Divisible(nn.Linear(4, 4), nn.Linear(5, 4)),
            torch.randn(2, 4),
            {},
            r"Divisible: layer 1 \(1 Linear\): must run on 2 samples and on 1, got RuntimeError: mat1",
        ),
        (nn.Identity(), torch.tensor(1.0), {}, r"first input must hold a sample, got \(\)"),
        (Divisible(nn.Identity()), "text", {}, "inputs must be a tensor or a tuple of tensors, got str"),
        (Divisible(nn.Identity()), torch.ones(2), {"loss_fn": sum}, r"example must be \(inputs, targets\)"),
        (Divisible(nn.Identity()), torch.ones(2), {"repeats": 0}, "repeats must be at least 1, got 0"),
        (Divisible(nn.Identity()), torch.ones(2), {"warmups": -1}, "warmups must be at least 0, got -1"),
        (Divisible(nn.Identity()), torch.ones(2), {"at": 3}, r"at must be in 1..2, the samples given, got 3"),
        (
            Divisible(nn.Linear(4, 4)),
            torch.ones(2, 4),
            {"optimizer": lambda _: torch.optim.Adam([])},
            "its optimizer must take steps .* got ValueError: optimizer got an empty parameter list",
        ),
    ],
)
def test_refused(model, example, options, message):
    if not isinstance(model, Divisible):
        model = Divisible(model)
    with pytest.raises(ProfileError, match=message) as caught:
        profile(model, example, **options)
    assert "\n" not in str(caught.value)


def test_a_layer_must_return_tensors():
    class Odd(nn.Module):
        def forward(self, values: Tensor) -> dict[str, Tensor]:
            return {"values": values}

    with pytest.raises(ProfileError, match=r"layer 0 \(0 Odd\): its output must be .* got dict"):
        profile(Divisible(Odd(), nn.Identity()), torch.ones(2, 2))
