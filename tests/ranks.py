"""Real processes for tests: one per rank, forked from a server that has imported torch once.

def sum_of_ranks(rank, size, group):          # at module level, so that a process can find it
    tensor = torch.tensor([rank])
    torch.distributed.all_reduce(tensor)
    return tensor.item()

assert run_ranks(4, sum_of_ranks) == [6, 6, 6, 6]
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["torch", "torch.distributed", "backends.torch_p2p", "backends.group.process_group"]
)


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
    group_timeout_s: float = 60,
    timeout_s: float = 120,
    may_fail: bool = False,
) -> list[Any]:
    """What `function(rank, size, *arguments)` returned on each rank.

    Args:
        size: number of ranks.
        function: of a module, not a local one.
        arguments: the same for all ranks.
        backend: what the default process group is made of; None for no group: the function then finds the
            path of an empty file store in the environment variable TEST_STORE.
        environ: set in every process before the group is made.
        group_timeout_s: of the default group.
        timeout_s: after which all processes are killed and the test fails.
        may_fail: whether a rank that raises or is killed gives a `Failure` instead of failing the test.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = {"TEST_STORE": f"{folder}/store"} | (environ or {})
        children, pipes = [], []
        for rank in range(size):
            ours, theirs = PROCESSES.Pipe()
            child = PROCESSES.Process(
                target=_main,
                args=(theirs, rank, size, function, arguments, backend, settings, group_timeout_s),
                daemon=True,
            )
            child.start()
            theirs.close()
            children.append(child)
            pipes.append(ours)
        try:
            results = _collect(pipes, timeout_s)
        finally:
            for child in children:
                child.kill()
                child.join()
    failed = {rank: result for rank, result in enumerate(results) if isinstance(result, Failure)}
    if failed and not may_fail:
        raise AssertionError("\n".join(f"rank {rank}: {f.error}: {f.message}" for rank, f in failed.items()))
    return results


@cache
def _compiled_kernels() -> str:
    """Where this process keeps them: with a fresh cache each test would compile them, for half a minute."""
    import synth.compiled  # noqa: F401  (sets the variable)

    return os.environ["NUMBA_CACHE_DIR"]


def _collect(pipes: list[Connection], timeout_s: float) -> list[Any]:
    results: list[Any] = [Failure("timeout", f"no answer within {timeout_s} s")] * len(pipes)
    end = time.monotonic() + timeout_s
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    while open_pipes and (left := end - time.monotonic()) > 0:
        for pipe in wait(list(open_pipes), left):
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                results[rank] = pipe.recv()
            except EOFError:
                results[rank] = Failure("killed", "ended without an answer")
    return results


def _main(
    pipe: Connection,
    rank: int,
    size: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    backend: str | None,
    settings: dict[str, str],
    group_timeout_s: float,
) -> None:
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.update(settings)
    torch.set_num_threads(1)
    try:
        if backend is not None:
            if "synth" in backend:
                import backends.group.register  # noqa: F401
            store = dist.FileStore(settings["TEST_STORE"], size)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=group_timeout_s)
            )
        result = function(rank, size, *arguments)
        pipe.send(result)
    except BaseException as error:
        traceback.print_exc()
        pipe.send(Failure(type(error).__name__, str(error)))
        return
    if backend is not None and dist.is_initialized():
        dist.destroy_process_group()


def store_path() -> Path:
    """Where the ranks of a test without a group find their file store."""
    return Path(os.environ["TEST_STORE"])
