"""Both kinds of arithmetic on the slices of a graph: the same bits, no warnings where numbers overflow."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from arborcast.backends import lower
from arborcast.backends.dataflow.arithmetic import Arithmetic, NumpyArithmetic, arithmetic
from arborcast.backends.dataflow.task_graph import TaskGraph, compile_graph
from arborcast.backends.lowering.layout import Buffer
from arborcast.backends.tensors.torch_reduction import operator_of
from tests.dataflow.test_engine import an_opening
from tests.support.drawn_schedules import allgather_over_relay, recursive_doubling, ring_allreduce
from tests.support.fake_channels import engines_of, fake_networks, in_threads

COUNT = 96
OPERATIONS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
TYPES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)


def a_graph() -> TaskGraph:
    return compile_graph(lower(recursive_doubling(), COUNT, pieces=2)[0])


def memory_of(graph: TaskGraph, dtype: torch.dtype) -> dict[Buffer, torch.Tensor]:
    """Numbers of all sizes: products and sums overflow in every type."""
    seed = torch.Generator().manual_seed(5)
    scale = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    return {
        Buffer.OUTPUT: (torch.rand(COUNT, generator=seed, dtype=torch.float64) * scale).to(dtype),
        Buffer.SCRATCH: (torch.rand(graph.scratch_elements, generator=seed) * 100).to(dtype),
    }


def some_work(kind: Arithmetic, graph: TaskGraph, part: torch.Tensor) -> None:
    """Each slice with the next one of its length, then a stretch of it with what has come."""
    for number, piece in enumerate(graph.slices):
        other = next(
            at for at in range(number - 1, -len(graph.slices), -1) if graph.slices[at].length == piece.length
        )
        kind.reduce(number, other % len(graph.slices))
        stretch = memoryview(part[: piece.length // 2].view(torch.uint8).numpy())  # type: ignore[arg-type]
        kind.combine(number, other % len(graph.slices), piece.length // 4, stretch)
    kind.copy(0, 0)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_whatever_arithmetic_is_chosen_gives_the_bits_of_torch(name: str, dtype: torch.dtype) -> None:
    operator = operator_of(getattr(dist.ReduceOp, name), dtype)
    if operator is None:
        pytest.skip("no such operation on these elements")
    graph = a_graph()
    chosen, wanted = memory_of(graph, dtype), memory_of(graph, dtype)
    part = memory_of(graph, dtype)[Buffer.OUTPUT].flip(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, see below
        some_work(arithmetic(graph, chosen, operator), graph, part)
    some_work(Arithmetic(graph, wanted, operator), graph, part)
    for buffer in wanted:
        assert torch.equal(chosen[buffer].view(torch.uint8), wanted[buffer].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16], ids=str)  # by numpy, and by torch
def test_slices_are_where_the_flow_says(dtype: torch.dtype) -> None:
    """On a graph with slices that overlap and with gaps between them: copies, sums and stretches of sums."""
    graph = compile_graph(lower(allgather_over_relay(), COUNT, pieces=2)[0])
    assert sum(map(len, graph.cuts.values())) < len(graph.slices), "two slices must overlap"
    operator = operator_of(dist.ReduceOp.SUM, dtype)
    numbered = {
        buffer: torch.arange(COUNT).to(dtype) + shift
        for buffer, shift in ((Buffer.INPUT, 100), (Buffer.OUTPUT, 3))
    }
    pairs = [
        (into, source)
        for into, one in enumerate(graph.slices)
        for source, other in enumerate(graph.slices)
        if one.length == other.length
    ]
    assert len(pairs) > len(graph.slices)
    for into, source in pairs:
        one, other = graph.slices[into], graph.slices[source]
        part = torch.arange(one.length).to(dtype) * 2
        for start, length in ((0, one.length), (1, one.length // 2)):
            memory = {buffer: tensor.clone() for buffer, tensor in numbered.items()}
            wanted = {buffer: tensor.clone() for buffer, tensor in numbered.items()}
            kind = arithmetic(graph, memory, operator)
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
    graph = a_graph()
    found = {
        dtype: type(arithmetic(graph, memory_of(graph, dtype), operator_of(dist.ReduceOp.SUM, dtype)))
        for dtype in TYPES
    }
    assert [dtype for dtype, kind in found.items() if kind is not NumpyArithmetic] == [
        torch.float16,
        torch.bfloat16,
    ]
    assert type(arithmetic(graph, memory_of(graph, torch.float32), None)) is Arithmetic


def test_an_engine_is_silent_when_numbers_overflow() -> None:
    graphs = [compile_graph(program) for program in lower(ring_allreduce(4), COUNT)]
    networks = fake_networks(4)
    engines = engines_of(networks)
    operator = operator_of(dist.ReduceOp.SUM, torch.float32)
    tensors = [torch.full((COUNT,), 3e38) for _ in engines]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        failures = in_threads(
            [
                lambda at=at: engines[at].run(
                    graphs[at], {Buffer.OUTPUT: tensors[at]}, an_opening(COUNT), operator
                )  # type: ignore[misc]
                for at in range(4)
            ]
        )
    assert failures == [None] * 4
    assert all(torch.isinf(tensor).all() for tensor in tensors)
    for engine, network in zip(engines, networks, strict=True):
        engine.close()
        network.close()
