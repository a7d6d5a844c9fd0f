"""What a run on processes may end with when something is wrong outside it."""

from __future__ import annotations


class ExecutionError(RuntimeError):
    """A collective could not be completed: a peer died, a deadline passed, or ranks disagree.

    The message names the rank that says so, the peer, the collective and the piece. The group is unusable
    afterwards: destroy it and make a new one.
    """


class ChannelClosedError(ExecutionError):
    """The peer of a channel is gone; `reason` is what it said before, None where it said nothing."""

    def __init__(self, peer: int, reason: str | None = None) -> None:
        super().__init__(
            f"rank {peer} {'closed its connection: it died or was ended' if reason is None else reason}"
        )
        self.peer = peer
        self.reason = reason


class PeerLeftError(ChannelClosedError):
    """The peer left the group in good order: an error only for who still needs it. `reason` is None."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer, "has left the group")
        self.reason = None


class DisagreementError(ExecutionError):
    """Ranks of one group do not call the same collective; the message holds both calls."""
