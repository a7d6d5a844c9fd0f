"""A schedule as messages for simulators: what each rank sends and receives, and what must have come before.

Chunks are cut in pieces, each a message of its own. A piece is sent on once all that its sender is to have
of it by then has arrived; nothing else waits for anything.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from arborcast.backends.programs.program import ProgramError
from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Topology, Vertex

MOST_MESSAGES = 1 << 20
"""Of one export."""


@dataclass(frozen=True, slots=True)
class Message:
    """One piece of a chunk from one rank to another.

    Attributes:
        src: who sends it.
        dst: who receives it.
        via: switches that it passes.
        share: of the whole buffer.
        after: numbers of messages that `src` must have received before.
    """

    src: int
    dst: int
    via: tuple[Vertex, ...]
    share: Fraction
    after: tuple[int, ...]


def messages_of(schedule: AnySchedule, pieces: int) -> tuple[Schedule, list[Message]]:
    """The messages in an order in which they may be sent, with the schedule in explicit form.

    Raises:
        ProgramError: transfers end at switches, or there are too many messages.
    """
    explicit = schedule.expand() if isinstance(schedule, ImplicitSchedule) else schedule
    if explicit.uses_switches:
        raise ProgramError("simulators' switches neither add nor multicast; solve with --no-in-network")
    if pieces < 1:
        raise ProgramError(f"pieces must be at least 1, got {pieces}")
    count = explicit.transfer_count * pieces
    if count > MOST_MESSAGES:
        raise ProgramError(
            f"at most {MOST_MESSAGES} messages are exported, got {count}; fewer pieces make fewer"
        )
    messages: list[Message] = []
    come: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    arriving: list[tuple[tuple[int, int, int], int]] = []
    step = -1
    for transfer in explicit.transfers:  # in order of step
        if transfer.step != step:  # all of a step start from the state before it
            for key, number in arriving:
                come[key].append(number)
            arriving, step = [], transfer.step
        for piece in range(pieces):
            arriving.append(((transfer.chunk, piece, transfer.dst), len(messages)))
            share = explicit.chunks[transfer.chunk].share / pieces
            after = tuple(come[transfer.chunk, piece, transfer.src])
            messages.append(Message(transfer.src, transfer.dst, transfer.via, share, after))
    return explicit, messages


def narrowest(topology: Topology, message: Message) -> Fraction:
    """GB/s of the narrowest link that a message passes."""
    way = (message.src, *message.via, message.dst)
    return min(topology.bandwidth[hop] for hop in pairwise(way))


def one_latency(topology: Topology, explicit: Schedule) -> Fraction:
    """The latency in us of the ways that transfers take, where it is one; else the largest."""
    of_hop = {(link.src, link.dst): link.latency_us for link in topology.links}
    return max(
        (sum((of_hop[hop] for hop in transfer.hops), Fraction(0)) for transfer in explicit.transfers),
        default=Fraction(0),
    )
