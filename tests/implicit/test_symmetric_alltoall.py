"""All-to-all by orbits: at the limit, correct when written out, the same every time."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth.bounds import bound, certified_rate
from arborcast.synth.bounds.shortest_paths import FAR, ShortestPaths
from arborcast.synth.certificate import Dual
from arborcast.synth.collective import Collective
from arborcast.synth.errors import CollectiveError, InfeasibleError, TimedOutError
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.lp.linear_program import rationalize
from arborcast.synth.routes.path_solver import solve_by_routes
from arborcast.synth.routes.symmetric_alltoall import solve_symmetric_alltoall
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.symmetry.translation_search import translations_of
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Link, Topology
from arborcast.synth.verification.verifier import verify
from tests.fuzzing.limits import best_rate
from tests.support.strategies import topologies as drawn_topologies


def solved(topology: Topology, *, translations: Translations | None = None) -> ImplicitSchedule:
    group = translations or translations_of(topology, effort=0)
    return solve_symmetric_alltoall(topology, Collective.on(topology, "alltoall"), translations=group)


def circulant(ranks: int, rates: dict[int, int]) -> Topology:
    """Rank i linked to i + jump for every jump, with so many GB/s, one way."""
    links = [
        Link(i, (i + jump) % ranks, Fraction(rate)) for i in range(ranks) for jump, rate in rates.items()
    ]
    rotation = [(i + 1) % ranks for i in range(ranks)]
    return Topology.build("circulant", ranks, links, symmetries=[rotation])


# Of an even ring of n, half of the ranks send to the others: n/2 * n/2 blocks of 1/n pass 2 links one way.
# An odd ring: distances up to h = (n-1)/2 each way, so that a link carries h (h+1) / 2 blocks.
# A torus of k x k: its halves exchange k*k/2 * k*k/2 blocks of 1/(k*k) over 2 k links.
# A hypercube: half of the n ranks send half of their buffers over n/2 links. A full mesh: a block per link.
# A star and a fat tree: n-1 of its n blocks leave each rank over its one link.
# dgx-a100: a rank's own 25 GB/s to the fabric carry what leaves its box, 8 of 16 blocks.
# dgx1: two single and two double links of 25 GB/s leave its first four ranks, with 4 * 4 blocks of 1/8.
KNOWN = [
    ("ring:6", Fraction(8, 6)),
    ("ring:5", Fraction(5, 3)),
    ("torus:4x4", Fraction(2)),
    ("torus:8x8", Fraction(1)),
    ("hypercube:4", Fraction(2)),
    ("full:5", Fraction(5)),
    ("star:5", Fraction(5, 4)),
    ("fat-tree:2x2x3", Fraction(12, 11)),
    ("dgx-a100:boxes=2", Fraction(25 * 16, 8)),
    ("dgx1", Fraction(75)),
]


@pytest.mark.parametrize(("spec", "rate"), KNOWN)
def test_known_rates_are_reached_and_proved(spec: str, rate: Fraction) -> None:
    topology = topologies.load(spec)
    schedule = solved(topology)
    assert schedule.rate == schedule.bound.rate == rate
    assert certified_rate(topology, schedule.collective, schedule.bound.certificate) == rate
    verdict = verify(schedule.expand())
    assert verdict.errors == ()
    assert verdict.rate == rate


@pytest.mark.parametrize(
    "spec", ["torus:3x4", "torus:2x3x4", "mi250:boxes=2", "dragonfly:3x2x2", "dgx2", "mesh:3x4", "ring:7"]
)
def test_catalog_fabrics_reach_their_bound_whatever_the_group(spec: str) -> None:
    topology = topologies.load(spec)
    schedule = solved(topology)
    assert schedule.is_optimal
    assert verify(schedule.expand()).errors == ()
    everything = bound(topology, Collective.on(topology, "alltoall"))
    assert everything.rate == schedule.rate
    without = solve_by_routes(
        Topology(topology.name, topology.ranks, topology.links, topology.switches),
        Collective.on(topology, "alltoall"),
    )
    assert without.rate == schedule.rate


def test_a_ring_of_four_is_drawn() -> None:
    schedule = solved(topologies.load("ring:4"))
    ways = {
        (
            chunk.target,
            tuple((t.src, t.dst, t.step) for t in schedule.transfers if t.chunk == index),
        ): chunk.share
        for index, chunk in enumerate(schedule.chunks)
    }
    # The block of the opposite rank goes half each way round, and first.
    assert ways == {
        (1, ((0, 1, 1),)): Fraction(1, 4),
        (3, ((0, 3, 1),)): Fraction(1, 4),
        (2, ((0, 1, 0), (1, 2, 1))): Fraction(1, 8),
        (2, ((0, 3, 0), (3, 2, 1))): Fraction(1, 8),
    }


@given(st.integers(3, 9), st.data())
@settings(max_examples=25, deadline=None)
def test_drawn_circulants_agree_with_the_whole_program(ranks: int, data: st.DataObject) -> None:
    jumps = data.draw(
        st.dictionaries(st.integers(2, ranks - 1), st.integers(1, 3), max_size=2).map(lambda d: {1: 2, **d})
    )
    topology = circulant(ranks, jumps)
    schedule = solved(topology)
    assert schedule.is_optimal
    assert schedule.rate == best_rate(topology, schedule.collective)
    assert verify(schedule.expand()).errors == ()


@given(drawn_topologies(max_ranks=5, switches=1, symmetric=False))
@settings(max_examples=25, deadline=None)
def test_without_symmetry_the_whole_program_is_reached_exactly(topology: Topology) -> None:
    schedule = solved(topology, translations=Translations.trivial(topology))
    assert schedule.is_optimal
    assert schedule.rate == best_rate(topology, schedule.collective)
    assert verify(schedule.expand()).errors == ()


@given(drawn_topologies(max_ranks=6, switches=2, symmetric=False), st.data())
@settings(max_examples=30, deadline=None)
def test_shortest_ways_agree_with_networkx(topology: Topology, data: st.DataObject) -> None:
    count = len(topology.links)
    lengths = np.array(data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)), dtype=np.int64)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(topology.size))
    for link, length in zip(topology.links, lengths.tolist(), strict=True):
        graph.add_edge(link.src, link.dst, weight=length)
    ways = ShortestPaths(topology)
    found = ways.distances(lengths, np.arange(topology.size))
    for source in range(topology.size):
        expected = nx.single_source_dijkstra_path_length(graph, source)
        assert found[source].tolist() == [expected.get(vertex, FAR) for vertex in range(topology.size)]
        tree = ways.tree(lengths, source)
        for vertex in tree.order[1:].tolist():
            link = tree.entering[vertex]
            assert ways.heads[link] == vertex
            assert tree.distance[vertex] == tree.distance[ways.tails[link]] + lengths[link]


def test_a_torus_of_256_ranks_moves_every_block_whole() -> None:
    topology = topologies.load("torus:16x16")
    schedule = solved(topology)
    # 8 * 16 ranks send to as many beyond the cut: 128 * 128 blocks of 1/256 over 2 * 16 links.
    assert schedule.rate == schedule.bound.rate == Fraction(1, 2)
    assert isinstance(schedule.bound.certificate, Dual)
    assert len(schedule.chunks) == 255
    assert {chunk.share for chunk in schedule.chunks} == {Fraction(1, 256)}
    assert schedule.steps == 16
    assert certified_rate(topology, schedule.collective, schedule.bound.certificate) == Fraction(1, 2)


def test_ways_are_simple_and_steps_follow_each_other() -> None:
    schedule = solved(topologies.load("mi250:boxes=2"))
    stops: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    for transfer in schedule.transfers:
        way = stops.setdefault(transfer.chunk, [schedule.chunks[transfer.chunk].owner])
        assert transfer.src == way[-1]
        assert transfer.step > last.get(transfer.chunk, -1)
        last[transfer.chunk] = transfer.step
        way.append(transfer.dst)
    for index, way in stops.items():
        assert way[-1] == schedule.chunks[index].target
        assert max(Counter(way).values()) == 1


def test_relays_forward_for_those_that_take_part() -> None:
    # Of a ring of 8 only every other rank takes part: a ring of 4, with 2 * 2 blocks of 1/4 over 2 links.
    topology = topologies.load("ring:8")
    collective = Collective.on(topology, "alltoall", ranks=[0, 2, 4, 6])
    two = [(i + 2) % 8 for i in range(8)]
    schedule = solve_symmetric_alltoall(
        topology, collective, translations=Translations.generated(topology, [two])
    )
    assert schedule.rate == schedule.bound.rate == 2
    assert verify(schedule.expand()).errors == ()


def test_no_time_gives_the_shortest_ways() -> None:
    topology = topologies.load("torus:4x4")
    with pytest.raises(TimedOutError, match="alltoall: the deadline of 1e-09 s passed") as caught:
        solve_symmetric_alltoall(
            topology,
            Collective.on(topology, "alltoall"),
            SolveOptions(deadline_s=1e-9),
            translations=Translations.generated(topology, topology.symmetries),
        )
    best = caught.value.best
    assert isinstance(best, ImplicitSchedule)
    assert verify(best.expand()).errors == ()
    assert 0 < best.rate <= 2


def test_who_is_cut_off_is_named() -> None:
    links = [Link(0, 1, Fraction(1)), Link(1, 0, Fraction(1))]
    topology = Topology.build("apart", 3, links)
    with pytest.raises(InfeasibleError, match="alltoall: rank 2 cut off") as caught:
        solved(topology, translations=Translations.trivial(topology))
    assert caught.value.proof is not None
    assert caught.value.proof.rate == 0


def test_other_kinds_are_sent_to_trees() -> None:
    topology = topologies.load("ring:4")
    with pytest.raises(CollectiveError, match="allgather: routes by orbits serve alltoall; use trees"):
        solve_symmetric_alltoall(topology, Collective.on(topology, "allgather"))


def test_rationalize() -> None:
    assert rationalize(np.array([1 / 3, 1.0, 0.25])) == (Fraction(1, 3), Fraction(1), Fraction(1, 4))
    odd = rationalize(np.array([1.0, 2**-0.5]))
    assert odd[1].denominator > 240
    assert abs(float(odd[1]) - 2**-0.5) < 2**-30
