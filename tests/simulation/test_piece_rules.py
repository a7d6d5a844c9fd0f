"""Into how many pieces chunks are cut, and what ranks handle: by hand, in both forms of a schedule."""

from __future__ import annotations

from fractions import Fraction

import pytest

from arborcast import synth
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.simulation.pieces import (
    SEVERAL_HOSTS,
    PieceRule,
    messages_of,
    most_messages,
    pieces_that_fit,
    shares_of,
    switches_in,
)
from arborcast.synth.topology import Switch, Topology
from arborcast.topologies import load
from tests.support.able_fabrics import ABLE
from tests.support.drawn_in_network import star
from tests.support.drawn_schedules import make

*_, TURNS, _ = ABLE

SUMS = make(
    "allreduce",
    [Chunk(Fraction(3, 4), 0), Chunk(Fraction(1, 4), 0)],
    [
        *(Transfer(0, src, 0, 0, True) for src in (1, 2)),
        *(Transfer(0, 0, dst, 1, False) for dst in (1, 2)),
        *(Transfer(1, src, 1, 0, True) for src in (0, 2)),
        *(Transfer(1, 1, dst, 1, False) for dst in (0, 2)),
    ],
    total=3,
)
"""Three quarters are added on rank 0 and one on rank 1."""


def chain(ranks: int) -> Schedule:
    """A broadcast from rank to rank, on links of 1000 GB/s."""
    fabric = load(f"ring:{ranks},bandwidth=1000")
    collective = Collective.on(fabric, Kind.BROADCAST)
    limit, chunks = synth.bound(fabric, collective), [Chunk(Fraction(1), 0)]
    moves = [Transfer(0, rank, rank + 1, rank) for rank in range(ranks - 1)]
    return Schedule.build(fabric, collective, Method("chain"), limit, chunks, moves)


def test_what_ranks_send_and_receive() -> None:
    assert dict(messages_of(SUMS)) == {0: 6, 1: 6, 2: 4}
    assert most_messages(SUMS) == 6
    # Rank 0 takes and gives three quarters twice and one quarter once.
    once = {0: Fraction(14, 4), 1: Fraction(10, 4), 2: Fraction(8, 4)}
    assert dict(shares_of(SUMS)) == once
    added = {0: Fraction(6, 4), 1: Fraction(2, 4), 2: 0}
    assert dict(shares_of(SUMS, sums=3)) == {rank: once[rank] + 2 * added[rank] for rank in once}


def test_the_largest_chunk_says_how_many_pieces_fit() -> None:
    assert pieces_that_fit(SUMS, 1000, piece_bytes=100, most=10) == 7
    assert pieces_that_fit(SUMS, 1000, piece_bytes=100, most=5) == 5
    assert pieces_that_fit(SUMS, 10, piece_bytes=100, most=5) == 1


def test_steps_allow_pieces() -> None:
    assert PieceRule(1, least=1, per_step=4).pieces(chain(4), 1 << 20) == 12
    assert [SEVERAL_HOSTS.pieces(chain(ranks), 64 << 20) for ranks in (4, 6)] == [16, 20]


def test_of_nothing_there_is_one_piece() -> None:
    none = make("broadcast", [], [], total=2)
    assert (none.rate, most_messages(none)) == (0, 0)
    assert SEVERAL_HOSTS.pieces(none, 1 << 30) == pieces_that_fit(none, 9, piece_bytes=1, most=9) == 1


@pytest.mark.parametrize("fabric", [star(8, Switch("s", **TURNS)), load("torus:2x2")], ids=["star", "torus"])
def test_both_forms_handle_the_same(fabric: Topology) -> None:
    found = synth.solve(fabric, "allreduce", form="implicit")
    assert isinstance(found, ImplicitSchedule)
    whole = found.expand()
    assert switches_in(found) == switches_in(whole)
    for of in (messages_of, shares_of):
        firsts = of(found)
        assert firsts and {end: of(whole)[end] for end in firsts} == firsts
        assert set(of(whole).values()) == set(firsts.values())
