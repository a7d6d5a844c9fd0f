"""Where positions of a pattern may lie, against all orders of the ranks."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.baselines import pattern
from arborcast.synth.deadline import NO_DEADLINE

pairs = st.integers(2, 5).flatmap(
    lambda count: st.tuples(
        st.just(count),
        *(
            st.sets(st.tuples(*[st.integers(0, count - 1)] * 2).filter(lambda pair: pair[0] != pair[1]))
            for _ in range(2)
        ),
    )
)


@settings(max_examples=200)
@given(pairs, st.booleans(), st.permutations(range(5)))
def test_all_are_found(
    drawn: tuple[int, set[tuple[int, int]], set[tuple[int, int]]], is_pinned: bool, order: list[int]
) -> None:
    count, edges, joined = drawn
    ranks = [10 + rank for rank in order if rank < count]
    there = {(ranks[src], ranks[dst]) for src, dst in joined}
    pinned = {count - 1: ranks[0]} if is_pinned else {}
    found = list(pattern.embeddings(edges, there, ranks, pinned, 200, NO_DEADLINE))
    every = {
        placed
        for placed in permutations(ranks)
        if all((placed[src], placed[dst]) in there for src, dst in edges)
        and all(placed[position] == rank for position, rank in pinned.items())
    }
    assert len(found) == len(set(found)) and set(found) == every
    few = list(pattern.embeddings(edges, there, ranks, pinned, 1, NO_DEADLINE))
    assert few == found[:1]


def test_a_search_that_is_cut_short_says_so() -> None:
    """A clique of nine less one pair has no clique of nine, and nearly all orders look as if it had."""
    every = {(a, b) for a in range(9) for b in range(9) if a != b}
    found = list(pattern.embeddings(every, every - {(7, 8)}, range(9), {}, 1, NO_DEADLINE))
    assert found == [None]
