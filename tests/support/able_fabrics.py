"""Fabrics with switches that reduce and multicast, drawn at random."""

from __future__ import annotations

import random
from fractions import Fraction

from arborcast.synth.topology import Link, Switch, Topology

ABLE = (
    {"reduces": True},
    {"multicasts": True},
    {"reduces": True, "multicasts": True},
    {"reduces": True, "multicasts": True, "turns": True},
    {"reduces": True, "multicasts": True, "loopback": True},
)


def star(ranks: int, bandwidth: int | Fraction = 1, **abilities: object) -> Topology:
    """Ranks on one switch."""
    ends = [(rank, ranks) for rank in range(ranks)]
    return of_cables("star", ranks, ends, [Switch("s", **abilities)], bandwidth)


def of_cables(name, ranks, ends, switches, bandwidth=1) -> Topology:
    """Cables of one bandwidth, or of the bandwidth of each."""
    rates = bandwidth if isinstance(bandwidth, dict) else dict.fromkeys(ends, bandwidth)
    links = [Link(*hop, Fraction(rates[src, dst])) for src, dst in ends for hop in ((src, dst), (dst, src))]
    return Topology.build(name, ranks, links, switches)


def drawn(seed: int, most: int = 8) -> Topology:
    """Three to `most` vertices, some links one way or of unequal rates, switches of any abilities."""
    rng = random.Random(seed)
    able, plain = rng.randint(1, 3), rng.randint(0, 1)
    ranks = rng.randint(2, max(2, min(6, most - able - plain)))
    switches = []
    for number in range(able):
        abilities = dict(rng.choice(ABLE))
        if abilities.get("reduces") and rng.random() < 0.3:
            abilities["adder"] = Fraction(rng.randint(1, 6), 2)
        switches.append(Switch(f"s{number}", **abilities))
    switches += [Switch(f"p{number}") for number in range(plain)]
    size = ranks + len(switches)
    rates: dict[tuple[int, int], int] = {}
    order = rng.sample(range(size), size)
    for place in range(1, size):
        pair = (order[place], order[rng.randrange(place)])
        rates[pair], rates[pair[::-1]] = rng.randint(1, 4), rng.randint(1, 4)
    for _ in range(rng.randint(0, size + 2)):
        src, dst = rng.sample(range(size), 2)
        rates[src, dst] = rng.randint(1, 4)
        if rng.random() < 0.7:
            rates[dst, src] = rates[src, dst]
    return Topology.build(
        f"drawn {seed}", ranks, (Link(*hop, Fraction(rate)) for hop, rate in rates.items()), switches
    )
