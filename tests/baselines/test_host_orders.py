"""Orders of hosts: loads beside networkx's shortest ways, best orders beside all orders of few hosts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, permutations

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth.baselines.host_network import Host, HostNetwork, in_blocks
from arborcast.synth.baselines.host_orders import best_order
from arborcast.synth.baselines.order_costs import cost_of, most_of_any, ring_messages, tree_messages
from arborcast.synth.errors import InfeasibleError, InputError
from arborcast.synth.topology import Link, Topology

F = Fraction


@st.composite
def clusters(draw: st.DrawFn, most: int = 5) -> tuple[Topology, tuple[Host, ...]]:
    """A few hosts of one or two GPUs under one to three leaves, spines above, links at times missing."""
    count, leaves, spines = draw(st.integers(2, most)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    per_host = [draw(st.integers(1, 2)) for _ in range(count)]
    ranks = sum(per_host)
    links: list[Link] = []

    def cable(one: int, other: int) -> None:
        rate = F(draw(st.sampled_from([1, 1, 2])))
        links.extend((Link(one, other, rate, F(0)), Link(other, one, rate, F(0))))

    hosts = in_blocks([f"h{n}" for n in range(count)], per_host)
    for host in hosts:
        shared = draw(st.integers(0, leaves - 1))
        for rank in host.ranks:
            ends = {shared if draw(st.booleans()) else draw(st.integers(0, leaves - 1))}
            if draw(st.booleans()):
                ends.add(draw(st.integers(0, leaves - 1)))
            for leaf in sorted(ends):
                cable(rank, ranks + leaf)
        for one, other in pairwise(host.ranks):
            cable(one, other)
    for leaf in range(leaves):
        for spine in range(spines):
            if spine == 0 or draw(st.booleans()):
                cable(ranks + leaf, ranks + leaves + spine)
    names = [f"leaf{n}" for n in range(leaves)] + [f"spine{n}" for n in range(spines)]
    return Topology.build("drawn", ranks, links, names), hosts


def loads_by_networkx(
    topology: Topology, hosts: Sequence[Host], messages: Sequence[tuple[int, int, Fraction]]
) -> dict[tuple[int, int], Fraction]:
    """Lane i to lane i, at each vertex evenly over the edges that some shortest way to the end takes."""
    loads: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
    for src, dst, weight in messages:
        ours, theirs = hosts[src].ranks, hosts[dst].ranks
        count = max(len(ours), len(theirs))
        for lane in range(count):
            one, other = ours[lane % len(ours)], theirs[lane % len(theirs)]
            graph = networkx.DiGraph()
            for link in topology.links:
                if all(topology.is_switch(v) or v in (one, other) for v in (link.src, link.dst)):
                    graph.add_edge(link.src, link.dst)
            edges = {edge for way in networkx.all_shortest_paths(graph, one, other) for edge in pairwise(way)}
            held: dict[int, Fraction] = defaultdict(Fraction, {one: weight / count})
            for here in networkx.topological_sort(networkx.DiGraph(edges)):
                heads = [head for tail, head in edges if tail == here]
                for head in heads:
                    held[head] += held[here] / len(heads)
                    loads[here, head] += held[here] / len(heads)
    return loads


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_loads_are_those_of_even_shortest_ways(data: st.DataObject) -> None:
    topology, hosts = data.draw(clusters())
    network = HostNetwork(topology, hosts)
    pairs = st.tuples(st.integers(0, len(hosts) - 1), st.integers(0, len(hosts) - 1))
    drawn = data.draw(st.lists(pairs.filter(lambda pair: pair[0] != pair[1]), min_size=1, max_size=6))
    messages = [(src, dst, F(1, data.draw(st.integers(1, 2)))) for src, dst in drawn]
    loads = loads_by_networkx(topology, hosts, messages)
    rates = {(link.src, link.dst): link.bandwidth for link in topology.links}
    worst = max(load / rates[hop] for hop, load in loads.items())
    found = network.busiest(messages)
    assert found is not None
    assert (1 / found.rate, found.load / found.bandwidth) == (worst, worst)


@settings(deadline=None, max_examples=40)
@given(clusters(4))
def test_the_best_of_few_hosts_is_the_best_of_all_orders(drawn: tuple[Topology, tuple[Host, ...]]) -> None:
    topology, hosts = drawn
    network = HostNetwork(topology, hosts)
    costs = [cost_of(network, order) for order in permutations(range(len(hosts)))]
    worths = [cost.worth for cost in costs if cost is not None]
    found = best_order(network)
    assert found.is_proved
    assert found.cost.worth == max(worths)
    limit = most_of_any(network)
    assert max(ring for ring, _ in worths) <= limit[0]
    assert max(tree for _, tree in worths) <= limit[1]
    ranks = topology.ranks
    for order, cost in zip(permutations(range(len(hosts))), costs, strict=True):
        assert cost is not None
        moved = [hosts[host] for host in order]
        ring = loads_by_networkx(topology, moved, ring_messages(len(hosts)))
        rates = {(link.src, link.dst): link.bandwidth for link in topology.links}
        assert cost.ring == min(rates[hop] / load for hop, load in ring.items()) * ranks / (2 * (ranks - 1))
        trees = loads_by_networkx(topology, moved, tree_messages(len(hosts)))
        assert cost.worth == (cost.ring, min(rates[hop] / load for hop, load in trees.items()))


@settings(deadline=None, max_examples=60)
@given(clusters())
def test_what_no_order_exceeds_by_its_definition(drawn: tuple[Topology, tuple[Host, ...]]) -> None:
    """Ways into and out of hosts and of near places, and the fastest message of a place."""
    topology, hosts = drawn
    network = HostNetwork(topology, hosts)
    places = range(len(network.of_place))
    near = {
        (one, other): network.distance(max(one, other), min(one, other))
        for one, other in permutations(places, 2)
    }
    sets = {frozenset([place]) for place in places}
    for reach in {steps for steps in near.values() if steps is not None}:
        graph = networkx.Graph(pair for pair, steps in near.items() if steps is not None and steps <= reach)
        sets |= {frozenset(part) for part in networkx.connected_components(graph)}
    access = sorted(min(network.access(host)) for host in range(len(hosts)))
    around = [access[0], *(rate for part in sets if len(part) < len(places) for rate in network.cut(part))]
    fastest = []
    for of_place in network.of_place:
        ends = [end for end in (other[-1] for other in network.of_place) if end != of_place[0]]
        links = [network.busiest([(of_place[0], end, F(1))]) for end in ends]
        fastest.append(max(link.rate for link in links if link is not None))
    ranks = topology.ranks
    degree = Counter(host for one, other, _ in tree_messages(len(hosts)) for host in (one, other))
    # A host sends half of the buffer to each neighbour in a tree, and gets as much of it.
    uses = sorted(F(count, 2) / 2 for count in degree.values())
    of_trees = min(rate / use for rate, use in zip(access, uses, strict=True))
    assert most_of_any(network) == (
        min(*around, *fastest) * ranks / (2 * (ranks - 1)),
        min(*around, of_trees),
    )


def test_no_order_exceeds_what_leads_out_of_parts_of_parts() -> None:
    """Sixteen hosts under a tree of switches, 1 GB/s between its halves: no quarter has so little."""
    links: list[Link] = []
    for at in range(1, 16):  # in the numbers of a heap: 1 the root, hosts under 8 to 15
        below = [(2 * at + side, 1 if at == 1 else 8) for side in (0, 1)]
        links += one_way(*((low, at, rate) for low, rate in below), *((at, low, rate) for low, rate in below))
    number = {16 + host: host for host in range(16)} | {at: 15 + at for at in range(1, 16)}
    moved = [replace(link, src=number[link.src], dst=number[link.dst]) for link in links]
    fabric = Topology.build("heap", 16, moved, [f"s{at}" for at in range(1, 16)])
    limit = most_of_any(HostNetwork(fabric, in_blocks("abcdefghijklmnop", [1] * 16)))
    assert limit == (F(16, 30), 1)


def test_no_order_exceeds_the_slowest_way_of_a_host() -> None:
    """Host c, alone under its leaf, gets 1 GB/s, and everything else is faster."""
    ways = ((0, 3, 4), (3, 0, 4), (1, 3, 4), (3, 1, 4), (2, 4, 4), (4, 2, 1), (3, 4, 16), (4, 3, 16))
    network = HostNetwork(Topology.build("slow", 3, one_way(*ways), ["l0", "l1"]), in_blocks("abc", [1] * 3))
    assert most_of_any(network) == (F(3, 4), 1)


def test_messages_of_as_many_places_as_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hosts with two links each of 1 GB/s: a message is alone on one of them."""
    fabric = cables((0, 1), (1, 2), (2, 0))
    for most, ring in ((3, 1), (2, 2)):
        monkeypatch.setattr("arborcast.synth.baselines.order_costs.MOST_PLACES", most)
        network = HostNetwork(fabric, in_blocks("abc", [1] * 3))
        assert most_of_any(network)[0] == F(ring * 3, 4)


def test_no_ring_passes_a_rank_of_no_host() -> None:
    links = one_way((0, 3, 1), (3, 0, 1), (3, 2, 1), (2, 3, 1), (2, 4, 1), (4, 2, 1), (4, 1, 1), (1, 4, 1))
    fabric = Topology.build("between", 3, links, ["l0", "l1"])
    assert most_of_any(HostNetwork(fabric, in_blocks("ab", [1, 1])))[0] == 0


def test_messages_of_three_hosts() -> None:
    assert ring_messages(3) == [(0, 1, 1), (1, 2, 1), (2, 0, 1)]
    assert {part for _, _, part in tree_messages(3)} == {F(1, 2)}


def test_the_tree_of_fourteen_hosts_is_that_of_ncclgetdtree() -> None:
    """Its comment draws it: 8 under 0; 4 and 12 under 8; 2, 6, 10 and so on; the other one is its mirror."""
    above = {8: 0, 4: 8, 12: 8, 2: 4, 6: 4, 10: 12, 13: 12, 1: 2, 3: 2, 5: 6, 7: 6, 9: 10, 11: 10}
    pairs = set(above.items())
    mirrored = {(13 - one, 13 - other) for one, other in pairs}
    expected = Counter(pairs | {pair[::-1] for pair in pairs}) + Counter(
        mirrored | {p[::-1] for p in mirrored}
    )
    assert Counter((one, other) for one, other, _ in tree_messages(14)) == expected
    odd = {(one, other) for one, other, _ in tree_messages(5)}
    assert {(4, 0), (2, 4), (1, 2), (3, 2)} <= odd
    assert {(0, 1), (3, 0), (2, 3), (4, 3)} <= odd


@pytest.mark.parametrize("count", [2, 3, 6, 9, 16])
def test_each_tree_joins_all_hosts(count: int) -> None:
    messages = tree_messages(count)
    assert len(messages) == 4 * (count - 1)
    for tree in (0, 1):
        edges = [(one, other) for one, other, _ in messages[2 * tree :: 4]]
        assert networkx.is_tree(networkx.Graph(edges))
        assert set(edges) == {(one, other) for other, one, _ in messages[2 * tree + 1 :: 4]}


def fat_tree(leaves: int, hosts: int, up: int) -> Topology:
    """Leaves of hosts of two GPUs, each GPU with 1 GB/s, and `up` GB/s from a leaf to the core."""
    ranks = 2 * leaves * hosts
    links = [Link(rank, ranks + rank // (2 * hosts), F(1), F(1)) for rank in range(ranks)]
    links += [Link(ranks + leaf, ranks + leaves, F(up), F(1)) for leaf in range(leaves)]
    links += [Link(link.dst, link.src, link.bandwidth, link.latency_us) for link in links]
    return Topology.build("fat", ranks, links, [f"leaf{n}" for n in range(leaves)] + ["core"])


def test_hosts_dealt_round_the_leaves_go_back_to_them() -> None:
    """Four leaves of four hosts: dealt round, each host's message crosses, four up each leaf's 2 GB/s."""
    fabric, (leaves, each) = fat_tree(4, 4, 2), (4, 4)
    home = in_blocks([f"n{n}" for n in range(16)], [2] * 16)
    dealt = [home[leaf * each + place] for place in range(each) for leaf in range(leaves)]
    found = best_order(HostNetwork(fabric, dealt))
    assert found.given is not None
    sent = F(2 * 31, 32)
    assert (found.given.ring, found.cost.ring, found.most[0]) == (F(2, 4) / sent, F(2) / sent, F(2) / sent)
    assert found.given.ring_link.load == 4
    leaf_of = [dealt[host].ranks[0] // (2 * each) for host in found.order]
    assert sum(one != other for one, other in pairwise(leaf_of)) == leaves - 1
    assert found.cost.tree is not None
    assert found.cost.tree <= found.most[1]


def test_a_thousand_hosts_are_ordered_by_their_places() -> None:
    fabric = fat_tree(32, 32, 8)
    home = in_blocks([f"n{n}" for n in range(1024)], [2] * 1024)
    dealt = [home[(n * 321) % 1024] for n in range(1024)]
    found = best_order(HostNetwork(fabric, dealt))
    assert found.cost.ring == found.most[0]
    assert found.given is not None
    assert found.given.ring * 3 < found.cost.ring


def test_an_order_as_good_as_any_stays() -> None:
    """All hosts hang on one switch: nothing is gained by moving them."""
    fabric = topologies.load("dgx-a100:boxes=4")
    found = best_order(HostNetwork(fabric, in_blocks("abcd", [8] * 4)))
    assert (found.order, found.is_proved) == ((0, 1, 2, 3), True)


def one_way(*links: tuple[int, int, int]) -> list[Link]:
    return [Link(src, dst, F(rate), F(0)) for src, dst, rate in links]


def test_what_leads_out_of_a_host_and_of_a_leaf() -> None:
    """Two leaves of two hosts; what joins the GPUs of a host is its own affair."""
    links = one_way(
        *((rank, 4 + rank // 2, 7) for rank in range(4)), *((4 + rank // 2, rank, 9) for rank in range(4))
    )
    links += one_way((4, 6, 3), (6, 4, 5), (5, 6, 2), (6, 5, 8), (0, 7, 50), (7, 0, 50), (0, 5, 1))
    network = HostNetwork(
        Topology.build("unlike", 4, links, ["l0", "l1", "core", "own"]), in_blocks("abcd", [1] * 4)
    )
    assert network.access(0) == (8, 9)
    assert network.access(1) == (7, 9)
    first, second = network.places[1], network.places[2]
    assert network.places == (0, first, second, second)
    assert network.cut({0, first}) == (3 + 1, 5)
    assert network.cut({second}) == (2, 8 + 1)
    assert network.cut({first}) == (7, 9)  # the leaf is as near to the other host
    link = network.busiest([(1, 3, F(1))])
    assert link is not None
    assert (link.ends, link.load, link.rate) == (("l0", "core"), 1, 3)


def test_the_nearest_gpus_say_how_far_hosts_are() -> None:
    fabric = fat_tree(2, 2, 1)
    network = HostNetwork(fabric, in_blocks("abcd", [2] * 4))
    assert (network.distance(0, 0), network.distance(0, 1)) == (2, 4)
    links = one_way((0, 4, 1), (4, 2, 1), (1, 5, 1), (5, 6, 1), (6, 3, 1))
    apart = HostNetwork(Topology.build("apart", 4, links, ["s", "t", "u"]), in_blocks("ab", [2, 2]))
    assert (apart.distance(0, 1), apart.distance(1, 0)) == (2, None)


def test_ends_are_named_by_host_and_gpu() -> None:
    links = one_way((0, 4, 1), (1, 4, 2), (4, 2, 3), (4, 3, 3))
    network = HostNetwork(Topology.build("pair", 4, links, ["hub"]), in_blocks("ab", [2, 2]))
    link = network.busiest([(0, 1, F(1))])
    assert link is not None
    assert (link.ends, link.load) == (("a:0", "hub"), F(1, 2))
    single = HostNetwork(cables((0, 1)), in_blocks("ab", [1, 1])).busiest([(0, 1, F(1))])
    assert single is not None
    assert set(single.ends) & {"a", "b"}


def test_gpus_that_have_no_way_to_their_like_take_the_nearest() -> None:
    """GPU 0 of a has a cable to GPU 1 of b, and two switches to its GPU 0; GPU 1 of a has a cable there."""
    links = one_way((0, 3, 4), (1, 2, 4), (0, 4, 1), (4, 5, 1), (5, 2, 1), (2, 1, 1))
    network = HostNetwork(Topology.build("crossed", 4, links, ["s", "t"]), in_blocks("ab", [2, 2]))
    link = network.busiest([(0, 1, F(1))])
    assert link is not None
    assert (link.bandwidth, link.load) == (4, F(1, 2))


def test_ranks_of_no_host_do_not_forward() -> None:
    """Rank 4 hangs on both leaves of two hosts each, and is in no host: hosts of two leaves have no way."""
    hangs = [(0, 5), (1, 5), (4, 5), (4, 6), (2, 6), (3, 6)]
    links = one_way(*((rank, leaf, 1) for rank, leaf in hangs), *((leaf, rank, 1) for rank, leaf in hangs))
    fabric = Topology.build("through a rank", 5, links, ["l0", "l1"])
    four = HostNetwork(fabric, in_blocks("abcd", [1] * 4))
    assert four.busiest([(0, 1, F(1))]) is not None
    assert (four.busiest([(0, 2, F(1))]), four.distance(0, 1)) == (None, None)
    assert HostNetwork(fabric, in_blocks("abcde", [1] * 5)).busiest([(0, 4, F(1)), (4, 3, F(1))]) is not None
    links = one_way((0, 3, 1), (1, 3, 1), (3, 0, 1), (3, 1, 1))
    alone = Topology.build("alone", 3, links, ["l0"])
    lonely = HostNetwork(alone, in_blocks("abc", [1] * 3))
    assert (lonely.busiest([(0, 2, F(1))]), lonely.busiest([(2, 0, F(1))])) == (None, None)
    with pytest.raises(InfeasibleError):
        best_order(lonely)


def cables(*pairs: tuple[int, int]) -> Topology:
    ranks = 1 + max(max(pair) for pair in pairs)
    links = [Link(*ends, F(1), F(1)) for pair in pairs for ends in (pair, pair[::-1])]
    return Topology.build("cables", ranks, links)


def test_a_ring_keeps_to_cables() -> None:
    ring = cables((0, 2), (2, 1), (1, 3), (3, 0))
    found = best_order(HostNetwork(ring, in_blocks("abcd", [1] * 4)))
    assert found.given is None
    assert set(zip(found.order, (*found.order[1:], found.order[0]), strict=True)) <= {
        ends for pair in ((0, 2), (2, 1), (1, 3), (3, 0)) for ends in (pair, pair[::-1])
    }
    assert (found.cost.tree, found.cost.worth[1], found.is_proved) == (None, 0, True)
    large = topologies.load("torus:4x4")
    found = best_order(HostNetwork(large, in_blocks([str(n) for n in range(16)], [1] * 16)))
    assert found.cost.ring == found.most[0] == F(1) * 16 / 30


def test_what_has_no_ring_is_refused() -> None:
    for fabric in (cables((0, 1), (1, 2)), cables(*((0, n) for n in range(1, 12)))):
        hosts = in_blocks([str(n) for n in range(fabric.ranks)], [1] * fabric.ranks)
        with pytest.raises(InfeasibleError, match="no order has a way from each host to the next"):
            best_order(HostNetwork(fabric, hosts))
    with pytest.raises(InputError, match="at least two, got 1"):
        best_order(HostNetwork(cables((0, 1)), in_blocks(["a"], [2])))
    with pytest.raises(InputError, match="named once, got a twice"):
        in_blocks(["a", "b", "a"], [1, 1, 1])
    with pytest.raises(InputError, match="b: must have at least one rank, got 0"):
        in_blocks(["a", "b"], [1, 0])
