"""How tensors on a device pass through host memory; into how many pieces, `synth.simulation.pieces` says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arborcast.synth.errors import InputError
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.simulation.pieces import MESSAGE_US, SHORTEST_BYTES, PieceRule, switches_in

if TYPE_CHECKING:
    from arborcast.backends.staging.device import CopyCosts
    from arborcast.backends.staging.ring import Ring


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
