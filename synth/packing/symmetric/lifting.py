"""Chosen trees of representatives into a schedule in implicit form: the last step of symmetric solving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.packing.carrier import Carrier, Pair, centred, mirrored, pair_up
from arborcast.synth.packing.lift import gathering, relayed, spreading
from arborcast.synth.packing.symmetric.problem import Problem
from arborcast.synth.packing.symmetric.weights import Chosen
from arborcast.synth.schedule import Chunk, Method, Settings, Transfer
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Topology
from arborcast.synth.tree import Tree, TreeEdge


def lift_symmetric(
    topology: Topology,
    collective: Collective,
    translations: Translations,
    limit: Bound,
    problem: Problem,
    chosen: Chosen,
    *,
    seed: int,
    settings: Settings,
) -> ImplicitSchedule:
    """The schedule in which every rank has the images of the trees of its orbit's first rank.

    Args:
        topology: the fabric.
        collective: what the trees are for.
        translations: of the topology.
        limit: the bound of the rate.
        problem: what was packed.
        chosen: the trees and their weights.
        seed: what the ties were broken by.
        settings: facts about how it was found.
    """
    carriers = _carriers(problem, chosen, translations)
    total = sum((carrier.weight for carrier in carriers), Fraction(0)) * translations.order
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    for index, carrier in enumerate(carriers):
        chunks.append(Chunk(carrier.weight / total, carrier.root))
        if isinstance(carrier, Pair):
            into = relayed(carrier.into, topology)
            transfers += gathering(into, index)
            transfers += spreading(relayed(carrier.out, topology), index, first_step=into.height)
        elif collective.kind is Kind.REDUCE_SCATTER:
            transfers += gathering(relayed(carrier, topology), index)
        else:
            transfers += spreading(relayed(carrier, topology), index)
    method = Method("symmetric", seed, settings)
    return ImplicitSchedule.build(topology, collective, method, limit, translations, chunks, transfers)


def _carriers(problem: Problem, chosen: Chosen, translations: Translations) -> Sequence[Carrier]:
    trees: dict[bool, list[Tree]] = {False: [], True: []}
    for column, weight in zip(chosen.columns, chosen.weights, strict=True):
        turned = problem.groups[column.group].turned
        trees[turned].append(column.grown.tree(problem.graph(turned=turned), weight))
    if problem.mirrored:
        return [_at_representative(centred(pair), translations) for pair in mirrored(trees[False])]
    if trees[False] and trees[True]:
        return pair_up(trees[False], trees[True])
    return trees[False] or trees[True]


def _at_representative(pair: Pair, translations: Translations) -> Pair:
    """The image of a pair whose root is the first rank of its orbit: no load of an orbit changes."""
    element = int(translations.minus(0, int(translations.place[pair.root])))
    if element == 0:
        return pair
    images = translations.apply(element, np.arange(translations.size)).tolist()
    edges = tuple(
        TreeEdge(images[edge.parent], images[edge.child], tuple(images[vertex] for vertex in edge.via))
        for edge in pair.out.edges
    )
    moved = replace(pair.out, root=images[pair.root], edges=edges)
    return Pair(moved, moved)
