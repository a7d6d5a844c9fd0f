"""Cheapest trees to every rank: against a shortest path through all sets of ranks, by networkx."""

from __future__ import annotations

from itertools import combinations

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.chunks.bounds import spanning_check
from arborcast.synth.chunks.bounds.spanning_check import MOST_MARKS, classes_of, spanning_costs
from arborcast.synth.errors import InputError

NEVER = 1 << 40


@st.composite
def costs(draw: st.DrawFn) -> np.ndarray:
    """Of up to 3 steps and 5 ranks, some of which are alike; sends that cannot be cost `NEVER`."""
    steps, kinds = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kind_of = [*range(kinds), *draw(st.lists(st.integers(0, kinds - 1), max_size=5 - kinds))]
    if len(kind_of) < 2:
        kind_of.append(0)
    price = st.sampled_from([0, 1, 2, 3, 5, NEVER])
    between = [[[draw(price) for _ in range(kinds)] for _ in range(kinds)] for _ in range(steps)]
    return np.array([[[each[one][other] for other in kind_of] for one in kind_of] for each in between])


def by_all_sets(between: np.ndarray, root: int) -> int:
    """The least cost from the root to everybody, through every set of ranks after each step."""
    steps, ranks, _ = between.shape
    graph = networkx.DiGraph()
    for step in range(steps):
        for size in range(1, ranks + 1):
            for held in combinations(range(ranks), size):
                absent = [rank for rank in range(ranks) if rank not in held]
                price = {rank: min(int(between[step, holder, rank]) for holder in held) for rank in absent}
                for many in range(len(absent) + 1):
                    for entered in combinations(absent, many):
                        cost = sum(price[rank] for rank in entered)
                        if cost < NEVER:
                            after = tuple(sorted((*held, *entered)))
                            graph.add_edge((step, held), (step + 1, after), weight=cost)
    try:
        return int(networkx.shortest_path_length(graph, (0, (root,)), (steps, tuple(range(ranks))), "weight"))
    except networkx.NetworkXNoPath:
        return NEVER


@settings(deadline=None, max_examples=60)
@given(costs())
def test_costs_are_those_of_the_cheapest_way_through_all_sets(between: np.ndarray) -> None:
    found = spanning_costs(between, NEVER)
    assert [min(cost, NEVER) for cost in found] == [by_all_sets(between, rank) for rank in range(len(found))]


def test_ranks_that_differ_in_one_send_of_one_step_are_not_alike() -> None:
    between = np.ones((2, 4, 4), dtype=np.int64)
    assert classes_of(between) == [[0, 1, 2, 3]]
    between[:, range(4), range(4)] = np.arange(4)  # what a rank would pay itself says nothing
    assert classes_of(between) == [[0, 1, 2, 3]]
    between[1, 2, 0] = 3
    assert classes_of(between) == [[0], [1, 3], [2]]


def test_marks_are_limited_and_counted_by_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of one rank has one mark, a larger one two."""
    alone = np.array([[[abs(one - other) ** 2 for other in range(17)] for one in range(17)]])
    with pytest.raises(InputError, match=f"to 16 targets can .* at most {MOST_MARKS} marks .*, got 17"):
        spanning_costs(alone, NEVER)
    monkeypatch.setattr(spanning_check, "MOST_MARKS", 5)
    three = [[0, 1, 1, 2, 2], [1, 0, 1, 2, 2], [1, 1, 0, 2, 2], [4, 4, 4, 0, 3], [4, 4, 4, 3, 0]]
    assert spanning_costs(np.array([three]), NEVER) == [6, 6, 6, 15, 15]
    with pytest.raises(InputError, match=r"at most 5 marks .*, got 6"):
        spanning_costs(np.array([[[10 * (a // 2) + b // 2 for b in range(6)] for a in range(6)]]), NEVER)
    assert spanning_costs(np.ones((1, 40, 40), dtype=np.int64), NEVER) == [39] * 40
    pairs = np.array([[[10 * (one // 2) + other // 2 for other in range(18)] for one in range(18)]])
    with pytest.raises(InputError, match="got 18"):
        spanning_costs(pairs, NEVER)
