"""Exports of the catalog's machines: what selection takes at a size, for every runtime, read back and run."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.backends.programs import chakra, goal, mscclpp, nccl_graph, sccl
from arborcast.backends.programs.checking.check import check_program
from arborcast.backends.programs.exporting.export import export_program, in_units
from arborcast.backends.programs.exporting.one_sided import export_one_sided
from arborcast.backends.programs.folder import usual_units
from arborcast.backends.programs.interpreter import interpret
from arborcast.backends.programs.limits import MSCCL
from arborcast.backends.programs.msccl.reader import read
from arborcast.backends.programs.msccl.writer import write
from arborcast.backends.programs.mscclpp.writer import KINDS
from arborcast.synth import verify
from arborcast.synth.api import approach
from arborcast.synth.collective import NAMED_KINDS, TREE_KINDS, Kind
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError
from arborcast.synth.nccl_protocol import Protocol
from arborcast.synth.schedule import Schedule
from arborcast.synth.solve_options import SolveOptions
from tests.support.program_mutants import interpret_all

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
@asked
@given(*cases, st.sampled_from(list(NAMED_KINDS)), st.sampled_from(["msccl", "mscclpp"]), st.booleans())
def test_what_runtimes_get_is_right(
    spec: str, size: tuple[int, Protocol], kind: Kind, runtime: str, in_place: bool
) -> None:
    """Where the exact shares take more chunks than fit, they are rounded."""
    schedule = selected(spec, kind, size[0])
    if schedule is None or (runtime == "mscclpp" and kind not in KINDS):
        return
    chunks = usual_units(schedule) if in_units(schedule, None)[1] > MSCCL.offset else None
    export = export_program if runtime == "msccl" else export_one_sided
    try:
        program = export(schedule, in_place=in_place, protocol=size[1], chunks=chunks, most_bytes=size[0])
    except InputError:  # does not fit
        return
    if runtime == "msccl":
        back = read(write(program), root=program.root)
        assert interpret_all(back, range(3), elements=4).correct
    else:
        back = mscclpp.read(mscclpp.write(program), root=program.root)
        assert all(interpret(back, in_place=in_place, seed=seed, calls=2).correct for seed in range(3))
    assert back.parts == program.parts
    assert check_program(back).correct


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
    assert verify(sccl.read(text, topology=schedule.topology)).correct


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
    assert verify(nccl_graph.rings_as_schedule(again, topology, schedule.collective)).correct
