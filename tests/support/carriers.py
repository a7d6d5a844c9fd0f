"""Trees that were written down as what packings work with, and the links of those as pairs of vertices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.lp.choice import TreeCandidates, Use
from arborcast.synth.lp.tree_program import TreeRows
from arborcast.synth.packing.weighted_tree import WeightedTree
from arborcast.synth.topology import Hop, Topology
from arborcast.synth.tree import Tree


def carrier(topology: Topology, out: Tree, into: Tree | None = None) -> WeightedTree:
    """A tree of a topology, or a pair with an out-tree of the reversed one."""
    graph = LinkGraph(topology)
    gathered = None if into is None else WeightedTree.of(graph.turned_round, into).out
    return WeightedTree(out.root, out.weight, WeightedTree.of(graph, out).out, gathered)


def hops(carrier: WeightedTree) -> Counter[Hop]:
    """How often a carrier uses each link of the topology it is on."""
    links = carrier.out.graph.topology.links
    return Counter({(links[at].src, links[at].dst): n for at, n in enumerate(carrier.uses.tolist()) if n})


def choice_of(
    topology: Topology, groups: Sequence[Sequence[WeightedTree]], target: Fraction
) -> TreeCandidates:
    """Carriers to choose from on the links of a topology; rates as parts of a target."""
    rows = TreeRows.of((link.bandwidth for link in topology.links), target, len(groups))
    return TreeCandidates(
        rows, tuple(Use.of(group, one) for group, some in enumerate(groups) for one in some)
    )
