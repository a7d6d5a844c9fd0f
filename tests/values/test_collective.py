from __future__ import annotations

from fractions import Fraction

import pytest

from arborcast.synth.collective import NAMED_KINDS, Block, Collective, Kind, busbw_factor
from arborcast.synth.errors import CollectiveError
from arborcast.synth.topology import Link, Topology

LINE = Topology.build("line", 4, [Link(i, i + 1, Fraction(1)) for i in range(3)])
ROOTED = {Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER}


@pytest.mark.parametrize("kind", NAMED_KINDS)
def test_only_rooted_kinds_have_a_root(kind: Kind) -> None:
    collective = Collective.on(LINE, kind.value, root=2)
    assert collective.root == (2 if kind in ROOTED else None)
    assert collective.ranks == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "alreduce"}, "collective alreduce: must be one of broadcast, reduce, allgather"),
        ({"kind": "broadcast", "root": 3, "ranks": [0, 1, 2]}, "root must be one of the ranks 0..2, got 3"),
        ({"kind": "allgather", "ranks": [1]}, "needs at least 2 ranks, got 1"),
        ({"kind": "allgather", "ranks": [1, 1]}, "ranks must be named once"),
        ({"kind": "allgather", "ranks": [1, 4]}, "rank must be in 0..3, got 4"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(CollectiveError, match=message):
        Collective.on(LINE, **arguments)  # type: ignore[arg-type]


def test_a_root_where_there_is_none_is_refused() -> None:
    with pytest.raises(CollectiveError, match="allreduce: has no root, got 1"):
        Collective(Kind.ALLREDUCE, (0, 1), 1).check(LINE)
    with pytest.raises(CollectiveError, match="broadcast: needs a root, got None"):
        Collective(Kind.BROADCAST, (0, 1)).check(LINE)


@pytest.mark.parametrize("kind", NAMED_KINDS)
def test_blocks_make_up_what_moves_of_the_buffer(kind: Kind) -> None:
    moved = sum(Collective.on(LINE, kind, root=1).blocks().values())
    # a gathered or scattered buffer keeps the root's own block, an alltoall keeps one block a rank
    kept = {Kind.GATHER: Fraction(1, 4), Kind.SCATTER: Fraction(1, 4)}
    assert moved == (3 if kind is Kind.ALLTOALL else 1 - kept.get(kind, Fraction(0)))


def test_before_and_after() -> None:
    some = (0, 2, 3)
    reduce_scatter = Collective.on(LINE, "reduce-scatter", ranks=some)
    assert reduce_scatter.before(2, Block(0)) == {2}
    assert reduce_scatter.before(1, Block(0)) == frozenset()  # a relay brings nothing
    assert reduce_scatter.after(0, Block(0)) == {0, 2, 3}
    assert reduce_scatter.after(2, Block(0)) is None
    alltoall = Collective.on(LINE, "alltoall", ranks=some)
    assert alltoall.before(2, Block(0, 3)) == frozenset()
    assert alltoall.after(3, Block(0, 3)) == {0}
    assert alltoall.after(2, Block(0, 3)) is None
    assert alltoall.relays(LINE) == (1,)
    allreduce = Collective.on(LINE, "allreduce", ranks=some)
    assert allreduce.block_of(2, None) == allreduce.block_of(0, None)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("allreduce", "3/2"), ("broadcast", "1"), ("reduce", "1"), ("allgather", "3/4"), ("alltoall", "3/4")],
)
def test_busbw_factors_of_nccl_tests(kind: str, factor: str) -> None:
    assert busbw_factor(Kind(kind), 4) == Fraction(factor)
