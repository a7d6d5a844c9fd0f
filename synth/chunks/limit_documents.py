"""Limits of a number of steps with their certificates as plain documents, for files that others read.

Fractions are text such as "7/6", as in every file of ours. Lengths are written as a table of the links that
have one, step by step, because most have none.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any, TypeAlias

from arborcast.synth.chunks.bounds.step_certificate import (
    FlowDual,
    MessageDual,
    Pairs,
    RouteLengths,
    StaticLimit,
    StepBound,
    StepLengths,
    TreeDual,
)
from arborcast.synth.chunks.problem.instance import routes_of
from arborcast.synth.formats import bound_to_document
from arborcast.synth.topology import Topology

Document: TypeAlias = dict[str, Any]


def limit_to_document(limit: StepBound, topology: Topology, *, mirrored: bool = False) -> Document:
    """A limit with its certificate.

    Of a problem that is `mirrored`, on the reversed fabric, the lengths are given to the links as they are,
    of the last step first. What flows from a block to a rank then flows the other way; blocks keep their
    numbers.
    """
    certificate: Document
    match limit.certificate:
        case StaticLimit(bound):
            certificate = {"kind": "static", "bound": bound_to_document(bound, topology)}
        case TreeDual(lengths):
            certificate = {"kind": "trees", "lengths": _lengths_to_document(lengths, topology, mirrored)}
        case FlowDual(links, flows, symmetries):
            certificate = {
                "kind": "flows",
                "links": _lengths_to_document(links, topology, mirrored),
                "flows": _flows_to_document(flows, limit.steps, topology, mirrored),
                "symmetries": [[topology.label(vertex) for vertex in element] for element in symmetries],
            }
        case MessageDual(lengths, cost):
            certificate = {
                "kind": "messages",
                "lengths": _lengths_to_document(lengths, topology, mirrored),
                "cost": str(cost),
            }
    return {"steps": limit.steps, "ratio": str(limit.ratio), "certificate": certificate}


def _lengths_to_document(lengths: StepLengths, topology: Topology, mirrored: bool) -> list[list[list[Any]]]:
    label = topology.label
    links = topology.reversed().links if mirrored else topology.links
    ends = [(link.dst, link.src) if mirrored else (link.src, link.dst) for link in links]
    table = [
        [
            [label(src), label(dst), str(length)]
            for (src, dst), length in zip(ends, row, strict=True)
            if length
        ]
        for row in lengths
    ]
    return table[::-1] if mirrored else table


def _flows_to_document(
    flows: Iterable[tuple[Pairs, RouteLengths]], steps: int, topology: Topology, mirrored: bool
) -> list[Document]:
    """Of each flow the blocks that it takes, each with the rank it takes it to; and lengths of routes."""
    label = topology.label
    routes = routes_of(topology.reversed() if mirrored else topology)
    ways = [[label(vertex) for vertex in (route.src, *route.via, route.dst)] for route in routes]

    def named(step: int, route: int, length: Fraction) -> list[Any]:
        there = (steps - 1 - step, ways[route][::-1]) if mirrored else (step, ways[route])
        return [*there, str(length)]

    return [
        {
            "pairs": [[block, label(rank)] for block, rank in pairs],
            "lengths": [named(*each) for each in lengths],
        }
        for pairs, lengths in flows
    ]
