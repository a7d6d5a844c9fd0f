"""Implicit schedules against what they stand for, written out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth, topologies
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import CollectiveError, ScheduleError, TopologyError
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Chunk, Transfer
from arborcast.synth.symmetry.translations import Translations
from tests.support.drawn_implicit import of_orbits
from tests.support.implicit_cases import implicit_allgather

SPECS = ("torus:3x4", "mi250:boxes=2", "dgx-a100:boxes=2", "dragonfly:3x2x1", "fat-tree:2x2x3", "mesh:2x4")


@cache
def case(spec: str) -> ImplicitSchedule:
    return implicit_allgather(topologies.load(spec))


@st.composite
def schedules(draw: Callable) -> ImplicitSchedule:
    """Spreading in trees, with shares, steps and links of some transfers drawn: right or not, well-formed."""
    found = case(draw(st.sampled_from(SPECS)))
    shares = [Fraction(1, draw(st.integers(1, 9))) for _ in found.chunks]
    kept = draw(st.lists(st.sampled_from(found.transfers), min_size=1, max_size=12))
    return built(
        found,
        [replace(transfer, step=draw(st.integers(0, 3))) for transfer in kept],
        [replace(chunk, share=share) for chunk, share in zip(found.chunks, shares, strict=True)],
    )


def built(
    found: ImplicitSchedule, transfers: Iterable[Transfer], chunks: Sequence[Chunk] | None = None
) -> ImplicitSchedule:
    """The same of other transfers, and of other chunks where some are given."""
    head = (found.topology, found.collective, found.method, found.bound, found.translations)
    return ImplicitSchedule.build(*head, found.chunks if chunks is None else chunks, transfers)


@given(schedules())
@settings(max_examples=50, deadline=None)
def test_load_and_rate_are_those_written_out(schedule: ImplicitSchedule) -> None:
    whole = schedule.expand()
    for link, orbit in zip(schedule.topology.links, schedule.link_orbits, strict=True):
        assert schedule.orbit_load[orbit] == whole.load.get((link.src, link.dst), 0)
    busy = max(load / schedule.topology.bandwidth[hop] for hop, load in whole.load.items())
    assert schedule.rate == whole.rate == 1 / busy
    assert (schedule.steps, schedule.chunk_count) == (whole.steps, len(whole.chunks))
    assert schedule.transfer_count == len(whole.transfers)


@given(schedules(), st.data())
@settings(max_examples=50, deadline=None)
def test_numbers_say_where_chunks_and_transfers_come_from(
    schedule: ImplicitSchedule, data: st.DataObject
) -> None:
    whole = schedule.expand()
    group = schedule.translations
    element = data.draw(st.integers(0, group.order - 1))
    images = group.permutation(element)
    for index, chunk in enumerate(schedule.chunks):
        moved = Chunk(chunk.share, images[chunk.owner])
        assert moved == whole.chunks[index * group.order + element]
    for index, transfer in enumerate(schedule.transfers):
        assert whole.transfers[index * group.order + element] == Transfer(
            transfer.chunk * group.order + element,
            images[transfer.src],
            images[transfer.dst],
            transfer.step,
            transfer.reduce,
            tuple(images[switch] for switch in transfer.via),
        )


@pytest.mark.parametrize("spec", SPECS)
def test_written_out_it_does_what_it_says(spec: str) -> None:
    schedule = case(spec)
    verdict = synth.verify(replace(schedule.expand(), bound=synth.bound(schedule.topology, "allgather")))
    assert verdict.correct, verdict.errors
    assert schedule.height == schedule.expand().height
    assert schedule.rounds is None


def test_targets_move_with_their_chunks() -> None:
    ring = topologies.load("ring:4")
    chunks = [Chunk(Fraction(1, 16), 0, target) for target in (1, 3)]
    schedule = of_orbits(ring, Kind.ALLTOALL, chunks, [Transfer(0, 0, 1, 0), Transfer(1, 0, 3, 0)])
    assert [(chunk.owner, chunk.target) for chunk in schedule.expand().chunks] == [
        *[(0, 1), (1, 2), (2, 3), (3, 0)],
        *[(0, 3), (1, 0), (2, 1), (3, 2)],
    ]


def test_transfers_are_put_in_order_and_nothing_sent_has_no_rate() -> None:
    found = case("torus:3x4")
    assert built(found, reversed(found.transfers)) == found
    assert built(found, []).rate == 0


def _collective(kind: Kind, **more: object) -> Collective:
    return Collective.on(case("torus:3x4").topology, kind, **more)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"collective": _collective(Kind.BROADCAST)}, ScheduleError, "broadcast: has no implicit form"),
        (
            {"collective": _collective(Kind.ALLGATHER, ranks=[0, 1, 2])},
            ScheduleError,
            "allgather: its ranks must be mapped to each other by every translation",
        ),
        (
            {"collective": Collective(Kind.ALLGATHER, (0, 99))},
            CollectiveError,
            r"allgather: rank must be in 0\.\.11, got 99",
        ),
        (
            {"chunks": (Chunk(Fraction(1), 1),)},
            ScheduleError,
            r"chunk 0: owner must be the first rank of an orbit, one of \[0\], got 1",
        ),
        ({"chunks": (Chunk(Fraction(0), 0),)}, ScheduleError, "chunk 0: share must be positive, got 0"),
        (
            {"transfers": (Transfer(1, 0, 1, 0),)},
            ScheduleError,
            r"transfer 0: chunk must be in 0\.\.0, got 1",
        ),
        ({"transfers": (Transfer(0, 0, 6, 0),)}, ScheduleError, "transfer 0: there is no link 0->6"),
        ({"rate": Fraction(-1)}, ScheduleError, "rate must not be negative, got -1"),
        (
            {"translations": Translations(12, ((*range(1, 12), 0),), (12,), 12)},
            TopologyError,
            "symmetry .*: maps link",
        ),
        (
            {"translations": Translations(4, (), (), 4)},
            TopologyError,
            "translations of 4 ranks and 4 vertices do not fit torus:3x4 with 12 and 12",
        ),
    ],
)
def test_refusals(changed: dict[str, object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        replace(case("torus:3x4"), **changed)


def test_relays_may_be_moved_too() -> None:
    ring = topologies.load("ring:6")
    group = Translations.generated(ring, [(2, 3, 4, 5, 0, 1)])
    transfers = [Transfer(0, 0, 1, 0), Transfer(0, 1, 2, 1), Transfer(0, 0, 5, 0), Transfer(0, 5, 4, 1)]
    among = Collective.on(ring, Kind.ALLGATHER, ranks=(0, 2, 4))
    schedule = of_orbits(ring, among, [Chunk(Fraction(1, 3), 0)], transfers, translations=group)
    assert schedule.expand().load == dict.fromkeys(ring.bandwidth, Fraction(1, 3))
    assert schedule.rate == 3
