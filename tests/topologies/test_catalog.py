from __future__ import annotations

import math
from fractions import Fraction

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.errors import TopologyError
from arborcast.synth.topology import Topology
from arborcast.topologies import catalog, load

# every entry once or more, with vertices (ranks, switches), cables, and the ranks' bandwidth out
SIZES = [
    ("dgx1", 8, 0, 16, {150}),
    ("dgx1-p100", 8, 0, 16, {80}),
    ("dgx2", 16, 1, 16, {150}),
    ("dgx-a100", 8, 1, 8, {300}),
    ("dgx-a100:boxes=2", 16, 2 + 2, 32, {325}),
    ("dgx-a100:3,rails=8", 24, 3 + 8, 48, {325}),
    ("dgx-h100:boxes=2", 16, 2 + 2, 32, {500}),
    ("mi250", 16, 0, 28, {350}),
    ("mi250:boxes=2", 32, 1, 2 * 28 + 32, {366}),
    ("torus:4x4", 16, 0, 32, {4}),
    ("torus:2x3", 6, 0, 3 + 6, {3}),
    ("torus:2x2x2", 8, 0, 12, {3}),
    ("mesh:3x4", 12, 0, 2 * 4 + 3 * 3, {2, 3, 4}),
    ("mesh:5", 5, 0, 4, {1, 2}),
    ("ring:5", 5, 0, 5, {2}),
    ("ring:2", 2, 0, 1, {1}),
    ("hypercube:4", 16, 0, 32, {4}),
    ("full:6", 6, 0, 15, {5}),
    ("star:4", 4, 1, 4, {1}),
    ("fat-tree:2x3x4", 24, 1 + 2 + 6, 24 + 6 + 2, {1}),
    ("dragonfly:5x2x3", 30, 10, 30 + 5 + 10, {1}),
    ("dragonfly:9x4x2", 72, 36, 72 + 9 * 6 + 36, {1}),
]
# how many kinds of ranks there are: orbits under the declared symmetries
ORBITS = {
    "dgx1": 2,
    "dgx1-p100": 1,
    "dgx2": 1,
    "dgx-a100:boxes=2": 1,
    "dgx-a100:3,rails=8": 1,
    "dgx-h100:boxes=2": 1,
    "mi250:boxes=2": 4,
    "torus:4x4": 1,
    "torus:2x3": 1,
    "mesh:3x4": 4,
    "ring:5": 1,
    "hypercube:4": 1,
    "full:6": 1,
    "star:4": 1,
    "fat-tree:2x3x4": 1,
    "dragonfly:5x2x3": 2,
    "dragonfly:9x4x2": 4,
}


@pytest.mark.parametrize(("spec", "ranks", "switches", "cables", "outgoing"), SIZES)
def test_sizes_and_bandwidths(spec: str, ranks: int, switches: int, cables: int, outgoing: set[int]) -> None:
    topology = load(spec)
    assert (topology.ranks, len(topology.switches), len(topology.links)) == (ranks, switches, 2 * cables)
    assert {_outgoing(topology, rank) for rank in range(ranks)} == outgoing
    assert topology.is_symmetric
    assert topology.unbalanced(range(topology.size)) == ()
    assert nx.is_strongly_connected(_graph(topology))


# what is asked for, and the name: the spec with every argument that is not what counts anyway
NAMES = {
    "dgx1": "dgx1",
    "dgx1-p100": "dgx1-p100",
    "dgx2": "dgx2",
    "dgx-a100:boxes=1": "dgx-a100",
    "dgx-a100:boxes=1,rails=8": "dgx-a100",  # one box has no fabric
    "dgx-a100:3,rails=8": "dgx-a100:boxes=3,rails=8",
    "dgx-h100:rails=2,boxes=2": "dgx-h100:boxes=2",
    "dgx-h100:boxes=2,rails=8": "dgx-h100:boxes=2,rails=8",
    "mi250:2": "mi250:boxes=2",
    "torus:04x4,latency=0.70": "torus:4x4,latency=0.7",
    "mesh:3x4,bandwidth=25/2": "mesh:3x4,bandwidth=12.5",
    "ring:3,bandwidth=1/3": "ring:3,bandwidth=1/3",
    "ring:3,bandwidth=1,latency=0": "ring:3",
    "hypercube:3,latency=1e-9": "hypercube:3,latency=1e-09",
    "full:4,bandwidth=1e9": "full:4,bandwidth=1000000000",
    "star:4,latency=7,bandwidth=2": "star:4,bandwidth=2,latency=7",
    "fat-tree:2x4x8,oversubscription=2": "fat-tree:2x4x8,oversubscription=2",
    "dragonfly:5x2x1,global=3,local=2": "dragonfly:5x2x1,local=2,global=3",
}


@pytest.mark.parametrize(("spec", "name"), NAMES.items())
def test_the_name_is_the_spec_that_gives_the_same_again(spec: str, name: str) -> None:
    topology = load(spec)
    assert topology.name == name
    assert load(name) == topology


def test_every_entry_is_in_the_table() -> None:
    entries = {entry.name for entry in catalog()}
    assert entries == {spec.split(":")[0] for spec, *_ in SIZES} == {spec.split(":")[0] for spec in NAMES}


@pytest.mark.parametrize(("spec", "orbits"), ORBITS.items())
def test_declared_symmetries_leave_so_many_kinds_of_ranks(spec: str, orbits: int) -> None:
    topology = load(spec)
    alike = nx.Graph()
    alike.add_nodes_from(range(topology.ranks))
    alike.add_edges_from((r, images[r]) for images in topology.symmetries for r in range(topology.ranks))
    assert nx.number_connected_components(alike) == orbits


@pytest.mark.parametrize("spec", ["dgx1", "mi250"])
def test_all_symmetries_of_the_irregular_boxes_are_declared(spec: str) -> None:
    topology = load(spec)
    graph = _graph(topology)
    same = nx.isomorphism.DiGraphMatcher(graph, graph, edge_match=lambda a, b: a["rate"] == b["rate"])
    found = {tuple(images[v] for v in range(topology.size)) for images in same.isomorphisms_iter()}
    assert _group(topology) == found


def test_dgx1_has_the_numbering_of_the_machine() -> None:
    # NVLinks per pair as nvidia-smi shows them; rows are the GPUs
    drawn = """
        . 1 1 2 2 . . .
        1 . 2 1 . 2 . .
        1 2 . 2 . . 1 .
        2 1 2 . . . . 1
        2 . . . . 1 1 2
        . 2 . . 1 . 2 1
        . . 1 . 1 2 . 2
        . . . 1 2 1 2 ."""
    rows = [line.split() for line in drawn.strip().splitlines()]
    expected = {
        (src, dst): Fraction(25) * int(cell)
        for src, row in enumerate(rows)
        for dst, cell in enumerate(row)
        if cell != "."
    }
    assert load("dgx1").bandwidth == expected
    assert load("dgx1", rates="nccl").bandwidth == {pair: rate * 4 / 5 for pair, rate in expected.items()}
    assert load("dgx1-p100").bandwidth == dict.fromkeys(expected, 20)


def test_mi250_pairs() -> None:
    links = {(0, 1): 4, (0, 4): 2, (0, 8): 1, (7, 3): 2, (15, 14): 4, (13, 15): 1, (5, 7): 1}
    rates = load("mi250:boxes=2").bandwidth
    for (src, dst), count in links.items():
        assert rates[src, dst] == rates[src + 16, dst + 16] == 50 * count
    assert rates[20, 32] == 16


def test_a100_nics_alternate_between_two_fabric_switches() -> None:
    topology = load("dgx-a100:boxes=2")
    names = [switch.name for switch in topology.switches]
    assert names == ["box0.nvswitch", "box1.nvswitch", "fabric0", "fabric1"]
    for rank in range(16):
        assert topology.bandwidth[rank, 16 + rank // 8] == 300
        assert topology.bandwidth[rank, 18 + rank % 2] == 25
    assert [switch.name for switch in load("dgx-a100").switches] == ["nvswitch"]


@pytest.mark.parametrize(
    ("spec", "rate"),
    [("dgx1-p100", "18"), ("dgx2", "120"), ("dgx-a100", "240"), ("dgx-h100", "1854/5")],
)
def test_nccl_rates(spec: str, rate: str) -> None:
    assert load(spec, rates="nccl").links[0].bandwidth == Fraction(rate)


@pytest.mark.parametrize("spec", ["mi250", "torus:4x4", "star:3"])
def test_nccl_rates_where_there_are_none(spec: str) -> None:
    with pytest.raises(TopologyError, match=r"has no nccl rates, .*datasheet"):
        load(spec, rates="nccl")


def test_generic_shapes_take_bandwidth_and_latency() -> None:
    link = load("torus:4x4,bandwidth=25/2,latency=0.7").links[0]
    assert (link.bandwidth, link.latency_us) == (Fraction(25, 2), Fraction(7, 10))
    assert load("ring:3").links[0].bandwidth == 1


def test_fat_tree_thins_out_upwards() -> None:
    topology = load("fat-tree:2x3x4,bandwidth=10,oversubscription=2")
    by_name = {topology.label(v): v for v in range(24, topology.size)}
    assert topology.bandwidth[0, by_name["leaf0"]] == 10
    assert topology.bandwidth[by_name["leaf0"], by_name["pod0"]] == 10 * 4 / 2
    assert topology.bandwidth[by_name["pod0"], by_name["core"]] == 10 * 4 / 2 * 3 / 2


def test_dragonfly_has_one_cable_between_groups() -> None:
    topology = load("dragonfly:5x2x1,global=3,local=2")
    group = {vertex: (vertex - 10) // 2 for vertex in range(10, 20)}
    between = [
        (group[link.src], group[link.dst])
        for link in topology.links
        if link.src >= 10 and link.dst >= 10 and group[link.src] != group[link.dst]
    ]
    assert sorted(between) == [(a, b) for a in range(5) for b in range(5) if a != b]
    assert topology.bandwidth[10, 11] == 2
    assert {topology.bandwidth[link.src, link.dst] for link in topology.links} == {1, 2, 3}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(max_examples=40)
def test_grids_are_networkx_grids(extents: list[int]) -> None:
    spec = "x".join(map(str, extents))
    # networkx leaves a self-loop or a second way round where an extent is 1 or 2
    torus = nx.grid_graph(extents[::-1], periodic=[extent > 2 for extent in extents[::-1]])
    for topology, grid in (
        (load(f"torus:{spec}"), torus),
        (load(f"mesh:{spec}"), nx.grid_graph(extents[::-1])),
    ):
        places = sorted(grid.nodes)
        number = {place: index for index, place in enumerate(places)}
        expected = {(number[a], number[b]) for a, b in grid.edges} | {
            (number[b], number[a]) for a, b in grid.edges
        }
        assert set(topology.bandwidth) == expected
        assert topology.ranks == math.prod(extents)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("torus", "torus: an argument is missing, must be given as torus:4x4"),
        ("torus:4x", "extents: must be a whole number in 1..65536, got ''"),
        ("torus:0x4", "must be a whole number in 1..65536, got '0'"),
        ("torus:99999999999999999999", "must be a whole number in 1..65536"),
        ("torus:9999x9999", "must have at most 65536 vertices, got 99980001"),
        ("full:3000", "full:3000: must have at most 2097152 links, got 8997000"),
        ("hypercube:17", "dimension must be at most 16, got 17"),
        ("ring:4,bandwidth=0", "ring: bandwidth: must be positive, got '0'"),
        ("ring:4,bandwidth=nan", "must be a number such as 25, 0.7 or 25/2, got 'nan'"),
        ("ring:4,bandwidth=1/0", "must not divide by zero"),
        ("ring:4,bandwidth=1e999999999", "must have an exponent of at most 60"),
        ("ring:4,latency=-1", "latency: must not be negative, got '-1'"),
        ("ring:4,width=3", r"ring: takes :N\[,bandwidth=GB/s\]\[,latency=US\], got 'width=3'"),
        ("ring:4,bandwidth=1,bandwidth=2", "bandwidth must be given once, got it twice"),
        ("dgx1:3", "dgx1: takes no arguments, got '3'"),
        ("dgx-a100:boxes=0", "boxes: must be a whole number in 1..65536, got '0'"),
        ("dgx-a100:boxes=9000", "must have at most 65536 vertices"),
        ("dgx-a100:2,rails=3", "rails must be 1, 2, 4 or 8 so that 8 GPUs share them evenly, got 3"),
        ("fat-tree:2x2,oversubscription=1/2", "oversubscription must be at least 1, got 1/2"),
        ("dragonfly:4x4", "must be groups x routers x ranks"),
    ],
)
def test_wrong_arguments(spec: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        load(spec)


def _outgoing(topology: Topology, rank: int) -> Fraction:
    return sum((link.bandwidth for link in topology.links if link.src == rank), Fraction(0))


def _graph(topology: Topology) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(topology.size))
    graph.add_edges_from((link.src, link.dst, {"rate": link.bandwidth}) for link in topology.links)
    return graph


def _group(topology: Topology) -> set[tuple[int, ...]]:
    """All products of the declared symmetries."""
    group = {tuple(range(topology.size))}
    todo = list(group)
    while todo:
        images = todo.pop()
        for generator in topology.symmetries:
            product = tuple(generator[image] for image in images)
            if product not in group:
                group.add(product)
                todo.append(product)
    return group
