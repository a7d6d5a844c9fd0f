"""Workers of `measure.launch` that are forked from a process with torch, in place of programs that import it.

Tests say `@pytest.mark.usefixtures("forked_workers")`. One of `tests/measure/test_nccl_tests.py` does not: it
interrupts the program that users get.
"""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from tests.support.ranks import PROCESSES
from tests.support.waiting import until


def forks_workers(patch: pytest.MonkeyPatch) -> None:
    """Have `launch` fork its workers."""
    from arborcast.backends.measure import launch

    patch.setattr(launch, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": ForkedWorker}))


class ForkedWorker:
    """What `launch` asks of `subprocess.Popen`, for `python -m arborcast.backends.measure.worker`."""

    def __init__(
        self, command: list[str], *, env: dict[str, str], stdout: IO[bytes], pass_fds: tuple[int], **_: Any
    ) -> None:
        assert command[1:3] == ["-m", "arborcast.backends.measure.worker"]
        mouth = Connection(os.dup(pass_fds[0]), readable=False)
        self._process = PROCESSES.Process(target=_work, args=(command[3], mouth, stdout.name, env))
        self._process.start()
        mouth.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        until(self._leads_a_group)  # which can be ended

    def _leads_a_group(self) -> bool:
        try:
            return os.getpgid(self.pid) == self.pid
        except ProcessLookupError:
            return True

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("worker", timeout)
        return status


def _work(folder: str, mouth: Connection, log: str, env: dict[str, str]) -> None:
    from arborcast.backends.measure import worker

    with Path(log).open("ab") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.environ.clear()
    os.environ.update(env)
    os.setsid()
    pipe = os.dup(mouth.fileno())  # which the worker closes
    mouth.close()
    sys.exit(worker.main(Path(folder), pipe))
