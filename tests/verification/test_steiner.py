"""What trees cost where relays and able switches take part, by trying every choice of who joins and forks."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, TypeAlias

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arborcast.synth.certification.metric import Metric
from arborcast.synth.collective import TREE_KINDS, Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Link, Switch, Topology
from tests.support.able_fabrics import ABLE
from tests.support.able_limits import Prices, distance

Weights: TypeAlias = dict[tuple[int, int], int]
LIMITED = [{**abilities, "adder": Fraction(1)} for abilities in (ABLE[0], ABLE[3])]


@st.composite
def questions(draw: Any) -> tuple[Topology, Weights, dict[int, int], Collective]:
    ranks, able, plain = draw(st.integers(2, 4)), draw(st.integers(0, 2)), draw(st.integers(0, 1))
    abilities = [draw(st.sampled_from([*ABLE, *LIMITED])) for _ in range(able)] + [{}] * plain
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
        topology, draw(st.sampled_from(TREE_KINDS)), root=draw(st.sampled_from(few)), ranks=few
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


def around(can: dict[str, Any], ways: list[tuple[int, int]], more: Weights) -> tuple[Topology, Weights]:
    """Ranks around a switch, how far each is from it and how far it is from each, and other links."""
    hub = len(ways)
    lengths = {
        hop: far for v, (up, down) in enumerate(ways) for hop, far in (((v, hub), up), ((hub, v), down))
    }
    lengths |= more
    links = [Link(*hop, Fraction(1)) for hop in lengths]
    return Topology.build("around", hub, links, [Switch("hub", **can)]), lengths


@pytest.mark.parametrize("kind", TREE_KINDS)
@pytest.mark.parametrize("can", ABLE)
def test_ranks_that_are_alike_are_counted(can: dict[str, bool], kind: Kind) -> None:
    """A star of as many ranks as no single list of subsets could hold: each adds its own way."""
    ranks, up, down, back = 40, 2, 3, int(can.get("loopback", False))
    star, lengths = around(can, [(up, down)] * ranks, {})
    forwarded = (ranks - 1) * (up + down)
    spread = up + (ranks - 1 + back) * down if "multicasts" in can else forwarded
    gather = down + (ranks - 1 + back) * up if "reduces" in can else forwarded
    expected = {
        Kind.BROADCAST: spread,
        Kind.ALLGATHER: spread,
        Kind.REDUCE: gather,
        Kind.REDUCE_SCATTER: gather,
        Kind.ALLREDUCE: ranks * (up + down) if can.get("turns") else spread + gather,
    }
    assert found(star, lengths, {}, Collective.on(star, kind)) == expected[kind]


def test_what_is_as_far_from_all_but_not_as_near_to_all_is_not_alike() -> None:
    """Between 0 and 1 it is 4. The hub is 20, 22 and 9 away and they 1 from it, then turned round."""
    for ways, costs in (
        ([(20, 1), (22, 1), (9, 1)], (22, 24, 11)),
        ([(1, 20), (1, 22), (1, 9)], (14, 14, 25)),
    ):
        fabric, lengths = around({"multicasts": True}, ways, {(0, 1): 4, (1, 0): 4})
        for root, cost in enumerate(costs):
            assert found(fabric, lengths, {}, Collective.on(fabric, "broadcast", root=root)) == cost


def test_what_another_switch_hands_on_does_not_come_back() -> None:
    """From 0 by 3 to 4, which alone has loopback and is 1 from the others; the way back is 11, not 2."""
    lengths = {hop: 1 for v, hub in ((0, 3), (1, 4), (2, 4)) for hop in ((v, hub), (hub, v))}
    lengths |= {(3, 4): 1, (4, 3): 10}
    switches = [Switch("near", **ABLE[2]), Switch("far", **ABLE[4])]
    fabric = Topology.build("two hubs", 3, [Link(*hop, Fraction(1)) for hop in lengths], switches)
    for kind, cost in (("broadcast", 1 + 1 + 2), ("reduce", 2 + 10 + 1)):
        assert found(fabric, lengths, {}, Collective.on(fabric, kind)) == cost


def test_what_joins_at_one_switch_forks_at_another() -> None:
    """Up to 4, which adds for 2, ways are 1, 2 and 3; over 1 to 3, which copies, and down 1 each."""
    lengths = {hop: far for v in range(3) for hop, far in (((v, 4), v + 1), ((3, v), 1))} | {(4, 3): 1}
    switches = [Switch("out", multicasts=True), Switch("in", reduces=True, adder=Fraction(1))]
    fabric = Topology.build("two ways", 3, [Link(*hop, Fraction(1)) for hop in lengths], switches)
    for kind, cost in (("allreduce", 6 + 2 + 1 + 3), ("broadcast", 1 + 1 + 2), ("reduce", 2 + 3 + 2 + 1 + 1)):
        assert found(fabric, lengths, {4: 2}, Collective.on(fabric, kind)) == cost


def test_what_a_switch_at_a_rank_can_do_the_rank_can() -> None:
    fabric, lengths = around({"reduces": True}, [(0, 0), (3, 2)], {})
    assert found(fabric, lengths, {}, Collective.on(fabric, "broadcast")) == 2
    assert found(fabric, lengths, {}, Collective.on(fabric, "allreduce")) == 5


def test_too_many_that_are_unlike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is as far from the hub as from there: all trees over it cost the sum of that."""

    def cost(ranks: int, more: Weights) -> Fraction:
        fan, lengths = around({"multicasts": True}, [(v, v) for v in range(1, ranks + 1)], more)
        return found(fan, lengths, {}, Collective.on(fan, "allgather"))

    with pytest.raises(InputError, match="at most 16 ranks may be apart, or more that are alike, got 18"):
        cost(18, {})
    monkeypatch.setattr("arborcast.synth.certification.steiner.MOST_PARTS", 3**3)
    assert cost(3, {}) == cost(4, {(2, 3): 0, (3, 2): 0}) == 1 + 2 + 3
    with pytest.raises(InputError, match=r"got 4$"):
        cost(4, {})
