"""Baselines reach their known rates, pass the verifier, and say why where they do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.backends.lowering.additions import adds_alike
from arborcast.synth.baselines import BASELINES, solve_baseline
from arborcast.synth.baselines.binary_tree import double_tree
from arborcast.synth.baselines.butterflies import butterfly
from arborcast.synth.baselines.cyclic import around, bine
from arborcast.synth.baselines.multiring import BY_HIGHS
from arborcast.synth.baselines.switch_paths import switch_paths
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import CollectiveError, InfeasibleError, InputError
from arborcast.synth.schedule import Schedule
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.topology import Link, Topology
from arborcast.synth.verification.verifier import verify
from tests.fuzzing import all_rings
from tests.support import strategies


def links(*words: str) -> list[Link]:
    """Links as "0-1 2": both ways between 0 and 1, with 2 GB/s."""
    found = []
    for word in words:
        pair, rate = word.split()
        a, b = map(int, pair.split("-"))
        found += [Link(a, b, Fraction(rate)), Link(b, a, Fraction(rate))]
    return found


def solved(fabric: Topology, kind: str, method: str, root: int = 0) -> Schedule:
    schedule = solve_baseline(fabric, Collective.on(fabric, kind, root=root), method)
    verdict = verify(schedule)
    assert verdict.errors == ()
    assert verdict.rate == schedule.rate
    return schedule


def setting(schedule: Schedule, name: str) -> str | int | None:
    return dict(schedule.method.settings)[name]


def dgx1(ranks: Sequence[int] = range(8)) -> Topology:
    """A DGX-1 whose single NVLink carries 1 GB/s."""
    fabric = topologies.load("dgx1")
    unit = [Link(link.src, link.dst, link.bandwidth / 25) for link in fabric.links]
    return Topology.build("dgx1", 8, unit).subset(list(ranks))


# --- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "rings", "rate"),
    [
        (range(8), 6, "24/7"),
        ([0, 2, 3], 2, "3/2"),
        (range(6), 2, "6/5"),
    ],
)
def test_link_disjoint_rings_of_dgx1(ranks: Sequence[int], rings: int, rate: str) -> None:
    schedule = solved(dgx1(ranks), "allreduce", "multiring")
    assert schedule.rate == Fraction(rate)
    assert setting(schedule, "rings") == rings
    assert setting(schedule, "proved_largest") == "yes"


def test_link_disjoint_rings_broadcast_at_their_number() -> None:
    assert solved(dgx1(), "broadcast", "multiring", root=3).rate == 6


@pytest.mark.parametrize("method", ["ring", "multiring"])
def test_no_ring_exists_on_ranks_0_3_4(method: str) -> None:
    with pytest.raises(InfeasibleError, match=f"{method}: no ring exists through ranks 0, 1, 2 of dgx1"):
        solved(dgx1([0, 3, 4]), "allreduce", method)


def test_the_single_ring_takes_the_wide_links() -> None:
    # 0-1-2-3 round is 2 GB/s wide; every other ring passes a diagonal of 1.
    fabric = Topology.build("wide", 4, links("0-1 2", "1-2 2", "2-3 2", "0-3 2", "0-2 1", "1-3 1"))
    assert solved(fabric, "allgather", "ring").rate == Fraction(8, 3)


def test_a_trunk_counts_as_often_as_the_ring_passes_it() -> None:
    # Two switches with two ranks each: a ring crosses the trunk once each way, 3 GB/s are enough for it.
    fabric = Topology.build("trunk", 4, links("0-4 4", "1-4 4", "2-5 4", "3-5 4", "4-5 3"), ["left", "right"])
    assert solved(fabric, "broadcast", "ring").rate == 3


def test_rings_across_two_a100_boxes_use_every_nic() -> None:
    schedule = solved(topologies.load("dgx-a100:boxes=2"), "allreduce", "multiring")
    # 8 rings of 25 GB/s, each over one NIC of either box each way.
    assert setting(schedule, "rings") == 8
    assert schedule.rate == 8 * 25 * Fraction(16, 30)


@pytest.mark.parametrize(("spec", "rings"), [("torus:4x4", 4), ("full:7", 6), ("full:8", 7), ("full:4", 2)])
def test_symmetric_graphs_fall_apart_into_rings(spec: str, rings: int) -> None:
    """Tillson 1980: full graphs but those of 4 and 6 ranks do; tori do (Foregger 1978)."""
    schedule = solved(topologies.load(spec), "allreduce", "multiring")
    assert setting(schedule, "rings") == rings
    # Fractions of rings use all links of a full graph of 4, so that prices prove nothing there.
    assert setting(schedule, "proved_largest") == (BY_HIGHS if spec == "full:4" else "yes")


def test_the_largest_set_of_rings_is_so_to_the_last_unit() -> None:
    # 102,813 units leave rank 1; within HiGHS's usual gap of 1e-4 a ring less is as good.
    wide, narrow, thin = "46265/100000", "32631/100000", "23917/100000"
    fabric = Topology.build(
        "fine",
        5,
        links(
            f"0-1 {narrow}",
            f"0-3 {wide}",
            f"0-4 {narrow}",
            f"1-2 {wide}",
            f"1-3 {thin}",
            f"2-3 {narrow}",
            f"2-4 {wide}",
            f"3-4 {wide}",
        ),
    )
    schedule = solved(fabric, "allgather", "multiring")
    assert setting(schedule, "rings") == setting(schedule, "rings_at_most") == 102_813
    assert setting(schedule, "proved_largest") == "yes"


@pytest.mark.parametrize(
    ("spec", "method", "rate"),
    [
        ("full:8", "binary-tree", "1"),
        ("full:8", "halving-doubling", "1"),  # half of the buffer over one link, there and back
        ("dgx-a100", "halving-doubling", "1200/7"),  # 300 x 8/14: the switch does not care who talks to whom
        ("dgx-a100", "binary-tree", "150"),  # up and down: each byte leaves a rank twice
        ("hypercube:3", "halving-doubling", "1"),
    ],
)
def test_trees_and_hypercubes(spec: str, method: str, rate: str) -> None:
    assert solved(topologies.load(spec), "allreduce", method).rate == Fraction(rate)


def test_a_pattern_that_does_not_fit_in_order_is_embedded() -> None:
    # The 2-cube 0-1-3-2 where ranks 0 and 1 are not joined.
    fabric = Topology.build("square", 4, links("0-2 1", "2-1 1", "1-3 1", "3-0 1"))
    assert setting(solved(fabric, "allreduce", "halving-doubling"), "order") != "0,1,2,3"


def test_parallel_planes_are_all_used() -> None:
    planes = [Link(a, b, Fraction(1)) for r in range(4) for p in (4, 5, 6) for a, b in ((r, p), (p, r))]
    fabric = Topology.build("planes", 4, planes, ["a", "b", "c"])
    assert solved(fabric, "allreduce", "halving-doubling").rate == 2  # 3 planes x 4/6
    assert setting(solved(fabric, "allgather", "multiring"), "rings") == 3


# --- the patterns themselves ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(2, 40))
def test_each_rank_is_a_leaf_in_one_of_the_two_trees(count: int) -> None:
    pattern = double_tree(Kind.ALLREDUCE, count)
    inside = [{t.src for t in pattern.transfers if t.chunk == tree and not t.reduce} for tree in (0, 1)]
    # An odd number of ranks cannot be split evenly: one is inside both.
    assert len(inside[0] & inside[1]) == count % 2
    children: dict[tuple[int, int], int] = {}
    for transfer in pattern.transfers:
        if not transfer.reduce:
            place = (transfer.chunk, transfer.src)
            children[place] = children.get(place, 0) + 1
    assert max(children.values()) <= 2


def test_partners_of_swing_are_near_first() -> None:
    moves = butterfly(Kind.REDUCE_SCATTER, 8, "swing").transfers
    drawn = [
        *("0-1 2-3 4-5 6-7", "1-2 3-4 5-6 7-0", "0-3 2-5 4-7 6-1"),  # at distances 1, 1 and 3 of a ring of 8
    ]
    for step, words in enumerate(drawn):
        pairs = {frozenset(map(int, word.split("-"))) for word in words.split()}
        assert {frozenset((move.src, move.dst)) for move in moves if move.step == step} == pairs
        assert len([move for move in moves if move.step == step]) == 8 * (4 >> step)


@pytest.mark.parametrize(("count", "time_us"), [(4, 14), (8, 21), (6, 25)])
def test_recursive_doubling_sends_the_whole_buffer_in_each_step(count: int, time_us: int) -> None:
    fabric = topologies.load(f"full:{count},bandwidth=2,latency=3")
    schedule = solved(fabric, "allreduce", "recursive-doubling")
    # 8,000 bytes at 2 GB/s take 4 us, and 3 us to arrive. Of six ranks 4 and 5 fold onto 0 and 1 until 7;
    # those exchange until 14 and have sent their sum to 2 and 3 at 18, whose own came at 14; 4 and 5 get all
    # at 25.
    assert simulate(schedule, 8_000, pieces=1).time_us == pytest.approx(time_us)
    assert adds_alike(schedule)


@pytest.mark.parametrize(
    ("method", "drawn"),
    [
        ("bruck", ["0-1", "0-2 1-3", "0-4 1-5"]),  # of six places; who has the block, and who gets it
        ("pat", ["0-4", "0-2", "0-1 2-3 4-5"]),
    ],
)
def test_trees_on_a_circle(method: str, drawn: list[str]) -> None:
    moves = around(Kind.ALLGATHER, 6, method).transfers
    for block in range(6):
        for step, words in enumerate(drawn):
            pairs = [tuple((int(end) + block) % 6 for end in word.split("-")) for word in words.split()]
            found = [(move.src, move.dst) for move in moves if (move.chunk, move.step) == (block, step)]
            assert sorted(found) == sorted(pairs)


def test_a_bine_tree_goes_far_first() -> None:
    # Of eight: distances 3, -1 and 1 from even places, as negabinary numbers say, and back from odd ones.
    drawn = ["0-3", "0-7 3-4", "0-1 3-2 7-6 4-5"]
    moves = bine(Kind.BROADCAST, 8).transfers
    for step, words in enumerate(drawn):
        pairs = {tuple(map(int, word.split("-"))) for word in words.split()}
        assert {(move.src, move.dst) for move in moves if move.step == step} == pairs


@pytest.mark.parametrize("method", ["halving-doubling", "swing"])
@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_halving_moves_as_little_as_a_ring(count: int, method: str) -> None:
    pattern = butterfly(Kind.ALLREDUCE, count, method)
    assert len(pattern.transfers) == 2 * count * (count - 1)
    assert max(t.step for t in pattern.transfers) + 1 == 2 * (count.bit_length() - 1)


def test_many_ports_keep_all_links_of_a_hypercube_busy() -> None:
    schedule = solved(topologies.load("torus:4x4"), "allreduce", "multiport")
    assert schedule.is_optimal  # one part alone has 15/32 of the rate
    assert schedule.steps == 8


@pytest.mark.parametrize("spec", ["torus:4x4", "hypercube:3"])
def test_rotated_doubling_keeps_all_links_of_a_hypercube_busy_in_every_step(spec: str) -> None:
    fabric = topologies.load(spec)
    schedule = solved(fabric, "allreduce", "rotated-doubling")
    assert schedule.steps == fabric.ranks.bit_length() - 1
    links = sorted(fabric.bandwidth)
    for step in range(schedule.steps):
        assert sorted((move.src, move.dst) for move in schedule.transfers if move.step == step) == links
    whole = solved(fabric, "allreduce", "recursive-doubling")
    for size in (1 << 10, 1 << 16, 1 << 20):
        assert simulate(schedule, size, pieces=1).time_us < simulate(whole, size, pieces=1).time_us
    assert schedule.rate == whole.rate


@pytest.mark.parametrize("method", BASELINES)
@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 8])
def test_every_kind_on_full_graphs(method: str, count: int) -> None:
    fabric = topologies.load(f"full:{count}")
    for kind in BASELINES[method].kinds:
        if (
            method in {"halving-doubling", "multiport", "swing"}
            and kind is not Kind.ALLREDUCE
            and count & (count - 1)
        ):
            with pytest.raises(InfeasibleError, match=f"{kind} needs a power of two of ranks, got {count}"):
                solved(fabric, kind, method)
        else:
            solved(fabric, kind, method, root=count - 1)


def test_ranks_outside_the_collective_are_not_touched() -> None:
    fabric = topologies.load("full:6")
    collective = Collective.on(fabric, "allreduce", ranks=[5, 1, 3])
    for method in BASELINES:
        schedule = solve_baseline(fabric, collective, method)
        assert verify(schedule).correct
        assert {rank for t in schedule.transfers for rank in (t.src, t.dst)} == {1, 3, 5}


# --- against brute force -------------------------------------------------------------------------------


@settings(max_examples=60)
@given(strategies.topologies(max_ranks=5, switches=0, symmetric=False, min_ranks=3, max_bandwidth=3))
def test_rings_equal_brute_force(fabric: Topology) -> None:
    every = all_rings.rings(fabric, range(fabric.ranks))
    assert every is not None
    of_width_1 = Fraction(fabric.ranks, fabric.ranks - 1)
    for method in ("ring", "multiring"):
        try:
            schedule = solved(fabric, "allgather", method)
        except InfeasibleError as none:
            assert "no ring exists" in str(none)
            assert not every
        else:
            if method == "ring":
                assert schedule.rate == all_rings.widest(fabric, every) * of_width_1
            else:
                rings = setting(schedule, "rings")
                assert schedule.rate == rings * fabric.bandwidth_unit * of_width_1
                proved_by = setting(schedule, "proved_largest")
                assert all_rings.more_than(fabric, every, rings) is False or proved_by == BY_HIGHS


@settings(max_examples=60)
@given(strategies.topologies(max_ranks=7, switches=3), st.sampled_from(list(BASELINES)), st.data())
def test_what_is_found_is_correct(fabric: Topology, method: str, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(BASELINES[method].kinds))
    try:
        solved(fabric, kind, method, root=data.draw(st.integers(0, fabric.ranks - 1)))
    except InfeasibleError as none:
        assert str(none).startswith(method)


@settings(max_examples=40)
@given(strategies.topologies(max_ranks=6, switches=3, symmetric=False))
def test_ways_are_real_and_the_first_is_the_widest(fabric: Topology) -> None:
    ways_of = switch_paths(fabric, range(fabric.ranks))
    for (src, dst), ways in ways_of.items():
        for way in ways:
            assert (way.src, way.dst) == (src, dst)
            assert all(fabric.is_switch(vertex) for vertex in way.via)
            assert way.width == min(fabric.bandwidth[hop] for hop in way.hops)
        assert ways[0].width == max(way.width for way in ways) == widest(fabric, src, dst)


def widest(fabric: Topology, src: int, dst: int) -> Fraction:
    """By relaxing every link until nothing gets wider."""
    width = {src: Fraction(10**9)}
    while True:
        wider = dict(width)
        for link in fabric.links:
            if link.src in width and (link.src == src or fabric.is_switch(link.src)) and link.dst != src:
                reach = min(width[link.src], link.bandwidth)
                wider[link.dst] = max(wider.get(link.dst, Fraction(0)), reach)
        if wider == width:
            return width[dst]
        width = wider


# --- errors --------------------------------------------------------------------------------------------


def test_an_unsupported_kind_names_what_is_supported() -> None:
    fabric = topologies.load("full:4")
    with pytest.raises(CollectiveError, match="alltoall: method ring makes only broadcast, reduce, allg"):
        solve_baseline(fabric, Collective.on(fabric, "alltoall"), "ring")
    with pytest.raises(InputError, match="method rings: must be one of ring, multiring, binary-tree"):
        solve_baseline(fabric, Collective.on(fabric, "allreduce"), "rings")


def test_a_pattern_without_a_place_says_what_to_do_instead() -> None:
    with pytest.raises(InfeasibleError, match=r"binary-tree: its pattern does not fit the links .* method"):
        solved(topologies.load("ring:8"), "allreduce", "binary-tree")


def test_a_graph_in_two_parts_carries_its_proof() -> None:
    fabric = Topology.build("pairs", 4, links("0-1 1", "2-3 1"))
    with pytest.raises(InfeasibleError, match="cut off") as caught:
        solved(fabric, "allreduce", "ring")
    assert caught.value.proof is not None
    assert caught.value.proof.rate == 0
