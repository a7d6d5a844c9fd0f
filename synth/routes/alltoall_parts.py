"""How many parts of each block go which way, for the smallest number of parts that reaches the best rate.

Blocks that have the same choice between loads are alike, however far away their targets are: an integer
program over these classes is small at a thousand ranks, and its answer is dealt out to their blocks one
after another, so that few blocks are split at all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from arborcast.synth.deadline import Deadline
from arborcast.synth.lp.integer_program import IntegerProgram
from arborcast.synth.routes.alltoall_options import BlockPaths, Load
from arborcast.synth.routes.paths import Path, PathShare

MOST_PARTS = 24
"""Into how many equal parts a block is divided at most before the shares of the optimal flow are taken."""

_MOST_NODES = 200  # of the branch and bound for one number of parts


@dataclass(frozen=True, slots=True)
class _Choice:
    """A block and its ways, by what each loads beyond what all of them load."""

    paths: dict[Load, Path]


@dataclass(frozen=True, slots=True)
class _AlikeBlocks:
    """Blocks with the same choice between loads."""

    loads: tuple[Load, ...]
    blocks: list[_Choice]


def divide(
    options: Sequence[BlockPaths], room: Sequence[Fraction], deadline: Deadline, *, seed: int = 0
) -> list[PathShare] | None:
    """Parts of all blocks that fit the room, in equal parts as large as possible; the fewest links then.

    Args:
        options: the ways of each block.
        room: how many blocks each orbit of links can take.
        deadline: after which no finer division is tried.
        seed: of HiGHS's own ties.

    Returns:
        None where no division into up to `MOST_PARTS` was found.
    """
    common, classes = _classes(options)
    left = [most - common.get(orbit, 0) for orbit, most in enumerate(room)]
    for parts in range(1, MOST_PARTS + 1):
        if deadline.has_passed:
            return None
        amounts = _amounts(classes, left, parts, deadline, seed)
        if amounts is not None:
            dealt = [
                part for group, of in zip(classes, amounts, strict=True) for part in _deal(group, of, parts)
            ]
            return sorted(dealt, key=lambda part: (part.path[0], part.path[-1], len(part.path), part.path))
    return None


def _classes(options: Sequence[BlockPaths]) -> tuple[Counter[int], list[_AlikeBlocks]]:
    """What every way of each block loads, added up, and the blocks by what is left of their ways."""
    common: Counter[int] = Counter()
    classes: dict[tuple[Load, ...], _AlikeBlocks] = {}
    for block in options:
        counts = [Counter(load) for load in block.paths]
        shared = counts[0]
        for count in counts[1:]:
            shared = shared & count
        common.update(shared)
        rests = [tuple(sorted((count - shared).elements())) for count in counts]
        choice = _Choice(dict(zip(rests, block.paths.values(), strict=True)))
        loads = tuple(sorted(rests, key=lambda load: (len(load), load)))
        classes.setdefault(loads, _AlikeBlocks(loads, [])).blocks.append(choice)
    return common, list(classes.values())


def _amounts(
    classes: Sequence[_AlikeBlocks], left: Sequence[Fraction], parts: int, deadline: Deadline, seed: int
) -> list[list[int]] | None:
    """How many parts of each class take each of its ways, by an integer program; None where it found none."""
    room = [int(most * parts // 1) for most in left]
    if min(room) < 0:
        return None
    divided = [group for group in classes if len(group.loads) > 1]
    found = _solve(divided, room, parts, deadline, seed) if divided else []
    if found is None:
        return None
    amounts = iter(found)
    return [next(amounts) if len(group.loads) > 1 else [parts * len(group.blocks)] for group in classes]


def _solve(
    classes: Sequence[_AlikeBlocks], room: Sequence[int], parts: int, deadline: Deadline, seed: int
) -> list[list[int]] | None:
    program = IntegerProgram()
    users: dict[int, Counter[int]] = defaultdict(Counter)
    columns: list[list[int]] = []
    for group in classes:
        whole = parts * len(group.blocks)
        columns.append([program.add_column(whole, cost=len(load)) for load in group.loads])
        program.add_row(columns[-1], [1] * len(group.loads), least=whole, most=whole)
        for column, load in zip(columns[-1], group.loads, strict=True):
            for orbit in load:
                users[orbit][column] += 1
    for orbit, used in sorted(users.items()):
        program.add_row([*used], [*used.values()], most=room[orbit])
    values = program.best(_MOST_NODES, deadline, seed=seed, mip_rel_gap=0.0)
    return None if values is None else [[values[column] for column in of] for of in columns]


def _deal(group: _AlikeBlocks, amounts: Sequence[int], parts: int) -> Iterator[PathShare]:
    """Blocks one after another take what is left of the first way, then of the next."""
    rest = list(amounts)
    way = 0
    for block in group.blocks:
        missing = parts
        while missing:
            while not rest[way]:
                way += 1
            taken = min(missing, rest[way])
            rest[way] -= taken
            missing -= taken
            yield PathShare(block.paths[group.loads[way]], Fraction(taken, parts))
