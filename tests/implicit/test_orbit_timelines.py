"""What passes the links of an implicit schedule, and when, against the whole schedule, small and by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from arborcast.synth.collective import Kind
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Chunk, Schedule, Transfer
from arborcast.synth.simulation.simulator import simulate, timeline
from arborcast.synth.simulation.timing import Occupation
from arborcast.synth.topology import Link, Topology
from tests.support.drawn_implicit import KINDS, circulant, hub, implicit, of_orbits, translated
from tests.support.drawn_in_network import BOTH, TURNS


def adding_in_turn(adders: int) -> ImplicitSchedule:
    """An allreduce of two ranks: two switches, which the one translation exchanges, add a half each.

    Where there are three, the third one adds nothing and stays in its place.
    """
    hubs = [replace(TURNS, name=f"s{at}", adder=Fraction(1, 2)) for at in range(adders)]
    pairs = [(rank, 2 + at) for rank in range(2) for at in range(adders)]
    links = [Link(*ends, Fraction(1), Fraction(1, 2)) for a, b in pairs for ends in ((a, b), (b, a))]
    fabric = Topology.build("turns", 2, links, hubs, [[1, 0, 3, 2, *range(4, 2 + adders)]])
    transfers = [Transfer(0, rank, 2, 0, True) for rank in range(2)]
    transfers += [Transfer(0, 2, rank, 1) for rank in range(2)]
    return of_orbits(fabric, Kind.ALLREDUCE, [Chunk(Fraction(1, 2), 0)], transfers)


def adding_apart() -> ImplicitSchedule:
    """An allreduce of three ranks over six switches, of which the translations exchange three and three.

    Each rank has a sixth of the buffer added by a switch of its own, and another by a slower one; it adds its
    own share and has the sum copied, for which switches take time, too.
    """
    fast, slow = (
        [
            replace(BOTH, name=f"{name}{at}", adder=Fraction(1, cost), latency_us=Fraction(cost))
            for at in range(3)
        ]
        for name, cost in (("a", 2), ("b", 3))
    )
    pairs = [(rank, switch) for rank in range(3) for switch in range(3, 9)]
    links = [Link(*ends, Fraction(1), Fraction(1, 2)) for a, b in pairs for ends in ((a, b), (b, a))]
    fabric = Topology.build("apart", 3, links, [*fast, *slow], [[1, 2, 0, 4, 5, 3, 7, 8, 6]])
    transfers = []
    for chunk, switch in ((0, 3), (1, 6)):
        transfers += [Transfer(chunk, rank, switch, 0, True) for rank in (1, 2)]
        transfers += [Transfer(chunk, switch, 0, 1, True), Transfer(chunk, 0, switch, 2)]
        transfers += [Transfer(chunk, switch, rank, 3) for rank in (1, 2)]
    return of_orbits(fabric, Kind.ALLREDUCE, [Chunk(Fraction(1, 6), 0)] * 2, transfers)


DRAWN = {
    **{f"circle {kind}": implicit(circulant(5, {1: 1, 2: 2}, "1/2"), kind, seed=1) for kind in KINDS},
    "two adders": adding_in_turn(2),
    "three adders": adding_in_turn(3),
    "six adders": adding_apart(),
}


@pytest.mark.parametrize("schedule", DRAWN.values(), ids=DRAWN)
@pytest.mark.parametrize(("pieces", "frame_bytes"), [(1, None), (2, 100)])
def test_links_that_no_translation_keeps_are_passed_as_in_the_whole_run(
    schedule: ImplicitSchedule, pieces: int, frame_bytes: int | None
) -> None:
    whole, order = schedule.expand(), schedule.translations.order

    def run(what: Callable, form: ImplicitSchedule | Schedule, **options: bool) -> Any:
        return what(form, 3600, pieces=pieces, frame_bytes=frame_bytes, **options)

    assert run(simulate, schedule) == run(simulate, whole)
    passing = run(timeline, whole)
    of_orbits = run(timeline, schedule)
    assert any(of_orbits.values())
    for hop, bars in of_orbits.items():
        assert bars == passing[hop]
    own = run(timeline, schedule, own_links=True)
    assert own == {
        hop: tuple(Occupation(bar.start_us, bar.end_us, bar.chunk // order, bar.piece) for bar in bars)
        for hop, every in passing.items()
        if (bars := [bar for bar in every if bar.chunk % order == 0])
    }


def test_an_adder_that_is_exchanged_with_another_by_hand() -> None:
    """Half of 4000 bytes takes 2 us on a link and is added at 1/2 GB/s in 4; links have 1/2 us."""
    assert timeline(adding_in_turn(3), 4000, pieces=1) == {
        (0, 2): (Occupation(0, 2, 0, 0),),
        (0, 3): (Occupation(0, 2, 1, 0),),
        (0, 4): (),
        (2, 2): (Occupation(2.5, 6.5, 0, 0),),
        (2, 0): (Occupation(6.5, 8.5, 0, 0),),
        (2, 1): (Occupation(6.5, 8.5, 0, 0),),
        (4, 0): (),
        (4, 4): (),
    }


def test_images_on_one_link_come_one_after_the_other() -> None:
    """Five ranks around a switch, which every translation keeps: a fifth of 10000 bytes takes 1 us."""
    schedule = translated(hub(5), Kind.ALLGATHER, seed=1)
    up = tuple(Occupation(start, start + 1, 0, 0) for start in range(4))
    targets = [(5, target) for target in (1, 2, 3, 4)]
    assert timeline(schedule, 10000, pieces=1) == {
        (0, 5): up,
        (5, 0): tuple(Occupation(1.5 + at, 2.5 + at, 4 - at, 0) for at in range(4)),
    }
    own = {hop: (Occupation(1.5 + at, 2.5 + at, 0, 0),) for at, hop in enumerate(targets)}
    assert timeline(schedule, 10000, pieces=1, own_links=True) == {(0, 5): up, **own}


def test_images_that_a_trunk_serves_as_one_come_in_their_order() -> None:
    """Two ranks send into one switch and receive from another: half of 4000 bytes takes 2 us."""
    links = [Link(src, dst, Fraction(1)) for src, dst in ((0, 2), (1, 2), (2, 3), (3, 0), (3, 1))]
    fabric = Topology.build("trunk", 2, links, ["in", "out"], [[1, 0, 2, 3]])
    schedule = translated(fabric, Kind.ALLGATHER)
    assert timeline(schedule, 4000, pieces=2)[2, 3] == (
        Occupation(1, 2, 0, 0),
        Occupation(2, 3, 1, 0),
        Occupation(3, 4, 0, 1),
        Occupation(4, 5, 1, 1),
    )
