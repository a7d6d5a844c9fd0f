"""Into how many pieces the chunks of a schedule are cut in one call.

With p pieces and s steps all links work for p / (p + s - 1) of the time, so many pieces are wanted; but each
message costs its two ends some 30 us of Python. Where the links are slow that is little beside the time that
they need: there, pieces are as many as the work on them allows. Where the processors are the limit, as within
one host, few and long messages are best.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from arborcast.backends.lowering.lower import pieces_that_fit
from arborcast.backends.lowering.rank_view import messages_of, switches_in
from arborcast.synth.errors import InputError
from arborcast.synth.implicit_schedule import AnySchedule

if TYPE_CHECKING:
    from arborcast.backends.staging.device import CopyCosts
    from arborcast.backends.staging.ring import Ring

MESSAGE_US = 30
"""What a short message costs each of its ends, and a copy from or to a device whoever asks for it."""

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
        if not self.work or not schedule.rate:
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
        return int(self.work * links_us / (messages * MESSAGE_US))


def ring_for(
    schedule: AnySchedule,
    nbytes: int,
    copying: CopyCosts,
    rule: PieceRule,
    *,
    buffer_bytes: int | None = None,
    depth: int | None = None,
) -> Ring:
    """How tensors on a device pass through host memory: what is given, else the fastest way.

    Switches that execute programs cut by the rule and know nothing of rings: there the pieces are the rule's,
    and the ring is as deep as the schedule has steps, so that messages have the order of no ring.

    Args:
        schedule: that serves the call.
        nbytes: of the whole buffer.
        copying: what the device's copies take.
        rule: by which host memory is cut.
        buffer_bytes: of the tensor in one host buffer.
        depth: host buffers.

    Raises:
        InputError: what is given does not go with such switches.
    """
    from arborcast.backends.staging.ring import Pipeline, Ring  # with torch, which synthesis does without

    pipeline = Pipeline.of(schedule, nbytes, copying, message_us=MESSAGE_US, shortest_bytes=SHORTEST_BYTES)
    if not switches_in(schedule):
        return pipeline.choose(buffer_bytes=buffer_bytes, depth=depth)
    pieces = rule.pieces(schedule, nbytes)
    least = min(pieces, schedule.steps)
    if buffer_bytes is not None:
        raise InputError("staging_bytes: cannot be chosen where switches execute programs, which cut alike")
    if depth is not None and depth < least:
        raise InputError(
            f"staging_depth: must be at least {least} where switches execute programs, got {depth}"
        )
    return Ring(pieces, min(pieces, depth or max(least, pipeline.enough(pieces))))


# Measured on loopback, 4 ranks on 2 cores, allreduce of 16 MiB over sockets beside gloo: pieces of 1 MiB 1.04
# times its speed, 512 KiB 0.88, 256 KiB 0.71.
ONE_HOST = PieceRule(256 << 10, least=4, per_step=2)
SEVERAL_HOSTS = PieceRule(128 << 10, least=16, per_step=4, work=Fraction(1, 8))
