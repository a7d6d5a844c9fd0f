"""What a rank says when it connects to another, and what it is answered."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from arborcast.backends.errors import ExecutionError

_MAGIC = b"arborch1"
TOKEN_BYTES = 16
_GREETING = struct.Struct(f"<8s{TOKEN_BYTES}sIIQI?")
_ANSWER = struct.Struct("<8sI")
GREETING_BYTES = _GREETING.size
ANSWER_BYTES = _ANSWER.size
_LONGEST_REFUSAL = 4096


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first bytes of a connection.

    Attributes:
        token: what rank 0 of the group drew; a connection without it belongs to somebody else.
        rank: who connects.
        to: to whom.
        slot_bytes: bytes of a slot of shared memory.
        slots: of each direction.
        wants_memory: whether a connection without memory is of no use.
    """

    token: bytes
    rank: int
    to: int
    slot_bytes: int
    slots: int
    wants_memory: bool

    def to_bytes(self) -> bytes:
        """`GREETING_BYTES` bytes."""
        return _GREETING.pack(
            _MAGIC, self.token, self.rank, self.to, self.slot_bytes, self.slots, self.wants_memory
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Greeting | None:
        """What `to_bytes` made; None where the bytes are something else."""
        magic, *said = _GREETING.unpack(data)
        return cls(*said) if magic == _MAGIC else None


def answer(refusal: str = "") -> bytes:
    """The answer to a greeting: welcome, or why not."""
    text = refusal.encode()[:_LONGEST_REFUSAL]
    return _ANSWER.pack(_MAGIC, len(text)) + text


def refusal_length(data: bytes, rank: int) -> int:
    """Bytes of refusal behind the first `ANSWER_BYTES` bytes of an answer, 0 for a welcome.

    Raises:
        ExecutionError: who answered is not the rank that was called.
    """
    magic, length = _ANSWER.unpack(data)
    if magic != _MAGIC or length > _LONGEST_REFUSAL:
        raise ExecutionError(f"what listens at the address of rank {rank} is not a rank of this group")
    return int(length)
