"""Shares of the links to schedules: the trees or paths of one group of each orbit, and their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from arborcast.synth.bounds import bound
from arborcast.synth.certificate import Bound, Certificate, Cut, Dual, Partition
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.groups.problem import Problem
from arborcast.synth.groups.program import Shares
from arborcast.synth.groups.routing import Way, lift_ways, ways_of_flow
from arborcast.synth.groups.view import View
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.packing.carrier import Carrier, Pair, centred, merge, mirrored, pair_up
from arborcast.synth.packing.exact import pack_exactly
from arborcast.synth.packing.lift import lift
from arborcast.synth.schedule import Method, Schedule, Settings
from arborcast.synth.topology import Topology, Vertex
from arborcast.synth.tree import Tree, TreeEdge


@dataclass(frozen=True)
class _Plan:
    """What one group does, in vertices of the whole fabric: carriers or ways."""

    carriers: Sequence[Carrier]
    ways: Sequence[Way]
    settings: Settings
    limit: Bound


def schedules_of(problem: Problem, shares: Shares, *, seed: int, deadline: Deadline) -> list[Schedule]:
    """A schedule for each group that fits its share of every link.

    Raises:
        TimedOutError: the deadline passed.
        ArithmeticError: a share has too many digits for exact flows.
    """
    plans = {group: _plan(problem, shares, group, seed, deadline) for group in problem.representatives}
    found = []
    for group, (first, images) in enumerate(problem.origin):
        plan, collective = plans[first], problem.collectives[group]
        limit = _moved_bound(plan.limit, problem.topology, images)
        if problem.views[first].is_routed:
            method = Method("routes", seed, plan.settings)
            ways = [Way(tuple(images[list(way.path)].tolist()), way.share) for way in plan.ways]
            found.append(lift_ways(problem.topology, collective, method, limit, ways))
        else:
            method = Method("trees", seed, plan.settings)
            carriers = [_moved(carrier, images.tolist()) for carrier in plan.carriers]
            found.append(lift(problem.topology, collective, method, limit, carriers))
    return found


def _plan(problem: Problem, shares: Shares, group: int, seed: int, deadline: Deadline) -> _Plan:
    view = problem.views[group]
    limit = bound(problem.topology, problem.collectives[group], deadline_s=deadline.left_s)
    if view.is_routed:
        ways = [way for layer in problem.of_group(group) for way in _ways(problem, shares, layer)]
        return _Plan((), ways, (), limit)
    carriers, settings = _carriers(problem, shares, group, seed, deadline)
    return _Plan([_moved(carrier, view.vertices) for carrier in carriers], (), settings, limit)


def _ways(problem: Problem, shares: Shares, number: int) -> list[Way]:
    """The paths of one source, in vertices of the whole fabric and in the direction of the data."""
    layer = problem.layers[number]
    view = problem.views[layer.group]
    assert layer.source is not None, "what moves along paths has a source"
    flow = {
        (link.src, link.dst): shares.capacity[number][whole]
        for link, whole in zip(view.topology.links, view.links, strict=True)
    }
    amount = shares.supply[layer.group][layer.source]
    targets = [rank for rank in view.collective.ranks if rank != layer.source]
    paths = (
        (tuple(view.vertices[vertex] for vertex in way.path), way.share)
        for way in ways_of_flow(layer.source, targets, amount, flow)
    )
    return [Way(path[::-1] if view.is_reversed else path, share) for path, share in paths]


def _carriers(
    problem: Problem, shares: Shares, group: int, seed: int, deadline: Deadline
) -> tuple[Sequence[Carrier], Settings]:
    """Trees or pairs of trees in the vertices of the view."""
    view, demands = problem.views[group], shares.supply[group]
    fabrics = [_share(view, shares.capacity[layer]) for layer in problem.of_group(group)]
    outs = pack_exactly(fabrics[0], demands, seed=seed, deadline_s=deadline.left_s)
    if view.collective.kind is not Kind.ALLREDUCE:
        return outs.trees, outs.settings
    if problem.is_mirrored:
        return merge(centred(pair) for pair in mirrored(outs.trees)), outs.settings
    ins = pack_exactly(fabrics[1].reversed(), demands, seed=seed, deadline_s=deadline.left_s)
    return merge(centred(pair) for pair in pair_up(outs.trees, ins.trees)), outs.settings


def _share(view: View, capacity: Sequence[Fraction]) -> Topology:
    """The view with the bandwidth that the group may use; unused links are gone."""
    links = (
        replace(link, bandwidth=capacity[whole])
        for link, whole in zip(view.topology.links, view.links, strict=True)
        if capacity[whole]
    )
    return replace(view.topology, links=tuple(links))


def _moved(carrier: Carrier, images: Sequence[Vertex]) -> Carrier:
    """The carrier with every vertex replaced by its image."""
    if isinstance(carrier, Pair):
        return Pair(_moved_tree(carrier.out, images), _moved_tree(carrier.into, images))
    return _moved_tree(carrier, images)


def _moved_tree(tree: Tree, images: Sequence[Vertex]) -> Tree:
    edges = (
        TreeEdge(images[edge.parent], images[edge.child], tuple(images[vertex] for vertex in edge.via))
        for edge in tree.edges
    )
    return Tree(images[tree.root], tree.weight, tuple(edges))


def _moved_bound(limit: Bound, topology: Topology, images: Ints) -> Bound:
    """The limit of the group to which a symmetry of the fabric takes another one."""
    certificate: Certificate
    match limit.certificate:
        case Cut(side, capacity):
            certificate = Cut(frozenset(images[list(side)].tolist()), capacity)
        case Partition(blocks, capacity):
            moved = (frozenset(images[list(block)].tolist()) for block in blocks)
            certificate = Partition(tuple(moved), capacity)
        case Dual(lengths, capacity, distance):
            of_link = {
                (int(images[link.src]), int(images[link.dst])): length
                for link, length in zip(topology.links, lengths, strict=True)
            }
            there = tuple(of_link[link.src, link.dst] for link in topology.links)
            certificate = Dual(there, capacity, distance)
    return replace(limit, certificate=certificate)


def alone_topology(topology: Topology, collective: Collective) -> Topology:
    """The fabric without the links of ranks outside the collective; vertices keep their numbers."""
    outside = set(collective.relays(topology))
    kept = (link for link in topology.links if link.src not in outside and link.dst not in outside)
    return replace(topology, links=tuple(kept), symmetries=())
