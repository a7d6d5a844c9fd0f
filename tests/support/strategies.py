"""Hypothesis strategies that several test modules share."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from hypothesis import strategies as st

from arborcast.synth.collective import NAMED_KINDS, Collective, Demand, Kind
from arborcast.synth.topology import Link, Topology


@st.composite
def topologies(
    draw: Callable,
    max_ranks: int = 6,
    switches: int = 2,
    symmetric: bool = True,
    max_bandwidth: int = 4,
    connected: bool = True,
    min_ranks: int = 2,
) -> Topology:
    """Topologies of `min_ranks` to `max_ranks` ranks and at most `switches` switches.

    `symmetric` links have equal bandwidth both ways; otherwise each direction is drawn on its own and
    switches may be unbalanced. `connected` ones let every vertex reach every other; otherwise anything may
    happen. Bandwidths are up to `max_bandwidth` units of 1, 1/2 or 25 GB/s.
    """
    ranks = draw(st.integers(min_ranks, max_ranks))
    count = draw(st.integers(0, switches))
    size = ranks + count
    unit = draw(st.sampled_from([Fraction(1), Fraction(1, 2), Fraction(25)]))
    rate = st.integers(1, max_bandwidth)
    pairs = [(u, v) for u in range(size) for v in range(size) if (u < v if symmetric else u != v)]
    rates = dict(draw(st.lists(st.tuples(st.sampled_from(pairs), rate), max_size=3 * size)))
    if connected:
        order = draw(st.permutations(range(size)))
        for position, vertex in enumerate(order):
            if symmetric and position:  # a tree
                other = order[draw(st.integers(0, position - 1))]
                rates.setdefault((min(vertex, other), max(vertex, other)), draw(rate))
            elif not symmetric:  # a cycle
                rates.setdefault((order[position - 1], vertex), draw(rate))
    links = [Link(u, v, unit * units) for (u, v), units in rates.items()]
    if symmetric:
        links += [Link(link.dst, link.src, link.bandwidth) for link in links]
    return Topology.build("drawn", ranks, links, [f"switch{i}" for i in range(count)])


@st.composite
def custom_collectives(draw: Callable, topology: Topology, max_blocks: int = 4) -> Collective:
    """Blocks with any sources and any targets among the ranks of a topology; those not named are relays."""
    demands = []
    for _ in range(draw(st.integers(1, max_blocks))):
        order = draw(st.permutations(range(topology.ranks)))
        sources = draw(st.integers(1, topology.ranks - 1))
        targets = draw(st.integers(1, topology.ranks - sources))
        demands.append(Demand(frozenset(order[:sources]), frozenset(order[sources : sources + targets])))
    return Collective.custom(topology, demands)


@st.composite
def collectives(
    draw: Callable, topology: Topology, kinds: list[Kind] | None = None, relays: bool = False
) -> Collective:
    """A collective on a topology, among all its ranks or, with `relays`, among some of them."""
    kind = draw(st.sampled_from(kinds or NAMED_KINDS))
    ranks = list(range(topology.ranks))
    if relays:
        ranks = ranks[: draw(st.integers(2, topology.ranks))]
    return Collective.on(topology, kind, root=draw(st.sampled_from(ranks)), ranks=ranks)
