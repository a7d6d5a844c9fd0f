"""What crosses a boundary: its shapes, found without values, and the messages it is packed into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from arborcast.pipeline.costs.saved_bytes import Segment, Treatment
from arborcast.pipeline.errors import PartitionError, first_line
from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.run import boundary
from arborcast.pipeline.run.activation_treatment import TreatedPasses, divided
from arborcast.pipeline.run.assignment import Assignment
from arborcast.pipeline.run.boundary import Boundaries, FakeStage, TensorSpec
from arborcast.pipeline.run.devices import HOST
from arborcast.pipeline.run.stage_messages import BoundaryMessages, PeerSlice, packed, sharing
from arborcast.pipeline.stages import Plan, shares
from tests.support.training_cases import FEATURES, branching, frozen, network, normalised


def found(
    model: Any,
    start: int,
    end: int,
    counts: Sequence[int] = (3, 2),
    *,
    training: bool = True,
    dtype: Any = None,
) -> Boundaries:
    autocast = nullcontext if dtype is None else lambda: torch.autocast("cpu", dtype=dtype)
    inputs = [torch.zeros(13, FEATURES)]
    return FakeStage(model, start, end).boundaries(inputs, counts, training=training, autocast=autocast)


FLOAT = torch.float32


def test_shapes_are_per_sample() -> None:
    boundaries = found(network(), 3, 6)
    assert boundaries.taken == boundaries.given == (TensorSpec((1, 8), FLOAT, 0, True),)
    assert boundaries.overwrites  # it begins with a ReLU in place
    assert not found(network(), 2, 6).overwrites
    assert found(network(), 0, 2).taken == ()
    assert found(network(), 6, 8).given == ()


class Rows(nn.Module):
    """Layers for sequences of any length."""

    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        Rows.passes += 1
        result: Tensor = self.linear(x)
        return result


def test_a_new_number_of_samples_costs_nothing_and_a_new_length_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(boundary, "KEPT_SHAPES", 2)
    fake = FakeStage(Divisible(Rows(), Rows()), 1, 2)

    def passes(length: int, samples: int, *, training: bool = True) -> int:
        Rows.passes = 0
        inputs = [torch.zeros(samples, length, FEATURES)]
        counts = [samples // 2, samples - samples // 2]
        there = fake.boundaries(inputs, counts, training=training, autocast=nullcontext)
        assert there.taken == (TensorSpec((1, length, FEATURES), FLOAT, 0, training),)
        return Rows.passes

    assert passes(5, 8) == 4  # both layers, for 4 samples and for twice as many
    assert [passes(5, 9), passes(5, 16), passes(7, 8), passes(7, 9)] == [0, 0, 2, 0]
    assert passes(5, 8, training=False) == 4
    fake.follow({f"{i}.linear.{it}": True for i in range(2) for it in ("weight", "bias")})
    assert [passes(length, 8) for length in (5, 6, 5, 7, 6, 5)] == [4, 2, 0, 2, 0, 2]  # two are kept


def test_several_tensors_and_what_is_not_differentiated() -> None:
    expected = (
        TensorSpec((1, 8), FLOAT, 0, True),
        TensorSpec((1, FEATURES), torch.bool, 0, False),
        TensorSpec((1, FEATURES), torch.float64, 0, True),
    )
    assert found(branching(), 1, 2).taken == found(branching(), 1, 2).given == expected
    assert not any(wire.needs_gradient for wire in found(branching(), 1, 2, training=False).taken)


def test_frozen_layers_want_no_gradient() -> None:
    boundaries = found(frozen(), 2, 5)
    assert not boundaries.taken[0].needs_gradient
    assert boundaries.given[0].needs_gradient


def test_autocast_is_in_force() -> None:
    assert found(network(), 3, 6, dtype=torch.bfloat16).taken[0].dtype == torch.bfloat16


def test_nothing_is_run_for_real() -> None:
    """Statistics, weights, modes and random numbers stay; one sample is enough for batch norm."""
    model = Divisible([nn.Dropout(), *normalised()])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert found(model, 3, 5, (1, 2)).given == (TensorSpec((1, 8), FLOAT, 0, True),)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(layer.training for layer in model.modules())


def test_batch_norm_that_averages_over_all_batches() -> None:
    """With momentum None it reads how many there were, which a tensor without values cannot say."""
    model = Divisible(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 8))
    assert found(model, 2, 3).taken == (TensorSpec((1, 8), FLOAT, 0, True),)
    assert model[1].momentum is None


class Reshaping(nn.Module):
    """Several rows for each sample, or other things that may cross."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Any:
        ways: dict[str, Callable[[], Any]] = {
            "rows": lambda: x.view(-1, 2),
            "values": lambda: x[x > 0],
            "constant": lambda: x[:1].expand(2, -1) * 1,
            "squared": lambda: x.new_zeros(len(x), len(x)),
            "turned": x.t,
            "list": lambda: [x],
            "mapping": lambda: {"x": x},
        }
        return ways[self.way]()


def test_several_rows_for_a_sample() -> None:
    wire = TensorSpec((FEATURES // 2, 2), FLOAT, 0, False)
    assert found(Divisible(Reshaping("rows"), nn.ReLU()), 1, 2).taken == (wire,)
    assert wire.shape_of(5) == (15, 2)
    tensor = torch.arange(30).view(15, 2)
    assert torch.equal(wire.narrowed(tensor, 1, 3), tensor[3:9])


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("values", r"layers \[0, 1\): shapes must follow from shapes alone, got DynamicOutputShapeException"),
        (
            "constant",
            r"boundary before layer 1: dimension 0 must be a multiple of the 3 samples, got float32\[2",
        ),
        ("squared", r"layers \[1, 2\): what crosses a boundary must be in proportion to the samples"),
        (
            "turned",
            r"boundary before layer 1: dimension 0 must be a multiple of the 12 samples, got float32\[6",
        ),
        ("mapping", "boundary before layer 1: only tensors may cross, got dict"),
        ("list", "boundary before layer 1: only tensors may cross, got list"),
    ],
)
def test_what_may_not_cross(way: str, message: str) -> None:
    counts = {"constant": (3,), "turned": (FEATURES,)}.get(way, (3, 2))
    with pytest.raises(PartitionError, match=message):
        found(Divisible(Reshaping(way), nn.ReLU()), 1, 2, counts)


class Columns(nn.Module):
    """Gives columns of one tensor as two."""

    def __init__(self, first: slice, second: slice) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y[:, self.first], y[:, self.second]


class Overwriting(nn.Module):
    """Changes the first tensor, and uses both."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.relu_().sum(1, keepdim=True) * y


def test_one_memory_of_two_tensors_crosses_unless_what_both_have_is_changed() -> None:
    """Messages, and copies for another forward pass, would part them."""
    apart = Divisible(Columns(slice(2), slice(2, 6)), Overwriting())
    assert found(apart, 1, 2).overwrites
    shared = Divisible(Columns(slice(3), slice(2, 6)), Overwriting())
    assert found(shared, 0, 2).given == ()
    rule = r"layers \[1, 2\): must not change in place what tensors 0 and 1 of those"
    with pytest.raises(PartitionError, match=rule):
        found(shared, 1, 2)
    for model, result in ((apart, nullcontext()), (shared, pytest.raises(PartitionError, match=rule))):
        segments = Segment(0, 1, Treatment.KEEP), Segment(1, 2, Treatment.RECOMPUTE)
        treated = TreatedPasses(divided(model, segments), segments, lambda _: (nullcontext(), nullcontext()))
        with result:
            made = treated.forward((torch.ones(3, FEATURES),), lambda again, it: (it,), lambda made: made)
            assert torch.equal(made, model(torch.ones(3, FEATURES)))


def test_what_is_told_of_a_layer_without_a_shape() -> None:
    """Which layers, and not only what torch said of them."""
    with pytest.raises(PartitionError) as caught:
        found(Divisible(Reshaping("values"), nn.ReLU()), 1, 2)
    assert first_line(caught.value).startswith("PartitionError: layers [0, 1): shapes must follow")


# Messages ------------------------------------------------------------------------------------------


def wires() -> st.SearchStrategy[list[TensorSpec]]:
    """One to three tensors of one to three dimensions."""

    def wire(shape: list[int], dtype: torch.dtype, dim: int) -> TensorSpec:
        return TensorSpec(tuple(shape), dtype, dim % len(shape), True)

    types = st.sampled_from([torch.float32, torch.bool, torch.int64, torch.bfloat16, torch.complex64])
    shapes = st.lists(st.integers(1, 3), min_size=1, max_size=3)
    return st.lists(st.builds(wire, shapes, types, st.integers(0, 2)), min_size=1, max_size=3)


class Links:
    """Messages of several ranks in one process: what is sent is there at once, received when waited for."""

    sent: dict[tuple[int, int, int], Tensor]

    def __init__(
        self, rank: int, sent: dict[tuple[int, int, int], Tensor], device: torch.device = HOST
    ) -> None:
        self.rank, self.sent, self.device = rank, sent, device

    def send(self, tensor: Tensor, peer: int, tag: int, **_: Any) -> Any:
        self.sent[self.rank, peer, tag] = tensor.clone()

    def receive(self, tensor: Tensor, peer: int, tag: int, **_: Any) -> Any:
        links = self

        class Pending:
            def wait(self) -> None:
                tensor.copy_(links.sent.pop((peer, links.rank, tag)))

        return Pending()


def messages(crossing: list[TensorSpec], parcels: Sequence[PeerSlice], links: Links) -> BoundaryMessages:
    return BoundaryMessages("stage", crossing, lambda *_: parcels, links, lambda number, *_: number)  # type: ignore[arg-type]


@given(wires(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_all_that_is_sent_arrives(
    crossing: list[TensorSpec], senders: int, receivers: int, more: int
) -> None:
    """From every replica to every replica of the next stage, against the whole microbatch."""
    samples = max(senders, receivers) + more
    plan = Plan([(0, 1, range(senders)), (1, 2, range(senders, senders + receivers))], 1)
    generator = torch.Generator().manual_seed(samples)
    whole = [
        torch.randint(0, 2, wire.shape_of(samples), generator=generator).to(wire.dtype) for wire in crossing
    ]
    sent: dict[tuple[int, int, int], Tensor] = {}
    for rank in range(senders):
        (place,) = Assignment.all_of(plan, rank)
        assert place is not None
        start, stop = shares(samples, senders)[rank]
        mine = [wire.narrowed(tensor, start, stop) for wire, tensor in zip(crossing, whole, strict=True)]
        messages(crossing, place.slices(samples, behind=True), Links(rank, sent)).send(0, mine, back=False)
    assert sum(it.nbytes for it in sent.values()) == sum(it.nbytes for it in whole)
    for rank in range(senders, senders + receivers):
        (place,) = Assignment.all_of(plan, rank)
        assert place is not None
        arrival = messages(crossing, place.slices(samples, behind=False), Links(rank, sent))
        arrival.receive(0, back=False)
        start, stop = place.share(samples)
        for wire, tensor, arrived in zip(crossing, whole, arrival.arrived(0, back=False), strict=True):
            assert arrived is not None and torch.equal(arrived, wire.narrowed(tensor, start, stop))
    assert not sent


@pytest.mark.parametrize("device", [HOST, torch.device("cpu:0")], ids=["in-the-bytes", "told-apart"])
@pytest.mark.parametrize("count", [1, 2])
def test_gradients_that_there_are_not(count: int, device: torch.device) -> None:
    """Absent where no replica has one, zeros where others have, and what is no number arrives as it is.

    Any device but the host's is one whose bytes are not looked at: "cpu:0" is to torch another one.
    """
    crossing = [TensorSpec((1, 3), FLOAT, 0, True)] * count
    (place,) = Assignment.all_of(Plan([(0, 1, (0,)), (1, 2, (1, 2))], 1), 0)
    assert place is not None
    nothing = torch.full((2, 3), float("nan"))
    sent: dict[tuple[int, int, int], Tensor] = {}
    for pair in ([None, None], [None, torch.ones(2, 3)], [nothing, -nothing]):
        for rank, tensor in enumerate(pair, 1):
            theirs = messages(crossing, [PeerSlice(0, 0, 2)], Links(rank, sent, device))
            theirs.send(0, [tensor] * count, back=True)
        arrival = messages(crossing, place.slices(4, behind=True), Links(0, sent, device))
        arrival.receive(0, back=True)
        rows = [torch.zeros(2, 3) if tensor is None else tensor for tensor in pair]
        for arrived in arrival.arrived(0, back=True):
            if pair == [None, None]:
                assert arrived is None
            else:
                torch.testing.assert_close(arrived, torch.cat(rows), rtol=0, atol=0, equal_nan=True)


def test_tensors_that_are_kept_otherwise_than_they_read() -> None:
    """Conjugates and negatives that torch computes only when they are read."""
    whole = torch.randn(2, 3, dtype=torch.complex64)
    for tensor in (whole.conj(), torch._neg_view(whole.real.contiguous())):
        wire = TensorSpec((1, 3), tensor.dtype, 0, True)
        sent = packed([(wire, tensor, PeerSlice(1, 1, 2))])
        assert torch.equal(sent.view(tensor.dtype), tensor[1] + 0)


def test_one_tensor_is_neither_copied_nor_viewed() -> None:
    """What is sent is the slice itself; what arrived together is counted apart by autograd."""
    wire = TensorSpec((1, 3), FLOAT, 0, True)
    (place,) = Assignment.all_of(Plan([(0, 1, (0,)), (1, 2, (1, 2))], 1), 0)
    assert place is not None
    tensor = torch.randn(4, 3)
    second = place.slices(4, behind=True)[1]
    assert packed([(wire, tensor, second)]).data_ptr() == tensor[2:].data_ptr()
    other = sharing(tensor)
    other.add_(1)
    assert torch.equal(other, tensor)
    assert tensor._version == 0
