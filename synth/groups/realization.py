"""Shares of the links to schedules: the trees or paths of one group of each orbit, and their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from arborcast.synth.bounds import bound
from arborcast.synth.bounds.capacity_lp import SplitCapacities
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.groups.problem import GroupsProblem
from arborcast.synth.groups.sharing_lp import LevelRates
from arborcast.synth.groups.view import GroupView
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.packing.exact import pack_split
from arborcast.synth.packing.to_schedule import lift
from arborcast.synth.packing.weighted_tree import Packing
from arborcast.synth.routes.paths import PathShare, lift_routes, routes_of_flow
from arborcast.synth.schedule import Method, Schedule
from arborcast.synth.topology import Hop, Topology


def schedules_of(
    problem: GroupsProblem, shares: LevelRates, *, seed: int, deadline: Deadline
) -> dict[int, Schedule]:
    """A schedule for each representative that fits its share of every link; images of it serve the others.

    Raises:
        TimedOutError: the deadline passed.
        ArithmeticError: a share has too many digits for exact flows.
    """
    found = {}
    topology = problem.topology
    for group in problem.representatives:
        collective = problem.collectives[group]
        limit = bound(topology, collective, deadline)
        if problem.view(group).is_routed:
            routes = [route for layer in problem.of_group(group) for route in _routes(problem, shares, layer)]
            lifted = lift_routes(topology, collective, routes)
            found[group] = Schedule.build(topology, collective, Method("routes", seed), limit, *lifted)
        else:
            packing = _packing(problem, shares, group, seed, deadline)
            method = Method("trees", seed, packing.settings)
            found[group] = lift(topology, collective, method, limit, packing.carriers)
    return found


def _routes(problem: GroupsProblem, shares: LevelRates, number: int) -> list[PathShare]:
    """The paths of one source, in vertices of the whole fabric and in the direction of the data."""
    layer = problem.layers[number]
    view = problem.view(layer.group)
    assert layer.source is not None, "what moves along paths has a source"
    flow: dict[Hop, int | Fraction] = {
        (link.src, link.dst): shares.capacity[number][whole]
        for link, whole in zip(view.topology.links, view.links, strict=True)
        if shares.capacity[number][whole]
    }
    amount = shares.supply[layer.group][layer.source]
    targets = [rank for rank in view.collective.ranks if rank != layer.source]
    paths = (
        (tuple(view.vertices[vertex] for vertex in route.path), route.share)
        for route in routes_of_flow(flow, layer.source, dict.fromkeys(targets, amount))
    )
    return [PathShare(path[::-1] if view.is_reversed else path, share) for path, share in paths]


def _packing(
    problem: GroupsProblem, shares: LevelRates, group: int, seed: int, deadline: Deadline
) -> Packing:
    """Trees or pairs of trees over the links of the whole fabric; turned round where data is gathered."""
    view, demands = problem.view(group), shares.supply[group]
    local = LinkGraph(view.topology)
    fabrics = [_share(view, shares.capacity[layer]) for layer in problem.of_group(group)]
    split = SplitCapacities(sum(demands.values(), Fraction(0)), demands, *fabrics)
    in_pairs = view.collective.kind is Kind.ALLREDUCE
    packed = pack_split(local, split, in_pairs=in_pairs, seed=seed, deadline=deadline)
    whole, vertices = LinkGraph(problem.topology), np.array(view.vertices, dtype=np.int64)
    there = whole.turned_round if view.is_reversed else whole
    return Packing(tuple(carrier.over(there, vertices) for carrier in packed.carriers), packed.settings)


def _share(view: GroupView, capacity: Sequence[Fraction]) -> Topology:
    """The view with the bandwidth that the group may use; unused links are gone."""
    links = (
        replace(link, bandwidth=capacity[whole])
        for link, whole in zip(view.topology.links, view.links, strict=True)
        if capacity[whole]
    )
    return replace(view.topology, links=tuple(links))


def alone_topology(topology: Topology, collective: Collective) -> Topology:
    """The fabric without the links of ranks outside the collective; vertices keep their numbers."""
    outside = set(collective.relays(topology))
    kept = (link for link in topology.links if link.src not in outside and link.dst not in outside)
    return replace(topology, links=tuple(kept), symmetries=())
