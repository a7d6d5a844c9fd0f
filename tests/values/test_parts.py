"""Into which parts a fabric falls, and which way links lead between them."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

from hypothesis import given

from arborcast.synth.routes.reachability import parts_of, rank_ranges
from arborcast.synth.topology import Link, Topology
from tests.support.strategies import topologies


def closure(topology: Topology, without: set[int]) -> set[tuple[int, int]]:
    """Pairs of vertices of which the first reaches the second, past none of some vertices."""
    left = [vertex for vertex in range(topology.size) if vertex not in without]
    reach = {(vertex, vertex) for vertex in left}
    reach |= {(link.src, link.dst) for link in topology.links if not without & {link.src, link.dst}}
    for middle in left:
        into = [first for first in left if (first, middle) in reach]
        reach |= {(first, last) for first in into for last in left if (middle, last) in reach}
    return reach


@given(topologies(max_ranks=7, symmetric=False, connected=False))
def test_parts_are_what_reaches_each_other(topology: Topology) -> None:
    reach = closure(topology, set())
    found = parts_of(topology)
    number = {rank: index for index, part in enumerate(found.ranks) for rank in part}
    assert sorted(number) == list(range(topology.ranks))
    assert list(found.ranks) == sorted(tuple(sorted(part)) for part in found.ranks)
    for first, other in product(number, repeat=2):
        assert (number[first] == number[other]) == ({(first, other), (other, first)} <= reach)
    ways = set()
    for first, part in enumerate(found.ranks):
        for last, other in enumerate(found.ranks):
            others = {
                vertex
                for third, ranks in enumerate(found.ranks)
                if third not in {first, last}
                for vertex in range(topology.size)
                if {(vertex, ranks[0]), (ranks[0], vertex)} <= reach
            }
            if first != last and (part[0], other[0]) in closure(topology, others):
                ways.add((first, last))
    assert set(found.one_way) == ways


def test_parts_in_words() -> None:
    ends = [(0, 1), (1, 0), (2, 3), (3, 2), (1, 2)]
    topology = Topology.build("drawn", 5, [Link(*pair, Fraction(1)) for pair in ends])
    words = "3 parts: ranks 0-1 | ranks 2-3 | rank 4; one way only: ranks 0-1 to ranks 2-3"
    assert str(parts_of(topology)) == words
    assert str(parts_of(topology, [0, 4])) == "2 parts: rank 0 | rank 4"
    assert rank_ranges([7, 0, 1, 2, 5, 6, 9]) == "0-2,5-7,9"
