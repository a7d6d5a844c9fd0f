"""A schedule as messages for simulators: what each vertex sends and receives, and what must have come before.

Chunks are cut in pieces, each a message of its own over each link that it passes: switches that only forward
receive and send as ranks do. A piece is sent on once all that its sender is to have of it by then has
arrived. Each link carries its messages in the order in which schedules are planned, that of step + piece,
where a way through switches takes a step for each of its links.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

from arborcast.backends.lowering.rank_view import refuse_switches
from arborcast.backends.programs.program import ProgramError
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Hop, Vertex

MOST_MESSAGES = 1 << 20
"""Of one export."""


@dataclass(frozen=True, slots=True)
class Message:
    """One piece of a chunk on one link.

    Attributes:
        src: who sends it, a rank or a switch.
        dst: who receives it.
        nbytes: on the fastest link that is used; on others so many more that one rate for all gives its time.
        after: numbers of messages that `src` must have received before.
        before: the number of the message that the link carries before it; None for its first one.
    """

    src: Vertex
    dst: Vertex
    nbytes: int
    after: tuple[int, ...]
    before: int | None

    @property
    def hop(self) -> Hop:
        """The link."""
        return self.src, self.dst


def one_size(simulator: str, least_bytes: int, most_bytes: int | None) -> int:
    """The size that a simulator is to be given.

    Raises:
        ProgramError: none or several were asked for.
    """
    if most_bytes is None or most_bytes != least_bytes:
        raise ProgramError(f"{simulator}: simulates one size; name it (--sizes)")
    return most_bytes


def messages_of(
    schedule: AnySchedule, size_bytes: int, pieces: int
) -> tuple[Schedule, list[Message], Fraction]:
    """The messages in an order in which they may be sent, the schedule in explicit form, and the rate of all.

    Args:
        schedule: in either form.
        size_bytes: of the whole buffer.
        pieces: into which each chunk is cut.

    Returns:
        that, the rate in GB/s.

    Raises:
        InputError: no bytes, transfers end at switches, or there are too many messages.
    """
    if size_bytes < 1:
        raise ProgramError(f"size must be at least 1 byte, got {size_bytes}")
    refuse_switches(schedule, "simulators")
    explicit = schedule.expand()
    if pieces < 1:
        raise ProgramError(f"pieces must be at least 1, got {pieces}")
    count = sum(len(transfer.hops) for transfer in explicit.transfers) * pieces
    if count > MOST_MESSAGES:
        raise ProgramError(
            f"at most {MOST_MESSAGES} messages are exported, got {count}; fewer pieces make fewer"
        )
    bandwidth = explicit.topology.bandwidth
    used = [bandwidth[hop] for transfer in explicit.transfers for hop in transfer.hops]
    fastest = max(used, default=explicit.topology.bandwidth_unit)
    planned = sorted(
        (begin + at + piece, number, at, piece)
        for number, begin in enumerate(_begins(explicit))
        for at in range(len(explicit.transfers[number].hops))
        for piece in range(pieces)
    )
    messages: list[Message] = []
    passed: dict[tuple[int, int, int], int] = {}
    last: dict[Hop, int] = {}
    into = _into(explicit)
    for _, number, at, piece in planned:
        transfer = explicit.transfers[number]
        before = [(number, at - 1)] if at else [(other, -1) for other in into[number]]
        after = tuple(passed[other, place, piece] for other, place in before)
        hop = transfer.hops[at]
        share = explicit.chunks[transfer.chunk].share / pieces
        nbytes = math.ceil(share * size_bytes * fastest / bandwidth[hop])
        messages.append(Message(*hop, nbytes, after, last.get(hop)))
        last[hop] = passed[number, at, piece] = len(messages) - 1
        if at == len(transfer.hops) - 1:
            passed[number, -1, piece] = last[hop]
    return explicit, messages, fastest


def _into(explicit: Schedule) -> list[list[int]]:
    """For each transfer the numbers of those whose data it sends on: into its sender, of earlier steps."""
    come: dict[tuple[int, Vertex], list[int]] = defaultdict(list)
    found: list[list[int]] = []
    for number, transfer in enumerate(explicit.transfers):  # in order of step
        come[transfer.chunk, transfer.dst].append(number)
        earlier = come[transfer.chunk, transfer.src]
        found.append([other for other in earlier if explicit.transfers[other].step < transfer.step])
    return found


def _begins(explicit: Schedule) -> list[int]:
    """When each transfer begins, in times of a piece on a link: at its step, or when its data are there."""
    begins: list[int] = []
    for transfer, before in zip(explicit.transfers, _into(explicit), strict=True):
        ends = (begins[other] + len(explicit.transfers[other].hops) for other in before)
        begins.append(max(transfer.step, *ends, 0))
    return begins


def latency_of(explicit: Schedule) -> Fraction:
    """The latency in us of the links that a schedule uses, where it is one; else the largest."""
    used = {hop for transfer in explicit.transfers for hop in transfer.hops}
    links = explicit.topology.links
    return max((link.latency_us for link in links if (link.src, link.dst) in used), default=Fraction(0))
