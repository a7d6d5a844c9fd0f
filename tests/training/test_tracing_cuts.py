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


def test_crossing_values_of_a_skip_connection() -> None:
    """
    x -> a -> b -> c -> d      cut   crosses
         |______________^       1    a
                                2    a b
                                3    a c
    """
    items = [
        item("a", "x", size_bytes=8),
        item("b", "a", size_bytes=2),
        item("c", "b", size_bytes=1),
        item("d", "c", "a"),
    ]
    assert all_cuts(items, [X], ["d"]) == (
        CutPoint(1, ("a",), 8),
        CutPoint(2, ("a", "b"), 10),
        CutPoint(3, ("a", "c"), 9),
    )


def test_inputs_and_early_outputs_cross_to_where_they_are_used() -> None:
    items = [item("a", "x"), item("b", "a"), item("c", "b", "y")]
    cuts = all_cuts(items, [X, item("y")], ["a", "c"])
    assert [cut.values for cut in cuts] == [("y", "a"), ("y", "a", "b")]


def test_what_is_copied_has_no_position_and_does_not_cross() -> None:
    items = [
        item("mask", varies=False, copied=True),
        item("a", "x", "mask"),
        item("b", "a", "mask"),
    ]
    assert all_cuts(items, [X], ["b"]) == (CutPoint(1, ("a",), 0),)


@pytest.mark.parametrize(
    ("items", "fault"),
    [
        ([item("a", varies=False), item("b", "x", "a")], "a is not made of samples"),
        ([item("a", "x", sample_dim=None), item("b", "a")], "a has no one dimension that counts samples"),
        ([item("a", "x"), item("b")], "nothing crosses"),
    ],
)
def test_what_may_not_cross(items: list[Item], fault: str) -> None:
    assert [cut.fault for cut in all_cuts(items, [X], ["b"])] == [fault]


def test_a_batch_may_cross_after_its_last_change() -> None:
    """relu changes what conv made; the skip connection uses it behind that."""
    one = frozenset({1})
    items = [
        item("conv", "x", storages=one),
        item("view", "conv", storages=one),
        item("relu", "conv", storages=one, changes=one),
        item("sum", "relu", "view", storages=one | {2}),
    ]
    assert [bool(cut.fault) for cut in all_cuts(items, [X], ["sum"])] == [True, True, False]
    assert "relu changes in place" in all_cuts(items, [X], ["sum"])[0].fault


def test_an_input_that_is_changed_is_changed_by_the_first_stage() -> None:
    items = [
        item("a", "x"),
        item("b", "x", storages=frozenset({0}), changes=frozenset({0})),
        item("c", "a", "b"),
    ]
    assert [bool(cut.fault) for cut in all_cuts(items, [X], ["c"])] == [True, False]


def test_a_buffer_that_is_changed_lives_on_one_stage() -> None:
    """A batch norm applied twice; a third operator only reads another buffer, which all may have."""
    seven, eight = frozenset({7}), frozenset({8})
    items = [
        item("norm", "x", storages=seven, changes=seven),
        item("a", "norm", storages=eight),
        item("again", "a", storages=seven, changes=seven),
        item("b", "again", storages=eight),
    ]
    cuts = all_cuts(items, [X], ["b"], held=seven | eight)
    assert [bool(cut.fault) for cut in cuts] == [True, True, False]


def test_a_counter_stays_with_the_operator_behind_it() -> None:
    five = frozenset({5})
    items = [
        item("a", "x"),
        item("tick", varies=False, storages=five, changes=five),
        item("norm", "a"),
    ]
    cuts = all_cuts(items, [X], ["norm"], held=five)
    assert [cut.fault for cut in cuts] == ["", "tick belongs to the operator behind it"]


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
        names = ["x", *(it.name for it in items)]
        inputs = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        varies = draw(st.integers(0, 5)) > 0
        dim = draw(st.sampled_from([0, 0, 0, None]))
        items.append(item(f"v{index}", *inputs, varies=varies, sample_dim=dim))
    return items


@given(traces())
def test_both_halves_run_with_what_crosses_and_need_all_of_it(items: list[Item]) -> None:
    placed = [it for it in items if not it.copied]
    copied = {it.name for it in items if it.copied}
    outputs = [items[-1].name]
    for cut in all_cuts(items, [X], outputs):
        before, after = placed[: cut.position], placed[cut.position :]
        assert set(cut.values) <= {it.name for it in before} | {"x"}

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
        by_name = {it.name: it for it in [X, *items]}
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
