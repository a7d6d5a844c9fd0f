"""Several groups at once: rates against all trees by brute force, and fairness on known fabrics."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth, topologies
from arborcast.synth.collective import Collective, Demand
from arborcast.synth.errors import CollectiveError, InfeasibleError, InputError, TimedOutError
from arborcast.synth.groups import solve_groups, verify_groups
from arborcast.synth.topology import Link, Topology
from tests.fuzzing.sharing import who_can_gain
from tests.support.strategies import topologies as drawn_topologies


def rates_of(found):
    return [str(rate) for rate in found.rates]


def mesh_lines(topology, kinds, side=4):
    """A group on each row of the square mesh for the first kind, on each column for the second."""
    lines = [[side * i + j for j in range(side)] for i in range(side)]
    lines += [[side * i + j for i in range(side)] for j in range(side)]
    return [
        Collective.on(topology, kinds[number // side], ranks=ranks, root=ranks[0])
        for number, ranks in enumerate(lines[: side * len(kinds)])
    ]


@settings(max_examples=45)
@given(st.data())
def test_no_sharing_is_fairer(data):
    """Rates of any kinds, weights and ranks fit the links, and nobody gains but from one that has no more."""
    topology = data.draw(
        drawn_topologies(max_ranks=5, switches=1, min_ranks=3, symmetric=data.draw(st.booleans()))
    )
    kinds = [kind for kind in synth.Kind if kind != "custom"]
    groups = []
    for _ in range(data.draw(st.integers(1, 3))):
        ranks = data.draw(st.permutations(range(topology.ranks)))[: data.draw(st.integers(2, 4))]
        groups.append(Collective.on(topology, data.draw(st.sampled_from(kinds)), ranks=ranks, root=ranks[-1]))
    weights = [Fraction(data.draw(st.sampled_from(["1", "2", "1/3"]))) for _ in groups]
    relays = data.draw(st.booleans())
    try:
        found = solve_groups(topology, groups, weights=weights, relays=relays)
    except InfeasibleError:
        assert not relays  # the drawn fabric is connected
        return
    verdict = verify_groups(found)
    assert verdict.errors == ()
    assert verdict.max_link_load == 1  # someone could be faster otherwise
    assert all(group.rate <= group.alone for group in found.groups)
    assert found.certificate.is_exact
    assert who_can_gain(topology, groups, weights, found.rates, relays=relays) == []


@settings(max_examples=15)
@given(st.data())
def test_alone_is_what_solve_reaches_with_relays(data):
    topology = data.draw(drawn_topologies(max_ranks=5, switches=1, min_ranks=3))
    ranks = data.draw(st.permutations(range(topology.ranks)))[:3]
    kind = data.draw(st.sampled_from(["broadcast", "reduce-scatter", "allreduce", "gather", "alltoall"]))
    alone = solve_groups(topology, [Collective.on(topology, kind, ranks=ranks, root=ranks[0])]).groups[0]
    single = synth.solve(topology.reordered(ranks), kind, ranks=range(3))
    assert alone.rate == alone.alone
    if kind == "alltoall":  # whose paths have rounded weights
        assert single.rate <= alone.rate <= single.bound.rate
    else:
        assert alone.rate == single.rate


def test_groups_on_disjoint_links_reach_what_they_reach_alone():
    two_rings = Topology.build(
        "two triangles",
        6,
        [
            Link(3 * t + i, 3 * t + j, Fraction(1 + t))
            for t in range(2)
            for i in range(3)
            for j in range(3)
            if i != j
        ],
    )
    groups = [Collective.on(two_rings, "allreduce", ranks=range(3 * t, 3 * t + 3)) for t in range(2)]
    found = solve_groups(two_rings, groups)
    assert rates_of(found) == ["3/2", "3"]
    assert [level.groups for level in found.certificate.levels] == [(0,), (1,)]
    assert found.rates == tuple(group.alone for group in found.groups)


@pytest.mark.parametrize("kind", ["allreduce", "allgather", "broadcast", "alltoall"])
def test_identical_groups_halve_and_weights_divide(kind):
    fabric = topologies.load("full:4")
    group = Collective.on(fabric, kind)
    alone = solve_groups(fabric, [group]).rates[0]
    assert solve_groups(fabric, [group, group]).rates == (alone / 2, alone / 2)
    assert solve_groups(fabric, [group, group], weights=[3, 1]).rates == (alone * 3 / 4, alone / 4)


def test_who_is_not_in_the_way_of_the_slowest_is_faster():
    """0 -1- 1 -1- 2 -9- 3: the two groups on the first link share it, the third has the last one's 9.

    Lowering nobody, group 2 can use all that 2-3 has left: 9 GB/s, as group 1 ends at rank 2.
    """
    path = Topology.build(
        "path",
        4,
        [Link(i + a, i + b, Fraction(w)) for i, w in enumerate((1, 1, 9)) for a, b in ((0, 1), (1, 0))],
    )
    groups = [Collective.on(path, "allreduce", ranks=ranks) for ranks in ((0, 1), (0, 1, 2), (2, 3))]
    found = solve_groups(path, groups)
    assert rates_of(found) == ["1/2", "1/2", "9"]
    assert [level.rate for level in found.certificate.levels] == [Fraction(1, 2), 9]
    assert verify_groups(found).correct


def test_links_of_others_help():
    dgx1 = topologies.load("dgx1")
    four = [Collective.on(dgx1, "allreduce", ranks=range(4))]
    assert rates_of(solve_groups(dgx1, four, relays=False)) == ["75"]
    assert rates_of(solve_groups(dgx1, four)) == ["100"]
    halves = [*four, Collective.on(dgx1, "allreduce", ranks=range(4, 8))]
    assert rates_of(solve_groups(dgx1, halves)) == ["75", "75"]  # no spare links when both run


@pytest.mark.parametrize("kinds", [["allreduce", "allreduce"], ["allgather", "broadcast"], ["alltoall"]])
def test_symmetry_changes_no_rate(kinds):
    torus = topologies.load("torus:3x3")
    plain = replace(torus, symmetries=())
    found = solve_groups(torus, mesh_lines(torus, kinds, side=3))
    assert found.rates == solve_groups(plain, mesh_lines(plain, kinds, side=3)).rates
    assert verify_groups(found).correct


def test_rows_and_columns_of_a_torus_share_it():
    torus = topologies.load("torus:4x4")
    found = solve_groups(torus, mesh_lines(torus, ["allreduce", "allreduce"]))
    assert set(rates_of(found)) == {"4/3"}  # a ring of 4 at 1 GB/s: 2 ways * 4 / (2 * 3)
    assert len(found.certificate.levels) == 1
    mixed = solve_groups(torus, mesh_lines(torus, ["allgather", "reduce-scatter"]))
    assert set(rates_of(mixed)) == {"8/3"}


def test_a_group_that_cannot_is_named():
    torus = topologies.load("torus:4x4")
    groups = [Collective.on(torus, "broadcast", ranks=ranks, root=ranks[0]) for ranks in ([0, 1], [0, 5])]
    with pytest.raises(
        InfeasibleError, match="group 1: broadcast: rank 5 cut off: nothing leads there from rank 0"
    ):
        solve_groups(torus, groups, relays=False)


def test_wrong_input_is_refused():
    ring = topologies.load("ring:4")
    group = Collective.on(ring, "allreduce", ranks=[0, 1])
    with pytest.raises(InputError, match="needs at least one group, got none"):
        solve_groups(ring, [])
    with pytest.raises(InputError, match="one for each of the 1 groups, got 2"):
        solve_groups(ring, [group], weights=[1, 1])
    with pytest.raises(InputError, match="group 0: weight must be positive, got 0"):
        solve_groups(ring, [group], weights=[0])
    with pytest.raises(CollectiveError, match=r"group 1: allreduce: rank must be in 0\.\.3, got 7"):
        solve_groups(ring, [group, replace(group, ranks=(0, 7))])
    custom = Collective.custom(ring, [Demand(frozenset({0}), frozenset({1}))])
    with pytest.raises(CollectiveError, match="group 0: custom: groups share links in the named kinds only"):
        solve_groups(ring, [custom])
    with pytest.raises(TimedOutError, match="sharing the bandwidth of links among trees did not end within"):
        solve_groups(ring, [group], deadline_s=1e-9)
