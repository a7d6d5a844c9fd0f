"""Spanning trees that meet every demand exactly: taken out one at a time, guided by a pool of tight cuts.

Works on the graph with its switches in place. While every cut keeps enough bandwidth for the demands that
stay, another tree exists (Edmonds 1973; Bang-Jensen, Frank and Jackson 1995; switches as in ForestColl,
arXiv 2402.06787): the cheapest arborescence under lengths that count the pooled tight cuts finds it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import reduce

from arborcast.synth.bounds.capacity_lp import SplitCapacities
from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.errors import CollectiveError, InputError, TimedOutError, TopologyError
from arborcast.synth.kernels.arborescence import LogicalGraph
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.packing.packer import Packer
from arborcast.synth.packing.warm_start import NOTHING_KNOWN, StartingTrees, rebound, take_first
from arborcast.synth.packing.weighted_tree import Packing, WeightedTree, centred, merge, mirrored, pair_up
from arborcast.synth.topology import Topology, gcd_of_fractions

log = logging.getLogger(__name__)

SMALL = 64
"""Up to this many ranks several settings are tried, because it is cheap."""


def pack_exactly(
    topology: Topology,
    demands: Mapping[int, Fraction],
    *,
    seed: int = 0,
    hop_weight: float = 0.1,
    attempts: int | None = None,
    deadline: Deadline = NO_DEADLINE,
    known: Sequence[WeightedTree] = (),
) -> Packing:
    """Out-trees that span all ranks, each root's weighing together exactly its demand.

    Args:
        topology: every rank takes part; bandwidth into each switch must equal bandwidth out of it.
        demands: GB/s that each root sends to all others; roots left out or at 0 get no tree.
        seed: settles which edges keep a link that too many of a tree's edges want.
        hop_weight: what one more hop from the root costs a tree, in prices of the scarcest link: more
            gives shallower and often more trees.
        attempts: how many settings to try, the given one first, then other hop weights and seeds; the
            packing whose weights have the largest common unit wins, then the one with the fewest trees
            and levels together. Default: 4 up to 64 ranks, 1 above.
        deadline: settings that have been tried by then count.
        known: trees and parts of trees to take first, each root's in proportion to their weights, as far as
            every cut allows; what they have over links that there are not is lost. With any, one setting is
            tried unless `attempts` says more.

    Returns:
        The packing; its `settings` name the seed of the ties and the hop weight that won, the `unit` in
        GB/s of which all weights are multiples, and how many cuts guided it.

    Raises:
        OverloadedCutError: the demands are more than some cut carries; names the cut.
        TopologyError: a switch sends more than it receives or less, or the numbers do not fit int64.
        CollectiveError: a demand is negative or for a rank that there is not.
        InputError: `hop_weight` is not in 0..16, or `attempts` is less than 1.
        TimedOutError: the deadline passed before the first setting was done.
    """
    _check(topology, demands)
    if not 0 <= hop_weight <= 16:
        raise InputError(f"hop weight: must be in 0..16, got {hop_weight}")
    if attempts is not None and attempts < 1:
        raise InputError(f"attempts: must be at least 1, got {attempts}")
    graph = LogicalGraph(topology)
    first = [rebound(partial, graph) for partial in known]
    if attempts is None:
        attempts = 4 if topology.ranks <= SMALL and not known else 1
    found: list[Packing] = []
    for number, weight in _settings(seed, hop_weight, attempts):
        try:
            packer = Packer(graph, demands, seed=number, hop_weight=weight, deadline=deadline)
            if first:
                take_first(packer, first)
            found.append(packer.run())
        except TimedOutError:
            if not found:
                raise
            log.warning(
                "exact trees on %s: deadline after %d of %d settings", topology.name, len(found), attempts
            )
            break
    return min(found, key=_cost)


def pack_split(
    graph: LinkGraph,
    split: SplitCapacities,
    *,
    in_pairs: bool,
    seed: int = 0,
    deadline: Deadline = NO_DEADLINE,
    known: StartingTrees = NOTHING_KNOWN,
) -> Packing:
    """The out-trees of a split of links, or the pairs of an allreduce, each from its centre.

    Args:
        graph: the links over which the carriers are.
        split: what out-trees may use of them, and in-trees where those are not the out-trees turned round.
        in_pairs: whether each tree also gathers, or meets one that does.
        seed: see `pack_exactly`, also for what is raised.
        deadline: see there.
        known: trees to take first.
    """
    outs = pack_exactly(split.out, split.roots, seed=seed, deadline=deadline, known=known.out)
    trees = tuple(tree.over(graph) for tree in outs.carriers)
    if not in_pairs:
        return replace(outs, carriers=trees)
    if split.into is None:
        pairs = tuple(map(mirrored, trees))
    else:
        back = split.into.reversed()
        ins = pack_exactly(back, split.roots, seed=seed, deadline=deadline, known=known.into)
        pairs = pair_up(trees, ins.carriers)
    return replace(outs, carriers=merge(map(centred, pairs)))


def _settings(seed: int, hop_weight: float, attempts: int) -> Iterator[tuple[int, float]]:
    """The given setting, then other hop weights, then other seeds."""
    weights = dict.fromkeys((hop_weight, 0.0, 0.3, 1.0))
    for attempt in range(attempts):
        yield seed + attempt // len(weights), list(weights)[attempt % len(weights)]


def _cost(packing: Packing) -> tuple[Fraction, int]:
    """What makes a packing worse: a finer common unit of the weights first, then trees and levels."""
    unit = reduce(gcd_of_fractions, (tree.weight for tree in packing.carriers), Fraction(0))
    return -unit, len(packing.carriers) + max((tree.height for tree in packing.carriers), default=0)


def _check(topology: Topology, demands: Mapping[int, Fraction]) -> None:
    for root, demand in demands.items():
        if not 0 <= root < topology.ranks:
            raise CollectiveError(f"demand of rank {root}: rank must be in 0..{topology.ranks - 1}")
        if demand < 0:
            raise CollectiveError(f"demand of rank {root}: must not be negative, got {demand} GB/s")
    for switch in topology.unbalanced(range(topology.ranks, topology.size)):
        into = sum((link.bandwidth for link in topology.links if link.dst == switch), Fraction(0))
        out = sum((link.bandwidth for link in topology.links if link.src == switch), Fraction(0))
        raise TopologyError(
            f"switch {topology.label(switch)}: for exact trees the bandwidth in must equal the bandwidth "
            f"out, got {into} and {out} GB/s"
        )
