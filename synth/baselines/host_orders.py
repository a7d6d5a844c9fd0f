"""The order of hosts that suits NCCL's rings and trees, which follow the order of ranks.

Across hosts NCCL (2.30, `connectRings`, `ncclGetDtree`) sends along a ring in the order of the list, the last
host to the first, and along two binary trees that are made of places in the list. An order that leaves a leaf
switch once loads what leads up from it once; one that comes and goes loads it each time. Here an order is
worth what its most loaded link leaves of an allreduce: first on the ring, which carries large messages, and
among orders of equal rings on the trees. No order does better than the links around any set of hosts: a ring
leaves each set at least once, and so does each tree, both ways.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import factorial, prod
from random import Random
from typing import TypeAlias

import networkx

from arborcast.synth.baselines.budget import BudgetError
from arborcast.synth.baselines.hamiltonian import RingFabric, find_ring
from arborcast.synth.baselines.host_network import Busiest, HostNetwork
from arborcast.synth.baselines.switch_paths import Path
from arborcast.synth.deadline import NO_DEADLINE
from arborcast.synth.errors import InfeasibleError, InputError
from arborcast.synth.features import check_features

Order: TypeAlias = tuple[int, ...]
"""Numbers of hosts, the first in the list first."""
ALL_ORDERS = 6_000
"""Orders, hosts of one place exchanged left out, up to which all are tried."""
MOST_PLACES = 128
"""Places up to which the messages between each two are looked at for what no ring exceeds."""
EFFORT = 8_000
"""Hosts that are looked at while better orders are searched for: so many orders times their length."""


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


@dataclass(frozen=True, slots=True)
class HostOrder:
    """The best order found, and what is known of all others.

    Attributes:
        order: the hosts.
        cost: what it is worth.
        given: what the order of the list is worth; None where its ring has no way from a host to the next.
        most: GB/s that no order exceeds, on the ring and, of orders with so good a ring, on the trees.
        tried: orders that were looked at; None where no other is better, as `most` is reached or all were
            tried, those that exchange hosts of one place counted once.
    """

    order: Order
    cost: OrderCost
    given: OrderCost | None
    most: tuple[Fraction, Fraction]
    tried: int | None

    @property
    def is_proved(self) -> bool:
        """Whether no order is better."""
        return self.tried is None


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
    sent = Fraction(
        2 * (ranks - 1), ranks
    )  # bytes that a ring sends from rank to rank, for each of the buffer
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
    ring = min(least, *map(Fraction, _best_messages(network)))
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


def best_order(network: HostNetwork, *, seed: int = 0) -> HostOrder:
    """The best order of some hosts: of all where they are few, else of those tried, with what none exceeds.

    Args:
        network: the hosts.
        seed: of the moves that are tried.

    Raises:
        InputError: fewer than two hosts.
        InfeasibleError: no ring of hosts has a way from each to the next.
        TopologyError: a feature that is not understood here.
    """
    check_features(network.topology, "order of hosts")
    count = len(network.hosts)
    if count < 2:
        raise InputError(f"hosts: an order needs at least two, got {count}")
    most = most_of_any(network)
    given: Order = tuple(range(count))
    search = _Search(network, most)
    search.look(given)
    few = factorial(count) // prod(factorial(len(hosts)) for hosts in network.of_place) <= ALL_ORDERS
    for order in _all_orders(network) if few else _promising(network, seed):
        if search.done:
            break
        search.look(order)
    if few and not search.done:
        most = search.best_cost().worth
    elif not few:
        search.improve(Random(seed), EFFORT // count)
    return HostOrder(
        search.best, search.best_cost(), search.given, most, None if few or search.done else search.tried
    )


class _Search:
    """The best order so far."""

    def __init__(self, network: HostNetwork, most: tuple[Fraction, Fraction]) -> None:
        self.network, self.most = network, most
        self.best: Order = ()
        self.cost: OrderCost | None = None
        self.given: OrderCost | None = None
        self.tried = 0

    @property
    def done(self) -> bool:
        """Whether no order can be better."""
        return self.cost is not None and self.cost.worth >= self.most

    def look(self, order: Order) -> bool:
        """Whether an order is better than the best before, which it then replaces."""
        found = cost_of(self.network, order)
        if not self.tried:
            self.given = found
        self.tried += 1
        if found is None or (self.cost is not None and found.worth <= self.cost.worth):
            return False
        self.best, self.cost = order, found
        return True

    def best_cost(self) -> OrderCost:
        """Of the best order.

        Raises:
            InfeasibleError: there is none.
        """
        if self.cost is None:
            raise InfeasibleError("ring of hosts: no order has a way from each host to the next")
        return self.cost

    def improve(self, rng: Random, looks: int) -> None:
        """Exchange two hosts, turn a stretch round, or move one, as long as that makes it better."""
        self.best_cost()
        for _ in range(looks):
            if self.done:
                return
            i, j = sorted(rng.sample(range(len(self.best)), 2))
            order = list(self.best)
            match rng.randrange(3):
                case 0:
                    order[i], order[j] = order[j], order[i]
                case 1:
                    order[i : j + 1] = order[i : j + 1][::-1]
                case _:
                    order.insert(i, order.pop(j))
            self.look(tuple(order))


def _all_orders(network: HostNetwork) -> Iterator[Order]:
    """All orders of places, each with the hosts of a place in the order of the list."""
    left = [len(hosts) for hosts in network.of_place]
    order: list[int] = []

    def grow() -> Iterator[Order]:
        if len(order) == len(network.hosts):
            yield tuple(order)
            return
        for place, hosts in enumerate(network.of_place):
            if left[place]:
                order.append(hosts[len(hosts) - left[place]])
                left[place] -= 1
                yield from grow()
                left[place] += 1
                order.pop()

    return grow()


def _promising(network: HostNetwork, seed: int) -> Iterator[Order]:
    """Orders that leave each part of the fabric once, from different starts and both ways."""
    closed = all(network.message(p, q) for p in range(len(network.of_place)) for q in range(p))
    base = _by_parts(network) if closed else _along_cables(network, seed)
    count = len(base)
    for start in dict.fromkeys(count * part // 8 for part in range(8)):
        turned = base[start:] + base[:start]
        yield turned
        yield turned[::-1]


def _by_parts(network: HostNetwork) -> Order:
    """Those that share the nearest switches follow each other, then those that share the next, and so on."""
    parts = [list(hosts) for hosts in network.of_place]
    of = list(range(len(parts)))
    for joined in _levels(network):
        merged: dict[int, list[int]] = {}
        for component in joined:
            members = sorted({of[place] for place in component}, key=lambda p: (-len(parts[p]), parts[p][0]))
            merged[min(members)] = [host for member in members for host in parts[member]]
            for place in component:
                of[place] = min(members)
        for number, hosts in merged.items():
            parts[number] = hosts
    return tuple(host for number in sorted(set(of)) for host in parts[number])


def _levels(network: HostNetwork) -> Iterator[list[set[int]]]:
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
    for joined in ([{place} for place in places], *_levels(network)):
        for component in map(frozenset, joined):
            if len(component) < len(places) and component not in seen:
                seen.add(component)
                yield component


def _along_cables(network: HostNetwork, seed: int) -> Order:
    """A ring in which each host has a way to the next.

    Raises:
        InfeasibleError: there is none, or none was found in time.
    """
    count = len(network.hosts)
    places = network.places
    paths = {
        (a, b): (Path(a, b, (), Fraction(1)),)
        for a in range(count)
        for b in range(count)
        if a != b and network.message(places[a], places[b])
    }
    fabric = RingFabric(tuple(range(count)), paths, dict.fromkeys(paths, 1))
    try:
        ring = find_ring(fabric, start=0, rng=Random(seed), deadline=NO_DEADLINE)
    except BudgetError:
        raise InfeasibleError("ring of hosts: none was found, though there may be one") from None
    if ring is None:
        raise InfeasibleError("ring of hosts: no order has a way from each host to the next")
    return tuple(path.src for path in ring)
