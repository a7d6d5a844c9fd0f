"""Whatever runs programs gives what the collective is defined to give: one suite for all that do.

In this process: the interpreter of programs, a simulation of their task graphs over channels of one part, the
engine over whimsical channels, and groups of messages as NCCL has them. On real processes: torch's messages,
one by one and in groups, and the engine over sockets and through shared memory. A further executor is a line
of `EXECUTORS` or `RUNTIMES`.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth, topologies
from arborcast.backends import Executor, Program, lower
from arborcast.backends.dataflow.engine import Engine
from arborcast.backends.dataflow.task_graph import compile_graph
from arborcast.backends.lowering.layout import Buffer, lay_out
from arborcast.backends.lowering.lower import lower_rank
from arborcast.backends.measure.job import Array, Reduction
from arborcast.backends.tensors.torch_reduction import operator_of
from arborcast.backends.transport.fingerprint import CollectiveFingerprint
from arborcast.backends.transport.network import Network
from arborcast.synth.collective import NAMED_KINDS, Kind
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.schedule import Chunk, Schedule, Transfer
from tests.support.definition import define, inputs_of
from tests.support.drawn_implicit import KINDS as IMPLICIT_KINDS
from tests.support.drawn_implicit import grid, implicit
from tests.support.drawn_schedules import DRAWN, make, reductions_before_sends, schedules
from tests.support.fake_channels import close, each, engines_of, fake_networks
from tests.support.graph_simulation import Simulation, check_shape
from tests.support.group_cases import OPS
from tests.support.grouped_messages import run_grouped
from tests.support.interpreter import Freedom, interpret
from tests.support.ranks import StandingRanks

ONE_STREAM = replace(DRAWN["exchange"].topology, symmetries=(), streams=(1,) * 4)

CASES = {
    **DRAWN,
    "one stream": replace(DRAWN["exchange"], topology=ONE_STREAM).rated(),
    "sent before it is replaced": reductions_before_sends(),
    "two additions at once": make(
        "reduce-scatter",
        [Chunk(Fraction(1, 3), owner) for owner in range(3)],
        [Transfer(owner, rank, owner, 0, True) for owner in range(3) for rank in range(3) if rank != owner],
        total=3,
    ),
}

# In this process ------------------------------------------------------------------------------------

Inputs: TypeAlias = Sequence[Array | None]
Run: TypeAlias = Callable[[Sequence[Program], Inputs, Kind, Reduction, str, int], Sequence[Array | None]]


def interpreted(
    programs: Sequence[Program], inputs: Inputs, kind: Kind, reduction: Reduction, dtype: str, seed: int
) -> Sequence[Array | None]:
    """Operation by operation, in an order that the transport allows."""
    freedom = list(Freedom)[seed % 2]
    return interpret(programs, inputs, reduction=reduction, dtype=dtype, freedom=freedom, seed=seed)


def simulated(
    programs: Sequence[Program], inputs: Inputs, kind: Kind, reduction: Reduction, dtype: str, seed: int
) -> Sequence[Array | None]:
    """The task graphs, which are well formed, over channels that hold one part of a message."""
    graphs = [compile_graph(program) for program in programs]
    for program, graph in zip(programs, graphs, strict=True):
        check_shape(program, graph)
    part = (1, 3, 4, 100)[seed % 4]
    found = Simulation(graphs, inputs, reduction=reduction, dtype=dtype, part=part, seed=seed).run()
    meant = interpret(programs, inputs, reduction=reduction, dtype=dtype)
    for got, interpreted in zip(found, meant, strict=True):  # where nothing is defined, too
        np.testing.assert_array_equal(got, interpreted)
    return found


def engines(
    programs: Sequence[Program], inputs: Inputs, kind: Kind, reduction: Reduction, dtype: str, seed: int
) -> Sequence[Array | None]:
    """The engine, a thread for each rank, over channels that move as much as they like."""
    element = getattr(torch, dtype)
    operator = operator_of(OPS[reduction.name], element)
    opening = CollectiveFingerprint(0, 1, -1, kind, f"{dtype} {reduction}", b"schedule")
    networks = fake_networks(len(programs), capacity=(8, 32, 100)[seed % 3], part_bytes=16, seed=seed)
    running = engines_of(networks)

    def run(engine: Engine) -> Array | None:
        memory = memory_of(programs[engine.rank], inputs[engine.rank], element)
        graph = compile_graph(programs[engine.rank])
        engine.run(graph, memory, opening, operator, dtype=element)
        if Buffer.OUTPUT not in memory:
            return None
        if kind.reduces and operator is not None:
            operator.after(memory[Buffer.OUTPUT], programs[engine.rank].contributors)
        return np.asarray(memory[Buffer.OUTPUT].numpy())

    found = each(running, run)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    assert [engine.failure for engine in running] == [None] * len(running)
    close(running, networks)
    return found


def memory_of(program: Program, own: Array | None, element: torch.dtype) -> dict[Buffer, torch.Tensor]:
    """The buffers of a rank: its data, and elsewhere what must not be taken for any."""
    memory = {
        buffer: torch.full((program.elements(buffer),), -77, dtype=element)
        for buffer in (Buffer.INPUT, Buffer.OUTPUT)
        if program.elements(buffer)
    }
    held = Buffer.OUTPUT if program.in_place else Buffer.INPUT
    if own is not None and held in memory:
        memory[held].copy_(torch.from_numpy(own))
    return memory


def grouped(
    programs: Sequence[Program], inputs: Inputs, kind: Kind, reduction: Reduction, dtype: str, seed: int
) -> Sequence[Array | None]:
    """Groups of messages without tags, of programs that were lowered for them."""
    return run_grouped(programs, inputs, reduction=reduction, dtype=dtype, seed=seed)


EXECUTORS: dict[str, Run] = {
    "interpreter": interpreted,
    "task graphs": simulated,
    "engine": engines,
    "groups": grouped,
}

each_executor = pytest.mark.parametrize("run", EXECUTORS.values(), ids=EXECUTORS)


@each_executor
def test_ranks_that_exchange_their_values_get_the_same_bits(run: Run) -> None:
    """In groups of three, in two steps: whoever adds up the same values adds them in the same order."""
    threes = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    transfers = [
        Transfer(0, src, dst, step, True)
        for step, grouped in enumerate((threes, [[*it] for it in zip(*threes, strict=True)]))
        for group in grouped
        for src in reversed(group)
        for dst in group
        if src != dst
    ]
    schedule = make("allreduce", [Chunk(Fraction(1), 0)], transfers, total=9)
    values = np.random.default_rng(0).normal(size=(9, 64)).astype(np.float32)
    programs = lower(schedule, 64, grouped=run is grouped)
    found = run(programs, list(values), Kind.ALLREDUCE, Reduction.SUM, "float32", 0)
    first, *others = (np.asarray(it) for it in found)
    np.testing.assert_allclose(first, values.sum(axis=0), rtol=1e-5, atol=1e-5)
    for other in others:
        np.testing.assert_array_equal(other, first)


def check(
    run: Run,
    schedule: Schedule,
    size: int,
    pieces: int,
    *,
    seed: int = 0,
    window: int = 8,
    reduction: Reduction = Reduction.SUM,
    dtype: str = "int64",
) -> None:
    """One call on `size` elements of each block, compared with its definition."""
    count = size * lay_out(schedule, 0).blocks
    programs = lower(schedule, count, pieces=pieces, window=window, grouped=run is grouped)
    exact = inputs_of(schedule, count, dtype, reduction)
    inputs = [None if array is None else array.astype(dtype) for array in exact]
    expected = define(schedule.collective, inputs, reduction)
    kept = [None if array is None else array.copy() for array in inputs]
    found = run(programs, inputs, schedule.collective.kind, reduction, dtype, seed)
    for rank, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        if wanted is None or not len(wanted):
            assert got is None or not len(got), f"rank {rank} gets nothing"
        else:
            np.testing.assert_array_equal(got, wanted, f"rank {rank}")
    for before, after in zip(kept, inputs, strict=True):
        assert before is None or (before == after).all(), "inputs stay as they are"


@each_executor
@pytest.mark.parametrize("name", CASES)
def test_drawn_schedules(run: Run, name: str) -> None:
    for seed, size in enumerate((0, 1, 2, 23)):
        for pieces in (1, 3):
            check(run, CASES[name], size, pieces, window=2, seed=seed + pieces)


@each_executor
@given(
    schedules(),
    st.integers(0, 40),
    st.integers(1, 4),
    st.integers(0, 2**16),
    st.integers(1, 3),
    st.sampled_from(Reduction),
)
@settings(max_examples=80)
def test_random_schedules(
    run: Run, schedule: Schedule, size: int, pieces: int, seed: int, window: int, reduction: Reduction
) -> None:
    check(run, schedule, size, pieces, seed=seed, window=window, reduction=reduction)


@each_executor
@given(schedules([kind for kind in Kind if kind.reduces]), st.sampled_from(Reduction), st.integers(0, 20))
@settings(max_examples=30)
def test_every_reduction_on_every_type(run: Run, schedule: Schedule, reduction: Reduction, size: int) -> None:
    for dtype in ("float32", "float64", "int64"):
        check(run, schedule, size, 2, reduction=reduction, dtype=dtype)


# On real processes ----------------------------------------------------------------------------------

Job: TypeAlias = tuple[AnySchedule, int, str, Reduction, int]  # ..., elements of a block, type, ..., pieces


class Messages:
    """Torch's point-to-point messages, on the default group's backend."""

    def __init__(self, rank: int, size: int, *, grouped: bool = False) -> None:
        self._grouped = grouped

    def run(self, job: Job, **buffers: Any) -> None:
        schedule, _, dtype, reduction, pieces = job
        executor = Executor(schedule, pieces=pieces, grouped=self._grouped)
        count = lay_out(schedule, job[1] * lay_out(schedule, 0).blocks).count
        executor.run(count, getattr(torch, dtype), op=OPS[reduction.name], **buffers)

    def close(self) -> None:
        """Nothing is held."""


_numbers = itertools.count()  # alike on all ranks, which make the same engines


class Engines:
    """The engine over one transport, call after call."""

    def __init__(self, rank: int, size: int, transport: str) -> None:
        store = dist.PrefixStore(f"engines {next(_numbers)}", dist.distributed_c10d._get_default_store())
        self._network = Network(store, rank, size, timeout_s=90, transport=transport, slot_bytes=1 << 16)
        self._network.connect(range(size))
        self._engine = Engine(rank, self._network, timeout_s=90)
        self._calls = 0

    def run(self, job: Job, given: torch.Tensor | None = None, output: torch.Tensor | None = None) -> None:
        schedule, elements, dtype, reduction, pieces = job
        count = elements * lay_out(schedule, 0).blocks
        program = lower_rank(schedule, self._engine.rank, count, pieces=pieces)
        element, kind = getattr(torch, dtype), schedule.collective.kind
        operator = operator_of(OPS[reduction.name], element) if kind.reduces else None
        opening = CollectiveFingerprint(self._calls, count, -1, kind, f"{dtype} {reduction}", b"schedule")
        self._calls += 1
        buffers = {Buffer.INPUT: given, Buffer.OUTPUT: output}
        memory = {buffer: tensor for buffer, tensor in buffers.items() if tensor is not None}
        self._engine.run(compile_graph(program), memory, opening, operator, dtype=element)
        if operator is not None and output is not None:
            operator.after(output, program.contributors)

    def close(self) -> None:
        self._network.close()
        self._engine.close()


RUNTIMES: dict[str, Callable[..., Any]] = {
    "messages": Messages,
    "groups": lambda rank, size: Messages(rank, size, grouped=True),
    "sockets": lambda rank, size: Engines(rank, size, "sockets"),
    "shared memory": lambda rank, size: Engines(rank, size, "shared memory"),
}

each_runtime = pytest.mark.parametrize("runtime", RUNTIMES)
RANKS = {size: StandingRanks(size, backend="gloo") for size in (2, 3, 4, 5, 8)}


def run_all(rank: int, size: int, runtime: str, jobs: Sequence[Job]) -> int:
    """Every job on this rank, each element compared with the definition; the number of elements."""
    compared = 0
    with ExitStack() as stack:
        running = RUNTIMES[runtime](rank, size)
        stack.callback(running.close)
        for number, job in enumerate(jobs):
            compared += run_one(running, rank, job)
            if number % 16 == rank:
                time.sleep(0.02)  # the others' next calls come early
    return compared


def run_one(running: Any, rank: int, job: Job) -> int:
    schedule, elements, dtype, reduction, _ = job
    layout = lay_out(schedule, elements * lay_out(schedule, 0).blocks)
    exact = np.int64 if dtype == "int64" else np.float64  # numpy has no bfloat16
    given_by = inputs_of(schedule, layout.count, dtype, reduction)
    inputs = [None if array is None else array.astype(exact) for array in given_by]
    expected = define(schedule.collective, inputs, reduction)[rank]
    element, own, in_place = getattr(torch, dtype), inputs[rank], layout.in_place(rank)
    data = None if own is None else torch.from_numpy(own).to(element)
    output = torch.full((layout.output_elements(rank),), -1, dtype=element)
    if in_place and data is not None:
        output = data.clone()
    given_ = data if layout.input_elements(rank) and not in_place else None
    running.run(job, given=given_, output=output if layout.output_elements(rank) else None)
    if expected is None:
        return 0
    wanted = torch.from_numpy(expected).to(element)
    what = f"{schedule.collective.kind} {schedule.topology.name} {elements} {dtype} {reduction} rank {rank}"
    assert torch.equal(output, wanted), what
    if given_ is not None and own is not None:
        assert torch.equal(given_, torch.from_numpy(own).to(element)), f"{what}: the input has changed"
    return len(wanted)


@functools.cache
def random_jobs() -> dict[int, list[Job]]:
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
    for schedule in DRAWN.values():
        for elements in (1, 100):
            jobs[schedule.topology.ranks] += [(schedule, elements, "int64", Reduction.SUM, 3)]
    return jobs


def synthesized_jobs(spec: str, elements: int, pieces: int) -> list[Job]:
    fabric = topologies.load(spec)
    return [
        (synth.solve(fabric, kind.value), elements, "float32", Reduction.SUM, pieces) for kind in NAMED_KINDS
    ]


@each_runtime
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3, 5])
def test_random_schedules_of_every_kind(runtime: str, ranks: int) -> None:
    assert any(RANKS[ranks](run_all, runtime, random_jobs()[ranks]))


@pytest.mark.parametrize(
    "runtime", [pytest.param(it, marks=[pytest.mark.long] if it == "messages" else []) for it in RUNTIMES]
)
def test_synthesized_schedules_of_every_kind(runtime: str) -> None:
    assert all(RANKS[8](run_all, runtime, synthesized_jobs("dgx1", 4099, 7)))


@each_runtime
def test_every_kind_type_and_size_in_both_forms(runtime: str) -> None:
    forms: list[AnySchedule] = [implicit(grid(2, 2, hubs=True), kind) for kind in IMPLICIT_KINDS]
    fabric = topologies.load("full:4")
    forms += [synth.solve(fabric, kind.value) for kind in NAMED_KINDS]
    forms += [case for case in DRAWN.values() if case.topology.ranks == 4]
    jobs: list[Job] = [
        (schedule, elements, dtype, Reduction.SUM, 3)
        for schedule in forms
        for elements, dtype in ((0, "float32"), (1, "int64"), (1009, "bfloat16"))
    ]
    jobs += [
        (schedule, 101, "float64", reduction, 3)
        for schedule in forms
        if schedule.collective.kind.reduces
        for reduction in (Reduction.AVG, Reduction.MAX, Reduction.PRODUCT)
    ]
    jobs += [(CASES[name], 1 << 19, "float32", Reduction.SUM, 3) for name in ("ring", "exchange")]
    assert all(RANKS[4](run_all, runtime, jobs))
