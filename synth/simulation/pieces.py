"""Into how many pieces the chunks of a schedule are cut in one call: one rule for engine and simulator.

With p pieces and s steps all links work for p / (p + s - 1) of the time, so many pieces are wanted; but each
message keeps its two ends at work. Where the links are slow that is little beside the time that they need:
there, pieces are as many as the work on them allows. Where the processors are the limit, as within one host,
few and long messages are best.

The engine always cuts by this rule, the simulator where the topology says what a message costs
(`Topology.message_us`); where messages cost nothing, pieces are free and the simulator tries them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule

MESSAGE_US = 30
"""What a short message costs each of its ends where the topology does not say it, and a copy from or to a
device whoever asks for it."""

SHORTEST_BYTES = 8 << 10
"""A piece that is shorter costs its time on the link over again, in headers and acknowledgements."""

SWITCH_WORK = Fraction(1, 2)
"""What a message of a switch counts beside one of a rank: its process does nothing else."""

STEPS_HIDDEN = 64
"""Pieces for each step; with more of them, all that is left to gain is 1.5 %."""


@dataclass(frozen=True, slots=True)
class PieceRule:
    """How finely to cut.

    Attributes:
        piece_bytes: what a piece of the largest chunk does not fall below.
        least: pieces that are always allowed, where `piece_bytes` allows them.
        per_step: the pieces that each step of the schedule allows.
        work: the part of the time on the links that messages may keep the busiest rank at work; with slow
            links that allows more and shorter pieces than the rest of the rule does.
    """

    piece_bytes: int
    least: int
    per_step: int
    work: Fraction = Fraction(0)

    def pieces(self, schedule: AnySchedule, nbytes: int) -> int:
        """For a whole buffer of `nbytes`; one number for all chunks, so that trees stay in step.

        Where nothing is passed on, pieces gain nothing, but where slow links are to be busy from the begin.
        A switch that stores passes on a chunk once it has all of it: where one adds or copies, it is 1.
        """
        first = schedule.topology.ranks
        if any(schedule.topology.switches[vertex - first].stores for vertex in switches_in(schedule)):
            return 1
        enough = 1 if schedule.steps == 1 else max(self.least, self.per_step * schedule.steps)
        coarse = pieces_that_fit(schedule, nbytes, piece_bytes=self.piece_bytes, most=enough)
        if not self.work:
            return coarse
        affordable = min(self._affordable(schedule, nbytes), STEPS_HIDDEN * schedule.steps)
        return max(coarse, pieces_that_fit(schedule, nbytes, piece_bytes=SHORTEST_BYTES, most=affordable))

    def _affordable(self, schedule: AnySchedule, nbytes: int) -> int:
        """How many pieces the messages' share of the time on the links pays for."""
        ranks = schedule.topology.ranks
        messages = max(
            (count * (SWITCH_WORK if end >= ranks else 1) for end, count in messages_of(schedule).items()),
            default=0,
        )
        if not messages:
            return 1
        links_us = Fraction(nbytes) / (1000 * schedule.rate)
        message_us = schedule.topology.message_us or MESSAGE_US
        return int(self.work * links_us / (messages * message_us))


# Measured on loopback, 4 ranks on 2 cores, allreduce of 16 MiB over sockets beside gloo: pieces of 1 MiB 1.04
# times its speed, 512 KiB 0.88, 256 KiB 0.71.
ONE_HOST = PieceRule(256 << 10, least=4, per_step=2)
SEVERAL_HOSTS = PieceRule(128 << 10, least=16, per_step=4, work=Fraction(1, 8))


def pieces_that_fit(schedule: AnySchedule, nbytes: int, *, piece_bytes: int, most: int) -> int:
    """Into how many pieces each chunk is cut; one number, so that trees of different weight stay in step.

    Args:
        schedule: what is cut.
        nbytes: of the whole buffer.
        piece_bytes: what a piece of the largest chunk does not fall below, unless it is the only one.
        most: the number that is never exceeded.
    """
    largest = max((chunk.share for chunk in schedule.chunks), default=0)
    return max(1, min(most, int(nbytes * largest) // piece_bytes))


def most_messages(schedule: AnySchedule) -> int:
    """The transfers that the busiest rank, or able switch, sends and receives."""
    return max(messages_of(schedule).values(), default=0)


def messages_of(schedule: AnySchedule) -> Mapping[int, int]:
    """The transfers that a rank or able switch sends and receives; of an orbit, those of its first vertex."""
    ends: dict[int, Fraction] = defaultdict(Fraction)
    for transfer in schedule.transfers:
        ends[transfer.src] += 1
        ends[transfer.dst] += 1
    return {end: int(count) for end, count in _of_orbits(schedule, ends).items()}


def shares_of(schedule: AnySchedule, *, sums: int = 1) -> Mapping[int, Fraction]:
    """What they move in and out, as parts of the whole buffer; keys as of `messages_of`.

    Args:
        schedule: in whatever form.
        sums: how often what is added to what comes counts.
    """
    ends: dict[int, Fraction] = defaultdict(Fraction)
    for transfer in schedule.transfers:
        share = schedule.chunks[transfer.chunk].share
        ends[transfer.src] += share
        ends[transfer.dst] += share * sums if transfer.reduce else share
    return _of_orbits(schedule, ends)


def _of_orbits(schedule: AnySchedule, ends: Mapping[int, Fraction]) -> Mapping[int, Fraction]:
    """The same where every transfer has its images."""
    if not isinstance(schedule, ImplicitSchedule):
        return ends
    # The images of one end are spread evenly over its orbit: one on each rank, several on each switch.
    group = schedule.translations
    _, first, sizes = np.unique(group.orbit_of, return_index=True, return_counts=True)
    found: dict[int, Fraction] = defaultdict(Fraction)
    for end, count in ends.items():
        orbit = group.orbit_of[end]
        found[int(first[orbit])] += count * group.order / int(sizes[orbit])
    return found


def switches_in(schedule: AnySchedule) -> frozenset[int]:
    """The switches at which transfers start or end: the vertices besides ranks that have a program."""
    ranks = schedule.topology.ranks
    ends = {end for transfer in schedule.transfers for end in (transfer.src, transfer.dst) if end >= ranks}
    if isinstance(schedule, ImplicitSchedule):
        orbit_of = schedule.translations.orbit_of
        orbits = {int(orbit_of[end]) for end in ends}
        ends = {vertex for vertex in range(ranks, schedule.topology.holders) if orbit_of[vertex] in orbits}
    return frozenset(ends)
