"""What trees cost where relays and able switches take part, by trying every choice of who joins and forks."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, TypeAlias

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arborcast.synth.certification.metric import Metric
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Link, Switch, Topology
from tests.support.able_limits import Prices, distance

Weights: TypeAlias = dict[tuple[int, int], int]
KINDS = [Kind.BROADCAST, Kind.REDUCE, Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE]


ABLE = [
    {"multicasts": True},
    {"reduces": True},
    {"reduces": True, "multicasts": True},
    {"reduces": True, "multicasts": True, "turns": True},
    {"reduces": True, "multicasts": True, "loopback": True},
    {"reduces": True, "adder": Fraction(1)},
    {"reduces": True, "multicasts": True, "turns": True, "adder": Fraction(1)},
]


@st.composite
def questions(draw: Any) -> tuple[Topology, Weights, dict[int, int], Collective]:
    ranks, able, plain = draw(st.integers(2, 4)), draw(st.integers(0, 2)), draw(st.integers(0, 1))
    abilities = [draw(st.sampled_from(ABLE)) for _ in range(able)] + [{}] * plain
    switches = [Switch(f"s{number}", **can) for number, can in enumerate(abilities)]
    size = ranks + len(switches)
    order = draw(st.permutations(range(size)))
    hops = {(order[at - 1], order[at]) for at in range(size)}
    pairs = st.sampled_from([(a, b) for a in range(size) for b in range(size) if a != b])
    hops |= set(draw(st.lists(pairs, max_size=3 * size)))
    far = st.integers(0 if draw(st.booleans()) else 1, draw(st.sampled_from([1, 3, 9])))
    topology = Topology.build("drawn", ranks, [Link(a, b, Fraction(1)) for a, b in sorted(hops)], switches)
    lengths = {(link.src, link.dst): draw(far) for link in topology.links}
    prices = {vertex: draw(st.integers(0, 5)) for vertex in topology.limited_adders}
    few = sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=2)))
    collective = Collective.on(
        topology, draw(st.sampled_from(KINDS)), root=draw(st.sampled_from(few)), ranks=few
    )
    assume(len(few) < ranks or able)
    return topology, lengths, prices, collective


def found(topology: Topology, lengths: Weights, prices: dict[int, int], collective: Collective) -> Fraction:
    inorder = [Fraction(lengths[link.src, link.dst]) for link in topology.links]
    paid = [Fraction(prices[vertex]) for vertex in topology.limited_adders]
    return Metric.of(topology, inorder, paid).distance(collective)


def priced(lengths: Weights, prices: dict[int, int]) -> Prices:
    return {key: Fraction(price) for key, price in {**lengths, **prices}.items()}


@given(questions())
@settings(max_examples=300)
def test_as_by_trying_every_choice(question: tuple[Topology, Weights, dict[int, int], Collective]) -> None:
    topology, lengths, prices, collective = question
    assert found(*question) == distance(topology, collective, priced(lengths, prices))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("can", ABLE[2:5])
def test_ranks_that_are_alike_are_counted(can: dict[str, bool], kind: Kind) -> None:
    """A star of as many ranks as no single list of subsets could hold: each adds its own way."""
    ranks = 40
    star = Topology.build(
        "star",
        ranks,
        [Link(*hop, Fraction(1)) for v in range(ranks) for hop in ((v, ranks), (ranks, v))],
        [Switch("hub", **can)],
    )
    lengths = {(link.src, link.dst): 2 if link.dst == ranks else 3 for link in star.links}
    up, down, back = 2, 3, int(can.get("loopback", False))
    spread = up + (ranks - 1 + back) * down
    gather = down + (ranks - 1 + back) * up
    expected = {
        Kind.BROADCAST: spread,
        Kind.ALLGATHER: spread,
        Kind.REDUCE: gather,
        Kind.REDUCE_SCATTER: gather,
        Kind.ALLREDUCE: ranks * (up + down) if can.get("turns") else spread + gather,
    }
    assert found(star, lengths, {}, Collective.on(star, kind)) == expected[kind]


def test_too_many_that_are_unlike() -> None:
    size = 18
    hops = [hop for v in range(size) for hop in ((v, size), (size, v))]
    fan = Topology.build(
        "fan", size, [Link(*hop, Fraction(1)) for hop in hops], [Switch("hub", multicasts=True)]
    )
    lengths = {(link.src, link.dst): 1 + min(link.src, link.dst) for link in fan.links}
    with pytest.raises(InputError, match="at most 16 ranks may be apart, or more that are alike, got 18"):
        found(fan, lengths, {}, Collective.on(fan, "allgather"))
