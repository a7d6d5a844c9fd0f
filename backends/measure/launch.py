"""Runs schedules on local processes, one per rank, and checks every element of what comes out.

This side never imports torch: it starts `backends.measure.worker`, waits, and turns what the ranks answered
into the rows that nccl-tests prints. Whatever happens (an error in a rank, a deadline, Ctrl-C) no process is
left.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from arborcast.backends.lowering.layout import blocks_in
from arborcast.backends.lowering.reduction import Reduction
from arborcast.backends.measure.job import ITEM_BYTES, Answer, Job, Sweep, count_for
from arborcast.synth.collective import bandwidths
from arborcast.synth.errors import InputError, TimedOutError
from arborcast.synth.implicit_schedule import AnySchedule

NCCL_TYPES = {"float32": "float", "float64": "double"}
"""What nccl-tests calls a type, where that is not our name of it."""


class RunError(Exception):
    """A run ended early; the message is the reason of the first rank that failed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of results, with the meanings of nccl-tests.

    Attributes:
        bytes: of the whole buffer.
        count: elements that each rank gives, or of one block where the buffer is one block per rank.
        dtype: type of the elements.
        redop: sum, avg, min, max or prod; none where nothing is reduced.
        root: -1 where there is none.
        time_us: median over the runs of the time of the slowest rank.
        algbw: GB/s, bytes over time.
        busbw: GB/s, algbw times the factor of the collective.
        wrong: elements that differ from the reference, over all ranks and runs.
        correct: whether none does.
        reference: `torch` where compared with torch's own collective, `definition` where torch has none.
        spread: (slowest - fastest run) / median.
    """

    bytes: int
    count: int
    dtype: str
    redop: str
    root: int
    time_us: float
    algbw: float
    busbw: float
    wrong: int
    correct: bool
    reference: str
    spread: float

    def to_document(self) -> dict[str, int | float | str | bool]:
        """For JSON."""
        return asdict(self)


def run_schedule(
    schedule: AnySchedule,
    *,
    size_bytes: Sequence[int] = (16 << 20,),
    dtype: str = "float32",
    op: str = "sum",
    iterations: int = 5,
    warmup: int = 1,
    timeout_s: float = 300,
    seed: int = 0,
    pieces: int | None = None,
) -> tuple[Row, ...]:
    """Run a schedule on one local process per rank of its topology, relays included.

    Args:
        schedule: a correct one, in either form.
        size_bytes: of the whole buffer, as algbw counts it; rounded down to whole elements and blocks.
        dtype: float32, float64, bfloat16 or int64.
        op: sum, avg, min, max or product; ignored where nothing is reduced.
        iterations: timed runs of each size.
        warmup: runs of each size before those; checked as well.
        timeout_s: for everything together, start-up included.
        seed: of the data.
        pieces: into how many pieces each chunk is cut; where None as many as leave 1 MiB or more, up to 32.

    Raises:
        InputError: an unknown type or operator, a negative size or number of runs, or torch is not installed.
        RunError: a rank failed.
        TimedOutError: the time ran out.
    """
    if dtype not in ITEM_BYTES:
        raise InputError(f"type {dtype}: must be one of {', '.join(ITEM_BYTES)}")
    if iterations < 1 or warmup < 0:
        raise InputError(f"iterations must be at least 1 and warmup 0, got {iterations} and {warmup}")
    if pieces is not None and pieces < 1:
        raise InputError(f"pieces: must be at least 1, got {pieces}")
    for size in size_bytes:
        if size < 0:
            raise InputError(f"size: must be at least 0 bytes, got {size}")
    counts = tuple(count_for(schedule, size, dtype) for size in size_bytes)
    job = Job(schedule, counts, dtype, Reduction.of(op), iterations, warmup, seed, pieces)
    return run_jobs([job], timeout_s=timeout_s)[0]


def run_jobs(jobs: Sequence[Job], *, timeout_s: float = 300) -> tuple[tuple[Row, ...], ...]:
    """Run several jobs on the same processes, one after the other; the rows of each.

    There are as many processes as the largest topology has ranks; smaller ones use the first of them.
    Errors as for `run_schedule`.
    """
    see_what_runs_need()
    with tempfile.TemporaryDirectory(prefix="arborcast-run-") as name:
        folder = Path(name)
        run_worker(folder, tuple(jobs), timeout_s)
        world = max(job.schedule.topology.ranks for job in jobs)
        # What the ranks wrote is as trustworthy as the ranks, which run our own code.
        answers: list[list[list[Answer]]] = [
            pickle.loads((folder / f"rank-{rank}.pickle").read_bytes()) for rank in range(world)
        ]
    return tuple(
        tuple(
            _row(job, count, [answers[rank][index][case] for rank in range(job.schedule.topology.ranks)])
            for case, count in enumerate(job.counts)
        )
        for index, job in enumerate(jobs)
    )


def format_table(rows: Iterable[Row]) -> list[str]:
    """Lines with the columns of nccl-tests."""
    header = ("size(B)", "count", "type", "redop", "root", "time(us)", "algbw", "busbw", "#wrong")
    widths = (12, 12, 8, 6, 6, 10, 8, 8, 8)
    lines = [
        (
            str(row.bytes),
            str(row.count),
            NCCL_TYPES.get(row.dtype, row.dtype),
            row.redop,
            str(row.root),
            f"{row.time_us:.1f}",
            f"{row.algbw:.2f}",
            f"{row.busbw:.2f}",
            str(row.wrong),
        )
        for row in rows
    ]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in (header, *lines)
    ]


def see_what_runs_need() -> None:
    """Refuse to begin where processes cannot be run.

    Raises:
        InputError: torch is not installed, or the system has no fork.
    """
    if importlib.util.find_spec("torch") is None:
        raise InputError("running a schedule needs torch; install it with: pip install 'arborcast[torch]'")
    if not hasattr(os, "fork"):
        raise InputError("running a schedule on local processes needs a system with fork (Linux, macOS)")


def run_worker(
    folder: Path,
    work: tuple[Job, ...] | Sweep,
    timeout_s: float,
    hear: Callable[[str], None] = lambda line: None,
) -> None:
    """Have `backends.measure.worker` do something in a folder, and return when all its ranks have ended well.

    Args:
        folder: empty; what ranks answer lies in it afterwards.
        work: what to do.
        timeout_s: for everything together, start-up included.
        hear: called with each line that rank 0 says, as it comes. Whatever it raises ends all ranks.

    Raises:
        RunError: a rank failed.
        TimedOutError: the time ran out.
    """
    (folder / "jobs.pickle").write_bytes(pickle.dumps((work, timeout_s)))
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    # Gloo looks up the host's name otherwise, which not every machine can resolve.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    log = folder / "log.txt"
    deadline = time.monotonic() + timeout_s
    with _pipe() as (reading, writing), log.open("wb") as output:
        worker = subprocess.Popen(
            [sys.executable, "-m", "arborcast.backends.measure.worker", str(folder), str(writing.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(writing.fileno(),),
            start_new_session=True,  # one group to end, and Ctrl-C comes to us alone
        )
        try:
            writing.close()
            _listen(worker, reading, deadline, hear)
            status = worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as late:
            raise TimedOutError(f"run: not finished after {timeout_s:g} s") from late
        finally:
            _end(worker)
    if status:
        failure = folder / "failure.txt"
        if failure.exists():
            raise RunError(failure.read_text(encoding="utf-8"))
        tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise RunError(f"the worker ended with status {status}: {' '.join(tail) or 'without a word'}")


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as out_of, os.fdopen(writing, "wb", buffering=0) as into:
        yield out_of, into


def _listen(
    worker: subprocess.Popen[bytes],
    reading: BinaryIO,
    deadline: float,
    hear: Callable[[str], None],
    *,
    poll_s: float = 0.5,
) -> None:
    """Pass on what is said until nobody is left who could say more, or the time is over."""
    rest = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([reading], [], [], min(left, poll_s))[0]:
            if worker.poll() is not None:  # ranks that it left behind may hold the pipe open
                return
            continue
        data = os.read(reading.fileno(), 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            hear(line.decode())


def _end(worker: subprocess.Popen[bytes]) -> None:
    """End the worker and all its ranks, if any is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def _row(job: Job, count: int, answers: Sequence[Answer]) -> Row:
    collective = job.schedule.collective
    slowest = [max(times) for times in zip(*(answer.times_s for answer in answers), strict=True)]
    time_us = statistics.median(slowest) * 1e6
    size = count * ITEM_BYTES[job.dtype]
    algbw, busbw = bandwidths(collective.kind, len(collective.ranks), size, time_us)
    wrong = sum(answer.wrong for answer in answers)
    return Row(
        bytes=size,
        count=count // blocks_in(collective),
        dtype=job.dtype,
        redop=job.reduction.nccl_name if collective.kind.reduces else "none",
        root=-1 if collective.root is None else collective.root,
        time_us=time_us,
        algbw=algbw,
        busbw=busbw,
        wrong=wrong,
        correct=not wrong,
        reference=answers[0].reference,
        spread=(max(slowest) - min(slowest)) * 1e6 / time_us,
    )
