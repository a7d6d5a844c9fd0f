"""Whether a few trees reach a rate: every choice of them by hand, or by scipy's linear programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from arborcast.synth.deadline import Deadline
from arborcast.synth.lp.branch_and_bound import EFFORT, is_ruled_out
from arborcast.synth.lp.tree_program import TreeRows

NO_END = Deadline.after(None)


@dataclass(frozen=True)
class Uses:
    """A tree of a group, by the rows that it uses."""

    group: int
    used: Mapping[int, int]


def ruled_out(
    rows: TreeRows,
    trees: Sequence[Uses],
    most: int,
    rate: Fraction,
    *,
    strictly: bool,
    deadline: Deadline = NO_END,
    effort: int = EFFORT,
) -> bool:
    return is_ruled_out(rows, trees, most, rate, strictly=strictly, deadline=deadline, effort=effort)


def best_of(rows: TreeRows, trees: Sequence[Uses]) -> float:
    """The sum of the shares of these trees alone."""
    shares, groups = rows.shares, len(rows.share_of)
    loads = [
        [0.0] * shares + [tree.used.get(row, 0) for tree in trees] for row in range(len(rows.capacities))
    ]
    even = [
        [-float(rows.share_of[group] == share) for share in range(shares)]
        + [float(tree.group == group) for tree in trees]
        for group in range(groups)
    ]
    gain = [-1.0] * shares + [0.0] * len(trees)
    answer = linprog(gain, loads, [float(each) for each in rows.capacities], even, [0.0] * groups)
    return -float(answer.fun)


def choices(rows: TreeRows, trees: Sequence[Uses], most: int) -> Iterator[list[Uses]]:
    """Every choice of at most so many trees of each group."""
    of_group = [[tree for tree in trees if tree.group == group] for group in range(len(rows.share_of))]
    some = [[part for count in range(most + 1) for part in combinations(each, count)] for each in of_group]
    for parts in product(*some):
        yield list(chain.from_iterable(parts))


@st.composite
def questions(draw: st.DrawFn) -> tuple[TreeRows, list[Uses]]:
    """Up to 3 rows and 6 trees: of one group, of two that carry the same, or of two with their own shares."""
    rows = draw(st.integers(1, 3))
    share_of = draw(st.sampled_from([(0,), (0, 0), (0, 1)]))
    capacities = tuple(Fraction(draw(st.integers(1, 4)), 3) for _ in range(rows))
    used = st.dictionaries(st.integers(0, rows - 1), st.integers(1, 2), min_size=1)
    trees = [
        Uses(draw(st.integers(0, len(share_of) - 1)), draw(used)) for _ in range(draw(st.integers(2, 6)))
    ]
    return TreeRows(capacities, share_of), trees


@settings(deadline=None, max_examples=60)
@given(questions(), st.integers(1, 2))
def test_agrees_with_every_choice(question: tuple[TreeRows, list[Uses]], most: int) -> None:
    rows, trees = question
    best = max(best_of(rows, chosen) for chosen in choices(rows, trees, most))
    for strictly in (False, True):
        assert ruled_out(
            rows, trees, most, Fraction(best) * Fraction(101, 100) + Fraction(1, 100), strictly=strictly
        )
        if best:
            assert not ruled_out(rows, trees, most, Fraction(best) * Fraction(99, 100), strictly=strictly)


APART = TreeRows((Fraction(1, 3),) * 3, (0,))
"""Three rows of a third each; a tree along each alone fills one of them."""
ALONE = [Uses(0, {row: 1}) for row in range(3)]


def test_the_rate_itself_is_out_of_reach_only_strictly() -> None:
    two = Fraction(2, 3)
    assert ruled_out(APART, ALONE, 2, two, strictly=False)
    assert not ruled_out(APART, ALONE, 2, two, strictly=True)
    assert not ruled_out(APART, ALONE, 3, two, strictly=False)
    assert ruled_out(APART, ALONE, 2, two + Fraction(1, 1000), strictly=True)


PAIRS = (
    TreeRows((Fraction(1),) * 3, (0,)),
    [Uses(0, {0: 1, 1: 1}), Uses(0, {1: 1, 2: 1}), Uses(0, {0: 1, 2: 1})],
)
"""Three trees of half the use each carry 3/2 together; any two meet in a row, and carry 1 as one does."""


def test_parts_of_trees_carry_more_than_any_choice() -> None:
    """Programs alone say 3/2: only branching tells."""
    assert not ruled_out(*PAIRS, 3, Fraction(149, 100), strictly=True)
    assert ruled_out(*PAIRS, 2, Fraction(101, 100), strictly=True)
    assert ruled_out(*PAIRS, 2, Fraction(1), strictly=False)
    assert not ruled_out(*PAIRS, 1, Fraction(1), strictly=True)


def test_a_choice_that_is_complete_keeps_its_trees() -> None:
    """One tree, whichever it is, of six that HiGHS would rather mix: the widest alone carries 3/2."""
    rows = TreeRows((Fraction(4, 3), Fraction(1), Fraction(3)), (0,))
    used = [{2: 1, 0: 2, 1: 2}, {1: 2, 2: 2, 0: 1}, {2: 1, 0: 1}, {2: 2}, {0: 2, 2: 1, 1: 2}, {0: 2, 2: 2}]
    trees = [Uses(0, each) for each in used]
    assert not ruled_out(rows, trees, 1, Fraction(297, 200), strictly=True)
    assert ruled_out(rows, trees, 1, Fraction(303, 200), strictly=True)


def test_each_group_has_its_own_number_of_trees() -> None:
    """A group of one tree beside the three pairs: what it uses says nothing of how many the others use."""
    rows, trees = PAIRS
    both = TreeRows((*rows.capacities, Fraction(1)), (0, 1))
    assert ruled_out(both, [*trees, Uses(1, {3: 1})], 2, Fraction(201, 100), strictly=True)
    assert not ruled_out(both, [*trees, Uses(1, {3: 1})], 3, Fraction(249, 100), strictly=True)


@pytest.mark.parametrize("strictly", [False, True])
def test_a_share_without_trees_is_zero_and_others_are_not(strictly: bool) -> None:
    """Two groups of one share carry the same: nothing where one has no trees. Other shares are their own."""
    one, both = [Uses(0, {0: 1})], [Uses(0, {0: 1}), Uses(1, {0: 1})]
    little, half, most_of_it = Fraction(1, 100), Fraction(49, 100), Fraction(99, 100)
    together, apart = (TreeRows((Fraction(1),), shares) for shares in ((0, 0), (0, 1)))
    assert ruled_out(together, one, 1, little, strictly=strictly)
    assert not ruled_out(together, both, 1, half, strictly=strictly)
    assert not ruled_out(apart, one, 1, most_of_it, strictly=strictly)
    assert not ruled_out(apart, both, 1, most_of_it, strictly=strictly)


def test_effort_counts_the_entries_of_every_program() -> None:
    rate = Fraction(5, 6)
    assert not ruled_out(APART, ALONE, 2, rate, strictly=True, effort=0)
    assert ruled_out(APART, ALONE, 2, rate, strictly=True, effort=1)
    # Six entries of all trees; four without one; six with one taken; of these four without another one, and
    # the last program, of two trees that are taken, is begun while any effort is left.
    assert not ruled_out(*PAIRS, 2, Fraction(101, 100), strictly=True, effort=6 + 4 + 6 + 4)
    assert ruled_out(*PAIRS, 2, Fraction(101, 100), strictly=True, effort=6 + 4 + 6 + 4 + 1)


def test_what_is_taken_leaves_fewer_trees_for_the_others() -> None:
    """Beside the three pairs a tree of 1/2: two carry 3/2, parts of all 7/4. One branch tells, whichever."""
    rows = TreeRows((Fraction(1), Fraction(1), Fraction(1), Fraction(1, 2)), (0,))
    trees = [*PAIRS[1], Uses(0, {3: 1})]
    assert not ruled_out(rows, trees, 2, Fraction(3, 2), strictly=True)
    assert ruled_out(rows, trees, 2, Fraction(8, 5), strictly=True, effort=7 + 6 + 1)


def test_a_deadline_that_has_passed_proves_nothing() -> None:
    assert not ruled_out(APART, ALONE, 2, Fraction(1), strictly=True, deadline=Deadline.after(0))
