"""Random fabrics from a seed: small, and of every sort that a user may bring."""

from __future__ import annotations

from fractions import Fraction
from random import Random

from arborcast.synth.topology import Link, Topology

MOST_DECIMALS = 9

FEW_PAIRS = 4
"""Of which links beside each other have latencies of their own."""


def fabric(
    rng: Random,
    *,
    ranks: tuple[int, int] = (2, 7),
    switches: int = 2,
    decimals: int = MOST_DECIMALS,
    largest: int | None = None,
    regular: bool | None = None,
) -> Topology:
    """A topology.

    Args:
        rng: decides everything.
        ranks: the least and the largest number of ranks.
        switches: the largest number of switches.
        decimals: the most decimals of a bandwidth.
        largest: of the bandwidths, GB/s; None for any of several magnitudes.
        regular: whether it must look the same from every rank, with its rotations declared; None for either.
    """
    count = rng.randint(*ranks)
    rates = _Rates(rng, decimals, largest)
    if regular or (regular is None and rng.random() < 0.1):
        return _circulant(rng, count, rates)
    hubs = rng.choice([0, 0, 0, *range(1, switches + 1)]) if switches else 0
    size = count + hubs
    both_ways = rng.random() < 0.5
    density = rng.choice([0.2, 0.5, 0.9])
    pairs = {
        (u, v)
        for u in range(size)
        for v in range(size)
        if (u < v if both_ways else u != v) and rng.random() < density
    }
    if rng.random() < 0.9:
        pairs |= _connecting(rng, size, both_ways=both_ways)
    parallel = rng.random() < 0.2
    latency = rng.choice([_no_latency, _equal_latency, _some_latency])
    links = []
    for src, dst in sorted(pairs):
        delay = latency(rng)
        for number in range(rng.randint(1, 2) if parallel else 1):
            rate = rates.draw()
            # Each further latency makes a vertex, and references go through all sets of vertices.
            delay = latency(rng) if number and len(pairs) <= FEW_PAIRS else delay
            links.append(Link(src, dst, rate, delay))
            if both_ways:
                links.append(Link(dst, src, rate, delay))
    return Topology.build("fuzzed", count, links, [f"switch{hub}" for hub in range(hubs)])


def times(topology: Topology, factor: Fraction) -> Topology:
    """The same fabric with all its bandwidths so many times as large."""
    return Topology.build(
        topology.name,
        topology.ranks,
        [Link(link.src, link.dst, link.bandwidth * factor, link.latency_us) for link in topology.links],
        topology.switches,
        topology.symmetries,
    )


class _Rates:
    """Bandwidths of one fabric: any, of any magnitude, or a few that come again and again."""

    def __init__(self, rng: Random, decimals: int, largest: int | None) -> None:
        self._rng = rng
        parts = rng.choice([3, 7, 12]) if decimals == MOST_DECIMALS and rng.random() < 0.05 else 1
        self._unit = Fraction(1, parts * 10 ** rng.randint(0, decimals))
        self._most = int((rng.choice([1, 3, 30, 400]) if largest is None else largest) / self._unit)
        self._uneven = rng.random() < 0.15
        self._few = [self._any() for _ in range(rng.choice([1, 2, 3]))] if rng.random() < 0.4 else []

    def draw(self) -> Fraction:
        return self._rng.choice(self._few) if self._few else self._any()

    def _any(self) -> Fraction:
        most = max(1, int(self._most ** self._rng.random())) if self._uneven else self._most
        return self._unit * self._rng.randint(1, most)


def _connecting(rng: Random, size: int, *, both_ways: bool) -> set[tuple[int, int]]:
    """A tree of links that go both ways, or a cycle of those that do not."""
    order = rng.sample(range(size), size)
    if both_ways:
        joined = [(order[place], order[rng.randrange(place)]) for place in range(1, size)]
        return {(min(pair), max(pair)) for pair in joined}
    return {(order[place - 1], order[place]) for place in range(size)}


def _circulant(rng: Random, count: int, rates: _Rates) -> Topology:
    """Every rank linked to the ranks so many further on; perhaps all to one switch besides."""
    both_ways = rng.random() < 0.7
    strides = [stride for stride in range(1, count) if stride == 1 or rng.random() < 0.4]
    links = []
    for stride in strides:
        rate = rates.draw()
        for rank in range(count):
            ends = (rank, (rank + stride) % count)
            links.append(Link(*ends, rate))
            if both_ways:
                links.append(Link(*ends[::-1], rate))
    hubs = []
    if rng.random() < 0.3:
        hubs = ["hub"]
        rate = rates.draw()
        for rank in range(count):
            links += [Link(rank, count, rate), Link(count, rank, rate)]
    turn = [*((rank + 1) % count for rank in range(count)), *range(count, count + len(hubs))]
    return Topology.build("circulant", count, links, hubs, [turn] if count > 1 else [])


def _no_latency(_: Random) -> Fraction:
    return Fraction(0)


def _equal_latency(_: Random) -> Fraction:
    return Fraction(7, 10)


def _some_latency(rng: Random) -> Fraction:
    return Fraction(rng.randint(0, 50), 10)


def shuffled(rng: Random, topology: Topology, *, spoil: bool) -> tuple[Topology, tuple[int, ...]]:
    """The fabric with other numbers, and which; `spoil` swaps the bandwidths of two links besides."""
    hubs = range(topology.ranks, topology.size)
    images = (*rng.sample(range(topology.ranks), topology.ranks), *rng.sample(hubs, len(hubs)))
    rates = [link.bandwidth for link in topology.links]
    if spoil and len(rates) > 1:
        first, second = rng.sample(range(len(rates)), 2)
        rates[first], rates[second] = rates[second], rates[first]
    links = [
        Link(images[link.src], images[link.dst], rate, link.latency_us)
        for link, rate in zip(topology.links, rates, strict=True)
    ]
    return Topology.build(topology.name, topology.ranks, links, topology.switches), images
