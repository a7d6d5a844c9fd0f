"""Analytic profiles: operators as drawn, the same bytes as measured, and nothing allocated."""

from __future__ import annotations

import dataclasses
import functools
import resource

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from arborcast.pipeline.costs.analytic import OperatorMeter, analyse
from arborcast.pipeline.costs.devices import A100, DEVICES, V100, DeviceRates, device_named, device_or_none
from arborcast.pipeline.costs.measured import profile
from arborcast.pipeline.errors import ProfileError
from arborcast.pipeline.model.divisible import Divisible
from arborcast.topologies.gpus import GPUS
from tests.support.refusals import refuses

ROUND = DeviceRates(
    "round", {"float32": 1e12}, 100, 2**30, efficiency=0.5, memory_efficiency=0.5, launch_us=3
)
"""0.5e6 operations and 50,000 bytes in a microsecond."""


def images() -> Divisible:
    return Divisible(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 16, 10)),
    )


def tokens() -> Divisible:
    return Divisible(nn.Embedding(50, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))


def test_an_operator_costs_the_longer_of_work_and_traffic():
    assert ROUND.operator_us(5e6, 100, "float32") == pytest.approx(10 + 3)
    assert ROUND.operator_us(5e6, 1e6, "float32") == pytest.approx(20 + 3)
    assert ROUND.operator_us(0, 1e5, "int64") == pytest.approx(2 + 3)


def test_a_linear_layer_as_drawn():
    found = analyse(Divisible(nn.Linear(400, 300)), torch.empty(200, 400), ROUND)
    product = 2 * 200 * 400 * 300  # 48e6 operations, 96 us; its traffic is less
    # backward, without the gradient of the input: weight's product, sum over samples for the bias (read
    # 200 x 300, write 300), and both gradients added to those of earlier microbatches (read two, write one)
    bias = 4 * (200 * 300 + 300) / 5e4
    added = 4 * 3 * (400 * 300 + 300) / 5e4
    layer = found.layers[0]
    assert layer.forward_us == pytest.approx(product / 5e5 + 3)
    assert layer.backward_us == pytest.approx(product / 5e5 + bias + added + 4 * 3)
    assert layer.forward_fixed_us == pytest.approx(3)
    assert layer.backward_fixed_us == pytest.approx(added + 4 * 300 / 5e4 + 4 * 3)


def test_views_and_allocations_are_free_and_gathers_read_what_they_need():
    with OperatorMeter(ROUND) as meter:
        values = torch.empty(6, 4)
        values.t().reshape(2, 12)[0].unsqueeze(0).expand(5, 12)
    assert (meter.us, meter.moved_bytes) == (3 + 2 * 96 / 5e4, 2 * 96)  # one copy, by reshape
    which, table = torch.zeros(3, dtype=torch.int64), torch.empty(1000, 4)
    with OperatorMeter(ROUND) as meter:
        functional.embedding(which, table)
    assert meter.moved_bytes == 2 * 3 * 4 * 4 + 3 * 8


def test_in_place_reads_and_writes():
    values = torch.zeros(100)
    with OperatorMeter(ROUND) as meter:
        values.add_(1)
    assert meter.moved_bytes == 800


@pytest.mark.parametrize(
    ("model", "example"),
    [(images(), torch.randn(4, 3, 8, 8)), (tokens(), torch.randint(50, (4, 6)))],
    ids=["images", "tokens"],
)
def test_work_is_that_of_the_flop_counter(model, example):
    with FlopCounterMode(display=False) as counter:
        model(example).sum().backward()
    with OperatorMeter(V100) as meter:
        model(example).sum().backward()
    assert meter.flops == counter.get_total_flops() > 0


@pytest.mark.parametrize(
    ("model", "example"),
    [(images(), torch.randn(4, 3, 8, 8)), (tokens(), torch.randint(50, (4, 6)))],
    ids=["images", "tokens"],
)
def test_bytes_are_those_of_the_measured_profile(model, example):
    sizes = ("name", "output_bytes", "saved_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes")

    def table(found):
        return [[getattr(layer, size) for size in sizes] for layer in found.layers]

    measured = profile(model, example, repeats=1, warmups=0, optimizer=torch.optim.Adam)
    assert table(analyse(model, example, V100, optimizer=torch.optim.Adam)) == table(measured)
    assert table(analyse(model.to("meta"), example.to("meta"), V100, optimizer=torch.optim.Adam)) == table(
        measured
    )


def test_a_model_that_no_memory_holds():
    with torch.device("meta"):
        model = Divisible([nn.Linear(2**16, 2**16, bias=False) for _ in range(12)])
        example = torch.empty(16, 2**16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = analyse(model, example, A100, optimizer=torch.optim.Adam)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB, of a model of 206 GB
    assert found.parameter_bytes(0, 12) == 12 * 4 * 2**32
    assert found.optimizer_bytes(0, 12) == 12 * (8 * 2**32 + 4)
    assert found.layers[0].saved_bytes == 4 * 16 * 2**16
    # the first layer's input needs no gradient: one product of three is missing
    assert found.layers[1].backward_us > found.layers[0].backward_us


def test_the_model_is_afterwards_as_before():
    model = images()
    before = {name: it.clone() for name, it in model.state_dict().items()}
    example = torch.randn(4, 3, 8, 8), torch.randint(10, (4,))
    state = torch.get_rng_state()
    analyse(model, example, V100, loss_fn=functional.cross_entropy)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(it, before[name]) for name, it in model.state_dict().items())
    assert all(it.grad is None and type(it) is nn.Parameter for it in model.parameters())


def test_the_same_twice():
    model, example = images(), torch.randn(4, 3, 8, 8)
    assert analyse(model, example, V100) == analyse(model, example, V100)


def test_time_scales_with_the_device():
    model, example = images(), torch.randn(4, 3, 8, 8)
    twice = dataclasses.replace(
        V100, flops={"float32": 2 * V100.flops["float32"]}, memory_gbps=2 * V100.memory_gbps, launch_us=2.5
    )
    slow, fast = analyse(model, example, V100), analyse(model, example, twice)
    for one, other in zip(slow.layers, fast.layers, strict=True):
        assert one.forward_us == pytest.approx(2 * other.forward_us)
        assert one.backward_us == pytest.approx(2 * other.backward_us)


def test_tensors_that_are_no_parameters():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.full((4,), 2.0)

        def forward(self, values: Tensor) -> Tensor:
            return values * self.factor + torch.arange(4)

    assert analyse(Divisible(Scaled()), torch.ones(2, 4), V100).layers[0].output_bytes == 32


class Decides(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values if values.sum() > 0 else -values


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            Divisible(nn.Linear(5, 4)),
            {},
            r"Divisible: layer 0 \(0 Linear\): must run on 2 samples and on 1, got",
        ),
        (
            Divisible(Decides()),
            {},
            r"layer 0 \(0 Decides\): must not depend on the values .* got aten._local",
        ),
        (
            Divisible(nn.Linear(4, 4)),
            {"optimizer": functools.partial(torch.optim.ASGD, lr=0.1)},
            r"layer 0 \(0 Linear\): its optimizer must take steps with small gradients",
        ),
    ],
)
def test_refused(model, options, message):
    with pytest.raises(ProfileError, match=message) as caught:
        analyse(model, torch.ones(2, 4), V100, **options)
    assert "\n" not in str(caught.value)


def test_a_device_without_a_rate():
    with pytest.raises(
        ProfileError, match="device v100: has rates for float64, float32, float16, got bfloat16"
    ):
        analyse(Divisible(nn.Linear(4, 4)).bfloat16(), torch.ones(2, 4, dtype=torch.bfloat16), V100)


def test_devices_by_name():
    assert device_named("V100") is V100
    assert device_named("1080-Ti") is DEVICES["1080ti"]
    unknown = """a2 a4000 gb10 gv100 mi350p pro4500 pro5000 rtx3080 rtx4000ada
    rtx4080 rtx5060ti rtx5080 vr200"""
    assert {name for name in GPUS if device_or_none(name) is None} == set(unknown.split())
    assert all(device.source for device in DEVICES.values())
    with pytest.raises(ProfileError, match="device k8: must be one of v100, p100, 1080ti, a100, h100"):
        device_named("k8")


@refuses("change", "message")
def test_devices_refused(change, message):
    with pytest.raises(ProfileError, match=f"device v100: {message}"):
        dataclasses.replace(V100, **change)
