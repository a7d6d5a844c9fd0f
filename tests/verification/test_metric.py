"""Lengths and prices of a certificate in whole units: by hand, to the last unit that int64 may hold."""

from __future__ import annotations

from fractions import Fraction

import pytest

from arborcast.synth import features
from arborcast.synth.certificate import Cut, Scope
from arborcast.synth.certification import certified_rate, certified_scope, dual_of
from arborcast.synth.certification.exact_paths import FAR
from arborcast.synth.certification.metric import Metric, Others
from arborcast.synth.certification.proven_rates import share_leaving
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError, TopologyError
from arborcast.synth.topology import Link, Switch, Topology
from tests.support.drawn_in_network import star

ADDER = star(3, Switch("s", reduces=True, multicasts=True, turns=True, adder=Fraction(1, 2)))
PAIR = Topology.build("pair", 2, [Link(0, 1, Fraction(1)), Link(1, 0, Fraction(1))])
LINE = Topology.build("line", 3, [Link(0, 1, Fraction(1)), Link(1, 0, Fraction(1)), Link(1, 2, Fraction(1))])


def lengths(topology: Topology, *first: Fraction | int) -> tuple[Fraction, ...]:
    """These, and 0 for all other links."""
    given = tuple(map(Fraction, first))
    return given + (Fraction(0),) * (len(topology.links) - len(given))


def test_prices_of_adders_are_in_the_units_of_lengths() -> None:
    metric = Metric.of(ADDER, lengths(ADDER, Fraction(1, 2), 3), (Fraction(2, 3),))
    (switch,) = ADDER.limited_adders
    assert (metric.scale, metric.adders, metric.lengths.tolist()[:3]) == (6, {switch: 4}, [3, 18, 0])
    assert Metric.of(ADDER, lengths(ADDER), (Fraction(0),)).adders == {switch: 0}
    assert Metric.of(ADDER, lengths(ADDER)).adders == {}


@pytest.mark.parametrize(
    ("adders", "message"),
    [
        ((Fraction(1), Fraction(1)), r"one price per limited adder \(1\), got 2"),
        ((Fraction(-1, 3),), "price of the adder of .* must not be negative, got -1/3"),
    ],
)
def test_prices_that_do_not_fit(adders: tuple[Fraction, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Metric.of(ADDER, lengths(ADDER), adders)


@pytest.mark.parametrize(
    ("topology", "adder", "times", "paid"),
    [(PAIR, None, 2, 0), (LINE, None, 3, 0), (ADDER, 0, 8, 4), (ADDER, 5, 8, 4)],
)
def test_the_largest_lengths(topology: Topology, adder: int | None, times: int, paid: int) -> None:
    """No sum of ways may reach what stands for none: lengths count so often, a price so often."""
    prices = () if adder is None else (Fraction(adder),)
    most = (FAR - 1 - (adder or 0) * paid) // times
    Metric.of(topology, lengths(topology, most), prices)
    with pytest.raises(InputError, match="too many digits"):
        Metric.of(topology, lengths(topology, most + 1), prices)


def blocks(*sizes: tuple[int, ...]) -> Collective:
    """An alltoall of blocks of these sizes."""
    return Collective(Kind.ALLTOALL, tuple(range(len(sizes))), sizes=sizes)


def test_blocks_count_by_their_sizes() -> None:
    metric = Metric.of(LINE, (Fraction(1), Fraction(2), Fraction(4)))
    # One unit is a third of all blocks: 3 * (5 * 1 + 2 * 5 + 7 * 2 + 1 * 4) / 15.
    assert metric.distance(blocks((9, 5, 2), (7, 0, 1), (0, 0, 0))) == 3 * Fraction(5 + 10 + 14 + 4, 24)
    with pytest.raises(InputError, match="alltoall: some rank cannot be reached"):
        metric.distance(blocks((0, 5, 2), (7, 0, 1), (1, 0, 0)))
    with pytest.raises(InputError, match="alltoall: some rank cannot be reached"):
        metric.distance(Collective(Kind.ALLTOALL, (0, 1, 2)))


def test_a_tree_both_ways_of_some_ranks_is_not_priced() -> None:
    line = Topology.build("line", 3, [Link(a, b, Fraction(1)) for a, b in ((0, 1), (1, 0), (1, 2), (2, 1))])
    metric = Metric.of(line, (Fraction(1), Fraction(3), Fraction(2), Fraction(2)))
    assert metric.undirected_tree(Collective(Kind.ALLREDUCE, (0, 1, 2))) == 1 + 2
    assert metric.undirected_tree(Collective(Kind.ALLREDUCE, (0, 2))) is None  # rank 1 may join and fork
    everybody = Collective(Kind.ALLREDUCE, (0, 1, 2))
    far, near = (Metric.of(ADDER, given) for given in ((Fraction(1),) * 6, lengths(ADDER, 1, 1)))
    assert far.undirected_tree(everybody) is None  # so may the switch
    assert far.distance(everybody, Others.FORWARD) == 2 * 2 * 2
    assert near.undirected_tree(everybody) == 0  # where it is no way from a rank, it stands for that rank


def test_what_links_and_adders_offer() -> None:
    everybody, ones = Collective(Kind.ALLREDUCE, (0, 1, 2)), (Fraction(1),) * 6
    dual = dual_of(ADDER, everybody, ones, (Fraction(3),))
    assert dual.capacity == sum(link.bandwidth for link in ADDER.links) + Fraction(1, 2) * 3
    assert dual_of(ADDER, everybody, ones).capacity == sum(link.bandwidth for link in ADDER.links)
    assert certified_scope(ADDER, everybody, dual) is Scope.TREES  # the switch may join and fork


def test_blocks_that_leave_count_by_their_sizes() -> None:
    collective = blocks((9, 5, 2), (7, 0, 1), (4, 3, 0))
    assert share_leaving(collective, frozenset({0, 1})) == Fraction((2 + 1) * 3, 31)
    assert share_leaving(collective, frozenset({2})) == Fraction((4 + 3) * 3, 31)


def test_what_checkers_overlook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(features.UNDERSTOOD, "switch adder")
    with pytest.raises(TopologyError, match="adder"):
        certified_rate(ADDER, Collective(Kind.ALLREDUCE, (0, 1, 2)), Cut(frozenset({0}), Fraction(1)))
