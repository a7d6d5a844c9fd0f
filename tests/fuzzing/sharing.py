"""Whether several groups share the links fairly: no one can gain without taking from one that has no more."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from arborcast.synth.collective import Collective
from arborcast.synth.topology import Topology
from tests.fuzzing.exact_lp import Program
from tests.fuzzing.limits import TREES, add_flows, add_trees, uses, ways

GAIN = 1 + Fraction(1, 10**6)


def who_can_gain(
    topology: Topology,
    groups: Sequence[Collective],
    weights: Sequence[Fraction],
    rates: Sequence[Fraction],
    *,
    relays: bool,
) -> list[int]:
    """The groups whose rate could be a millionth higher, with all that have as little or less at theirs."""
    able = []
    for group, rate in enumerate(rates):
        floors = {
            other: floor
            for other, floor in enumerate(rates)
            if floor / weights[other] <= rate / weights[group]
        }
        floors[group] = rate * GAIN
        if _reachable(topology, groups, floors, relays=relays) >= 1:
            able.append(group)
    return able


def _reachable(
    topology: Topology, groups: Sequence[Collective], floors: dict[int, Fraction], *, relays: bool
) -> Fraction:
    """The largest part of these rates that all of them reach together."""
    program = Program()
    loads: dict[tuple[int, int], dict[object, int]] = {}
    for number, floor in floors.items():
        group = groups[number]
        program.at_most({"part": floor, ("rate", number): -1})
        fabric = seen(topology, group, relays=relays)
        if group.kind in TREES:
            inner = [vertex for vertex in range(fabric.size) if vertex not in group.ranks]
            routes = ways(fabric, group.ranks, inner)
            add_trees(program, f"tree {number}", routes, group, ("rate", number))
            mine = uses(f"tree {number}", routes, group)
        else:
            mine = add_flows(program, f"flow {number}", fabric, group, ("rate", number))
        for hop, users in mine.items():
            loads.setdefault(hop, {}).update(users)
    for hop, users in loads.items():
        program.at_most(users, topology.bandwidth[hop])
    return program.maximum("part")


def seen(topology: Topology, group: Collective, *, relays: bool) -> Topology:
    """What a group may use: without relays there is nothing at ranks of others."""
    strangers = set() if relays else set(range(topology.ranks)) - set(group.ranks)
    links = [link for link in topology.links if not {link.src, link.dst} & strangers]
    return Topology.build(topology.name, topology.ranks, links, topology.switches)
