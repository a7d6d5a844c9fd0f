"""The engine on tensors of a device: equal to the direct way, overlapping, bounded; what failures end in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.backends.dataflow.engine import Engine
from arborcast.backends.dataflow.task_graph import compile_graph
from arborcast.backends.errors import ExecutionError
from arborcast.backends.lowering.layout import Buffer, lay_out
from arborcast.backends.lowering.lower import lower_rank
from arborcast.backends.lowering.program import Program
from arborcast.backends.staging.device import CopyDirection, StagingDevice
from arborcast.backends.staging.emulated import EmulatedDevice
from arborcast.backends.tensors.torch_reduction import operator_of
from arborcast.backends.transport.fingerprint import CollectiveFingerprint
from arborcast.synth.collective import Kind
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.schedule import Chunk, Schedule, Transfer
from tests.support.devices import Event, NotingDevice
from tests.support.drawn_implicit import KINDS as IMPLICIT_KINDS
from tests.support.drawn_implicit import grid, implicit
from tests.support.drawn_schedules import DRAWN, make, schedules
from tests.support.fake_channels import close, each, engines_of, fake_networks


def programs_of(schedule: AnySchedule, size: int, pieces: int, depth: int | None) -> list[Program]:
    count = size * lay_out(schedule, 0).blocks
    return [
        lower_rank(schedule, rank, count, pieces=pieces, depth=depth, window=depth or 8)
        for rank in range(schedule.topology.ranks)
    ]


def run(
    programs: Sequence[Program],
    kind: Kind,
    dtype: torch.dtype,
    devices: Sequence[StagingDevice | None],
    op: Any = dist.ReduceOp.SUM,
) -> list[Any]:
    """The output of each rank, or what it raised; inputs are random and the same in every run."""
    networks = fake_networks(len(programs), capacity=4096, part_bytes=512, seed=1)
    engines = engines_of(networks, timeout_s=90)
    operator = operator_of(op, dtype) if kind.reduces else None
    opening = CollectiveFingerprint(0, 1, -1, kind, str(dtype), b"schedule")

    def work(engine: Engine) -> torch.Tensor | None:
        program = programs[engine.rank]
        random = torch.Generator().manual_seed(engine.rank)
        memory = {}
        for buffer in (Buffer.INPUT, Buffer.OUTPUT):
            if length := program.elements(buffer):
                data = torch.randn(length, generator=random, dtype=torch.float64) * 20
                memory[buffer] = data.to(dtype)
        given = {buffer: tensor.clone() for buffer, tensor in memory.items()}
        device = devices[engine.rank]
        engine.run(compile_graph(program), memory, opening, operator, dtype=dtype, device=device)
        if Buffer.INPUT in memory:
            assert torch.equal(memory[Buffer.INPUT], given[Buffer.INPUT]), "inputs stay as they are"
        return memory.get(Buffer.OUTPUT)

    found = each(engines, work)
    close(engines, networks)
    for device in devices:
        if device is not None:
            device.close()
    return found


def check_equal(
    schedule: AnySchedule, size: int, pieces: int, depth: int, dtype: torch.dtype, op: Any = dist.ReduceOp.SUM
) -> None:
    """What passes through a ring ends as what does not, bit for bit."""
    kind, ranks = schedule.collective.kind, schedule.topology.ranks
    direct = run(programs_of(schedule, size, 2, None), kind, dtype, [None] * ranks, op)
    devices = [NotingDevice() for _ in range(ranks)]
    staged = run(programs_of(schedule, size, pieces, depth), kind, dtype, devices, op)
    for rank, (wanted, got) in enumerate(zip(direct, staged, strict=True)):
        if isinstance(got, BaseException):
            raise got
        assert (wanted is None) == (got is None)
        assert wanted is None or torch.equal(wanted, got), f"rank {rank}"


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_schedules_are_equal_to_the_direct_way(name: str) -> None:
    for size, pieces, depth in ((1, 3, 2), (101, 5, 1), (64, 7, 3)):
        check_equal(DRAWN[name], size, pieces, depth, torch.float32)


@given(
    schedules(),
    st.integers(0, 50),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]),
    st.sampled_from([dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX]),
)
@settings(max_examples=40)
def test_random_schedules_are_equal_to_the_direct_way(
    schedule: Schedule, size: int, pieces: int, depth: int, dtype: torch.dtype, op: Any
) -> None:
    check_equal(schedule, size, pieces, depth, dtype, op)


@pytest.mark.parametrize("kind", IMPLICIT_KINDS)
def test_schedules_in_implicit_form(kind: Kind) -> None:
    check_equal(implicit(grid(2, 2, hubs=False), kind), 37, 3, 2, torch.float32)


# What overlaps, and what is held --------------------------------------------------------------------

PIECE = 4  # elements


def chain(ranks: int = 3, kind: str = "broadcast") -> Schedule:
    """One chunk from rank to rank; an allreduce comes up the chain before it goes down."""
    down = [Transfer(0, rank, rank + 1, rank) for rank in range(ranks - 1)]
    if kind == "broadcast":
        return make(kind, [Chunk(Fraction(1), 0)], down, total=ranks)
    up = [Transfer(0, rank, rank - 1, ranks - 1 - rank, True) for rank in range(ranks - 1, 0, -1)]
    down = [Transfer(0, move.src, move.dst, move.step + ranks - 1) for move in down]
    return make(kind, [Chunk(Fraction(1), 0)], [*up, *down], total=ranks)


def pieces_held(events: Sequence[Event]) -> int:
    """The most pieces whose copy in has begun and whose copy out has not ended."""
    held: set[int] = set()
    most = 0
    for event in events:
        if event.what == "begin" and event.way is CopyDirection.IN:
            held.add(event.at)
        elif event.what == "end" and event.way is CopyDirection.OUT:
            held.remove(event.at)
        most = max(most, len(held))
    assert not held
    return most


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_a_ring_holds_no_more_pieces_than_it_has_buffers(depth: int) -> None:
    schedule, pieces = chain(3, "allreduce"), 12
    devices = [NotingDevice() for _ in range(3)]
    run(programs_of(schedule, pieces * PIECE, pieces, depth), Kind.ALLREDUCE, torch.float32, devices)
    for device in devices:
        assert pieces_held(device.events) == depth
        assert device.host_bytes == [depth * PIECE * 4]
        for way in (CopyDirection.IN, CopyDirection.OUT):  # every piece once, in its order
            begun = [event.at for event in device.events if (event.what, event.way) == ("begin", way)]
            assert begun == [piece * PIECE for piece in range(pieces)]


def test_a_piece_arrives_while_a_later_one_is_not_yet_copied_in() -> None:
    """Copy in, sending, receiving and copy out overlap: each waits for nothing but its own piece.

    rank 0   in 0   | in 1 is held until ...
    rank 1          | 0 comes, 0 goes, out 0
    rank 2          | 0 comes, out 0 ends       ... here
    """
    arrived = threading.Event()
    first_out, second_in = Event("end", CopyDirection.OUT, 0), Event("begin", CopyDirection.IN, PIECE)

    def until_it_arrived(event: Event) -> threading.Event | None:
        return arrived if event == second_in else None

    events: list[tuple[int, Event]] = []

    def noting(rank: int) -> Callable[[Event], None]:
        def note(event: Event) -> None:
            events.append((rank, event))
            if (rank, event) == (2, first_out):
                arrived.set()

        return note

    devices = [NotingDevice(holds_back=until_it_arrived, on_event=noting(rank)) for rank in range(3)]
    results = run(programs_of(chain(), 3 * PIECE, 3, 2), Kind.BROADCAST, torch.float32, devices)
    assert all(torch.equal(result, results[0]) for result in results), results
    in_order = [
        (0, Event("end", CopyDirection.IN, 0)),
        (2, first_out),
        (0, Event("end", CopyDirection.IN, PIECE)),
    ]
    assert [event for event in events if event in in_order] == in_order


def test_whole_tensors_do_not_overlap() -> None:
    """The check of the check: with one piece all is copied in before anything is sent."""
    devices = [NotingDevice() for _ in range(3)]
    run(programs_of(chain(), 3 * PIECE, 1, 1), Kind.BROADCAST, torch.float32, devices)
    assert [event.way for event in devices[0].events] == [CopyDirection.IN, CopyDirection.IN]
    assert [event.way for event in devices[2].events] == [CopyDirection.OUT, CopyDirection.OUT]


@given(schedules(), st.integers(1, 6), st.integers(1, 4))
@settings(max_examples=30)
def test_host_memory_does_not_grow_with_the_tensor(schedule: Schedule, length: int, depth: int) -> None:
    """With pieces of one length: ring and scratch of 4 and of 16 pieces for each buffer are equal."""
    unit = np.lcm.reduce([chunk.share.denominator for chunk in schedule.chunks])
    few, many = (
        programs_of(schedule, int(unit) * length * pieces, pieces, depth)
        for pieces in (4 * depth, 16 * depth)
    )
    for one, other in zip(few, many, strict=True):
        assert one.ring_elements == other.ring_elements
        assert one.scratch_elements == other.scratch_elements


# Failures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (CopyDirection.IN, r"copy output\[4:8\] to ring\[4:8\]: OSError: the cable is out"),
        (CopyDirection.OUT, r"copy ring\[4:8\] to output\[4:8\]: OSError: the cable is out"),
    ],
)
def test_a_copy_that_fails_is_told_to_all(way: CopyDirection, words: str) -> None:
    devices = [NotingDevice(fails=Event("begin", way, PIECE) if rank == 1 else None) for rank in range(3)]
    found = run(programs_of(chain(3, "allreduce"), 40 * PIECE, 40, 2), Kind.ALLREDUCE, torch.float32, devices)
    for rank, error in enumerate(found):
        assert isinstance(error, ExecutionError), error
        assert str(error).startswith(f"rank {rank}: allreduce of 1 elements")
        with pytest.raises(ExecutionError, match=f"rank 1: .*{words}"):
            raise error


def test_a_copy_that_takes_too_long_is_a_timeout_which_waits_for_it() -> None:
    """What has raised leaves nothing behind that still writes to the caller's tensors."""
    late = threading.Event()
    schedule = chain(2)
    networks = fake_networks(2)
    engines = engines_of(networks, timeout_s=0.2)
    device = NotingDevice(holds_back=lambda event: late)
    opening = CollectiveFingerprint(0, 1, 0, Kind.BROADCAST, "float32", b"schedule")
    programs = programs_of(schedule, PIECE, 1, 1)

    def work(engine: Engine) -> None:
        memory = {Buffer.OUTPUT: torch.zeros(PIECE)}
        engine.run(compile_graph(programs[engine.rank]), memory, opening, None, device=device)

    threading.Timer(0.8, late.set).start()
    error, _ = each(engines, work)
    assert late.is_set()
    close(engines, networks)
    device.close()
    assert isinstance(error, ExecutionError)
    assert "copy output[0:4] to ring[0:4]" in str(error) and "nothing happened for 0.2 s" in str(error)


def test_every_copy_that_ends_is_progress() -> None:
    """All copies together may take longer than nothing may happen for."""
    schedule, pieces = chain(2), 16
    networks = fake_networks(2)
    engines = engines_of(networks, timeout_s=1.5)
    programs = programs_of(schedule, pieces * PIECE, pieces, pieces)
    device = EmulatedDevice(Fraction(1000), Fraction(110_000))
    opening = CollectiveFingerprint(0, 1, 0, Kind.BROADCAST, "float32", b"schedule")

    def work(engine: Engine) -> None:
        memory = {Buffer.OUTPUT: torch.zeros(pieces * PIECE)}
        engine.run(compile_graph(programs[engine.rank]), memory, opening, None, device=device)

    assert each(engines, work) == [None, None]
    close(engines, networks)
    device.close()
