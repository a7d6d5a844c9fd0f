"""The survey of allocations: classes against networkx, drawn rates, rings by brute force."""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from itertools import combinations, pairwise, permutations
from math import comb
from pathlib import Path
from typing import Any

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth, topologies
from arborcast.bench.allocations.nccl import Over, nccl_rate, nccl_rings
from arborcast.bench.fragments import RESULTS, format_summary, format_table, main, summarize, survey
from arborcast.bench.harness.document import read_document
from arborcast.synth.collective import Kind
from arborcast.synth.errors import CollectiveError, InputError
from arborcast.synth.sweeps.fragments import representatives
from arborcast.synth.symmetry.automorphisms import automorphisms_of
from arborcast.synth.symmetry.permutations import orbit
from arborcast.synth.topology import Link, Topology
from tests.support.strategies import topologies as drawn_topologies

METHODS = ("ring", "multiring", "nccl-ring-model", "nccl-relay-model", "trees", "mwu")


def graph_of(topology: Topology) -> Any:
    graph: Any = networkx.DiGraph()
    for vertex in range(topology.size):
        graph.add_node(vertex, switch=topology.is_switch(vertex))
    for (src, dst), rate in topology.bandwidth.items():
        graph.add_edge(src, dst, rate=rate)
    return graph


def classes_by_networkx(topology: Topology, size: int) -> list[tuple[tuple[int, ...], int]]:
    """The first set of ranks of each class, and how many sets it has."""
    found: list[list[Any]] = []
    for ranks in combinations(range(topology.ranks), size):
        graph = graph_of(topology.subset(ranks))
        for known in found:
            if networkx.is_isomorphic(
                graph, known[1], node_match=lambda a, b: a == b, edge_match=lambda a, b: a == b
            ):
                known[2] += 1
                break
        else:
            found.append([ranks, graph, 1])
    return [(ranks, count) for ranks, _, count in found]


def classes(topology: Topology, size: int) -> list[tuple[tuple[int, ...], int]]:
    return [(each.ranks, each.allocations) for each in representatives(topology, [size])]


def path_graph(*pairs: tuple[int, int], ranks: int) -> Topology:
    links = [Link(*ends, Fraction(20)) for u, v in pairs for ends in ((u, v), (v, u))]
    return Topology.build("drawn", ranks, links)


# ------------------------------------------------------------------------------------------- classes


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("spec", ["dgx1", "dgx1-p100"])
def test_classes_of_a_dgx1_are_those_of_networkx(spec: str, size: int) -> None:
    box = topologies.load(spec)

    assert classes(box, size) == classes_by_networkx(box, size)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), symmetric=st.booleans(), connected=st.booleans())
def test_classes_of_random_boxes_are_those_of_networkx(
    data: st.DataObject, symmetric: bool, connected: bool
) -> None:
    box = data.draw(drawn_topologies(max_ranks=6, symmetric=symmetric, max_bandwidth=2, connected=connected))
    size = data.draw(st.integers(2, box.ranks))

    assert classes(box, size) == classes_by_networkx(box, size)


#                       GPUs   2  3   4   5   6  7  8
@pytest.mark.parametrize(
    ("spec", "all_classes", "joined"),
    [
        ("dgx1", [3, 7, 19, 14, 10, 2, 1], [2, 5, 14, 14, 10, 2, 1]),
        ("dgx1-p100", [2, 3, 6, 3, 3, 1, 1], [1, 2, 4, 3, 3, 1, 1]),
    ],
)
def test_the_counts_are_blinks(spec: str, all_classes: list[int], joined: list[int]) -> None:
    """BLINK: 46 on the box with V100 and 14 on that with P100, of 3 to 8 GPUs that NVLinks join."""
    fragments = representatives(topologies.load(spec))

    def counts(among: list[Any]) -> list[int]:
        return [sum(len(each.ranks) == size for each in among) for size in range(2, 9)]

    connected = [each for each in fragments if networkx.is_strongly_connected(graph_of(each.topology))]
    assert counts(list(fragments)) == all_classes
    assert counts(connected) == joined
    assert sum(joined[1:]) == {"dgx1": 46, "dgx1-p100": 14}[spec]
    assert sum(each.allocations for each in fragments) == sum(comb(8, size) for size in range(2, 9))


def test_alike_fragments_need_no_automorphism_of_the_box() -> None:
    box = topologies.load("dgx1")
    generators = automorphisms_of(box).generators
    (pair,) = (each for each in representatives(box, [2]) if each.ranks == (0, 3))

    def moved(pair: tuple[int, int]) -> list[tuple[int, int]]:
        return [(image[pair[0]], image[pair[1]]) for image in generators]

    reached = {(0, 3)}
    for _ in range(8):
        reached |= {image for each in reached for image in moved(each)}
    by_automorphisms = {tuple(sorted(each)) for each in reached}
    doubled = {tuple(sorted(hop)) for hop, rate in box.bandwidth.items() if rate == 50}
    assert pair.allocations == len(doubled) == 8
    assert by_automorphisms < doubled  # the others are alike only on their own
    assert len(orbit(0, generators)) == 4


def test_a_full_graph_of_twelve_has_one_class_of_each_size() -> None:
    fragments = representatives(topologies.load("full:12"))

    assert [each.allocations for each in fragments] == [comb(12, size) for size in range(2, 13)]


@pytest.mark.parametrize(
    ("spec", "sizes", "message"),
    [
        ("ring:17", None, "topology ring:17: to list its fragments it must have at most 16 ranks, got 17"),
        ("ring:4", [1], "fragment of ring:4: must have 2 to 4 ranks, got 1"),
        ("ring:4", [3, 5], "fragment of ring:4: must have 2 to 4 ranks, got 5"),
    ],
)
def test_what_cannot_be_listed_is_refused(spec: str, sizes: list[int] | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        representatives(topologies.load(spec), sizes)


# ---------------------------------------------------------------------------------------------- NCCL


def has_ring(topology: Topology) -> bool:
    """Whether any order of the ranks closes over direct links."""
    return any(
        all(hop in topology.bandwidth for hop in pairwise((0, *order, 0)))
        for order in permutations(range(1, topology.ranks))
    )


@pytest.mark.parametrize("relays", [False, True])
def test_rings_are_direct_where_brute_force_finds_one(relays: bool) -> None:
    fragments = representatives(topologies.load("dgx1", rates="nccl"), range(2, 8))

    for fragment in fragments:
        rings = nccl_rings(fragment.topology, relays=relays)
        assert (rings.over is Over.NVLINK) == has_ring(fragment.topology), fragment.ranks
        if rings.over is Over.PCIE:
            assert rings.plan.bandwidth == 12
        else:
            for kind in (Kind.BROADCAST, Kind.ALLREDUCE):
                limit = synth.bound(fragment.topology, kind).rate
                assert nccl_rate(fragment.topology, kind, rings) <= limit


def test_rates_of_a_whole_box_follow_from_its_six_rings() -> None:
    box = topologies.load("dgx1", rates="nccl")
    rings = nccl_rings(box, relays=False)

    assert (rings.plan.channels, rings.plan.channel_rate) == (6, 20)
    assert nccl_rate(box, Kind.BROADCAST, rings) == 120  # every rank passes on all it gets
    assert nccl_rate(box, Kind.ALLREDUCE, rings) == Fraction(120 * 8, 2 * 7)
    with pytest.raises(CollectiveError, match="alltoall: fragments are surveyed for broadcast, allreduce"):
        nccl_rate(box, Kind.ALLTOALL, rings)


@pytest.mark.parametrize(
    ("drawn", "rings"),
    [
        # 0 - 1 - 2: 0 to 1, 1 to 2, and back to 0 through 1.
        (path_graph((0, 1), (1, 2), ranks=3), 1),
        # 0 - 1 - 2 - 3: out to 2 through 1 and to 3, back to 1 through 2 and to 0.
        (path_graph((0, 1), (1, 2), (2, 3), ranks=4), 1),
        # The same with a second link everywhere.
        (path_graph(*[(0, 1), (1, 2), (2, 3)] * 2, ranks=4), 1),
        # Three legs of two around 0: the square of this tree has no Hamiltonian cycle.
        (path_graph((0, 1), (1, 2), (0, 3), (3, 4), (0, 5), (5, 6), ranks=7), None),
        # Two ranks that nothing joins.
        (path_graph(ranks=2), None),
    ],
)
def test_rings_through_another_rank(drawn: Topology, rings: int | None) -> None:
    found = nccl_rings(drawn, relays=True)

    assert found.over is (Over.PCIE if rings is None else Over.RELAY)
    assert found.plan.channels == (rings or 1)
    assert found.plan.channel_rate == (12 if rings is None else drawn.bandwidth_unit)
    assert nccl_rings(drawn, relays=False, pcie=Fraction(9)).plan.bandwidth == 9


# -------------------------------------------------------------------------------------------- survey


@pytest.fixture(scope="module")
def small() -> list[dict[str, Any]]:
    """Pairs and triples of a DGX-1 at NCCL's rates, and an allreduce on the whole of it."""
    box = topologies.load("dgx1", rates="nccl")
    # Broadcasts on all of it take seconds, one for each root and method: see the long test.
    return survey(box, sizes=[2, 3]) + survey(box, ["allreduce"], [8])


def one(rows: list[dict[str, Any]], gpus: str, collective: str, method: str) -> dict[str, Any]:
    (row,) = (
        row for row in rows if (row["gpus"], row["collective"], row["method"]) == (gpus, collective, method)
    )
    return row


def test_promised_optima(small: list[dict[str, Any]]) -> None:
    box = topologies.load("dgx1")  # at the rates of the data sheet
    part, whole = (survey(box.subset(range(size)), ["allreduce"], [size]) for size in (6, 8))

    for rows, gpus, rate in (
        (part, "0,1,2,3,4,5", Fraction(125, 2)),
        (whole, "0,1,2,3,4,5,6,7", Fraction(600, 7)),
    ):
        trees = one(rows, gpus, "allreduce", "trees")
        assert trees["optimum"] == trees["algbw"] == float(rate)
    # 150 by the data sheet, at 20 GB/s instead of 25 for a link
    assert synth.solve(topologies.load("dgx1", rates="nccl"), "broadcast").rate == 150 * 20 / 25


def test_rows_of_a_triple_without_a_ring(small: list[dict[str, Any]]) -> None:
    # 0 and 3 are joined twice, 0 and 4 too, 3 and 4 not at all: 40 GB/s each way along a line.
    drawn = """
        method             algbw  over_ring  over_nccl  over_nccl_relays  nccl_over     share
        ring               -      -          -          -                 -             -
        multiring          -      -          -          -                 -             -
        nccl-ring-model    9      -          1          0.3               pcie          -
        nccl-relay-model   30     -          3.3333     1                 nvlink-relay  0.75
        trees              40     -          4.4444     1.3333            -             1
        mwu                40     -          4.4444     1.3333            -             1
    """
    _, *lines = drawn.strip().splitlines()
    columns = ("algbw", "over_ring", "over_nccl", "over_nccl_relays", "nccl_over", "share_of_optimum")
    for line, method in zip(lines, METHODS, strict=True):
        row = one(small, "0,3,4", "allreduce", method)
        shown = [f"{row[key]:.5g}" if isinstance(row[key], float) else row[key] or "-" for key in columns]
        assert [method, *shown] == line.split()
    assert "no ring exists" in one(small, "0,3,4", "allreduce", "ring")["why"]


def test_rows_of_gpus_that_nothing_joins(small: list[dict[str, Any]]) -> None:
    trees = one(small, "0,5", "broadcast", "trees")
    nccl = one(small, "0,5", "broadcast", "nccl-ring-model")

    assert (trees["optimum"], trees["algbw"], trees["share_of_optimum"]) == (0, None, None)
    assert "rank 1" in trees["why"]
    assert (nccl["algbw"], nccl["nccl_over"], nccl["share_of_optimum"]) == (12, "pcie", None)


def test_no_share_is_above_one_and_trees_reach_it(small: list[dict[str, Any]]) -> None:
    for row in small:
        if row["share_of_optimum"] is not None:
            assert 0 < row["share_of_optimum"] <= 1
        if row["optimum"] and row["method"] == "trees":
            assert row["share_of_optimum"] == 1
        if row["optimum"] and row["method"] == "mwu":
            assert row["share_of_optimum"] >= 0.9
            assert row["trees"] >= 1
        if row["collective"] == "broadcast" and row["algbw"] is not None:
            assert row["algbw_least"] <= row["algbw"] <= row["algbw_most"] <= max(row["optimum_most"], 12)


def test_means_are_geometric_and_of_joined_fragments_only(small: list[dict[str, Any]]) -> None:
    by_size = {row["ranks"]: row for row in summarize(small) if row["collective"] == "allreduce"}
    # (0,1,2) 4/3, (0,1,4) 20/9, (0,2,3) 5/3, (0,2,6) 20/9, (0,3,4) 40/9: see the rows
    speed_ups = [4 / 3, 20 / 9, 5 / 3, 20 / 9, 40 / 9]
    product = 1.0
    for each in speed_ups:
        product *= each

    assert list(by_size) == ["2", "3", "8", "3 and more"]
    assert (by_size["3"]["fragments"], by_size["3"]["joined"], by_size["3"]["with_ring"]) == (7, 5, 2)
    assert by_size["3"]["over_nccl_mean"] == pytest.approx(product ** (1 / 5))
    assert by_size["3"]["over_nccl_most"] == pytest.approx(40 / 9)
    assert by_size["3 and more"]["over_nccl_mean"] == pytest.approx(product ** (1 / 6))
    assert len(format_summary(summarize(small))) == 1 + 4 + 3  # no broadcast on the whole of it


def test_the_table_marks_what_is_not_a_ring_of_nvlinks(small: list[dict[str, Any]]) -> None:
    (line,) = (line for line in format_table(small) if line.startswith("dgx1  allreduce   0,3,4 "))

    #                                        of  optimum trees no. mwu no. ring multiring NCCL relays x ...
    assert line.split()[3:] == ["4", "40", "40", "1", "40", "1", "-", "-", "9p", "30r", "-", "4.44", "1.33"]


def test_only_what_is_modelled_is_surveyed() -> None:
    with pytest.raises(InputError, match="gather: fragments are surveyed for broadcast, allreduce"):
        survey(topologies.load("ring:4"), ["gather"])


# ---------------------------------------------------------------------------- files and pictures


def test_main_writes_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--machine",
        "ring:4,bandwidth=20",
        "full:3,bandwidth=20",
        "--rates",
        "datasheet",
        "--json",
        str(tmp_path / "found.json"),
    ]
    monkeypatch.setattr(sys, "argv", ["bench/fragments.py", *options])

    main()

    found = read_document(tmp_path / "found.json")
    assert found["keys"] == ["topology", "collective", "method"]
    # ring:4 has pairs with and without a link, one triple and itself; full:3 a pair and itself.
    assert len(found["rows"]) == (4 + 2) * 2 * len(METHODS)
    assert "x NCCL*" in capsys.readouterr().out


def test_the_committed_results_are_of_all_allocations_and_reproducible(small: list[dict[str, Any]]) -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    for box in ("dgx1", "dgx1-p100"):
        chosen = [
            row
            for row in rows
            if (row["box"], row["collective"], row["method"]) == (box, "broadcast", "trees")
        ]
        for size in range(2, 9):
            assert sum(row["allocations"] for row in chosen if row["ranks"] == size) == comb(8, size)
    of_small = {(row["ranks"], row["collective"]) for row in small}
    kept = [row for row in rows if row["box"] == "dgx1" and (row["ranks"], row["collective"]) in of_small]
    assert sorted(kept, key=str) == sorted(small, key=str)


@pytest.mark.long
def test_the_committed_broadcasts_on_the_whole_box_are_reproducible() -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    kept = [row for row in rows if (row["box"], row["ranks"], row["collective"]) == ("dgx1", 8, "broadcast")]
    assert kept == survey(topologies.load("dgx1", rates="nccl"), ["broadcast"], [8])
