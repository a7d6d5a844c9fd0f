"""What passes the links of an implicit schedule, and when, against the whole schedule, small and by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from arborcast.synth.bounds import bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Chunk, Method, Transfer
from arborcast.synth.simulation.simulator import simulate, timeline
from arborcast.synth.simulation.timing import Occupation
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Link, Switch, Topology
from tests.support.drawn_implicit import KINDS, circulant, hub, implicit, translated


def adding_in_turn(adders: int) -> ImplicitSchedule:
    """An allreduce of two ranks: two switches, which the one translation exchanges, add a half each.

    Where there are three, the third one adds nothing and stays in its place.
    """
    hubs = [
        Switch(f"s{at}", reduces=True, multicasts=True, turns=True, adder=Fraction(1, 2))
        for at in range(adders)
    ]
    pairs = [(rank, 2 + at) for rank in range(2) for at in range(adders)]
    links = [Link(*ends, Fraction(1), Fraction(1, 2)) for a, b in pairs for ends in ((a, b), (b, a))]
    fabric = Topology.build("turns", 2, links, hubs, [[1, 0, 3, 2, *range(4, 2 + adders)]])
    collective = Collective.on(fabric, "allreduce")
    transfers = [Transfer(0, rank, 2, 0, True) for rank in range(2)]
    transfers += [Transfer(0, 2, rank, 1) for rank in range(2)]
    return ImplicitSchedule.build(
        fabric,
        collective,
        Method("drawn"),
        bound(fabric, collective),
        Translations.generated(fabric, fabric.symmetries),
        [Chunk(Fraction(1, 2), 0)],
        transfers,
    )


DRAWN = {
    **{f"circle {kind}": implicit(circulant(5, {1: 1, 2: 2}, "1/2"), kind, seed=1) for kind in KINDS},
    "two adders": adding_in_turn(2),
    "three adders": adding_in_turn(3),
}


@pytest.mark.parametrize("schedule", DRAWN.values(), ids=DRAWN)
@pytest.mark.parametrize("pieces", [1, 2])
def test_links_that_no_translation_keeps_are_passed_as_in_the_whole_run(
    schedule: ImplicitSchedule, pieces: int
) -> None:
    whole, order = schedule.expand(), schedule.translations.order
    assert simulate(schedule, 4000, pieces=pieces) == simulate(whole, 4000, pieces=pieces)
    passing = timeline(whole, 4000, pieces=pieces)
    of_orbits = timeline(schedule, 4000, pieces=pieces)
    assert any(of_orbits.values())
    for hop, bars in of_orbits.items():
        assert bars == passing[hop]
    own = timeline(schedule, 4000, pieces=pieces, own_links=True)
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
