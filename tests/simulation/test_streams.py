"""Ranks that send, and receive, so many messages at once: runs against a slow replay, and by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.api import solve
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError, ScheduleError
from arborcast.synth.schedule import Schedule, Transfer
from arborcast.synth.selection import ENOUGH_FRAMES
from arborcast.synth.simulation.service import Service
from arborcast.synth.simulation.simulator import (
    HELD_FRAMES,
    MAX_FRAMES,
    Runs,
    frames_per_piece,
    lay_out,
    simulate,
    timeline,
)
from arborcast.synth.simulation.timing import Occupation
from arborcast.topologies import load
from tests.simulation.test_simulator import (
    chain,
    draw,
    of_links,
    passing,
    replay_slowly,
    tree_schedules,
    whole_times,
)
from tests.support.drawn_implicit import circulant, translated

LIMITS = st.lists(st.sampled_from([1, 1, 2, 3, None]), min_size=6, max_size=6)
WHOLE_PIECES = 1 << 40
"""Bytes of a frame: as much as a piece, so that switches have all of it before they pass it on."""


def with_streams(schedule: Schedule, limits: Sequence[int | None]) -> Schedule:
    """The schedule where ranks have the first of some limits."""
    topology = schedule.topology
    return replace(schedule, topology=replace(topology, streams=tuple(limits[: topology.ranks])))


@pytest.mark.parametrize("service", ["priority", "fifo"])
@pytest.mark.few(12)
@settings(max_examples=100, deadline=None)
@given(tree_schedules(max_ranks=5, max_trees=3), LIMITS, st.integers(1, 3))
def test_agrees_with_a_slow_replay_in_fractions(
    service: str, schedule: Schedule, limits: Sequence[int | None], pieces: int
) -> None:
    limited, size = with_streams(schedule, limits), whole_times(pieces)
    slow = replay_slowly(limited, size, pieces, (lambda since, _: since) if service == "fifo" else None)
    fast = timeline(limited, size, pieces=pieces, service=service, frame_bytes=WHOLE_PIECES)
    assert of_links(fast) == passing(limited, slow)


@pytest.mark.few(20)
@settings(max_examples=60, deadline=None)
@given(
    tree_schedules(max_ranks=5, max_trees=3),
    LIMITS,
    st.integers(1, 3),
    st.sampled_from(["priority", "fifo", "random:5"]),
    st.sampled_from([None, 300]),
)
def test_no_rank_has_more_messages_under_way_than_streams(
    schedule: Schedule, limits: Sequence[int | None], pieces: int, service: str, frame_bytes: int | None
) -> None:
    """Looked at whenever one begins; and all arrive, no sooner than links and streams allow."""
    limited, size = with_streams(schedule, limits), 1 << 16
    hops = lay_out(limited)
    frames = frames_per_piece(hops, size, pieces, frame_bytes)
    run = hops.play(size, pieces, Service.of(service), frames=frames)
    assert (run.start >= 0).all()
    starts = run.start.reshape(pieces, frames, -1)
    begin, end, first = starts.min(axis=1), starts.max(axis=1) + run.duration, hops.layout.first_hop
    messages = [
        (begin[piece, first[index]], end[piece, first[index + 1] - 1], transfer)
        for index, transfer in enumerate(limited.transfers)
        for piece in range(pieces)
    ]
    for now, _, _ in messages:
        under_way = [transfer for since, until, transfer in messages if since <= now < until]
        for rank, limit in enumerate(limited.topology.streams):
            assert limit is None or sum(transfer.src == rank for transfer in under_way) <= limit
            assert limit is None or sum(transfer.dst == rank for transfer in under_way) <= limit
    assert run.time_us * (1 + 1e-9) >= size / 1000 / float(limited.rated().rate)


@pytest.mark.few(10)
@settings(max_examples=20)
@given(tree_schedules(through_switch=0), st.integers(1, 3))
def test_as_many_streams_as_messages_change_nothing(schedule: Schedule, pieces: int) -> None:
    enough = pieces * len(schedule.transfers)
    limited = with_streams(schedule, [enough] * schedule.topology.ranks)
    assert timeline(limited, 5000, pieces=pieces) == timeline(schedule, 5000, pieces=pieces)
    assert limited.rated().rate == schedule.rate


def test_a_rank_of_one_stream_sends_one_message_after_the_other() -> None:
    links = [(0, 1, 1, "0.5"), (0, 2, 1, "0.5"), (3, 2, 1, "0")]
    moves = [Transfer(0, 0, 1, 0), Transfer(0, 0, 2, 0), Transfer(1, 3, 2, 0)]
    schedule = draw(4, links, "broadcast", ["1/2", "1/2"], moves)
    # us     0   1   2   3
    # 0->1   [ 1 ]                rank 0 has one stream: first the first of the transfers
    # 0->2       [ 1 ]            rank 2 has one stream, too, and the last message was first to take it
    # 3->2   [ 1 ]
    one = with_streams(schedule, [1, 1, 1, 1])
    assert timeline(one, 2000, pieces=1) == {
        (0, 1): (Occupation(0, 1, 0, 0),),
        (0, 2): (Occupation(1, 2, 0, 0),),
        (3, 2): (Occupation(0, 1, 1, 0),),
    }
    assert simulate(one, 2000, pieces=1).time_us == 2.5
    assert simulate(with_streams(schedule, [2, 1, 2, 1]), 2000, pieces=1).time_us == 1.5


def test_who_waits_behind_a_slow_link_sends_nothing_else() -> None:
    """Ranks 1 and 0 send to 2 over a link of 1 GB/s behind the switch; 0 has more to send, to 1."""
    links = [(0, 3, 4, "0"), (1, 3, 4, "0"), (3, 2, 1, "0"), (3, 1, 4, "0")]
    ends = [(1, 2), (0, 2), (0, 1)]
    moves = [Transfer(at, src, dst, 0, via=(3,)) for at, (src, dst) in enumerate(ends)]
    schedule = draw(3, links, "broadcast", ["1/3"] * 3, moves, ["slow"])
    free = timeline(schedule, 12000, pieces=1)
    held = timeline(with_streams(schedule, [1, None, None]), 12000, pieces=1, frame_bytes=WHOLE_PIECES)
    # 4000 bytes take 1 us, over the slow link 4 us.
    assert held[3, 2] == free[3, 2] == (Occupation(1, 5, 0, 0), Occupation(5, 9, 1, 0))
    assert free[0, 3] == (Occupation(0, 1, 1, 0), Occupation(1, 2, 2, 0))
    assert held[0, 3] == (Occupation(0, 1, 1, 0), Occupation(9, 10, 2, 0))


@pytest.mark.parametrize("method", ["ring", "halving-doubling", "trees"])
def test_pieces_are_cut_into_frames_enough_to_hold_streams_no_longer(method: str) -> None:
    """In 256 pieces of a frame messages wait at every switch with their streams, for 1.5 times as long."""
    box = load("rtx5090:between=24,streams=1")
    schedule = solve(box, "allreduce", form="explicit", method=method)
    hops = lay_out(schedule)
    for frames in (ENOUGH_FRAMES, MAX_FRAMES):
        runs = Runs(schedule, max_frames=frames)
        pieces, time_us = runs.choice(1 << 26)
        assert frames_per_piece(hops, 1 << 26, pieces, max_frames=frames) >= HELD_FRAMES
        assert time_us <= 1.1 * hops.play(1 << 26, pieces, frames=4 * HELD_FRAMES).time_us
        assert 1.3 * time_us < hops.play(1 << 26, 256).time_us


def test_who_knows_no_streams_says_so() -> None:
    with pytest.raises(InputError, match="service engine: the engine keeps to no streams; priority, fifo or"):
        simulate(with_streams(chain(2, 1), [1, 1, 1]), 4096, service="engine")
    form = translated(circulant(5, {1: 1, 2: 2}), Kind.ALLGATHER)
    with pytest.raises(ScheduleError, match="the implicit form knows no streams of ranks"):
        replace(form, topology=replace(form.topology, streams=(1,) * 5))
