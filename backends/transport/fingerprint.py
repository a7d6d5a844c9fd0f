"""What two ranks compare before the first byte of a collective: whether both mean the same one."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from arborcast.backends.errors import DisagreementError
from arborcast.synth.collective import Kind

_FORMAT = struct.Struct("<QQqB31s8s")
OPENING_BYTES = _FORMAT.size
_KINDS = tuple(Kind)


@dataclass(frozen=True, slots=True)
class CollectiveFingerprint:
    """One call of a collective, as one rank sees it.

    Attributes:
        sequence: how many collectives this group has begun before it.
        count: elements of the whole buffer.
        root: position of the root in the group, -1 where there is none.
        kind: which collective.
        elements: type and reduction, as in "float32 sum"; ASCII of at most 31 characters. Empty where
            schedules are looked for and nothing is moved yet.
        schedule: what the bytes go by: 8 bytes of a digest, or zeros where gloo serves the call.
    """

    sequence: int
    count: int
    root: int
    kind: Kind
    elements: str
    schedule: bytes = bytes(8)

    def to_bytes(self) -> bytes:
        """`OPENING_BYTES` bytes."""
        return _FORMAT.pack(
            self.sequence,
            self.count,
            self.root,
            _KINDS.index(self.kind),
            self.elements.encode("ascii"),
            self.schedule,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> CollectiveFingerprint:
        """What `to_bytes` made.

        Raises:
            DisagreementError: the bytes are no opening, so that the two ends are not in step.
        """
        try:
            sequence, count, root, kind, elements, schedule = _FORMAT.unpack(data)
            return cls(sequence, count, root, _KINDS[kind], elements.rstrip(b"\0").decode("ascii"), schedule)
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise DisagreementError(
                f"received {data[:16].hex()}... where a collective should begin"
            ) from error

    def __str__(self) -> str:
        """As messages show it."""
        root = "" if self.root < 0 else f" from rank {self.root}"
        if not self.elements:
            return f"schedules of {self.kind}{root}"
        by = "gloo" if not any(self.schedule) else f"schedule {self.schedule.hex()}"
        return f"{self.kind}{root} of {self.count} elements ({self.elements}) by {by}"

    def check(self, rank: int, other: CollectiveFingerprint, peer: int) -> None:
        """Refuse to go on with a rank that means another collective.

        Raises:
            DisagreementError: with both calls in its message.
        """
        if self == other:
            return
        number = "" if self.sequence == other.sequence else f", its call {other.sequence}"
        raise DisagreementError(
            f"rank {rank}, call {self.sequence}: {self} here, but {other} on rank {peer}{number}"
        )
