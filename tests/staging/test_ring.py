"""How many pieces and buffers: the formula against a simulated pipeline, the choice against all others."""

from __future__ import annotations

import heapq
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast import synth, topologies
from arborcast.backends.staging.device import CopyCosts
from arborcast.backends.staging.ring import HIDDEN, MOST_DEPTH, MOST_PIECES, Pipeline, Ring
from arborcast.synth.collective import Kind
from tests.support.drawn_implicit import KINDS as IMPLICIT_KINDS
from tests.support.drawn_implicit import grid, implicit
from tests.support.drawn_schedules import ring_allreduce


def simulated(
    pieces: int, depth: int, chunks: int, into: Fraction, way: Fraction, link: Fraction, out: Fraction
) -> Fraction:
    """When all is copied out: copies one at a time each way, lanes for chunks that take a piece each `link`.

    A piece of a chunk asks for its copy in when the one `depth` before it has been copied out.
    """
    in_free = out_free = last = Fraction(0)
    lanes = [Fraction(-(10**9))] * chunks
    events = [
        (Fraction(0), 0, piece, chunk) for piece in range(min(depth, pieces)) for chunk in range(chunks)
    ]
    while events:
        time, stage, piece, chunk = heapq.heappop(events)
        if stage == 0:
            after = in_free = max(time, in_free) + into / chunks
        elif stage == 1:
            lanes[chunk] = max(time, lanes[chunk] + link)
            after = lanes[chunk] + way
        elif stage == 2:
            after = out_free = max(time, out_free) + out / chunks
        else:
            last, stage, piece, after = max(last, time), -1, piece + depth, time
        if piece < pieces:
            heapq.heappush(events, (after, stage + 1, piece, chunk))
    return last


lengths = st.integers(0, 12).map(Fraction)


@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 5), lengths, lengths, lengths, lengths)
def test_the_formula_bounds_a_simulated_pipeline(
    pieces: int, depth: int, chunks: int, into: Fraction, way: Fraction, link: Fraction, out: Fraction
) -> None:
    """From above, by less than one passage."""
    use = (into + out) / chunks + way
    formula = into + way + out + (pieces - 1) * max(into, link, out, use / depth)
    exact = simulated(pieces, depth, chunks, into, way, link, out)
    assert exact <= formula <= exact + max(into + way + link + out, 1)


def pipeline(
    nbytes: int = 1 << 20, rate: Fraction = Fraction(1), each_us: Fraction = Fraction(5), steps: int = 2
) -> Pipeline:
    whole = Fraction(1)
    return Pipeline(
        nbytes, whole, whole, 1, 1, steps, whole, whole * steps, whole * 2, 30, CopyCosts(rate, each_us)
    )


@pytest.mark.parametrize("nbytes", [1, 5000, 1 << 20, 1 << 26])
@pytest.mark.parametrize("rate", [Fraction(1, 2), Fraction(1), Fraction(8)])
@pytest.mark.parametrize("depth", [None, 1, 3])
def test_the_choice_is_the_best_of_all(nbytes: int, rate: Fraction, depth: int | None) -> None:
    asked = pipeline(nbytes, rate)
    found = asked.choose(depth=depth)
    depths = range(1, MOST_DEPTH + 1) if depth is None else [depth]
    least = min(asked.time_us(k, d) for k in range(1, min(MOST_PIECES, nbytes) + 1, 5) for d in depths)
    assert asked.time_us(found.pieces, found.depth) <= least * (1 + HIDDEN)
    assert found.depth <= min(found.pieces, depth or MOST_DEPTH)
    if depth is None:
        assert all(
            asked.time_us(found.pieces, less) > asked.time_us(found.pieces, found.depth)
            for less in range(1, found.depth)
        )


def test_what_is_given_is_kept() -> None:
    asked = pipeline(10_000)
    assert asked.choose(buffer_bytes=4096, depth=2) == Ring(3, 2)
    assert asked.choose(buffer_bytes=10_000, depth=8) == Ring(1, 1), "no more buffers than pieces"
    assert asked.choose(buffer_bytes=1 << 20).pieces == 1
    assert pipeline(0).choose() == Ring(1, 1)


def test_stages_of_a_schedule() -> None:
    """A ring of 4 ranks: in each of 6 steps a quarter of the buffer over every link, of 1 GB/s."""
    copying = CopyCosts(Fraction(2), Fraction(10))
    found = Pipeline.of(ring_allreduce(4), 4000, copying, message_us=30)
    assert (found.share_in, found.share_out, found.copies_in, found.copies_out) == (1, 1, 4, 4)
    assert (found.steps, found.rate, found.alone, found.messages) == (6, Fraction(2, 3), Fraction(6, 4), 12)
    # One piece: 4 copies of 10 us and 2 us of bytes each way, 6 us of bytes and 6 messages on the way.
    assert found.time_us(1, 1) == (40 + 2) + (6 + 180) + (40 + 2)


@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        (Kind.ALLGATHER, (Fraction(1, 4), 1)),
        (Kind.REDUCE_SCATTER, (1, Fraction(1, 4))),
        (Kind.BROADCAST, (1, 1)),
    ],
)
def test_shares_of_kinds(kind: Kind, shares: tuple[Fraction, Fraction]) -> None:
    schedule = synth.solve(topologies.load("full:4"), kind.value)
    found = Pipeline.of(schedule, 4096, CopyCosts(Fraction(1), Fraction(0)), message_us=0)
    assert (found.share_in, found.share_out) == shares


@pytest.mark.parametrize("kind", IMPLICIT_KINDS)
@pytest.mark.parametrize("hubs", [False, True])
def test_both_forms_have_the_same_stages(kind: Kind, hubs: bool) -> None:
    short = implicit(grid(2, 3, hubs), kind)
    copying = CopyCosts(Fraction(3), Fraction(1))
    forms = (Pipeline.of(form, 1 << 20, copying, message_us=30) for form in (short, short.expand()))
    assert next(forms) == next(forms)
