"""The state of one channel in one run of a graph: what goes over it next, and how far that is."""

from __future__ import annotations

from dataclasses import dataclass

from arborcast.backends.errors import ChannelClosedError, ExecutionError
from arborcast.backends.transport.channel import Channel


class PeerGoneError(ExecutionError):
    """A peer went in the middle of something; `closed` is the error of its channel.

    The message says what was awaited from which peer, but neither the rank nor the collective.
    """

    def __init__(self, what: str, closed: ChannelClosedError) -> None:
        super().__init__(f"{what}: {closed}")
        self.closed = closed


@dataclass(slots=True, eq=False)
class PeerProgress:
    """One channel in one run.

    Attributes:
        channel: to the peer.
        sends: numbers of the actions that send to the peer, in order; `sent` of them are complete.
        receives: the same of those that receive from it.
        awaits_opening: whether the peer's opening has not been seen and must be.
        is_required: whether the run is in vain when the peer dies, though nothing of it is awaited here.
        outgoing: what is left of a send that has begun.
        incoming: what is left of a plain receive that has begun.
        combined: bytes of the next combine that are done.
        is_gone: whether the peer will send no more than is on its way.
    """

    channel: Channel
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    awaits_opening: bool = False
    is_required: bool = False
    sent: int = 0
    received: int = 0
    outgoing: memoryview | None = None
    incoming: memoryview | None = None
    combined: int = 0
    is_gone: bool = False
