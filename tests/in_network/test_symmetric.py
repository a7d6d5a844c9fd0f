"""Allreduces through able switches on regular fabrics in implicit form: against exact trees, and at scale."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

from arborcast.synth import solve, verify
from arborcast.synth.bounds import bound
from arborcast.synth.certification import steiner
from arborcast.synth.collective import Collective
from arborcast.synth.errors import TimedOutError
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.in_network.steiner_program import steiner_program
from arborcast.synth.in_network.symmetric import solve_symmetric_in_network
from arborcast.synth.kernels import compiled
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Link, Switch, Topology
from arborcast.topologies import load
from tests.support.able_fabrics import ABLE
from tests.support.drawn_in_network import star as turning_star

_, _, BOTH, TURNS, LOOPS = ABLE


def star(ranks: int, **abilities: object) -> Topology:
    """Ranks around one switch, and the turn by one of them."""
    return turning_star(ranks, Switch("s", **abilities))


def pod(boxes: int, gpus: int, inside: dict, between: dict, rail: Fraction) -> Topology:
    """Boxes of GPUs around a switch with 450 GB/s each, and a rail switch for each place in a box."""
    ranks = boxes * gpus
    named = [(("box", box), Switch(f"box{box}", **inside)) for box in range(boxes)]
    named += [(("rail", place), Switch(f"rail{place}", **between)) for place in range(gpus)]
    named.sort(key=lambda one: not one[1].is_able)
    number = {name: ranks + index for index, (name, _) in enumerate(named)}
    links = []
    for rank in range(ranks):
        box, place = divmod(rank, gpus)
        for switch, rate in ((number["box", box], Fraction(450)), (number["rail", place], rail)):
            links += [Link(rank, switch, rate), Link(switch, rank, rate)]

    def moved(by_box: int, by_place: int) -> list[int]:
        images = [(r // gpus + by_box) % boxes * gpus + (r + by_place) % gpus for r in range(ranks)]
        by = {"box": (by_box, boxes), "rail": (by_place, gpus)}
        return images + [number[kind, (i + by[kind][0]) % by[kind][1]] for (kind, i), _ in named]

    turns = [moved(1, 0), [(r // gpus) * gpus + (r + 1) % gpus for r in range(ranks)] + moved(0, 1)[ranks:]]
    return Topology.build("pod", ranks, links, [switch for _, switch in named], turns)


SMALL = [
    *(star(8, **abilities) for abilities in (BOTH, TURNS, LOOPS)),
    star(6, **TURNS, adder=Fraction(1, 2)),
    star(6, **TURNS, adder=Fraction(2, 3)),
    pod(2, 4, LOOPS, {}, Fraction(100)),
    pod(3, 2, LOOPS, TURNS, Fraction(100)),
    pod(2, 4, {}, TURNS, Fraction(50)),
    pod(2, 4, LOOPS, TURNS, Fraction(200)),
    pod(4, 2, TURNS, {}, Fraction(150)),
]


@pytest.mark.parametrize("fabric", SMALL, ids=lambda fabric: f"{fabric.name}{fabric.ranks}")
def test_small_fabrics_as_good_as_all_trees(fabric):
    exact = steiner_program(fabric, Collective.on(fabric, "allreduce"))
    assert exact.is_exact
    found = solve(fabric, "allreduce", form="implicit")
    assert found.rate == exact.rate
    for every_translate in (False, True):
        assert verify(found, every_translate=every_translate).errors == ()
    assert verify(found.expand()).errors == ()


@pytest.mark.parametrize(
    ("fabric", "rate"),
    [
        pytest.param(star(1024, **TURNS), Fraction(1), marks=pytest.mark.long),
        pytest.param(star(1024, **BOTH), Fraction(1), marks=pytest.mark.long),
        pytest.param(star(1024, **LOOPS), Fraction(1024, 1025), marks=pytest.mark.long),
        # A box takes in 8 rails of 50 GB/s, and as much is left of 450 when the root's own part loops back.
        (pod(12, 8, LOOPS, TURNS, Fraction(50)), Fraction(400)),
        # Between boxes it is the allreduce of 12 ranks of 400 GB/s.
        (pod(12, 8, LOOPS, {}, Fraction(50)), Fraction(400 * 12, 2 * 11)),
        pytest.param(pod(128, 8, LOOPS, TURNS, Fraction(50)), Fraction(400), marks=pytest.mark.long),
        pytest.param(
            pod(128, 8, LOOPS, {}, Fraction(50)), Fraction(400 * 128, 2 * 127), marks=pytest.mark.long
        ),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_up_to_a_thousand_ranks(fabric, rate):
    found = solve(fabric, "allreduce")
    assert found.rate == rate
    assert verify(found).errors == ()


def test_one_tree_does_where_its_images_would_be_the_same():
    """The translations that would repeat it are left out: sums of few large chunks rather than of many."""
    found = solve(star(1024, **TURNS), "allreduce")
    assert (found.chunk_count, found.steps) == (1, 2)
    assert solve(pod(12, 8, LOOPS, TURNS, Fraction(50)), "allreduce").chunk_count == 8


@pytest.mark.long
def test_a_regular_fabric_is_answered_by_images_in_explicit_form_too():
    """All ranks send alike; few trees, and switches that hold few, are asked of all trees."""
    fabric = pod(3, 8, LOOPS, {}, Fraction(50))
    found = solve(fabric, "allreduce")
    assert found.method.name == "trees" and not isinstance(found, ImplicitSchedule)
    assert found.rate == found.bound.rate == Fraction(400 * 3, 2 * 2)
    assert verify(found).errors == ()
    sent = Counter((transfer.src, transfer.step) for transfer in found.transfers)
    assert len({tuple(sent[rank, step] for step in range(found.steps)) for rank in range(24)}) == 1
    switches = tuple(replace(each, trees=9) if each.is_able else each for each in fabric.switches)
    assert verify(solve(replace(fabric, switches=switches), "allreduce")).errors == ()
    assert solve(fabric, "allreduce", max_trees=2).chunk_count <= 2


def test_prices_of_many_alike_ranks_are_worked_out_in_machine_code():
    """Three boxes of eight alike: 9 x 9 x 9 numbers of ranks, however few classes these are."""
    asked: list[int] = []

    def noted(*arguments: object) -> None:
        asked.append(compiled._elements(arguments))
        fork(*arguments)

    fork = steiner._fork
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steiner, "_fork", noted)
        bound(load("dgx-h100:boxes=3"), Collective.on(load("dgx-h100:boxes=3"), "allreduce"))
    assert max(asked) > compiled.SMALL


@pytest.mark.parametrize("kind", ["allgather", "reduce-scatter", "alltoall"])
def test_other_kinds_only_ask_to_forward(kind):
    fabric = pod(12, 8, LOOPS, TURNS, Fraction(50))
    found = solve(fabric, kind)
    assert found.topology is fabric
    assert found.rate == solve(fabric.forwarding, kind).rate == found.bound.rate
    assert all(max(transfer.src, transfer.dst) < fabric.ranks for transfer in found.transfers)


@pytest.mark.long
def test_near_the_limit_where_it_is_not_reached():
    """Boxes only forward inside: one box and the rest prove 275, trees that join all take a link more."""
    found = solve(pod(128, 8, {}, TURNS, Fraction(50)), "allreduce")
    assert found.bound.rate == 275
    assert found.rate == Fraction(281200, 1023)


def test_wishes_for_trees_are_kept():
    fabric = pod(12, 8, {}, TURNS, Fraction(50))
    free = solve(fabric, "allreduce")
    assert len(solve(fabric, "allreduce", max_trees=1).chunks) == 1 < len(free.chunks)
    assert solve(fabric, "allreduce", max_trees=1).rate < free.rate
    within = solve(fabric, "allreduce", tolerance=Fraction(1, 10))
    assert within.rate >= free.rate * Fraction(9, 10)


def test_what_is_found_in_time_is_on_the_fabric_that_was_asked_for():
    fabric = star(4, **TURNS)
    plain = solve(fabric.forwarding, "allreduce", form="implicit")

    def late(*_: object, **__: object) -> ImplicitSchedule:
        raise TimedOutError("late", plain)

    with pytest.raises(TimedOutError, match="late") as caught:
        solve_symmetric_in_network(
            fabric,
            plain.collective,
            SolveOptions(),
            bound(fabric, plain.collective),
            forwarding=late,
            translations=plain.translations,
        )
    best = caught.value.best
    assert best is not None and best.topology == fabric
    assert best.bound.rate == 1 > best.rate == plain.rate
    assert verify(best).correct
