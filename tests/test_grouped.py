"""Group calls on real processes: over gloo with one tag for all messages, over NCCL where there is a GPU."""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from drawn_schedules import (
    allgather_over_relay,
    custom_exchange,
    recursive_doubling,
    ring_allreduce,
    schedules,
    tree_broadcast,
    uneven_allreduce,
)
from hypothesis import given, settings

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from group_cases import OPS, values  # noqa: E402
from ranks import run_ranks  # noqa: E402

import synth  # noqa: E402
import topologies  # noqa: E402
from backends.grouped import GroupedExecutor  # noqa: E402
from backends.layout import lay_out  # noqa: E402
from backends.reduction import Array, Reduction  # noqa: E402
from backends.reference import define, sample_data  # noqa: E402
from backends.torch_reduction import operator_of  # noqa: E402
from synth.collective import NAMED_KINDS, Kind  # noqa: E402
from synth.errors import InputError  # noqa: E402
from synth.schedule import Schedule  # noqa: E402

CPU = torch.device("cpu")
Job = tuple[Schedule, int, str, Reduction, int]  # ..., elements of a block, type, reduction, pieces
TORCH_OPS = {reduction: OPS[reduction.name] for reduction in Reduction}


# What runs on every rank ---------------------------------------------------------------------------


def run_all(rank: int, size: int, jobs: list[Job], device: Any = CPU) -> int:
    """Every job on this rank, each element compared with the definition; the number of elements."""
    compared = 0
    for schedule, elements, dtype, reduction, pieces in jobs:
        executor = GroupedExecutor(schedule, device=device, pieces=pieces)
        compared += run_one(executor, rank, elements, dtype, reduction)
    return compared


def run_one(executor: GroupedExecutor, rank: int, elements: int, dtype: str, reduction: Reduction) -> int:
    schedule = executor.schedule
    layout = lay_out(schedule, elements * lay_out(schedule, 0).blocks)
    inputs = inputs_of(schedule, layout, dtype, reduction)
    expected = define(schedule.collective, inputs, reduction)[rank]
    gives, gets = layout.input_elements(rank), layout.output_elements(rank)
    kind = getattr(torch, dtype)
    poison = torch.full((gets,), -1, dtype=kind, device=executor.device)
    own = inputs[rank]
    data = None if own is None else torch.from_numpy(own).to(executor.device, kind)
    in_place = layout.in_place(rank)
    output = data.clone() if in_place and data is not None else poison
    taken = data if gives and not in_place else None
    executor.run(
        layout.count,
        kind,
        given=taken,
        output=output if gets else None,
        op=TORCH_OPS[reduction],
    )
    if expected is None:
        return 0
    wanted = torch.from_numpy(expected).to(kind)
    what = f"{schedule.collective.kind} {schedule.topology.name} {elements} {dtype} {reduction} rank {rank}"
    assert torch.equal(output.cpu(), wanted), what
    if taken is not None and own is not None:
        assert torch.equal(taken.cpu(), torch.from_numpy(own).to(kind)), f"{what}: the input has changed"
    return len(wanted)


def inputs_of(schedule: Schedule, layout: Any, dtype: str, reduction: Reduction) -> list[Array | None]:
    collective = schedule.collective
    found: list[Array | None] = []
    for rank in range(schedule.topology.ranks):
        gives = rank in collective.ranks
        if collective.kind in {Kind.BROADCAST, Kind.SCATTER}:
            gives = rank == collective.root
        length = layout.output_elements(rank) if layout.in_place(rank) else layout.input_elements(rank)
        data = np.zeros(length, dtype=np.int64)
        for start, part in sample_data(
            collective, rank, length, dtype=dtype, reduction=reduction, seed=length
        ):
            data[start : start + len(part)] = part
        found.append(data if gives else None)
    return found


# Every kind, random schedules ----------------------------------------------------------------------


@functools.cache
def drawn() -> dict[int, list[Job]]:
    """Random schedules of every kind with ragged lengths and shares, by number of ranks.

    Drawn where they are needed: the processes of the ranks import this module, too.
    """
    jobs: dict[int, list[Job]] = defaultdict(list)
    chance = random.Random(0)

    @given(schedules())
    @settings(max_examples=120)
    def collect(schedule: Schedule) -> None:
        reduction = chance.choice([Reduction.SUM, Reduction.MAX, Reduction.PRODUCT])
        dtype = chance.choice(["int64", "float32", "float64", "bfloat16"])
        elements = chance.choice([0, 1, 5, 37, 1009])
        jobs[schedule.topology.ranks].append((schedule, elements, dtype, reduction, chance.randint(1, 5)))

    collect()
    return jobs


@pytest.mark.parametrize("ranks", range(2, 8))
def test_random_schedules_of_every_kind(ranks: int) -> None:
    assert any(run_ranks(ranks, run_all, drawn()[ranks]))


@pytest.mark.parametrize("spec", ["ring:2", "ring:3", "dgx1"])
def test_synthesized_schedules_of_every_kind(spec: str) -> None:
    fabric = topologies.load(spec)
    jobs = [
        (synth.solve(fabric, kind.value), 4099, "float32", Reduction.SUM, pieces)
        for kind in NAMED_KINDS
        for pieces in (1, 7)
    ]
    assert all(run_ranks(fabric.ranks, run_all, jobs))


def test_drawn_schedules() -> None:
    for schedule in (
        tree_broadcast(),
        recursive_doubling(),
        uneven_allreduce(),
        allgather_over_relay(),
        custom_exchange(),
    ):
        jobs = [(schedule, size, "int64", Reduction.SUM, pieces) for size in (1, 100) for pieces in (1, 3)]
        assert any(run_ranks(schedule.topology.ranks, run_all, jobs))


# Every operation and type --------------------------------------------------------------------------

DTYPES = ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int32", "int64")


def every_operation(rank: int, size: int, device: Any = CPU) -> int:
    """What schedules serve, beside gloo's own; how many pairs of operation and type that were."""
    executor = GroupedExecutor(ring_allreduce(size), device=device, pieces=2)
    served = 0
    for name in DTYPES:
        dtype = getattr(torch, name)
        for op_name, op in OPS.items():
            if operator_of(op, dtype) is None:
                with pytest.raises(InputError, match=f"reduction {op_name}: schedules do not serve it"):
                    executor.allreduce(torch.zeros(9, dtype=dtype, device=device), op)
                continue
            mine = values(rank, 1001, dtype, op_name).to(device)
            theirs = mine.clone()
            executor.allreduce(mine, op)
            if device.type == "cpu" and op_name in {"AVG", "PREMUL_SUM"}:
                everybody = sum(values(other, 1001, dtype, op_name).double() for other in range(size))
                theirs = (everybody * (1 / size if op_name == "AVG" else 0.5)).to(dtype)  # type: ignore[union-attr]
            else:
                dist.all_reduce(theirs, op)
            assert torch.equal(mine, theirs), f"{op_name} {name}"
            served += 1
    return served


def test_every_operation_and_type() -> None:
    # SUM, PRODUCT, MIN, MAX on 8 types, AVG and PREMUL_SUM on 4, the three bitwise ones on the other 4
    assert run_ranks(4, every_operation) == [4 * 8 + 2 * 4 + 3 * 4] * 4
