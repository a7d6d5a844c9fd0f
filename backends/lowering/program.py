"""What one rank executes: sends, receives and reductions on slices of its buffers.

A `Program` is a plain value without torch or numpy in it. Its operations stand in an order that works even
where sends block until they are received (a checker in the tests shows that), and each names the own
operations that must be complete before it starts, so that an executor may overlap everything else.
`backends.lowering.lower` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from arborcast.backends.lowering.layout import Buffer, BufferSlice


@dataclass(frozen=True, slots=True)
class Send:
    """Send the elements of `source` to `peer`.

    In this and the other operations, `time` is the logical time (step plus piece), and `after` lists the
    indices of the operations of the same program that must be complete before this one starts: a send is
    complete when its source may be overwritten, a receive when its data is there.
    """

    time: int
    peer: int
    source: BufferSlice
    tag: int
    after: tuple[int, ...] = ()

    def __str__(self) -> str:
        """As messages show it."""
        return f"send {self.source} to rank {self.peer} (tag {self.tag})"


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive as many elements from `peer` as `into` has; it may be posted once `after` is complete."""

    time: int
    peer: int
    into: BufferSlice
    tag: int
    after: tuple[int, ...] = ()

    def __str__(self) -> str:
        """As messages show it."""
        return f"receive {self.into} from rank {self.peer} (tag {self.tag})"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Combine the elements of `source` into those of `into`."""

    time: int
    source: BufferSlice
    into: BufferSlice
    after: tuple[int, ...] = ()

    def __str__(self) -> str:
        """As messages show it."""
        return f"reduce {self.source} into {self.into}"


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the elements of `source` to `into`."""

    time: int
    source: BufferSlice
    into: BufferSlice
    after: tuple[int, ...] = ()

    def __str__(self) -> str:
        """As messages show it."""
        return f"copy {self.source} to {self.into}"


Operation: TypeAlias = Send | Receive | Reduce | Copy


@dataclass(frozen=True)
class Program:
    """The part of one rank in a collective on buffers of one length.

    Attributes:
        rank: whose it is, in the numbering of the topology.
        operations: in the order that is safe with blocking sends.
        input_elements: length of the input buffer, 0 where there is none.
        output_elements: length of the output buffer, 0 where there is none.
        scratch_elements: length of the working space.
        in_place: whether the output holds the rank's data at the start.
        contributors: how many ranks a reduction combines, 1 for other kinds; what AVG divides by.
    """

    rank: int
    operations: tuple[Operation, ...]
    input_elements: int
    output_elements: int
    scratch_elements: int
    in_place: bool
    contributors: int

    def elements(self, buffer: Buffer) -> int:
        """Length of one of the buffers."""
        match buffer:
            case Buffer.INPUT:
                return self.input_elements
            case Buffer.OUTPUT:
                return self.output_elements
            case Buffer.SCRATCH:
                return self.scratch_elements
