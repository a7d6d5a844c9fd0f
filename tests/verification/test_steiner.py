"""What trees cost where relays and able switches take part, by trying every choice of who joins and forks."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import combinations
from typing import Any, TypeAlias

import networkx as nx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arborcast.synth.certification.metric import Metric
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Link, Switch, Topology

FAR = 10**9
Weights: TypeAlias = dict[tuple[int, int], int]
KINDS = [Kind.BROADCAST, Kind.REDUCE, Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE]


class Spreading:
    """Out-trees of a fabric, or in-trees, which are out-trees over its links turned round."""

    def __init__(self, topology: Topology, lengths: Weights, prices: dict[int, int], *, turned: bool) -> None:
        self.topology = topology
        self.graph: nx.DiGraph[int] = nx.DiGraph()
        self.graph.add_nodes_from(range(topology.size))
        for (src, dst), length in lengths.items():
            self.graph.add_edge(*((dst, src) if turned else (src, dst)), weight=length)
        self.far = dict(nx.all_pairs_dijkstra_path_length(self.graph))
        self.price = prices if turned else {}
        self.able = [
            vertex
            for vertex in range(topology.ranks, topology.holders)
            if (self.switch(vertex).reduces if turned else self.switch(vertex).multicasts)
        ]

        holders = range(topology.holders)
        self.ways = {(a, b): self._way(a, b) for a in holders for b in holders if a != b}

    def switch(self, vertex: int) -> Switch:
        return self.topology.switches[vertex - self.topology.ranks]

    def _way(self, src: int, dst: int) -> int:
        """To a rank, or to a switch that joins or forks what comes.

        A switch with loopback gives a rank its own data back, the rank from which they came last, but not
        those that another able switch handed on. So a way remembers who had its data last.
        """
        if dst not in self.able or not self.switch(dst).loopback or src == dst:
            return self.far[src].get(dst, FAR)
        ranks, holders = self.topology.ranks, self.topology.holders
        others = [v for v in self.graph if v >= ranks]
        back = {rank: self._between(dst, rank, [*others, rank]) for rank in range(ranks)}
        layers: nx.DiGraph[Any] = nx.DiGraph()
        for a, b, data in self.graph.edges(data=True):
            for last in (-1, *range(ranks)):
                came = b if b < ranks else -1 if b < holders and b != dst else last
                extra = back[last] if b == dst and last >= 0 else 0
                node = "end" if b == dst else (b, came)
                length = data["weight"] + extra
                known = layers.get_edge_data((a, last), node, {"weight": FAR})["weight"]
                layers.add_edge((a, last), node, weight=min(length, known))
        start = (src, src if src < ranks else -1)
        if start not in layers or "end" not in layers:
            return FAR
        try:
            return min(FAR, int(nx.dijkstra_path_length(layers, start, "end")))
        except nx.NetworkXNoPath:
            return FAR

    def _between(self, src: int, dst: int, through: Iterable[int]) -> int:
        try:
            return int(nx.dijkstra_path_length(self.graph.subgraph([*through, src]), src, dst))
        except nx.NetworkXNoPath:
            return FAR

    def tree(self, root: int, ends: frozenset[int], *, hands_on: bool = False) -> int:
        """The cheapest to all ends; with `hands_on` or at a switch that cannot, the root does not fork."""
        optional = sorted({*range(self.topology.ranks), *self.able} - ends - {root})
        best = FAR
        for number in range(len(optional) + 1):
            for chosen in combinations(optional, number):
                nodes = {*ends, *chosen} - {root}
                paid = sum(self.price.get(vertex, 0) for vertex in chosen)
                if not nodes:
                    return 0
                if not hands_on and (root < self.topology.ranks or root in self.able):
                    best = min(best, paid + self.price.get(root, 0) + self._spanning(root, nodes))
                for first in nodes:
                    rest = self._spanning(first, nodes - {first})
                    best = min(best, paid + self.ways[root, first] + rest)
        return best

    def _spanning(self, root: int, nodes: set[int]) -> int:
        tree: nx.DiGraph[int] = nx.DiGraph()
        tree.add_node(root)
        ways = {(a, b): self.ways[a, b] for a in {root, *nodes} for b in nodes if a != b}
        tree.add_weighted_edges_from((a, b, length) for (a, b), length in ways.items() if length < FAR)
        try:
            found = nx.minimum_spanning_arborescence(tree)
        except nx.NetworkXException:
            return FAR
        return int(found.size("weight")) if len(found) == len(nodes) + 1 else FAR


def distance(
    topology: Topology, lengths: Weights, prices: dict[int, int], collective: Collective
) -> Fraction:
    """By definition; raises AssertionError where nothing reaches everybody."""
    out, into = (Spreading(topology, lengths, prices, turned=turned) for turned in (False, True))
    ends = frozenset(collective.ranks)
    if collective.kind is Kind.ALLREDUCE:
        costs = [into.tree(rank, ends) + out.tree(rank, ends) for rank in range(topology.ranks)]
        for vertex in range(topology.ranks, topology.holders):
            both = [(False, False)] if out.switch(vertex).turns else [(True, False), (False, True)]
            costs += [
                into.tree(vertex, ends, hands_on=a) + out.tree(vertex, ends, hands_on=b) for a, b in both
            ]
        costs = [min(costs)]
    else:
        which = into if collective.kind in {Kind.REDUCE, Kind.REDUCE_SCATTER} else out
        roots = collective.ranks if collective.root is None else (collective.root,)
        costs = [which.tree(root, ends) for root in roots]
    assert max(costs) < FAR, "reached"
    return Fraction(sum(costs), len(costs))


ABLE = [
    {"multicasts": True},
    {"reduces": True},
    {"reduces": True, "multicasts": True},
    {"reduces": True, "multicasts": True, "turns": True},
    {"reduces": True, "multicasts": True, "loopback": True},
    {"reduces": True, "adder": Fraction(1)},
    {"reduces": True, "multicasts": True, "turns": True, "adder": Fraction(1)},
]


@st.composite
def questions(draw: Any) -> tuple[Topology, Weights, dict[int, int], Collective]:
    ranks, able, plain = draw(st.integers(2, 4)), draw(st.integers(0, 2)), draw(st.integers(0, 1))
    abilities = [draw(st.sampled_from(ABLE)) for _ in range(able)] + [{}] * plain
    switches = [Switch(f"s{number}", **can) for number, can in enumerate(abilities)]
    size = ranks + len(switches)
    order = draw(st.permutations(range(size)))
    hops = {(order[at - 1], order[at]) for at in range(size)}
    pairs = st.sampled_from([(a, b) for a in range(size) for b in range(size) if a != b])
    hops |= set(draw(st.lists(pairs, max_size=3 * size)))
    far = st.integers(0 if draw(st.booleans()) else 1, draw(st.sampled_from([1, 3, 9])))
    topology = Topology.build("drawn", ranks, [Link(a, b, Fraction(1)) for a, b in sorted(hops)], switches)
    lengths = {(link.src, link.dst): draw(far) for link in topology.links}
    prices = {vertex: draw(st.integers(0, 5)) for vertex in topology.limited_adders}
    few = sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=2)))
    collective = Collective.on(
        topology, draw(st.sampled_from(KINDS)), root=draw(st.sampled_from(few)), ranks=few
    )
    assume(len(few) < ranks or able)
    return topology, lengths, prices, collective


def found(topology: Topology, lengths: Weights, prices: dict[int, int], collective: Collective) -> Fraction:
    inorder = [Fraction(lengths[link.src, link.dst]) for link in topology.links]
    paid = [Fraction(prices[vertex]) for vertex in topology.limited_adders]
    return Metric.of(topology, inorder, paid).distance(collective)


@given(questions())
@settings(max_examples=300)
def test_as_by_trying_every_choice(question: tuple[Topology, Weights, dict[int, int], Collective]) -> None:
    assert found(*question) == distance(*question)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("can", ABLE[2:5])
def test_ranks_that_are_alike_are_counted(can: dict[str, bool], kind: Kind) -> None:
    """A star of as many ranks as no single list of subsets could hold: each adds its own way."""
    ranks = 40
    star = Topology.build(
        "star",
        ranks,
        [Link(*hop, Fraction(1)) for v in range(ranks) for hop in ((v, ranks), (ranks, v))],
        [Switch("hub", **can)],
    )
    lengths = {(link.src, link.dst): 2 if link.dst == ranks else 3 for link in star.links}
    up, down, back = 2, 3, int(can.get("loopback", False))
    spread = up + (ranks - 1 + back) * down
    gather = down + (ranks - 1 + back) * up
    expected = {
        Kind.BROADCAST: spread,
        Kind.ALLGATHER: spread,
        Kind.REDUCE: gather,
        Kind.REDUCE_SCATTER: gather,
        Kind.ALLREDUCE: ranks * (up + down) if can.get("turns") else spread + gather,
    }
    assert found(star, lengths, {}, Collective.on(star, kind)) == expected[kind]


def test_too_many_that_are_unlike() -> None:
    size = 18
    hops = [hop for v in range(size) for hop in ((v, size), (size, v))]
    fan = Topology.build(
        "fan", size, [Link(*hop, Fraction(1)) for hop in hops], [Switch("hub", multicasts=True)]
    )
    lengths = {(link.src, link.dst): 1 + min(link.src, link.dst) for link in fan.links}
    with pytest.raises(InputError, match="at most 16 ranks may be apart, or more that are alike, got 18"):
        found(fan, lengths, {}, Collective.on(fan, "allgather"))
