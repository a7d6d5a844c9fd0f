"""The allocations of a box that differ: sets of ranks whose fragments are not isomorphic.

Two sets are alike when one's fragment becomes the other's by renumbering, as graphs with bandwidths; they
need not be images of each other under an automorphism of the box. The automorphisms come first all the same,
because they join most sets at no cost; only one set of each orbit is then compared, link by link.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any

from arborcast.synth.errors import InputError
from arborcast.synth.symmetry.automorphisms import automorphisms_of
from arborcast.synth.symmetry.isomorphism import ComparableTopology
from arborcast.synth.symmetry.permutations import images_of
from arborcast.synth.topology import Permutation, Topology

MOST_RANKS = 16
"""Of these there are 65,519 sets of two and more; every further rank doubles them."""


@dataclass(frozen=True)
class Fragment:
    """One of several allocations that are alike.

    Attributes:
        ranks: of the box, ascending; the first of the alike sets.
        allocations: how many sets of as many ranks are like it, itself included.
        topology: what these ranks have among them, renumbered 0, 1, 2...
    """

    ranks: tuple[int, ...]
    allocations: int
    topology: Topology


def representatives(
    topology: Topology, sizes: Iterable[int] | None = None, *, latencies: bool = False
) -> tuple[Fragment, ...]:
    """One fragment of each class of alike ones, by size and then by ranks.

    The classes of a size count C(ranks, size) allocations together.

    Args:
        topology: a box of at most `MOST_RANKS` ranks, with or without switches.
        sizes: how many ranks a fragment has; None for all from 2 on.
        latencies: whether they tell fragments apart, as bandwidths do; no rate depends on them.

    Raises:
        InputError: more ranks than that, or a size that is not between 2 and the number of ranks.
    """
    if topology.ranks > MOST_RANKS:
        raise InputError(
            f"topology {topology.name}: to list its fragments it must have at most {MOST_RANKS} ranks, "
            f"got {topology.ranks}"
        )
    wanted = range(2, topology.ranks + 1) if sizes is None else sorted(set(sizes))
    for size in wanted:
        if not 2 <= size <= topology.ranks:
            raise InputError(
                f"fragment of {topology.name}: must have 2 to {topology.ranks} ranks, got {size}"
            )
    generators = automorphisms_of(topology, latencies=latencies).generators
    return tuple(fragment for size in wanted for fragment in _of_size(topology, size, generators, latencies))


def _of_size(
    topology: Topology, size: int, generators: Iterable[Permutation], latencies: bool
) -> list[Fragment]:
    alike: dict[Any, list[_Class]] = {}
    for ranks, count in _orbits(topology.ranks, size, tuple(generators)):
        shape = ComparableTopology(topology.subset(ranks), latencies=latencies)
        known = alike.setdefault(shape.invariant, [])
        for found in known:
            if found.shape.isomorphism(shape) is not None:
                found.allocations += count
                break
        else:
            known.append(_Class(ranks, shape, count))
    classes = sorted((each for group in alike.values() for each in group), key=lambda each: each.ranks)
    if sum(each.allocations for each in classes) != comb(topology.ranks, size):
        raise AssertionError(f"{topology.name}: the classes of {size} ranks do not count every allocation")
    return [Fragment(each.ranks, each.allocations, each.shape.topology) for each in classes]


@dataclass
class _Class:
    ranks: tuple[int, ...]
    shape: ComparableTopology
    allocations: int


def _orbits(
    ranks: int, size: int, generators: tuple[Permutation, ...]
) -> Iterator[tuple[tuple[int, ...], int]]:
    """The first set of each orbit of the box's automorphisms, ascending, and how many sets the orbit has."""
    seen: set[tuple[int, ...]] = set()
    for chosen in combinations(range(ranks), size):
        if chosen in seen:
            continue
        orbit = images_of(chosen, generators, lambda images, of: tuple(sorted(images[rank] for rank in of)))
        seen.update(orbit)
        yield chosen, len(orbit)
