"""Torch's messages beyond `test_conformance`: operations, calls and mistakes."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from arborcast import synth
from arborcast.backends import ExecutionError, Executor
from arborcast.backends.errors import DisagreementError
from arborcast.backends.tensors.torch_reduction import operator_of
from arborcast.synth.errors import InputError
from arborcast.topologies import load
from tests.support.drawn_schedules import (
    allgather_over_relay,
    ring_allreduce,
)
from tests.support.group_cases import OPS, values
from tests.support.in_network import star, turning
from tests.support.ranks import Failure, StandingRanks, run_ranks

# Every operation and type --------------------------------------------------------------------------

ranks = StandingRanks(3, backend="gloo")
DTYPES = ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int32", "int64")


@StandingRanks(4, backend="gloo").check  # of so many, averages are exact
def test_every_operation_and_type(rank: int, size: int) -> None:
    """What schedules serve, beside gloo's own."""
    executor = Executor(ring_allreduce(size), pieces=2)
    served = 0
    for name in DTYPES:
        dtype = getattr(torch, name)
        for op_name, op in OPS.items():
            if operator_of(op, dtype) is None:
                with pytest.raises(InputError, match=f"reduction {op_name}: schedules do not serve it"):
                    executor.allreduce(torch.zeros(9, dtype=dtype), op)
                continue
            mine = values(rank, 1001, dtype, op_name)
            theirs = mine.clone()
            executor.allreduce(mine, op)
            if op_name in {"AVG", "PREMUL_SUM"}:
                everybody = [values(other, 1001, dtype, op_name) for other in range(size)]
                if dtype.is_floating_point:
                    total = torch.stack([each.double() for each in everybody]).sum(0)
                    theirs = (total * (1 / size if op_name == "AVG" else 0.5)).to(dtype)
                else:
                    total = torch.stack(everybody).sum(0, dtype=dtype)
                    theirs = total.div(size, rounding_mode="trunc")
            else:
                dist.all_reduce(theirs, op)
            assert torch.equal(mine, theirs), f"{op_name} {name}"
            served += 1
    # SUM, AVG, PRODUCT, MIN, MAX on 8 types, PREMUL_SUM on 4, the three bitwise ones on the other 4
    assert served == 5 * 8 + 4 + 3 * 4


# Calls ---------------------------------------------------------------------------------------------


@ranks.check
def test_calls_follow_one_another_and_keep_their_programs(rank: int, size: int) -> None:
    executor = Executor(ring_allreduce(size), pieces=2, cache=2)
    for number in range(4):
        tensor = torch.full((3, 5), float(rank + number), requires_grad=True)
        executor.allreduce(tensor)
        assert tensor.eq(sum(other + number for other in range(size))).all()
    for length in (1, 2, 1, 3, 1):  # 3 drives out 2, which was used before 1
        executor.allreduce(torch.zeros(length))
    assert executor._program.cache_info().misses == 1 + 3  # those of the matrices and of three lengths
    with pytest.raises(InputError, match="its schedule is for allreduce, not for broadcast"):
        executor.broadcast(torch.zeros(3))


@ranks.check
def test_what_does_not_fit_is_refused(rank: int, size: int) -> None:
    executor = Executor(ring_allreduce(size))
    for tensor, message in (
        (torch.zeros(4, 4).t(), r"allreduce: output must be contiguous, got shape \(4, 4\)"),
        (torch.zeros(4, device="meta"), "allreduce: output must be on cpu, got meta"),
        (
            torch.zeros(4, dtype=torch.complex64),
            "reduction SUM: schedules do not serve it on elements of torch.complex64",
        ),
    ):
        with pytest.raises(InputError, match=message):
            executor.allreduce(tensor)
    with pytest.raises(InputError, match="output must have 4 elements on this rank, got None"):
        executor.run(4, torch.float32)
    with pytest.raises(InputError, match="output must have 4 elements on this rank, got 3"):
        executor.run(4, torch.float32, output=torch.zeros(3))
    with pytest.raises(InputError, match=r"output must be of type torch.int8, got torch.float32"):
        executor.run(4, torch.int8, output=torch.zeros(4))
    with pytest.raises(InputError, match=f"full-5 has 5 ranks, the process group has {size}"):
        Executor(ring_allreduce(5))
    gathers = Executor(synth.solve(load(f"full:{size}"), "allgather"))
    both = torch.zeros(2 * size)
    with pytest.raises(InputError, match="must not overlap the input, except as its own block"):
        gathers.run(2 * size, torch.float32, given=both[1:3] if rank == 0 else both[:2], output=both)
    both[2 * rank :][:2] = rank
    gathers.run(2 * size, torch.float32, given=both[2 * rank :][:2], output=both)
    assert both.tolist() == [float(index // 2) for index in range(2 * size)]
    with pytest.raises(InputError, match=r"executor: .* one in which switch s adds or copies$"):
        Executor(turning(star(size)))
    after = torch.ones(4)
    executor.allreduce(after)  # nothing above has sent a message
    assert after.tolist() == [size] * 4


@ranks.check
def test_ranks_with_different_schedules_are_refused_at_once(rank: int, size: int) -> None:
    ring, other = ring_allreduce(size), 0 if rank == 1 else 1
    usual: Any = {"schedule": ring}
    for odd in (
        {"schedule": ring, "pieces": 3},
        {"schedule": synth.solve(load(f"full:{size}"), "allreduce")},
    ):
        digests = rf"rank {rank}: its schedule and knobs \(digest .* are not those of rank {other} \("
        with pytest.raises(DisagreementError, match=digests):
            Executor(**(odd if rank == 1 else usual))


def one_dies(rank: int, size: int) -> str:
    executor = Executor(ring_allreduce(size), pieces=4)
    executor.allreduce(torch.ones(1000))
    if rank == 1:
        os._exit(1)
    with pytest.raises(ExecutionError) as failure:
        while True:
            executor.allreduce(torch.ones(1000))
    with pytest.raises(
        ExecutionError, match=f"rank {rank}: an earlier call failed: allreduce, (send|receive) "
    ):
        executor.allreduce(torch.ones(1000))
    return str(failure.value)


def test_a_rank_that_dies_is_an_error_on_all_others() -> None:
    results = run_ranks(3, one_dies, may_fail=True)
    assert isinstance(results[1], Failure)
    for rank in (0, 2):
        assert re.match(rf"rank {rank}: allreduce, (send|receive) .* (to|from) rank ", results[rank])


@ranks.check
def test_pieces_grow_with_the_largest_chunk(rank: int, size: int) -> None:
    """A ring of three has chunks of a third of the buffer."""
    executor = Executor(ring_allreduce(size), piece_bytes=1024, max_pieces=6)
    found = [executor.pieces_for(count, torch.float32) for count in (0, 1, 766, 1536, 3750, 10**6)]
    assert found == [1, 1, 1, 2, 4, 6]


@ranks.check
def test_named_calls_and_relays(rank: int, size: int) -> None:
    """Those of allgather and reduce-scatter; a relay takes part without tensors."""
    own = torch.full((3,), 10 * (rank + 1))
    both = torch.zeros(3 * size, dtype=torch.int64)
    fabric = load(f"full:{size}")
    Executor(synth.solve(fabric, "allgather")).allgather(both, own)
    assert both.tolist() == [10 * (other + 1) for other in range(size) for _ in range(3)]
    Executor(synth.solve(fabric, "reduce-scatter")).reduce_scatter(own, both * (rank + 1))
    assert own.tolist() == [10 * (rank + 1) * sum(range(size + 1))] * 3
    relayed = Executor(allgather_over_relay())
    output = torch.zeros(6, dtype=torch.int64)
    if rank == 1:
        with pytest.raises(InputError, match=r"rank 1: takes no part in the allgather; call run"):
            relayed.allgather(output, output[:3])
        relayed.run(6, torch.int64)
    else:
        relayed.allgather(output, torch.full((3,), 10 * rank))
        assert output.tolist() == [20, 20, 20, 0, 0, 0]
