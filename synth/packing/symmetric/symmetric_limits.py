"""The limit of a symmetric collective, with its certificate, at the cost of one rank of each orbit.

A cut that some rank lies beyond has an image that the orbit's first rank lies beyond, so only those are
asked. What one tight cut and all its images say of an allreduce is a certificate of link lengths, and one
contraction measures it.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from arborcast.synth.bounds import bound
from arborcast.synth.bounds.cuts import tightest_cut
from arborcast.synth.certificate import Bound, Cut, Dual, Scope
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.packing.symmetric.contraction import contract
from arborcast.synth.packing.symmetric.orbit_problem import Problem
from arborcast.synth.routes.reachability import who_is_cut_off
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Topology

_MOST_CUTS = 16
"""Orbits of ranks that are asked for a tight cut of their own."""

_LONGEST = 1 << 20  # lengths of a certificate beyond this have too many digits to guide anything


def symmetric_bound(topology: Topology, collective: Collective, translations: Translations) -> Bound:
    """The proven limit of an allgather, reduce-scatter or allreduce among all ranks; see `synth.bound`.

    Raises:
        InfeasibleError: some ranks cannot reach each other; carries the bound that proves it.
    """
    if topology.holders > topology.ranks or topology.unbalanced(range(topology.ranks, topology.size)):
        found = bound(topology, collective)
    elif collective.kind is not Kind.ALLREDUCE:
        found = _of_out_trees(topology, collective, translations)
    else:
        found = _of_halves(topology, collective, translations) or bound(topology, collective)
    if found.rate == 0:
        raise InfeasibleError(who_is_cut_off(topology, collective), found)
    return found


def tight_lengths(topology: Topology, translations: Translations, rate: Fraction) -> Ints:
    """How many images of the tight cuts each link leaves, per link orbit and in proportion.

    The trees of every optimum are cheapest under these lengths: they leave each tight cut as rarely as
    trees can. There is a tight cut at most for each orbit of ranks, and those that there are count alike.

    Args:
        topology: turned round for a reduce-scatter.
        translations: of it.
        rate: what each rank can send to all others, GB/s.
    """
    orbit = translations.link_orbits(topology)
    sizes = np.bincount(orbit).tolist()
    lengths = [Fraction(0)] * len(sizes)
    seen: set[tuple[Fraction, ...]] = set()
    for rank in translations.representatives[:_MOST_CUTS]:
        found = tightest_cut(topology, dict.fromkeys(range(topology.ranks), 1), [rank])
        if found.rate > rate:
            continue
        side = found.cut.side
        leaving = np.array([link.src in side and link.dst not in side for link in topology.links])
        crossed = np.bincount(orbit, weights=leaving).astype(np.int64).tolist()
        shape = tuple(Fraction(count, size) for count, size in zip(crossed, sizes, strict=True))
        if shape not in seen:
            seen.add(shape)
            lengths = [length + more for length, more in zip(lengths, shape, strict=True)]
    scale = math.lcm(*(length.denominator for length in lengths))
    return np.array([int(length * scale) for length in lengths], dtype=np.int64)


def tight_lengths_of(problem: Problem, limit: Bound) -> Ints | None:
    """Lengths of the link orbits under which the trees of an optimum are cheapest, if the limit has some."""
    match limit.certificate:
        case Cut():
            turned = problem.groups[0].turned
            graph = problem.topology.reversed() if turned else problem.topology
            found = tight_lengths(graph, problem.translations, problem.target)
            return _turned_back(problem, found) if turned else found
        case Dual(lengths=lengths):
            # The mean over the translations proves as much as the lengths themselves.
            orbit = problem.link_orbits
            sizes = np.bincount(orbit).tolist()
            sums = [Fraction(0)] * len(sizes)
            for place, length in zip(orbit.tolist(), lengths, strict=True):
                sums[place] += length
            means = [total / size for total, size in zip(sums, sizes, strict=True)]
            scale = math.lcm(*(mean.denominator for mean in means))
            whole = [int(mean * scale) for mean in means]
            return np.array(whole, dtype=np.int64) if max(whole) <= _LONGEST else None
        case _:
            # Where a partition limits an allreduce, all links between ranks count alike.
            return np.ones(len(problem.budgets), dtype=np.int64)


def _turned_back(problem: Problem, lengths: Ints) -> Ints:
    """Lengths by link orbits of the reversed topology, by those of the topology."""
    links = problem.topology.links
    graph = problem.topology.reversed()
    there = problem.translations.link_orbits(graph)
    length = {(link.dst, link.src): lengths[orbit] for link, orbit in zip(graph.links, there, strict=True)}
    found = np.zeros(len(lengths), dtype=np.int64)
    for link, orbit in zip(links, problem.link_orbits, strict=True):
        found[orbit] = length[link.src, link.dst]
    return found


def _of_out_trees(topology: Topology, collective: Collective, translations: Translations) -> Bound:
    turned = collective.kind is Kind.REDUCE_SCATTER
    graph = topology.reversed() if turned else topology
    found = tightest_cut(graph, dict.fromkeys(collective.ranks, 1), translations.representatives)
    side = frozenset(range(topology.size)) - found.cut.side if turned else found.cut.side
    return Bound(found.rate * len(collective.ranks), Cut(side, found.cut.capacity))


def _of_halves(topology: Topology, collective: Collective, translations: Translations) -> Bound | None:
    """Half of each link for a reduce-scatter and half for an allgather, where that is provably best."""
    if not topology.is_symmetric or not topology.switches:
        return None
    gathered = _of_out_trees(topology, Collective(Kind.ALLGATHER, collective.ranks), translations)
    if gathered.rate == 0 or not isinstance(gathered.certificate, Cut):
        return None
    lengths = tight_lengths(topology, translations, gathered.rate / topology.ranks)
    one_way, graph = lengths[translations.link_orbits(topology)], LinkGraph(topology)
    # An allreduce leaves and enters every image of the cut: lengths are the same both ways.
    both = one_way + one_way[graph.reverse]
    nest = contract(graph, both)
    distance = 2 * nest.cost(0)
    capacity = sum((link.bandwidth * int(length) for link, length in zip(topology.links, both, strict=True)))
    if distance == 0 or Fraction(capacity) / distance != gathered.rate / 2:
        return None
    # Lengths that are the same both ways limit schedules that follow no trees as well.
    certificate = Dual(
        tuple(Fraction(int(length)) for length in both), Fraction(capacity), Fraction(distance)
    )
    return Bound(gathered.rate / 2, certificate, Scope.EVERY_SCHEDULE)
