"""Both kinds of arithmetic on the slices of a flow: the same bits, and no warnings where numbers overflow."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from arborcast.backends.dataflow.arithmetic import Arithmetic, NumpyArithmetic, arithmetic
from arborcast.backends.dataflow.task_graph import Flow, compile_flow
from arborcast.backends.lowering.layout import Buffer
from arborcast.backends.lowering.lower import lower
from arborcast.backends.tensors.torch_reduction import operator_of
from tests.dataflow.test_engine import an_opening, engines_of
from tests.support.drawn_schedules import allgather_over_relay, recursive_doubling, ring_allreduce
from tests.support.fake_channels import fake_networks, in_threads

COUNT = 96
OPERATIONS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
TYPES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)


def a_flow() -> Flow:
    return compile_flow(lower(recursive_doubling(), COUNT, pieces=2)[0])


def memory_of(flow: Flow, dtype: torch.dtype) -> dict[Buffer, torch.Tensor]:
    """Numbers of all sizes: products and sums overflow in every type."""
    seed = torch.Generator().manual_seed(5)
    scale = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    return {
        Buffer.OUTPUT: (torch.rand(COUNT, generator=seed, dtype=torch.float64) * scale).to(dtype),
        Buffer.SCRATCH: (torch.rand(flow.scratch_elements, generator=seed) * 100).to(dtype),
    }


def some_work(kind: Arithmetic, flow: Flow, part: torch.Tensor) -> None:
    """Each slice with the next one of its length, then a stretch of it with what has come."""
    for number, piece in enumerate(flow.slices):
        other = next(
            at for at in range(number - 1, -len(flow.slices), -1) if flow.slices[at].length == piece.length
        )
        kind.reduce(number, other % len(flow.slices))
        stretch = memoryview(part[: piece.length // 2].view(torch.uint8).numpy())  # type: ignore[arg-type]
        kind.combine(number, other % len(flow.slices), piece.length // 4, stretch)
    kind.copy(0, 0)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_whatever_arithmetic_is_chosen_gives_the_bits_of_torch(name: str, dtype: torch.dtype) -> None:
    operator = operator_of(getattr(dist.ReduceOp, name), dtype)
    if operator is None:
        pytest.skip("no such operation on these elements")
    flow = a_flow()
    chosen, wanted = memory_of(flow, dtype), memory_of(flow, dtype)
    part = memory_of(flow, dtype)[Buffer.OUTPUT].flip(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, see below
        some_work(arithmetic(flow, chosen, operator), flow, part)
    some_work(Arithmetic(flow, wanted, operator), flow, part)
    for buffer in wanted:
        assert torch.equal(chosen[buffer].view(torch.uint8), wanted[buffer].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16], ids=str)  # by numpy, and by torch
def test_slices_are_where_the_flow_says(dtype: torch.dtype) -> None:
    """On a flow with slices that overlap and with gaps between them: copies, sums and stretches of sums."""
    flow = compile_flow(lower(allgather_over_relay(), COUNT, pieces=2)[0])
    assert sum(map(len, flow.cuts.values())) < len(flow.slices), "two slices must overlap"
    operator = operator_of(dist.ReduceOp.SUM, dtype)
    numbered = {
        buffer: torch.arange(COUNT).to(dtype) + shift
        for buffer, shift in ((Buffer.INPUT, 100), (Buffer.OUTPUT, 3))
    }
    pairs = [
        (into, source)
        for into, one in enumerate(flow.slices)
        for source, other in enumerate(flow.slices)
        if one.length == other.length
    ]
    assert len(pairs) > len(flow.slices)
    for into, source in pairs:
        one, other = flow.slices[into], flow.slices[source]
        part = torch.arange(one.length).to(dtype) * 2
        for start, length in ((0, one.length), (1, one.length // 2)):
            memory = {buffer: tensor.clone() for buffer, tensor in numbered.items()}
            wanted = {buffer: tensor.clone() for buffer, tensor in numbered.items()}
            kind = arithmetic(flow, memory, operator)
            added = slice(one.start + start, one.start + start + length), slice(other.start + start, None)
            wanted[one.buffer][added[0]] = wanted[other.buffer][added[1]][:length] + part[:length]
            stretch = memoryview(part[:length].view(torch.uint8).numpy())  # type: ignore[arg-type]
            kind.combine(into, source, start, stretch)
            _same(memory, wanted)
            kind.reduce(into, source)
            wanted[one.buffer][one.start : one.stop] += wanted[other.buffer][other.start : other.stop].clone()
            _same(memory, wanted)
            kind.copy(source, into)
            wanted[other.buffer][other.start : other.stop] = wanted[one.buffer][one.start : one.stop].clone()
            _same(memory, wanted)


def _same(found: dict[Buffer, torch.Tensor], wanted: dict[Buffer, torch.Tensor]) -> None:
    assert all(torch.equal(found[buffer], tensor) for buffer, tensor in wanted.items())


def test_numpy_computes_what_it_can() -> None:
    flow = a_flow()
    found = {
        dtype: type(arithmetic(flow, memory_of(flow, dtype), operator_of(dist.ReduceOp.SUM, dtype)))
        for dtype in TYPES
    }
    assert [dtype for dtype, kind in found.items() if kind is not NumpyArithmetic] == [
        torch.float16,
        torch.bfloat16,
    ]
    assert type(arithmetic(flow, memory_of(flow, torch.float32), None)) is Arithmetic


def test_an_engine_is_silent_when_numbers_overflow() -> None:
    flows = [compile_flow(program) for program in lower(ring_allreduce(4), COUNT)]
    networks = fake_networks(4)
    engines = engines_of(networks)
    operator = operator_of(dist.ReduceOp.SUM, torch.float32)
    tensors = [torch.full((COUNT,), 3e38) for _ in engines]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        failures = in_threads(
            [
                lambda at=at: engines[at].run(
                    flows[at], {Buffer.OUTPUT: tensors[at]}, an_opening(COUNT), operator
                )  # type: ignore[misc]
                for at in range(4)
            ]
        )
    assert failures == [None] * 4
    assert all(torch.isinf(tensor).all() for tensor in tensors)
    for engine, network in zip(engines, networks, strict=True):
        engine.close()
        network.close()
