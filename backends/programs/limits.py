"""What runtimes can hold: numbers of their parsers and of their device code, and how deep their FIFOs are.

Read in the sources of Azure/msccl-executor-nccl (c6f6b36) and ROCm/rccl (0cbce2a), files msccl_parser.cc,
msccl_struct.h, msccl_kernel.cu and prims_*.h.
"""

from __future__ import annotations

from dataclasses import dataclass

from arborcast.backends.programs.program import GlobalProgram
from arborcast.synth.collective import Kind
from arborcast.synth.nccl_protocol import Protocol


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a build of MSCCL.

    Attributes:
        steps: of one thread block, those included that only carry a dependency; an option of the build.
        blocks: thread blocks of one rank; all must be resident at once. RCCL's number.
        blocks_waited_for: those that a dependency can name, as it is kept in eight bits.
        peers: thread blocks of one rank and channel that have a send peer, or a receive peer.
        channels: connections exist for these; the parser lets one more pass and writes past an array.
        count: chunks of one step.
        offset: chunks into a buffer, kept in sixteen bits.
        elements: of the XML that one rank keeps.
        children: of one element, which no parser checks.
        fused: consecutive reductions into one place, executed as one.
    """

    steps: int = 64
    blocks: int = 64
    blocks_waited_for: int = 128
    peers: int = 32
    channels: int = 32
    count: int = 71
    offset: int = 32767
    elements: int = 4096
    children: int = 1024
    fused: int = 16


MSCCL = Limits()


@dataclass(frozen=True, slots=True)
class Fifo:
    """The buffer of a connection, in the parts in which a message passes it.

    Attributes:
        depth: parts that it holds.
        parts: of one message, which is as many chunks of a step as fit a slot at run time, at least one.
    """

    depth: int
    parts: int

    @property
    def messages(self) -> int:
        """Whole messages that it holds."""
        return self.depth // self.parts


def fifo_of(protocol: Protocol) -> Fifo:
    """Eight slots: with Simple a message takes four, two at a time; with LL and LL128 it takes one.

    The kernel does so for every collective; the one slot that NCCL's broadcast and reduce take is what MSCCL
    tells its proxy threads only.
    """
    return Fifo(4, 2) if protocol is Protocol.SIMPLE else Fifo(8, 1)


SLOT_BYTES = {Protocol.SIMPLE: 524288, Protocol.LL: 16384, Protocol.LL128: 50176}
"""Data in one of the eight slots, with buffers of their usual size: of RCCL, whose slots are smaller."""


def slots_of(program: GlobalProgram) -> int:
    """Slots that the runtime counts for a message when it works out how many chunks it takes."""
    whole = program.protocol is Protocol.SIMPLE and program.kind not in {Kind.BROADCAST, Kind.REDUCE}
    return 4 if whole else 1


def chunks_together(program: GlobalProgram, size_bytes: int | None = None) -> int:
    """How many chunks of a step a message takes at a size, by default the largest that it is for."""
    size = program.most_bytes if size_bytes is None else size_bytes
    if size is None:
        return 1
    message = SLOT_BYTES[program.protocol] * slots_of(program)
    return min(MSCCL.count, max(1, message // max(1, -(-size // _per_loop(program)))))


def largest_bytes(program: GlobalProgram, chunks: int) -> int:
    """The largest size at which a message takes so many chunks."""
    return SLOT_BYTES[program.protocol] * slots_of(program) // chunks * _per_loop(program)


def _per_loop(program: GlobalProgram) -> int:
    """Chunks that the runtime divides its bytes by: of gather and scatter, those of a rank's block."""
    blocks = program.ranks if program.kind in {Kind.GATHER, Kind.SCATTER} else 1
    return program.chunks // blocks
