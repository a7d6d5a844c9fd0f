"""Frontiers to plain documents: what `pareto --json` prints and `frontier.json` holds."""

from __future__ import annotations

from typing import Any, TypeAlias

from arborcast.synth.chunks.frontier import Frontier
from arborcast.synth.chunks.step_optimum import explain
from arborcast.synth.chunks.sums.points import Point

Document: TypeAlias = dict[str, Any]


def frontier_to_document(frontier: Frontier) -> Document:
    """What `pareto --json` prints and `frontier.json` holds; a writer fills in the `file` of each point."""
    return {
        "topology": frontier.topology.name,
        "collective": frontier.collective.kind.value,
        "root": frontier.collective.root,
        "ranks": len(frontier.collective.ranks),
        "frontier": [point_to_document(point) for point in frontier.points],
        "static_ratio": str(frontier.static_ratio),
        "complete": frontier.complete,
        "why_stopped": frontier.why_stopped,
        "open_steps": list(frontier.open_steps),
        "limits": [
            {"steps": steps, "least": str(limit.ratio), "proof": explain(limit)}
            for steps, limit in sorted(frontier.limits.items())
        ],
        "timed_out": frontier.timed_out,
        "seconds": frontier.seconds,
    }


def point_to_document(point: Point) -> Document:
    """One entry of `frontier`."""
    return {
        "chunks": point.chunks,
        "steps": point.steps,
        "rounds": point.rounds,
        "ratio": str(point.ratio),
        "proved": point.is_proved,
        "least": str(point.least),
        "scope": point.scope,
        "limit": None if point.is_proved else str(point.least),
        "proof": point.proof,
        "proved_by": [prover.value for prover in point.proved_by],
        "rate": str(point.schedule.rate),
        "file": None,
    }
