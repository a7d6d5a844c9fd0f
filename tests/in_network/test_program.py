"""The best rate through able switches: known values, and every choice of forks by brute force."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from arborcast.synth.collective import TREE_KINDS, Collective
from arborcast.synth.errors import CollectiveError, InfeasibleError
from arborcast.synth.in_network.steiner_program import steiner_program
from arborcast.synth.topology import Link, Switch, Topology
from tests.support.able_fabrics import ABLE, cheapest_by_force, drawn, of_cables, star

FORWARDS, REDUCES, MULTICASTS, BOTH, TURNS, LOOPS = {}, *ABLE


@pytest.mark.parametrize(
    ("kind", "abilities", "rate"),
    [
        ("allreduce", FORWARDS, Fraction(4, 7)),
        ("allreduce", BOTH, Fraction(1)),
        ("allreduce", TURNS, Fraction(1)),
        # The root's own part passes both of its directions once more; eight ranks share that.
        ("allreduce", LOOPS, Fraction(8, 9)),
        ("reduce", REDUCES, Fraction(1)),
        ("reduce", LOOPS, Fraction(1)),
        ("broadcast", MULTICASTS, Fraction(1)),
        ("broadcast", LOOPS, Fraction(1)),
        *(
            (kind, abilities, Fraction(8, 7))
            for kind in ("allgather", "reduce-scatter")
            for abilities in (FORWARDS, BOTH, TURNS, LOOPS)
        ),
    ],
)
def test_a_star_of_eight(kind, abilities, rate):
    program = steiner_program(star(8, **abilities), Collective.on(star(8), kind))
    assert (program.rate, program.limit) == (rate, rate)


@pytest.mark.parametrize(("port", "rate"), [(450, Fraction(400)), (200, Fraction(1600, 9))])
def test_eight_gpus_with_nvlink_sharp(port, rate):
    fabric = star(8, port, **LOOPS)
    assert steiner_program(fabric, Collective.on(fabric, "allreduce")).limit == rate


def two_stars(between: Fraction, abilities: dict) -> Topology:
    """0..3 on one switch, 4..7 on another one, and a cable between the two."""
    ends = {(rank, 8 + rank // 4): 1 for rank in range(8)} | {(8, 9): between}
    return of_cables("two stars", 8, list(ends), [Switch(name, **abilities) for name in "ab"], ends)


@pytest.mark.parametrize("abilities", [BOTH, TURNS])
@pytest.mark.parametrize(("between", "rate"), [(2, 1), (Fraction(1, 2), Fraction(1, 2))])
def test_two_stars_need_of_the_cable_between_what_they_sum(between, rate, abilities):
    fabric = two_stars(between, abilities)
    program = steiner_program(fabric, Collective.on(fabric, "allreduce"))
    assert program.rate == program.limit == rate


def test_a_sum_may_be_handed_to_another_switch_that_multicasts():
    # Ranks can only send to `up` and only hear from `down`: neither turns, and nobody else could.
    links = [Link(rank, 3, Fraction(1)) for rank in range(3)]
    links += [Link(4, rank, Fraction(1)) for rank in range(3)] + [Link(3, 4, Fraction(1))]
    fabric = Topology.build(
        "up, down", 3, links, [Switch("up", reduces=True), Switch("down", multicasts=True)]
    )
    assert steiner_program(fabric, Collective.on(fabric, "allreduce")).limit == 1
    # By a rank: what two of them send passes the cable between, then what goes out to two.
    assert steiner_program(fabric.forwarding, Collective.on(fabric, "allreduce")).limit == Fraction(1, 4)


def test_an_adder_limits_what_is_summed():
    fabric = star(4, turns=True, reduces=True, multicasts=True, adder=Fraction(1, 4))
    program = steiner_program(fabric, Collective.on(fabric, "allreduce"))
    # A sum loads every link once. Without the switch it takes 3/2 both ways: 1/4 + 3/2 x = 1.
    assert program.limit == program.rate == Fraction(1, 4) + Fraction(3, 4) / Fraction(3, 2)
    assert program.adders[0] > 0


def agrees_with_brute_force(seed: int) -> int:
    """Every kind on a drawn fabric, among all or some ranks: what ours carries is all that there can be."""
    fabric, rng = drawn(seed), random.Random(seed)
    compared = 0
    for kind in TREE_KINDS:
        count = rng.randint(2, fabric.ranks) if rng.random() < 0.4 else fabric.ranks
        ranks = rng.sample(range(fabric.ranks), count)
        collective = Collective.on(fabric, kind, root=ranks[0], ranks=ranks)
        try:
            program = steiner_program(fabric, collective)
        except InfeasibleError:
            continue
        price_of = dict(zip(fabric.limited_adders, program.adders, strict=True))
        prices = [price_of.get(vertex, Fraction(0)) for vertex in range(fabric.ranks, fabric.size)]
        adders = [switch.adder or Fraction(0) for switch in fabric.switches]
        worth = sum(
            link.bandwidth * length for link, length in zip(fabric.links, program.lengths, strict=True)
        )
        worth += sum(adder * price for adder, price in zip(adders, prices, strict=True))
        cheapest = cheapest_by_force(fabric, collective, program.lengths, prices)
        assert program.rate == program.limit == worth / cheapest, (seed, kind, ranks)
        compared += 1
    return compared


@pytest.mark.parametrize("first", range(0, 8, 4))
def test_no_trees_by_brute_force_are_better(first):
    assert sum(map(agrees_with_brute_force, range(first, first + 4))) >= 10


@pytest.mark.long
@pytest.mark.parametrize("first", range(100, 300, 20))
def test_no_trees_by_brute_force_are_better_at_length(first):
    assert sum(map(agrees_with_brute_force, range(first, first + 20))) >= 60


@pytest.mark.parametrize("kind", TREE_KINDS)
def test_the_same_question_has_the_same_answer(kind):
    fabric = drawn(3)
    first, second = (steiner_program(fabric, Collective.on(fabric, kind)) for _ in range(2))
    assert [(one.key, one.weight) for one in first.columns] == [
        (one.key, one.weight) for one in second.columns
    ]
    assert first.lengths == second.lengths


def test_other_kinds_have_no_trees():
    with pytest.raises(CollectiveError, match="alltoall: trees serve broadcast"):
        steiner_program(star(3), Collective.on(star(3), "alltoall"))


def test_a_rank_that_nothing_reaches():
    fabric = Topology.build("cut", 2, [Link(0, 2, Fraction(1)), Link(2, 0, Fraction(1))], ["s"])
    with pytest.raises(InfeasibleError, match="broadcast: some rank cannot be reached"):
        steiner_program(fabric, Collective.on(fabric, "broadcast"))
