"""Custom collectives through all layers: files, schedules, the verifier, bounds, methods, programs."""

from __future__ import annotations

import copy
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth, topologies
from arborcast.backends import lower
from arborcast.backends.lowering.layout import lay_out
from arborcast.backends.measure.samples import sample_data
from arborcast.synth.bounds import bound
from arborcast.synth.certificate import Bound, Cut
from arborcast.synth.collective import NAMED_KINDS, Block, Collective, Demand, Kind, busbw_factor
from arborcast.synth.errors import CollectiveError, ScheduleError
from arborcast.synth.formats import (
    read_explicit,
    schedule_from_document,
    schedule_to_document,
    write_explicit,
)
from arborcast.synth.methods import METHODS
from arborcast.synth.pictures import draw_timeline
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.verification.verifier import verify
from tests.executors.test_conformance import check, interpreted
from tests.support.definition import define
from tests.support.drawn_schedules import custom_exchange, schedules
from tests.support.refusals import refuses

RING = topologies.load("ring:4")


def demand(sources: set[int], targets: set[int]) -> Demand:
    return Demand(frozenset(sources), frozenset(targets))


HALO_DEMANDS = (demand({0}, {1, 3}), demand({1, 2}, {0}))


def halo() -> Schedule:
    """On a ring of four, in one step: 0 sends block 0 both ways, 1 sends block 1 to 0."""
    collective = Collective.custom(RING, HALO_DEMANDS)
    half = Fraction(1, 2)
    chunks = [Chunk(half, 0, demand=0), Chunk(half, 1, demand=1)]
    transfers = [Transfer(0, 0, 1, 0), Transfer(0, 0, 3, 0), Transfer(1, 1, 0, 0)]
    return Schedule.build(RING, collective, Method("drawn"), bound(RING, collective), chunks, transfers, (1,))


# --- the value ------------------------------------------------------------------------------------------


def test_what_it_means() -> None:
    collective = Collective.custom(RING, HALO_DEMANDS)
    assert collective.ranks == (0, 1, 2, 3) and collective.root is None
    first, second = collective.blocks()
    assert collective.blocks() == {Block(0, None, 0): Fraction(1, 2), Block(1, None, 1): Fraction(1, 2)}
    assert [collective.before(rank, second) for rank in range(4)] == [set(), {1}, {1}, set()]
    assert [collective.after(rank, first) for rank in range(4)] == [None, {0}, None, {0}]
    assert [collective.after(rank, second) for rank in range(4)] == [{1}, None, None, None]
    assert busbw_factor(Kind.CUSTOM, 4) == 1


def test_ranks_that_no_block_names_are_relays() -> None:
    collective = Collective.custom(RING, [demand({3}, {1})])
    assert collective.ranks == (1, 3) and collective.relays(RING) == (0, 2)


@pytest.mark.parametrize(
    ("collective", "message"),
    [
        (
            Collective(Kind.CUSTOM, (0, 1)),
            "custom: needs its blocks, who holds and who must get each, got none",
        ),
        (
            Collective(Kind.CUSTOM, (0, 1), demands=(demand(set(), {1}),)),
            "custom: block 0 needs at least one rank that holds it, got none",
        ),
        (
            Collective(Kind.CUSTOM, (0, 1), demands=(demand({0}, {1}), demand({0}, set()))),
            "custom: block 1 needs at least one rank that must get it, got none",
        ),
        (
            Collective(Kind.CUSTOM, (0, 1), demands=(demand({0}, {0, 1}),)),
            "custom: block 0: who must get it must not hold it before, got 0",
        ),
        (
            Collective(Kind.CUSTOM, (0, 1), demands=(demand({0}, {1, 2}),)),
            "custom: block 0: must name ranks that take part, got 2",
        ),
        (
            Collective(Kind.CUSTOM, (0, 1, 3), demands=(demand({0}, {1}),)),
            "custom: ranks that take part must be named by a block, got 3 besides",
        ),
        (Collective(Kind.CUSTOM, (0, 1), 0, (demand({0}, {1}),)), "custom: has no root, got 0"),
        (Collective(Kind.CUSTOM, (0, 7), demands=(demand({0}, {7}),)), "custom: rank must be in 0..3, got 7"),
        (
            Collective(Kind.ALLGATHER, (0, 1), demands=(demand({0}, {1}),)),
            "allgather: has no blocks of its own, got 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused(collective: Collective, message: str) -> None:
    with pytest.raises(CollectiveError, match=f"^{message}$"):
        collective.check(RING)


def test_a_name_does_not_say_what_it_is() -> None:
    with pytest.raises(CollectiveError, match="custom: needs its blocks"):
        synth.bound(RING, "custom")


# --- schedules and their files ---------------------------------------------------------------------------


def test_schedule_files_hold_the_blocks(tmp_path: Path) -> None:
    document = schedule_to_document(halo())
    assert document["collective"] == {
        "kind": "custom",
        "root": None,
        "ranks": [0, 1, 2, 3],
        "demands": [{"at": [0], "to": [1, 3]}, {"at": [1, 2], "to": [0]}],
    }
    assert document["chunks"] == [
        {"share": "1/2", "owner": 0, "target": None, "demand": 0},
        {"share": "1/2", "owner": 1, "target": None, "demand": 1},
    ]
    write_explicit(halo(), tmp_path / "halo.json")
    assert read_explicit(tmp_path / "halo.json") == halo()


def test_other_kinds_write_no_new_keys() -> None:
    for kind in NAMED_KINDS:
        collective = Collective.on(RING, kind)
        chunk = Chunk(Fraction(1), 0, 1 if kind is Kind.SCATTER else None)
        for_form = Bound(Fraction(1), Cut(frozenset({0}), Fraction(1)))
        document = schedule_to_document(
            Schedule.build(RING, collective, Method("drawn"), for_form, [chunk], [Transfer(0, 0, 1, 0)])
        )
        assert set(document["collective"]) == {"kind", "root", "ranks"}
        assert set(document["chunks"][0]) == {"share", "owner", "target"}


@refuses("path", "value", "message")
def test_wrong_schedule_documents(path: list[str | int], value: object, message: str) -> None:
    document = copy.deepcopy(schedule_to_document(halo()))
    here = document
    for key in path[:-1]:
        here = here[key]  # type: ignore[index]
    here[path[-1]] = value  # type: ignore[index]
    with pytest.raises(ScheduleError, match=f"^{message}"):
        schedule_from_document(document, "x")


def test_chunks_of_other_kinds_have_no_demand() -> None:
    with pytest.raises(ScheduleError, match="chunk 0: broadcast has no demands, got demand 0"):
        Schedule.build(
            RING,
            Collective.on(RING, "broadcast"),
            Method("drawn"),
            Bound(Fraction(1), Cut(frozenset({0}), Fraction(1))),
            [Chunk(Fraction(1), 0, demand=0)],
            [],
        )


# --- the verifier ---------------------------------------------------------------------------------------


def changed(
    transfers: tuple[Transfer, ...] | None = None,
    chunks: tuple[Chunk, ...] | None = None,
    rounds: tuple[int, ...] = (1,),
) -> Schedule:
    """The halo exchange with other transfers or chunks, and the rate that goes with its rounds."""
    right = halo()
    return Schedule.build(
        RING,
        right.collective,
        right.method,
        right.bound,
        right.chunks if chunks is None else chunks,
        right.transfers if transfers is None else transfers,
        rounds,
    )


def test_the_drawn_exchange_is_right() -> None:
    verdict = verify(halo())
    assert verdict.errors == () and verdict.correct
    assert verdict.rate == halo().rate == 2  # two blocks of half the buffer in the time of one
    assert halo().bound.rate == 4  # a block leaves rank 0, or enters it, over two links


# --- methods --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [name for name in METHODS if name not in {"smt", "ilp", "sat"}])
def test_methods_that_cannot_say_so_in_one_line(method: str) -> None:
    with pytest.raises(CollectiveError, match=r"^custom: .*(serve|makes only)") as caught:
        synth.solve(RING, Collective.custom(RING, HALO_DEMANDS), method=method)
    assert len(str(caught.value).splitlines()) == 1


# --- programs -------------------------------------------------------------------------------------------


def test_the_buffer_of_every_rank() -> None:
    layout = lay_out(custom_exchange(), 36)  # three blocks of 12
    assert [layout.output_elements(rank) for rank in range(5)] == [36, 36, 36, 36, 0]
    assert [layout.input_elements(rank) for rank in range(5)] == [0] * 5
    assert str(layout.initial(1, 1)) == str(layout.final(2, 1)) == "output[3:12]"
    assert str(layout.final(0, 2)) == "output[12:24]"
    assert layout.initial(2, 1) is None and layout.final(1, 1) is None and layout.final(4, 2) is None


def test_counts_divide_into_the_blocks() -> None:
    with pytest.raises(CollectiveError, match=r"custom: .* must be a multiple of its 3 blocks, got 10"):
        lower(custom_exchange(), 10)


def test_what_it_is_defined_to_give() -> None:
    """Rank r starts with r everywhere but in the blocks that it holds, which hold 10 times their owner."""
    collective = Collective.custom(RING, HALO_DEMANDS)
    inputs = [[0, 0, 0, 0], [1, 1, 10, 10], [2, 2, 10, 10], [3, 3, 3, 3]]
    given_data = [np.array(values) for values in inputs]
    outputs = define(collective, given_data)
    assert [list(map(int, output)) for output in outputs if output is not None] == [
        [0, 0, 10, 10],
        [0, 0, 10, 10],
        [2, 2, 10, 10],
        [0, 0, 3, 3],
    ]


def test_sources_of_a_block_hold_the_same_and_others_do_not() -> None:
    collective = Collective.custom(RING, HALO_DEMANDS)
    data = [
        np.concatenate(
            [part for _, part in sample_data(collective, r, 64, dtype="int64", reduction=None, seed=1)]
        )
        for r in range(4)
    ]
    assert (data[1][32:] == data[2][32:]).all()
    for first, second in [(0, 1), (1, 2), (2, 3)]:
        assert (data[first][:32] != data[second][:32]).any()
    assert (data[0][32:] != data[1][32:]).any()


@given(
    schedules([Kind.CUSTOM]),
    st.integers(0, 30),
    st.integers(1, 4),
    st.integers(0, 99),
)
@settings(max_examples=150)
def test_random_exchanges_do_what_is_asked(schedule: Schedule, size: int, pieces: int, seed: int) -> None:
    correct = replace(schedule, bound=bound(schedule.topology, schedule.collective))
    assert verify(correct).errors == ()
    check(interpreted, schedule, size, pieces, seed=seed)


def test_the_timeline_is_drawn(tmp_path: Path) -> None:
    draw_timeline(halo(), 1 << 20, tmp_path / "halo.svg")
    assert (tmp_path / "halo.svg").stat().st_size
