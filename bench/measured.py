"""What benches share: whole processes measured from outside, and the circumstances of a measurement.

Both sides of a comparison run through `run`, so that start-up and every child process count for both.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Event, Timer
from typing import Any

LOAD_AT_THE_START = os.getloadavg()[0]
"""Processes that wanted to run before this one measured; its own are in the load at the end."""


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


def circumstances(*packages: str) -> dict[str, Any]:
    """The command line, the machine and the versions of some packages, for the head of a results file."""
    script, *arguments = sys.argv
    name = _name(script)
    by = ["python", f"bench/{name}"] if name.endswith(".py") and name != "__main__.py" else ["synth"]
    return {
        "command": " ".join([*by, *map(_name, arguments)]),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "load_at_the_start": LOAD_AT_THE_START,
            "load_at_the_end": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
    }


def _name(argument: str) -> str:
    """Where things lie on this machine says nothing about the figures."""
    return argument.rpartition("/")[2]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
