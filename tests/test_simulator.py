from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.certificate import Bound, Cut
from synth.collective import Collective
from synth.errors import InputError
from synth.schedule import Chunk, Method, Schedule, Transfer
from synth.simulator import Occupation, simulate, sweep, timeline
from synth.topology import Link, Topology


def draw(
    ranks: int,
    links: Iterable[tuple[int, int, int, str]],
    kind: str,
    shares: Sequence[str],
    transfers: Iterable[Transfer],
    switches: Sequence[str] = (),
) -> Schedule:
    """A schedule on links (from, to, GB/s, us)."""
    topology = Topology.build(
        "drawn",
        ranks,
        [Link(src, dst, Fraction(rate), Fraction(latency)) for src, dst, rate, latency in links],
        switches,
    )
    return Schedule.build(
        topology,
        Collective.on(topology, kind),
        Method("drawn"),
        Bound(Fraction(1), Cut(frozenset({0}), Fraction(1))),  # not used here
        [Chunk(Fraction(share), 0) for share in shares],
        transfers,
    )


def test_one_link() -> None:
    schedule = draw(2, [(0, 1, 2, "0.5")], "broadcast", ["1"], [Transfer(0, 0, 1, 0)])
    # 4000 bytes at 2 GB/s = 2000 bytes a microsecond: 2 us, and 0.5 us on the way.
    timing = simulate(schedule, 4000, pieces=1)
    assert (timing.bytes, timing.pieces, timing.time_us) == (4000, 1, 2.5)
    assert timing.algbw == timing.busbw == 1.6


def test_a_chain_works_on_two_pieces_at_once() -> None:
    schedule = draw(
        3, [(0, 1, 1, "1"), (1, 2, 1, "1")], "broadcast", ["1"], [Transfer(0, 0, 1, 0), Transfer(0, 1, 2, 1)]
    )
    # us     0   1   2   3   4   5   6   7   8
    # 0->1   [ piece 0 ][ piece 1 ]              each 2000 bytes
    # 1->2               [ piece 0 ][ piece 1 ]  piece 0 arrives at rank 1 at 3, piece 1 at rank 2 at 8
    assert simulate(schedule, 4000, pieces=2).time_us == 8
    assert timeline(schedule, 4000, pieces=2) == {
        (0, 1): (Occupation(0, 2, 0, 0), Occupation(2, 4, 0, 1)),
        (1, 2): (Occupation(3, 5, 0, 0), Occupation(5, 7, 0, 1)),
    }
    assert simulate(schedule, 4000, pieces=1).time_us == 4 + 1 + 4 + 1


def test_two_transfers_share_a_link_piece_by_piece() -> None:
    schedule = draw(
        2, [(0, 1, 1, "0")], "broadcast", ["1/4", "3/4"], [Transfer(0, 0, 1, 0), Transfer(1, 0, 1, 0)]
    )
    # 8000 bytes: pieces of 1000 and 3000 bytes in turns, since waiting pieces go by step + piece first
    assert timeline(schedule, 8000, pieces=2)[0, 1] == (
        Occupation(0, 1, 0, 0),
        Occupation(1, 4, 1, 0),
        Occupation(4, 5, 0, 1),
        Occupation(5, 8, 1, 1),
    )


def test_a_link_serves_the_earlier_step_first_among_what_waits() -> None:
    links = [(0, 1, 1, "0"), (1, 2, 1, "0")]
    transfers = [Transfer(0, 0, 1, 0), Transfer(0, 1, 2, 1), Transfer(1, 0, 1, 1), Transfer(1, 1, 2, 2)]
    schedule = draw(3, links, "broadcast", ["1/2", "1/2"], transfers)
    # One piece each of 1000 bytes; both are ready at rank 0 at the start.
    assert timeline(schedule, 2000, pieces=1) == {
        (0, 1): (Occupation(0, 1, 0, 0), Occupation(1, 2, 1, 0)),
        (1, 2): (Occupation(1, 2, 0, 0), Occupation(2, 3, 1, 0)),
    }


def test_a_switch_stores_and_forwards() -> None:
    links = [(0, 2, 1, "0.25"), (2, 1, 2, "0.5")]
    schedule = draw(2, links, "broadcast", ["1"], [Transfer(0, 0, 1, 0, via=(2,))], ["sw"])
    # us     0       1       2       3
    # 0->sw  [ piece 0 ][ piece 1 ]           1000 bytes each at 1 GB/s, there 0.25 later
    # sw->1             .25 [0]     [1]       0.5 us each at 2 GB/s from 1.25 and 2.25, there 0.5 later
    assert simulate(schedule, 2000, pieces=2).time_us == 2.25 + 0.5 + 0.5
    assert timeline(schedule, 2000, pieces=2)[2, 1] == (
        Occupation(1.25, 1.75, 0, 0),
        Occupation(2.25, 2.75, 0, 1),
    )


def test_allreduce_on_a_triangle() -> None:
    both_ways = [(a, b, 1, "0") for a in range(3) for b in range(3) if a != b]
    up_and_down = [
        Transfer(0, 1, 0, 0, True),
        Transfer(0, 2, 0, 0, True),
        Transfer(0, 0, 1, 1),
        Transfer(0, 0, 2, 1),
    ]
    schedule = draw(3, both_ways, "allreduce", ["1"], up_and_down)
    # us    0   1   2   3
    # up    [ 0 ][ 1 ]      1->0 and 2->0 side by side, 1000 bytes a piece
    # down       [ 0 ][ 1 ] a piece goes down when both of it are in
    timing = simulate(schedule, 2000, pieces=2)
    assert timing.time_us == 3
    assert timing.busbw == pytest.approx(timing.algbw * 4 / 3)


def test_a_later_delivery_waits_for_what_is_still_to_be_sent() -> None:
    links = [(0, 1, 4, "0"), (1, 0, 1, "0"), (1, 2, 1, "0")]
    transfers = [Transfer(0, 0, 1, 0, True), Transfer(0, 1, 0, 0, True), Transfer(0, 1, 2, 1)]
    schedule = draw(3, links, "allreduce", ["1"], transfers)
    # Ranks 0 and 1 swap 4000 bytes in step 0: 0->1 takes 1 us, 1->0 takes 4 us and sends the state before
    # the step. Only then rank 1 may add what came in and send the sum on.
    assert timeline(schedule, 4000, pieces=1)[1, 2] == (Occupation(4, 8, 0, 0),)


def test_a_delivery_waits_for_the_first_link_of_what_is_still_to_be_sent() -> None:
    """What was sent into a switch has left its rank, though the switch still forwards it."""
    links = [(0, 3, 4, "0"), (1, 3, 4, "0"), (3, 0, 1, "0"), (3, 1, 4, "0"), (1, 2, 1, "0")]
    exchange = [Transfer(0, 0, 1, 0, True, via=(3,)), Transfer(0, 1, 0, 0, True, via=(3,))]
    schedule = draw(3, links, "allreduce", ["1"], [*exchange, Transfer(0, 1, 2, 1)], ["sw"])
    # us     0   1   2   3   4   5   6     4000 bytes
    # 1->sw  [ 1 ]                         rank 1's own value has left at 1 us
    # sw->1      [ 1 ]                     rank 0's comes at 2 us and may be added at once
    # sw->0      [       4       ]         which the slow way out of the switch does not hinder
    # 1->2           [       4       ]
    assert timeline(schedule, 4000, pieces=1)[1, 2] == (Occupation(2, 6, 0, 0),)


def test_steps_of_a_step_synchronous_schedule_do_not_synchronise() -> None:
    links = [(0, 1, 1, "0"), (1, 2, 1, "0"), (0, 2, 1, "0")]
    transfers = [Transfer(0, 0, 1, 0), Transfer(0, 1, 2, 1)]
    free = draw(3, links, "broadcast", ["1"], transfers)
    in_rounds = Schedule.build(
        free.topology, free.collective, free.method, free.bound, free.chunks, transfers, rounds=[3, 1]
    )
    assert timeline(in_rounds, 1000, pieces=1) == timeline(free, 1000, pieces=1)


@st.composite
def tree_schedules(
    draw_from: st.DrawFn, max_ranks: int = 6, latencies: Sequence[int] = (0, 1, 3), max_trees: int = 4
) -> Schedule:
    """A broadcast or allreduce along random trees of a full mesh, some edges through a switch."""
    ranks = draw_from(st.integers(2, max_ranks))
    dice = random.Random(draw_from(st.integers(0, 1 << 30)))
    trees = draw_from(st.integers(1, max_trees))
    kind = draw_from(st.sampled_from(["broadcast", "allreduce"]))
    links = [
        Link(a, b, Fraction(dice.choice([1, 2, 3, 4])), Fraction(dice.choice(latencies)))
        for a in range(ranks + 1)
        for b in range(ranks + 1)
        if a != b
    ]
    topology = Topology.build("random", ranks, links, ["sw"])
    transfers = []
    for tree in range(trees):
        order = [0, *dice.sample(range(1, ranks), ranks - 1)]
        depth = {0: 0}
        parent = {}
        for place, rank in enumerate(order[1:], 1):
            parent[rank] = order[dice.randrange(place)]
            depth[rank] = depth[parent[rank]] + 1
        height = max(depth.values())
        for rank, above in parent.items():
            via = (ranks,) if dice.random() < 0.3 else ()
            if kind == "allreduce":
                transfers.append(Transfer(tree, rank, above, height - depth[rank], True, via))
                transfers.append(Transfer(tree, above, rank, height + depth[rank] - 1, False, via))
            else:
                transfers.append(Transfer(tree, above, rank, depth[rank] - 1, False, via))
    weights = [dice.randint(1, 3) for _ in range(trees)]
    return Schedule.build(
        topology,
        Collective.on(topology, kind),
        Method("random"),
        Bound(Fraction(1), Cut(frozenset({0}), Fraction(1))),
        [Chunk(Fraction(weight, sum(weights)), 0) for weight in weights],
        transfers,
    )


def replay_slowly(schedule: Schedule, size: int, pieces: int) -> dict[tuple[int, int, int], Fraction]:
    """When each (transfer, hop, piece) starts, worked out in fractions by looking at everything each time."""
    transfers = schedule.transfers
    rate, latency = schedule.topology.bandwidth, schedule.topology.latency_us
    start: dict[tuple[int, int, int], Fraction] = {}

    def left(index: int, hop: int, piece: int) -> Fraction | None:
        begun = start.get((index, hop, piece))
        share = schedule.chunks[transfers[index].chunk].share
        return begun and begun + share * size / pieces / rate[transfers[index].hops[hop]] / 1000

    def arrived(index: int, hop: int, piece: int) -> Fraction | None:
        sent = left(index, hop, piece)
        return sent and sent + latency[transfers[index].hops[hop]]

    def ready(index: int, hop: int, piece: int) -> Fraction | None:
        if hop:
            return arrived(index, hop - 1, piece)
        transfer = transfers[index]
        causes = []
        deliveries = [
            (step, other)
            for other, (chunk, dst, step) in enumerate((t.chunk, t.dst, t.step) for t in transfers)
            if chunk == transfer.chunk and dst == transfer.src and step < transfer.step
        ]
        causes += [arrived(other, len(transfers[other].hops) - 1, piece) for _, other in deliveries]
        last = max((step for step, _ in deliveries), default=-1)
        causes += [  # what the last of those deliveries replaces has left
            left(other, 0, piece)
            for other, reader in enumerate(transfers)
            if reader.chunk == transfer.chunk and reader.src == transfer.src and reader.step <= last
        ]
        known = [cause for cause in causes if cause is not None]
        return max([Fraction(1), *known]) if len(known) == len(causes) else None

    # The clock starts at 1, so that no time is falsy.
    free = dict.fromkeys(rate, Fraction(1))
    todo = {
        (index, hop, piece)
        for index, transfer in enumerate(transfers)
        for hop in range(len(transfer.hops))
        for piece in range(pieces)
    }
    while todo:
        possible = []
        for index, hop, piece in todo:
            at = ready(index, hop, piece)
            if at is not None:
                link = transfers[index].hops[hop]
                order = transfers[index].step + piece
                possible.append((max(at, free[link]), order, index, hop, piece))
        begun, _, *what = min(possible)
        key = (what[0], what[1], what[2])
        start[key] = begun
        todo.remove(key)
        sent = left(*key)
        assert sent is not None
        free[transfers[key[0]].hops[key[1]]] = sent
    return {key: at - 1 for key, at in start.items()}


@settings(max_examples=60)
@given(tree_schedules(max_ranks=5, max_trees=3), st.integers(1, 3))
def test_agrees_with_a_slow_replay_in_fractions(schedule: Schedule, pieces: int) -> None:
    # Shares have denominators up to 9, rates up to 4: every time is a whole number of microseconds.
    size = 1000 * 12 * 2520 * pieces
    slow: dict[tuple[int, int], set[tuple[float, int, int]]] = {
        (link.src, link.dst): set() for link in schedule.topology.links
    }
    for (index, hop, piece), at in replay_slowly(schedule, size, pieces).items():
        transfer = schedule.transfers[index]
        slow[transfer.hops[hop]].add((float(at), transfer.chunk, piece))
    fast = timeline(schedule, size, pieces=pieces)
    assert {
        hop: {(seen.start_us, seen.chunk, seen.piece) for seen in passing} for hop, passing in fast.items()
    } == slow


@settings(max_examples=60)
@given(tree_schedules(), st.integers(1, 1 << 30), st.integers(1, 20))
def test_never_faster_than_the_rate(schedule: Schedule, size: int, pieces: int) -> None:
    timing = simulate(schedule, size, pieces=pieces)
    assert timing.time_us >= float(size / (1000 * schedule.rate)) * (1 - 1e-12)


@settings(max_examples=40)
@given(tree_schedules(), st.integers(1, 1 << 30), st.integers(1, 8))
def test_links_are_busy_for_what_they_carry_and_never_twice(
    schedule: Schedule, size: int, pieces: int
) -> None:
    for link, passing in timeline(schedule, size, pieces=pieces).items():
        busy = sum(seen.end_us - seen.start_us for seen in passing)
        load = schedule.load.get(link, Fraction(0))
        # Each passage is rounded up to a femtosecond.
        assert busy == pytest.approx(
            float(load * size / schedule.topology.bandwidth[link] / 1000), abs=2e-9 * len(passing), rel=1e-9
        )
        assert all(first.end_us <= second.start_us * (1 + 1e-12) for first, second in pairwise(passing))


@settings(max_examples=40)
@given(tree_schedules(max_trees=1), st.integers(1, 1 << 24), st.integers(1, 1 << 24), st.integers(1, 8))
def test_a_larger_message_takes_longer_along_one_tree(
    schedule: Schedule, size: int, more: int, pieces: int
) -> None:
    # Along several trees a larger message can arrive earlier: what meets at a link meets in another order.
    first, second = sweep(schedule, [size, size + more], pieces=pieces)
    assert first.time_us <= second.time_us


@settings(max_examples=40)
@given(tree_schedules(latencies=(0,)), st.integers(1, 1 << 20), st.integers(1, 8))
def test_without_latency_time_is_proportional_to_size(schedule: Schedule, size: int, pieces: int) -> None:
    small, large = sweep(schedule, [size * 27720, size * 27720 * 8], pieces=pieces)
    assert large.time_us == pytest.approx(8 * small.time_us, rel=1e-6)


@settings(max_examples=40)
@given(tree_schedules())
def test_a_byte_takes_the_longest_chain_of_latencies(schedule: Schedule) -> None:
    longest: dict[tuple[int, int], Fraction] = {}  # until the chunk is complete so far at the rank
    for step in range(schedule.steps):
        before = dict(longest)
        for transfer in schedule.transfers:
            if transfer.step == step:
                way = sum(schedule.topology.latency_us[hop] for hop in transfer.hops)
                there = (transfer.dst, transfer.chunk)
                arrival = before.get((transfer.src, transfer.chunk), Fraction(0)) + way
                longest[there] = max(longest.get(there, Fraction(0)), arrival)
    assert simulate(schedule, 1).time_us == pytest.approx(float(max(longest.values())), abs=0.05)


@settings(max_examples=20)
@given(tree_schedules())
def test_many_pieces_of_a_large_message_approach_the_rate(schedule: Schedule) -> None:
    timing = simulate(schedule, 1 << 40, pieces=1000)
    assert timing.algbw == pytest.approx(float(schedule.rate), rel=0.05)


def test_the_choice_of_pieces_grows_with_the_size_within_its_limits() -> None:
    links = [(rank, rank + 1, 1, "1") for rank in range(4)]
    schedule = draw(5, links, "broadcast", ["1"], [Transfer(0, rank, rank + 1, rank) for rank in range(4)])
    counts = [timing.pieces for timing in sweep(schedule, [1, 1 << 16, 1 << 20, 1 << 30])]
    assert counts == [1, 2, 32, 256]
    assert simulate(schedule, 1 << 20, min_piece_bytes=1 << 18).pieces == 4
    assert simulate(schedule, 1 << 30, max_pieces=7).pieces == 4


def test_the_choice_of_pieces_keeps_large_schedules_within_a_second() -> None:
    # Four chunks of five hops each: 20 hops at most 2^20 / 20 pieces, so the power of two below.
    links = [(rank, rank + 1, 1, "0") for rank in range(5)]
    transfers = [Transfer(chunk, rank, rank + 1, rank) for chunk in range(4) for rank in range(5)]
    schedule = draw(6, links, "broadcast", ["1/4"] * 4, transfers)
    assert simulate(schedule, 1 << 40, max_pieces=1 << 20).pieces == 1 << 15


def test_a_clock_for_years() -> None:
    schedule = draw(2, [(0, 1, 1, "1")], "broadcast", ["1"], [Transfer(0, 0, 1, 0)])
    slow = Topology.build("slow", 2, [Link(0, 1, Fraction(1, 10**9), Fraction(10**6))])
    schedule = Schedule.build(
        slow, schedule.collective, schedule.method, schedule.bound, schedule.chunks, schedule.transfers
    )
    # 2^50 bytes at one byte a second, and one second on the way
    assert simulate(schedule, 1 << 50, pieces=1).time_us == pytest.approx((2.0**50 + 1) * 1e6)


def test_wrong_numbers_are_refused() -> None:
    schedule = draw(2, [(0, 1, 1, "1")], "broadcast", ["1"], [Transfer(0, 0, 1, 0)])
    with pytest.raises(InputError, match="size 0: must be from 1 byte"):
        simulate(schedule, 0)
    with pytest.raises(InputError, match="pieces 0: must be at least 1"):
        simulate(schedule, 1, pieces=0)
    with pytest.raises(InputError, match="pieces -1: must be at least 1"):
        timeline(schedule, 1, pieces=-1)
    with pytest.raises(InputError, match="min_piece_bytes 0: must be at least 1"):
        simulate(schedule, 1, min_piece_bytes=0)
    with pytest.raises(InputError, match="max_pieces 0: must be at least 1"):
        simulate(schedule, 1, max_pieces=0)
