"""Every label beside an exact reference (`fuzzing.comparison` lists them), on ten thousand random fabrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest

from arborcast import synth, topologies
from arborcast.synth.collective import Collective
from arborcast.synth.topology import Link, Topology
from tests.fuzzing.chunk_search import exists
from tests.fuzzing.comparison import OFTEN, compare
from tests.fuzzing.exact_lp import Program
from tests.fuzzing.tally import Tally

BLOCKS, OF_BLOCK = 100, 100
SOME = range(1_000_000, 1_000_025)
QUICK = {name: often for name, often in OFTEN.items() if name not in {"fastest", "frontier"}}

log = logging.getLogger(__name__)


def none_is_false(seeds: range, often: Mapping[str, int] = OFTEN) -> Tally:
    tally = Tally()
    for seed in seeds:
        compare(seed, tally, often)
    labels = sum(tally.compared.values())
    summary = f"{tally.fabrics} fabrics, {labels} labels compared, {len(tally.false)} false"
    log.info("%s; open: %s", summary, dict(tally.unknown))
    assert not tally.false, "\n".join([summary, *tally.false])
    return tally


def test_labels_of_some_fabrics():
    tally = none_is_false(SOME, QUICK)
    assert sum(tally.compared.values()) > 4 * len(SOME)


@pytest.mark.long
@pytest.mark.parametrize("block", range(BLOCKS))
def test_labels_of_ten_thousand_fabrics(block):
    none_is_false(range(block * OF_BLOCK, (block + 1) * OF_BLOCK))


def test_a_false_bound_and_a_crash_are_noted(monkeypatch):
    true_bound = synth.bound

    def doubled(topology, collective):
        found = true_bound(topology, collective)
        return replace(found, rate=found.rate * 2)

    def broken(topology, collective):
        raise KeyError("lost")

    for wrong, word in ((doubled, "is exact"), (broken, "crash: KeyError")):
        monkeypatch.setattr(synth, "bound", wrong)
        tally = Tally()
        compare(1, tally, {"bound": 1})
        assert any(word in line for line in tally.false)


def test_the_simplex_method_agrees_with_the_basis_of_highs():
    for seed in range(40):
        rng = Random(seed)
        program = Program()
        for _ in range(6):
            program.at_most({name: rng.randint(0, 4) for name in "abcd"}, Fraction(rng.randint(0, 9), 7))
        program.at_most(dict.fromkeys("abcd", 1), 10**9)
        for _ in range(3):
            program.at_most({"rate": 1, **{name: -rng.randint(1, 4) for name in "abcd"}})
        target = program.columns["rate"]
        by_simplex = program._by_simplex(target).get(target, 0)
        assert program.maximum("rate") == by_simplex


def test_what_an_allreduce_can_say():
    # Exchanges with one neighbour and then with the other.
    square = topologies.load("ring:4")
    everyone = Collective.on(square, "allreduce")
    assert exists(square, everyone, 1, 2, 2) is True
    assert exists(square, everyone, 1, 1, 9) is False
    # One way round, what came in must go on without one's own, which takes several partial sums at a rank.
    turn = Topology.build("turn", 3, [Link(rank, (rank + 1) % 3, Fraction(1)) for rank in range(3)])
    everyone = Collective.on(turn, "allreduce")
    assert exists(turn, everyone, 1, 2, 2, several=True) is True
    assert exists(turn, everyone, 1, 2, 2) is False
    # A relay holds nothing at first, and takes a step of its own.
    hub = Topology.build("hub", 3, [Link(*ends, Fraction(1)) for ends in [(0, 2), (2, 0), (1, 2), (2, 1)]])
    pair = Collective.on(hub, "allreduce", ranks=[0, 1])
    assert exists(hub, pair, 1, 1, 3) is False
    assert exists(hub, pair, 1, 2, 2) is True
