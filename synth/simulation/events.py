"""The event loop of the simulator: which frame passes which link when, in whole ticks of a clock.

`synth.simulation.hops` lays a schedule out as the arrays of `EventArrays`; `play` runs them. The clock is an
integer so that what happens at the same time on paper happens at the same time here, on every machine.
`synth.simulation.service` says what the orders of service mean.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.kernels.compiled import Flags, Ints, kernel
from arborcast.synth.simulation.service import Rule

Counts = NDArray[np.int32]


class EventArrays(NamedTuple):
    """A schedule as arrays; a version is a state of what a vertex holds of a chunk, see `simulation.hops`.

    Attributes:
        first_hop: first hop of each transfer, and the number of hops at the end.
        link: the link of each hop.
        transfer: the transfer of each hop.
        step: step of each transfer.
        reads: the version that each transfer reads.
        writes: the version that each transfer helps to make.
        inputs: the versions that are there at the start, but for one count.
        follower: the version after each version at the same rank, -1 where there is none.
        needed: how much has to happen before each version is there.
        first_reader: first reader of each version in `readers`, and the number of readers at the end.
        readers: transfers in the order of the versions that they read.
    """

    first_hop: Ints
    link: Ints
    transfer: Ints
    step: Ints
    reads: Ints
    writes: Ints
    inputs: Ints
    follower: Ints
    needed: Ints
    first_reader: Ints
    readers: Ints


class Lanes(NamedTuple):
    """What holds pieces back that are ready: the planned order of each lane, and the pace of each rank.

    A lane is what one rank sends to one other over one link. Only the next passage of a lane is in the
    link's queue. All arrays are empty where nothing is held back.

    Attributes:
        lane: of each hop.
        first: first passage of each lane in `passages`, and the number of passages at the end.
        passages: cells of `start` (frame * hops + hop), lane by lane in the planned order.
        sender: of each lane the rank whose pace it keeps, -1 where that is behind it.
        first_of: first lane of each rank in `lanes_of`, and their number at the end.
        lanes_of: the lanes that keep the pace of a rank, rank by rank.
        receiver: rank of each transfer's delivery.
        due: of each rank and time (step + piece), how many deliveries it gets.
        ahead: a passage of time t waits until its sender has all that is due at t - ahead and before.
    """

    lane: Ints
    first: Ints
    passages: Ints
    sender: Ints
    first_of: Ints
    lanes_of: Ints
    receiver: Ints
    due: Ints
    ahead: int


class Streams(NamedTuple):
    """How many messages ranks send, and receive, at once. A message is a piece of a transfer.

    All arrays are empty where no rank has a limit.

    Attributes:
        limits: for each holder how many it sends at once, then for each how many it receives.
        ends: the pairs of places in `limits` that transfers have as their sender and receiver.
        pair: which of them each transfer has.
        first: first pair of each place in `pairs`, and their number at the end.
        pairs: place by place.
    """

    limits: Ints
    ends: Ints
    pair: Ints
    first: Ints
    pairs: Ints


class StreamQueues(NamedTuple):
    """What streams hold back in a run; messages are numbered transfer by transfer, piece by piece.

    Attributes:
        free: what is left of `Streams.limits`.
        freed: places in it where a stream has become free since messages last began.
        asking: of each pair of ends a heap of the messages that wait: (the least begins first, message). Who
            is behind another of its pair cannot begin before it.
        asked: whether a message waits, or has begun.
        waits: of each frame of each message, whether it is where the message begins.
        began: whether a message holds its streams, or has held them.
        left: frames of each message that have yet to leave its last link.
    """

    free: Ints
    freed: list[int]
    asking: list[list[tuple[int, int]]]
    asked: Flags
    waits: Flags
    began: Flags
    left: Ints


class Queues(NamedTuple):
    """What waits during a run.

    Attributes:
        waiting: of each link what waits for it, as `_queue` writes it, from `room` on: a heap unless the
            order is random.
        room: of each link its place in `waiting`, which holds all that ever passes the link.
        counts: of each link how much waits for it.
        touched: links that may have something to start now.
        ready: of each cell, the instant since which it only waits for its turn, -1 before.
        turn: of each lane, the next of its passages.
        queued: of each lane, whether that passage is in the link's queue.
        due: what is left of `Lanes.due`.
        low: of each rank, the earliest time at which something is due.
        rule: which of the frames that wait for a link it serves next.
        span: more than any key.
        frames: of a piece.
    """

    waiting: Ints
    room: Ints
    counts: Ints
    touched: list[int]
    ready: Ints
    turn: Ints
    queued: Flags
    due: Ints
    low: Ints
    rule: int
    span: int
    frames: int


FIFO, RANDOM = int(Rule.FIFO), int(Rule.RANDOM)


# One function: handing tuples of arrays to others at every piece takes longer than what they do.
@kernel
def play(  # noqa: PLR0912, PLR0915
    layout: EventArrays,
    lanes: Lanes,
    streams: Streams,
    pieces: int,
    frames: int,
    grain: Ints,
    durations: Ints,
    latencies: Ints,
    rule: int,
    seed: int,
) -> Ints:
    """The tick at which each frame (row) starts on each hop (column).

    Args:
        layout: the schedule.
        lanes: what is held back.
        streams: how many messages are sent and received at once.
        pieces: into how many pieces each chunk is cut.
        frames: into how many frames each piece is cut.
        grain: how many frames of each version are there only together: one, those of a piece or of a chunk;
            as many of all versions of a place.
        durations: ticks that each hop keeps its link busy for one frame.
        latencies: ticks from the end of sending to the arrival, of each link.
        rule: which of the frames that wait for a link it serves next, a `Rule`.
        seed: of a random order.
    """
    # A row per frame: few frames are on their way at a time, so that what is touched stays in the cache.
    # Taken out of their tuples once: each time counts references, which takes longer than what is done here.
    link_of, transfer_of, step, first_hop = layout.link, layout.transfer, layout.step, layout.first_hop
    reads, writes, follower = layout.reads, layout.writes, layout.follower
    first_reader, readers = layout.first_reader, layout.readers
    is_held, is_limited = lanes.lane.size > 0, streams.limits.size > 0
    hops = link_of.size
    rows = pieces * frames
    start = np.full((rows, hops), -1, np.int64)
    needed = np.empty((rows, layout.needed.size), np.int32)
    needed[:] = layout.needed * grain
    idle = np.ones(latencies.size, np.bool_)
    # The empty comprehensions tell numba what the lists hold.
    offered = [0 for _ in range(0)]  # cells of `start` that are now where their hop begins
    came = [0 for _ in range(0)]  # those that have arrived
    span = (layout.step.max() + pieces) * hops * frames if hops > 0 else 1
    links = latencies.size
    room = np.zeros(links + 1, np.int64)
    for link in layout.link:
        room[link + 1] += rows
    room = np.cumsum(room)
    # What a link carries arrives in the order in which it is sent: only the next of it is among the events.
    passed, sent, came_in = np.empty(rows * hops, np.int64), room[:-1].copy(), room[:-1].copy()
    events = [(0, 0) for _ in range(0)]  # (tick, 2 * link, + 1 for arrivals)
    queues = Queues(
        np.empty(rows * hops, np.int64),
        room,
        np.zeros(links, np.int64),
        [0 for _ in range(0)],
        np.full(lanes.passages.size, -1, np.int64),
        lanes.first.copy(),
        np.zeros(lanes.first.size, np.bool_),
        lanes.due.copy(),
        np.zeros(len(lanes.due), np.int64),
        rule,
        span,
        frames,
    )
    waiting, counts, touched = queues.waiting, queues.counts, queues.touched
    counted = layout.step.size * pieces if is_limited else 0
    messages = StreamQueues(
        streams.limits.copy(),
        [0 for _ in range(0)],
        [[(0, 0) for _ in range(0)] for _ in range(len(streams.ends))],
        np.zeros(counted, np.bool_),
        np.zeros(counted * frames, np.bool_),
        np.zeros(counted, np.bool_),
        np.full(counted, frames, np.int64),
    )
    happened = [version * rows + frame for version in layout.inputs for frame in range(rows)]
    # Instants are counted, so that one and a key fit into 63 bits wherever `start` fits into a machine.
    now = instant = drawn = 0
    while True:
        for one in happened:  # what a version needed; where it was the last, its readers go on
            version = one // rows
            frame = one - version * rows
            while version >= 0:
                together = grain[version]
                first = frame - frame % together
                needed[first, version] -= 1
                if needed[first, version] > 0:
                    break
                for row in range(first, first + together):
                    for place in range(first_reader[version], first_reader[version + 1]):
                        offered.append(row * hops + first_hop[readers[place]])
                version = follower[version]
                if version >= 0:
                    needed[first, version] -= together - 1  # all frames of this one are there, not one
        happened.clear()
        if is_limited:
            drawn = _begin(layout, streams, messages, offered, pieces, frames, rule, instant, seed, drawn)
        if is_held:
            _admit(layout, lanes, queues, came, offered, instant)
        else:  # what is ready queues up
            for cell in offered:
                frame = cell // hops
                hop, piece = cell - frame * hops, frame // frames
                link = link_of[hop]
                key = ((step[transfer_of[hop]] + piece) * hops + hop) * frames + frame - piece * frames
                _wait(waiting, room[link], counts[link], instant * span + key if rule == FIFO else key, rule)
                counts[link] += 1
                touched.append(link)
        offered.clear()
        came.clear()
        for link in touched:
            if idle[link] and counts[link] > 0:
                drawn += 1
                counts[link] -= 1
                if rule == RANDOM:
                    key = _take(waiting, room[link], counts[link], frames, seed, drawn)
                else:
                    key = _first(waiting, room[link], counts[link])
                    if rule == FIFO:
                        key %= span
                cell = key // frames  # with time in place of the frame
                frame = key - cell * frames
                row = cell // hops
                hop = cell - row * hops
                frame += (row - step[transfer_of[hop]]) * frames
                start[frame, hop] = now
                idle[link] = False
                passed[sent[link]] = frame * hops + hop
                heappush(events, (now + durations[hop], 2 * link))
                if sent[link] == came_in[link]:
                    heappush(events, (now + durations[hop] + latencies[link], 2 * link + 1))
                sent[link] += 1
                if is_held:
                    _give_turn(layout, lanes, queues, lanes.lane[hop], instant)
        touched.clear()
        if len(events) == 0:
            return start
        # Everything of this tick happens before any link picks what it serves next.
        now = events[0][0]
        instant += 1
        while len(events) > 0 and events[0][0] == now:
            event = heappop(events)[1]
            link = event // 2
            if event % 2 == 1:
                cell = passed[came_in[link]]
                came_in[link] += 1
                if came_in[link] < sent[link]:
                    later = passed[came_in[link]]
                    hop = later % hops
                    arrives = start[later // hops, hop] + durations[hop] + latencies[link]
                    heappush(events, (arrives, event))
                frame = cell // hops
                hop = cell - frame * hops
                transfer = transfer_of[hop]
                if is_held:
                    came.append(cell)
                if hop + 1 == first_hop[transfer + 1]:
                    happened.append(writes[transfer] * rows + frame)
                else:  # at a switch on the way
                    offered.append(cell + 1)
            else:
                cell = passed[sent[link] - 1]
                frame = cell // hops
                hop = cell - frame * hops
                transfer = transfer_of[hop]
                idle[link] = True
                touched.append(link)
                behind = follower[reads[transfer]]
                if hop == first_hop[transfer] and behind >= 0:  # what replaces it there waits for it no more
                    happened.append(behind * rows + frame)
                if is_limited:
                    _end(layout, streams, messages, hop, frame // frames, pieces)


@kernel
def _wait(waiting: Ints, room: int, count: int, key: int, rule: int) -> None:
    """A key joins those of a link, `count` from `room` on."""
    place = count
    if rule != RANDOM:
        while place > 0 and waiting[room + (place - 1) // 2] > key:
            waiting[room + place] = waiting[room + (place - 1) // 2]
            place = (place - 1) // 2
    waiting[room + place] = key


@kernel
def _first(waiting: Ints, room: int, count: int) -> int:
    """Remove the least key of a link; `count` are left."""
    least, last, place = waiting[room], waiting[room + count], 0
    while 2 * place + 1 < count:
        child = 2 * place + 1
        if child + 1 < count and waiting[room + child + 1] < waiting[room + child]:
            child += 1
        if waiting[room + child] >= last:
            break
        waiting[room + place] = waiting[room + child]
        place = child
    waiting[room + place] = last
    return int(least)


@kernel
def _queue(layout: EventArrays, queues: Queues, hop: int, frame: int, since: int) -> None:
    """A frame waits for its link; first come, first served goes by the instant first."""
    link = layout.link[hop]
    key = (layout.step[layout.transfer[hop]] + frame // queues.frames) * layout.link.size + hop
    key = key * queues.frames + frame % queues.frames
    key = since * queues.span + key if queues.rule == FIFO else key
    _wait(queues.waiting, queues.room[link], queues.counts[link], key, queues.rule)
    queues.counts[link] += 1
    queues.touched.append(link)


@kernel
def _drawn(seed: int, count: int) -> int:
    """The number that is drawn next after `count` others, by splitmix64."""
    mixed = (np.uint64(seed) << np.uint64(32)) + np.uint64(count) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int(np.int64((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(1)))


@kernel
def _take(waiting: Ints, room: int, count: int, frames: int, seed: int, drawn: int) -> int:
    """Remove what a link carries next in a random order: any, the frames of a piece in their own order.

    Of those from `room` on `count` are left.
    """
    place = room + _drawn(seed, drawn) % (count + 1)
    if frames > 1:
        for other in range(room, room + count + 1):
            if waiting[other] // frames == waiting[place] // frames and waiting[other] < waiting[place]:
                place = other
    key = waiting[place]
    waiting[place] = waiting[room + count]
    return int(key)


@kernel
def _begin(
    layout: EventArrays,
    streams: Streams,
    messages: StreamQueues,
    offered: list[int],
    pieces: int,
    frames: int,
    rule: int,
    instant: int,
    seed: int,
    drawn: int,
) -> int:
    """Leave of what is offered what may queue up: all but frames of messages that wait for their streams.

    Of those that wait the one of the least key begins for which both its sender and its receiver have a
    stream left, and so on.

    Returns:
        How many numbers have been drawn.
    """
    hops, transfers = layout.link.size, layout.step.size
    going = [0 for _ in range(0)]
    first = [(0, 0) for _ in range(0)]  # of pairs whose ends have become free, or which have a new message
    for place in messages.freed:
        for pair in streams.pairs[streams.first[place] : streams.first[place + 1]]:
            _ask(streams, messages, pair, first)
    messages.freed.clear()
    for cell in offered:
        hop, frame = cell % hops, cell // hops
        transfer = layout.transfer[hop]
        message = transfer * pieces + frame // frames
        if hop > layout.first_hop[transfer] or messages.began[message]:
            going.append(cell)
            continue
        messages.waits[message * frames + frame % frames] = True
        if not messages.asked[message]:
            messages.asked[message] = True
            key = (layout.step[transfer] + frame // frames) * transfers + transfer
            if rule == RANDOM:
                drawn += 1
                key = _drawn(seed, drawn)
            elif rule == FIFO:
                key += instant * (layout.step.max() + pieces) * transfers
            heappush(messages.asking[streams.pair[transfer]], (key, message))
            _ask(streams, messages, streams.pair[transfer], first)
    while len(first) > 0:
        message = heappop(first)[1]
        pair = streams.pair[message // pieces]
        if messages.began[message] or not _both_free(streams, messages, pair):
            continue
        heappop(messages.asking[pair])
        messages.began[message] = True
        for place in streams.ends[pair]:
            messages.free[place] -= 1
        for frame in range(message % pieces * frames, (message % pieces + 1) * frames):
            if messages.waits[message // pieces * pieces * frames + frame]:
                going.append(frame * hops + layout.first_hop[message // pieces])
        _ask(streams, messages, pair, first)
    offered.clear()
    offered.extend(going)
    return drawn


@kernel
def _ask(streams: Streams, messages: StreamQueues, pair: int, first: list[tuple[int, int]]) -> None:
    """The first message of a pair is one of those that may begin now."""
    if len(messages.asking[pair]) > 0 and _both_free(streams, messages, pair):
        heappush(first, messages.asking[pair][0])


@kernel
def _both_free(streams: Streams, messages: StreamQueues, pair: int) -> bool:
    """Whether sender and receiver have a stream left."""
    sender, receiver = streams.ends[pair]
    return bool(messages.free[sender] > 0 and messages.free[receiver] > 0)


@kernel
def _end(
    layout: EventArrays, streams: Streams, messages: StreamQueues, hop: int, piece: int, pieces: int
) -> None:
    """A frame has left a link: behind the last frame on the last link its message ends."""
    transfer = layout.transfer[hop]
    message = transfer * pieces + piece
    if hop + 1 < layout.first_hop[transfer + 1]:
        return
    messages.left[message] -= 1
    if messages.left[message] == 0:
        for place in streams.ends[streams.pair[transfer]]:
            messages.free[place] += 1
            messages.freed.append(place)


@kernel
def _admit(
    layout: EventArrays, lanes: Lanes, queues: Queues, came: list[int], offered: list[int], instant: int
) -> None:
    """Let what is ready queue up, where its turn in its lane has come and what is due has come, too."""
    hops = layout.link.size
    if instant == 0:
        for rank in range(len(lanes.due)):
            _keep_pace(layout, lanes, queues, rank, instant)
    for cell in came:
        hop, transfer = cell % hops, layout.transfer[cell % hops]
        if hop + 1 == layout.first_hop[transfer + 1]:
            piece = cell // hops // queues.frames
            queues.due[lanes.receiver[transfer], layout.step[transfer] + piece] -= 1
            _keep_pace(layout, lanes, queues, lanes.receiver[transfer], instant)
    for cell in offered:
        queues.ready[cell] = instant
        _take_turn(layout, lanes, queues, lanes.lane[cell % hops], instant)


@kernel
def _take_turn(layout: EventArrays, lanes: Lanes, queues: Queues, lane: int, instant: int) -> None:
    """Let the next passage of a lane queue up where it may."""
    if queues.queued[lane] or queues.turn[lane] == lanes.first[lane + 1]:
        return
    cell = lanes.passages[queues.turn[lane]]
    hop, frame = cell % layout.link.size, cell // layout.link.size
    sender = lanes.sender[lane]
    time = layout.step[layout.transfer[hop]] + frame // queues.frames
    if queues.ready[cell] >= 0 and (sender < 0 or queues.low[sender] > time - lanes.ahead):
        queues.queued[lane] = True
        # Lanes that begin here take turns, as connections do; behind that, what came first is ahead.
        _queue(layout, queues, hop, frame, queues.ready[cell] if sender < 0 else instant)


@kernel
def _give_turn(layout: EventArrays, lanes: Lanes, queues: Queues, lane: int, instant: int) -> None:
    """The passage that was next in its lane has begun."""
    queues.turn[lane] += 1
    queues.queued[lane] = False
    _take_turn(layout, lanes, queues, lane, instant)


@kernel
def _keep_pace(layout: EventArrays, lanes: Lanes, queues: Queues, rank: int, instant: int) -> None:
    """Let a rank go on where all that was due has come."""
    low, due = queues.low, queues.due
    before = low[rank]
    while low[rank] < due.shape[1] and due[rank, low[rank]] == 0:
        low[rank] += 1
    if low[rank] > before:
        for position in range(lanes.first_of[rank], lanes.first_of[rank + 1]):
            _take_turn(layout, lanes, queues, lanes.lanes_of[position], instant)
