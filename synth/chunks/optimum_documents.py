"""Limits, and what is known of a number of steps, to plain documents and back.

Fractions are text such as "7/6", as in every file of ours. Lengths are written as a table of the links that
have one, step by step, because most have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

from arborcast.synth.chunks.bounds.certificate import (
    MessageDual,
    PairDual,
    PathDual,
    RouteLengths,
    StaticLimit,
    StepBound,
    StepCertificate,
    StepLengths,
    TreeDual,
)
from arborcast.synth.chunks.problem.instance import routes_of
from arborcast.synth.chunks.problem.prune import plan_from_document, plan_to_document
from arborcast.synth.chunks.step_optimum import StepOptimum
from arborcast.synth.errors import Prover
from arborcast.synth.formats import bound_from_document, bound_to_document
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
        case PairDual(links, pairs):
            certificate = {
                "kind": "pairs",
                "links": _lengths_to_document(links, topology, mirrored),
                "pairs": _pairs_to_document(pairs, topology),
            }
        case MessageDual(lengths, cost):
            certificate = {
                "kind": "messages",
                "lengths": _lengths_to_document(lengths, topology, mirrored),
                "cost": str(cost),
            }
    return {"steps": limit.steps, "ratio": str(limit.ratio), "certificate": certificate}


def limit_from_document(document: Mapping[str, Any], topology: Topology) -> StepBound:
    """The limit of a document of ours; whether it holds is for the certification to say.

    Raises:
        KeyError, TypeError, ValueError: the document is not one of ours.
    """
    shape = document["certificate"]
    certificate: StepCertificate
    match shape["kind"]:
        case "static":
            certificate = StaticLimit(bound_from_document(shape["bound"], topology, "limit"))
        case "paths":
            certificate = PathDual(
                tuple(_lengths_from_document(rows, topology) for rows in shape["shares"]),
                tuple(tuple(map(int, row)) for row in shape["assigned"]),
            )
        case "trees":
            certificate = TreeDual(_lengths_from_document(shape["lengths"], topology))
        case "pairs":
            certificate = PairDual(
                _lengths_from_document(shape["links"], topology),
                _pairs_from_document(shape["pairs"], topology),
            )
        case "messages":
            certificate = MessageDual(
                _lengths_from_document(shape["lengths"], topology), Fraction(shape["cost"])
            )
        case kind:
            raise ValueError(f"certificate: must be static, paths, trees, pairs or messages, got {kind}")
    return StepBound(int(document["steps"]), Fraction(document["ratio"]), certificate)


def optimum_to_document(optimum: StepOptimum, topology: Topology) -> Document:
    """What is known of a number of steps, for the cache."""
    plan = optimum.plan
    return {
        "limit": limit_to_document(optimum.limit, topology),
        "chunks": optimum.chunks,
        "plan": None if plan is None else plan_to_document(plan),
        "smallest": optimum.minimality_proof,
        "refuted_by": [prover.value for prover in optimum.refuted_by],
    }


def optimum_from_document(document: Mapping[str, Any], topology: Topology) -> StepOptimum:
    """The inverse.

    Raises:
        KeyError, TypeError, ValueError: the document is not one of ours.
    """
    plan, minimality_proof = document["plan"], document["smallest"]
    return StepOptimum(
        limit_from_document(document["limit"], topology),
        int(document["chunks"]),
        None if plan is None else plan_from_document(plan),
        None if minimality_proof is None else str(minimality_proof),
        tuple(map(Prover, document["refuted_by"])),
    )


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


def _pairs_from_document(rows: Any, topology: Topology) -> tuple[tuple[int, int, RouteLengths], ...]:
    index = {tuple(way): route for route, way in enumerate(_ways(topology))}
    return tuple(
        (
            int(row["from"]),
            int(row["to"]),
            tuple((int(step), index[tuple(way)], Fraction(length)) for step, way, length in row["lengths"]),
        )
        for row in rows
    )


def _ways(topology: Topology) -> list[list[int | str]]:
    """The routes of a problem as their vertices are called."""
    return [
        [topology.label(vertex) for vertex in (route.src, *route.via, route.dst)]
        for route in routes_of(topology)
    ]


def _lengths_from_document(rows: Any, topology: Topology) -> StepLengths:
    index = {
        (topology.label(link.src), topology.label(link.dst)): position
        for position, link in enumerate(topology.links)
    }
    table = []
    for row in rows:
        lengths = [Fraction(0)] * len(topology.links)
        for src, dst, length in row:
            lengths[index[src, dst]] = Fraction(length)
        table.append(tuple(lengths))
    return tuple(table)
