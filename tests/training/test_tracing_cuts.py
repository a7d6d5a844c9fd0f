"""Where drawn traces may be cut, against a check that tries to run both halves; the choice among cuts."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from arborcast.pipeline.errors import PartitionError
from arborcast.pipeline.model.balance import balanced_cuts
from arborcast.pipeline.model.traced.cut_points import CutPoint, Item, all_cuts
from arborcast.pipeline.model.traced.layers import NEAR, worthwhile

X = Item("x", size_bytes=4, storages=frozenset({0}))


def item(name: str, *inputs: str, **more: object) -> Item:
    return Item(name, inputs, **more)  # type: ignore[arg-type]


ONE, FIVE, SEVEN, EIGHT = (frozenset({it}) for it in (1, 5, 7, 8))
BEHIND = "tick belongs to the operator behind it"
CHANGED = "changes in place what is used on both sides"
FAULTS: dict[str, tuple[list[Item], frozenset[int], list[str]]] = {
    # operators, memory of the model, the fault of each cut
    "not made of samples": (
        [item("a", varies=False), item("b", "x", "a")],
        frozenset(),
        ["a is not made of samples"],
    ),
    "not counted by samples": (
        [item("a", "x", sample_dim=None), item("b", "a")],
        frozenset(),
        ["a has no one dimension that counts samples"],
    ),
    "nothing": ([item("a", "x"), item("b")], frozenset(), ["nothing crosses"]),
    "what is copied has no position": (
        [item("mask", varies=False, copied=True), item("a", "x", "mask"), item("b", "a", "mask")],
        frozenset(),
        [""],
    ),
    "relu changes what conv made, the skip connection uses it behind that": (
        [
            item("conv", "x", storages=ONE),
            item("view", "conv", storages=ONE),
            item("relu", "conv", storages=ONE, changes=ONE),
            item("sum", "relu", "view", storages=ONE | {2}),
        ],
        frozenset(),
        [f"relu {CHANGED}", f"relu {CHANGED}", ""],
    ),
    "an input is changed by the first stage": (
        [item("a", "x"), item("b", "x", storages=X.storages, changes=X.storages), item("c", "a", "b")],
        frozenset(),
        [f"b {CHANGED}", ""],
    ),
    "a batch norm applied twice lives on one stage, a buffer that is only read on all": (
        [
            item("norm", "x", storages=SEVEN, changes=SEVEN),
            item("a", "norm", storages=EIGHT),
            item("again", "a", storages=SEVEN, changes=SEVEN),
            item("b", "again", storages=EIGHT),
        ],
        SEVEN | EIGHT,
        [f"again {CHANGED}", f"again {CHANGED}", ""],
    ),
    "a counter stays with the operator behind it": (
        [item("a", "x"), item("tick", varies=False, storages=FIVE, changes=FIVE), item("norm", "a")],
        FIVE,
        ["", BEHIND],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_may_not_cross(name: str) -> None:
    items, held, faults = FAULTS[name]
    assert [cut.fault for cut in all_cuts(items, [X], [items[-1].name], held)] == faults


@st.composite
def traces(draw: st.DrawFn) -> list[Item]:
    """Operators that read earlier ones; some are copied, some cannot be divided, some are of no samples."""
    items: list[Item] = []
    for index in range(draw(st.integers(2, 8))):
        copies = [it.name for it in items if it.copied]
        if draw(st.integers(0, 4)) == 0:
            chosen = draw(st.lists(st.sampled_from(copies), max_size=2)) if copies else []
            items.append(item(f"v{index}", *chosen, varies=False, copied=True))
            continue
        names = ["x", "y", *(it.name for it in items)]
        inputs = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        varies = draw(st.integers(0, 5)) > 0
        dim = draw(st.sampled_from([0, 0, 0, None]))
        size = draw(st.integers(0, 9))
        items.append(item(f"v{index}", *inputs, varies=varies, sample_dim=dim, size_bytes=size))
    return items


@given(traces(), st.data())
def test_both_halves_run_with_what_crosses_and_need_all_of_it(items: list[Item], data: st.DataObject) -> None:
    """Also where some of the outputs are made early; bytes are those of what crosses."""
    placed = [it for it in items if not it.copied]
    copied = {it.name for it in items if it.copied}
    early = data.draw(st.lists(st.sampled_from([it.name for it in items]), max_size=2))
    outputs = [*early, items[-1].name]
    inputs = [X, item("y", size_bytes=2)]
    by_name = {it.name: it for it in [*inputs, *items]}
    for cut in all_cuts(items, inputs, outputs):
        before, after = placed[: cut.position], placed[cut.position :]
        assert set(cut.values) <= {it.name for it in before} | {"x", "y"}
        assert cut.size_bytes == sum(by_name[it].size_bytes for it in cut.values)

        def missing(given: set[str], after: list[Item] = after) -> set[str]:
            known = given | copied
            lacking = set()
            for it in after:
                lacking |= set(it.inputs) - known
                known.add(it.name)
            return lacking | (set(outputs) - known)

        assert not missing(set(cut.values))
        for name in cut.values:
            assert missing(set(cut.values) - {name})
        legal = cut.values and all(
            by_name[name].varies and by_name[name].sample_dim is not None for name in cut.values
        )
        assert bool(cut.fault) != bool(legal)


# Choosing -------------------------------------------------------------------------------------------


def partitions(count: int, parts: int) -> list[tuple[int, ...]]:
    return list(combinations(range(1, count), parts - 1))


def heaviest(weights: list[Fraction], cuts: tuple[int, ...]) -> Fraction:
    return max(sum(weights[a:b], Fraction(0)) for a, b in pairwise((0, *cuts, len(weights))))


@given(st.data())
def test_balanced_cuts_against_all_partitions(data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0, 10) | st.integers(0, 5), min_size=1, max_size=8))
    parts = data.draw(st.integers(1, len(weights)))
    costs = data.draw(st.lists(st.integers(0, 3), min_size=len(weights), max_size=len(weights)))
    slack = data.draw(st.sampled_from([0.0, 0.25]))
    exact = [Fraction(weight) for weight in weights]
    choices = partitions(len(weights), parts)
    least = min(heaviest(exact, cuts) for cuts in choices)
    fitting = [cuts for cuts in choices if heaviest(exact, cuts) <= least * (1 + Fraction(slack))]
    cheapest = min(sum(costs[cut] for cut in cuts) for cuts in fitting)
    found = balanced_cuts(weights, parts, costs=[float(cost) for cost in costs], slack=slack)
    assert found in fitting
    assert sum(costs[cut] for cut in found) == cheapest


def test_balanced_cuts_drawn() -> None:
    #                     5 | 1  3 | 3  2
    assert balanced_cuts([5, 1, 3, 3, 2], 3) == (1, 3)
    # Within a fifth more: 6 at most, so that cut 2 can be taken, which costs nothing.
    assert balanced_cuts([5, 1, 3, 3, 2], 3, costs=[0, 9, 0, 1, 1], slack=0.2) == (2, 3)


def test_balanced_cuts_of_many() -> None:
    """1000 equal items in 64 parts: none has more than 16."""
    cuts = balanced_cuts([1] * 1000, 64)
    assert len(cuts) == 63
    assert max(b - a for a, b in pairwise((0, *cuts, 1000))) == 16


@pytest.mark.parametrize(
    ("weights", "parts", "message"),
    [
        ([1, 2], 3, r"parts must be in 1\.\.2, the number of items, got 3"),
        ([1, 2], 0, r"parts must be in 1\.\.2"),
        ([1, float("nan")], 1, "weight 1 must be finite and not negative, got nan"),
        ([-1, 1], 1, "weight 0 must be finite and not negative, got -1"),
    ],
)
def test_bad_balance(weights: list[float], parts: int, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        balanced_cuts(weights, parts)


def test_cuts_worth_having() -> None:
    """
    share of the time before    10.0 %  10.1 %  11 %  11.2 %  20 %
    bytes                       4       4       9     5       4
    kept                                x                     x
    """
    cuts = [CutPoint(at, ("v",), size) for at, size in ((1, 4), (2, 4), (3, 9), (4, 5), (5, 4))]
    assert [cut.position for cut in worthwhile(cuts, [0, 100, 101, 110, 112, 200, 1000])] == [2, 5]
    assert worthwhile(cuts, [0, 100, 200, 300, 400, 500, 1000]) == cuts
    assert [cut.position for cut in worthwhile(cuts, [0, 100, 200, 300, 400, 500, 1000], 4)] == [1, 2, 5]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50)), min_size=1, max_size=12))
def test_every_dropped_cut_has_one_as_cheap_nearby(drawn: list[tuple[int, int]]) -> None:
    cuts = [CutPoint(at, ("v",), size) for at, (size, _) in enumerate(drawn, start=1)]
    spent = [0]
    for _, time in drawn:
        spent.append(spent[-1] + time)
    spent.append(spent[-1] + 1)
    kept = worthwhile(cuts, spent)
    for cut in set(cuts) - set(kept):
        distances = [
            abs(spent[it.position] - spent[cut.position]) for it in kept if it.size_bytes <= cut.size_bytes
        ]
        assert min(distances) <= spent[-1] * NEAR
    assert min(cut.size_bytes for cut in kept) == min(cut.size_bytes for cut in cuts)
