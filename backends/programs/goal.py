"""Schedules as GOAL, the text that LogGOPSim and ATLAHS simulate after their own text-to-binary tool.

Every vertex is a host, the switches after the ranks. Each directed link has a number that no other link at
either of its ends has; sends and receives name it as their cpu and nic, so that links serve their messages
one after the other and beside each other. They do so in the planned order: a send begins after the one before
it on its link has begun, as the thread blocks of a runtime have it. Slower links than the fastest get
proportionally larger messages. With o = g = 0, L the latency and S above every message all links are timed
exactly by ATLAHS' simulator (2025), which stores messages and forwards them. LogGOPSim of 2023 starts what
waits for a receive on another cpu before the message has come.
"""

from __future__ import annotations

import math
from collections import defaultdict

from arborcast.backends.programs.formats import Files
from arborcast.backends.programs.messages import Message, latency_of, messages_of, one_size
from arborcast.backends.programs.program import ProgramError
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.topology import Hop

MOST_BYTES = (1 << 31) - 1
"""Of one message; the simulator keeps sizes in 32 bits."""


def export(
    schedule: AnySchedule, *, least_bytes: int = 0, most_bytes: int | None = None, pieces: int = 1
) -> Files:
    """The file for one size.

    Raises:
        ProgramError: several sizes, too many messages, or one that is too large.
    """
    text = write(schedule, one_size("goal", least_bytes, most_bytes), pieces=pieces)
    return Files({"": text}, text.splitlines()[1].removeprefix("// "))


def write(schedule: AnySchedule, size_bytes: int, *, pieces: int = 1) -> str:
    """The text for a whole buffer of so many bytes; its first lines say which parameters go with it.

    Raises:
        ProgramError: too many messages, or one that is too large.
    """
    explicit, messages, fastest = messages_of(schedule, size_bytes, pieces)
    topology = explicit.topology
    numbers = _numbers(messages)
    rows: dict[int, list[str]] = defaultdict(list)
    largest = max((message.nbytes for message in messages), default=0)
    for number, message in enumerate(messages):
        size, tag, port = message.nbytes, number % (1 << 30), numbers[message.hop]
        rows[message.src].append(f"s{number}: send {size}b to {message.dst} tag {tag} cpu {port} nic {port}")
        rows[message.dst].append(
            f"r{number}: recv {size}b from {message.src} tag {tag} cpu {port} nic {port}"
        )
        if message.before is not None:
            rows[message.src].append(f"s{number} irequires s{message.before}")
        rows[message.src] += [f"s{number} requires r{before}" for before in message.after]
    if largest > MOST_BYTES:
        raise ProgramError(
            f"a message of {largest} bytes, at most {MOST_BYTES} are kept; more pieces make smaller ones"
        )
    latency_ns = math.ceil(latency_of(explicit) * 1000)
    lines = [
        f"// {topology.name} {explicit.collective.kind}, {size_bytes} bytes",
        f"// o = g = O = 0, L = {latency_ns} ns, G = {float(1 / fastest):.9g} ns a byte, S > {largest}",
        f"num_ranks {topology.size}",
    ]
    for vertex in range(topology.size):
        lines += [f"rank {vertex} {{", *rows[vertex], "}"]
    return "\n".join([*lines, ""])


def _numbers(messages: list[Message]) -> dict[Hop, int]:
    """The least number for each link that no link before it has at one of the same vertices."""
    used: dict[int, set[int]] = defaultdict(set)
    numbers: dict[Hop, int] = {}
    for message in messages:
        if message.hop in numbers:
            continue
        taken = used[message.src] | used[message.dst]
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        numbers[message.hop] = number
        used[message.src].add(number)
        used[message.dst].add(number)
    return numbers
