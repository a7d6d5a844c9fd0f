"""A whole process measured from outside: the clock, the CPU time and peak memory of it and its children.

Both sides of a comparison run through `run`, so that start-up and every child process count for both.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Timer


@dataclass(frozen=True, slots=True)
class Finished:
    """How a process ended.

    Attributes:
        status: its exit status; negative where a signal ended it.
        output: its standard output, up to the end or the time limit.
        errors: its standard error.
        seconds: from its start to its end by the clock.
        cpu_seconds: of it and of all its children that it waited for.
        peak_MB: the most memory that one of those processes held.
        timed_out: whether it was ended at the time limit.
    """

    status: int
    output: str
    errors: str
    seconds: float
    cpu_seconds: float
    peak_MB: float  # noqa: N815 - a unit
    timed_out: bool


def run(
    command: Sequence[str],
    limit_s: float,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Run a command to its end or to the time limit, at which it is killed with all its children.

    Args:
        command: the program and its arguments.
        limit_s: seconds by the clock.
        folder: where it runs; None for here.
        environment: added to that of this process.
    """
    timed_out = Event()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # so that its children end with it
        )

        def stop() -> None:
            timed_out.set()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = Timer(limit_s, stop)
        timer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            stop()
            raise
        finally:
            timer.cancel()
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        return Finished(
            process.returncode,
            output.read().decode(errors="replace"),
            errors.read().decode(errors="replace"),
            seconds,
            usage.ru_utime + usage.ru_stime,
            usage.ru_maxrss / 1e3,  # Linux counts in kB
            timed_out.is_set(),
        )
