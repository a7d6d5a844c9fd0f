"""The sets of ranks in which the chunks of an allreduce may meet, and how these exchange what they have.

A core is a rank, two ends of a link, or a grid: ranks that all have the whole sum once the blocks of one
level after the other have exchanged their partial sums, each block in one step. The ranks of a box are a
block, and so are a *rail*: one rank of each box. So a core of one rail meets between boxes, a core of one
box inside it, and one of all ranks does both, in either order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, permutations
from typing import TypeAlias

from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import Group
from arborcast.synth.chunks.problem.symmetry import small_subgroups
from arborcast.synth.topology import parts_of

Block: TypeAlias = tuple[int, ...]
"""Ranks, in ascending order, of which any two have a route both ways."""

Level: TypeAlias = tuple[Block, ...]
"""Blocks that have no rank in common, in order of their first ranks."""

LARGEST_BLOCK = 16
"""Ranks of a block: all of them send to all others at once."""

MOST_LEVELS = 16
"""Partitions of the ranks into blocks that are looked at."""

MOST_TRIPLED = 10
"""Of these, those of which three are combined."""

MOST_CORES = 40
"""Cores of a search: each is priced at each time."""


@dataclass(frozen=True, slots=True)
class Core:
    """Where a chunk meets.

    Attributes:
        members: the ranks, in ascending order.
        levels: whose blocks exchange their sums, one level after the other; none of one rank.
    """

    members: Block
    levels: tuple[Level, ...]


def cores_of(problem: ChunkProblem, group: Group) -> tuple[Core, ...]:
    """One core of each orbit under a group that keeps the problem: of boxes and rails, of links, then others.

    Args:
        problem: see `synth.chunks.allreduce.partial_sums.sum_problem`.
        group: all its elements, the identity first.
    """
    ranks = sorted(demand.owner for demand in problem.demands)
    linked = {(route.src, route.dst) for route in problem.routes}
    boxes = boxes_of(problem, ranks)
    hierarchy = [level for own in boxes for level in (own, rails_of(own)) if _is_level(level, linked)]
    others = [level for level in _orbits(ranks, group) if level not in hierarchy and _is_level(level, linked)]
    others.sort(key=lambda level: -len(level[0]))
    alike = sorted({min(element[rank] for element in group) for rank in ranks})
    both = [pair for pair in combinations(ranks, 2) if pair in linked and pair[::-1] in linked]
    found: dict[Core, None] = {}
    grids = dict.fromkeys(_grids([*hierarchy, *others][:MOST_LEVELS], alike))
    candidates = chain(
        (Core((rank,), ()) for rank in alike),
        _grids(hierarchy, alike),
        (core for core in grids if len(core.members) == len(ranks)),
        (Core(pair, ((pair,),)) for pair in both),
        grids,
    )
    seen: set[Core] = set()
    for core in candidates:
        if core not in seen:
            seen.update(_moved(core, element) for element in group)
            found[core] = None
            if len(found) == MOST_CORES:
                break
    return tuple(found)


def boxes_of(problem: ChunkProblem, ranks: Sequence[int]) -> tuple[Level, ...]:
    """Partitions of the ranks into boxes of one size: those that routes of so much capacity join.

    One for each capacity at which there are several boxes of more than one rank each; the boxes need not be
    blocks.
    """
    widths: dict[tuple[int, int], int] = defaultdict(int)
    for route in problem.routes:
        own = min(problem.capacities[link] for link in route.links)
        widths[route.src, route.dst] = max(own, widths[route.src, route.dst])
    found: dict[Level, None] = {}
    for width in sorted(set(widths.values())):
        joined = {pair for pair, own in list(widths.items()) if own >= width and widths[pair[::-1]] >= width}
        boxes = tuple(tuple(sorted(part)) for part in parts_of(ranks, joined))
        if 1 < len(boxes) < len(ranks) and len(set(map(len, boxes))) == 1:
            found[boxes] = None
    return tuple(found)


def rails_of(boxes: Level) -> Level:
    """Of every box the first rank, of every box the second, and so on."""
    return tuple(zip(*boxes, strict=True))


def _orbits(ranks: Sequence[int], group: Group) -> Iterator[Level]:
    """The partitions of the ranks into orbits of small subgroups."""
    for subgroup in small_subgroups(group, LARGEST_BLOCK):
        yield tuple(sorted({tuple(sorted({element[rank] for element in subgroup})) for rank in ranks}))


def _grids(levels: Sequence[Level], ranks: Sequence[int]) -> Iterator[Core]:
    for count in (1, 2, 3):
        for chosen in permutations(levels[: MOST_TRIPLED if count == 3 else None], count):
            for rank in ranks:
                core = _grid(chosen, rank)
                if core is not None:
                    yield core


def _is_level(level: Level, linked: set[tuple[int, int]]) -> bool:
    return all(
        1 < len(block) <= LARGEST_BLOCK and all(pair in linked for pair in permutations(block, 2))
        for block in level
    )


def _grid(levels: Sequence[Level], rank: int) -> Core | None:
    """The ranks that a rank meets over levels, if all of them end with what all have; otherwise None."""
    blocks = [{rank: block for block in level for rank in block} for level in levels]
    members = {rank}
    for own in blocks[::-1]:
        members = {other for member in members for other in own.get(member, (member,))}
    if any(
        not members.issuperset(own.get(member, ())) or member not in own
        for own in blocks
        for member in members
    ):
        return None
    held = {member: 1 << member for member in members}
    for own in blocks:
        after = {}
        for member in members:
            parts = [held[other] for other in own[member]]
            after[member] = sum(parts)
            if after[member].bit_count() != sum(part.bit_count() for part in parts):
                return None  # something would be added twice
        held = after
    everything = sum(1 << member for member in members)
    if any(value != everything for value in held.values()):
        return None
    used = tuple(tuple(sorted({own[member] for member in members})) for own in blocks)
    return Core(tuple(sorted(members)), used)


def _moved(core: Core, element: Sequence[int]) -> Core:
    def block(ranks: Iterable[int]) -> Block:
        return tuple(sorted(element[rank] for rank in ranks))

    return Core(block(core.members), tuple(tuple(sorted(map(block, level))) for level in core.levels))
