"""The order of hosts that suits NCCL's rings and trees, which follow the order of ranks.

An order that leaves a leaf switch once loads what leads up from it once; one that comes and goes loads it
each time. What an order is worth, and what none exceeds, is for `order_costs` to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import factorial, prod
from random import Random

from arborcast.synth.baselines.budget import BudgetError
from arborcast.synth.baselines.hamiltonian import RingFabric, find_ring
from arborcast.synth.baselines.host_network import HostNetwork
from arborcast.synth.baselines.order_costs import Order, OrderCost, cost_of, levels, most_of_any
from arborcast.synth.baselines.switch_paths import Path
from arborcast.synth.deadline import NO_DEADLINE
from arborcast.synth.errors import InfeasibleError, InputError
from arborcast.synth.features import check_features

ALL_ORDERS = 6_000
"""Orders, hosts of one place exchanged left out, up to which all are tried."""
EFFORT = 8_000
"""Hosts that are looked at while better orders are searched for: so many orders times their length."""


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
    for joined in levels(network):
        merged: dict[int, list[int]] = {}
        for component in joined:
            members = sorted({of[place] for place in component}, key=lambda p: (-len(parts[p]), parts[p][0]))
            merged[min(members)] = [host for member in members for host in parts[member]]
            for place in component:
                of[place] = min(members)
        for number, hosts in merged.items():
            parts[number] = hosts
    return tuple(host for number in sorted(set(of)) for host in parts[number])


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
