"""Regular fabrics with faults: solved by orbits, repaired, and as fast as solved from nothing."""

from __future__ import annotations

import pytest

from arborcast import synth
from arborcast import topologies as catalog
from arborcast.synth.errors import CollectiveError, InfeasibleError, InputError
from arborcast.synth.faults.faulty import without
from arborcast.synth.faults.old_trees import OldTrees
from arborcast.synth.faults.repair import healthy_schedule, repair, solve_partly_symmetric


@pytest.mark.parametrize("kind", ["allgather", "reduce-scatter", "allreduce"])
@pytest.mark.parametrize(
    ("spec", "faults"),
    [
        ("torus:4x5", {"links": ["0-1"]}),
        ("torus:4x4", {"ranks": [5]}),
        ("dgx-a100:boxes=2", {"links": ["3-box0.nvswitch", "9-fabric1"]}),
        pytest.param("mi250", {"ranks": [0, 7]}, marks=pytest.mark.long),
    ],
)
def test_a_faulty_fabric_reaches_its_own_bound(spec, faults, kind):
    faulty = without(catalog.load(spec), **faults)
    found = solve_partly_symmetric(faulty, kind)
    assert synth.verify(found).errors == ()
    fresh = synth.solve(faulty.topology, kind)
    assert (found.rate, found.bound.rate) == (fresh.rate, fresh.bound.rate)
    assert "on old trees" in dict(found.method.settings)["repaired"]
    assert solve_partly_symmetric(faulty, kind) == found


@pytest.mark.parametrize("kind", ["allgather", "reduce-scatter", "allreduce"])
@pytest.mark.parametrize("spec", ["torus:4x4", "dgx-a100:boxes=2"])
def test_an_implicit_schedule_is_repaired_like_its_expansion(spec, kind):
    faulty = without(catalog.load(spec), links=[])
    implicit = healthy_schedule(faulty, kind)
    trees, expanded = OldTrees.of(implicit), OldTrees.of(implicit.expand())
    assert trees is not None
    assert expanded is not None
    assert list(trees.shares) == list(expanded.shares)
    assert trees.owners.tolist() == expanded.owners.tolist()
    cable = implicit.topology.links[0]
    links = [(cable.src, cable.dst)]
    assert repair(implicit, without_links=links) == repair(implicit.expand(), without_links=links)


def test_what_has_no_orbits_is_refused():
    faulty = without(catalog.load("dgx1").subset([0, 1, 2, 4, 7]), links=[])
    with pytest.raises(InputError, match="has no translations, so that nothing is repeated"):
        solve_partly_symmetric(faulty, "allgather")
    with pytest.raises(CollectiveError, match="broadcast: by orbits and repair are solved allgather"):
        solve_partly_symmetric(without(catalog.load("torus:3x3"), links=["0-1"]), "broadcast")


def test_who_is_cut_off_is_named():
    faulty = without(catalog.load("ring:6"), links=["0-1", "1-2"])
    with pytest.raises(InfeasibleError, match="rank 1"):
        solve_partly_symmetric(faulty, "allgather")
