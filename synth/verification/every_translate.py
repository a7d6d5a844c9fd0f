"""Replays every chunk in machine code: of an implicit schedule moved by every translation, each link counted.

No symmetry is relied on: the permutation of each element is composed from the images of the generators, each
representative chunk is moved by it and replayed with sets of contributors, and what passes each link is added
up in whole numbers. What the kernels find wrong is replayed once more by `synth.verification.replay`, which
says why; what is asked of switches is looked at by `synth.verification.switch_use`, one translate after the
other. Large schedules that are written out are replayed likewise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np

from arborcast.synth.collective import Block, Collective, Kind
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.kernels.compiled import Flags, Ints
from arborcast.synth.schedule import Chunk, Schedule, Transfer
from arborcast.synth.topology import Hop, Topology, Vertex
from arborcast.synth.transfers import Transfers
from arborcast.synth.verification.group_check import CheckedGroup, identity_alone
from arborcast.synth.verification.replay import Errors, mask_of, replay_chunk
from arborcast.synth.verification.replay_kernels import (
    Group,
    Moves,
    ReplayCount,
    ReplayGoal,
    ReplayState,
    replay_all,
)
from arborcast.synth.verification.switch_use import uses_of_chunk
from arborcast.synth.verification.verdict import describe

DIGIT_BITS = 30
"""Shares are counted in digits of so many bits: 2**33 of them fit an int64, whatever the denominators are."""


def check_every_translate(
    schedule: ImplicitSchedule, group: CheckedGroup, errors: Errors
) -> tuple[dict[Hop, Fraction], dict[Vertex, Fraction], dict[Vertex, int]]:
    """Replay all chunks and add up all blocks.

    Returns:
        The share of the buffer over each link that is used, the share that each switch adds, and how many
        chunks each switch adds or multicasts.

    Time is linear in the transfers of all chunks, times the ranks / 64 where contributions add up; memory
    in those of the representatives, and in the square of the ranks for an alltoall.
    """
    topology, collective, chunks = schedule.topology, schedule.collective, schedule.chunks
    required = collective.blocks(frozenset(group.vertex_orbit.tolist()))
    scale = math.lcm(*{share.denominator for share in (*required.values(), *(it.share for it in chunks))})
    in_block = [collective.block_of(chunk.owner, chunk.target) in required for chunk in chunks]
    columns = Transfers.of(schedule.transfers)
    moves = _moves(columns, chunks, np.array(in_block, dtype=np.bool_), topology, scale)
    count = _replayed(moves, group, collective, topology, errors.limit)
    _check_chunks(schedule, group, moves, errors)
    _check_blocks(schedule, count.shares, scale, errors)
    _spell_out(schedule, group, count, errors)
    if count.numbers[2]:
        errors.add(f"transfers: {count.numbers[2]} hops are moved to where there is no link")
    return _loads(topology, count.loads, scale), *_switch_uses(schedule, group, errors)


def loads_if_sound(schedule: Schedule) -> dict[Hop, Fraction] | None:
    """The share of the buffer over each link, if every chunk of a schedule does what the collective asks.

    None where one does not, for `synth.verification.replay` to say why, and for custom collectives, which
    kernels do not replay: several ranks may hold one block before.
    """
    topology, collective, columns = schedule.topology, schedule.collective, schedule.columns
    if collective.kind is Kind.CUSTOM:
        return None
    scale = math.lcm(*(chunk.share.denominator for chunk in schedule.chunks))
    # With the identity alone; that shares make whole blocks is checked apart.
    alone = identity_alone(topology)
    moves = _moves(columns, schedule.chunks, np.zeros(len(schedule.chunks), np.bool_), topology, scale)
    count = _replayed(moves, alone, collective, topology, 0)
    return None if count.numbers.any() else _loads(topology, count.loads, scale)


def _ends(topology: Topology) -> tuple[Ints, Ints]:
    """Where each link starts and ends."""
    return _ints([link.src for link in topology.links]), _ints([link.dst for link in topology.links])


def _replayed(
    moves: Moves, group: CheckedGroup, collective: Collective, topology: Topology, most_spelled: int
) -> ReplayCount:
    goal, digits = _goal(collective, topology.ranks), moves.share.shape[1]
    count = ReplayCount(
        np.zeros((most_spelled, 2), dtype=np.int64),
        np.zeros(3, dtype=np.int64),
        np.zeros((digits, topology.ranks**goal.blocks), dtype=np.int64),
        np.zeros((digits, len(topology.links)), dtype=np.int64),
    )
    state = _state(goal, topology.holders, int(np.diff(moves.first).max(initial=0)))
    members = Group(group.generators, group.link_images, group.orders, *_ends(topology))
    replay_all(moves, members, goal, state, count)
    return count


def _goal(collective: Collective, ranks: int) -> ReplayGoal:
    member = np.zeros(ranks, dtype=np.bool_)
    member[list(collective.ranks)] = True
    kind = collective.kind
    by_target = kind in {Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL}
    by_owner = kind in {Kind.REDUCE, Kind.REDUCE_SCATTER}
    blocks = {Kind.ALLREDUCE: 0, Kind.ALLTOALL: 2}.get(kind, 1)
    return ReplayGoal(member, kind.reduces, 2 if by_target else 1 if by_owner else 0, blocks)


def _state(goal: ReplayGoal, holders: int, most_transfers: int) -> ReplayState:
    ranks = goal.member.size
    rows = np.zeros((1 + ranks + most_transfers, -(-ranks // 64)), dtype=np.uint64)
    before = np.zeros(holders, dtype=np.int64)
    if goal.adds:
        before[:ranks][goal.member] = np.flatnonzero(goal.member) + 1
        for rank in np.flatnonzero(goal.member).tolist():
            rows[rank + 1, rank // 64] = np.uint64(1 << rank % 64)
    else:
        rows[1, 0] = 1
    everyone = np.bitwise_or.reduce(rows, axis=0)
    arrived, coming, fresh = np.zeros((3, holders), dtype=np.int64)
    # The kernels know one type of whole numbers; only bits are asked of these.
    return ReplayState(
        rows.view(np.int64), before, before.copy(), arrived, coming, fresh, everyone.view(np.int64)
    )


def _moves(
    columns: Transfers, chunks: Sequence[Chunk], in_block: Flags, topology: Topology, scale: int
) -> Moves:
    moves = columns.taken(np.lexsort((columns.step, columns.chunk)))
    firsts, hops = moves.hops_in(topology.size)
    known = topology.size * _ends(topology)[0] + _ends(topology)[1]
    return Moves(
        _ints([chunk.owner for chunk in chunks]),
        _ints([-1 if chunk.target is None else chunk.target for chunk in chunks]),
        in_block,
        _digits([int(chunk.share * scale) for chunk in chunks]),
        np.concatenate(([0], np.cumsum(np.bincount(moves.chunk, minlength=len(chunks))))),
        moves.src,
        moves.dst,
        moves.step,
        moves.reduce,
        firsts,
        np.searchsorted(known, hops),
    )


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _digits(numbers: Sequence[int]) -> Ints:
    """A row of digits for each number, as many as the largest has."""
    columns: list[list[int]] = []
    while any(numbers):
        columns.append([number & (1 << DIGIT_BITS) - 1 for number in numbers])
        numbers = [number >> DIGIT_BITS for number in numbers]
    return np.array(columns, dtype=np.int64).reshape(len(columns), len(numbers)).T.copy()


def _numbers(digits: Ints) -> Any:
    """The numbers, of any size, whose digits are the columns."""
    parts = (row.astype(object) << DIGIT_BITS * place for place, row in enumerate(digits))
    return sum(parts, np.zeros(digits.shape[1], dtype=object))


def _check_chunks(schedule: ImplicitSchedule, group: CheckedGroup, moves: Moves, errors: Errors) -> None:
    """Object to chunks that are of no block; only as many are looked at as are spelled out."""
    strange = np.flatnonzero(~moves.in_block).tolist()
    for place, (index, element) in enumerate(product(strange, range(group.order))):
        if errors.is_full:
            errors.add_unspelled(len(strange) * group.order - place)
            return
        chunk = _moved(schedule.chunks[index], _permutation(group, element))
        errors.add(
            f"chunk {index * group.order + element}: {describe(schedule.collective)} moves no block with "
            f"{schedule.collective.block_of(chunk.owner, chunk.target)}"
        )


def _check_blocks(schedule: ImplicitSchedule, shares: Ints, scale: int, errors: Errors) -> None:
    """The chunks of every block add up to it."""
    collective, ranks = schedule.collective, schedule.topology.ranks
    members, count = np.array(collective.ranks), len(collective.ranks)
    found = _numbers(shares)
    required = np.zeros_like(found)
    match collective.kind:
        case Kind.ALLREDUCE:
            required[0] = scale
        case Kind.ALLTOALL:
            apart = ~np.eye(count, dtype=np.bool_)
            sizes = np.array(collective.sizes or np.ones((count, count), dtype=np.int64), dtype=object)
            total = collective.total or count * count
            required[np.add.outer(ranks * members, members)[apart]] = sizes[apart] * count * scale // total
        case _:
            required[members] = scale // count
    wrong = np.flatnonzero(found != required).tolist()
    for place, index in enumerate(wrong):
        if errors.is_full:  # an alltoall has as many blocks as pairs of ranks
            errors.add_unspelled(len(wrong) - place)
            break
        must, got = Fraction(required[index], scale), Fraction(found[index], scale)
        block = _block(collective.kind, index, ranks)
        errors.add(f"block with {block}: shares must add up to {must}, got {got}")


def _loads(topology: Topology, amounts: Ints, scale: int) -> dict[Hop, Fraction]:
    """The share over each link that is used, out of its digits."""
    numbers = _numbers(amounts).tolist()
    share = {number: Fraction(number, scale) for number in set(numbers)}  # a regular fabric has few of them
    hops = ((link.src, link.dst) for link in topology.links)
    return {hop: share[number] for hop, number in zip(hops, numbers, strict=True) if number}


def _block(kind: Kind, index: int, ranks: int) -> Block:
    if kind is Kind.ALLREDUCE:
        return Block(None)
    return Block(*divmod(index, ranks)) if kind is Kind.ALLTOALL else Block(index)


def _spell_out(schedule: ImplicitSchedule, group: CheckedGroup, count: ReplayCount, errors: Errors) -> None:
    """Replay the first chunks with objections once more, for the lines that say what is wrong with them."""
    before = errors.count
    everyone = mask_of(schedule.collective.ranks)
    for index, element in count.bad[: count.numbers[0]].tolist():
        images = _permutation(group, element)
        moved = [_image(transfer, images) for transfer in schedule.transfers if transfer.chunk == index]
        chunk = _moved(schedule.chunks[index], images)
        number = index * group.order + element
        replay_chunk(number, chunk, moved, schedule.topology, schedule.collective, everyone, errors)
    errors.add_unspelled(int(count.numbers[1]) - (errors.count - before))


def _switch_uses(
    schedule: ImplicitSchedule, group: CheckedGroup, errors: Errors
) -> tuple[dict[Vertex, Fraction], dict[Vertex, int]]:
    """The share that each switch adds, the number of its chunks with work; objects to what it cannot do."""
    sums: dict[Vertex, Fraction] = {}
    trees: Counter[Vertex] = Counter()
    ranks = schedule.topology.ranks
    at_switches: dict[int, list[Transfer]] = {}
    for transfer in schedule.transfers:
        if max(transfer.src, transfer.dst) >= ranks:
            at_switches.setdefault(transfer.chunk, []).append(transfer)
    if not at_switches:
        return sums, trees
    for element in range(group.order):
        images = _permutation(group, element)
        for index, transfers in at_switches.items():
            moved = [_image(transfer, images) for transfer in transfers]
            uses = uses_of_chunk(index * group.order + element, moved, schedule.topology, errors)
            trees.update({use.switch for use in uses})
            for use in uses:
                if use.adds:
                    sums[use.switch] = sums.get(use.switch, Fraction(0)) + schedule.chunks[index].share
    return sums, trees


def _image(transfer: Transfer, images: Sequence[int]) -> Transfer:
    """The transfer where an element takes it, without its way."""
    return Transfer(
        transfer.chunk, images[transfer.src], images[transfer.dst], transfer.step, transfer.reduce
    )


def _moved(chunk: Chunk, images: Sequence[int]) -> Chunk:
    return Chunk(chunk.share, images[chunk.owner], None if chunk.target is None else images[chunk.target])


def _permutation(group: CheckedGroup, element: int) -> list[int]:
    """The images of all vertices under one element, whose last digit is the fastest."""
    images = np.arange(group.generators.shape[1], dtype=np.int64)
    for generator, order in zip(group.generators[::-1], group.orders[::-1].tolist(), strict=True):
        element, digit = divmod(element, order)
        for _ in range(digit):
            images = generator[images]
    return [int(image) for image in images]
