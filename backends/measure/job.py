"""What runs are asked to do, and the rows that they answer; torch is not imported.

Plain values that go through pickle between `backends.measure.launch` and `.worker`, or from rank 0 to
the other ranks under torchrun.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

from numpy.typing import NDArray

from arborcast.backends.lowering.layout import blocks_in
from arborcast.synth.collective import Kind, bandwidths
from arborcast.synth.errors import InputError
from arborcast.synth.implicit_schedule import AnySchedule

Array: TypeAlias = NDArray[Any]

ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "int64": 8}
"""The types that runs support, with the size of an element."""

LOOPBACK_PIECE_BYTES = 1 << 20
"""Runs on loopback are CPU-bound, and every message costs CPU; see `executors.torch_p2p`."""

RUNTIMES = ("group", "messages")
"""What executes a schedule: the engine of the process group "synth", or torch's point-to-point messages."""

AVERAGES = ("rank 0", "average", "min", "max")
"""Which time of the ranks' a row holds, in the order of nccl-tests' numbers for `-a`."""


FAILURE_FILE = "failure.txt"
"""In the folder of a run: why the first rank that failed did."""


class RunError(Exception):
    """A run ended early; the message is the reason of the first rank that failed."""


class Reduction(StrEnum):
    """How contributions are combined."""

    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    @classmethod
    def of(cls, name: str) -> Reduction:
        """The operator of that name.

        Raises:
            InputError: there is none.
        """
        known = [reduction.value for reduction in cls]
        if name.lower() not in known:
            raise InputError(f"reduction {name}: must be one of {', '.join(known)}")
        return cls(name.lower())

    @property
    def nccl_name(self) -> str:
        """What nccl-tests prints."""
        return "prod" if self is Reduction.PRODUCT else self.value


@dataclass(frozen=True)
class Sweep:
    """A schedule measured as nccl-tests does: calls back to back between barriers, then one that is checked.

    Attributes:
        schedule: what to run, on as many processes as its topology has ranks.
        asked_bytes: the sizes as the caller gave them.
        counts: elements of the whole buffer, one for each of `asked_bytes`, rounded.
        dtype: one of `ITEM_BYTES`.
        reduction: ignored by collectives that only move data.
        iterations: timed calls of each size.
        warmup: calls before those.
        check: whether to compare a call of every size.
        average: one of `AVERAGES`.
        via: one of `RUNTIMES`.
        seed: of the data.
        pieces: into how many each chunk is cut by "messages"; by size where None.
    """

    schedule: AnySchedule
    asked_bytes: tuple[int, ...]
    counts: tuple[int, ...]
    dtype: str = "float32"
    reduction: Reduction = Reduction.SUM
    iterations: int = 5
    warmup: int = 1
    check: bool = True
    average: str = "average"
    via: str = "messages"
    seed: int = 0
    pieces: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One size, with the meanings of nccl-tests.

    Attributes:
        asked_bytes: the size as it was asked for.
        bytes: of the whole buffer, rounded down to what the collective can have.
        count: elements that each rank gives, or of one block where the buffer is one block per rank.
        dtype: type of the elements.
        redop: sum, avg, min, max or prod; none where nothing is reduced.
        root: -1 where there is none.
        time_us: of one call, mean over the calls; of the ranks the average or what was asked for.
        algbw: GB/s, bytes over time.
        busbw: GB/s, algbw times the factor of the collective.
        wrong: elements that differ from the reference, over all ranks; None where none was compared.
        spread: longest minus shortest call, us, each taken over the ranks as the time is.
        iterations: calls that count.
    """

    asked_bytes: int
    bytes: int
    count: int
    dtype: str
    redop: str
    root: int
    time_us: float
    algbw: float
    busbw: float
    wrong: int | None
    spread: float
    iterations: int

    def to_document(self) -> dict[str, Any]:
        """For JSON; `Row(**document)` reads it back."""
        return asdict(self)


def row_of(sweep: Sweep, asked_bytes: int, count: int, times_s: Sequence[Sequence[float]], wrong: int) -> Row:
    """A row from what the ranks measured.

    Args:
        sweep: what was asked.
        asked_bytes: the size.
        count: elements of the whole buffer.
        times_s: of each rank, those of its calls.
        wrong: elements, over all ranks; ignored where nothing was compared.
    """
    collective = sweep.schedule.collective
    calls = [_over_ranks(sweep.average, times) * 1e6 for times in zip(*times_s, strict=True)]
    time_us = _over_ranks(sweep.average, [statistics.fmean(times) for times in times_s]) * 1e6
    size = count * ITEM_BYTES[sweep.dtype]
    algbw, busbw = bandwidths(collective.kind, len(collective.ranks), size, time_us)
    return Row(
        asked_bytes=asked_bytes,
        bytes=size,
        count=count // blocks_in(collective),
        dtype=sweep.dtype,
        redop=sweep.reduction.nccl_name if collective.kind.reduces else "none",
        root=-1 if collective.root is None else collective.root,
        time_us=time_us,
        algbw=algbw,
        busbw=busbw,
        wrong=wrong if sweep.check else None,
        spread=max(calls) - min(calls),
        iterations=sweep.iterations,
    )


def _over_ranks(average: str, times: Sequence[float]) -> float:
    match average:
        case "rank 0":
            return times[0]
        case "min":
            return min(times)
        case "max":
            return max(times)
        case _:
            return statistics.fmean(times)


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


def note_failure(folder: Path, reason: str) -> None:
    """Keep the first reason only: later ones are mostly its consequences."""
    with contextlib.suppress(FileExistsError), (folder / FAILURE_FILE).open("x", encoding="utf-8") as file:
        file.write(reason)
