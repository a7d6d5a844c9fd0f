from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.synth.errors import TopologyError
from arborcast.synth.topology import Link, Switch, Topology, gcd_of_fractions
from tests.support.strategies import topologies


def chain(*rates: int, switches: tuple[str, ...] = ()) -> Topology:
    """Vertices in a row, cables of these GB/s between neighbours."""
    links = [Link(*pair, Fraction(rate)) for i, rate in enumerate(rates) for pair in ((i, i + 1), (i + 1, i))]
    return Topology.build("chain", len(rates) + 1 - len(switches), links, switches)


def test_parallel_links_add_up_where_their_latencies_are_equal() -> None:
    links = [Link(0, 1, Fraction(3), Fraction(2), "a"), Link(0, 1, Fraction(1, 2), Fraction(2), "b", "c")]
    (link,) = Topology.build("t", 2, links).links
    assert link == Link(0, 1, Fraction(7, 2), Fraction(2))
    assert (link.rate_assumed, link.latency_assumed) == ("a; b", "c")


def test_slower_parallel_links_pass_a_switch_of_their_own() -> None:
    rates = {(0, 1): ((100, 1), (1, 100), (2, 50)), (1, 0): ((100, 1), (1, 100))}
    links = [Link(*pair, Fraction(rate), Fraction(us)) for pair, each in rates.items() for rate, us in each]
    topology = Topology.build("t", 2, links)
    assert [switch.name for switch in topology.switches] == ["0-1 of 50 us", "0-1 of 100 us"]
    assert {(link.src, link.dst): (link.bandwidth, link.latency_us) for link in topology.links} == {
        (0, 1): (100, 1),
        (1, 0): (100, 1),
        **{(0, 2): (2, 50), (2, 1): (2, 0)},
        **{(0, 3): (1, 100), (3, 1): (1, 0), (1, 3): (1, 100), (3, 0): (1, 0)},
    }
    assert set(topology.cables) == set(links)
    assert set(topology.subset([1, 0]).cables) == {replace(x, src=x.dst, dst=x.src) for x in links}
    assert topology.reversed().reversed() == topology


def test_parallel_links_and_symmetries() -> None:
    ends = [(0, 1), (1, 2), (2, 0)]
    links = [Link(*pair, Fraction(rate), Fraction(us)) for pair in ends for rate, us in ((4, 1), (1, 9))]
    topology = Topology.build("ring", 3, links, symmetries=[[1, 2, 0]])
    # the links beside 0-1, 0-2 and 1-2 are vertices 3, 4 and 5, and go to those beside 1-2, 0-1 and 0-2
    assert topology.symmetries == ((1, 2, 0, 5, 3, 4),)
    with pytest.raises(TopologyError, match="must map parallel links to parallel links like them"):
        Topology.build("ring", 3, links[:-1], symmetries=[[1, 2, 0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 0, "links": []}, "ranks must be at least 1, got 0"),
        ({"links": [Link(0, 0, Fraction(1))]}, "link 0->0: must join two different vertices"),
        ({"links": [Link(0, 1, Fraction(0))]}, "link 0->1: bandwidth must be positive, got 0"),
        ({"links": [Link(0, 1, Fraction(-1))]}, "bandwidth must be positive, got -1"),
        ({"links": [Link(0, 1, Fraction(1), Fraction(-1))]}, "latency must not be negative, got -1"),
        ({"links": [Link(0, 7, Fraction(1))]}, "link 0->7: vertex must be in 0..1, got 7"),
        ({"switches": ["sw", "sw"]}, "switch sw: names must be unique, got it 2 times"),
        ({"switches": ["a\nb"]}, r"name 'a\\nb': must be printable text on one line"),
        ({"symmetries": [[0]]}, "must name each of the 2 vertices exactly once"),
        ({"symmetries": [[1, 0]]}, "maps link 0->1 of 1 GB/s to 1->0 of 0 GB/s"),
    ],
)
def test_rules_are_checked(change: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"ranks": 2, "links": [Link(0, 1, Fraction(1))]}
    with pytest.raises(TopologyError, match=message):
        Topology.build("t", **{**good, **change})  # type: ignore[arg-type]


def test_whole_numbers_become_fractions() -> None:
    """Halves of them are taken on the way to an allreduce."""
    links = [Link(0, 1, 3, 1), Link(1, 0, np.int64(3))]  # type: ignore[arg-type]
    assert [type(link.bandwidth) for link in links] == [Fraction, Fraction]
    assert links[0] == Link(0, 1, Fraction(3), Fraction(1))
    assert synth.solve(Topology.build("pair", 2, links), "allreduce").rate == 3


@pytest.mark.parametrize("number", [2.5, float("nan"), "3", None])
def test_links_are_exact(number: object) -> None:
    for values, name in (((number,), "bandwidth"), ((Fraction(1), number), "latency_us")):
        rule = f"link 0->1: {name} must be a whole number or a Fraction, got {number!r}"
        with pytest.raises(TopologyError, match=f"^{re.escape(rule)}$"):
            Link(0, 1, *values)  # type: ignore[arg-type]


def test_links_out_of_order_are_refused() -> None:
    with pytest.raises(TopologyError, match="sorted and unique"):
        Topology("t", 2, (Link(1, 0, Fraction(1)), Link(0, 1, Fraction(1))))


def test_symmetries_respect_kinds_of_vertices_and_latency() -> None:
    links = [Link(0, 1, Fraction(1)), Link(1, 0, Fraction(1), Fraction(1))]
    with pytest.raises(TopologyError, match="alike in bandwidth and latency"):
        Topology.build("t", 2, links, symmetries=[[1, 0]])
    with pytest.raises(TopologyError, match="ranks to ranks and switches to switches"):
        Topology.build("t", 1, [], ["sw"], [[1, 0]])
    with pytest.raises(TopologyError, match="switch sum to plain; both must be able to do the same"):
        Topology.build("t", 1, [], [Switch("sum", reduces=True), "plain"], [[0, 2, 1]])


@pytest.mark.parametrize(
    ("abilities", "message"),
    [
        ({"reduces": True, "turns": True}, "switch s: one that turns must reduce and multicast"),
        (
            {"reduces": True, "multicasts": True, "turns": True, "loopback": True},
            "switch s: must not both turn and loop back",
        ),
        (
            {"reduces": True, "adder": Fraction(0)},
            "adder must be positive and of a switch that reduces, got 0",
        ),
        ({"multicasts": True, "adder": Fraction(1)}, "must be positive and of a switch that reduces, got 1"),
        ({"reduces": True, "trees": 0}, "switch s: trees must be at least 1, got 0"),
        ({"reduces": True, "latency_us": Fraction(-1)}, "switch s: latency must not be negative, got -1 us"),
        ({"stores": True}, "are for one that reduces or multicasts"),
        ({"reduces": True, "adder": 0.5}, "switch s: adder must be a whole number or a Fraction, got 0.5"),
        ({"reduces": True, "latency_us": 0.5}, "switch s: latency_us must be a whole number or a Fraction"),
    ],
)
def test_abilities_of_switches_must_go_together(abilities: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Switch("s", **abilities)


def test_switches_that_are_able_come_first_and_may_hold_chunks() -> None:
    able = [Switch("a", reduces=True), Switch("b", multicasts=True)]
    fabric = Topology.build("t", 3, [], [*able, "plain"])
    assert (fabric.holders, fabric.size) == (5, 6)
    plain = fabric.forwarding
    assert plain.switches == (Switch("a"), Switch("b"), Switch("plain"))
    assert plain.forwarding is plain
    with pytest.raises(TopologyError, match="switch b: those that reduce or multicast must come before"):
        Topology.build("t", 3, [], ["plain", able[1]])


def test_subset_renumbers_in_the_order_given() -> None:
    fragment = chain(1, 2, 3).subset([2, 3, 1])
    assert fragment.bandwidth == {(0, 1): 3, (1, 0): 3, (0, 2): 2, (2, 0): 2}
    assert fragment.name == "chain[2,3,1]"
    assert chain(*[1] * 20).subset(range(5, 21)).name == f"chain[{','.join(map(str, range(5, 21)))}]"
    assert chain(*[1] * 20).subset(range(20, -1, -1)).name == "chain[20,19,18,... of 21]"


def test_subset_drops_switches_that_lead_nowhere() -> None:
    # 0 -1- 1 -2- a -3- b: without rank 1, nothing leads to the switches
    fabric = chain(1, 2, 3, switches=("a", "b"))
    assert [switch.name for switch in fabric.subset([0, 1]).switches] == []
    star = Topology.build(
        "star", 3, [Link(*pair, Fraction(1)) for r in range(3) for pair in ((r, 3), (3, r))], ["hub"]
    )
    assert [switch.name for switch in star.subset([0, 2]).switches] == ["hub"]
    assert star.subset([1]).size == 1


def test_subset_keeps_the_symmetries_that_map_it_to_itself() -> None:
    square = Topology.build(
        "square",
        4,
        [Link(*pair, Fraction(1)) for r in range(4) for pair in ((r, (r + 1) % 4), ((r + 1) % 4, r))],
        symmetries=[[1, 2, 3, 0], [2, 1, 0, 3]],
    )
    # ranks 0, 1, 2 become 0, 1, 2: only the mirror, which exchanges 0 and 2, maps them to themselves
    assert square.subset([0, 1, 2]).symmetries == ((2, 1, 0),)


def test_reordered_keeps_everything() -> None:
    fabric = chain(1, 2, 3).reordered([3, 1])
    assert fabric.ranks == 4
    # 3, 1, 0, 2 are now 0, 1, 2, 3: the cables 1 GB/s 0-1, 2 GB/s 1-2, 3 GB/s 2-3
    assert {pair: rate for pair, rate in fabric.bandwidth.items() if pair[0] < pair[1]} == {
        (1, 2): 1,
        (1, 3): 2,
        (0, 3): 3,
    }


@pytest.mark.parametrize(
    ("ranks", "message"),
    [([], "at least one rank"), ([0, 9], "rank must be in 0..1, got 9"), ([1, 1], "named once, got 1 twice")],
)
def test_fragments_of_unknown_ranks_are_refused(ranks: list[int], message: str) -> None:
    for take in (chain(1).subset, chain(1).reordered):
        with pytest.raises(TopologyError, match=message):
            take(ranks)


@given(topologies(max_ranks=5, symmetric=False, connected=False))
@settings(max_examples=60)
def test_capacities_are_bandwidths_in_whole_units(topology: Topology) -> None:
    rates = [capacity * topology.bandwidth_unit for capacity in topology.capacities]
    assert rates == [link.bandwidth for link in topology.links]
    assert topology.reversed().reversed() == topology


@given(topologies(max_ranks=5, symmetric=False), st.data())
@settings(max_examples=60)
def test_a_fragment_has_the_same_links_between_its_ranks(topology: Topology, data: st.DataObject) -> None:
    ranks = data.draw(st.permutations(range(topology.ranks)).map(lambda order: order[: len(order) // 2 + 1]))
    fragment = topology.subset(ranks)
    for new_src, src in enumerate(ranks):
        for new_dst, dst in enumerate(ranks):
            assert fragment.bandwidth.get((new_src, new_dst)) == topology.bandwidth.get((src, dst))


def test_unbalanced_vertices() -> None:
    one_way = Topology.build("t", 2, [Link(0, 2, Fraction(3)), Link(2, 1, Fraction(1))], ["sw"])
    assert one_way.unbalanced([2]) == (2,)
    assert chain(1, 1, switches=()).unbalanced([1]) == ()
    assert not one_way.is_symmetric
    assert chain(4).is_symmetric


@given(st.fractions(min_value=0), st.fractions(min_value=0))
def test_gcd_of_fractions(first: Fraction, second: Fraction) -> None:
    divisor = gcd_of_fractions(first, second)
    if not first or not second:
        assert divisor == first + second
        return
    assert (first / divisor).denominator == (second / divisor).denominator == 1
    # nothing larger divides both: the quotients have no common factor
    assert gcd_of_fractions(first / divisor, second / divisor) == 1
