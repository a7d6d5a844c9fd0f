"""Limits where switches reduce and multicast: known values, brute force, and parts of large fabrics."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest

from arborcast.synth.bounds import bound, certified_rate
from arborcast.synth.certificate import Cut, Dual, Partition, Scope
from arborcast.synth.certification import certified_scope, dual_of, dual_or_none
from arborcast.synth.collective import TREE_KINDS, Collective, Demand, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Switch, Topology
from tests.support.able_fabrics import ABLE, drawn, of_cables, star
from tests.support.able_limits import best_rate
from tests.support.able_schedules import Search

FORWARDS, REDUCES, MULTICASTS, BOTH, TURNS, LOOPS = {}, *ABLE
ONE_BLOCK = (Kind.BROADCAST, Kind.REDUCE, Kind.ALLREDUCE)


@pytest.mark.parametrize(
    ("kind", "abilities", "rate"),
    [
        ("allreduce", FORWARDS, Fraction(4, 7)),
        # 7 links up to be summed and 7 to spread from rank to rank, of 8; or as many down.
        ("allreduce", REDUCES, Fraction(4, 7)),
        ("allreduce", MULTICASTS, Fraction(4, 7)),
        ("allreduce", BOTH, Fraction(1)),
        ("allreduce", TURNS, Fraction(1)),
        ("allreduce", LOOPS, Fraction(8, 9)),
        *(
            (kind, abilities, Fraction(1))
            for kind in ("reduce", "broadcast")
            for abilities in (FORWARDS, *ABLE)
        ),
        *(
            (kind, abilities, Fraction(8, 7))
            for kind in ("allgather", "reduce-scatter")
            for abilities in (FORWARDS, *ABLE)
        ),
    ],
)
def test_a_star_of_eight(kind, abilities, rate):
    fabric = star(8, **abilities)
    found = bound(fabric, Collective.on(fabric, kind))
    assert found.rate == rate
    # Only where trees were counted is a limit one of trees.
    is_of_trees = kind == "allreduce" and abilities in (REDUCES, MULTICASTS, LOOPS)
    assert found.scope is (Scope.TREES if is_of_trees else Scope.EVERY_SCHEDULE)


@pytest.mark.parametrize("ranks", [3, 5, 8, 11])
def test_a_star_that_loops_back_by_lengths_of_one(ranks):
    fabric = star(ranks, **LOOPS)
    collective = Collective.on(fabric, "allreduce")
    dual = dual_of(fabric, collective, (Fraction(1),) * 2 * ranks)
    assert (dual.capacity, dual.distance) == (2 * ranks, 2 * (ranks + 1))
    assert bound(fabric, collective).rate == certified_rate(fabric, collective, dual)


@pytest.mark.parametrize("abilities", [BOTH, TURNS])
@pytest.mark.parametrize(("between", "rate"), [(2, 1), (1, 1), (Fraction(1, 2), Fraction(1, 2))])
def test_two_stars_need_of_the_cable_between_what_they_sum(between, rate, abilities):
    #  0..3 -- a --between-- b -- 4..7
    ends = {(rank, 8 + rank // 4): 1 for rank in range(8)} | {(8, 9): between}
    fabric = of_cables("two stars", 8, list(ends), [Switch(name, **abilities) for name in "ab"], ends)
    assert bound(fabric, Collective.on(fabric, "allreduce")).rate == rate


def test_an_adder_has_a_price():
    fabric = star(4, **TURNS, adder=Fraction(1, 4))
    collective = Collective.on(fabric, "allreduce")
    found = bound(fabric, collective)
    # A sum loads every link once. Without the switch it takes 3/2 both ways: 1/4 + 3/2 x = 1.
    assert found.rate == Fraction(1, 4) + Fraction(3, 4) / Fraction(3, 2)
    assert isinstance(found.certificate, Dual)
    assert found.certificate.adders > (0,)


def equals_brute_force(seed: int) -> int:
    """Every kind on a drawn fabric: the limit, and what the prices of the brute force prove."""
    fabric, rng = drawn(seed, most=7), Random(seed)
    compared = 0
    for kind in [*rng.sample(TREE_KINDS, 2), Kind.ALLREDUCE]:
        count = rng.randint(2, fabric.ranks) if rng.random() < 0.3 else fabric.ranks
        ranks = rng.sample(range(fabric.ranks), count)
        collective = Collective.on(fabric, kind, root=ranks[0], ranks=ranks)
        found = bound(fabric, collective)
        if found.rate == 0:
            continue
        best = best_rate(fabric, collective)
        dual = dual_of(fabric, collective, best.lengths, best.adders)
        assert certified_rate(fabric, collective, dual) == best.rate, (seed, kind, ranks)
        assert found.rate == best.rate, (seed, kind, ranks)
        assert found.rate == certified_rate(fabric, collective, found.certificate)
        compared += 1
    return compared


@pytest.mark.parametrize("first", [0, 4])
def test_all_trees_by_brute_force(first):
    assert sum(map(equals_brute_force, range(first, first + 4))) >= 8


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 1200, 20))
def test_all_trees_by_brute_force_at_length(first):
    assert sum(map(equals_brute_force, range(first, first + 20))) >= 40


def is_as_near_as_any_schedule(seed: int, *, exchanges: bool, most: int = 30_000) -> bool:
    """The distance of drawn lengths is the least cost of all orders of transfers, along trees or not."""
    fabric, rng = drawn(seed, most=5), Random(seed)
    if fabric.ranks > 3:
        return False
    count = 2 if rng.random() < 0.3 else fabric.ranks
    collective = Collective.on(fabric, rng.choice([*ONE_BLOCK, Kind.ALLREDUCE]), ranks=range(count))
    lengths = [rng.choice([0, 1, 1, 2, 3]) for _ in fabric.links]
    adders = [rng.randint(0, 3) for _ in fabric.limited_adders]
    dual = dual_or_none(fabric, collective, tuple(map(Fraction, lengths)), tuple(map(Fraction, adders)))
    prices = dict(zip(fabric.limited_adders, adders, strict=True))
    if dual is None:
        return False
    search = Search.of(fabric, collective, lengths, prices, exchanges=exchanges)
    found = search.cheapest(int(dual.distance) + 1, most)
    assert found in (None, dual.distance), (seed, collective.kind, found, dual.distance)
    return found is not None


def test_no_schedule_travels_less_than_the_trees():
    assert sum(is_as_near_as_any_schedule(seed, exchanges=False, most=5000) for seed in range(40)) >= 25


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 100, 20))
def test_no_schedule_with_exchanges_travels_less_than_the_trees(first):
    found = [is_as_near_as_any_schedule(seed, exchanges=True) for seed in range(first, first + 20)]
    assert sum(found) >= 8


@pytest.mark.parametrize(
    ("other", "distance"),
    [
        (Switch("other", multicasts=True), 2 + 3),  # 0 -> other -> loops, which nothing leads back from
        (Switch("other"), 3 * 2),  # 0 -> loops -> rank, three times
    ],
)
def test_data_that_another_switch_hands_on_do_not_loop_back(other, distance):
    #  0..3 -- loops -- other -- 0, where the links to rank 0 have length 3
    ends = [(0, 4), (1, 4), (2, 4), (3, 4), (4, 5), (0, 5)]
    fabric = of_cables("loops", 4, ends, [Switch("loops", **LOOPS), other])
    lengths = tuple(Fraction(3 if link.dst == 0 else 1) for link in fabric.links)
    broadcast = Collective.on(fabric, "broadcast")
    assert dual_of(fabric, broadcast, lengths).distance == distance


@pytest.mark.parametrize("first", [0, 10])
def test_partitions_and_cuts_hold_whatever_switches_do(first):
    """Every division of a drawn fabric into two or three sets with a rank each."""
    divided = 0
    for seed in range(first, first + 10):
        fabric, rng = drawn(seed, most=6), Random(seed)
        collective = Collective.on(fabric, "allreduce")
        rate = bound(fabric, collective).rate
        for _ in range(20):
            blocks: list[set[int]] = [set() for _ in range(rng.randint(2, 3))]
            for vertex in range(fabric.size):
                rng.choice(blocks).add(vertex)
            between = sum(
                link.bandwidth for link in fabric.links if not any({link.src, link.dst} <= b for b in blocks)
            )
            if all(min(block, default=fabric.size) < fabric.ranks for block in blocks):
                sets = tuple(map(frozenset, blocks))
                assert certified_rate(fabric, collective, Partition(sets, Fraction(between) / 2)) >= rate
                divided += 1
    assert divided >= 20


@pytest.mark.parametrize("seed", range(1, 6))
def test_balanced_switches_gain_nothing_but_in_an_allreduce(seed):
    """Every cable as fast both ways: what all trees through able switches reach, forwarding does."""
    rng = Random(seed)
    ranks, size = rng.randint(2, 4), rng.randint(5, 6)
    ends = {(rng.randrange(vertex), vertex): rng.randint(1, 4) for vertex in range(1, size)}
    ends |= {tuple(sorted(rng.sample(range(size), 2))): rng.randint(1, 4) for _ in range(size)}
    switches = [Switch(f"s{place}", **TURNS) for place in range(size - ranks)]
    fabric = of_cables("balanced", ranks, list(ends), switches, ends)
    for kind in TREE_KINDS:
        collective = Collective.on(fabric, kind)
        found = bound(fabric, collective)
        assert best_rate(fabric, collective).rate == found.rate
        if kind is not Kind.ALLREDUCE:
            assert found == bound(fabric.forwarding, collective)
            assert isinstance(found.certificate, Cut)


def test_kinds_without_copies_are_limited_as_by_switches_that_forward():
    fabric = star(4, **TURNS)
    custom = Collective.custom(fabric, [Demand(frozenset({0}), frozenset({1, 2}))])
    for collective in (custom, *(Collective.on(fabric, kind) for kind in ("gather", "scatter", "alltoall"))):
        assert bound(fabric, collective) == bound(fabric.forwarding, collective)


def boxes_on_a_fabric(boxes: int, port: int, uplink: int, **fabric: bool) -> Topology:
    """Boxes of 8 ranks around a switch that loops back, and all ranks on one more switch."""
    ranks = 8 * boxes
    ends = {(rank, ranks + rank // 8): port for rank in range(ranks)}
    ends |= {(rank, ranks + boxes): uplink for rank in range(ranks)}
    inside = [Switch(f"box{box}", **LOOPS) for box in range(boxes)]
    return of_cables("boxes", ranks, list(ends), [*inside, Switch("fabric", **fabric)], ends)


@pytest.mark.parametrize(
    ("fabric", "rate"),
    [
        # Trees over 16 and 128 boxes of 8 x 50 GB/s each way, and whatever the boxes do inside.
        (boxes_on_a_fabric(16, 450, 50), Fraction(16 * 400, 2 * 15)),
        pytest.param(boxes_on_a_fabric(128, 450, 50), Fraction(128 * 400, 2 * 127), marks=pytest.mark.long),
        # A fabric that sums: what leaves a box leaves it once.
        (boxes_on_a_fabric(16, 450, 50, **TURNS), Fraction(400)),
    ],
)
def test_boxes_of_many_ranks(fabric, rate):
    collective = Collective.on(fabric, "allreduce")
    found = bound(fabric, collective)
    assert found.rate == rate == certified_rate(fabric, collective, found.certificate)
    assert found.scope is certified_scope(fabric, collective, found.certificate) is Scope.EVERY_SCHEDULE


def test_a_box_limits_where_all_else_is_one_rank():
    fabric = boxes_on_a_fabric(16, 450, 2000, **TURNS)
    found = bound(fabric, Collective.on(fabric, "allreduce"))
    ends = {(rank, 9): 450 for rank in range(8)} | {(rank, 8): 2000 for rank in range(8)}
    alone = of_cables("one box", 9, list(ends), [Switch("box", **LOOPS)], ends)
    assert found.rate == bound(alone, Collective.on(alone, "allreduce")).rate < 2450
    assert found.scope is Scope.TREES


@pytest.mark.parametrize("seed", range(6))
def test_parts_limit_what_the_whole_program_does(seed, monkeypatch):
    rng = Random(seed)
    port, uplink = rng.randint(2, 8), rng.randint(1, 4)
    ends = {(rank, 6 + rank // 3): port for rank in range(6)} | {(rank, 8): uplink for rank in range(6)}
    inside = [Switch(name, **rng.choice((BOTH, LOOPS))) for name in "ab"]
    fabric = of_cables("two boxes", 6, list(ends), [*inside, Switch("fabric", **rng.choice(ABLE))], ends)
    for kind in ONE_BLOCK:
        collective = Collective.on(fabric, kind)
        exact = bound(fabric, collective)
        monkeypatch.setattr("arborcast.synth.in_network.switch_limits.EXACT_UP_TO", 5)
        found = bound(fabric, collective)
        assert exact.rate <= found.rate == certified_rate(fabric, collective, found.certificate)
        monkeypatch.undo()


def test_a_box_with_one_rank_besides_is_no_part():
    ends = [*((rank, 18) for rank in range(17)), (0, 17)]
    fabric = of_cables("box and one", 18, ends, [Switch("box", **LOOPS)])
    found = bound(fabric, Collective.on(fabric, "allreduce"))
    assert (found.rate, found.scope) == (Fraction(17, 18), Scope.TREES)


def test_lengths_within_one_box_are_certified_at_any_size():
    fabric = boxes_on_a_fabric(40, 450, 50)
    collective = Collective.on(fabric, "allreduce")
    inside = {*range(8), 320}
    # 8 ranks and the rest of the fabric: 9 are apart; all others are joined by ways of length 0.
    lengths = tuple(
        Fraction(0 if not inside & {link.src, link.dst} else 1 if 320 in {link.src, link.dst} else 3)
        for link in fabric.links
    )
    dual = dual_of(fabric, collective, lengths)
    # Up to the switch and down with all 8, once more for the root, and one cable to the others; twice.
    assert dual.distance == 2 * (8 + 1 + 3)
    everywhere = tuple(Fraction(1) for _ in fabric.links)
    with pytest.raises(InputError, match=r"ranks may be apart, or more that are alike, got 320$"):
        dual_of(fabric, collective, everywhere)


@pytest.mark.parametrize(
    ("ranks", "abilities"),
    [(330, LOOPS), (72, BOTH), (20, TURNS), pytest.param(1024, LOOPS, marks=pytest.mark.long)],
)
def test_ranks_that_are_alike_are_certified_in_any_number(ranks, abilities):
    fabric = star(ranks, **abilities)
    limit = bound(fabric, Collective.on(fabric, "allreduce")).rate
    assert limit == (Fraction(ranks, ranks + 1) if abilities is LOOPS else 1)


@pytest.mark.parametrize("abilities", ABLE)
@pytest.mark.parametrize("kind", ["allreduce", "broadcast", "reduce"])
def test_alike_or_not_ranks_are_as_far_apart(kind, abilities):
    """The same star, whose ranks are alike where lengths are, and hardly one where they differ a little."""
    fabric = star(7, **abilities)
    collective = Collective.on(fabric, kind)
    alike = dual_of(fabric, collective, (Fraction(1),) * 14).distance
    for seed in range(5):
        nearly = [1 + Fraction(Random(f"{seed} {link}").randrange(100), 10**6) for link in range(14)]
        distance = dual_of(fabric, collective, tuple(nearly)).distance
        assert alike <= distance <= alike * (1 + Fraction(1, 10**4))
