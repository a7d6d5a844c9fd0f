"""Implicit schedules on real processes, each of which derives its own program."""

from __future__ import annotations

import importlib.util
from fractions import Fraction
from typing import Any

import pytest

from arborcast.backends.lowering.layout import lay_out
from arborcast.backends.measure import launch
from arborcast.backends.measure.job import ITEM_BYTES, Reduction, Sweep, count_for
from arborcast.synth.collective import Kind
from arborcast.synth.implicit_schedule import ImplicitSchedule
from tests.support.drawn_implicit import KINDS, circulant, grid, implicit
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

FABRICS = (circulant(5, [1, 2]), grid(2, 4, hubs=True))


def test_everything_equals_torch() -> None:
    """Every kind and type by the executor that `synth run` has, on five and on eight processes."""
    thirds = [Fraction(2, 3), Fraction(1, 3)]
    reductions = {"float32": Reduction.SUM, "float64": Reduction.AVG, "bfloat16": Reduction.MAX}
    sizes = (0, 17, 1003)
    sweeps = [
        Sweep(
            schedule := implicit(fabric, kind, shares=thirds if len(dtype) % 2 else [Fraction(1)]),
            tuple(size * ITEM_BYTES[dtype] for size in sizes),
            tuple(count_for(schedule, size * ITEM_BYTES[dtype], dtype) for size in sizes),
            dtype,
            reductions.get(dtype, Reduction.PRODUCT),
            iterations=1,
            warmup=0,
            pieces=pieces,
        )
        for fabric in FABRICS
        for kind in KINDS
        for dtype, pieces in zip(ITEM_BYTES, (None, 1, 3, 2), strict=True)
    ]
    for sweep, rows in zip(sweeps, launch.run_sweeps(sweeps, timeout_s=200), strict=True):
        assert [row.wrong for row in rows] == [0, 0, 0], (sweep.schedule.topology.name, sweep)


def runtimes(rank: int, size: int, schedules: list[ImplicitSchedule]) -> list[str]:
    """On every rank: what is not right, of the engine and of torch's messages."""
    import torch.distributed as dist

    from arborcast.backends import Executor
    from arborcast.backends.executors.engine_runner import EngineRunner
    from arborcast.backends.tensors.torch_compat import PrefixStore

    store = dist.distributed_c10d._get_default_store()
    wrong = []
    for number, schedule in enumerate(schedules):
        engine = EngineRunner(schedule, PrefixStore(f"engine/{number}", store), rank, timeout_s=60)
        found: list[tuple[str, Any]] = [
            ("engine", engine),
            ("messages", Executor(schedule, pieces=2)),
        ]
        for name, runner in found:
            if not _is_right(runner, schedule, rank, size):
                wrong.append(f"{name}: {schedule.collective.kind} on rank {rank}")
        engine.close()
    return wrong


def _is_right(runner: Any, schedule: ImplicitSchedule, rank: int, size: int) -> bool:
    import torch
    import torch.distributed as dist

    kind, count = schedule.collective.kind, 7 * 11 * size
    layout = lay_out(schedule, count, ())
    own = torch.arange(layout.input_elements(rank) or count) % 1009 + 10_007 * rank
    output = own.clone() if layout.in_place(rank) else torch.full((layout.output_elements(rank),), -1)
    runner.run(count, own.dtype, given=None if layout.in_place(rank) else own, output=output)
    wanted = torch.empty_like(output)
    match kind:
        case Kind.ALLGATHER:
            dist.all_gather_into_tensor(wanted, own)
        case Kind.REDUCE_SCATTER:
            dist.reduce_scatter_tensor(wanted, own)
        case Kind.ALLREDUCE:
            wanted = own.clone()
            dist.all_reduce(wanted)
        case _:
            dist.all_to_all_single(wanted, own)
    return torch.equal(output, wanted)


def test_every_runtime_takes_the_implicit_form() -> None:
    schedules = [implicit(grid(2, 2, hubs=True), kind) for kind in KINDS]
    assert run_ranks(4, runtimes, schedules) == [[]] * 4
