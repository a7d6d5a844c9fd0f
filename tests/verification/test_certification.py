"""What certificates prove: recomputed by brute force, and refused when they prove nothing."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from fractions import Fraction
from itertools import product

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arborcast.synth import features
from arborcast.synth.bounds import bound
from arborcast.synth.certificate import Cut, Dual, Partition, Scope
from arborcast.synth.certification import certified_rate, certified_scope, dual_of, exact_paths
from arborcast.synth.certification.exact_paths import FAR
from arborcast.synth.certification.metric import Metric, Others
from arborcast.synth.certification.proven_rates import share_leaving
from arborcast.synth.certification.tree_costs import cheapest_cost, cheapest_costs, priced_sets, proved_costs
from arborcast.synth.collective import NAMED_KINDS, TREE_KINDS, Collective, Demand, Kind
from arborcast.synth.errors import InputError, TopologyError
from arborcast.synth.groups.view import view_of
from arborcast.synth.topology import Link, Switch, Topology
from tests.support.able_limits import distance
from tests.support.drawn_in_network import star
from tests.support.strategies import collectives, custom_collectives, topologies

SQUARE = Topology.build(
    "square",
    4,
    [Link(u, v, Fraction(2)) for a in range(4) for u, v in ((a, (a + 1) % 4), ((a + 1) % 4, a))],
)
HUB = Switch("hub")


@pytest.mark.parametrize(
    ("kind", "side", "rate"),
    [
        # Two links of 2 GB/s leave each half of the square.
        ("broadcast", {0, 1}, 4),
        ("reduce", {1, 2}, 4),
        ("allgather", {0, 1}, 8),
        ("reduce-scatter", {0}, Fraction(16, 3)),
        ("allreduce", {0, 1}, 4),
        ("gather", {1, 2, 3}, Fraction(16, 3)),
        ("scatter", {0, 1}, 8),
        ("alltoall", {0, 1}, 4),
    ],
)
def test_cut_divided_by_what_must_leave_it(kind, side, rate):
    collective = Collective.on(SQUARE, kind)
    assert certified_rate(SQUARE, collective, Cut(frozenset(side), Fraction(4))) == rate


@pytest.mark.parametrize(
    ("kind", "certificate", "message"),
    [
        (
            "broadcast",
            Cut(frozenset({1}), Fraction(4)),
            r"cut \{1\}: proves nothing, no data of the broadcast",
        ),
        ("reduce", Cut(frozenset({0, 1}), Fraction(4)), "proves nothing"),
        ("allgather", Cut(frozenset(range(4)), Fraction(0)), "proves nothing"),
        ("scatter", Cut(frozenset({1}), Fraction(4)), "proves nothing"),
        ("allgather", Cut(frozenset({0}), Fraction(3)), "4 GB/s leave it, the certificate says 3 GB/s"),
        ("allgather", Cut(frozenset({7}), Fraction(0)), r"vertex must be in 0\.\.3, got 7"),
        ("allgather", Cut(frozenset({4}), Fraction(0)), r"vertex must be in 0\.\.3, got 4"),
        ("allreduce", Partition((frozenset({0, 1}), frozenset({2, 3, 4})), Fraction(4)), r"in 0\.\.3, got 4"),
        ("allreduce", Partition((frozenset(range(4)),), Fraction(0)), "at least 2 blocks, got 1"),
        (
            "allreduce",
            Partition((frozenset({0, 1}), frozenset({1, 2, 3})), Fraction(4)),
            "1 is in two blocks",
        ),
        ("allreduce", Partition((frozenset({0}), frozenset({1, 2})), Fraction(4)), "vertex 3 is in no block"),
        ("allreduce", Partition((frozenset({0}), frozenset({1, 2, 3})), Fraction(5)), "says 5 GB/s"),
        ("broadcast", Partition((frozenset({0}), frozenset({1, 2, 3})), Fraction(4)), "limits an allreduce"),
        ("broadcast", Dual((Fraction(1),), Fraction(2), Fraction(1)), r"one length per link \(8\), got 1"),
        ("broadcast", Dual((Fraction(-1),) * 8, Fraction(1), Fraction(1)), "0->1 must not be negative, got"),
        ("broadcast", Dual((Fraction(0),) * 8, Fraction(0), Fraction(1)), "nothing travels"),
        ("broadcast", Dual((Fraction(1),) * 8, Fraction(16), Fraction(2)), "distance 3 by its lengths"),
        ("broadcast", Dual((Fraction(1, 10**30),) * 8, Fraction(1), Fraction(1)), "distance"),
    ],
)
def test_what_proves_nothing_is_refused(kind, certificate, message):
    with pytest.raises(InputError, match=message):
        certified_rate(SQUARE, Collective.on(SQUARE, kind), certificate)


@pytest.mark.parametrize("kind", NAMED_KINDS)
@pytest.mark.parametrize(("side", "names"), [({0, 1, 2}, "0, 1, 2"), ({3}, "hub")])
def test_cut_between_ranks_and_their_switch_proves_nothing(kind, side, names):
    words = f"cut {{{names}}}: proves nothing, no data of the {kind} must leave it"
    with pytest.raises(InputError, match=re.escape(words)):
        certified_rate(star(3, HUB), Collective.on(star(3, HUB), kind), Cut(frozenset(side), Fraction(3)))


@pytest.mark.parametrize(("ranks", "names"), [(6, "0, 1, 2, 3, 4, 5"), (7, "0, 1, 2, 3, 4, 5, ...")])
def test_six_vertices_of_a_cut_are_named(ranks, names):
    everyone = Cut(frozenset(range(ranks)), Fraction(1))
    words = f"cut {{{names}}}: {ranks} GB/s leave it, the certificate says 1 GB/s"
    with pytest.raises(InputError, match=re.escape(words)):
        certified_rate(star(ranks, HUB), Collective.on(star(ranks, HUB), "allgather"), everyone)


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (2, 0, 3), (3, 1)])
def test_shares_that_leave_by_what_must_be_held(ranks):
    """For each side of 4 ranks and a switch: what somebody outside needs and nobody outside holds."""
    topology = star(4, HUB)
    collectives = [Collective.on(topology, kind, root=ranks[1], ranks=ranks) for kind in NAMED_KINDS]
    first, *others = ranks
    collectives += [
        Collective.custom(topology, [Demand(frozenset(sources), frozenset(targets))])
        for sources, targets in [([first], others), (others, [first]), (others[:1], [first])]
    ]
    for collective, chosen in product(collectives, product((False, True), repeat=topology.size)):
        side = frozenset(vertex for vertex, inside in enumerate(chosen) if inside)
        expected = Fraction(0)
        for block, share in collective.blocks().items():
            holds = {rank: collective.before(rank, block) for rank in range(4)}
            outside = [rank for rank in range(4) if rank not in side]
            needed = frozenset().union(*(collective.after(rank, block) or () for rank in outside))
            expected += share * bool(needed - frozenset().union(*(holds[rank] for rank in outside)))
        assert share_leaving(collective, side) == expected


def test_partition_divided_by_its_blocks_but_one():
    collective = Collective.on(SQUARE, "allreduce")
    apart = Partition(tuple(frozenset({rank}) for rank in range(4)), Fraction(8))
    assert certified_rate(SQUARE, collective, apart) == Fraction(8, 3)
    hub = Partition((frozenset({0, 1, 2}), frozenset({3})), Fraction(3))
    with pytest.raises(InputError, match=r"block \{hub\} holds no rank that takes part"):
        certified_rate(star(3, HUB), Collective.on(star(3, HUB), "allreduce"), hub)


def test_lengths_with_too_many_digits_are_refused():
    lengths = (Fraction(1), *[Fraction(1, 10**19)] * 7)
    with pytest.raises(InputError, match="too many digits"):
        dual_of(SQUARE, Collective.on(SQUARE, "broadcast"), lengths)


def test_lengths_add_up_below_what_stands_for_no_way():
    # A tree of 4 ranks costs at most 3 times all lengths: 4 times as much must stay below 2^60.
    collective = Collective.on(SQUARE, "broadcast")
    largest = 2**58 - 8
    lengths = (Fraction(largest), *[Fraction(1)] * 7)  # one unit below
    assert dual_of(SQUARE, collective, lengths).distance == 3
    with pytest.raises(InputError, match="too many digits"):
        dual_of(SQUARE, collective, (Fraction(largest + 1), *lengths[1:]))
    pair = Topology.build("pair", 2, [Link(0, 1, Fraction(1)), Link(1, 0, Fraction(1))])
    exchange = Collective.on(pair, "allreduce")
    assert dual_of(pair, exchange, (Fraction(2**58), Fraction(2**58 - 1))).distance == 2**59 - 1
    with pytest.raises(InputError, match="too many digits"):
        dual_of(pair, exchange, (Fraction(2**58), Fraction(2**58)))


def test_many_ranks_beside_relays_are_refused(monkeypatch):
    ring = Topology.build("ring", 18, [Link(a, (a + 1) % 18, Fraction(1)) for a in range(18)])
    with pytest.raises(
        InputError, match=r"broadcast: .* at most 16 ranks .*, or more that are alike, got 17$"
    ):
        dual_of(ring, Collective.on(ring, "broadcast", ranks=range(17)), (Fraction(1),) * 18)
    assert dual_of(ring, Collective.on(ring, "broadcast"), (Fraction(1),) * 18).distance == 17
    assert dual_of(ring, Collective.on(ring, "allreduce"), (Fraction(1),) * 18).distance == 34
    assert dual_of(ring, Collective.on(ring, "broadcast", ranks=range(4)), (Fraction(1),) * 18).distance == 3
    monkeypatch.setattr("arborcast.synth.certification.steiner.MOST_PARTS", 3**3)
    assert dual_of(ring, Collective.on(ring, "broadcast", ranks=range(3)), (Fraction(1),) * 18).distance == 2
    with pytest.raises(InputError, match=r"alike, got 4$"):
        dual_of(ring, Collective.on(ring, "broadcast", ranks=range(4)), (Fraction(1),) * 18)


@pytest.mark.parametrize("kind", NAMED_KINDS)
@pytest.mark.parametrize("total", [3, 4])  # rank 3 is a relay
def test_unreachable_ranks_prove_nothing_by_lengths(kind, total):
    topology = Topology.build("apart", total, [Link(0, 1, Fraction(1)), Link(1, 0, Fraction(1))])
    with pytest.raises(InputError, match="cut shows that"):
        dual_of(topology, Collective.on(topology, kind, ranks=range(3)), (Fraction(1), Fraction(1)))


@settings(max_examples=40)
@given(st.data())
def test_distance_grows_with_lengths(data):
    topology = data.draw(topologies(symmetric=False))
    collective = data.draw(st.one_of(collectives(topology), custom_collectives(topology)))
    lengths, factor = (
        drawn_lengths(data, topology),
        data.draw(st.fractions(Fraction(1, 9), 9, max_denominator=10**6)),
    )
    one, other = (
        dual_of(topology, collective, tuple(length * by for length in lengths)) for by in (1, factor)
    )
    assert other.distance == one.distance * factor
    assert certified_rate(topology, collective, one) == certified_rate(topology, collective, other)


@settings(max_examples=60)
@given(st.data())
def test_distances_of_demands_by_networkx(data):
    topology = data.draw(topologies(max_ranks=5, symmetric=False, connected=False))
    assume(topology.links)
    collective = data.draw(custom_collectives(topology))
    lengths = drawn_lengths(data, topology)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(topology.size))
    graph.add_weighted_edges_from(
        (link.src, link.dst, length) for link, length in zip(topology.links, lengths, strict=True)
    )
    far = dict(nx.all_pairs_dijkstra_path_length(graph))
    ways = [
        [[far[held][wanted] for held in demand.sources if wanted in far[held]] for wanted in demand.targets]
        for demand in collective.demands
    ]
    if not all(map(all, ways)):
        with pytest.raises(InputError, match="cut shows that"):
            dual_of(topology, collective, lengths)
        return
    found = dual_of(topology, collective, lengths)
    assert found.distance == Fraction(sum(max(map(min, to_all)) for to_all in ways), len(ways))


@settings(max_examples=60)
@given(st.data())
def test_distances_of_duals_by_brute_force(data):
    topology = data.draw(topologies(max_ranks=4, switches=2, symmetric=False, min_ranks=3))
    ranks = tuple(range(data.draw(st.integers(2, topology.ranks))))  # the others are relays
    lengths = data.draw(
        st.lists(st.integers(1, 4), min_size=len(topology.links), max_size=len(topology.links))
    )
    prices = {hop: Fraction(length) for hop, length in zip(topology.bandwidth, lengths, strict=True)}
    for kind in TREE_KINDS:
        collective = Collective.on(topology, kind, root=1, ranks=ranks)
        found = dual_of(topology, collective, tuple(map(Fraction, lengths)))
        assert found.distance == distance(topology, collective, prices)


@settings(max_examples=60)
@given(st.data())
def test_routed_distances_by_networkx(data):
    topology = data.draw(topologies(max_ranks=6, switches=2, symmetric=False))
    lengths = data.draw(
        st.lists(st.integers(0, 4), min_size=len(topology.links), max_size=len(topology.links)).filter(all)
    )
    graph = nx.DiGraph()
    for link, length in zip(topology.links, lengths, strict=True):
        graph.add_edge(link.src, link.dst, weight=length)
    far = dict(nx.all_pairs_dijkstra_path_length(graph))
    n = topology.ranks
    expected = {
        Kind.GATHER: sum(far[rank][1] for rank in range(n)),
        Kind.SCATTER: sum(far[1][rank] for rank in range(n)),
        Kind.ALLTOALL: sum(far[u][v] for u in range(n) for v in range(n)),
    }
    for kind, total in expected.items():
        found = dual_of(topology, Collective.on(topology, kind, root=1), tuple(map(Fraction, lengths)))
        assert found.distance == Fraction(total, n)


@pytest.mark.parametrize(("back", "scope"), [(1, Scope.EVERY_SCHEDULE), (2, Scope.TREES)])
def test_lengths_alike_both_ways_limit_every_allreduce(back, scope):
    #  0 --1--> 1 --1--> 2 --1--> 3, and `back` the other way: a tree in and a tree out pass each link once.
    links = [Link(u, v, Fraction(1)) for a in range(3) for u, v in [(a, a + 1), (a + 1, a)]]
    topology = Topology.build("chain", 4, links)
    collective = Collective.on(topology, "allreduce")
    lengths = tuple(Fraction(1 if link.src < link.dst else back) for link in topology.links)
    found = dual_of(topology, collective, lengths)
    assert found.distance == 3 * (1 + back)
    assert certified_scope(topology, collective, found) is scope
    # A broadcast is limited so in any case, and where others only pass it on.
    broadcast = Collective.on(topology, "broadcast", root=3, ranks=(0, 3))
    found = dual_of(topology, broadcast, lengths)
    assert found.distance == 3 * back
    assert certified_scope(topology, broadcast, found) is Scope.EVERY_SCHEDULE


def drawn_lengths(data, topology: Topology, least: int = 1) -> tuple[Fraction, ...]:
    count = len(topology.links)
    drawn = data.draw(st.lists(st.integers(least, 5), min_size=count, max_size=count))
    return tuple(map(Fraction, drawn))


@settings(max_examples=40)
@given(st.data())
def test_dual_of_a_link_length_changed_is_refused(data):
    topology = data.draw(topologies(symmetric=False))
    collective = data.draw(st.one_of(collectives(topology), custom_collectives(topology)))
    found = dual_of(topology, collective, drawn_lengths(data, topology))
    assert certified_rate(topology, collective, found) == found.capacity / found.distance
    link = data.draw(st.integers(0, len(topology.links) - 1))
    change = data.draw(st.sampled_from([Fraction(1), Fraction(-1, 3), Fraction(1, 10**6)]))
    lengths = [*found.lengths[:link], found.lengths[link] + change, *found.lengths[link + 1 :]]
    for changed in (
        replace(found, lengths=tuple(lengths)),
        replace(found, capacity=found.capacity - change),
        replace(found, distance=found.distance + change),
    ):
        with pytest.raises(InputError, match="by its lengths, the certificate says"):
            certified_rate(topology, collective, changed)


@settings(max_examples=40)
@given(st.data())
def test_a_set_of_another_capacity_is_refused(data):
    topology = data.draw(topologies())
    certificates = [bound(topology, Collective.on(topology, "broadcast")).certificate]
    if not topology.switches:
        certificates.append(bound(topology, Collective.on(topology, "allreduce")).certificate)
    for certificate in certificates:
        kind = "broadcast" if isinstance(certificate, Cut) else "allreduce"
        collective = Collective.on(topology, kind)
        with pytest.raises(InputError, match="the certificate says"):
            certified_rate(topology, collective, replace(certificate, capacity=certificate.capacity - 1))
        if isinstance(certificate, Cut):
            vertex = data.draw(st.integers(1, topology.size - 1))
            other = Cut(certificate.side ^ {vertex}, certificate.capacity)
        else:
            first, second, *others = certificate.blocks
            other = Partition((first | second, *others), certificate.capacity)
        proved = None
        with contextlib.suppress(InputError):
            proved = certified_rate(topology, collective, other)
        # A set that by chance has the same capacity proves what it says, and never more than the best.
        assert proved is None or proved >= bound(topology, collective).rate


@settings(max_examples=40)
@given(st.data())
def test_ranks_outside_a_group_by_its_view(data):
    """Those that only forward are like switches, those that are absent like none."""
    topology = data.draw(topologies(max_ranks=6, symmetric=data.draw(st.booleans())))
    count = data.draw(st.integers(2, topology.ranks))
    ranks = tuple(sorted(data.draw(st.permutations(range(topology.ranks)))[:count]))
    collective = Collective.on(topology, data.draw(st.sampled_from(NAMED_KINDS)), root=ranks[0], ranks=ranks)
    lengths = drawn_lengths(data, topology, least=0)
    for others in (Others.FORWARD, Others.ABSENT):
        view = view_of(topology, collective, relays=others is Others.FORWARD)
        seen = tuple(lengths[link] for link in view.links)
        try:
            expected = Metric.of(view.topology, seen).distance(view.collective)
        except InputError:
            with pytest.raises(InputError, match="cut shows that"):
                Metric.of(topology, lengths).distance(collective, others)
        else:
            assert Metric.of(topology, lengths).distance(collective, others) == expected


@settings(max_examples=40)
@given(st.data())
def test_many_ends_without_all_distances(data):
    topology = data.draw(topologies(max_ranks=7, switches=3))
    alike = data.draw(st.booleans())
    drawn = {(link.src, link.dst): data.draw(st.integers(0, 5)) for link in topology.links}
    lengths = [drawn[(min(pair), max(pair)) if alike else pair] for pair in topology.bandwidth]
    metric = Metric.of(topology, tuple(map(Fraction, lengths)))
    for kind in (Kind.BROADCAST, Kind.REDUCE_SCATTER, Kind.ALLREDUCE):
        collective = Collective.on(topology, kind)
        few = metric.distance(collective), metric.undirected_tree(collective)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("arborcast.synth.certification.metric.MANY", 0)
            assert (metric.distance(collective), metric.undirected_tree(collective)) == few


matrices = st.integers(1, 7).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=n, max_size=n)
)


@settings(max_examples=150)
@given(matrices, st.data())
def test_sets_prove_what_every_tree_costs(rows, data):
    """All roots at once, and each by itself; edges of more than 7 are none."""
    ways = np.array([[FAR if cost > 7 else cost for cost in row] for row in rows], dtype=np.int64)
    expected = [arborescence_cost(ways, root) for root in range(len(ways))]
    for root, cost in enumerate(expected):
        if cost is None:
            with pytest.raises(InputError, match="cannot be reached"):
                cheapest_cost(ways, root)
        else:
            assert cheapest_cost(ways, root) == cost
    if None in expected:
        with pytest.raises(InputError, match="cannot be reached"):
            cheapest_costs(ways)
        return
    sets = priced_sets(ways)
    assert proved_costs(ways, sets).tolist() == expected
    if not len(sets.prices):
        return
    # Every set is entered by an edge that it makes as dear as it may be.
    one = data.draw(st.integers(0, len(sets.prices) - 1))
    dearer, without = sets.prices.copy(), sets.prices.copy()
    dearer[one] += 1
    without[one] = 0
    with pytest.raises(InputError, match="sets that hold"):
        proved_costs(ways, replace(sets, prices=dearer))
    inside = sets.order[sets.starts[one] : sets.stops[one]]
    lost = [0 if root in inside else int(sets.prices[one]) for root in range(len(ways))]
    less = proved_costs(ways, replace(sets, prices=without))
    assert (less + lost).tolist() == expected
    with pytest.raises(InputError, match="must not be negative, got -1"):
        proved_costs(ways, replace(sets, prices=without - np.eye(len(without), dtype=np.int64)[one]))


def test_every_price_belongs_to_a_set():
    sets = priced_sets(np.array([[0, 1], [1, 0]], dtype=np.int64))
    with pytest.raises(ValueError, match="argument 2 is longer"):
        proved_costs(np.ones((2, 2), dtype=np.int64), replace(sets, starts=sets.starts[:-1]))


def test_ways_beyond_int64_are_added_up_outside_of_kernels(monkeypatch):
    """Compiled for int64 alone: 3 * 2^62 would wrap round."""
    compiled = []

    def settle(tails, heads, lengths, found, changed):
        compiled.append(lengths.dtype)
        return exact_paths._settle(tails, heads, lengths, found, changed)

    monkeypatch.setattr(exact_paths, "_settle_int64", settle)
    chain = Topology.build("chain", 4, [Link(a, a + 1, Fraction(1)) for a in range(3)])
    for length, dtype, far in ((2**62, object, 2**70), (5, np.int64, FAR)):
        lengths = np.array([length] * 3, dtype=dtype)
        found = exact_paths.ways_between(chain, lengths, (3, 0), range(4), far)
        assert found.tolist() == [[0, far], [3 * length, 0]]
    assert compiled == [np.int64]


def arborescence_cost(ways: np.ndarray, root: int) -> int | None:
    """The cost of the cheapest spanning out-tree by networkx; None where there is none."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(ways)))
    graph.add_weighted_edges_from(
        (u, v, int(ways[u, v])) for u, v in product(graph, graph) if u != v != root and ways[u, v] < FAR
    )
    if len(nx.descendants(graph, root)) + 1 < len(ways):
        return None
    return int(nx.minimum_spanning_arborescence(graph).size(weight="weight"))


ADDER = star(3, Switch("s", reduces=True, multicasts=True, turns=True, adder=Fraction(1, 2)))
PAIR = Topology.build("pair", 2, [Link(0, 1, Fraction(1)), Link(1, 0, Fraction(1))])
LINE = Topology.build("line", 3, [Link(0, 1, Fraction(1)), Link(1, 0, Fraction(1)), Link(1, 2, Fraction(1))])


def lengths(topology: Topology, *first: Fraction | int) -> tuple[Fraction, ...]:
    """These, and 0 for all other links."""
    given = tuple(map(Fraction, first))
    return given + (Fraction(0),) * (len(topology.links) - len(given))


def test_prices_of_adders_are_in_the_units_of_lengths() -> None:
    metric = Metric.of(ADDER, lengths(ADDER, Fraction(1, 2), 3), (Fraction(2, 3),))
    (switch,) = ADDER.limited_adders
    assert (metric.scale, metric.adders, metric.lengths.tolist()[:3]) == (6, {switch: 4}, [3, 18, 0])
    assert Metric.of(ADDER, lengths(ADDER), (Fraction(0),)).adders == {switch: 0}
    assert Metric.of(ADDER, lengths(ADDER)).adders == {}


@pytest.mark.parametrize(
    ("adders", "message"),
    [
        ((Fraction(1), Fraction(1)), r"one price per limited adder \(1\), got 2"),
        ((Fraction(-1, 3),), "price of the adder of .* must not be negative, got -1/3"),
    ],
)
def test_prices_that_do_not_fit(adders: tuple[Fraction, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Metric.of(ADDER, lengths(ADDER), adders)


@pytest.mark.parametrize(
    ("topology", "adder", "times", "paid"),
    [(PAIR, None, 2, 0), (LINE, None, 3, 0), (ADDER, 0, 8, 4), (ADDER, 5, 8, 4)],
)
def test_the_largest_lengths(topology: Topology, adder: int | None, times: int, paid: int) -> None:
    """No sum of ways may reach what stands for none: lengths count so often, a price so often."""
    prices = () if adder is None else (Fraction(adder),)
    most = (FAR - 1 - (adder or 0) * paid) // times
    Metric.of(topology, lengths(topology, most), prices)
    with pytest.raises(InputError, match="too many digits"):
        Metric.of(topology, lengths(topology, most + 1), prices)


def blocks(*sizes: tuple[int, ...]) -> Collective:
    """An alltoall of blocks of these sizes."""
    return Collective(Kind.ALLTOALL, tuple(range(len(sizes))), sizes=sizes)


def test_blocks_count_by_their_sizes() -> None:
    metric = Metric.of(LINE, (Fraction(1), Fraction(2), Fraction(4)))
    # One unit is a third of all blocks: 3 * (5 * 1 + 2 * 5 + 7 * 2 + 1 * 4) / 15.
    assert metric.distance(blocks((9, 5, 2), (7, 0, 1), (0, 0, 0))) == 3 * Fraction(5 + 10 + 14 + 4, 24)
    with pytest.raises(InputError, match="alltoall: some rank cannot be reached"):
        metric.distance(blocks((0, 5, 2), (7, 0, 1), (1, 0, 0)))
    with pytest.raises(InputError, match="alltoall: some rank cannot be reached"):
        metric.distance(Collective(Kind.ALLTOALL, (0, 1, 2)))


def test_a_tree_both_ways_of_some_ranks_is_not_priced() -> None:
    line = Topology.build("line", 3, [Link(a, b, Fraction(1)) for a, b in ((0, 1), (1, 0), (1, 2), (2, 1))])
    metric = Metric.of(line, (Fraction(1), Fraction(3), Fraction(2), Fraction(2)))
    assert metric.undirected_tree(Collective(Kind.ALLREDUCE, (0, 1, 2))) == 1 + 2
    assert metric.undirected_tree(Collective(Kind.ALLREDUCE, (0, 2))) is None  # rank 1 may join and fork
    everybody = Collective(Kind.ALLREDUCE, (0, 1, 2))
    far, near = (Metric.of(ADDER, given) for given in ((Fraction(1),) * 6, lengths(ADDER, 1, 1)))
    assert far.undirected_tree(everybody) is None  # so may the switch
    assert far.distance(everybody, Others.FORWARD) == 2 * 2 * 2
    assert near.undirected_tree(everybody) == 0  # where it is no way from a rank, it stands for that rank


def test_what_links_and_adders_offer() -> None:
    everybody, ones = Collective(Kind.ALLREDUCE, (0, 1, 2)), (Fraction(1),) * 6
    dual = dual_of(ADDER, everybody, ones, (Fraction(3),))
    assert dual.capacity == sum(link.bandwidth for link in ADDER.links) + Fraction(1, 2) * 3
    assert dual_of(ADDER, everybody, ones).capacity == sum(link.bandwidth for link in ADDER.links)
    assert certified_scope(ADDER, everybody, dual) is Scope.TREES  # the switch may join and fork


def test_blocks_that_leave_count_by_their_sizes() -> None:
    collective = blocks((9, 5, 2), (7, 0, 1), (4, 3, 0))
    assert share_leaving(collective, frozenset({0, 1})) == Fraction((2 + 1) * 3, 31)
    assert share_leaving(collective, frozenset({2})) == Fraction((4 + 3) * 3, 31)


def test_what_checkers_overlook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(features.UNDERSTOOD, "switch adder")
    with pytest.raises(TopologyError, match="adder"):
        certified_rate(ADDER, Collective(Kind.ALLREDUCE, (0, 1, 2)), Cut(frozenset({0}), Fraction(1)))
