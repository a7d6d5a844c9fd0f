"""The kernels that replay every translate of every chunk and add up what passes each link.

`synth.verification.every_translate` lays the representatives out as the arrays of `Moves` and says what the
answers mean. The rules are those of `synth.verification.replay`, which spells out whatever is found
wrong here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from arborcast.synth.kernels.compiled import Flags, Ints, kernel


class Moves(NamedTuple):
    """The representatives as arrays.

    Attributes:
        owner: owner of each chunk.
        target: target of each chunk, -1 for none.
        in_block: whether each chunk is a part of a block of the collective.
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
    in_block: Flags
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


class ReplayGoal(NamedTuple):
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


class ReplayState(NamedTuple):
    """Where the replay of one chunk stands.

    A set of contributors is a row of bits (bit 0 alone where nothing adds). Rows are never changed once a
    step is over, so that a copy is the number of a row.

    Attributes:
        rows: row 0 is empty, those up to the number of ranks are at the start, others are made on the way.
        before: the row that each holder (a rank or an able switch) has before a chunk moves, without the
            owner's.
        held: the row that each holder has.
        arrived: the row of what has come to each holder in this step.
        coming: per holder, 0 where nothing has come in this step, 1 after a reduction, 2 after a copy.
        fresh: holders to which something has come in this step.
        everyone: the row that is complete.
    """

    rows: Ints
    before: Ints
    held: Ints
    arrived: Ints
    coming: Ints
    fresh: Ints
    everyone: Ints


class ReplayCount(NamedTuple):
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


@kernel
def replay_all(
    moves: Moves,
    group: Group,
    goal: ReplayGoal,
    state: ReplayState,
    count: ReplayCount,
) -> None:
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
    goal: ReplayGoal,
    state: ReplayState,
    count: ReplayCount,
    element: int,
    moved: Ints,
    way: Ints,
) -> None:
    """Replay each chunk moved by one element, given by its images of vertices and links."""
    ranks = goal.member.size
    for chunk in range(moves.owner.size):
        if moves.in_block[chunk]:
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
def _count_links(moves: Moves, group: Group, count: ReplayCount, chunk: int, moved: Ints, way: Ints) -> None:
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
def _replay_chunk(moves: Moves, goal: ReplayGoal, state: ReplayState, chunk: int, moved: Ints) -> int:
    """How many objections there are to one chunk, by the rules of `synth.verification.replay`."""
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
def _is_done(moves: Moves, goal: ReplayGoal, state: ReplayState, chunk: int, moved: Ints) -> bool:
    """Whether everyone who must have the chunk has all contributions to it."""
    if goal.receivers == 2 and moves.target[chunk] < 0:
        return True
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
