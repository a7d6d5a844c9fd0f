"""The best rate through able switches, by every choice of forks; known values stand with the limits."""

from __future__ import annotations

from fractions import Fraction

import pytest

from arborcast.synth.collective import Collective
from arborcast.synth.errors import CollectiveError, InfeasibleError
from arborcast.synth.in_network.steiner_program import steiner_program
from arborcast.synth.topology import Link, Switch, Topology
from tests.support.able_fabrics import star


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


def test_other_kinds_have_no_trees():
    with pytest.raises(CollectiveError, match="alltoall: trees serve broadcast"):
        steiner_program(star(3), Collective.on(star(3), "alltoall"))


def test_a_rank_that_nothing_reaches():
    fabric = Topology.build("cut", 2, [Link(0, 2, Fraction(1)), Link(2, 0, Fraction(1))], ["s"])
    with pytest.raises(InfeasibleError, match="broadcast: some rank cannot be reached"):
        steiner_program(fabric, Collective.on(fabric, "broadcast"))
