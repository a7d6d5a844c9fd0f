"""Replays every chunk of an implicit schedule, moved by every translation, and counts every link by itself.

No symmetry is relied on: the permutation of each element is composed from the images of the generators, each
representative chunk is moved by it and replayed with sets of contributors, and what passes each link is added
up in whole numbers. What the kernels find wrong is replayed once more by `synth.replay`, which says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from synth.collective import Block, Collective, Kind
from synth.compiled import Flags, Ints, kernel
from synth.implicit.group_check import CheckedGroup
from synth.implicit.schedule import ImplicitSchedule
from synth.replay import Errors, mask_of, replay_chunk
from synth.schedule import Chunk, Transfer
from synth.topology import Hop

DIGIT_BITS = 30
"""Shares are counted in digits of so many bits: 2**33 of them fit an int64, whatever the denominators are."""


class Moves(NamedTuple):
    """The representatives as arrays.

    Attributes:
        owner: owner of each chunk.
        target: target of each chunk, -1 for none.
        share: digits of each chunk's share, the lowest first, a row per chunk.
        first: first transfer of each chunk, and the number of transfers at the end.
        src: sender of each transfer; transfers are in order of chunk and step.
        dst: receiver of each transfer.
        step: step of each transfer.
        reduce: whether each transfer adds.
        first_hop: first hop of each transfer, and the number of hops at the end.
        link: the link of each hop.
    """

    owner: Ints
    target: Ints
    share: Ints
    first: Ints
    src: Ints
    dst: Ints
    step: Ints
    reduce: Flags
    first_hop: Ints
    link: Ints


class Group(NamedTuple):
    """What the elements are composed of, and what they move; arrays as in `CheckedGroup`."""

    generators: Ints
    link_images: Ints
    orders: Ints
    tail: Ints  # of each link
    head: Ints


class Goal(NamedTuple):
    """What the collective demands of each chunk.

    Attributes:
        member: which ranks take part.
        adds: whether each of them holds a contribution of its own, and all must arrive; otherwise only the
            owner holds the chunk.
        receivers: who must have it: 0 all that take part, 1 the owner, 2 the target.
        blocks: by what chunks are parts of blocks: 0 all of one, 1 by owner, 2 by owner and target.
    """

    member: Flags
    adds: bool
    receivers: int
    blocks: int


class State(NamedTuple):
    """Where the replay of one chunk stands.

    A set of contributors is a row of bits (bit 0 alone where nothing adds). Rows are never changed once a
    step is over, so that a copy is the number of a row.

    Attributes:
        rows: row 0 is empty, those up to the number of ranks are at the start, others are made on the way.
        before: the row that each rank has before a chunk moves, without the owner's.
        held: the row that each rank has.
        arrived: the row of what has come to each rank in this step.
        coming: per rank, 0 where nothing has come in this step, 1 after a reduction, 2 after a copy.
        fresh: ranks to which something has come in this step.
        everyone: the row that is complete.
    """

    rows: Ints
    before: Ints
    held: Ints
    arrived: Ints
    coming: Ints
    fresh: Ints
    everyone: Ints


class Count(NamedTuple):
    """What the replay of all translates found.

    Attributes:
        bad: chunk and element of the first chunks that were replayed with objections, a row each.
        numbers: how many rows of `bad` there are, how many objections in all, how many hops without link.
        shares: digits of what belongs to each block, a row per digit.
        loads: digits of what passes each link, a row per digit.
    """

    bad: Ints
    numbers: Ints
    shares: Ints
    loads: Ints


def check_every_translate(
    schedule: ImplicitSchedule, group: CheckedGroup, errors: Errors
) -> dict[Hop, Fraction]:
    """Replay all chunks, add up all blocks, and return the share of the buffer over each link that is used.

    Time is linear in the transfers of all chunks, times the ranks / 64 where contributions add up; memory
    in those of the representatives, and in the square of the ranks for an alltoall.
    """
    topology = schedule.topology
    goal = _goal(schedule.collective, topology.ranks)
    scale = math.lcm(len(schedule.collective.ranks), *(chunk.share.denominator for chunk in schedule.chunks))
    moves = _moves(schedule, scale)
    digits = moves.share.shape[1]
    ends = np.array([(link.src, link.dst) for link in topology.links], dtype=np.int64).reshape(-1, 2)
    members = Group(
        group.generators,
        group.link_images,
        group.orders,
        np.ascontiguousarray(ends[:, 0]),
        np.ascontiguousarray(ends[:, 1]),
    )
    count = Count(
        np.zeros((max(1, errors.limit), 2), dtype=np.int64),
        np.zeros(3, dtype=np.int64),
        np.zeros((digits, topology.ranks**goal.blocks), dtype=np.int64),
        np.zeros((digits, len(topology.links)), dtype=np.int64),
    )
    _replay_all(
        moves, members, goal, _state(goal, topology.ranks, int(np.diff(moves.first).max(initial=0))), count
    )
    _check_blocks(schedule, count.shares, scale, errors)
    _spell_out(schedule, group, count, errors)
    if count.numbers[2]:
        errors.add(f"transfers: {count.numbers[2]} hops are moved to where there is no link")
    return _loads(schedule, count.loads, scale)


def _goal(collective: Collective, ranks: int) -> Goal:
    member = np.zeros(ranks, dtype=np.bool_)
    member[list(collective.ranks)] = True
    match collective.kind:
        case Kind.ALLGATHER:
            return Goal(member, False, 0, 1)
        case Kind.REDUCE_SCATTER:
            return Goal(member, True, 1, 1)
        case Kind.ALLREDUCE:
            return Goal(member, True, 0, 0)
        case Kind.ALLTOALL:
            return Goal(member, False, 2, 2)
        case _:
            raise AssertionError(f"an implicit schedule of {collective.kind} cannot be made")


def _state(goal: Goal, ranks: int, most_transfers: int) -> State:
    rows = np.zeros((1 + ranks + most_transfers, -(-ranks // 64) if goal.adds else 1), dtype=np.uint64)
    before = np.zeros(ranks, dtype=np.int64)
    if goal.adds:
        before[goal.member] = np.flatnonzero(goal.member) + 1
        for rank in np.flatnonzero(goal.member).tolist():
            rows[rank + 1, rank // 64] = np.uint64(1 << rank % 64)
    else:
        rows[1, 0] = 1
    everyone = np.bitwise_or.reduce(rows, axis=0)
    arrived, coming, fresh = np.zeros((3, ranks), dtype=np.int64)
    # The kernels know one type of whole numbers; only bits are asked of these.
    return State(rows.view(np.int64), before, before.copy(), arrived, coming, fresh, everyone.view(np.int64))


def _moves(schedule: ImplicitSchedule, scale: int) -> Moves:
    number = {(link.src, link.dst): index for index, link in enumerate(schedule.topology.links)}
    transfers = sorted(schedule.transfers, key=lambda transfer: (transfer.chunk, transfer.step))
    of_chunk = np.bincount([transfer.chunk for transfer in transfers], minlength=len(schedule.chunks))
    hops = [transfer.hops for transfer in transfers]
    return Moves(
        _ints([chunk.owner for chunk in schedule.chunks]),
        _ints([-1 if chunk.target is None else chunk.target for chunk in schedule.chunks]),
        _digits([int(chunk.share * scale) for chunk in schedule.chunks], scale),
        _ints([0, *np.cumsum(of_chunk).tolist()]),
        _ints([transfer.src for transfer in transfers]),
        _ints([transfer.dst for transfer in transfers]),
        _ints([transfer.step for transfer in transfers]),
        np.array([transfer.reduce for transfer in transfers], dtype=np.bool_),
        _ints([0, *np.cumsum([len(way) for way in hops]).tolist()]),
        _ints([number[hop] for way in hops for hop in way]),
    )


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _digits(numbers: Sequence[int], largest: int) -> Ints:
    count = max(1, -(-largest.bit_length() // DIGIT_BITS))
    mask = (1 << DIGIT_BITS) - 1
    return np.array(
        [[number >> DIGIT_BITS * place & mask for place in range(count)] for number in numbers],
        dtype=np.int64,
    ).reshape(len(numbers), count)


def _number(digits: Sequence[int]) -> int:
    return sum(digit << DIGIT_BITS * place for place, digit in enumerate(digits))


def _check_blocks(schedule: ImplicitSchedule, shares: Ints, scale: int, errors: Errors) -> None:
    """The chunks of every block add up to it, and no chunk is of any other."""
    ranks = schedule.topology.ranks
    taking_part = list(schedule.collective.ranks)
    whole = scale if schedule.collective.kind is Kind.ALLREDUCE else scale // len(taking_part)
    required = np.zeros((len(shares), shares.shape[1]), dtype=np.int64)
    digits = _digits([whole], scale)[0][:, None]
    match schedule.collective.kind:
        case Kind.ALLREDUCE:
            required[:, 0] = digits[:, 0]
        case Kind.ALLTOALL:
            pairs = np.add.outer(ranks * np.array(taking_part), np.array(taking_part))
            required[:, pairs[~np.eye(len(taking_part), dtype=np.bool_)]] = digits
        case _:
            required[:, taking_part] = digits
    carried = shares.copy()
    for place in range(len(carried) - 1):
        carried[place + 1] += carried[place] >> DIGIT_BITS
        carried[place] &= (1 << DIGIT_BITS) - 1
    for index in np.flatnonzero((carried != required).any(axis=0)).tolist():
        must, got = (Fraction(_number(digits[:, index].tolist()), scale) for digits in (required, shares))
        block = _block(schedule.collective.kind, index, ranks)
        errors.add(f"block with {block}: shares must add up to {must}, got {got}")


def _loads(schedule: ImplicitSchedule, loads: Ints, scale: int) -> dict[Hop, Fraction]:
    fractions: dict[tuple[int, ...], Fraction] = {}  # a regular fabric has few different loads
    found = {}
    for link, digits in zip(schedule.topology.links, map(tuple, loads.T.tolist()), strict=True):
        if digits not in fractions:
            fractions[digits] = Fraction(_number(digits), scale)
        if fractions[digits]:
            found[link.src, link.dst] = fractions[digits]
    return found


def _block(kind: Kind, index: int, ranks: int) -> Block:
    if kind is Kind.ALLREDUCE:
        return Block(None)
    return Block(*divmod(index, ranks)) if kind is Kind.ALLTOALL else Block(index)


def _spell_out(schedule: ImplicitSchedule, group: CheckedGroup, count: Count, errors: Errors) -> None:
    """Replay the first chunks with objections once more, for the lines that say what is wrong with them."""
    before = errors.count
    everyone = mask_of(schedule.collective.ranks)
    for index, element in count.bad[: count.numbers[0]].tolist():
        images = _permutation(group, element)
        moved = [
            Transfer(
                transfer.chunk, images[transfer.src], images[transfer.dst], transfer.step, transfer.reduce
            )
            for transfer in schedule.transfers
            if transfer.chunk == index
        ]
        found = schedule.chunks[index]
        target = None if found.target is None else images[found.target]
        chunk = Chunk(found.share, images[found.owner], target)
        replay_chunk(index * group.order + element, chunk, moved, schedule.collective, everyone, errors)
        if errors.is_full:
            break
    errors.add_unspelled(int(count.numbers[1]) - (errors.count - before))


def _permutation(group: CheckedGroup, element: int) -> list[int]:
    """The images of all vertices under one element, whose last digit is the fastest."""
    images = np.arange(group.generators.shape[1], dtype=np.int64)
    for generator, order in zip(group.generators[::-1], group.orders[::-1].tolist(), strict=True):
        element, digit = divmod(element, order)
        for _ in range(digit):
            images = generator[images]
    return [int(image) for image in images]


@kernel
def _replay_all(moves: Moves, group: Group, goal: Goal, state: State, count: Count) -> None:
    """Go through all elements, the last digit the fastest; row i + 1 is the product of the digits up to i."""
    depth = group.orders.size
    size, links = group.generators.shape[1], group.tail.size
    vertices = np.empty((depth + 1, size), dtype=np.int64)
    ways = np.empty((depth + 1, links), dtype=np.int64)
    for row in range(depth + 1):
        vertices[row] = np.arange(size)
        ways[row] = np.arange(links)
    digits = np.zeros(depth, dtype=np.int64)
    element = 0
    while True:
        _replay_element(moves, group, goal, state, count, element, vertices[depth], ways[depth])
        element += 1
        place = depth - 1
        while place >= 0 and digits[place] == group.orders[place] - 1:
            digits[place] = 0
            place -= 1
        if place < 0:
            return
        digits[place] += 1
        for vertex in range(size):
            vertices[place + 1, vertex] = group.generators[place, vertices[place + 1, vertex]]
        for link in range(links):
            ways[place + 1, link] = group.link_images[place, ways[place + 1, link]]
        for row in range(place + 2, depth + 1):
            vertices[row] = vertices[place + 1]
            ways[row] = ways[place + 1]


@kernel
def _replay_element(
    moves: Moves,
    group: Group,
    goal: Goal,
    state: State,
    count: Count,
    element: int,
    moved: Ints,
    way: Ints,
) -> None:
    """Replay each chunk moved by one element, given by its images of vertices and links."""
    ranks = goal.member.size
    for chunk in range(moves.owner.size):
        block = 0
        if goal.blocks > 0:
            block = moved[moves.owner[chunk]]
        if goal.blocks == 2:
            block = block * ranks + moved[moves.target[chunk]]
        for digit in range(moves.share.shape[1]):
            count.shares[digit, block] += moves.share[chunk, digit]
        wrong = _replay_chunk(moves, goal, state, chunk, moved)
        if wrong > 0:
            if count.numbers[0] < count.bad.shape[0]:
                count.bad[count.numbers[0], 0] = chunk
                count.bad[count.numbers[0], 1] = element
                count.numbers[0] += 1
            count.numbers[1] += wrong
        _count_links(moves, group, count, chunk, moved, way)


@kernel
def _count_links(moves: Moves, group: Group, count: Count, chunk: int, moved: Ints, way: Ints) -> None:
    """Add a chunk to what passes each link; the link is seen to have the ends that the hop is moved to."""
    for hop in range(moves.first_hop[moves.first[chunk]], moves.first_hop[moves.first[chunk + 1]]):
        link = moves.link[hop]
        image = way[link]
        if group.tail[image] != moved[group.tail[link]] or group.head[image] != moved[group.head[link]]:
            count.numbers[2] += 1
            continue
        for digit in range(moves.share.shape[1]):
            count.loads[digit, image] += moves.share[chunk, digit]


@kernel
def _replay_chunk(moves: Moves, goal: Goal, state: State, chunk: int, moved: Ints) -> int:
    """How many objections there are to one chunk, by the rules of `synth.replay`."""
    owner = moved[moves.owner[chunk]]
    if not goal.adds:
        state.held[owner] = 1
    wrong, free = 0, goal.member.size + 1
    transfer, end = moves.first[chunk], moves.first[chunk + 1]
    while transfer < end:
        step, fresh = moves.step[transfer], 0
        while transfer < end and moves.step[transfer] == step:
            src, dst = moved[moves.src[transfer]], moved[moves.dst[transfer]]
            reduce, sent = moves.reduce[transfer], state.held[src]
            transfer += 1
            if src == dst or sent == 0 or state.coming[dst] == 2 or (state.coming[dst] == 1 and not reduce):
                wrong += 1
                continue
            if state.coming[dst] == 0:
                state.fresh[fresh] = dst
                fresh += 1
            if not reduce:
                state.arrived[dst] = sent
                state.coming[dst] = 2
                continue
            here = state.held[dst] if state.coming[dst] == 0 else state.arrived[dst]
            wrong += _join(state.rows, here, sent, free)
            state.arrived[dst] = free
            state.coming[dst] = 1
            free += 1
        for place in range(fresh):
            dst = state.fresh[place]
            state.held[dst] = state.arrived[dst]
            state.coming[dst] = 0
    if wrong == 0 and not _is_done(moves, goal, state, chunk, moved):
        wrong = 1
    state.held[owner] = state.before[owner]
    for used in range(moves.first[chunk], end):
        dst = moved[moves.dst[used]]
        state.held[dst] = state.before[dst]
    return wrong


@kernel
def _join(rows: Ints, first: int, second: int, joint: int) -> int:
    """Make the row of all that are in either; 1 if some are in both."""
    twice = 0
    for word in range(rows.shape[1]):
        twice |= rows[first, word] & rows[second, word]
        rows[joint, word] = rows[first, word] | rows[second, word]
    return 1 if twice != 0 else 0


@kernel
def _is_done(moves: Moves, goal: Goal, state: State, chunk: int, moved: Ints) -> bool:
    """Whether everyone who must have the chunk has all contributions to it."""
    if goal.receivers > 0:
        rank = moved[moves.owner[chunk]] if goal.receivers == 1 else moved[moves.target[chunk]]
        return bool((state.rows[state.held[rank]] == state.everyone).all())
    complete = -1
    for rank in range(goal.member.size):
        row = state.held[rank]
        if goal.member[rank] and row != complete:
            if (state.rows[row] != state.everyone).any():
                return False
            complete = row
    return True
