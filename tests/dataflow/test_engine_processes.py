"""The engine on real processes, by both transports: mistakes and deaths (results: `test_conformance`)."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from arborcast.backends import lower
from arborcast.backends.dataflow.engine import Engine
from arborcast.backends.dataflow.task_graph import compile_graph
from arborcast.backends.lowering.layout import Buffer
from arborcast.backends.tensors.torch_reduction import operator_of
from arborcast.backends.transport.fingerprint import CollectiveFingerprint
from arborcast.backends.transport.network import Network
from arborcast.synth.collective import Kind
from tests.support.drawn_schedules import ring_allreduce
from tests.support.ranks import Failure, run_ranks, store_path
from tests.support.waiting import until

RANKS = 4
TRANSPORTS = ("sockets", "shared memory")


@contextmanager
def engine_of(rank: int, size: int, transport: str, timeout_s: float = 30) -> Iterator[Engine]:
    store = dist.FileStore(str(store_path()), size)
    network = Network(store, rank, size, timeout_s=90, transport=transport, slot_bytes=1 << 16)
    network.connect(range(size))
    engine = Engine(rank, network, timeout_s=timeout_s)
    try:
        yield engine
    finally:
        network.close()
        engine.close()


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
