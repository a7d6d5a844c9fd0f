"""One process per rank of an emulation, inside the namespace of its rank.

They are forked from a server that has imported torch once, end with this process however it goes, and the
first that fails ends them all. What they share besides the network is a file without a name.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from arborcast.bench.emulation.machine import EmulationError, enter, real_time
from arborcast.bench.emulation.network import Emulation
from arborcast.bench.harness.processes import collect, started

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "arborcast.backends.executors.torch_p2p",
        "arborcast.backends.group.process_group",
    ]
)
_PR_SET_PDEATHSIG = 1


def run_inside(
    emulation: Emulation,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 600,
) -> list[Any]:
    """What `function(rank, address, store, *arguments)` returns on each rank.

    Args:
        emulation: the network.
        function: of a module, not a local one; `address` is the rank's own, `store` a path for a file store
            which all ranks share.
        arguments: the same for all ranks.
        timeout_s: after which all processes are ended.

    Raises:
        EmulationError: a rank failed, or the time ran out; a note has what the rank's traceback was.
    """
    plan = emulation.plan
    environ = {"ARBORCAST_START": "wait"} | ({} if emulation.has_cables else {"GLOO_SOCKET_IFNAME": "lo"})
    with _shared_file() as store:
        values = [
            (emulation.path(rank), environ, rank, emulation.address(rank), store, function, arguments)
            for rank in range(plan.topology.ranks)
        ]
        with started(_PROCESSES, _main, values) as (_, pipes):
            return collect(pipes, timeout_s, EmulationError)


@contextmanager
def _shared_file() -> Iterator[str]:
    """The path of a file that is in no folder, so that none is left if this process is killed."""
    descriptor = os.memfd_create("arborcast-store", os.MFD_CLOEXEC)
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _main(
    pipe: Connection,
    namespace: str,
    environ: Mapping[str, str],
    rank: int,
    address: str,
    store: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    _end_with(pipe)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the starter ends us
    answer: tuple[str | None, Any]
    try:
        enter(namespace)
        os.environ |= environ
        import torch

        torch.set_num_threads(1)
        with real_time():
            answer = None, function(rank, address, store, *arguments)
    except BaseException as error:
        answer = " ".join(f"{type(error).__name__}: {error}".split()), traceback.format_exc()
    pipe.send(answer)
    # What a group still has open would otherwise be ended in an order that depends on the garbage collector.
    signal.pause()


def _end_with(pipe: Connection) -> None:
    """Kill this process when its starter goes, which never sends anything, or the server that forked it.

    The server alone would not do: it stays for as long as any of its children lives.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        try:
            pipe.poll(None)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
