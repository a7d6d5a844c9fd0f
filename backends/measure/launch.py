"""Runs schedules on local processes, one per rank, and checks every element of what comes out.

This side never imports torch: it starts `measure.worker`, waits, and collects the rows that rank 0 says.
Whatever happens (an error in a rank, a deadline, Ctrl-C) no process is left.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from arborcast.backends.measure.job import Row, Sweep, count_for
from arborcast.backends.measure.nccl_tests import sweep_of
from arborcast.backends.options import Options
from arborcast.synth.errors import InputError, TimedOutError
from arborcast.synth.implicit_schedule import AnySchedule


class RunError(Exception):
    """A run ended early; the message is the reason of the first rank that failed."""


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
    """Run a schedule by torch's messages on one local process per rank of its topology, relays included.

    Sizes are rounded down to whole elements and blocks; where `pieces` is None, chunks are cut into as many
    as leave 1 MiB or more, up to 32. Other arguments as for `sweep_of`, errors as for it and `run_sweeps`.
    """
    sweep = sweep_of(
        schedule,
        size_bytes,
        dtype=dtype,
        op=op,
        iterations=iterations,
        warmup=warmup,
        average="max",
        via="messages",
        seed=seed,
        pieces=pieces,
        count=count_for,
    )
    return run_local(sweep, timeout_s=timeout_s)


def run_local(
    sweep: Sweep, *, on_row: Callable[[Row], None] = lambda row: None, timeout_s: float = 1800
) -> tuple[Row, ...]:
    """The rows of one sweep; see `run_sweeps`."""
    return run_sweeps([sweep], on_row=on_row, timeout_s=timeout_s)[0]


def run_sweeps(
    sweeps: Sequence[Sweep], *, on_row: Callable[[Row], None] = lambda row: None, timeout_s: float = 300
) -> tuple[tuple[Row, ...], ...]:
    """The rows of sweeps on the same local processes, one sweep after the other.

    There are as many processes as the largest topology has ranks; smaller ones use the first of them.
    Whatever happens (an error, Ctrl-C) no process is left.

    Args:
        sweeps: see `nccl_tests.sweep_of`.
        on_row: called with each row as it is there.
        timeout_s: for everything together, start-up included.

    Raises:
        InputError: torch is not installed, a variable of the environment breaks a rule, or blocks differ in
            size.
        RunError: a rank failed.
        TimedOutError: the time ran out.
    """
    see_what_runs_need()
    for sweep in sweeps:
        sweep.schedule.collective.check_is_even()
    if any(sweep.via == "group" for sweep in sweeps):
        Options.from_environment()  # refused here, and not by every rank
    rows: list[Row] = []

    def on_line(line: str) -> None:
        rows.append(Row(**json.loads(line)))
        on_row(rows[-1])

    with tempfile.TemporaryDirectory(prefix="arborcast-run-") as name:
        _run_worker(Path(name), tuple(sweeps), timeout_s, on_line)
    of_all = iter(rows)
    return tuple(tuple(islice(of_all, len(sweep.counts))) for sweep in sweeps)


def see_what_runs_need() -> None:
    """Refuse to begin where processes cannot be run.

    Raises:
        InputError: torch is not installed, or the system has no fork.
    """
    if importlib.util.find_spec("torch") is None:
        raise InputError("running a schedule needs torch; install it with: pip install 'arborcast[torch]'")
    if not hasattr(os, "fork"):
        raise InputError("running a schedule on local processes needs a system with fork (Linux, macOS)")


def _run_worker(
    folder: Path, sweeps: tuple[Sweep, ...], timeout_s: float, on_line: Callable[[str], None]
) -> None:
    """Have `measure.worker` do it in an empty folder; `on_line` each line that rank 0 says."""
    (folder / "sweeps.pickle").write_bytes(pickle.dumps((sweeps, timeout_s)))
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
            _listen(worker, reading, deadline, on_line)
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
    on_line: Callable[[str], None],
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
            on_line(line.decode())


def _end(worker: subprocess.Popen[bytes]) -> None:
    """End the worker and all its ranks, if any is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
