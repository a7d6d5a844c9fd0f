"""Schedules exported as programs: right by the interpreter, within limits, and schedules again.

For every runtime: small fabrics, drawn ones, and what selection takes at a size on the catalog's machines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth, topologies
from arborcast.backends.programs import chakra, goal, mscclpp, nccl_graph, sccl
from arborcast.backends.programs.as_schedule import as_schedule
from arborcast.backends.programs.checking.check import check_program
from arborcast.backends.programs.exporting.export import export_program, in_units, rounded
from arborcast.backends.programs.exporting.one_sided import export_one_sided
from arborcast.backends.programs.folder import usual_units
from arborcast.backends.programs.limits import MSCCL
from arborcast.backends.programs.msccl.reader import read
from arborcast.backends.programs.msccl.writer import file_steps, write
from arborcast.backends.programs.program import GlobalProgram, ProgramError
from arborcast.synth.api import approach
from arborcast.synth.collective import NAMED_KINDS, TREE_KINDS, Kind
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.nccl_protocol import Protocol
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Topology
from arborcast.topologies import load
from tests.programs.drawn import drawn
from tests.programs.test_checker import RING
from tests.support.program_mutants import interpret_all
from tests.support.strategies import topologies as fabrics


@dataclass(frozen=True)
class Runtime:
    """How its files are made."""

    export: Callable[..., GlobalProgram]
    write: Callable[[GlobalProgram], str]
    read: Callable[..., GlobalProgram]
    kinds: Collection[Kind]


RUNTIMES = {
    "msccl": Runtime(export_program, write, read, NAMED_KINDS),
    "mscclpp": Runtime(export_one_sided, mscclpp.write, mscclpp.read, mscclpp.writer.KINDS),
}
EVERY = [(name, kind) for name, runtime in RUNTIMES.items() for kind in runtime.kinds]
PROTOCOLS = (Protocol.SIMPLE, Protocol.LL)


def check_file(
    name: str, program: GlobalProgram, schedule: AnySchedule, *, is_exact: bool = True, orders: int = 3
) -> None:
    """What is written is read back, right in every order and, where shares are exact, the schedule again."""
    runtime = RUNTIMES[name]
    back = runtime.read(runtime.write(program), root=program.root)
    assert (back.parts, back.chunks, back.protocol) == (program.parts, program.chunks, program.protocol)
    assert (back.in_place, back.out_of_place) == (program.in_place, program.out_of_place)
    assert (back.double_scratch, back.most_bytes) == (program.double_scratch, program.most_bytes)
    assert check_program(back).errors == ()
    assert all(len(part.blocks) <= MSCCL.blocks == mscclpp.limits.BLOCKS for part in back.parts)
    assert interpret_all(back, range(orders)).correct
    if is_exact:
        again = as_schedule(
            back, schedule.topology
        )  # verified; programs do not say which way through switches
        ways = {transfer.via for transfer in schedule.expand().transfers}
        # Programs know no rounds, so that links may carry other steps' chunks meanwhile.
        found = synth.verify(replace(schedule.expand(), rounds=None))
        assert again.rate == found.rate or len(ways) > 1


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_exports_move_every_element_where_it_belongs(name: str, kind: Kind) -> None:
    ring, star = (synth.solve(load(spec), kind) for spec in ("ring:4", "star:3"))
    hosts: dict[str, Any] = {"ranks_per_host": 2} if name == "mscclpp" else {}
    for schedule, wishes in (
        (ring, {"in_place": kind is not Kind.ALLTOALL, **hosts}),  # which needs more room than FIFOs have
        (ring, {"in_place": False, "protocol": Protocol.LL, **hosts}),
        (star, {"in_place": True, "protocol": Protocol.LL}),
        (star, {"in_place": False}),
    ):
        check_file(name, RUNTIMES[name].export(schedule, **wishes), schedule)


@pytest.mark.long
@settings(max_examples=120, deadline=None)
@given(
    fabrics(max_ranks=5, max_bandwidth=3), st.sampled_from(EVERY), st.sampled_from(PROTOCOLS), st.booleans()
)
def test_exports_from_any_fabric_are_right(
    topology: Topology, asked: tuple[str, Kind], protocol: Protocol, in_place: bool
) -> None:
    name, kind = asked
    schedule = synth.solve(topology, kind)
    try:
        program = RUNTIMES[name].export(schedule, in_place=in_place, protocol=protocol)
    except ProgramError as error:
        # Exchanges in place may need more room than FIFOs have; nothing else may be missing.
        assert asked == ("msccl", Kind.ALLTOALL) and in_place, error
        return
    check_file(name, program, schedule)


def test_in_place_nothing_is_written_over_what_is_still_to_be_sent() -> None:
    pair = load("full:2")
    collective = synth.Collective.on(pair, "alltoall")
    chunks = [Chunk(Fraction(1, 2), 0, 1), Chunk(Fraction(1, 2), 1, 0)]
    transfers = [Transfer(0, 0, 1, 0), Transfer(1, 1, 0, 1)]  # one after the other
    bound = synth.bound(pair, "alltoall")
    schedule = synth.Schedule.build(pair, collective, Method("drawn"), bound, chunks, transfers)
    program = export_program(schedule)
    steps = [[str(step) for block in part.blocks for step in block.operations] for part in program.parts]
    assert steps == [["s i1", "r o1"], ["r s0", "s i0", "cpy s0 -> o0"]]
    assert interpret_all(program, range(10)).correct


def test_an_export_is_drawn() -> None:
    program = export_program(synth.solve(load("ring:3"), "broadcast", max_trees=1))
    blocks = [
        [(block.receive, block.send, *map(str, block.operations)) for block in part.blocks]
        for part in program.parts
    ]
    assert blocks == [[(None, 1, "s o0"), (None, 2, "s o0")], [(0, None, "r o0")], [(0, None, "r o0")]]


def test_what_does_not_fit_names_the_limit_and_by_how_much() -> None:
    broadcast = synth.solve(load("ring:3"), "broadcast")
    with pytest.raises(ProgramError, match=r"over 2 channels rank 0 has a block of 71 steps, 7 beyond 64"):
        export_program(broadcast, chunks=10_000)
    with pytest.raises(ProgramError, match=r"40000 chunks, 7233 more than offsets go to \(32767\)"):
        export_program(broadcast, chunks=40_000)
    relayed = synth.solve(load("dgx1"), "allreduce", ranks=[0, 1, 2])
    with pytest.raises(ProgramError, match=r"all ranks take part .* 5 are relays \(3, 4, 5, 6, 7\)"):
        export_program(relayed)


def test_blocks_stay_within_64_steps_and_64_blocks() -> None:
    program = export_program(synth.solve(load("torus:4x4"), "alltoall"), in_place=False)
    assert max(file_steps(block) for part in program.parts for block in part.blocks) <= 64
    assert max(len(part.blocks) for part in program.parts) <= 64
    assert program.channels <= 32


def test_shares_are_rounded_to_as_many_chunks_as_asked_for() -> None:
    schedule = synth.solve(load("dgx1"), "allreduce")
    short = rounded(schedule, 16)
    assert synth.verify(short).correct
    assert sum(chunk.share for chunk in short.chunks) == 1
    assert {chunk.share.denominator for chunk in short.chunks} <= {1, 2, 4, 8, 16}
    program = export_program(schedule, chunks=16)
    assert program.chunks == 16
    assert as_schedule(program, schedule.topology).rate == short.rate < schedule.rate


def test_a_foreign_program_becomes_a_schedule_with_its_own_rate() -> None:
    topology = load("ring:3,bandwidth=2")
    found = as_schedule(drawn(RING, chunks=3), topology)
    # Each link carries four thirds of the buffer at 2 GB/s.
    assert found.rate == Fraction(3, 2)
    assert found.steps == 4
    with pytest.raises(ProgramError, match=re.escape("the program is for 3 ranks, ring:4 has 4")):
        as_schedule(drawn(RING, chunks=3), load("ring:4"))


ALL_PAIRS = """
    0>1<1: s i0; r s0 !
    0>2<2: s i0; r s1 !
    0: re s0 i0 @0.1 @1.1; re s1 i0
    1>0<0: s i0; r s0 !
    1>2<2: s i0; r s1 !
    1: re s0 i0 @0.1 @1.1; re s1 i0
    2>0<0: s i0; r s0 !
    2>1<1: s i0; r s1 !
    2: re s0 i0 @0.1 @1.1; re s1 i0
"""


def test_what_is_sent_before_it_is_added_to_stays_what_it_was() -> None:
    """Programs that add out of scratch once all has come used to be no set of steps."""
    found = as_schedule(drawn(ALL_PAIRS, scratch=2), load("full:3"))
    assert (found.steps, found.transfer_count, found.rate) == (1, 6, 1)
    apart = ALL_PAIRS.replace("re s0 i0 @0.1 @1.1; re s1 i0", "re s0 s1 @0.1 @1.1; re s1 i0", 1)
    assert as_schedule(drawn(apart, scratch=2), load("full:3")).rate == 1
    two_sums = """
        0>1<1: r s0 !; s s3 @2.3
        0>2<2: r s1 !; s s2 @2.1
        0: cpy i0 s2; re s0 s2 @0.0 !; cpy i0 s3; re s1 s3 @1.0 !; re s0 i0; re s1 i0
        1>0<0: s i0; rrc i0 i0
        2>0<0: s i0; rrc i0 i0
    """
    with pytest.raises(ProgramError, match="rank 0 keeps several sums of one chunk"):
        as_schedule(drawn(two_sums, scratch=4), load("full:3"))


# ---------------------------------------------------------------- what is selected on the catalog's machines

MOST_RANKS = 16
SHAPES = (
    "ring:8",
    "star:8",
    "full:8",
    "hypercube:4",
    "torus:4x4",
    "mesh:3x4",
    "tpu-v5e:4x4",
    "dragonfly:2x2x2",
)
SIZES = ((16 << 10, Protocol.LL), (1 << 20, Protocol.SIMPLE), (256 << 20, Protocol.SIMPLE))


@cache
def machines() -> tuple[str, ...]:
    """Specs of the catalog up to 16 ranks, one of those whose links are the same, and small shapes."""
    seen: dict[object, str] = {}
    for entry in topologies.catalog():
        try:
            topology = topologies.load(entry.name)
        except InputError:  # needs arguments: those shapes are named above
            continue
        if topology.ranks <= MOST_RANKS:
            links = frozenset((link.src, link.dst, link.bandwidth) for link in topology.links)
            seen.setdefault((topology.ranks, links), entry.name)
    return (*seen.values(), *SHAPES)


@cache
def selected(spec: str, kind: Kind, size: int) -> Schedule | None:
    """What is chosen for a size; None where nothing is found in time."""
    topology = topologies.load(spec).forwarding
    asked = approach(topology, kind, "auto", SolveOptions(deadline_s=15), "explicit")
    try:
        found = asked.selection().fastest(size)
    except TimedOutError as error:
        found = error.best
    assert found is None or isinstance(found, Schedule)
    return found


asked = settings(max_examples=20, deadline=None)
cases = (st.deferred(lambda: st.sampled_from(machines())), st.sampled_from(SIZES))


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(*cases, st.sampled_from(EVERY), st.booleans(), st.sampled_from([None, 4]))
def test_what_runtimes_get_of_machines_is_right(
    spec: str, size: tuple[int, Protocol], asked: tuple[str, Kind], in_place: bool, hosts: int | None
) -> None:
    """Where the exact shares take more chunks than fit, they are rounded."""
    name, kind = asked
    schedule = selected(spec, kind, size[0])
    if schedule is None:
        return
    chunks = usual_units(schedule) if in_units(schedule, None)[1] > MSCCL.offset else None
    wishes: dict[str, Any] = {
        "in_place": in_place,
        "protocol": size[1],
        "chunks": chunks,
        "most_bytes": size[0],
    }
    wishes |= {"ranks_per_host": hosts} if name == "mscclpp" else {}
    try:
        program = RUNTIMES[name].export(schedule, **wishes)
    except InputError:  # does not fit
        return
    check_file(name, program, schedule, is_exact=chunks is None)


@pytest.mark.long
@asked
@given(*cases, st.sampled_from(list(NAMED_KINDS)))
def test_what_simulators_get_is_written(spec: str, size: tuple[int, Protocol], kind: Kind) -> None:
    schedule = selected(spec, kind, size[0])
    if schedule is None:
        return
    goal.write(schedule, size[0])
    chakra.write(schedule, size[0])
    try:
        text = sccl.write(schedule)
    except InputError:  # does not fit
        return
    assert synth.verify(sccl.read(text, topology=schedule.topology)).correct


@pytest.mark.long
@asked
@given(cases[0], st.sampled_from(list(TREE_KINDS)))
def test_rings_of_machines_come_back(spec: str, kind: Kind) -> None:
    topology = topologies.load(spec).forwarding
    try:
        schedule = approach(topology, kind, "multiring", SolveOptions(), "explicit").answer()
        graphs = nccl_graph.export_graphs(schedule)
    except (InputError, InfeasibleError):  # no rings, or none that NCCL could run
        return
    again = nccl_graph.read(nccl_graph.write(graphs))
    assert synth.verify(nccl_graph.rings_as_schedule(again, topology, schedule.collective)).correct
