"""The engine on real processes, over sockets and through shared memory: results, mistakes, deaths."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist

from arborcast import synth
from arborcast.backends import lower
from arborcast.backends.dataflow.engine import Engine
from arborcast.backends.dataflow.task_graph import compile_graph
from arborcast.backends.lowering.layout import Buffer, lay_out
from arborcast.backends.measure.job import Reduction
from arborcast.backends.tensors.torch_reduction import operator_of
from arborcast.backends.transport.fingerprint import CollectiveFingerprint
from arborcast.backends.transport.network import Network
from arborcast.synth.collective import Kind
from arborcast.synth.schedule import Schedule
from tests.executors.test_interpreter import inputs_for
from tests.support.definition import define
from tests.support.drawn_schedules import direct, full_mesh, recursive_doubling, ring_allreduce
from tests.support.ranks import Failure, run_ranks, store_path
from tests.support.waiting import until

RANKS = 4
TRANSPORTS = ("sockets", "shared memory")
OPERATORS = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.AVG: dist.ReduceOp.AVG,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
}


@contextmanager
def engine_of(rank: int, size: int, transport: str, timeout_s: float = 30) -> Iterator[Engine]:
    store = dist.FileStore(str(store_path()), size)
    network = Network(store, rank, size, timeout_s=30, transport=transport, slot_bytes=1 << 16)
    network.connect(range(size))
    engine = Engine(rank, network, timeout_s=timeout_s)
    try:
        yield engine
    finally:
        network.close()
        engine.close()


def schedules() -> dict[str, Schedule]:
    fabric = full_mesh(RANKS)
    found = {kind.value: synth.solve(fabric, kind, method="trees") for kind in Kind if kind.value in TREES}
    found |= {"ring": ring_allreduce(RANKS), "exchange": recursive_doubling()}
    found |= {kind: direct(kind, RANKS, root=2) for kind in ("gather", "scatter", "alltoall")}
    return found


TREES = {"broadcast", "reduce", "allgather", "reduce-scatter", "allreduce"}


def call(
    engine: Engine, schedule: Schedule, size: int, dtype: str, reduction: Reduction, sequence: int
) -> None:
    """One collective on `size` elements of each block, compared with its definition."""
    rank = engine.rank
    count = size * lay_out(schedule, 0).blocks
    programs = lower(schedule, count, pieces=3)
    name = "float32" if dtype == "float16" else dtype
    inputs = inputs_for_type(schedule, programs, name, reduction)
    wanted = define(schedule.collective, inputs, reduction)[rank]
    program = programs[rank]
    element = getattr(torch, dtype)
    memory = {
        buffer: torch.zeros(program.elements(buffer), dtype=element)
        for buffer in (Buffer.INPUT, Buffer.OUTPUT)
        if program.elements(buffer) or (buffer is Buffer.OUTPUT and program.in_place)
    }
    given = inputs[rank]
    own = Buffer.OUTPUT if program.in_place else Buffer.INPUT
    if given is not None and own in memory:
        memory[own].copy_(torch.from_numpy(given))
    before = memory[Buffer.INPUT].clone() if Buffer.INPUT in memory else None
    operator = operator_of(OPERATORS[reduction], element)
    opening = CollectiveFingerprint(
        sequence, count, -1, schedule.collective.kind, f"{dtype} {reduction}", b"schedule"
    )
    engine.run(compile_graph(program), memory, opening, operator, dtype=element)
    if wanted is not None and len(wanted):
        result = memory[Buffer.OUTPUT]
        if operator is not None and schedule.collective.kind.reduces:
            operator.after(result, program.contributors)
        exact = torch.from_numpy(np.ascontiguousarray(wanted)).to(element)
        assert torch.equal(result, exact), (schedule.collective.kind, size, dtype, reduction)
    assert before is None or torch.equal(before, memory[Buffer.INPUT]), "inputs stay as they are"


def inputs_for_type(schedule, programs, dtype, reduction):
    """Data that is exact in the type, as arrays of a type that numpy has."""
    if dtype != "bfloat16":
        return inputs_for(schedule, programs, dtype, reduction)
    exact = inputs_for(schedule, programs, "int64", reduction)
    return [
        None
        if array is None
        else (array % 31).astype(np.float32)
        if reduction is not Reduction.PRODUCT
        else array.astype(np.float32)
        for array in exact
    ]


def everything(rank: int, size: int, transport: str) -> int:
    sequence = 0
    with engine_of(rank, size, transport) as engine:
        for name, schedule in schedules().items():
            for elements in (0, 1, 7, 1009):
                for dtype in ("float32", "bfloat16", "int64"):
                    call(engine, schedule, elements, dtype, Reduction.SUM, sequence)
                    sequence += 1
            if schedule.collective.kind.reduces:
                for reduction in (Reduction.AVG, Reduction.MAX, Reduction.PRODUCT):
                    call(engine, schedule, 101, "float64", reduction, sequence)
                    sequence += 1
            if name in {"ring", "exchange", "broadcast"}:
                call(engine, schedule, 1 << 19, "float32", Reduction.SUM, sequence)  # of many parts and slots
                sequence += 1
            if rank == sequence % size:
                time.sleep(0.05)  # the others' next calls come early
    return sequence


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_kind_type_and_size(transport: str) -> None:
    assert len(set(run_ranks(RANKS, everything, transport, backend=None))) == 1


def run_ring(engine: Engine, elements: int, sequence: int = 0, pieces: int = 8) -> torch.Tensor:
    graph = compile_graph(lower(ring_allreduce(RANKS), elements, pieces=pieces)[engine.rank])
    tensor = torch.full((elements,), float(engine.rank))
    opening = CollectiveFingerprint(sequence, elements, -1, Kind.ALLREDUCE, "float32 sum", b"schedule")
    engine.run(graph, {Buffer.OUTPUT: tensor}, opening, operator_of(dist.ReduceOp.SUM, torch.float32))
    return tensor


def differ(rank: int, size: int, transport: str) -> None:
    with engine_of(rank, size, transport) as engine:
        run_ring(engine, 1000)
        run_ring(engine, 100_000 if rank != 1 else 100_004, 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_counts_that_differ_raise_everywhere_with_both(transport: str) -> None:
    results = run_ranks(RANKS, differ, transport, backend=None, may_fail=True)
    for result in results:
        assert isinstance(result, Failure) and result.error in {"ExecutionError", "DisagreementError"}
        assert "allreduce of 100000 elements" in result.message
        assert "allreduce of 100004 elements" in result.message


def die(rank: int, size: int, transport: str, how: int) -> None:
    with engine_of(rank, size, transport, timeout_s=3 if how == signal.SIGSTOP else 30) as engine:
        pids = [int(pid) for pid in share(engine, os.getpid())]
        try:
            for sequence in range(1, 50):
                if rank == 1 and sequence == 3:
                    os.kill(os.getpid(), how)
                run_ring(engine, 1_000_000, sequence)
        finally:
            store_path().with_name(f"gone-{rank}").touch()
            if rank == 3 and how == signal.SIGSTOP:
                # What it sends from now on must not reach the others before they have given up.
                until(lambda: all(store_path().with_name(f"gone-{other}").exists() for other in (0, 2)))
                os.kill(pids[1], signal.SIGCONT)


def share(engine: Engine, value: int) -> torch.Tensor:
    """A number of every rank, by a sum in which each has its place."""
    graph = compile_graph(lower(ring_allreduce(RANKS), RANKS)[engine.rank])
    numbers = torch.zeros(RANKS, dtype=torch.int64)
    numbers[engine.rank] = value
    opening = CollectiveFingerprint(0, RANKS, -1, Kind.ALLREDUCE, "int64 sum", b"schedule")
    engine.run(graph, {Buffer.OUTPUT: numbers}, opening, operator_of(dist.ReduceOp.SUM, torch.int64))
    return numbers


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_rank_is_named_by_all_others(transport: str) -> None:
    results = run_ranks(RANKS, die, transport, signal.SIGKILL, backend=None, may_fail=True)
    assert results.pop(1).error == "killed"
    for rank, result in zip((0, 2, 3), results, strict=True):
        assert isinstance(result, Failure) and result.error == "ExecutionError"
        assert result.message.startswith(f"rank {rank}: allreduce of 1000000 elements (float32 sum)")
        assert "rank 1 closed its connection: it died or was ended" in result.message
    # The neighbours in the ring say which piece is missing.
    assert any("output[" in result.message for result in results)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_rank_is_a_timeout(transport: str) -> None:
    """When it goes on, it learns that the others have given up."""
    results = run_ranks(RANKS, die, transport, signal.SIGSTOP, backend=None, may_fail=True)
    for rank, result in enumerate(results):
        assert isinstance(result, Failure) and result.error == "ExecutionError"
        assert result.message.startswith(f"rank {rank}: allreduce of 1000000 elements (float32 sum)")
        assert "nothing happened for 3 s" in result.message
    assert any(re.search("(begin together with|from|to) rank 1", result.message) for result in results)
