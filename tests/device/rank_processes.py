"""Runs a plan as it would run on GPUs: a process per rank, the kernel in Triton's interpreter, shared memory.

    TRITON_INTERPRET=1 python -m tests.device.rank_processes    # a `Case` per line of stdin, in JSON

In a process of its own, as Triton reads the variable when it is imported.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TIMEOUT_S = 240


@dataclass(frozen=True)
class Case:
    """A schedule with how it is run; `counts` are in blocks, one call behind the other.

    By `ipc` ranks share memory with their neighbours alone, by torch's calls as `drawn_ipc` has them. By
    `bits` elements are any bits, and the result is what the model makes of the tables; else they are small
    numbers.
    """

    fabric: str
    kind: str
    counts: tuple[int, ...] = (37, 37)
    solve: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    dtype: str = "float32"
    op: str = "sum"
    groups: int = 2
    lanes: int = 2
    piece: int = 128
    push: bool = True
    in_place: bool = False
    begun: int = 0
    late: int = -1
    missing: int = -1
    ipc: bool = False
    bits: bool = False


def run_cases(cases: list[Case]) -> list[str]:
    """What became of each: "right", or what was wrong."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    given = "".join(json.dumps(asdict(case)) + "\n" for case in cases)
    command = [sys.executable, "-m", "tests.device.rank_processes"]
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, env=environment, check=False, timeout=3000
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def sleep_while_waiting() -> None:
    """A rank that polls lets others have the core."""
    from triton.runtime.interpreter import InterpreterBuilder

    polls: Callable[..., Any] = InterpreterBuilder.create_atomic_rmw

    def patient(*arguments: Any) -> Any:
        time.sleep(0.0001)
        return polls(*arguments)

    InterpreterBuilder.create_atomic_rmw = patient


def _ipc_memory(case: Case, plan: Any, rank: int, folder: str) -> Any:
    import torch

    from arborcast.backends.device.memory import IpcMemory
    from tests.device.drawn_ipc import DrawnIpc, ranks_by_files

    neighbours = plan.neighbours(rank)
    drawn = DrawnIpc(lambda rank, peer: peer in neighbours)
    drawn.act_as(rank)
    drawn.install(setattr)
    ranks, itemsize = ranks_by_files(rank, plan.ranks, Path(folder)), getattr(torch, case.dtype).itemsize
    return IpcMemory(plan.shape, itemsize, ranks, neighbours, torch.device("cpu"))


def _rank(case: Case, plan: Any, memory: Any, rank: int, data: list[Any], results: Any) -> None:
    import numpy as np
    import torch

    from arborcast.backends.device.executor import DeviceExecutor

    np.seterr(over="ignore", invalid="ignore")
    torch.set_num_threads(1)
    dtype = getattr(torch, case.dtype)
    timeout_s = 3.0 if case.missing >= 0 else TIMEOUT_S
    if case.ipc:
        memory = _ipc_memory(case, plan, rank, memory)
    executor = DeviceExecutor(plan, rank, memory, dtype, block=64, begun=case.begun, timeout_s=timeout_s)
    outputs = []
    try:
        for count, inputs, _ in data:
            if case.late == rank:
                time.sleep(0.3)
            given = tensor_of(case, inputs[rank])
            result = given if case.in_place else torch.full((count,), 99).to(dtype)
            executor(given, result, count, case.op)
            outputs.append(result)
    except Exception as error:  # the parent waits for a word of each
        results.put((rank, str(error)))
        return
    wrong = sum(
        differing(case, output, wanted[rank]) for output, (_, _, wanted) in zip(outputs, data, strict=True)
    )
    results.put((rank, f"{wrong} wrong" if wrong else "right"))


def planned(case: Case) -> Any:
    """The plan of a case."""
    import torch

    from arborcast import synth, topologies
    from arborcast.backends.device.plan import DevicePlan

    schedule = synth.solve(topologies.load(case.fabric, ranks=case.ranks or None), case.kind, **case.solve)
    itemsize = getattr(torch, case.dtype).itemsize
    options = {"groups": case.groups, "lanes": case.lanes, "piece": case.piece, "push": case.push}
    return DevicePlan(schedule, itemsize=itemsize, **options)


def drawn(case: Case, plan: Any) -> list[tuple[int, list[Any], list[Any]]]:
    """Of each call the elements, the inputs of all ranks, and what they must get: see `tensor_of`."""
    from arborcast.backends.measure.job import Reduction
    from tests.support.definition import whole_call

    collective = plan.schedule.collective
    data = []
    for seed, blocks in enumerate(case.counts):
        count = blocks * len(collective.ranks)
        # Small whole numbers: every sum is exact in every type.
        reduction = Reduction.of(case.op)
        inputs, _, wanted = whole_call(collective, plan.ranks, count, seed, most=8, reduction=reduction)
        if case.bits:
            inputs, wanted = _drawn_bits(case, plan, count, seed, [len(it) for it in wanted])
        data.append((count, inputs, wanted))
    return data


def _drawn_bits(
    case: Case, plan: Any, count: int, seed: int, lengths: list[int]
) -> tuple[list[Any], list[Any]]:
    """Any bits, and what tables make of them: sums in the order of sources, in float32 as torch rounds it."""
    import numpy as np
    import torch

    from tests.device.table_model import Memory, run_model

    dtype = getattr(torch, case.dtype)
    integer = integers_of(case)
    bits = torch.iinfo(integer)
    draw = np.random.default_rng(seed)
    room = np.dtype(str(integer).removeprefix("torch."))
    inputs = [draw.integers(bits.min, bits.max, count, room, endpoint=True) for _ in range(plan.ranks)]

    def total(sources: Any) -> Any:
        if not plan.schedule.collective.kind.reduces:
            return sources[0]
        first, *others = (torch.from_numpy(it).view(dtype).float() for it in sources)
        return sum(others, start=first).to(dtype).view(integer).numpy()

    tables = [plan.tables(rank, count) for rank in range(plan.ranks)]
    outputs = [np.zeros(count, room) for _ in inputs]
    run_model(Memory(plan.shape, room), tables, inputs, outputs, total=total)
    return inputs, [output[:length] for output, length in zip(outputs, lengths, strict=True)]


def integers_of(case: Case) -> Any:
    """Of as many bits as elements have."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[getattr(torch, case.dtype).itemsize]


def tensor_of(case: Case, array: Any) -> Any:
    """Elements of numbers, or of bits."""
    import numpy as np
    import torch

    tensor, dtype = torch.from_numpy(np.asarray(array)), getattr(torch, case.dtype)
    return tensor.view(dtype) if case.bits else tensor.to(dtype)


def differing(case: Case, got: Any, wanted: Any) -> int:
    """Elements that are not as wanted; of bits that are added, every NaN is one."""
    from arborcast.synth.collective import Kind

    want = tensor_of(case, wanted)
    got = got.cpu()[: len(want)]
    if not case.bits:
        return int((got != want).sum())
    other = got.view(integers_of(case)) != want.view(integers_of(case))
    if Kind(case.kind).reduces:
        other &= ~(got.float().isnan() & want.float().isnan())
    return int(other.sum())


def _run(case: Case) -> str:
    import torch

    import arborcast.backends.device.executor  # noqa: F401 (once, before ranks are forked)
    from arborcast.backends.device.memory import SharedMemory

    plan = planned(case)
    data = drawn(case, plan)
    memory: Any
    if case.ipc:
        memory = tempfile.mkdtemp()
    else:
        memory = SharedMemory(plan.shape, getattr(torch, case.dtype).itemsize)
        memory.start_at(case.begun)
    forks = multiprocessing.get_context("fork")
    results = forks.Queue()
    ranks = [
        forks.Process(target=_rank, args=(case, plan, memory, rank, data, results), daemon=True)
        for rank in range(plan.ranks)
        if rank != case.missing
    ]
    for process in ranks:
        process.start()
    said = sorted(results.get(timeout=TIMEOUT_S + 60) for _ in ranks)
    for process in ranks:
        process.join()
    if case.ipc:
        shutil.rmtree(memory)
    other = [f"rank {rank}: {what}" for rank, what in said if what != "right"]
    return "; ".join(other) if other else "right"


if __name__ == "__main__":
    sleep_while_waiting()
    for line in sys.stdin:
        sys.stdout.write(_run(Case(**json.loads(line))) + "\n")
        sys.stdout.flush()
