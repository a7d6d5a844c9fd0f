"""The rate said of a plan of puts is that of its own operations, by another reading of the written file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from fractions import Fraction
from math import ceil
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.backends.programs.exporting.one_sided import export_one_sided
from arborcast.backends.programs.formats import read_program, write_program
from arborcast.backends.programs.pacing import rate_of, time_us
from arborcast.backends.programs.program import (
    Acquire,
    GlobalProgram,
    Loop,
    Move,
    Operation,
    ProgramError,
    Release,
    Signal,
    Synchronize,
    Wait,
)
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load
from tests.support.commands import Command
from tests.support.strategies import topologies

SIZE = 1 << 20


def in_turns(operations: Iterable[Operation], chunk_bytes: Fraction) -> Iterator[tuple[Operation, Fraction]]:
    """Operations as device code does them, and the bytes that each moves."""
    for done in operations:
        if isinstance(done, Loop):
            whole = done.chunks * chunk_bytes
            for turn in range(ceil(whole / done.piece_bytes)):
                piece = min(whole - turn * done.piece_bytes, Fraction(done.piece_bytes))
                yield from ((inner, piece) for inner in done.operations)
        else:
            yield done, done.count * chunk_bytes if isinstance(done, Move) else Fraction(0)


def longest_chain_us(program: GlobalProgram, topology: Topology) -> Fraction:  # noqa: PLR0912
    """Blocks in turn, each as far as what it waits for is known; every link has one block that puts there."""
    happened: dict[tuple[object, ...], list[Fraction]] = defaultdict(list)
    users: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    taken: dict[tuple[object, ...], int] = defaultdict(int)
    chunk_bytes = Fraction(SIZE, program.chunks)
    rows = {
        (rank, at): list(in_turns(block.operations, chunk_bytes))
        for rank, part in enumerate(program.parts)
        for at, block in enumerate(part.blocks)
    }
    blocks = [(rank, at) for rank, part in enumerate(program.parts) for at in range(len(part.blocks))]
    place, clock, landed = dict.fromkeys(blocks, 0), dict.fromkeys(blocks, Fraction(0)), Fraction(0)
    fence = dict.fromkeys(blocks, Fraction(0))
    moved = True
    while moved:
        moved = False
        for key in blocks:
            rank, block = key[0], program.parts[key[0]].blocks[key[1]]
            while place[key] < len(rows[key]):
                done, size = rows[key][place[key]]
                needs: list[tuple[object, ...]] = []
                match done:
                    case Wait(channels=channels):
                        ends = [block.connections[at] for at in channels]
                        needs = [("signal", end.peer, rank, end.number) for end in ends]
                    case Acquire(semaphores=semaphores):
                        needs = [("semaphore", rank, at) for at in semaphores]
                if any(len(happened[need]) <= taken[need] for need in needs):
                    break
                for need in needs:
                    clock[key] = max(clock[key], happened[need][taken[need]])
                    taken[need] += 1
                match done:
                    case Signal(channels=channels):
                        for end in (block.connections[at] for at in channels):
                            there = max(clock[key] + topology.latency_us[rank, end.peer], fence[key])
                            happened["signal", rank, end.peer, end.number].append(there)
                    case Release(semaphores=semaphores):
                        for at in semaphores:
                            happened["semaphore", rank, at].append(clock[key])
                    case Move():
                        assert all(span.rank is None for span in done.sources)
                        begin = clock[key]
                        for hop in [(rank, span.rank) for span in done.targets if span.rank is not None]:
                            users[hop].add(key)
                            left = begin + size / (1000 * topology.bandwidth[hop])
                            clock[key] = max(clock[key], left)
                            fence[key] = max(fence[key], left + topology.latency_us[hop])
                            landed = max(landed, fence[key])
                    case _:
                        assert isinstance(done, (Synchronize, Wait, Acquire))
                place[key] += 1
                moved = True
    assert all(place[key] == len(row) for key, row in rows.items())
    assume(all(len(block) == 1 for block in users.values()))
    return max([landed, *clock.values()])


@settings(max_examples=25)
@given(
    topologies(max_ranks=5, switches=0),
    st.sampled_from(["allgather", "allreduce", "broadcast"]),
    st.sampled_from([Fraction(0), Fraction(3)]),
)
def test_the_time_of_a_plan_is_that_of_its_operations(
    tmp_path_factory: pytest.TempPathFactory, drawn: Topology, kind: str, latency_us: Fraction
) -> None:
    links = [Link(link.src, link.dst, link.bandwidth, latency_us) for link in drawn.links]
    fabric = Topology.build("drawn", drawn.ranks, links)
    schedule = synth.solve(fabric, kind, method="trees", max_trees=2)
    try:
        written = export_one_sided(schedule, channels=1, most_bytes=SIZE)
    except ProgramError:
        return
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    write_program(written, file)
    program = read_program(file, root=0 if kind == "broadcast" else None)
    expected = longest_chain_us(program, fabric)
    assert time_us(program, fabric, SIZE) == expected
    if not latency_us:
        assert rate_of(program, fabric) == Fraction(SIZE) / (1000 * expected)


@pytest.mark.parametrize(("size", "turns"), [("16KiB", 1), ("4MiB", 128)])
def test_what_is_said_of_trees_is_how_their_pieces_follow_each_other(
    tmp_path: Path, command: Command, size: str, turns: int
) -> None:
    """A tree of height two puts all pieces twice; the last one is a piece later than on one link."""
    line = load("ring:4,bandwidth=3")
    schedule = synth.solve(line, "broadcast", method="trees", max_trees=1, max_height=3)
    assert (schedule.rate, schedule.height) == (3, 2)
    files = {name: str(tmp_path / name) for name in ("tree.json", "plan.json")}
    synth.write_schedule(schedule, files["tree.json"])
    said = command("export", files["tree.json"], "--to", "mscclpp", "--sizes", size, "-o", files["plan.json"])
    rate = 3 * Fraction(turns, turns + 1)
    assert f"rate  {rate} GB/s" in said.out and "as its puts follow each other" in said.out
    assert ("the schedule reaches 3 GB/s" in said.out) == (turns == 1)
    again = command("verify", files["plan.json"], "--topology", "ring:4,bandwidth=3", "--root", "0")
    assert f"rate  {rate} GB/s" in again.out


@pytest.mark.parametrize(
    "spec", ["dgx1", *(pytest.param(spec, marks=pytest.mark.long) for spec in ("dgx-a100", "mi250"))]
)
def test_a_plan_of_pieces_is_nearly_as_fast_as_its_schedule(spec: str) -> None:
    fabric, size = load(spec), 64 << 20
    schedule = synth.solve(fabric, "allreduce", method="trees")
    program = export_one_sided(schedule, most_bytes=size)
    assert time_us(program, fabric, size) <= 1.05 * synth.simulate(schedule, size).time_us


@pytest.mark.parametrize(
    ("kind", "in_place"),
    [
        ("broadcast", True),
        ("reduce-scatter", False),
        pytest.param("reduce", False, marks=pytest.mark.long),
        pytest.param("allgather", True, marks=pytest.mark.long),
    ],
)
def test_chunks_of_other_trees_do_not_wait_for_each_other(kind: str, in_place: bool) -> None:
    fabric, size = load("dgx1"), 64 << 20
    schedule = synth.solve(fabric, kind, form="explicit")
    assert isinstance(schedule, Schedule)
    program = export_one_sided(schedule, in_place=in_place, most_bytes=size)
    assert time_us(program, fabric, size) <= 1.03 * synth.simulate(schedule, size).time_us


def test_answers_go_back_where_no_link_leads() -> None:
    """Who puts along a one-way link waits for signals from its end, which take as long as on a cable."""
    way = [Link(rank, (rank + 1) % 3, Fraction(4), Fraction(2)) for rank in range(3)]
    one_way, cables = (
        Topology.build("ring", 3, links) for links in (way, [*way, *(link.reversed for link in way)])
    )
    program = export_one_sided(synth.solve(one_way, "allreduce"))
    assert any(isinstance(done, Signal) for _, _, _, done in program.unrolled().operations)
    assert time_us(program, one_way, SIZE) == time_us(program, cables, SIZE)
