"""Switches that add and multicast: closed forms on drawn fabrics, and laws over random trees."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.certificate import Bound, Cut
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.simulation.service import Service
from arborcast.synth.simulation.simulator import (
    FRAME_BYTES,
    MAX_FRAMES,
    MAX_PASSAGES,
    Runs,
    frames_per_piece,
    lay_out,
    simulate,
    sweep,
    timeline,
)
from arborcast.synth.simulation.timing import Occupation
from arborcast.synth.topology import Link, Switch, Topology
from tests.support.drawn_implicit import of_orbits
from tests.support.drawn_in_network import TURNS, drawn_transfers

BOUND = Bound(Fraction(1), Cut(frozenset({0}), Fraction(1)))  # not used here
METHOD = Method("drawn")


def able(name: str = "s", **limits: Any) -> Switch:
    return replace(TURNS, name=name, **limits)


def duplex(pairs: Iterable[tuple[int, int, int | str, int]]) -> list[Link]:
    """Links both ways for (end, end, GB/s, us)."""
    return [
        Link(*ends, Fraction(rate), Fraction(latency))
        for one, other, rate, latency in pairs
        for ends in ((one, other), (other, one))
    ]


def turning(parents: dict[int, int], ranks: int, chunk: int = 0) -> list[Transfer]:
    """An allreduce of one chunk up a tree to its root and down again; `parents` of all other vertices."""

    def depth(vertex: int) -> int:
        return depth(parents[vertex]) + 1 if vertex in parents else 0

    height = max(map(depth, parents))
    up = [Transfer(chunk, one, above, height - depth(one), True) for one, above in parents.items()]
    down = [Transfer(chunk, above, one, height + depth(one) - 1) for one, above in parents.items()]
    return up + down


def allreduce(topology: Topology, shares: Sequence[str], transfers: Iterable[Transfer]) -> Schedule:
    chunks = [Chunk(Fraction(share), 0) for share in shares]
    return Schedule.build(topology, Collective.on(topology, "allreduce"), METHOD, BOUND, chunks, transfers)


def star(ranks: int, switch: Switch, rate: int | str = 1, latency: int = 1) -> Topology:
    shift = [[*range(1, ranks), 0, ranks]]
    links = duplex((rank, ranks, rate, latency) for rank in range(ranks))
    return Topology.build("star", ranks, links, [switch], shift)


def star_allreduce(ranks: int, switch: Switch, rate: int | str = 1, latency: int = 1) -> Schedule:
    """One chunk that the switch adds and turns."""
    tree = dict.fromkeys(range(ranks), ranks)
    return allreduce(star(ranks, switch, rate, latency), ["1"], turning(tree, ranks))


@pytest.mark.parametrize("pieces", [1, 5, 20])
@pytest.mark.parametrize(
    ("limits", "frames", "us"),
    [
        # 100 frames of 1000 bytes at 1 GB/s: a frame takes 1 us on a link, a latency 1 us.
        ({}, 1, 100 + 1 + 2),
        ({}, 5, 100 + 5 + 2),  # a switch that waits for five frames
        ({"latency_us": Fraction(3)}, 1, 100 + 1 + 3 + 2),
        ({"adder": Fraction(4)}, 1, 100 + 1 + Fraction(1, 4) + 2),  # the adder is one frame behind
        ({"adder": Fraction(1, 2)}, 1, 1 + 200 + 1 + 2),  # all else waits for it
        ({"adder": Fraction(1, 2), "latency_us": Fraction(3)}, 1, 1 + 200 + 1 + 3 + 2),
        ({"stores": True}, 1, 100 + 100 + 2),
        ({"stores": True, "latency_us": Fraction(3)}, 1, 100 + 100 + 3 + 2),
        ({"stores": True, "adder": Fraction(4)}, 1, 100 + Fraction(1, 4) + 100 + 2),
        ({"stores": True, "adder": Fraction(1, 2)}, 1, 100 + 200 + 1 + 2),
    ],
)
def test_a_star(limits: dict[str, Any], frames: int, us: float, pieces: int) -> None:
    schedule = star_allreduce(4, able(**limits))
    for service in ("priority", "fifo"):
        timing = simulate(schedule, 100_000, pieces=pieces, frame_bytes=1000 * frames, service=service)
        assert timing.time_us == pytest.approx(float(us), abs=1e-6)


def test_frames_have_4096_bytes_unless_said() -> None:
    schedule = star_allreduce(4, able())
    for frames in (1, 5):
        us = frames * 4.096 + 4.096 + 2  # a frame behind on the way down, and two latencies
        assert simulate(schedule, frames * 4096, pieces=1).time_us == pytest.approx(us, abs=1e-6)
    halves = 4.097 * (1 + 1 / 2) + 2  # of one byte more than a frame has
    assert simulate(schedule, 4097, pieces=1).time_us == pytest.approx(halves, abs=1e-6)


def test_what_a_switch_does_when() -> None:
    schedule = star_allreduce(2, able(adder=Fraction(1, 2), latency_us=Fraction(3)))
    # us     0   1   2   3   4   5   6   7   8   9  10  11  12      frames of 1000 bytes
    # r->s   [ 0 ][ 1 ]                                             there at 2 and 3
    # adder          [   0   ][   1   ]                             out of the switch at 7 and 9
    # s->r                                [ 0 ]    [ 1 ]            there at 9 and 11
    up, down = (
        (Occupation(0, 1, 0, 0), Occupation(1, 2, 0, 0)),
        (Occupation(7, 8, 0, 0), Occupation(9, 10, 0, 0)),
    )
    assert timeline(schedule, 2000, pieces=1, frame_bytes=1000) == {
        (0, 2): up,
        (1, 2): up,
        (2, 0): down,
        (2, 1): down,
        (2, 2): (Occupation(2, 4, 0, 0), Occupation(4, 6, 0, 0)),
    }


@pytest.mark.parametrize("uplink", [4, 1, "1/2"])
def test_the_slowest_link_of_a_way_sets_its_pace(uplink: int | str) -> None:
    """Two stars of two below a third switch: what is fast in between keeps nothing back."""
    tree = {0: 5, 1: 5, 2: 6, 3: 6, 5: 4, 6: 4}
    links = duplex((one, above, uplink if one > 3 else 1, 1) for one, above in tree.items())
    topology = Topology.build("levels", 4, links, [able("top"), able("left"), able("right")])
    schedule = allreduce(topology, ["1"], turning(tree, 4))
    # 100 frames on the slowest link, one on each of the three others, and four latencies.
    frame = 1 / Fraction(uplink)
    us = 100 * max(frame, Fraction(1)) + 1 + 2 * frame + min(frame, Fraction(1)) - frame + 4
    assert frame != 1 or us == 100 + 3 + 4
    assert simulate(schedule, 100_000, frame_bytes=1000).time_us == pytest.approx(float(us), abs=1e-6)


def test_a_switch_that_does_not_turn() -> None:
    """Rank 0 gets the sum of the others, adds its own piece by piece, and the switch multicasts it."""
    switch = Switch("s", reduces=True, multicasts=True)
    moves = [Transfer(0, rank, 4, 0, True) for rank in (1, 2, 3)] + [Transfer(0, 4, 0, 1, True)]
    moves += [Transfer(0, 0, 4, 2)] + [Transfer(0, 4, rank, 3) for rank in (1, 2, 3)]
    schedule = allreduce(star(4, switch), ["1"], moves)
    # A frame of 1 us behind at each passage of the switch, a piece of 20 us at the rank, four latencies.
    assert simulate(schedule, 100_000, pieces=5, frame_bytes=1000).time_us == 100 + 1 + 20 + 1 + 4


def test_what_passes_alone_is_neither_stored_nor_late() -> None:
    """An ability is used for sums and multicasts; one input to one output is forwarded."""
    switch = able(adder=Fraction(1, 2), latency_us=Fraction(7), stores=True)
    for moves in (
        [Transfer(0, 0, 2, 0, True), Transfer(0, 2, 1, 1, True), Transfer(0, 1, 0, 2, via=(2,))],
        [Transfer(0, 0, 1, 0, True, via=(2,)), Transfer(0, 1, 2, 1), Transfer(0, 2, 0, 2)],
    ):
        schedule = allreduce(star(2, switch), ["1"], moves)
        # There at 2 + 100 + 1 us, a frame behind; rank 1 has all of it then, and back it takes as long.
        assert simulate(schedule, 100_000, pieces=1, frame_bytes=1000).time_us == 2 * 103


def test_sums_share_the_adder() -> None:
    switch = able(adder=Fraction(1))
    tree = [transfer for chunk in (0, 1) for transfer in turning(dict.fromkeys(range(3), 3), 3, chunk)]
    schedule = allreduce(star(3, switch, 2, 0), ["3/4", "1/4"], tree)
    seen = timeline(schedule, 8000, pieces=2, frame_bytes=3000)[3, 3]
    # Pieces of 3000 and 1000 bytes come after 1.5 and 0.5 us of the links, and take 3 and 1 us of the adder.
    assert [(one.start_us, one.end_us, one.chunk, one.piece) for one in seen] == [
        (1.5, 4.5, 0, 0),
        (4.5, 5.5, 1, 0),
        (5.5, 8.5, 0, 1),
        (8.5, 9.5, 1, 1),
    ]
    # A link carries the frames of a piece one after the other, planned or handed over in turn.
    for service in ("priority", "engine", "engine-priority"):
        up = timeline(schedule, 8000, pieces=2, frame_bytes=1500, service=service)[0, 3]
        assert [(one.chunk, one.piece) for one in up] == [
            (chunk, piece) for piece in (0, 1) for chunk in (0, 1) for _ in range(2)
        ]


@pytest.mark.parametrize(
    ("steps", "adds", "sent"),
    [
        (["0>4:0+ 1>4:0+", "4>2:0"], [(1, 3)], [6]),
        (["0>4:0+", "1>4:0+", "2>4:0+", "4>2:0"], [(1, 3)], [6]),  # once for all, however late one comes
        (["0>4:0", "1>4:0+", "4>2:0"], [(1, 3)], [6]),  # a copy, and what is added to it
        (["0>4:0+", "1>4:0", "4>2:0"], [], [1]),  # a copy in place of what was there
        (["0>4:0+ 1>4:0+", "2>4:0", "4>2:0"], [], [1]),
        (["0>4:0", "4>1:0 4>2:0"], [], [4, 4]),  # a multicast takes the latency alone
        (["0>4:0+ 1>4:0+", "4>1:0 4>2:0"], [(1, 3)], [6, 6]),
        (["0>4:0+ 1>4:0+", "4>0:0", "4>2:0"], [(1, 3)], [6, 6]),
        (
            ["0>4:0+", "4>2:0", "1>4:0+", "4>2:0"],
            [(2, 4)],
            [1, 7],
        ),  # what was alone has left before it is added to
        (["0>4:0", "4>2:0", "1>4:0", "4>2:0"], [], [1, 2]),  # a copy waits until the one before has left
        (["0>4:0+ 1>4:0+"], [], []),  # nobody asks for the sum
    ],
)
def test_what_takes_time_in_one_of_two_switches(
    steps: list[str], adds: list[tuple[int, int]], sent: list[int]
) -> None:
    """Of 1000 bytes, 1 us on a link: adding takes 2 us, and it or a multicast a latency of 3 us more."""
    links = duplex((rank, switch, 1, 0) for rank in range(3) for switch in (3, 4))
    limits = [(Fraction(1, 7), Fraction(11)), (Fraction(1, 2), Fraction(3))]
    for which, switches in ((4, limits), (3, limits[::-1])):
        ones = [able(f"s{adder}", adder=adder, latency_us=late) for adder, late in switches]
        moves = drawn_transfers([step.replace("4", str(which)) for step in steps])
        schedule = allreduce(Topology.build("two", 3, links, ones), ["1"], moves)
        seen = timeline(schedule, 1000, pieces=1, frame_bytes=1000)
        assert [(one.start_us, one.end_us) for one in seen[which, which]] == adds
        assert not seen[7 - which, 7 - which]
        assert sorted(one.start_us for rank in range(3) for one in seen[which, rank]) == sent


def test_a_switch_does_not_wait_for_what_it_sends_later() -> None:
    links = [*duplex([(0, 3, 1, 0), (1, 3, 1, 0)]), Link(2, 3, Fraction(1, 10))]
    fabric = Topology.build("slow", 3, links, [able()])
    moves = drawn_transfers(["0>3:0 2>3:1", "", "", "3>1:0", "3>1:1"])
    schedule = allreduce(fabric, ["1/2", "1/2"], moves)
    seen = timeline(schedule, 2000, pieces=1, frame_bytes=1000, service=Service(ahead=2))[3, 1]
    # Chunk 1 is there after 10 us; a rank would send nothing of step 3 before.
    assert seen == (Occupation(1, 2, 0, 0), Occupation(10, 11, 1, 0))


def test_frames_are_of_switches_that_are_able_or_asked_for() -> None:
    plain = Topology.build("plain", 2, duplex([(0, 2, 1, 0), (1, 2, 1, 0)]), ["s"])
    schedule = allreduce(plain, ["1"], [Transfer(0, 0, 1, 0, True, (2,)), Transfer(0, 1, 0, 1, via=(2,))])
    assert simulate(schedule, 100_000, pieces=1).time_us == 400
    assert simulate(schedule, 100_000, pieces=1, frame_bytes=1000).time_us == 2 * 101
    one = star_allreduce(2, able(), latency=0)
    assert (
        simulate(one, 100 * FRAME_BYTES).time_us == simulate(one, 100 * FRAME_BYTES, frame_bytes=4096).time_us
    )
    # A run has so many passages at most, whatever it is cut into: of 512 chunks, 2048 hops.
    trees = [move for chunk in range(512) for move in turning({0: 2, 1: 2}, 2, chunk)]
    hops = lay_out(allreduce(star(2, able()), ["1/512"] * 512, trees))
    frames = [frames_per_piece(hops, 1 << 40, pieces) for pieces in (1, 2, 1000)]
    assert frames == [MAX_PASSAGES // 2048, MAX_PASSAGES // 4096, 1]
    # A chunk has so many frames at most.
    size = 1 << 30
    for pieces in (1, 8):
        late = simulate(one, size, pieces=pieces).time_us / (size / 1000) - 1
        assert late == pytest.approx(1 / MAX_FRAMES)


def test_a_rank_that_waits_for_what_is_stored_is_refused() -> None:
    schedule = star_allreduce(2, able(stores=True))
    with pytest.raises(InputError, match=r"service engine: .* switch s, which stores whole chunks"):
        simulate(schedule, 1 << 20, service="engine")
    # Where frames are passed on, it takes as long as without waiting, as in `test_a_star`.
    passing = star_allreduce(2, able())
    assert simulate(passing, 100_000, pieces=5, frame_bytes=1000, service="engine").time_us == 100 + 1 + 2
    with pytest.raises(InputError, match="frame_bytes 0: must be at least 1"):
        simulate(schedule, 1 << 20, frame_bytes=0)


@st.composite
def switch_trees(
    draw_from: st.DrawFn, most_trees: int = 3, latencies: Sequence[int] = (0, 1, 3), *, limits: bool = True
) -> Schedule:
    """Allreduces along random trees of ranks and switches that turn, over a full mesh of both."""
    ranks, switches = draw_from(st.integers(2, 5)), draw_from(st.integers(1, 3))
    dice = random.Random(draw_from(st.integers(0, 1 << 30)))
    size = ranks + switches
    links = [
        Link(one, other, Fraction(dice.randint(1, 4)), Fraction(dice.choice(latencies)))
        for one in range(size)
        for other in range(size)
        if one != other
    ]
    bounds = [
        {
            "adder": dice.choice([None, Fraction(dice.randint(1, 4))]),
            "latency_us": Fraction(dice.choice(latencies)),
        }
        for _ in range(switches)
    ]
    topology = Topology.build(
        "random", ranks, links, [able(f"s{n}", **(one if limits else {})) for n, one in enumerate(bounds)]
    )
    transfers = []
    trees = draw_from(st.integers(1, most_trees))
    for chunk in range(trees):
        order = dice.sample(range(size), size)
        parents = {one: order[dice.randrange(place)] for place, one in enumerate(order[1:], 1)}
        while idle := [one for one in parents if one >= ranks and one not in parents.values()]:
            del parents[idle[0]]  # a switch at which nothing begins
        transfers += turning(parents, ranks, chunk)
    weights = [dice.randint(1, 3) for _ in range(trees)]
    return allreduce(topology, [f"{weight}/{sum(weights)}" for weight in weights], transfers)


def limit(schedule: Schedule) -> Fraction:
    """GB/s that links and adders allow."""
    rate = schedule.rate
    topology = schedule.topology
    for vertex, switch in enumerate(topology.switches, topology.ranks):
        added = [one.chunk for one in schedule.transfers if one.reduce and one.dst == vertex]
        share = sum(schedule.chunks[chunk].share for chunk in set(added) if added.count(chunk) > 1)
        if switch.adder and share:
            rate = min(rate, switch.adder / share)
    return rate


SERVICES = ["priority", "fifo", "random:1", "engine", "engine-random:2"]


@settings(max_examples=60, deadline=None)
@given(switch_trees(), st.integers(1, 1 << 28), st.integers(1, 9), st.sampled_from(SERVICES), st.booleans())
def test_never_faster_than_links_and_adders(
    schedule: Schedule, size: int, pieces: int, service: str, stores: bool
) -> None:
    if stores and not service.startswith("engine"):
        switches = [replace(one, stores=True) for one in schedule.topology.switches]
        schedule = replace(schedule, topology=replace(schedule.topology, switches=tuple(switches)))
    timing = simulate(schedule, size, pieces=pieces, service=service)
    assert timing.time_us >= float(size / (1000 * limit(schedule))) * (1 - 1e-12)


@settings(max_examples=20, deadline=None)
@given(switch_trees())
def test_a_large_message_approaches_the_rate(schedule: Schedule) -> None:
    timing = simulate(schedule, 1 << 40, pieces=1000)
    assert timing.algbw == pytest.approx(float(limit(schedule)), rel=0.05)


@settings(max_examples=40, deadline=None)
@given(switch_trees(limits=False), st.integers(1, 1 << 24), st.integers(1, 5), st.sampled_from(SERVICES[:3]))
def test_with_whole_pieces_a_switch_without_limits_is_a_relay(
    schedule: Schedule, size: int, pieces: int, service: str
) -> None:
    topology = schedule.topology
    relays = replace(schedule, topology=replace(topology, ranks=topology.size, switches=()))
    with_switches, with_relays = (
        timeline(one, size, pieces=pieces, service=service, frame_bytes=1 << 24) for one in (schedule, relays)
    )
    assert with_switches == with_relays


@settings(max_examples=40, deadline=None)
@given(switch_trees(most_trees=1), st.integers(1, 1 << 24), st.integers(1, 5), st.integers(0, 2))
def test_what_a_switch_can_do_better_costs_no_time_along_one_tree(
    schedule: Schedule, size: int, pieces: int, which: int
) -> None:
    topology = schedule.topology
    switches = list(topology.switches)
    was = switches[which % len(switches)]
    adder = was.adder and was.adder * 2
    switches[which % len(switches)] = replace(was, adder=adder)
    stored = tuple(replace(one, stores=True) for one in topology.switches)
    better, given_, worse = (
        simulate(replace(schedule, topology=replace(topology, switches=tuple(ones))), size, pieces=pieces)
        for ones in (switches, topology.switches, stored)
    )
    assert better.time_us <= given_.time_us <= worse.time_us


@pytest.mark.parametrize(
    "limits", [{}, {"latency_us": Fraction(2)}, {"adder": Fraction(1, 2)}, {"stores": True}]
)
def test_one_representative_of_each_orbit(limits: dict[str, Any]) -> None:
    """Four chunks that all ranks send through one switch, by one of them."""
    topology = star(4, able(**limits))
    tree = turning(dict.fromkeys(range(4), 4), 4)
    orbit = of_orbits(topology, Kind.ALLREDUCE, [Chunk(Fraction(1, 4), 0)], tree, limit=BOUND)
    whole = orbit.expand()
    assert Runs(whole).effort == 4 * Runs(orbit).effort  # a switch that is able is no place for images
    for one, other in zip(
        sweep(orbit, [4_000, 40_000], pieces=1, frame_bytes=1000),
        sweep(whole, [4_000, 40_000], pieces=1, frame_bytes=1000),
        strict=True,
    ):
        # The frames of four chunks, 2 us each, pass the adder as one; written out, one after the other.
        apart = 4 * 2 if "adder" in limits else 1e-6
        assert one.time_us == pytest.approx(other.time_us, abs=apart)
    seen, there = (timeline(one, 40_000, pieces=1, frame_bytes=1000) for one in (orbit, whole))
    if "adder" in limits:
        assert sum(one.end_us - one.start_us for one in seen[4, 4]) == pytest.approx(80)
        assert {(one.chunk, one.piece) for one in seen[4, 4]} == {
            (one.chunk, one.piece) for one in there[4, 4]
        }
    assert ((4, 4) in seen) == ((4, 4) in there) == ("adder" in limits)
