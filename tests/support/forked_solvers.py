"""Children of `Worker` that are forked from a process with all solvers, not programs that import them anew.

Their start, one to three seconds of a processor, is most of what small questions take. `tests/conftest.py`
has every test go this way, and `ranks.py` every rank, but for those that let what users get start by
`started_anew`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from arborcast.synth.chunks.solvers import solver_child
from arborcast.synth.collective import Collective

_ITS_MODULE: Any = solver_child
MODULE = "arborcast.synth.chunks.solvers.solver_process"
IMPORTED = (
    "arborcast.backends.schedules.synthesis",
    "arborcast.synth.chunks.encodings.registry",
    "highspy",
    "hypothesis",
    "pysat.solvers",
    "pytest",
    "z3",
)
_LONGEST = 1 << 20
"""Bytes of a request: an environment and some names."""


@functools.cache
def server() -> str:
    """The name of the socket at which this process's server takes requests; it ends with this process.

    There is none, and no name, where coverage is measured, which begins in each program.
    """
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        return ""
    name = f"arborcast-tests-{os.getpid()}"
    begun, ours = os.pipe()
    theirs, alive = os.pipe()
    subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, name, str(theirs), str(ours)],
        env=solver_child._environment(),
        pass_fds=[theirs, ours],
        start_new_session=True,
    )
    os.close(theirs)
    os.close(ours)
    Finalize(None, os.close, (alive,), exitpriority=0)
    assert os.read(begun, 1), "the server of solvers listens"
    os.close(begun)
    return name


def fork_solvers(name: str) -> None:
    """Have `Worker` ask the server of that name, if there is one."""
    if not name:
        return
    popen = functools.partial(ForkedSolver, name)
    _ITS_MODULE.subprocess = SimpleNamespace(DEVNULL=subprocess.DEVNULL, Popen=popen)


@contextmanager
def started_anew() -> Iterator[None]:
    """Have `Worker` start programs meanwhile, as it does for users."""
    forked = _ITS_MODULE.subprocess
    _ITS_MODULE.subprocess = subprocess
    try:
        yield
    finally:
        _ITS_MODULE.subprocess = forked


class ForkedSolver:
    """What `Worker` asks of `subprocess.Popen`."""

    def __init__(
        self,
        name: str,
        command: list[str],
        *,
        env: dict[str, str],
        stdout: IO[bytes],
        pass_fds: Sequence[int],
        **_: Any,
    ) -> None:
        assert command[2:4] == ["-m", MODULE]
        _descriptor, memory_bytes, _parent, *modules = command[4:]
        request = json.dumps([int(memory_bytes), modules, str(Path.cwd()), env]).encode()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
        self._server.connect(f"\0{name}")
        socket.send_fds(self._server, [request], [pass_fds[0], stdout.fileno()])
        self.pid = int(self._server.recv(32))
        self._status: int | None = None

    def poll(self) -> int | None:
        return self.wait() if self._status is not None or wait([self._server], 0) else None

    def wait(self) -> int:
        if self._status is None:
            self._status = int(self._server.recv(32) or -signal.SIGKILL)
            self._server.close()
        return self._status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _serve(name: str, alive: int, begun: int) -> None:
    """Fork solvers until the process that started this one is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen(64)
    os.write(begun, b".")
    os.close(begun)
    children: dict[int, tuple[int, socket.socket]] = {}
    if alive not in wait([listener, alive]):
        _prepare()
    while alive not in (ready := wait([listener, alive, *children])):
        for it in ready:
            if it is listener:
                client, _ = listener.accept()
                pid = _fork(name, client, [listener.fileno(), alive, *children])
                children[os.pidfd_open(pid)] = pid, client
            else:
                assert isinstance(it, int)
                pid, client = children.pop(it)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.close(it)
                with client:
                    _say(client, status)


def _prepare() -> None:
    """Load what small questions do: modules, and the machine code of kernels."""
    from arborcast import topologies
    from arborcast.backends.schedules.synthesis import tables
    from arborcast.synth.compile_kernels import warm_once
    from arborcast.synth.solve_options import SolveOptions

    for module in IMPORTED:
        importlib.import_module(module)
    warm_once()
    fabric = topologies.load("full:3")
    for kind in ("broadcast", "allreduce"):
        for _ in tables(fabric, Collective.on(fabric, kind), "auto", SolveOptions(cache=False)):
            pass
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "threads are not forked"
    gc.collect()
    gc.freeze()


def _say(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it is gone
        client.send(str(number).encode())


def _fork(name: str, client: socket.socket, inherited: Sequence[int]) -> int:
    request, descriptors, _, _ = socket.recv_fds(client, _LONGEST, 2)
    server = os.getpid()
    pid = os.fork()
    if not pid:
        try:
            for it in inherited:
                os.close(it)
            client.close()
            fork_solvers(name)  # who solves may ask for others
            _become(server, *json.loads(request), *descriptors)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    for it in descriptors:
        os.close(it)
    _say(client, pid)
    return pid


def _become(
    server: int,
    memory_bytes: int,
    modules: list[str],
    folder: str,
    env: dict[str, str],
    connection: int,
    output: int,
) -> None:
    """What the program does that `Worker` would have started."""
    from arborcast.synth.chunks.solvers import solver_process

    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = dict.fromkeys([*env["PYTHONPATH"].split(os.pathsep), *sys.path])
    os.dup2(output, 1)
    os.dup2(output, 2)
    solver_process.main(connection, memory_bytes, server, modules)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
