from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth.api import approach
from arborcast.synth.certificate import Bound, Cut
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline, run_until
from arborcast.synth.errors import InputError, TimedOutError, TopologyError
from arborcast.synth.formats.sizes import LARGEST_SIZE
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.simulation import simulator
from arborcast.synth.simulation.service import Service
from arborcast.synth.simulation.simulator import Runs, lay_out, simulate, sweep, timeline
from arborcast.synth.simulation.timing import Occupation
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Link, Topology
from tests.support.drawn_implicit import circulant, translated


def draw(
    ranks: int,
    links: Iterable[tuple[int, int, int | str | Fraction, str | Fraction]],
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
    for frame_bytes in (None, 100):  # frames are of what passes switches
        assert timeline(schedule, 4000, pieces=2, frame_bytes=frame_bytes) == {
            (0, 1): (Occupation(0, 2, 0, 0), Occupation(2, 4, 0, 1)),
            (1, 2): (Occupation(3, 5, 0, 0), Occupation(5, 7, 0, 1)),
        }
    assert simulate(schedule, 4000, pieces=1).time_us == 4 + 1 + 4 + 1
    # Left to itself it cuts into the two pieces that its limits allow, and could not be faster.
    runs = Runs(schedule, min_piece_bytes=2000)
    assert runs.choice(4000) == (2, 8)
    assert 8 * (1 - 2e-9) < runs.least_us(4000) < 8 == lay_out(schedule).least_us(4000, 2)
    # Without latencies one link is as fast with one piece as with many, which it then keeps.
    still = draw(2, [(0, 1, 1, "0")], "broadcast", ["1"], [Transfer(0, 0, 1, 0)])
    assert [seen.piece for seen in timeline(still, 1 << 20)[0, 1]] == [*range(32)]


def test_steps_of_a_step_synchronous_schedule_do_not_synchronise() -> None:
    links = [(0, 1, 1, "0"), (1, 2, 1, "0"), (0, 2, 1, "0")]
    transfers = [Transfer(0, 0, 1, 0), Transfer(0, 1, 2, 1)]
    free = draw(3, links, "broadcast", ["1"], transfers)
    in_rounds = replace(free, rounds=(3, 1))
    assert timeline(in_rounds, 1000, pieces=1) == timeline(free, 1000, pieces=1)


@st.composite
def tree_schedules(
    draw_from: st.DrawFn,
    max_ranks: int = 6,
    max_trees: int = 4,
    through_switch: float = 0.3,
) -> Schedule:
    """A broadcast or allreduce along random trees of a full mesh, some edges through a switch."""
    ranks = draw_from(st.integers(2, max_ranks))
    dice = random.Random(draw_from(st.integers(0, 1 << 30)))
    trees = draw_from(st.integers(1, max_trees))
    kind = draw_from(st.sampled_from(["broadcast", "allreduce"]))
    links = [
        Link(a, b, Fraction(dice.choice([1, 2, 3, 4])), Fraction(dice.choice((0, 1, 3))))
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
            via = (ranks,) if dice.random() < through_switch else ()
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


Passage = tuple[int, int, int]  # transfer, hop, piece


def replay_slowly(
    schedule: Schedule,
    size: int,
    pieces: int,
    order: Callable[[Fraction, Passage], object] | None = None,
    *,
    ahead: int | None = None,
) -> dict[Passage, Fraction]:
    """When each (transfer, hop, piece) starts, worked out in fractions by looking at everything each time.

    Args:
        schedule: what to run.
        size: bytes of the whole buffer.
        pieces: of each chunk.
        order: what a link serves first has the least; given since when it waits and what it is. None is the
            order of step + piece.
        ahead: as `synth.simulation.service.Service.ahead`.
    """
    transfers = schedule.transfers
    rate, latency = schedule.topology.bandwidth, schedule.topology.latency_us
    start: dict[Passage, Fraction] = {}

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

    every = [
        (index, hop, piece)
        for index, transfer in enumerate(transfers)
        for hop in range(len(transfer.hops))
        for piece in range(pieces)
    ]

    def planned(what: Passage) -> tuple[int, int, int]:
        return transfers[what[0]].step + what[2], what[0], what[1]

    def held(what: Passage) -> Fraction | None:
        """Since when its sender holds it back no more: its turn has come, and what is due has."""
        assert ahead is not None
        index, hop, _ = what
        ends = transfers[index].src, transfers[index].dst
        lane = [
            other
            for other in every
            if (transfers[other[0]].src, transfers[other[0]].dst) == ends
            and transfers[other[0]].hops[other[1]] == transfers[index].hops[hop]
            and planned(other) < planned(what)
        ]
        causes: list[Fraction | None] = [start.get(other) for other in lane]
        if hop == 0:
            causes += [
                arrived(*other)
                for other in every
                if transfers[other[0]].dst == ends[0]
                and other[1] == len(transfers[other[0]].hops) - 1
                and planned(other)[0] <= planned(what)[0] - ahead
            ]
        known = [cause for cause in causes if cause is not None]
        return max([Fraction(1), *known]) if len(known) == len(causes) else None

    begun: dict[tuple[int, int], Fraction] = {}  # transfer and piece: since when it holds its streams
    streams = schedule.topology.streams

    def may_begin(index: int, piece: int) -> Fraction | None:
        """When a message is there and both its ends have a stream left, as far as is known."""
        at = ready(index, 0, piece)
        for end in ("src", "dst"):
            limit = streams[getattr(transfers[index], end)]
            others = [
                left(other, len(transfers[other].hops) - 1, part)
                for other, part in begun
                if getattr(transfers[other], end) == getattr(transfers[index], end)
            ]
            if at is None or limit is None or len(others) < limit:
                continue
            ended = sorted(time for time in others if time is not None)
            going = len(others) - len(ended)
            at = None if going >= limit else max(at, ended[len(others) - limit])
        return at

    # The clock starts at 1, so that no time is falsy.
    free = dict.fromkeys(rate, Fraction(1))
    todo = set(every)
    while todo:
        possible = []
        for asks in (what for what in todo if streams and what[1] == 0):
            there, at = ready(*asks), may_begin(asks[0], asks[2])
            if (asks[0], asks[2]) not in begun and at is not None and there is not None:
                possible.append((at, 0, order(there, asks) if order else 0, planned(asks), asks))
        for what in todo:
            at = since = begun.get((what[0], what[2])) if streams and what[1] == 0 else ready(*what)
            if at is not None and ahead is not None:
                turn = held(what)
                at = None if turn is None else max(at, turn)
                since = since if what[1] else at
            if at is not None and since is not None:
                begin = max(at, free[transfers[what[0]].hops[what[1]]])
                possible.append((begin, 1, order(since, what) if order else 0, planned(what), what))
        # All orders of one run are of one type.
        begin, starts, _, _, what = min(possible)  # type: ignore[type-var]
        if not starts:  # of all that happens at a time, messages take their streams first
            begun[what[0], what[2]] = begin
            continue
        start[what] = begin
        todo.remove(what)
        sent = left(*what)
        assert sent is not None
        free[transfers[what[0]].hops[what[1]]] = sent
    return {key: at - 1 for key, at in start.items()}


@pytest.mark.parametrize("service", ["priority", "fifo", "engine-priority", "engine"])
@settings(max_examples=40, deadline=None)
@given(schedule=tree_schedules(max_ranks=5, max_trees=3), pieces=st.integers(1, 3))
def test_agrees_with_a_slow_replay_in_fractions(service: str, schedule: Schedule, pieces: int) -> None:
    size = whole_times(pieces)
    first_come = (lambda since, _: since) if service in ("fifo", "engine") else None
    ahead = 2 if service.startswith("engine") else None
    slow = replay_slowly(schedule, size, pieces, first_come, ahead=ahead)
    fast = timeline(schedule, size, pieces=pieces, service=replace(Service.of(service), ahead=ahead))
    assert of_links(fast) == passing(schedule, slow)


@settings(max_examples=40, deadline=None)
@given(tree_schedules(max_ranks=5, max_trees=3, through_switch=0), st.integers(1, 3), st.integers(0, 99))
def test_a_random_order_is_an_order(schedule: Schedule, pieces: int, seed: int) -> None:
    """A link that serves in the drawn order, and is never idle while something waits, does the same."""
    size = whole_times(pieces)
    drawn = timeline(schedule, size, pieces=pieces, service=f"random:{seed}")
    place = {
        (hop, seen.chunk, seen.piece): number
        for hop, passages in drawn.items()
        for number, seen in enumerate(passages)
    }

    def as_drawn(_: Fraction, what: Passage) -> int:
        transfer = schedule.transfers[what[0]]
        return place[transfer.hops[what[1]], transfer.chunk, what[2]]

    assert of_links(drawn) == passing(schedule, replay_slowly(schedule, size, pieces, as_drawn))


def whole_times(pieces: int) -> int:
    """Shares have denominators up to 9, rates up to 4: every time is a whole number of microseconds."""
    return 1000 * 12 * 2520 * pieces


Seen = dict[tuple[int, int], set[tuple[float, int, int]]]


def of_links(occupations: Mapping[tuple[int, int], Iterable[Occupation]]) -> Seen:
    return {
        hop: {(seen.start_us, seen.chunk, seen.piece) for seen in passages}
        for hop, passages in occupations.items()
    }


def passing(schedule: Schedule, starts: Mapping[Passage, Fraction]) -> Seen:
    found: Seen = {(link.src, link.dst): set() for link in schedule.topology.links}
    for (index, hop, piece), at in starts.items():
        transfer = schedule.transfers[index]
        found[transfer.hops[hop]].add((float(at), transfer.chunk, piece))
    return found


@settings(max_examples=100)
@given(
    tree_schedules(),
    st.integers(1, 1 << 30),
    st.integers(1, 20),
    st.sampled_from(["priority", "fifo", "random:1", "engine", "engine-random:2"]),
)
def test_never_faster_than_the_rate(schedule: Schedule, size: int, pieces: int, service: str) -> None:
    timing = simulate(schedule, size, pieces=pieces, service=service)
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


def test_the_choice_of_pieces_grows_with_the_size_within_its_limits() -> None:
    links = [(rank, rank + 1, 1, "1") for rank in range(4)]
    schedule = draw(5, links, "broadcast", ["1"], [Transfer(0, rank, rank + 1, rank) for rank in range(4)])
    counts = [timing.pieces for timing in sweep(schedule, [1, 1 << 16, 1 << 20, 1 << 30])]
    assert counts == [1, 2, 32, 256]
    assert simulate(schedule, 1 << 20, min_piece_bytes=1 << 18).pieces == 4
    assert simulate(schedule, 1 << 30, max_pieces=7).pieces == 4


def test_the_choice_of_pieces_keeps_large_schedules_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Runs(chain(5, chunks=4), max_pieces=1 << 20).most_pieces(1 << 40) == 1 << 15
    quarters = Runs(chain(5, chunks=4), min_piece_bytes=1000)
    assert [quarters.most_free_pieces(size) for size in (15_999, 16_000)] == [2, 4]
    # By hand with 60 passages a run: as many pieces as a power of two allows, or a message's cost.
    monkeypatch.setattr(simulator, "MAX_PASSAGES", 60)
    for hops, chunks, free, costing in ((1, 1, 32, 60), (5, 4, 2, 3), (7, 9, 1, 1)):
        schedule = chain(hops, chunks)
        assert Runs(schedule).most_pieces(1 << 40) == Runs(schedule).most_free_pieces(1 << 40) == free
        dear = replace(schedule, topology=replace(schedule.topology, message_us=Fraction(1)))
        assert Runs(dear).most_pieces(1 << 40) == costing
    # Of representatives each hop is played once; written out, each of its five images counts.
    form = translated(circulant(5, {1: 1, 2: 2}), Kind.ALLGATHER)
    whole = form.expand()
    of_all = replace(whole)  # which forgets its representatives
    runs = [Runs(form), Runs(whole), Runs(of_all)]
    assert [each.effort for each in runs] == [4, 4, 20]
    assert [each.most_pieces(1 << 40) for each in runs] == [8, 2, 2]
    assert Runs(whole, frame_bytes=100).effort == 20
    # In a random order images do not do the same at the same time.
    whole = translated(circulant(5, {1: 1, 2: 2}), Kind.ALLREDUCE).expand()
    times = [simulate(each, 10000, pieces=2, service="random:0") for each in (whole, replace(whole))]
    assert times[0] == times[1]


def test_representatives_are_not_played_where_their_images_meet() -> None:
    over_a_trunk = [(0, 2), (1, 2), (2, 3), (3, 0), (3, 1)]
    past_two_of_an_orbit = [(0, 3), (1, 4), (2, 5), (3, 4), (4, 5), (5, 3), (3, 0), (4, 1), (5, 2)]
    for ends, ranks, turn in ((over_a_trunk, 2, [1, 0, 2, 3]), (past_two_of_an_orbit, 3, [1, 2, 0, 4, 5, 3])):
        switches = [f"s{number}" for number in range(ranks, len(turn))]
        fabric = Topology.build("t", ranks, [Link(*pair, Fraction(1)) for pair in ends], switches, [turn])
        form = translated(fabric, Kind.ALLGATHER)
        assert Runs(form.expand()).effort == ranks * Runs(form).effort


def chain(hops: int, chunks: int) -> Schedule:
    """A broadcast of equal chunks along so many links of 1 GB/s."""
    links = [(rank, rank + 1, 1, "0") for rank in range(hops)]
    transfers = [Transfer(chunk, rank, rank + 1, rank) for chunk in range(chunks) for rank in range(hops)]
    return draw(hops + 1, links, "broadcast", [f"1/{chunks}"] * chunks, transfers)


def test_nothing_is_run_behind_the_deadline() -> None:
    with run_until(Deadline(1, 0)), pytest.raises(TimedOutError, match=r"a simulation did not .* of 1 s"):
        simulate(chain(1, 1), 1, pieces=1)


def test_as_many_pieces_as_fit_are_cut_even_where_fewer_are_faster() -> None:
    links = [(0, 1, 1, "0"), (1, 2, 4, "10")]
    moves = [Transfer(0, 0, 1, 0), Transfer(1, 0, 1, 0), Transfer(0, 1, 2, 1)]
    schedule = draw(3, links, "broadcast", ["1/2", "1/2"], moves)
    # us     0   1   2          2000 bytes: chunk 0 is sent on once it is there, and needs 10 us for that
    # 0->1   [ 0 ][ 1 ]         in pieces that take turns with those of chunk 1 it is there later
    # 1->2       [0]
    times = [simulate(schedule, 2000, pieces=pieces).time_us for pieces in (1, 2, 4)]
    assert times == [11.25, 11.625, 11.8125]
    assert Runs(schedule, min_piece_bytes=250).choice(2000) == (4, 11.8125)


def test_a_clock_for_years() -> None:
    link = (0, 1, Fraction(1, 10**9), Fraction(10**6))
    schedule = draw(2, [link], "broadcast", ["1"], [Transfer(0, 0, 1, 0)])
    # 2^50 bytes at one byte a second, and one second on the way
    assert simulate(schedule, 1 << 50, pieces=1).time_us == pytest.approx((2.0**50 + 1) * 1e6)


@pytest.mark.parametrize(("short_fs", "ticks"), [(1, 10**9), (0, 10**8)])
def test_the_clock_is_the_finest_whose_62_bits_hold_every_hop_one_after_the_other(
    short_fs: int, ticks: int
) -> None:
    # In units of 2^57 fs three bytes take 1, 1 and 18 of three links, and either piece of them 1, 1 and 4 of
    # latencies: 32 in all, which is 2^62 fs.
    unit, per_us = 1 << 57, 10**9
    links = [
        (rank, rank + 1, Fraction(3 * per_us, 1000 * unit * busy), Fraction(unit * late - short, per_us))
        for rank, busy, late, short in ((0, 1, 1, short_fs), (1, 1, 1, 0), (2, 18, 4, 0))
    ]
    schedule = draw(4, links, "broadcast", ["1"], [Transfer(0, rank, rank + 1, rank) for rank in range(3)])
    assert lay_out(schedule).play(3, 2).ticks_per_us == ticks


def test_both_forms_of_a_schedule_have_one_clock() -> None:
    form = translated(circulant(5, {1: 1}), Kind.ALLGATHER)
    # Twenty hops of a fifth of 2e12 bytes at 1 GB/s: 8e18 fs, of which four representatives have a fifth.
    for hops in (lay_out(form), lay_out(form.expand())):
        assert hops.play(2 * 10**12, 1).ticks_per_us == 10**8


def test_times_are_rounded_up_to_a_femtosecond() -> None:
    schedule = draw(2, [(0, 1, 3, "0")], "broadcast", ["1"], [Transfer(0, 0, 1, 0)])
    assert timeline(schedule, 1000, pieces=1)[0, 1] == (Occupation(0, 0.333333334, 0, 0),)


def test_of_parallel_links_each_has_its_own_latency_and_rate() -> None:
    links = [(0, 1, 2, "1"), (0, 1, 1, "5")]
    direct, beside = Transfer(0, 0, 1, 0), Transfer(1, 0, 1, 0, via=(2,))
    schedule = draw(2, links, "broadcast", ["1/2", "1/2"], [direct, beside])
    # 1000 bytes each: half a us and 1 on the way, or 1 us and 5 on the way
    assert simulate(schedule, 2000, pieces=1).time_us == 1 + 5
    assert [seen.end_us for seen in timeline(schedule, 2000, pieces=1)[0, 1]] == [0.5]


@pytest.mark.parametrize(
    ("ask", "options", "message"),
    [
        (simulate, {"size_bytes": 0}, "size 0: must be from 1 byte"),
        (simulate, {"size_bytes": LARGEST_SIZE + 1}, "must be from 1 byte to 1048576 TiB"),
        (simulate, {"pieces": 0}, "pieces 0: must be at least 1"),
        (simulate, {"min_piece_bytes": 0}, "min_piece_bytes 0: must be at least 1"),
        (simulate, {"max_pieces": 0}, "max_pieces 0: must be at least 1"),
        (timeline, {"size_bytes": 0, "pieces": 1}, "size 0: must be from 1 byte"),
        (timeline, {"pieces": -1}, "pieces -1: must be at least 1"),
    ],
)
def test_wrong_numbers_are_refused(ask: Callable[..., object], options: dict[str, int], message: str) -> None:
    schedule = chain(1, 1)
    with pytest.raises(InputError, match=message):
        ask(schedule, **{"size_bytes": 1, **options})


def test_the_largest_size_and_what_is_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = draw(2, [(0, 1, 1, "1")], "broadcast", ["1"], [Transfer(0, 0, 1, 0)])
    assert simulate(schedule, LARGEST_SIZE, pieces=1).bytes == LARGEST_SIZE
    monkeypatch.setattr("arborcast.synth.features.UNDERSTOOD", {})
    with pytest.raises(TopologyError, match="simulator does not understand link latency_us"):
        simulate(schedule, 1)


def two_ways_to_the_end() -> Schedule:
    """Three chunks of 1000 bytes to rank 2 of a chain; rank 3 hears of chunk 2 as well."""
    links = [(0, 1, 1, "0"), (1, 2, 1, "0"), (2, 3, 1, "0")]
    transfers = [Transfer(chunk, 0, 1, 0) for chunk in range(3)]
    transfers += [Transfer(chunk, 1, 2, 1) for chunk in range(3)] + [Transfer(2, 2, 3, 2)]
    return draw(4, links, "broadcast", ["1/3", "1/3", "1/3"], transfers)


def test_the_slowest_of_random_orders_is_the_slowest_of_all() -> None:
    schedule = two_ways_to_the_end()
    # us     0   1   2   3   4   5       chunk 2 goes over 0->1 first, second or last, and each time waits
    # 0->1   [ 2 ][ 0 ][ 1 ]             for one link more: the last chunk is at rank 2 at 4, and chunk 2
    # 1->2        [ 2 ][ 0 ][ 1 ]        at rank 3 at 3, 4 or 5
    # 2->3             [ 2 ]
    times = {simulate(schedule, 3000, service=f"random:{seed}").time_us for seed in range(50)}
    assert times == {4, 5}
    worst = simulate(schedule, 3000, pieces=1, service="worst:50")
    assert worst.time_us == 5
    assert simulate(schedule, 3000, pieces=1, service=worst.service or "").time_us == 5
    with pytest.raises(InputError, match="worst:2: a timeline shows one order"):
        timeline(schedule, 3000, pieces=1, service="worst:2")


def splitmix64(seed: int, count: int) -> int:
    """The top 63 bits of what the generator of Steele, Lea and Flood 2014 gives from state `seed` * 2^32."""
    mixed = (seed * 2**32 + count * 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> shift) * factor % 2**64
    return (mixed ^ mixed >> 31) // 2


def test_random_orders_are_those_that_their_seeds_draw() -> None:
    """Rank 0 sends seven chunks to each of two ranks, all ready at once; the links draw by turns."""
    # Its first numbers from state 0, as published with it.
    assert splitmix64(0, 1) == 0xE220A8397B1DCDAF // 2 and splitmix64(0, 2) == 0x6E789E6AA1B965F4 // 2
    transfers = [Transfer(chunk, 0, 2 - chunk % 2, 0) for chunk in range(14)]
    schedule = draw(3, [(0, 1, 1, "0"), (0, 2, 1, "0")], "broadcast", ["1/14"] * 14, transfers)
    for seed in (0, 1, 2, 12345):
        waiting = {2: [*range(0, 14, 2)], 1: [*range(1, 14, 2)]}
        sent: dict[int, list[int]] = {2: [], 1: []}
        for drawn in range(0, 14, 2):
            # Whose chunk comes first is served first; later on links that end at once draw in their order.
            turns = sorted(sent, key=lambda dst: dst if sent[dst] else -dst)
            for number, dst in enumerate(turns, drawn + 1):
                place = splitmix64(seed, number) % len(waiting[dst])
                sent[dst].append(waiting[dst][place])
                waiting[dst][place] = waiting[dst][-1]
                waiting[dst].pop()
        seen = timeline(schedule, 14000, pieces=1, service=f"random:{seed}")
        assert {dst: [passage.chunk for passage in seen[0, dst]] for dst in sent} == sent


def test_random_orders_keep_the_frames_of_a_piece_in_theirs() -> None:
    schedule = draw(2, [(0, 1, 1, "0")], "broadcast", ["1/5"] * 5, [Transfer(it, 0, 1, 0) for it in range(5)])
    for seed in range(4):
        waiting = [(chunk, piece, frame) for chunk in range(5) for piece in range(2) for frame in range(2)]
        sent = []
        for drawn in range(1, 21):
            place = waiting[splitmix64(seed, drawn) % len(waiting)]
            first = min(other for other in waiting if other[:2] == place[:2])
            sent.append(first)
            waiting[waiting.index(first)] = waiting[-1]
            waiting.pop()
        # A frame of 20000 bytes takes 1 us; rows are the four frames of both pieces of each chunk.
        times = lay_out(schedule).play(20000, 2, Service.of(f"random:{seed}"), frames=2)
        starts = [times.start[2 * piece + frame, chunk] for chunk, piece, frame in sent]
        assert [int(start) for start in starts] == [10**9 * at for at in range(20)]


def test_a_schedule_that_moves_nothing_takes_no_time() -> None:
    schedule = draw(2, [(0, 1, 1, "1")], "broadcast", ["1"], [])
    for service in ("priority", "fifo", "random:1", "engine"):
        for pieces in (None, 2):
            assert simulate(schedule, 1000, pieces=pieces, service=service).time_us == 0


def test_a_rank_that_sends_all_it_has_stands_in_the_way() -> None:
    # Rank 1 sends chunk 0 of its own to rank 2; what comes from rank 0 goes the same way, and on to rank 3.
    links = [(0, 1, 2, "0"), (1, 2, 1, "0"), (2, 3, 1, "0")]
    transfers = [Transfer(0, 1, 2, 0), Transfer(1, 0, 1, 0), Transfer(1, 1, 2, 1), Transfer(1, 2, 3, 2)]
    schedule = draw(4, links, "broadcast", ["1/2", "1/2"], transfers)
    # Eight pieces of 1000 bytes of each chunk. First come, first served: all of chunk 0, then all of chunk 1,
    # whose last piece leaves rank 2 behind all others. As planned, they take turns, and 2->3 is as busy.
    first_come, planned, engine = (
        simulate(schedule, 16000, pieces=8, service=service).time_us
        for service in ("fifo", "priority", "engine")
    )
    assert first_come == 8 + 8 + 1
    assert planned == engine == 16 + 1
    for service, order in (
        ("fifo", [0] * 8 + [1] * 8),
        ("priority", [0, *[0, 1] * 7, 1]),
        ("engine", [0, *[0, 1] * 7, 1]),
    ):
        assert [seen.chunk for seen in timeline(schedule, 16000, pieces=8, service=service)[1, 2]] == order


def test_what_waits_for_its_turn_at_a_switch_keeps_the_place_of_when_it_came() -> None:
    # All goes through the switch 4 to rank 3, 1000 bytes a us; chunk 0 is four times as large as each other.
    links = [(0, 4, 1, "0"), (1, 4, "1/3", "0"), (2, 4, 8, "0"), (4, 3, 1, "0")]
    moves = [Transfer(0, 2, 3, 0, via=(4,)), Transfer(1, 0, 3, 0, via=(4,)), Transfer(2, 0, 3, 0, via=(4,))]
    moves.append(Transfer(3, 1, 3, 0, via=(4,)))
    schedule = draw(4, links, "broadcast", ["4/7", "1/7", "1/7", "1/7"], moves, ["sw"])
    # 2->sw  [0]                       at 1/2 us
    # 0->sw  [  1 ][  2 ]              at 1 us and 2 us, and chunk 2 has its turn when 1 begins, at 4 1/2 us
    # 1->sw  [        3      ]         at 3 us
    # sw->3   [           0           ][  1 ][  2 ][  3 ]
    seen = timeline(schedule, 7000, pieces=1, service="engine")[4, 3]
    assert [passage.chunk for passage in seen] == [0, 1, 2, 3]


@settings(max_examples=40)
@given(tree_schedules(through_switch=0), st.integers(1, 8), st.integers(0, 9))
def test_the_engine_leaves_no_order_open_on_links_of_one_sender(
    schedule: Schedule, pieces: int, seed: int
) -> None:
    planned = timeline(schedule, 1 << 20, pieces=pieces, service="engine")
    assert timeline(schedule, 1 << 20, pieces=pieces, service=f"engine-random:{seed}") == planned
    for link, passages in planned.items():
        place = {
            transfer.chunk: (transfer.step, index)
            for index, transfer in enumerate(schedule.transfers)
            if (transfer.src, transfer.dst) == link
        }
        keys = [(place[seen.chunk][0] + seen.piece, place[seen.chunk][1]) for seen in passages]
        assert keys == sorted(keys)


@pytest.mark.parametrize(
    "text",
    [
        *("", "worst", "worst:", "worst:0", "worst:-1", "worst:100001", "worst:1000000000000"),
        *("random:1000000000", "random:x", "fifo:1", "engin"),
    ],
)
def test_services_that_there_are_not(text: str) -> None:
    with pytest.raises(InputError, match=f"service '{text}': must be"):
        Service.of(text)


@pytest.mark.parametrize(
    "text",
    [
        *("priority", "fifo", "random:0", "random:7", "random:999999999", "worst:1000", "worst:100000"),
        *("engine", "engine-worst:2"),
    ],
)
def test_services_are_written_as_they_are_read(text: str) -> None:
    assert str(Service.of(text)) == text
    assert Service.of(Service.of(text)) == Service.of(text)


def test_the_worst_of_one_order_is_a_random_one() -> None:
    assert Service.of("worst:1") == Service.of("random") == Service.of("random:0")


# The allreduce of DGX-1's ranks 0 to 5, three trees: up edges as (step, from, to), down edges the other way.
UP = (
    [(0, 4, 0), (0, 5, 1), (1, 0, 3), (1, 1, 2), (2, 3, 2)],
    [(0, 0, 3), (0, 2, 3), (0, 4, 5), (1, 3, 1), (1, 5, 1)],
    [(0, 3, 1), (0, 5, 4), (1, 1, 2), (1, 4, 0), (2, 2, 0)],
)
DOWN = (
    [(3, 2, 1), (3, 2, 3), (4, 1, 5), (4, 3, 0), (5, 0, 4)],
    [(2, 1, 3), (2, 1, 5), (3, 3, 0), (3, 3, 2), (3, 5, 4)],
    [(3, 0, 2), (3, 0, 4), (4, 2, 1), (4, 4, 5), (5, 1, 3)],
)


@pytest.fixture(scope="module")
def dgx1_fragment() -> Schedule:
    fragment = topologies.load("dgx1", ranks=range(6))
    still = [replace(link, latency_us=Fraction(0)) for link in fragment.links]
    topology = Topology.build(fragment.name, 6, still)
    transfers = [
        Transfer(tree, src, dst, step, reduce)
        for edges, reduce in ((UP, True), (DOWN, False))
        for tree, found in enumerate(edges)
        for step, src, dst in found
    ]
    return Schedule.build(
        topology,
        Collective.on(topology, "allreduce"),
        Method("drawn"),
        Bound(Fraction(125, 2), Cut(frozenset({0}), Fraction(1))),
        [Chunk(Fraction(share), owner) for share, owner in (("3/5", 2), ("1/5", 1), ("1/5", 0))],
        transfers,
    )


@pytest.mark.parametrize(
    ("pieces", "first_come", "arbitrary"),
    [(64, 235.39, 193.98), (16, 236.97, 213.91), (4, 268.43, 301.99), (1, 603.98, 637.53)],
)
def test_agrees_with_another_simulator(
    dgx1_fragment: Schedule, pieces: int, first_come: float, arbitrary: float
) -> None:
    """LogGOPSim as ATLAHS has it (8837294), a processor and a NIC per link, overheads and latency 0.

    It takes what is ready at the same time in an arbitrary order: the second figure. With its own
    `STRICT_ORDER` restored, it serves first come, first served: the first one.
    """
    assert float(dgx1_fragment.rate) == 62.5
    mib = 1 << 20
    assert simulate(dgx1_fragment, 8 * mib, pieces=pieces, service="fifo").time_us == pytest.approx(
        first_come, rel=1e-4
    )
    drawn = [
        simulate(dgx1_fragment, 8 * mib, pieces=pieces, service=f"random:{seed}").time_us
        for seed in range(60)
    ]
    assert min(drawn) <= arbitrary <= max(drawn) * 1.03
    # What the engine does takes as long as what is planned, for all that.
    engine = simulate(dgx1_fragment, 8 * mib, pieces=pieces, service="engine-worst:10").time_us
    assert engine <= 1.035 * simulate(dgx1_fragment, 8 * mib, pieces=pieces).time_us


def test_the_choice_keeps_to_the_least_piece() -> None:
    """Finer pieces are used where they are allowed, and the chosen time is that of their run."""
    times = {}
    for least in (1 << 20, 1 << 10):
        options = SolveOptions(cache=False, min_piece_bytes=least)
        found = replace(
            approach(topologies.load("dgx-a100"), "allreduce", options=options).selection(), priced=False
        )
        assert found.least_piece == least
        best = found.fastest(256 << 10)
        times[least] = simulate(best, 256 << 10, min_piece_bytes=least).time_us
        assert found.prices.best_known(256 << 10) == found.schedules.index(best)
    assert times[1 << 10] < times[1 << 20]
