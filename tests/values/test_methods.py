"""The public entry: names, knobs, and the laziness of the package."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

from arborcast import synth, topologies
from arborcast.synth.api import approach
from arborcast.synth.baselines import BASELINES
from arborcast.synth.chunks.encodings.registry import ENCODINGS
from arborcast.synth.collective import NAMED_KINDS, TREE_KINDS, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError
from arborcast.synth.methods import METHODS, NEED_SIZE
from arborcast.synth.packing import tree_solver
from arborcast.synth.packing.exact import pack_split
from arborcast.synth.packing.weighted_tree import Packing
from arborcast.synth.schedule import Schedule
from arborcast.synth.simulation.simulator import simulate

HEAVY = ("torch", "numba", "highspy", "networkx", "matplotlib", "pydantic", "numpy", "scipy")


def test_import_is_free_of_heavy_packages() -> None:
    """The core never imports torch, and a small question does not pay for what it does not use."""
    code = f"import sys, arborcast.synth.cli.app; print([name for name in {HEAVY} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_solving_never_imports_torch() -> None:
    code = (
        "import sys, synth, topologies; f = topologies.load('dgx1');"
        "[synth.verify(synth.solve(f, k)) for k in ('allreduce', 'gather')]; print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


@pytest.mark.parametrize("kind", [kind.value for kind in NAMED_KINDS])
def test_auto_serves_every_kind_at_its_bound(kind: str) -> None:
    schedule = synth.solve(topologies.load("dgx1"), kind)
    assert synth.verify(schedule).correct
    assert schedule.is_optimal
    assert schedule.method.name == ("trees" if kind in TREE_KINDS else "routes")


def test_methods_that_are_given_chunks_are_the_encodings() -> None:
    assert set(NEED_SIZE) == set(ENCODINGS)


def test_an_unknown_method_is_named_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="method magic: must be one of auto, trees, mwu, routes, smt"):
        synth.solve(topologies.load("ring:3"), "broadcast", method="magic")


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"routes"}))
def test_every_method_is_verified_and_below_its_bound(method: str) -> None:
    # One chunk a rank, each half in one step of one round: every link of the full graph carries one.
    size: Any = {"chunks": 8, "steps": 2, "rounds": 2} if method in NEED_SIZE else {}
    schedule = synth.solve(topologies.load("full:8"), "allreduce", method=method, **size)
    assert synth.verify(schedule).errors == ()
    assert 0 < schedule.rate <= schedule.bound.rate
    assert schedule.method.name == method


@pytest.mark.parametrize("kind", ["broadcast", "allreduce", "alltoall"])
def test_the_fastest_for_a_size_is_no_slower_than_any_candidate(kind: str) -> None:
    topology = topologies.load("dgx1", ranks=(0, 1, 2, 3))
    collective = synth.Collective.on(topology, kind)
    others = list(approach(topology, collective).candidates())
    for size in (1 << 10, 64 << 20):
        best = synth.solve(topology, collective, size_bytes=size)
        assert simulate(best, size).time_us == min(simulate(other, size).time_us for other in others)


def test_a_question_goes_straight_to_its_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """From `solve` to the packing each call does a part of the work; none only passes on."""
    ways: list[list[str]] = []

    def noted(*asked: Any, **knobs: Any) -> Packing:
        names = [frame.function for frame in inspect.stack(0)]
        ways.append(names[names.index("solve") : 0 : -1])
        return pack_split(*asked, **knobs)

    monkeypatch.setattr(tree_solver, "pack_split", noted)
    synth.solve(topologies.load("ring:4"), "allgather")
    assert ways == [["solve", "answer", "_of_best_rate", "solve_by_trees", "_packings"]]


def test_a_late_method_does_not_lose_what_the_earlier_ones_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, **__: object) -> Schedule:
        raise TimedOutError("ring: out of time")

    monkeypatch.setattr("arborcast.synth.baselines.solve_baseline", late)
    with pytest.raises(TimedOutError, match="ring: out of time") as caught:
        synth.solve(topologies.load("dgx1"), "broadcast", size_bytes=1 << 20, deadline_s=600)
    assert caught.value.best is not None
    assert caught.value.best.is_optimal


def test_all_methods_together_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Deadline] = []

    def noted(*_: object, seed: int, deadline_s: Deadline) -> Schedule:
        given.append(deadline_s)
        raise InfeasibleError("not here")

    monkeypatch.setattr("arborcast.synth.baselines.solve_baseline", noted)
    synth.solve(topologies.load("dgx1"), "broadcast", size_bytes=1 << 20, deadline_s=600)
    patterns = [name for name, row in BASELINES.items() if Kind.BROADCAST in row.kinds]
    assert len(given) == len(patterns) - 1 > 3  # levels know their own
    assert {each.allowed_s for each in given} == {600}
    assert len({each.end for each in given}) == 1
