"""What two ranks compare before the first byte of a collective: whether both mean the same one."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from arborcast.backends.errors import DisagreementError
from arborcast.synth.collective import Kind

_FORMAT = struct.Struct("<QQqB31s8s")
OPENING_BYTES = _FORMAT.size
_KINDS = tuple(Kind)

OF_A_PAIR = -2
"""In the place of a root: an alltoall of which each two ranks compare what goes between them."""


@dataclass(frozen=True, slots=True)
class CollectiveFingerprint:
    """One call of a collective, as one rank sees it.

    Attributes:
        sequence: how many collectives this group has begun before it.
        count: elements of the whole buffer.
        root: position of the root in the group, -1 where there is none; or `OF_A_PAIR`.
        kind: which collective.
        elements: type and reduction, as in "float32 sum"; ASCII of at most 31 characters. Empty where
            schedules are looked for and nothing is moved yet.
        schedule: what the bytes go by: 8 bytes of a digest, or zeros where gloo serves the call; of a pair
            the bytes that come back, of which `count` go.
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
        if self.root == OF_A_PAIR:
            return f"{self.kind} ({self.elements})"
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
        if self.root == other.root == OF_A_PAIR and _of_one_call(self) == _of_one_call(other):
            for source, target, sends, expects in (
                (peer, rank, other.count, self.count),
                (rank, peer, self._comes_back, other._comes_back),
            ):
                if sends != expects:
                    raise DisagreementError(
                        f"rank {source} sends {sends} bytes to rank {target}, which expects {expects}"
                    )
        number = "" if self.sequence == other.sequence else f", its call {other.sequence}"
        raise DisagreementError(
            f"rank {rank}, call {self.sequence}: {self} here, but {other} on rank {peer}{number}"
        )

    @property
    def _comes_back(self) -> int:
        return int.from_bytes(self.schedule, "little")


def _of_one_call(it: CollectiveFingerprint) -> tuple[int, Kind, str]:
    return it.sequence, it.kind, it.elements


@dataclass(frozen=True, slots=True)
class ExchangeFingerprint:
    """An alltoall, of which each two ranks compare what goes between them.

    Attributes:
        call: `OF_A_PAIR`, as all ranks see it alike but for its count.
        sent: bytes for each rank.
        expected: bytes from each rank.
    """

    call: CollectiveFingerprint
    sent: Sequence[int]
    expected: Sequence[int]

    def to_bytes(self, peers: Sequence[int]) -> bytes:
        """For each of some ranks what it is told, and what it must tell."""
        call, pairs = self.call, []
        number, elements = _KINDS.index(call.kind), call.elements.encode("ascii")
        for peer in peers:
            goes, comes = self.sent[peer], self.expected[peer]
            for first, second in ((goes, comes), (comes, goes)):
                back = second.to_bytes(8, "little")
                pairs.append(_FORMAT.pack(call.sequence, first, call.root, number, elements, back))
        return b"".join(pairs)

    def __str__(self) -> str:
        """As messages show it."""
        return str(self.call)
