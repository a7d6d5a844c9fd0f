"""Real processes for tests: one per rank, forked from one that has imported torch and the tests' modules.

def sum_of_ranks(rank, size, group):          # at module level, so that a process can find it
    tensor = torch.tensor([rank])
    torch.distributed.all_reduce(tensor)
    return tensor.item()

assert run_ranks(4, sum_of_ranks) == [6, 6, 6, 6]

Tests that need no start of their own share one: `StandingRanks` keep their group from function to function.

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
from contextlib import ExitStack, contextmanager, suppress
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
QUICK = {"ARBORCAST_TOPOLOGY": "full:3", "ARBORCAST_METHOD": "trees", "ARBORCAST_DEADLINE": "100"}
"""Of three ranks whose schedules are quick to find."""
END_S = 20.0
GROUP_TIMEOUT_S = 200.0
"""Of groups unless a test says otherwise: on a busy machine, schedules of many collectives take a minute."""
STANDING = 3
"""So many sets of ranks stay at a time."""
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
    launch = _Launch(size, function, arguments, backend, environ or {}, group_timeout_s, timeout_s)
    return _results(launch, may_fail=may_fail)


class StandingRanks:
    """Ranks that start with the first function that they are given, and take others in the same group.

    One that raises ends them all, and the next function finds new ones, as a function of another module does.
    What a function changes in its process or in the group, others see.

    Args:
        size: number of ranks.
        backend: as for `run_ranks`; so is the next.
        environ: set in every process before the group is made.
    """

    def __init__(self, size: int, *, backend: str = "synth", environ: dict[str, str] | None = None) -> None:
        self._size, self._backend, self._environ = size, backend, environ or {}

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(rank, size, *arguments)` returned on each rank."""
        given = self._size, function, arguments, self._backend, self._environ
        return _results(_Launch(*given, GROUP_TIMEOUT_S, LIMIT_S, stays=True))

    def check(self, body: Callable[[int, int], None]) -> Callable[[], None]:
        """The test that a function goes well on all ranks."""

        def test() -> None:
            self(test)

        test.__module__, test.__qualname__ = body.__module__, body.__qualname__  # by which it is sent
        test.__name__, test.__doc__ = body.__name__, body.__doc__
        test.body = body  # type: ignore[attr-defined]
        return test


def _results(launch: _Launch, *, may_fail: bool = False) -> list[Any]:
    results = _parent().ask(launch)
    failed = {rank: result for rank, result in enumerate(results) if isinstance(result, Failure)}
    if failed and not may_fail:
        raise AssertionError("\n".join(f"rank {rank}: {f.error}: {f.message}" for rank, f in failed.items()))
    return results


@dataclass(frozen=True)
class _Launch:
    """What a parent of ranks is asked for: the arguments of `run_ranks`; whether they are asked for more."""

    size: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    backend: str | None
    environ: dict[str, str]
    group_timeout_s: float
    timeout_s: float
    stays: bool = False

    def may_follow(self, other: _Launch) -> bool:
        """Whether ranks that were started for the other one will do."""
        mine, its = (
            (it.size, it.function.__module__, it.backend, it.environ, it.group_timeout_s)
            for it in (self, other)
        )
        return mine == its


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
    standing: list[_Ranks] = []
    _prepare()
    while True:
        try:
            module, launch = requests.recv()
        except EOFError:
            break
        if module not in imported:
            imported.add(module)
            for name in getattr(importlib.import_module(module), "RANKS_IMPORT", ()):
                importlib.import_module(name)
            gc.collect()
            gc.freeze()  # what is collected in ranks must not touch, and so copy, all that was imported
        results = _answer(launch, requests, standing)
        if results is not None:
            requests.send(results)
    for ranks in standing:
        ranks.end()


def _answer(launch: _Launch, requests: Connection, standing: list[_Ranks]) -> list[Any] | None:
    """What the ranks returned; None where nobody waits for it any more.

    Args:
        launch: what they are to call.
        requests: what ends when nobody waits.
        standing: those that stay, all for one module; the one that was asked last is the last.
    """
    ranks = next((it for it in standing if launch.stays and launch.may_follow(it.launch)), None)
    if ranks is not None:
        standing.remove(ranks)
        ranks.give(launch)
    else:
        its_module = launch.function.__module__
        are_others = standing and standing[0].launch.function.__module__ != its_module
        while standing and (are_others or len(standing) == STANDING):
            standing.pop(0).end()
        ranks = _Ranks(launch, requests)
    results = _collect(ranks.pipes, launch.timeout_s, requests)
    if launch.stays and results is not None and not any(isinstance(it, Failure) for it in results):
        standing.append(ranks)
    else:
        ranks.end()
    return results


def _prepare() -> None:
    """Here what each rank would do anew: modules that a group imports late, and the shapes of its tables."""
    import encodings.idna  # noqa: F401

    import arborcast.backends.executors.torch_p2p
    import arborcast.backends.group.making
    import arborcast.synth.certification
    import arborcast.synth.faults.repair  # noqa: F401
    from arborcast.backends.schedules.schedule_table import ScheduleTable, TableEntry
    from tests.support.drawn_schedules import ring_allreduce

    schedule = ring_allreduce(2)
    table = ScheduleTable(schedule.collective, (TableEntry(0, schedule),))
    assert ScheduleTable.from_bytes(table.to_bytes(), "drawn") == table


class _Ranks:
    """The processes of one launch, from now on until `end`."""

    def __init__(self, launch: _Launch, requests: Connection) -> None:
        self.launch = launch
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            settings = {"TEST_STORE": f"{folder}/store", "ARBORCAST_START": "wait"} | launch.environ
            of_ranks = [(requests, rank, launch, settings) for rank in range(launch.size)]
            _, self.pipes = stack.enter_context(started(FORKS, _main, of_ranks))
            self.end = stack.pop_all().close

    def give(self, launch: _Launch) -> None:
        """Have ranks that stay call another function."""
        for pipe in self.pipes:
            with suppress(OSError):  # whose rank has ended, which is found where its answer is read
                pipe.send((launch.function, launch.arguments))


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


def _main(
    pipe: Connection, requests: Connection, rank: int, launch: _Launch, settings: dict[str, str]
) -> None:
    requests.close()
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.update(settings)
    torch.set_num_threads(1)
    function, arguments = launch.function, launch.arguments
    try:
        if launch.backend is not None:
            if "synth" in launch.backend:
                import arborcast.torch_backend  # noqa: F401
            store = dist.FileStore(settings["TEST_STORE"], launch.size)
            timeout = timedelta(seconds=launch.group_timeout_s)
            dist.init_process_group(
                launch.backend, store=store, rank=rank, world_size=launch.size, timeout=timeout
            )
            _meet(store, launch.size, timeout)
        while True:
            function = getattr(function, "body", function)  # of a test that `StandingRanks.check` made
            pipe.send(function(rank, launch.size, *arguments))
            if not launch.stays:
                break
            try:
                function, arguments = pipe.recv()
            except EOFError:
                return
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
    count = 0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
            count += "gloo" in (thread / "comm").read_text()
    return count


def store_path() -> Path:
    """Where the ranks of a test without a group find their file store."""
    return Path(os.environ["TEST_STORE"])
