"""Packings of shallow trees: the best rate within each height, against enumeration of every tree."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from itertools import product

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.api import approach, solve
from arborcast.synth.collective import TREE_KINDS, Collective
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError
from arborcast.synth.packing.bounded_height import shallow_frontier
from arborcast.synth.packing.bounded_tree import UNUSABLE, cheapest_bounded
from arborcast.synth.packing.symmetric import generation
from arborcast.synth.packing.tree_solver import shallow_schedules, solve_by_trees
from arborcast.synth.schedule import Schedule
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Link, Topology
from arborcast.synth.verification.verifier import verify
from arborcast.topologies import load
from tests.fuzzing.all_trees import best_of_height
from tests.fuzzing.tally import spreading
from tests.support.strategies import collectives
from tests.support.strategies import topologies as graphs


def height_of(graph: nx.DiGraph, root: int) -> int:
    """Of an arborescence from the root; more than any where it is none."""
    if root not in graph or not nx.is_arborescence(graph):
        return 1 << 30
    return max(nx.single_source_shortest_path_length(graph, root).values())


def within(topology: Topology, collective: Collective, height: int, **knobs: object) -> Schedule | None:
    try:
        return solve_by_trees(topology, collective, SolveOptions(max_height=height, **knobs))  # type: ignore[arg-type]
    except InfeasibleError as error:
        assert "the lowest have" in str(error)
        return None


def check_against_enumeration(topology: Topology, collective: Collective) -> None:
    for height in range(1, topology.ranks):
        found = within(topology, collective, height)
        best = best_of_height(*spreading(topology, collective), height)
        if found is None:
            assert best == 0
            continue
        assert found.rate == best
        assert found.height <= height
        shown = dict(found.method.settings)["within_height"]
        assert shown == ("the limit of any height" if found.is_optimal else "best")
        assert verify(found).errors == ()
        assert verify(found).rate == found.rate <= found.bound.rate
    assert found is not None and found.is_optimal  # any tree is as low as the ranks are many


@given(
    st.one_of(
        graphs(max_ranks=4, switches=0),
        graphs(max_ranks=4, switches=0, symmetric=False),
        graphs(max_ranks=3, switches=2),
        graphs(max_ranks=3, switches=2, symmetric=False),
    ),
    st.data(),
)
@settings(max_examples=50)
def test_the_best_rate_of_every_height(topology: Topology, data: st.DataObject) -> None:
    """Switches are passed within a step."""
    check_against_enumeration(topology, data.draw(collectives(topology, list(TREE_KINDS))))


@given(graphs(min_ranks=5, max_ranks=5, switches=0, max_bandwidth=2), st.integers(0, 4))
@settings(max_examples=8)
def test_the_best_rate_of_every_height_among_five(topology: Topology, root: int) -> None:
    check_against_enumeration(topology, Collective.on(topology, "broadcast", root=root))


@pytest.mark.few(2)
@given(graphs(min_ranks=4, max_ranks=6), st.data())
@settings(max_examples=15)
def test_what_many_ranks_get_is_as_good_where_the_best_can_be_asked(
    topology: Topology, data: st.DataObject
) -> None:
    collective = data.draw(collectives(topology, list(TREE_KINDS)))
    height = data.draw(st.integers(1, topology.ranks))
    usual = within(topology, collective, height)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "EXACT_AT_ONCE", 0)
        searched = within(topology, collective, height)
        assert (usual is None) == (searched is None)
        if usual is not None and searched is not None:
            assert searched.rate == pytest.approx(usual.rate, rel=1e-7)
            assert searched.height <= height
            assert verify(searched).errors == ()
            patch.setattr(generation, "LARGEST_EXACT", 0)
            good = within(topology, collective, height)
            assert good is not None and good.height <= height and 0 < good.rate <= usual.bound.rate


@pytest.mark.parametrize(
    ("spec", "ranks", "kind", "rates"),
    [  # GB/s by height from 1 on; linear programs over all 3456 (8 ranks) and 56 (6 ranks) spanning trees
        ("dgx1", 8, "broadcast", [0, 50, 125, 150]),
        ("dgx1", 8, "allreduce", [0, Fraction(600, 7)]),
        ("dgx1", 6, "broadcast", [0, 50, 75]),
        ("dgx1", 6, "allreduce", [0, Fraction(125, 2)]),
        # Around a switch all hear the root at once, or one another in two steps.
        ("star:6", 6, "broadcast", [Fraction(1, 5), 1]),
        ("star:6", 6, "allgather", [Fraction(6, 5)]),
        # Only a tree that goes one way alone leaves one of the root's two links to another.
        ("ring:6", 6, "broadcast", [0, 0, 1, 1, 2]),
    ],
)
def test_values(spec: str, ranks: int, kind: str, rates: list[Fraction | int]) -> None:
    topology = load(spec).subset(range(ranks))
    for height, rate in enumerate(rates, start=1):
        found = within(topology, Collective.on(topology, kind), height)
        assert (0 if found is None else found.rate) == rate
        assert found is None or verify(found).correct


def test_six_trees_of_height_four_fill_the_links_of_the_dgx1() -> None:
    found = solve(load("dgx1"), "broadcast", method="trees", max_height=4)
    assert found.is_optimal and found.height == 4
    assert [chunk.share for chunk in found.chunks] == [Fraction(1, 6)] * 6


def test_few_trees_within_a_height() -> None:
    fabric = load("dgx1")
    for most, rate in ((1, 25), (2, 50), (3, 75)):
        found = solve(fabric, "broadcast", method="trees", max_height=3, max_trees=most)
        assert len(found.chunks) <= most and found.height <= 3 and found.rate >= rate
    loose = solve(fabric, "broadcast", method="trees", max_height=3, tolerance=Fraction(1, 2))
    assert loose.rate >= Fraction(125, 2) and len(loose.chunks) == 3


def test_the_frontier_ascends_and_ends_at_the_limit() -> None:
    fabric = load("dgx1")
    broadcast = Collective.on(fabric, "broadcast")
    found = list(shallow_schedules(fabric, broadcast, below=7))
    assert [(schedule.height, schedule.rate) for schedule in found] == [(3, 125), (4, 150)]
    assert [schedule.height for schedule in shallow_schedules(fabric, broadcast, below=4)] == [3]
    assert list(shallow_schedules(fabric, broadcast, below=2)) == []


def test_the_frontier_of_an_allgather_has_every_root() -> None:
    fabric = load("dgx1")
    (only,) = shallow_frontier(fabric, range(8), 4, limit=Fraction(1200, 7))
    assert max(tree.height for tree in only.carriers) <= dict(only.settings)["max_height"] == 2
    assert sum(tree.weight for tree in only.carriers) == Fraction(1200, 7)
    assert {carrier.root for carrier in only.carriers} == set(range(8))


@pytest.mark.long
def test_lower_trees_are_among_the_candidates() -> None:
    fabric = load("dgx1", ranks=range(6))
    found = approach(fabric, "allreduce", options=SolveOptions(cache=False)).candidates()
    first = next(found)
    lower = [one for one in found if dict(one.method.settings).get("max_height")]
    assert [one.height for one in lower] == [2] and first.height > 2
    assert all(one.is_optimal and verify(one).correct for one in lower)


def test_out_of_time_still_has_trees_within_the_height() -> None:
    with pytest.raises(TimedOutError) as caught:
        solve(load("torus:4x4"), "allreduce", method="trees", max_height=4, deadline_s=1e-6)
    assert caught.value.best is not None and caught.value.best.height <= 4
    assert verify(caught.value.best).correct
    late = Deadline.after(1e-9)
    fabric = load("dgx1")
    assert list(shallow_frontier(fabric, [0], 7, limit=Fraction(150), deadline=late)) == []


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (InfeasibleError, {"max_height": 1}, "no trees to all ranks have height 1, the lowest have 2"),
        (InputError, {"max_height": 0}, "max-height: must be at least 1, got 0"),
        (InputError, {"max_height": 2, "ranks": [0, 1, 2]}, r"max-height: .* take part, got 5 relays"),
        (InputError, {"max_height": 2, "method": "mwu"}, "method mwu: takes no maximum height, which is for"),
        (
            InputError,
            {"max_height": 2, "method": "ring"},
            "method ring: takes no maximum height",
        ),
    ],
)
def test_what_cannot_be_done_is_said(
    error: type[Exception], options: dict[str, object], message: str
) -> None:
    with pytest.raises(error, match=message):
        solve(load("dgx1"), "broadcast", **{"method": "trees", **options})  # type: ignore[call-overload]


def test_a_rank_that_is_cut_off_is_named() -> None:
    half = Topology.build("half", 3, [Link(0, 1, Fraction(1)), Link(1, 0, Fraction(1))])
    with pytest.raises(InfeasibleError, match="rank 2 cut off"):
        solve(half, "allreduce", method="trees", max_height=2)


def brute(entering: np.ndarray, root: int, height: int) -> int:
    size, best = len(entering), UNUSABLE
    others = [rank for rank in range(size) if rank != root]
    for parents in product(range(size), repeat=len(others)):
        graph = nx.DiGraph(list(zip(parents, others, strict=True)))
        if height_of(graph, root) <= height:
            best = min(best, sum(int(entering[v, u]) for u, v in graph.edges))
    return best


@given(st.integers(2, 4), st.integers(1, 4), st.data())
@settings(max_examples=40)
def test_the_cheapest_tree_of_a_height(size: int, height: int, data: st.DataObject) -> None:
    cost = st.one_of(st.integers(0, 20), st.just(UNUSABLE))
    entering = np.array([[data.draw(cost) for _ in range(size)] for _ in range(size)], dtype=np.int64)
    roots = np.arange(size)
    found = cheapest_bounded(entering, roots, height)
    for root in range(size):
        best = brute(entering, root, height)
        assert found.cost[root] == best
        if best < UNUSABLE:
            above = found.parents[root].tolist()
            edges = [(parent, child) for child, parent in enumerate(above) if parent >= 0]
            assert height_of(nx.DiGraph(edges), root) <= height
            assert sum(int(entering[child, parent]) for parent, child in edges) == best


def test_many_sets_of_few_ranks_run_as_machine_code() -> None:
    """Twelve ranks have few links, but 4,096 sets: plain Python would take seconds for each question."""
    script = (
        "import sys, numpy as np; from arborcast.synth.packing.bounded_tree import cheapest_bounded as ask; "
        "ask(np.ones((12, 12), np.int64), np.array([0]), 3); print('numba' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n", ran.stderr
