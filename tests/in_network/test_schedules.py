"""Schedules along trees through able switches, replayed under the certificate of their program."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest

from arborcast import synth
from arborcast.synth.candidates import Candidates
from arborcast.synth.certificate import Bound
from arborcast.synth.certification import certified_scope, dual_of
from arborcast.synth.collective import TREE_KINDS, Collective
from arborcast.synth.errors import CollectiveError, InfeasibleError, TimedOutError
from arborcast.synth.in_network.steiner_program import steiner_program
from arborcast.synth.selection import compared
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Link, Switch, Topology
from tests.support.able_fabrics import ABLE, drawn, of_cables, star

REDUCES, MULTICASTS, BOTH, TURNS, LOOPS = ABLE


def proved(schedule):
    """The schedule with the limit that the prices of its program prove."""
    fabric, collective = schedule.topology, schedule.collective
    program = steiner_program(fabric, collective)
    dual = dual_of(fabric, collective, program.lengths, program.adders)
    scope = certified_scope(fabric, collective, dual)
    return replace(schedule, bound=Bound(dual.capacity / dual.distance, dual, scope))


def uses_switches(schedule):
    return any(max(move.src, move.dst) >= schedule.topology.ranks for move in schedule.transfers)


def drawn_transfers(schedule):
    """As `step: src>dst` and, where it is added, `+`; switches by name."""
    label = schedule.topology.label
    return [
        f"{move.step}: {label(move.src)}>{label(move.dst)}{'+' if move.reduce else ''}"
        for move in schedule.transfers
    ]


def test_a_switch_that_turns_is_the_root():
    schedule = proved(synth.solve(star(3, **TURNS), "allreduce"))
    assert drawn_transfers(schedule) == ["0: 0>s+", "0: 1>s+", "0: 2>s+", "1: s>0", "1: s>1", "1: s>2"]
    assert synth.verify(schedule).errors == () and schedule.is_optimal


def test_a_switch_that_does_not_turn_gives_its_sum_to_a_rank():
    schedule = proved(synth.solve(star(3, **BOTH), "allreduce"))
    assert len(schedule.chunks) == 1
    root = schedule.chunks[0].owner
    one, other = sorted({0, 1, 2} - {root})
    assert drawn_transfers(schedule) == [
        *(f"0: {one}>s+", f"0: {other}>s+", f"1: s>{root}+", f"2: {root}>s", f"3: s>{one}", f"3: s>{other}")
    ]
    assert synth.verify(schedule).errors == () and schedule.is_optimal


def test_loopback_is_part_of_the_schedule():
    schedule = proved(synth.solve(star(3, **LOOPS), "reduce", root=1))
    assert schedule.rate == 1
    heaviest = max(range(len(schedule.chunks)), key=lambda chunk: schedule.chunks[chunk].share)
    moves = [move for move in schedule.transfers if move.chunk == heaviest]
    if any(move.src == 3 for move in moves):
        assert (1, 3, True) in {(move.src, move.dst, move.reduce) for move in moves}
    assert synth.verify(schedule).errors == ()


@pytest.mark.parametrize(
    ("abilities", "rate"),
    [(TURNS, Fraction(1)), (BOTH, Fraction(1)), (LOOPS, Fraction(8, 9)), (REDUCES, Fraction(4, 7))],
)
def test_allreduces_on_a_star_of_eight(abilities, rate):
    schedule = proved(synth.solve(star(8, **abilities), "allreduce"))
    assert (schedule.rate, schedule.bound.rate) == (rate, rate)
    assert synth.verify(schedule).errors == ()


def test_no_more_trees_than_a_switch_holds():
    # Each tree's root pays a way more; of k trees through the switch, each root a k-th of it.
    rates = []
    for trees in (1, 3, 8):
        schedule = proved(synth.solve(star(8, trees=trees, **LOOPS), "allreduce"))
        through = {move.chunk for move in schedule.transfers if 8 in (move.src, move.dst)}
        assert len(through) <= trees
        assert synth.verify(schedule).errors == ()
        rates.append(schedule.rate)
    assert Fraction(4, 7) < rates[0] < rates[1] < rates[2] == Fraction(8, 9)


def fabric_of_boxes(boxes: int, gpus: int = 4):
    """Boxes whose switch loops back, a NIC of each GPU on the rail of its place, rails that forward."""
    ranks = boxes * gpus
    ends = {(rank, ranks + rank // gpus): 4 for rank in range(ranks)}
    ends |= {(rank, ranks + boxes + rank % gpus): 1 for rank in range(ranks)}
    switches = [Switch(f"box{box}", **LOOPS) for box in range(boxes)]
    return of_cables(
        "boxes", ranks, list(ends), [*switches, *(Switch(f"rail{r}") for r in range(gpus))], ends
    )


@pytest.mark.parametrize(("boxes", "rate"), [(2, Fraction(116, 35)), (3, Fraction(3))])
def test_boxes_joined_by_rails_that_forward(boxes, rate):
    schedule = proved(synth.solve(fabric_of_boxes(boxes), "allreduce"))
    # Two boxes are limited inside, where 16/5 go without the rails, three by their NICs, which every part
    # passes on two of three boxes, in and out: 4 * 3 / (2 * 2).
    assert schedule.rate == schedule.bound.rate == rate
    assert synth.verify(schedule).errors == ()


@pytest.mark.parametrize("kind", ["alltoall", "gather", "scatter"])
def test_what_is_never_copied_gains_nothing(kind):
    fabric = star(4, **TURNS)
    schedule = synth.solve(fabric, kind)
    assert schedule.topology == fabric
    assert schedule.rate == synth.solve(fabric.forwarding, kind).rate
    assert synth.verify(schedule).errors == ()


@pytest.mark.parametrize("method", ["mwu", "ring", "multiring", "binary-tree"])
def test_other_methods_ask_switches_only_to_forward(method):
    fabric = star(4, **TURNS)
    schedule = synth.solve(fabric, "allreduce", method=method)
    assert schedule.topology == fabric and schedule.bound.rate == synth.bound(fabric, "allreduce").rate
    assert not uses_switches(schedule)
    assert schedule.transfers == synth.solve(fabric.forwarding, "allreduce", method=method).transfers


def test_few_trees_and_low_ones():
    fabric = star(8, **LOOPS)
    few = proved(synth.solve(fabric, "allreduce", max_trees=4))
    assert len(few.chunks) == 4 and few.rate == Fraction(4, 5)  # a root's ports pass a quarter more
    assert synth.verify(few).errors == ()
    flat = proved(synth.solve(fabric, "allreduce", max_height=1))
    assert flat.height <= 1 and synth.verify(flat).errors == ()


def test_a_fragment_and_relays():
    fabric = star(8, **TURNS)
    for schedule in (
        synth.solve(fabric.subset([1, 4, 6]), "allreduce"),
        synth.solve(fabric, "allreduce", ranks=[0, 1, 2]),
    ):
        assert schedule.rate == 1
        assert synth.verify(proved(schedule)).errors == ()


def test_the_fastest_at_a_size_is_among_both_kinds():
    fabric = star(4, **TURNS)
    assert uses_switches(synth.solve(fabric, "allreduce", size_bytes=1 << 26))


def test_a_deadline_carries_the_best_so_far():
    with pytest.raises(TimedOutError, match="deadline of 1e-09 s") as caught:
        synth.solve(star(4, **TURNS), "allreduce", deadline_s=1e-9)
    assert caught.value.best is not None and caught.value.best.topology == star(4, **TURNS)


def reaches_the_limit(seed: int) -> int:
    """Every kind on a drawn fabric: the schedule is right and as fast as any tree is."""
    fabric, rng = drawn(seed), random.Random(seed)
    compared = 0
    for kind in TREE_KINDS:
        count = rng.randint(2, fabric.ranks) if rng.random() < 0.4 else fabric.ranks
        try:
            schedule = proved(synth.solve(fabric, Collective.on(fabric, kind, ranks=range(count))))
        except InfeasibleError:
            continue
        assert synth.verify(schedule).errors == (), (seed, kind)
        # Lower trees of more switches may be worth more than the last bit of rate only to who asks for it.
        assert schedule.is_optimal, (seed, kind, schedule.rate, schedule.bound.rate)
        compared += 1
    return compared


@pytest.mark.parametrize("seed", [11, 12])
def test_drawn_fabrics(seed):
    assert reaches_the_limit(seed)


@pytest.mark.long
@pytest.mark.parametrize("first", range(300, 400, 20))
def test_drawn_fabrics_at_length(first):
    assert sum(map(reaches_the_limit, range(first, first + 20))) >= 60


def test_the_frontier_asks_switches_only_to_forward():
    fabric = star(3, **TURNS)
    points = synth.pareto(fabric, "allgather").points
    alike = synth.pareto(star(3), "allgather").points
    assert [point.schedule.transfers for point in points] == [point.schedule.transfers for point in alike]


def test_what_is_compared_in_time_is_on_the_fabric_that_was_asked_for():
    fabric = star(4, **TURNS)
    collective = Collective.on(fabric, "allreduce")
    best = synth.solve(fabric, "allreduce")
    for late in (1e-9, None):
        options = SolveOptions(max_trees=2, cache=False, deadline_s=late)
        of_all = Candidates.of(fabric, collective, options)
        found = compared(of_all.explicit(lambda: best), collective.kind)
        assert (found.out_of_time is None) == (late is None)
        assert {schedule.topology for schedule in found.schedules} == {fabric}
        assert {schedule.bound for schedule in found.schedules} == {best.bound}


def test_what_is_proved_of_trees_that_only_pass_switches_is_said_of_those_alone():
    schedule = synth.solve(star(4, **LOOPS), "allreduce", max_height=1)
    assert schedule.rate == Fraction(2, 3) < schedule.bound.rate == Fraction(4, 5)
    within = dict(schedule.method.settings)["within_height"]
    assert within == "the limit of any height where switches only forward"


def test_switches_that_hold_few_trees_have_the_lowest_of_them():
    schedule = synth.solve(star(3, trees=1, **TURNS), "allreduce")
    assert (schedule.rate, schedule.chunk_count, schedule.steps) == (1, 1, 2)
    assert synth.verify(schedule).errors == ()


@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_a_height_holds_where_switches_hold_few_trees(kind):
    """Cables from rank to rank, beside the switch, invite longer chains than were asked for."""
    cables = [(rank, 5) for rank in range(5)] + [(rank, rank + 1) for rank in range(4)]
    fabric = of_cables("row", 5, cables, [Switch("s", trees=1, **LOOPS)])
    for height in (1, 2):
        schedule = synth.solve(fabric, kind, max_height=height)
        assert schedule.height <= height and synth.verify(schedule).errors == ()


def test_a_sum_may_be_handed_to_another_switch_that_multicasts():
    # Ranks can only send to `up` and only hear from `down`: neither turns, and nobody else could.
    links = [Link(rank, 3, Fraction(1)) for rank in range(3)]
    links += [Link(4, rank, Fraction(1)) for rank in range(3)] + [Link(3, 4, Fraction(1))]
    fabric = Topology.build(
        "up, down", 3, links, [Switch("up", reduces=True), Switch("down", multicasts=True)]
    )
    assert steiner_program(fabric, Collective.on(fabric, "allreduce")).limit == 1
    # By a rank: what two of them send passes the cable between, then what goes out to two.
    assert steiner_program(fabric.forwarding, Collective.on(fabric, "allreduce")).limit == Fraction(1, 4)


def test_other_kinds_have_no_trees():
    with pytest.raises(CollectiveError, match="alltoall: trees serve broadcast"):
        steiner_program(star(3), Collective.on(star(3), "alltoall"))


def test_a_rank_that_nothing_reaches():
    fabric = Topology.build("cut", 2, [Link(0, 2, Fraction(1)), Link(2, 0, Fraction(1))], ["s"])
    with pytest.raises(InfeasibleError, match="broadcast: some rank cannot be reached"):
        steiner_program(fabric, Collective.on(fabric, "broadcast"))
