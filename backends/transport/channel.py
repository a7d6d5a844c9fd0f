"""What the engine expects of the way to one other rank: bytes in order, both ways, and no call that blocks.

The two ends know from their programs which messages come in which order, and how long each is, so that
messages carry no names. A message is cut into parts of `part_bytes` from its start (the last is shorter), and
before the first message of a collective comes its opening, which says what the sender believes it to be.

    peer's stream:   opening | part part part | part | part part | opening | part ...
                               one message      next   next        next collective
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from arborcast.backends.errors import ChannelClosedError


class Channel(ABC):
    """Both directions between this rank and one other.

    Memory is given as contiguous views of bytes (format B). All calls come from one thread at a time. All of
    them raise `ChannelClosedError` once the peer is gone and what it sent before has been read.

    Attributes:
        peer: the other rank.
        transport: as reports call it: "sockets" or "shared memory".
        part_bytes: the longest part of a message, the same at both ends.
    """

    peer: int
    transport: str
    part_bytes: int

    @abstractmethod
    def fileno(self) -> int:
        """The descriptor to poll."""

    @property
    def wants_read(self) -> bool:
        """Whether a send waits for the peer, so that the descriptor must be polled for reading."""
        return False

    @property
    @abstractmethod
    def wants_write(self) -> bool:
        """Whether something waits for room in the socket, so that it must be polled for writing."""

    @property
    def has_unread(self) -> bool:
        """Whether something of the peer is here that the descriptor no longer tells of.

        It may have come with what a send looked for.
        """
        return False

    @abstractmethod
    def on_ready(self) -> None:
        """To be called when the descriptor is readable or writable: move what moves by itself."""

    @abstractmethod
    def open(self, opening: bytes) -> None:
        """Send the opening of a collective (`OPENING_BYTES` long); it is kept where there is no room now."""

    @abstractmethod
    def send(self, data: memoryview) -> int:
        """Hand over a prefix of what is left of a message; returns its bytes, 0 where there is no room now.

        What was handed over may be overwritten. The next call continues where this one stopped.
        """

    def send_all(self, messages: Sequence[memoryview]) -> int:
        """Hand over a prefix of several messages, of which the first may be a rest; returns its bytes.

        The next call continues where this one stopped.
        """
        handed_over = 0
        for data in messages:
            count = self.send(data) if data else 0
            handed_over += count
            if count < len(data):
                break
        return handed_over

    @abstractmethod
    def opening(self) -> bytes | None:
        """The peer's next opening, where that is what comes next and all of it is there."""

    @abstractmethod
    def receive(self, into: memoryview, *, look: bool = True) -> int:
        """Fill a prefix of what is left of a message; returns its bytes, 0 where nothing is there now.

        Args:
            into: where the rest of the message goes.
            look: whether to ask again where the last call found the end of what had come. Who calls
                `on_ready` whenever the descriptor is readable need not.
        """

    @abstractmethod
    def take(self, length: int, *, look: bool = True) -> memoryview | None:
        """The next part, of that length, where it lies; None while not all of it is there.

        It may be read until the next call of `receive`, `take`, `opening` or `on_ready`. It begins at an
        address that is a multiple of 8.

        Args:
            length: of the part.
            look: as for `receive`.
        """

    def unheard_s(self) -> float:
        """For how many seconds the peer's host has left unanswered what it was sent; 0 where nothing is."""
        return 0.0

    def last_words(self) -> ChannelClosedError:
        """Why a peer is gone, as far as it said; what is unread may be lost, so this is for who gives up."""
        return ChannelClosedError(self.peer)

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Tell the peer why this rank gives up, as far as that is possible without waiting, and close."""

    @abstractmethod
    def close(self) -> None:
        """End both directions; what was handed over before still arrives. May be called twice."""
