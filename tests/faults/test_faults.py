"""What is left without links and ranks: against `Topology.subset`, and every way to ask for nonsense."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies as catalog
from arborcast.synth.errors import TopologyError
from arborcast.synth.faults.faulty import parse_link, without
from arborcast.synth.topology import Link, Topology
from tests.support.strategies import topologies as graphs


@given(graphs(max_ranks=6, switches=3), st.data())
@settings(max_examples=50)
def test_ranks_go_as_in_a_fragment(topology, data):
    gone = data.draw(st.lists(st.integers(0, topology.ranks - 1), unique=True, max_size=topology.ranks - 1))
    kept = [rank for rank in range(topology.ranks) if rank not in gone]
    faulty = without(topology, ranks=gone)
    fragment = topology.subset(kept)
    assert (faulty.topology.links, faulty.topology.switches) == (fragment.links, fragment.switches)
    assert faulty.kept[: len(kept)] == tuple(kept)
    for now, before in enumerate(faulty.kept):
        assert faulty.number[before] == now
        if now >= len(kept):
            assert faulty.topology.label(now) == topology.label(before)


@given(graphs(max_ranks=6, switches=2), st.data())
@settings(max_examples=50)
def test_links_go_both_ways_and_nothing_else_does(topology, data):
    link = data.draw(st.sampled_from(topology.links))
    faulty = without(topology, links=[(link.src, link.dst)])
    left = {(faulty.kept[one.src], faulty.kept[one.dst]): one.bandwidth for one in faulty.topology.links}
    gone = set(topology.bandwidth) - set(left)
    assert {(link.src, link.dst), (link.dst, link.src)} <= gone
    assert all(topology.bandwidth[hop] == rate for hop, rate in left.items())
    # Whatever else is gone hung on a switch that leads nowhere any more.
    dead = set(range(topology.size)) - set(faulty.kept)
    assert all(
        hop[0] in dead or hop[1] in dead for hop in gone - {(link.src, link.dst), (link.dst, link.src)}
    )


def test_names_of_switches_may_hold_dashes():
    links = [
        Link(0, 2, Fraction(1)),
        Link(2, 0, Fraction(1)),
        Link(1, 2, Fraction(1)),
        Link(2, 3, Fraction(1)),
    ]
    topology = Topology.build("dashes", 2, links, ["top-of-rack", "spine-0"])
    assert parse_link(topology, "0-top-of-rack") == (0, 2)
    assert parse_link(topology, "top-of-rack - spine-0") == (2, 3)
    assert parse_link(topology, "spine-0-top-of-rack") == (3, 2)


def test_two_readings_of_a_link_are_refused():
    links = [Link(2, 5, Fraction(1)), Link(3, 4, Fraction(1)), Link(0, 1, Fraction(1))]
    topology = Topology.build("two", 2, links, ["a", "a-b", "c", "b-c"])
    with pytest.raises(TopologyError, match="link 'a-b-c': can be read as 2 links of two"):
        parse_link(topology, "a-b-c")


def test_symmetries_that_keep_the_faults_stay():
    torus = catalog.load("torus:4x4")
    assert torus.symmetries
    assert without(torus, links=["0-1"]).topology.symmetries == ()
    # A whole column of links is gone: moving along the column is still a symmetry.
    column = without(torus, links=[(4 * row, 4 * row + 1) for row in range(4)])
    assert len(column.topology.symmetries) == 1


def test_the_name_lists_a_few_faults():
    torus = catalog.load("torus:4x4")
    many = without(torus, links=["0-1", "1-2"], ranks=[15, 14], slower={(4, 5): Fraction(1, 2)})
    assert many.topology.name == f"{torus.name} without 0-1, 1-2, rank 15 and 2 more"
    assert without(torus).topology == torus


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"links": ["0-99"]}, "link '0-99': must be two ranks in 0..15 or names of switches with a dash"),
        ({"links": ["nonsense"]}, "link 'nonsense': must be two ranks"),
        ({"links": ["0-10"]}, "link '0-10': torus:4x4 has no such link, 0 is linked to 1, 3, 4, 12$"),
        ({"links": [(0, 10)]}, "link 0-10: torus:4x4 has no such link, 0 is linked to 1, 3, 4, 12$"),
        ({"links": [(0, 99)]}, "link 0-99: torus:4x4 has no such link, 0 is linked to"),
        ({"links": [(-1, 0)]}, "link -1-0: torus:4x4 has no such link$"),
        ({"links": ["0-1", (1, 0)]}, "link 1-0: must be named once, got it twice"),
        ({"ranks": [16]}, "rank must be in 0..15, got 16"),
        ({"ranks": [3, 3]}, "ranks must be named once, got 3 twice"),
        ({"ranks": range(16)}, "no rank is left without all 16"),
        ({"slower": {(0, 10): Fraction(1)}}, "link 0->10: torus:4x4 has no such link"),
        (
            {"slower": {(0, 1): Fraction(0)}},
            "link 0->1: what is left must be positive and at most 1 GB/s, got 0",
        ),
        ({"slower": {(0, 1): Fraction(3, 2)}}, "at most 1 GB/s, got 3/2"),
        ({"links": ["0-1"], "slower": {(0, 1): Fraction(1, 2)}}, "link 0->1: cannot be both gone and slower"),
    ],
)
def test_nonsense_is_refused_in_one_line(faults, message):
    with pytest.raises(TopologyError, match=message) as caught:
        without(catalog.load("torus:4x4"), **faults)
    assert "\n" not in str(caught.value)


def test_a_link_to_the_wrong_switch_is_told_the_right_one():
    boxes = catalog.load("dgx-a100:boxes=2")
    with pytest.raises(TopologyError, match=r"no such link, 3 is linked to box0\.nvswitch, fabric1$"):
        without(boxes, links=["3-fabric0"])
    with pytest.raises(TopologyError, match=r"fabric0 is linked to 0, 2, 4, 6, 8, 10, 12, 14$"):
        without(boxes, links=["fabric0-3"])
    with pytest.raises(TopologyError, match=r"0 is linked to 1, 2, 3, 4, 5, 6, 7, 8 and 11 more$"):
        without(catalog.load("full:20"), links=[(0, 20)])
