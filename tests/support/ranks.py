"""Real processes for tests: one per rank, forked from one that has imported torch and the tests' modules.

def sum_of_ranks(rank, size, group):          # at module level, so that a process can find it
    tensor = torch.tensor([rank])
    torch.distributed.all_reduce(tensor)
    return tensor.item()

assert run_ranks(4, sum_of_ranks) == [6, 6, 6, 6]

A module whose functions make optimizers says `RANKS_IMPORT = ("torch._dynamo",)`: torch imports that with the
first optimizer, for three seconds, which each rank would spend anew; with "torch.export._trace", too, where
they trace models.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from arborcast.bench.harness.processes import started
from tests.support import forked_solvers as solvers

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "arborcast.backends.executors.torch_p2p",
        "arborcast.backends.group.process_group",
    ]
)
FORKS = multiprocessing.get_context("fork")
END_S = 20.0
GROUP_TIMEOUT_S = 200.0
"""Of groups unless a test says otherwise: on a busy machine, schedules of many collectives take a minute."""
LIMIT_S = 250.0
"""After which ranks are killed unless a test says otherwise."""


@dataclass(frozen=True)
class Failure:
    """How a rank ended that returned nothing: the class and the message of its error, or "signal 9"."""

    error: str
    message: str = ""


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    backend: str | None = "gloo",
    environ: dict[str, str] | None = None,
    group_timeout_s: float = GROUP_TIMEOUT_S,
    timeout_s: float = LIMIT_S,
    may_fail: bool = False,
) -> list[Any]:
    """What `function(rank, size, *arguments)` returned on each rank.

    Args:
        size: number of ranks.
        function: of a module, not a local one.
        arguments: the same for all ranks.
        backend: what the default process group is made of; None for no group: the function then finds the
            path of an empty file store in the environment variable TEST_STORE.
        environ: set in every process before the group is made; unless it says otherwise, groups wait for
            their schedules, so that caches make no difference.
        group_timeout_s: of the default group.
        timeout_s: after which all processes are killed and the test fails.
        may_fail: whether a rank that raises or is killed gives a `Failure` instead of failing the test.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = {"TEST_STORE": f"{folder}/store", "ARBORCAST_START": "wait"} | (environ or {})
        launch = _Launch(size, function, arguments, backend, settings, group_timeout_s, timeout_s)
        results = _parent().ask(launch)
    failed = {rank: result for rank, result in enumerate(results) if isinstance(result, Failure)}
    if failed and not may_fail:
        raise AssertionError("\n".join(f"rank {rank}: {f.error}: {f.message}" for rank, f in failed.items()))
    return results


@dataclass(frozen=True)
class _Launch:
    """What a parent of ranks is asked for: the arguments of `run_ranks`."""

    size: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    backend: str | None
    settings: dict[str, str]
    group_timeout_s: float
    timeout_s: float


class _Parent:
    """A process that imports a module of tests when the first ranks are for it, and forks ranks.

    They need not import it each, and what two modules import is imported once.
    """

    def __init__(self) -> None:
        self._pipe, theirs = PROCESSES.Pipe()
        arguments = theirs, solvers.server()
        self._process = PROCESSES.Process(target=_serve, args=arguments)  # no daemon: it has children
        self._process.start()
        theirs.close()
        self._at_exit = Finalize(self, self.end, exitpriority=10)  # before multiprocessing waits for it

    def ask(self, launch: _Launch) -> list[Any]:
        try:
            self._pipe.send((launch.function.__module__, launch))
            results: list[Any] = self._pipe.recv()
        except BaseException:  # Ctrl-C, a test that takes too long, a parent that died
            self.end()
            raise
        return results

    def end(self) -> None:
        """With all of its ranks."""
        self._at_exit.cancel()
        _parents.clear()
        self._pipe.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


_parents: list[_Parent] = []
"""None or one."""


def _parent() -> _Parent:
    if not _parents:
        _parents.append(_Parent())
    return _parents[-1]


def _serve(requests: Connection, server: str) -> None:
    solvers.fork_solvers(server)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks closes the pipe
    imported = {"__main__"}
    _prepare()
    while True:
        try:
            module, launch = requests.recv()
        except EOFError:
            return
        if module not in imported:
            imported.add(module)
            for name in getattr(importlib.import_module(module), "RANKS_IMPORT", ()):
                importlib.import_module(name)
            gc.collect()
            gc.freeze()  # what is collected in ranks must not touch, and so copy, all that was imported
        results = _fork(launch, requests)
        if results is not None:
            requests.send(results)


def _prepare() -> None:
    """Here what each rank would do anew: modules that a group imports late, and the shapes of its tables."""
    import encodings.idna  # noqa: F401

    import arborcast.synth.certification
    import arborcast.synth.faults.repair  # noqa: F401
    from arborcast.backends.schedules.schedule_table import ScheduleTable, TableEntry
    from tests.support.drawn_schedules import ring_allreduce

    schedule = ring_allreduce(2)
    table = ScheduleTable(schedule.collective, (TableEntry(0, schedule),))
    assert ScheduleTable.from_bytes(table.to_bytes(), "drawn") == table


def _fork(launch: _Launch, requests: Connection) -> list[Any] | None:
    """What the ranks returned; None where nobody waits for it any more."""
    of_ranks = [(requests, rank, launch) for rank in range(launch.size)]
    with started(FORKS, _main, of_ranks) as (_, pipes):
        return _collect(pipes, launch.timeout_s, requests)


def _collect(pipes: list[Connection], timeout_s: float, requests: Connection) -> list[Any] | None:
    results: list[Any] = [Failure("timeout", f"no answer within {timeout_s} s")] * len(pipes)
    end = time.monotonic() + timeout_s
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    while open_pipes and (left := end - time.monotonic()) > 0:
        for pipe in wait([*open_pipes, requests], left):
            if pipe is requests:
                return None
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                results[rank] = pipe.recv()
            except EOFError:
                results[rank] = Failure("killed", "ended without an answer")
    return results


def _main(pipe: Connection, requests: Connection, rank: int, launch: _Launch) -> None:
    requests.close()
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.update(launch.settings)
    torch.set_num_threads(1)
    try:
        if launch.backend is not None:
            if "synth" in launch.backend:
                import arborcast.torch_backend  # noqa: F401
            store = dist.FileStore(launch.settings["TEST_STORE"], launch.size)
            timeout = timedelta(seconds=launch.group_timeout_s)
            dist.init_process_group(
                launch.backend, store=store, rank=rank, world_size=launch.size, timeout=timeout
            )
            _meet(store, launch.size, timeout)
        result = launch.function(rank, launch.size, *launch.arguments)
        pipe.send(result)
    except BaseException as error:
        traceback.print_exc()
        pipe.send(Failure(type(error).__name__, str(error)))
        return
    if launch.backend is not None and dist.is_initialized():
        dist.destroy_process_group()


def _meet(store: Any, size: int, timeout: timedelta) -> None:
    """A rank that ends while another still connects to it would fail that one, too."""
    if store.add("ranks that are connected", 1) == size:
        store.set("all are connected", "")
    store.wait(["all are connected"], timeout)


@contextmanager
def rendezvous(size: int) -> Iterator[dict[str, str]]:
    """The environment in which ranks find each other as under torchrun; only RANK is not in it.

    The store is of this process, as it is of torchrun's agent, at a port that the system picks and that stays
    taken meanwhile. Ranks that join several groups, one after the other, need one for each.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def threads_of_gloo() -> int:
    """How many this process has: one that is left when the interpreter ends can abort the process."""
    names = [(it / "comm").read_text() for it in Path("/proc/self/task").iterdir()]
    return sum("gloo" in name for name in names)


def store_path() -> Path:
    """Where the ranks of a test without a group find their file store."""
    return Path(os.environ["TEST_STORE"])
