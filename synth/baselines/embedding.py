"""Which rank takes which position, so that every edge of a pattern has a way in the graph (VF2)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from arborcast.synth.baselines.budget import Budget, BudgetError
from arborcast.synth.baselines.paths import Pair
from arborcast.synth.deadline import Deadline

EMBEDDING_STEPS = 50_000


def embeddings(
    edges: Collection[Pair],
    joined: Collection[Pair],
    ranks: Sequence[int],
    pinned: Mapping[int, int],
    most: int,
    deadline: Deadline,
) -> Iterator[tuple[int, ...] | None]:
    """Up to `most` ways to place positions 0..n-1 on n ranks with each edge on a joined pair.

    Args:
        edges: pairs of positions that exchange data.
        joined: pairs of ranks with a way between them.
        ranks: those to place on.
        pinned: positions whose rank is given.
        most: after so many, stop.
        deadline: when to give up.

    Yields:
        The ranks of the positions in order; None at the end where the search ran out of its budget, so that
        there may be more.
    """
    import networkx
    from networkx.algorithms.isomorphism import DiGraphMatcher

    graph: networkx.DiGraph[int] = networkx.DiGraph()
    pattern: networkx.DiGraph[int] = networkx.DiGraph()
    for place in ranks:
        graph.add_node(place, pinned=None)
    graph.add_edges_from(sorted(joined))
    for position in range(len(ranks)):
        pattern.add_node(position, pinned=None)
    pattern.add_edges_from(sorted(edges))
    for position, rank in pinned.items():
        pattern.nodes[position]["pinned"] = graph.nodes[rank]["pinned"] = position
    budget = Budget(EMBEDDING_STEPS, deadline)

    class Matcher(DiGraphMatcher):  # type: ignore[type-arg, unused-ignore]
        """VF2 that gives up after a number of tries, not of seconds."""

        def syntactic_feasibility(self, place: int, position: int) -> bool:
            budget.spend()
            return bool(super().syntactic_feasibility(place, position))  # type: ignore[no-untyped-call]

    def alike(place: Mapping[str, Any], position: Mapping[str, Any]) -> bool:
        return bool(place["pinned"] == position["pinned"])

    matches = Matcher(graph, pattern, node_match=alike).subgraph_monomorphisms_iter()
    try:
        for count, match in enumerate(matches, start=1):
            rank_of = {position: rank for rank, position in match.items()}
            yield tuple(rank_of[position] for position in range(len(ranks)))
            if count == most:
                return
    except BudgetError:
        yield None
