"""ForestColl as a peer: run from a checkout of yours, never shipped; its trees become a schedule of ours.

It is handed any topology of ours as a graph with whole capacities, and gives trees from every rank whose
edges are paths through switches. By hand: `python bench/peers.py --forestcoll PATH --topology dgx1`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from arborcast.bench.adapters.answer import (
    LONGEST_REPEATED_S,
    Algorithm,
    Answer,
    CannotAskError,
    Question,
    Reading,
    answer_of,
    without_repeat,
)
from arborcast.bench.harness.processes import Finished, run
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.packing.to_schedule import breadth_first, lift
from arborcast.synth.packing.weighted_tree import WeightedTree
from arborcast.synth.schedule import Method
from arborcast.synth.topology import Topology
from arborcast.synth.tree import Tree, TreeEdge

CHILD = Path(__file__).resolve().parent / "forestcoll_child.py"
MODULE = "pipeline_allgather.py"
KINDS = (Kind.ALLGATHER, Kind.REDUCE_SCATTER)


@dataclass(frozen=True)
class ForestColl:
    """A checkout of it, run by an interpreter that has networkx."""

    checkout: Path
    python: str = sys.executable
    name: str = "ForestColl"

    def check(self) -> None:
        """Raise InputError where there is no such checkout."""
        if not (self.checkout / MODULE).is_file():
            raise InputError(f"--forestcoll {self.checkout}: must be a checkout of ForestColl with {MODULE}")

    def ask(self, question: Question, limit_s: float) -> Answer:
        """Its trees for an allgather, or turned round for a reduce-scatter; see `Contender`."""
        if question.collective.kind not in KINDS:
            raise CannotAskError(
                f"{question.collective.kind}: its public trees are for allgather and reduce-scatter"
            )
        with tempfile.TemporaryDirectory() as scratch:
            asked, answered = Path(scratch) / "question.json", Path(scratch) / "answer.json"
            asked.write_text(json.dumps(graph_of(question)))
            finished = self._run(asked, answered, limit_s)
            answer = answer_of(finished, lambda: read(json.loads(answered.read_text()), question))
            return without_repeat(answer, json.loads(answered.read_text())) if answer.algorithms else answer

    def _run(self, asked: Path, answered: Path, limit_s: float) -> Finished:
        command = [self.python, str(CHILD), str(self.checkout.resolve()), str(asked), str(answered)]
        command.append(str(LONGEST_REPEATED_S))
        environment = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        return run(command, limit_s, environment=environment)


def graph_of(question: Question) -> dict[str, Any]:
    """Links with their capacities in units of `Topology.bandwidth_unit`, and the ranks that take part.

    Ranks outside the collective are handed over like switches. A reduce-scatter is asked for on the reversed
    topology.
    """
    topology = _asked(question)
    pairs = zip(topology.links, topology.capacities, strict=True)
    return {
        "links": [[link.src, link.dst, capacity] for link, capacity in pairs],
        "ranks": list(question.collective.ranks),
    }


def read(found: Mapping[str, Any], question: Question) -> Reading:
    """Its answer as a schedule, with the rate that it states: ranks times units over its time.

    Args:
        found: `trees` with `root`, `count` and `paths` (each path a list of links [from, to]), `units`
            (what the counts of a root add up to) and `time_units`, in which a unit of bandwidth carries
            one, `call_seconds`.
        question: what was asked.

    Raises:
        ValueError: a path that is none, trees that do not span the ranks, or a rank without its trees.
    """
    unit, units = question.topology.bandwidth_unit, int(found["units"])
    graph = LinkGraph(_asked(question))
    trees = [WeightedTree.of(graph, _tree(tree, question, unit)) for tree in found["trees"]]
    for rank in question.collective.ranks:  # lifting would stretch what is there to the whole block
        carried = sum(tree["count"] for tree in found["trees"] if tree["root"] == rank)
        if carried != units:
            raise ValueError(f"trees of rank {rank} must carry {units} units, got {carried}")
    method = Method("forestcoll")
    schedule = lift(question.topology, question.collective, method, question.bound, trees)
    # It may print the time as a float; with whole capacities it is a fraction with few digits.
    time_units = Fraction(found["time_units"]).limit_denominator(10**6)
    claimed = unit * len(question.collective.ranks) * units / time_units
    return float(found["call_seconds"]), [Algorithm("", schedule, claimed, len(schedule.chunks))]


def _asked(question: Question) -> Topology:
    return question.topology.reversed() if question.collective.kind.reduces else question.topology


def _tree(found: Mapping[str, Any], question: Question, unit: Fraction) -> Tree:
    root, count = found["root"], found["count"]
    leaving: dict[int, list[TreeEdge]] = defaultdict(list)
    for path in found["paths"]:
        edge = _edge(path, root)
        leaving[edge.parent].append(edge)
    edges = breadth_first(root, leaving)
    missing = set(question.collective.ranks) - {root, *(edge.child for edge in edges)}
    if missing or len(edges) < len(found["paths"]):
        raise ValueError(
            f"a tree of rank {root} must reach each rank once, got {len(found['paths'])} paths "
            f"that reach {len(edges)} ranks and not {sorted(missing)}"
        )
    return Tree(root, unit * count, edges)


def _edge(path: Sequence[Sequence[int]], root: int) -> TreeEdge:
    """A path from rank to rank, given link by link."""
    vertices = [path[0][0], *(target for _, target in path)]
    if any(source != before for (source, _), before in zip(path, vertices, strict=False)):
        raise ValueError(f"a tree of rank {root}: links must follow each other, got path {path}")
    return TreeEdge(vertices[0], vertices[-1], tuple(vertices[1:-1]))
