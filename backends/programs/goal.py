"""Schedules as GOAL, the text that LogGOPSim and ATLAHS simulate after their own text-to-binary tool.

Each directed link has a number that no other link at either of its ends has; sends and receives name it as
their cpu and nic, so that links serve their messages one after the other and beside each other. Slower
links than the fastest get proportionally larger messages. With o = g = 0, L the latency and S above every
message, links between ranks are timed exactly. Of ways through switches only the first and the last link
are, and messages of different ranks that share a link between switches do not wait for each other.
"""

from __future__ import annotations

import math
from collections import defaultdict

from arborcast.backends.programs.messages import Message, messages_of, narrowest, one_latency
from arborcast.backends.programs.program import ProgramError
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.topology import Hop, Topology

MOST_BYTES = (1 << 31) - 1
"""Of one message; the simulator keeps sizes in 32 bits."""


def write(schedule: AnySchedule, size_bytes: int, *, pieces: int = 1) -> str:
    """The text for a whole buffer of so many bytes; its first lines say which parameters go with it.

    Raises:
        ProgramError: too many messages, or one that is too large.
    """
    if size_bytes < 1:
        raise ProgramError(f"size must be at least 1 byte, got {size_bytes}")
    explicit, messages = messages_of(schedule, pieces)
    topology = explicit.topology
    fastest = max((narrowest(topology, message) for message in messages), default=topology.bandwidth_unit)
    numbers = _numbers(topology, messages)
    rows: dict[int, list[str]] = defaultdict(list)
    largest = 0
    for number, message in enumerate(messages):
        size = math.ceil(message.share * size_bytes * fastest / narrowest(topology, message))
        largest = max(largest, size)
        way = (message.src, *message.via, message.dst)
        out, into = numbers[way[0], way[1]], numbers[way[-2], way[-1]]
        tag = number % (1 << 30)
        rows[message.src].append(f"s{number}: send {size}b to {message.dst} tag {tag} cpu {out} nic {out}")
        rows[message.dst].append(
            f"r{number}: recv {size}b from {message.src} tag {tag} cpu {into} nic {into}"
        )
        rows[message.src] += [f"s{number} requires r{before}" for before in message.after]
    if largest > MOST_BYTES:
        raise ProgramError(
            f"a message of {largest} bytes, at most {MOST_BYTES} are kept; more pieces make smaller ones"
        )
    latency_ns = math.ceil(one_latency(topology, explicit) * 1000)
    lines = [
        f"// {topology.name} {explicit.collective.kind}, {size_bytes} bytes",
        f"// o = g = O = 0, L = {latency_ns} ns, G = {float(1 / fastest):.9g} ns a byte, S > {largest}",
        f"num_ranks {topology.ranks}",
    ]
    for rank in range(topology.ranks):
        lines += [f"rank {rank} {{", *rows[rank], "}"]
    return "\n".join([*lines, ""])


def _numbers(topology: Topology, messages: list[Message]) -> dict[Hop, int]:
    """The least number for each link that no link before it has at one of the same ranks."""
    used: dict[int, set[int]] = defaultdict(set)
    numbers: dict[Hop, int] = {}
    for message in messages:
        way = (message.src, *message.via, message.dst)
        for hop in ((way[0], way[1]), (way[-2], way[-1])):
            if hop in numbers:
                continue
            ranks = [end for end in hop if end < topology.ranks]
            taken = set().union(*(used[rank] for rank in ranks))
            numbers[hop] = next(number for number in range(len(taken) + 1) if number not in taken)
            for rank in ranks:
                used[rank].add(numbers[hop])
    return numbers
