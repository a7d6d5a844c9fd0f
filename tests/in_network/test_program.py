"""The best rate through able switches, by every choice of forks; known values stand with the limits."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from arborcast.synth.collective import TREE_KINDS, Collective
from arborcast.synth.errors import CollectiveError, InfeasibleError
from arborcast.synth.in_network.steiner_program import steiner_program
from arborcast.synth.topology import Link, Switch, Topology
from tests.support.able_fabrics import drawn, star
from tests.support.able_limits import distance


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


def agrees_with_brute_force(seed: int, most: int = 8) -> int:
    """Every kind on a drawn fabric, among all or some ranks: what ours carries is all that there can be."""
    fabric, rng = drawn(seed, most), random.Random(seed)
    compared = 0
    for kind in TREE_KINDS:
        count = rng.randint(2, fabric.ranks) if rng.random() < 0.4 else fabric.ranks
        ranks = rng.sample(range(fabric.ranks), count)
        collective = Collective.on(fabric, kind, root=ranks[0], ranks=ranks)
        try:
            program = steiner_program(fabric, collective)
        except InfeasibleError:
            continue
        worth = fabric.bandwidth | {v: fabric.switches[v - fabric.ranks].adder for v in fabric.limited_adders}
        prices = dict(zip(worth, (*program.lengths, *program.adders), strict=True))
        cost = sum(worth[key] * price for key, price in prices.items())
        cheapest = distance(fabric, collective, prices)
        assert program.rate == program.limit == cost / cheapest, (seed, kind, ranks)
        compared += 1
    return compared


@pytest.mark.parametrize("first", range(0, 8, 4))
def test_no_trees_by_brute_force_are_better(first):
    assert sum(agrees_with_brute_force(seed, most=7) for seed in range(first, first + 4)) >= 10


@pytest.mark.long
@pytest.mark.parametrize("first", range(100, 300, 20))
def test_no_trees_by_brute_force_are_better_at_length(first):
    assert sum(map(agrees_with_brute_force, range(first, first + 20))) >= 60


def test_other_kinds_have_no_trees():
    with pytest.raises(CollectiveError, match="alltoall: trees serve broadcast"):
        steiner_program(star(3), Collective.on(star(3), "alltoall"))


def test_a_rank_that_nothing_reaches():
    fabric = Topology.build("cut", 2, [Link(0, 2, Fraction(1)), Link(2, 0, Fraction(1))], ["s"])
    with pytest.raises(InfeasibleError, match="broadcast: some rank cannot be reached"):
        steiner_program(fabric, Collective.on(fabric, "broadcast"))
