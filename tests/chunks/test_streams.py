"""Chunk schedules where ranks have streams, against all ways to fill the rounds of small graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import permutations, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.synth.chunks.frontier import Frontier, latency_of
from arborcast.synth.chunks.problem.instance import demands_of
from arborcast.synth.collective import Collective
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.ports import ported
from arborcast.synth.topology import Hop, Link, Topology
from arborcast.topologies import load

State = tuple[int, ...]
"""Of each rank the chunks that it holds, as bits."""


@st.composite
def questions(draw: st.DrawFn) -> tuple[Topology, Collective, int]:
    """Links of one bandwidth, streams, and a number of chunks that all ways can be tried of."""
    kind = draw(st.sampled_from(["broadcast", "allgather", "alltoall", "scatter"]))
    ranks = draw(st.integers(3, 4 if kind in {"broadcast", "scatter"} else 3))
    pairs = list(permutations(range(ranks), 2))
    left_out = draw(st.sets(st.sampled_from(pairs), max_size=3))
    links = [Link(src, dst, Fraction(2), Fraction(0)) for src, dst in pairs if (src, dst) not in left_out]
    streams = draw(st.lists(st.sampled_from([1, 1, 2, None]), min_size=ranks, max_size=ranks))
    topology = Topology.build("drawn", ranks, links, streams=streams)
    asked = Collective.on(topology, kind, root=0) if kind in {"broadcast", "scatter"} else kind
    collective = asked if isinstance(asked, Collective) else Collective.on(topology, asked)
    assume(topology.streams and synth.bound(topology, collective).rate)
    return topology, collective, draw(st.integers(1, 2 if kind == "broadcast" else 1))


def rounds_of(topology: Topology) -> list[list[Hop]]:
    """What may pass at once: links over which no rank sends, or gets, more messages than it has streams."""
    hops = [(link.src, link.dst) for link in topology.links]
    found = []
    for chosen in product((False, True), repeat=len(hops)):
        passing = [hop for hop, is_used in zip(hops, chosen, strict=True) if is_used]
        if all(
            limit is None or sum(hop[end] == rank for hop in passing) <= limit
            for rank, limit in enumerate(topology.streams)
            for end in (0, 1)
        ):
            found.append(passing)
    return found


def after_a_round(rounds: list[list[Hop]], start: State, now: State) -> Iterator[State]:
    """A round of a step that began at `start`: each link carries one chunk that its sender had there."""
    for passing in rounds:
        choices = [
            [1 << bit for bit in range(start[src].bit_length()) if start[src] & ~now[dst] & 1 << bit] or [0]
            for src, dst in passing
        ]
        for carried in product(*choices):
            after = list(now)
            for (_, dst), chunk in zip(passing, carried, strict=True):
                after[dst] |= chunk
            yield tuple(after)


def exists(topology: Topology, collective: Collective, chunks: int, steps: int, rounds: int) -> bool:
    """Whether some way of filling so many rounds, in at most so many steps, does it."""
    had, wanted = [0] * topology.ranks, [0] * topology.ranks
    for number, demand in enumerate(demands_of(collective)):
        bits = ((1 << chunks) - 1) << number * chunks
        for rank in demand.sources:
            had[rank] |= bits
        for rank in demand.targets:
            wanted[rank] |= bits
    states = {(1, tuple(had), tuple(had))}
    ways = rounds_of(topology)
    for _ in range(rounds):
        now = {(step, start, after) for step, start, at in states for after in after_a_round(ways, start, at)}
        states = now | {(step + 1, after, after) for step, _, after in now if step < steps}
    return rounds >= steps and any(
        all(held & want == want for held, want in zip(now, wanted, strict=True)) for _, _, now in states
    )


def solved(
    topology: Topology, collective: Collective, method: str, size: tuple[int, int, int]
) -> synth.Schedule | None:
    """A schedule of that size; None where it is said, with proof, that there is none."""
    chunks, steps, rounds = size
    try:
        found = synth.solve(
            topology,
            collective,
            form="explicit",
            method=method,
            chunks=chunks,
            steps=steps,
            rounds=rounds,
            cache=False,
        )
    except InfeasibleError as none:
        if not none.proved_by:
            raise
        return None
    verdict = synth.verify(found)
    assert verdict.correct, verdict.errors
    assert len(found.rounds or ()) == size[1]
    assert sum(found.rounds or ()) <= size[2]
    assert all(vertex < topology.size for move in found.transfers for vertex in move.via)
    return found


@pytest.mark.few(10)
@settings(max_examples=60, deadline=None)
@given(questions(), st.sampled_from(["sat", "ilp", "smt"]), st.integers(0, 1))
def test_solvers_find_what_there_is_and_prove_what_there_is_not(
    question: tuple[Topology, Collective, int], method: str, more: int
) -> None:
    topology, collective, chunks = question
    steps = latency_of(ported(topology), collective) + more
    least = next(rounds for rounds in range(steps, 99) if exists(topology, collective, chunks, steps, rounds))
    assert solved(topology, collective, method, (chunks, steps, least))
    if least > steps:
        assert solved(topology, collective, method, (chunks, steps, least - 1)) is None


def frontier_of(topology: Topology, kind: Collective | str, max_steps: int | None = None) -> Frontier:
    found = synth.pareto(topology, kind, max_steps=max_steps, cache=False)
    for point in found.points:
        assert synth.verify(point.schedule).correct
        assert sum(point.schedule.rounds or ()) == point.rounds
        assert point.schedule.topology == topology
        assert point.ratio >= point.least
    return found


@pytest.mark.few(8)
@settings(max_examples=40, deadline=None)
@given(questions())
def test_a_proved_frontier_has_no_better_schedule(question: tuple[Topology, Collective, int]) -> None:
    topology, collective, chunks = question
    for point in frontier_of(topology, collective, 4).points:  # some have no end, and take ever longer
        fewer = -(-point.rounds * chunks // point.chunks) - 1  # a smaller ratio of that many chunks
        assert not exists(topology, collective, chunks, point.steps, fewer)
        if point.chunks == chunks and point.is_proved:
            assert exists(topology, collective, chunks, point.steps, point.rounds)


@pytest.mark.parametrize(("streams", "chunks", "rounds"), [(1, 3, 4), (2, 3, 2), (3, 6, 4)])
def test_a_mesh_of_four_adds_as_fast_as_streams_allow(streams: int, chunks: int, rounds: int) -> None:
    """3/2 of the buffer pass what a rank may use at once, as `rounds` say in lowest terms."""
    mesh = replace(load("full:4"), streams=(streams,) * 4)
    best = frontier_of(mesh, "allreduce").points[-1]
    assert best.is_proved
    assert best.ratio == Fraction(3, 2) / streams


@pytest.mark.parametrize("ranks", [range(5), range(7), range(8)])
def test_messages_that_hold_streams_for_longer_are_counted_and_not_proved(ranks: range) -> None:
    """Over sockets at 24 GB/s a message holds its ends for two fifths of what they could carry meanwhile."""
    box = load("rtx5090:between=24,streams=1", ranks=ranks)
    free = synth.pareto(replace(box, streams=()), "allgather", max_steps=2, cache=False)
    found = synth.pareto(box, "allgather", max_steps=2, cache=False)
    least = {point.steps: point.least for point in free.points}
    assert found.points[0].steps == 1
    for point in found.points:
        assert synth.verify(point.schedule).correct
        assert point.least == least[point.steps]
        assert point.rounds == sum(point.schedule.rounds or ())
        assert not point.is_proved or point.ratio == point.least


def test_a_size_that_holds_streams_for_too_long_is_not_proved_away() -> None:
    """Two chunks leave rank 0 in a round by loads; one over the slow link holds its stream for all of it."""
    links = [Link(0, 1, Fraction(2), Fraction(0)), Link(0, 2, Fraction(1), Fraction(0))]
    slow = Topology.build("slow", 3, links, streams=[1, None, None])
    scatter = Collective.on(slow, "scatter", root=0)
    with pytest.raises(
        InfeasibleError, match=r"\(1, 1, 1\): what was found holds streams for 2 rounds"
    ) as none:
        solved(slow, scatter, "sat", (1, 1, 1))
    assert not none.value.is_proved
    assert solved(slow, scatter, "sat", (1, 1, 2))
    (point,) = frontier_of(slow, "scatter").points
    assert (point.rounds, point.is_proved) == (2, False)
    assert point.proof == "streams are held for 2 rounds, loads take 1"
