"""Children of `measure.launch` that are forked from a process with torch, not programs that import it.

Tests say `@pytest.mark.usefixtures("forked_workers")`. One of `tests/measure/test_nccl_tests.py` does not: it
interrupts the program that users get.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import IO, Any

import pytest

from arborcast.synth.chunks.solvers import solver_child
from tests.support.ranks import PROCESSES

_ITS_MODULE: Any = solver_child


def forks_workers(patch: pytest.MonkeyPatch) -> None:
    """Have children with torch be forked."""
    popen = _ITS_MODULE.subprocess.Popen

    def fork(command: list[str], **settings: Any) -> Any:
        with_torch = command[-1] == "arborcast.backends.measure.worker"
        return (ForkedWorker if with_torch else popen)(command, **settings)

    patch.setattr(_ITS_MODULE, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": fork}))


class ForkedWorker:
    """What `Worker` asks of `subprocess.Popen`."""

    def __init__(
        self, command: list[str], *, env: dict[str, str], stdout: IO[bytes], pass_fds: Sequence[int], **_: Any
    ) -> None:
        ends = [Connection(os.dup(it), readable=False) for it in (pass_fds[0], stdout.fileno())]
        self._process = PROCESSES.Process(target=_work, args=(*ends, env))
        self._process.start()
        for end in ends:
            end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        status = self.poll()
        assert status is not None
        return status

    def kill(self) -> None:
        self._process.kill()


def _work(connection: Connection[Any, Any], output: Connection[Any, Any], env: dict[str, str]) -> None:
    from arborcast.backends.measure import worker  # noqa: F401  (it is in this process already)
    from arborcast.synth.chunks.solvers import solver_process

    os.setsid()
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    os.environ.clear()
    os.environ.update(env)
    descriptor = os.dup(connection.fileno())
    connection.close()
    solver_process.main(descriptor, 0, os.getppid(), ())
