"""What an order of hosts is worth to NCCL's rings and trees, and what no order exceeds.

Across hosts NCCL (2.30, `connectRings`, `ncclGetDtree`) sends along a ring in the order of the list, the last
host to the first, and along two binary trees that are made of places in the list. An order is worth what its
most loaded link leaves of an allreduce: first on the ring, which carries large messages, and among orders of
equal rings on the trees. No order does better than the links around any set of hosts: a ring leaves each set
at least once, and so does each tree, both ways.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import networkx

from arborcast.synth.baselines.host_network import Busiest, HostNetwork

Order: TypeAlias = tuple[int, ...]
"""Numbers of hosts, the first in the list first."""
MOST_PLACES = 128
"""Places up to which the messages between each two are looked at for what no ring exceeds."""


@dataclass(frozen=True, slots=True)
class OrderCost:
    """What an order is worth on the network.

    Attributes:
        ring: GB/s of an allreduce that the ring's most loaded link leaves.
        ring_link: that link.
        tree: the same of the two trees; None where two hosts that a tree joins have no way.
        tree_link: that link.
    """

    ring: Fraction
    ring_link: Busiest
    tree: Fraction | None
    tree_link: Busiest | None

    @property
    def worth(self) -> tuple[Fraction, Fraction]:
        """More is better: the ring first."""
        return self.ring, self.tree or Fraction(0)


def ring_messages(count: int) -> list[tuple[int, int, Fraction]]:
    """By places in the list: from, to, and the part of the most that a ring sends from host to host."""
    return [(place, (place + 1) % count, Fraction(1)) for place in range(count)]


def tree_messages(count: int) -> list[tuple[int, int, Fraction]]:
    """By places in the list: from, to, and the part of the buffer, up one of two trees and down again.

    Place p with lowest set bit b hangs under the place that has b cleared and the next bit set, or, where the
    list is too short for it, b cleared alone. The other tree is that of the list turned round, or, with an
    odd number of hosts, moved on by one.
    """
    half = Fraction(1, 2)
    found = []
    for place in range(1, count):
        bit = place & -place
        above = (place ^ bit) | (bit << 1)
        above = above if above < count else place ^ bit
        for one, other in ((place, above), _in_other_tree(place, above, count)):
            found += [(one, other, half), (other, one, half)]
    return found


def _in_other_tree(one: int, other: int, count: int) -> tuple[int, int]:
    if count % 2:
        return (one + 1) % count, (other + 1) % count
    return count - 1 - one, count - 1 - other


def cost_of(network: HostNetwork, order: Order) -> OrderCost | None:
    """What an order is worth; None where its ring has no way from one host to the next."""
    count = len(order)
    ring = network.busiest((order[i], order[j], part) for i, j, part in ring_messages(count))
    if ring is None:
        return None
    tree = network.busiest((order[i], order[j], part) for i, j, part in tree_messages(count))
    ranks = sum(len(host.ranks) for host in network.hosts)
    # Bytes that a ring sends from rank to rank, for each of the buffer.
    sent = Fraction(2 * (ranks - 1), ranks)
    return OrderCost(ring.rate / sent, ring, None if tree is None else tree.rate, tree)


def most_of_any(network: HostNetwork) -> tuple[Fraction, Fraction]:
    """GB/s of an allreduce that no order of the hosts exceeds, on the ring and on the trees."""
    count = len(network.hosts)
    ranks = sum(len(host.ranks) for host in network.hosts)
    rates = sorted(min(network.access(host)) for host in range(count))
    least = rates[0]
    for cluster in _clusters(network):
        least = min(least, *network.cut(cluster))
    degrees = Counter(place for one, other, _ in tree_messages(count) for place in (one, other))
    # Each message of half the buffer counts at both of its ends, and so do the ways there and back.
    passed = sorted(Fraction(degree, 4) for degree in degrees.values())
    tree = min(rate / load for rate, load in zip(rates, passed, strict=True))
    ring = min([least, *_best_messages(network)])
    return ring * ranks / (2 * (ranks - 1)), min(least, tree)


def _best_messages(network: HostNetwork) -> Iterator[Fraction]:
    """For each place the GB/s of the fastest message from a host of it to another, with nothing beside."""
    places = range(len(network.of_place))
    if len(places) > MOST_PLACES:
        return
    for one in places:
        first = network.of_place[one][0]
        ends = [network.of_place[other][-1] for other in places]
        alone = (network.busiest([(first, end, Fraction(1))]) for end in ends if end != first)
        yield max((link.rate for link in alone if link is not None), default=Fraction(0))


def levels(network: HostNetwork) -> Iterator[list[set[int]]]:
    """Places that ways of at most so many links join, of more and more links, until all are joined."""
    count = len(network.of_place)
    far: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for one in range(count):
        for other in range(one):
            if (steps := network.distance(one, other)) is not None:
                far[steps].append((one, other))
    graph = networkx.empty_graph(count)
    for steps in sorted(far):
        graph.add_edges_from(far[steps])
        found = [set(component) for component in networkx.connected_components(graph)]
        yield found
        if len(found) == 1:
            return


def _clusters(network: HostNetwork) -> Iterator[frozenset[int]]:
    """Sets of places, not all of them, around which links may be few."""
    seen: set[frozenset[int]] = set()
    places = range(len(network.of_place))
    for joined in ([{place} for place in places], *levels(network)):
        for component in map(frozenset, joined):
            if len(component) < len(places) and component not in seen:
                seen.add(component)
                yield component
