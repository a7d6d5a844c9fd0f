"""What a table answers: every fragment of a machine, without failures and with some, for every collective.

Fragments that are alike, and failures that a symmetry of the fragment takes to each other, are asked once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import comb
from typing import Any

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.faults.faulty import Faulty, left_of, without
from arborcast.synth.sweeps.fragments import MOST_RANKS, representatives
from arborcast.synth.symmetry.automorphisms import automorphisms_of
from arborcast.synth.symmetry.permutations import images_of, orbits
from arborcast.synth.topology import Hop, Permutation, Topology

DEFAULT_KINDS = (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.BROADCAST)

MOST_FAILURES = 100_000
"""Sets of failed cables that are listed for one fragment."""


@dataclass(frozen=True)
class Question:
    """One collective on what is left of a machine.

    Attributes:
        ranks: of the machine, which become 0, 1, 2... in this order.
        failed: cables that are down, as pairs of vertices of the fragment, the lesser first.
        kind: of the collective among all of these ranks.
        root: numbered in the fragment; None for kinds without.
    """

    ranks: tuple[int, ...]
    failed: tuple[Hop, ...]
    kind: Kind
    root: int | None = None

    def fabric(self, machine: Topology) -> Topology | Faulty:
        """The fragment of the machine; with what failed there, where something did."""
        whole = self.ranks == tuple(range(machine.ranks))
        fragment = machine if whole else machine.subset(self.ranks)
        return without(fragment, links=self.failed) if self.failed else fragment

    def topology(self, machine: Topology) -> Topology:
        """What is left of the machine."""
        return left_of(self.fabric(machine))

    def collective(self, fabric: Topology | Faulty) -> Collective:
        """The collective on what is left."""
        return Collective.on(left_of(fabric), self.kind, root=self.root or 0)

    @cached_property
    def key(self) -> str:
        """What its answer is called in a folder."""
        content = json.dumps(self.to_document(), sort_keys=True).encode()
        return f"{self.kind}-{len(self.ranks)}-{hashlib.sha256(content).hexdigest()[:16]}"

    def to_document(self) -> dict[str, Any]:
        """As files hold it."""
        return {
            "ranks": list(self.ranks),
            "failed": [list(hop) for hop in self.failed],
            "collective": self.kind.value,
            "root": self.root,
        }


def questions(
    machine: Topology,
    *,
    sizes: Iterable[int] | None = None,
    failures: int = 0,
    kinds: Sequence[Kind] = DEFAULT_KINDS,
) -> Iterator[Question]:
    """Every question about a machine that differs from the others, small fragments first.

    Args:
        machine: all of it.
        sizes: how many ranks fragments have; None for the whole machine only.
        failures: up to so many cables are down at once (a cable is the links between two vertices).
        kinds: of collectives; those with a root are asked for one rank of each orbit.

    Raises:
        InputError: a size or a number of failures out of its range, a kind that has no name of its own, or
            too many fragments or failures to list.
    """
    if failures < 0:
        raise InputError(f"failures: must be at least 0, got {failures}")
    if Kind.CUSTOM in kinds or not kinds:
        raise InputError(f"collectives: must be kinds with a name, got {', '.join(kinds) or 'none'}")
    for ranks, fragment in _fragments(machine, sizes):
        generators = automorphisms_of(fragment).generators
        for failed in _failures(fragment, failures, generators):
            left = without(fragment, links=failed).topology if failed else fragment
            for kind in kinds:
                for root in _roots(left, kind):
                    yield Question(ranks, failed, kind, root)


def _fragments(machine: Topology, sizes: Iterable[int] | None) -> Iterator[tuple[tuple[int, ...], Topology]]:
    if sizes is None:
        yield tuple(range(machine.ranks)), machine
        return
    for size in sorted(set(sizes)):
        if size == machine.ranks > MOST_RANKS:
            yield tuple(range(machine.ranks)), machine
            continue
        for found in representatives(machine, [size], latencies=True):
            yield found.ranks, found.topology


def _failures(topology: Topology, most: int, generators: Sequence[Permutation]) -> Iterator[tuple[Hop, ...]]:
    """Sets of cables, one of each orbit, fewest first; the empty one first of all."""
    yield ()
    cables = sorted({(min(link.src, link.dst), max(link.src, link.dst)) for link in topology.links})
    sets = sum(comb(len(cables), count) for count in range(1, most + 1))
    if sets > MOST_FAILURES:
        raise InputError(
            f"failures of {topology.name}: at most {MOST_FAILURES} sets of failed cables are listed; "
            f"up to {most} of {len(cables)} are {sets}"
        )
    for count in range(1, most + 1):
        seen: set[tuple[Hop, ...]] = set()
        for chosen in combinations(cables, count):
            if chosen not in seen:
                seen.update(images_of(chosen, generators, _moved))
                yield chosen


def _moved(images: Permutation, cables: tuple[Hop, ...]) -> tuple[Hop, ...]:
    """The set of cables to which a symmetry takes one."""
    moved = ((images[src], images[dst]) for src, dst in cables)
    return tuple(sorted((min(hop), max(hop)) for hop in moved))


def _roots(topology: Topology, kind: Kind) -> Iterator[int | None]:
    """One root of each orbit of ranks; None for a kind without."""
    if not kind.has_root:
        yield None
        return
    alike = orbits(range(topology.ranks), automorphisms_of(topology).generators)
    yield from (orbit[0] for orbit in alike)
