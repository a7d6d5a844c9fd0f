"""Limits of a number of steps with their certificates as plain documents, for files that others read.

Fractions are text such as "7/6", as in every file of ours. Lengths are written as a table of the links that
have one, step by step, because most have none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from arborcast.synth.chunks.bounds.step_certificate import (
    MessageDual,
    PairDual,
    PathDual,
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
    of the last step first.
    """
    certificate: Document
    match limit.certificate:
        case StaticLimit(bound):
            certificate = {"kind": "static", "bound": bound_to_document(bound, topology)}
        case PathDual(shares, assigned):
            certificate = {
                "kind": "paths",
                "shares": [_lengths_to_document(lengths, topology, mirrored) for lengths in shares],
                "assigned": [list(row) for row in assigned],
            }
        case TreeDual(lengths):
            certificate = {"kind": "trees", "lengths": _lengths_to_document(lengths, topology, mirrored)}
        case PairDual(links, pairs, symmetries):
            certificate = {
                "kind": "pairs",
                "links": _lengths_to_document(links, topology, mirrored),
                "pairs": _pairs_to_document(pairs, topology),
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


def _pairs_to_document(
    pairs: Iterable[tuple[int, int, RouteLengths]], topology: Topology
) -> list[dict[str, Any]]:
    ways = _ways(topology)
    return [
        {
            "from": contributor,
            "to": receiver,
            "lengths": [[step, ways[route], str(length)] for step, route, length in lengths],
        }
        for contributor, receiver, lengths in pairs
    ]


def _ways(topology: Topology) -> list[list[int | str]]:
    """The routes of a problem as their vertices are called."""
    return [
        [topology.label(vertex) for vertex in (route.src, *route.via, route.dst)]
        for route in routes_of(topology)
    ]
