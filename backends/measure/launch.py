"""Runs schedules on local processes, one per rank, and checks every element of what comes out.

This side never imports torch: it has a child process (`synth.chunks.solvers.solver_child`) do it, which
answers a row at a time. Whatever happens (an error in a rank, a deadline, Ctrl-C) no process is left.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from arborcast.backends.measure.job import Row, RunError, Sweep, count_for
from arborcast.backends.measure.nccl_tests import sweep_of
from arborcast.backends.options import Options
from arborcast.synth.chunks.solvers.solver_child import Worker, WorkerDiedError, next_answer, wait
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InputError, TimedOutError
from arborcast.synth.implicit_schedule import AnySchedule


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

    Examples:
        >>> schedule = synth.solve(topologies.load("full:2"), "allreduce")
        >>> (row,) = backends.run_schedule(schedule, size_bytes=[4096], iterations=1)
        >>> row.count, row.wrong  # elements, and how many of them were not right
        (1024, 0)
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
    deadline = Deadline.after(timeout_s)
    with tempfile.TemporaryDirectory(prefix="arborcast-run-", ignore_cleanup_errors=True) as folder:
        worker = Worker(memory_bytes=None, modules=(f"{__package__}.worker",))
        asked: tuple[Any, ...] = (rows_of, Path(folder), tuple(sweeps), timeout_s)
        try:
            while True:
                worker.start("run", next_answer, *asked)
                if not wait([worker], deadline):
                    raise TimedOutError(f"run: not finished after {timeout_s:g} s")
                row = worker.result()
                if row is None:
                    break
                rows.append(row)
                on_row(row)
                asked = ()
        except WorkerDiedError as error:
            raise RunError(str(error)) from error
        finally:
            worker.kill()
    of_all = iter(rows)
    return tuple(tuple(islice(of_all, len(sweep.counts))) for sweep in sweeps)


def rows_of(*asked: Any) -> Iterator[Row]:
    """In the child: `worker.rows_of`, which comes with torch."""
    from arborcast.backends.measure import worker

    yield from worker.rows_of(*asked)


def see_what_runs_need() -> None:
    """Refuse to begin where processes cannot be run.

    Raises:
        InputError: torch is not installed, or the system has no fork.
    """
    if importlib.util.find_spec("torch") is None:
        raise InputError("running a schedule needs torch; install it with: pip install 'arborcast[torch]'")
    if not hasattr(os, "fork"):
        raise InputError("running a schedule on local processes needs a system with fork (Linux, macOS)")
