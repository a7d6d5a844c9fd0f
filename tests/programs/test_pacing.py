"""The rate said of a plan of puts is that of its own operations, by another reading of the written file."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
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
    Move,
    ProgramError,
    Release,
    Signal,
    Synchronize,
    Wait,
)
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load
from tests.support.commands import Command
from tests.support.strategies import topologies

SIZE = 1 << 20


def longest_chain_us(program: GlobalProgram, topology: Topology) -> Fraction:  # noqa: PLR0912
    """Blocks in turn, each as far as what it waits for is known; every link has one block that puts there."""
    happened: dict[tuple[object, ...], list[Fraction]] = defaultdict(list)
    users: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    taken: dict[tuple[object, ...], int] = defaultdict(int)
    byte_us = Fraction(SIZE, 1000 * program.chunks)
    blocks = [(rank, at) for rank, part in enumerate(program.parts) for at in range(len(part.blocks))]
    place, clock, landed = dict.fromkeys(blocks, 0), dict.fromkeys(blocks, Fraction(0)), Fraction(0)
    fence = dict.fromkeys(blocks, Fraction(0))
    moved = True
    while moved:
        moved = False
        for key in blocks:
            rank, block = key[0], program.parts[key[0]].blocks[key[1]]
            while place[key] < len(block.operations):
                done = block.operations[place[key]]
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
                            left = begin + done.count * byte_us / topology.bandwidth[hop]
                            clock[key] = max(clock[key], left)
                            fence[key] = max(fence[key], left + topology.latency_us[hop])
                            landed = max(landed, fence[key])
                    case _:
                        assert isinstance(done, (Synchronize, Wait, Acquire))
                place[key] += 1
                moved = True
    assert all(place[rank, at] == len(program.parts[rank].blocks[at].operations) for rank, at in blocks)
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
        written = export_one_sided(schedule, channels=1)
    except ProgramError:
        return
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    write_program(written, file)
    program = read_program(file, root=0 if kind == "broadcast" else None)
    expected = longest_chain_us(program, fabric)
    assert time_us(program, fabric, SIZE) == expected
    if not latency_us:
        assert rate_of(program, fabric) == Fraction(SIZE) / (1000 * expected)


def test_trees_put_whole_are_not_said_to_reach_the_rate_of_the_schedule(
    tmp_path: Path, command: Command
) -> None:
    """A tree of height two puts the whole buffer twice, one after the other: half of the schedule's rate."""
    line = load("ring:4,bandwidth=3")
    schedule = synth.solve(line, "broadcast", method="trees", max_trees=1, max_height=3)
    assert (schedule.rate, schedule.height) == (3, 2)
    synth.write_schedule(schedule, tmp_path / "tree.json")
    said = command(
        "export", str(tmp_path / "tree.json"), "--to", "mscclpp", "-o", str(tmp_path / "plan.json")
    )
    assert "rate  3/2 GB/s (1.5) as its puts follow each other, 25 % of the proven bound" in said.out
    assert "the schedule reaches 3 GB/s" in said.out
