"""What runs are asked to do, and what each of their processes answers.

Plain values that go through pickle between `backends.measure.launch` and `backends.measure.worker`, or from
rank 0 to the other ranks under torchrun; torch is not imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from arborcast.backends.lowering.layout import blocks_in
from arborcast.backends.lowering.reduction import Reduction
from arborcast.synth.collective import Kind
from arborcast.synth.implicit_schedule import AnySchedule

ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "int64": 8}
"""The types that runs support, with the size of an element."""

LOOPBACK_PIECE_BYTES = 1 << 20
"""On loopback the processor is what limits, and every message costs it; see `executors.torch_p2p`."""


@dataclass(frozen=True)
class Job:
    """One schedule on some buffer sizes.

    Attributes:
        schedule: what to run, on as many processes as its topology has ranks.
        counts: elements of the whole buffer of each run.
        dtype: one of `ITEM_BYTES`.
        reduction: ignored by collectives that only move data.
        iterations: timed runs of each size.
        warmup: runs before those.
        seed: of the data.
        pieces: into how many each chunk is cut; by size where None.
        piece_bytes: see `Executor`.
    """

    schedule: AnySchedule
    counts: tuple[int, ...]
    dtype: str = "float32"
    reduction: Reduction = Reduction.SUM
    iterations: int = 5
    warmup: int = 1
    seed: int = 0
    pieces: int | None = None
    piece_bytes: int = LOOPBACK_PIECE_BYTES


@dataclass(frozen=True)
class Sweep:
    """A job measured as nccl-tests does: calls back to back between barriers, then one that is checked.

    Attributes:
        job: what to run; its counts, one for each of `asked_bytes`.
        asked_bytes: the sizes as the caller gave them; counts are rounded.
        via: one of `RUNTIMES`.
        check: whether to compare a run of every size.
        average: one of `AVERAGES`.
    """

    job: Job
    asked_bytes: tuple[int, ...]
    via: str
    check: bool
    average: str


RUNTIMES = ("group", "messages")
"""What executes a schedule: the engine of the process group "synth", or torch's point-to-point messages."""

AVERAGES = ("rank 0", "average", "min", "max")
"""Which time of the ranks' a row holds, in the order of nccl-tests' numbers for `-a`."""


@dataclass(frozen=True)
class Answer:
    """What one rank found for one size.

    Attributes:
        times_s: of each timed run.
        wrong: elements that differ from the reference, in all runs that were compared.
        reference: where the right elements came from: `torch` or `definition`.
    """

    times_s: tuple[float, ...]
    wrong: int
    reference: str


def count_for(schedule: AnySchedule, size_bytes: int, dtype: str) -> int:
    """The largest number of elements that fit and that divide into the collective's blocks."""
    blocks = blocks_in(schedule.collective)
    return size_bytes // (ITEM_BYTES[dtype] * blocks) * blocks


def count_as_nccl_tests(schedule: AnySchedule, size_bytes: int, dtype: str) -> int:
    """The number of elements that nccl-tests makes of a size.

    The blocks that ranks own are multiples of 16 bytes there, so that small sizes become 0. A custom
    collective, which it does not know, has blocks of whole elements.
    """
    blocks = blocks_in(schedule.collective)
    unit = 1 if blocks == 1 or schedule.collective.kind is Kind.CUSTOM else 16 // ITEM_BYTES[dtype]
    return size_bytes // (ITEM_BYTES[dtype] * unit * blocks) * unit * blocks
