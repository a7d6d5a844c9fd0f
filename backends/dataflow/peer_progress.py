"""The state of one channel in one run of a flow: what goes over it next, and how far that is."""

from __future__ import annotations

from arborcast.backends.errors import ChannelClosedError, ExecutionError
from arborcast.backends.transport.channel import Channel


class LineError(ExecutionError):
    """A peer went in the middle of something; `closed` is the error of its channel.

    The message says what was awaited from which peer, but neither the rank nor the collective.
    """

    def __init__(self, what: str, closed: ChannelClosedError) -> None:
        super().__init__(f"{what}: {closed}")
        self.closed = closed


class Line:
    """One channel in one run.

    Attributes:
        channel: to the peer.
        sends: numbers of the actions that send to the peer, in order; `sent` of them are complete.
        receives: the same of those that receive from it.
        awaits_opening: whether the peer's opening has not been seen and must be.
        outgoing: what is left of a send that has begun.
        incoming: what is left of a plain receive that has begun.
        combined: bytes of the next combine that are done.
        is_gone: whether the peer will send no more than is on its way.
        must_stay: whether the run is in vain when the peer dies, though nothing of it is awaited here.
    """

    __slots__ = (
        "awaits_opening",
        "channel",
        "combined",
        "incoming",
        "is_gone",
        "must_stay",
        "outgoing",
        "received",
        "receives",
        "sends",
        "sent",
    )

    def __init__(
        self,
        channel: Channel,
        *,
        sends: tuple[int, ...] = (),
        receives: tuple[int, ...] = (),
        awaits_opening: bool = False,
        must_stay: bool = False,
    ) -> None:
        self.channel = channel
        self.sends = sends
        self.receives = receives
        self.awaits_opening = awaits_opening
        self.sent = 0
        self.received = 0
        self.outgoing: memoryview | None = None
        self.incoming: memoryview | None = None
        self.combined = 0
        self.is_gone = False
        self.must_stay = must_stay
