"""Limits, and what is known of a number of steps, to plain documents and back, and from the cache.

Fractions are text such as "7/6", as in every file of ours. Lengths are written as a table of the links that
have one, step by step, because most have none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
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
from arborcast.synth.chunks.bounds.check import certified_ratio
from arborcast.synth.chunks.optimum import AnyPlan, StepOptimum
from arborcast.synth.chunks.problem.instance import ChunkProblem, routes_of
from arborcast.synth.chunks.solvers.cache import ChunkCache, Detail
from arborcast.synth.errors import Prover
from arborcast.synth.formats import bound_from_document, bound_to_document
from arborcast.synth.topology import Permutation, Topology

log = logging.getLogger(__name__)

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
                _symmetries_from_document(shape["symmetries"], topology),
            )
        case "messages":
            certificate = MessageDual(
                _lengths_from_document(shape["lengths"], topology), Fraction(shape["cost"])
            )
        case kind:
            raise ValueError(f"certificate: must be static, paths, trees, pairs or messages, got {kind}")
    return StepBound(int(document["steps"]), Fraction(document["ratio"]), certificate)


def optimum_to_document(
    optimum: StepOptimum[AnyPlan], topology: Topology, written: Callable[[AnyPlan], Document]
) -> Document:
    """What is known of a number of steps, for the cache; `written` gives the document of a plan."""
    return {
        "limit": None if optimum.limit is None else limit_to_document(optimum.limit, topology),
        "chunks": optimum.chunks,
        "plan": None if optimum.plan is None else written(optimum.plan),
        "minimality_proof": optimum.minimality_proof,
        "refuted_by": [prover.value for prover in optimum.refuted_by],
    }


def optimum_from_document(
    document: Mapping[str, Any], topology: Topology, read: Callable[[Mapping[str, Any]], AnyPlan]
) -> StepOptimum[AnyPlan]:
    """The inverse.

    Raises:
        KeyError, TypeError, ValueError: the document is not one of ours.
    """
    limit, plan, proof = document["limit"], document["plan"], document["minimality_proof"]
    return StepOptimum(
        None if limit is None else limit_from_document(limit, topology),
        int(document["chunks"]),
        None if plan is None else read(plan),
        None if proof is None else str(proof),
        tuple(map(Prover, document["refuted_by"])),
    )


def kept_or_found(
    cache: ChunkCache | None,
    subject: str,
    problem: ChunkProblem,
    static: StepBound | None,
    find: Callable[[], StepOptimum[AnyPlan]],
    written: Callable[[AnyPlan], Document],
    read: Callable[[Mapping[str, Any]], AnyPlan],
    **details: Detail,
) -> StepOptimum[AnyPlan]:
    """What is known of a number of steps, from the cache where it was worked out to its end before.

    The certificate of what was kept is checked again, its plan by whoever verifies the schedule.

    Args:
        cache: None to keep nothing.
        subject: the kind of question, for the key.
        problem: what is to be done.
        static: the limit for any number of steps; None where none holds for every schedule.
        find: works it out.
        written: the document of a plan.
        read: the inverse.
        details: whatever else the answer depends on.
    """
    if cache is None:
        return find()
    ratio = None if static is None else str(static.ratio)
    key = cache.key_of(subject, problem, static=ratio, **details)
    document = cache.get_json(key)
    if document is not None:
        try:
            optimum = optimum_from_document(document, problem.topology, read)
            return replace(optimum, limit=_checked(optimum.limit, problem, static))
        except (KeyError, TypeError, ValueError) as error:  # InputError is a ValueError
            log.warning("cache entry %s ignored: %r", key, error)
    optimum = find()
    if not optimum.out_of_time and not optimum.lost_solvers:
        cache.put_json(key, optimum_to_document(optimum, problem.topology, written))
    return optimum


def _checked(limit: StepBound | None, problem: ChunkProblem, static: StepBound | None) -> StepBound | None:
    if limit is None:
        return None
    if isinstance(limit.certificate, StaticLimit):
        if static is None:
            raise ValueError("no limit of any number of steps holds for every schedule")
        return replace(static, steps=limit.steps)
    proved = certified_ratio(problem, limit.steps, limit.certificate)
    if proved != limit.ratio:
        raise ValueError(f"its certificate proves {proved}, it says {limit.ratio}")
    return limit


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


def _symmetries_from_document(rows: Any, topology: Topology) -> tuple[Permutation, ...]:
    number = {topology.label(vertex): vertex for vertex in range(topology.size)}
    return tuple(tuple(number[label] for label in row) for row in rows)


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
