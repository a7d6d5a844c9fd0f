"""A pattern of transfers among positions, and how it is laid over the ranks of a graph.

Trees and hypercubes are written down once for positions 0..n-1. Laying one over a graph gives each position
a rank and each edge its ways through switches; where a pair has several equally wide ways (parallel planes of
switches), every chunk is cut into as many lanes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import islice
from operator import le

from arborcast.synth.baselines.budget import Budget, BudgetError
from arborcast.synth.baselines.switch_paths import PATHS_PER_PAIR, Pair, Path, Paths, switch_paths, widest
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Hop, Topology

EMBEDDINGS_COMPARED = 64


@dataclass(frozen=True)
class Pattern:
    """Chunks and transfers whose ranks are positions.

    Attributes:
        name: of the method.
        positions: how many.
        pinned: the position of the root, None without one.
        chunks: with positions as owners.
        transfers: with positions as ends.
    """

    name: str
    positions: int
    pinned: int | None
    chunks: tuple[Chunk, ...]
    transfers: tuple[Transfer, ...]

    @cached_property
    def loads(self) -> dict[Pair, Fraction]:
        """The share of the buffer that each pair of positions exchanges."""
        loads: dict[Pair, Fraction] = {}
        for transfer in self.transfers:
            pair = (transfer.src, transfer.dst)
            loads[pair] = loads.get(pair, Fraction(0)) + self.chunks[transfer.chunk].share
        return loads


def lay(
    topology: Topology, collective: Collective, bound: Bound, pattern: Pattern, deadline: Deadline
) -> Schedule:
    """The schedule of a pattern: ranks in their own order where that fits, else the best embedding found.

    `Method.settings` holds the `order` used: the rank of each position.

    Raises:
        InfeasibleError: the pattern does not fit the graph, or no embedding was found within the budget.
        TimedOutError: the deadline passed.
    """
    paths = {pair: widest(ways) for pair, ways in switch_paths(topology, collective.ranks).items()}
    natural = _natural_order(collective)
    if all((natural[src], natural[dst]) in paths for src, dst in pattern.loads):
        order = natural
    else:
        order = _best_embedding(topology, collective, pattern, paths, deadline)
    method = Method(pattern.name, settings=(("order", ",".join(map(str, order))),))
    chunks, transfers = _lanes(pattern, order, paths)
    return Schedule.build(topology, collective, method, bound, chunks, transfers)


def _natural_order(collective: Collective) -> tuple[int, ...]:
    """The ranks in the order of the collective, a root first."""
    if collective.root is None:
        return collective.ranks
    return (collective.root, *(rank for rank in collective.ranks if rank != collective.root))


def _best_embedding(
    topology: Topology, collective: Collective, pattern: Pattern, paths: Paths, deadline: Deadline
) -> tuple[int, ...]:
    pinned = {} if pattern.pinned is None else {pattern.pinned: _natural_order(collective)[0]}
    if not _has_degrees(pattern, paths):  # most graphs that it does not fit; to try all orders takes a second
        raise _does_not_fit(topology, collective, pattern, "does not fit")
    best: tuple[int, ...] | None = None
    least = Fraction(0)
    complete = True
    for order in embeddings(pattern.loads, paths, collective.ranks, pinned, EMBEDDINGS_COMPARED, deadline):
        if order is None:
            complete = False
            break
        busiest = _busiest(topology, pattern, order, paths)
        if best is None or busiest < least:
            best, least = order, busiest
    if best is None:
        found = "does not fit" if complete else "was not found within the budget of the search in"
        raise _does_not_fit(topology, collective, pattern, found)
    return best


def _has_degrees(pattern: Pattern, paths: Paths) -> bool:
    """Whether for each position a rank is left that is joined to as many others, the busiest first."""
    wanted, there = (Counter(src for src, _ in pairs) for pairs in (pattern.loads, paths))
    degrees = [sorted(counts.values(), reverse=True) for counts in (wanted, there)]
    return len(degrees[0]) <= len(degrees[1]) and all(map(le, *degrees))


def _does_not_fit(topology: Topology, collective: Collective, pattern: Pattern, how: str) -> InfeasibleError:
    return InfeasibleError(
        f"{pattern.name}: its pattern {how} the links between the {len(collective.ranks)} ranks of "
        f"{topology.name}; methods trees and multiring fit their patterns to the links"
    )


def _busiest(topology: Topology, pattern: Pattern, order: Sequence[int], paths: Paths) -> Fraction:
    """The longest time that a link is busy, per GB of buffer."""
    # Whole numbers of a common part, as one of as many ways carries it.
    parts = math.lcm(*range(1, PATHS_PER_PAIR + 1))
    parts *= math.lcm(*(share.denominator for share in pattern.loads.values()))
    loads: dict[Hop, int] = {}
    for (src, dst), share in pattern.loads.items():
        ways = paths[order[src], order[dst]]
        amount = int(share * parts) // len(ways)
        for way in ways:
            for hop in way.hops:
                loads[hop] = loads.get(hop, 0) + amount
    return max(Fraction(load, parts) / topology.bandwidth[hop] for hop, load in loads.items())


def _lanes(
    pattern: Pattern, order: Sequence[int], paths: Mapping[Pair, Sequence[Path]]
) -> tuple[list[Chunk], list[Transfer]]:
    lanes = max(len(paths[order[src], order[dst]]) for src, dst in pattern.loads)
    chunks = [
        replace(chunk, share=chunk.share / lanes, owner=order[chunk.owner])
        for _ in range(lanes)
        for chunk in pattern.chunks
    ]
    return chunks, [t for lane in range(lanes) for t in _lane(pattern, order, paths, lane)]


def _lane(
    pattern: Pattern, order: Sequence[int], paths: Mapping[Pair, Sequence[Path]], lane: int
) -> Iterator[Transfer]:
    for transfer in pattern.transfers:
        src, dst = order[transfer.src], order[transfer.dst]
        ways = paths[src, dst]
        yield replace(
            transfer,
            chunk=transfer.chunk + lane * len(pattern.chunks),
            src=src,
            dst=dst,
            via=ways[lane % len(ways)].via,
        )


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

    Edges are pairs of positions that exchange data, joined pairs are ranks with a way between them, pinned
    are positions whose rank is given.

    Yields:
        The ranks of the positions in order; None at the end where the search ran out of its budget, so that
        there may be more.
    """
    place = {rank: at for at, rank in enumerate(ranks)}
    after, before = ([0] * len(ranks) for _ in range(2))  # of each rank the bits of those joined to it
    for src, dst in joined:
        after[place[src]] |= 1 << place[dst]
        before[place[dst]] |= 1 << place[src]
    masks: list[dict[int, list[list[int]]]] = [{} for _ in ranks]  # of each position its neighbours' masks
    for src, dst in edges:
        masks[dst].setdefault(src, []).append(after)
        masks[src].setdefault(dst, []).append(before)
    sequence, placed = list(pinned), dict.fromkeys(pinned)
    while len(sequence) < len(ranks):  # the position with the most neighbours before it
        left = (position for position in range(len(ranks)) if position not in placed)
        following = max(left, key=lambda one: (len(masks[one].keys() & placed.keys()), len(masks[one]), -one))
        sequence.append(following)
        placed[following] = None
    budget = Budget(EMBEDDING_STEPS, deadline)
    at: dict[int, int] = {}

    def allowed(position: int, free: int) -> int:
        for other, joins in masks[position].items():
            if other in at:
                for join in joins:
                    free &= join[at[other]]
        if position in pinned:
            free &= 1 << place[pinned[position]]
        return free

    def placements(depth: int, free: int) -> Iterator[tuple[int, ...]]:
        if depth == len(sequence):
            yield tuple(ranks[at[position]] for position in range(len(ranks)))
            return
        position = sequence[depth]
        options = allowed(position, free)
        while options:
            budget.spend()
            lowest = options & -options
            options -= lowest
            at[position] = lowest.bit_length() - 1
            yield from placements(depth + 1, free - lowest)
        at.pop(position, None)

    try:
        yield from islice(placements(0, (1 << len(ranks)) - 1), most)
    except BudgetError:
        yield None
