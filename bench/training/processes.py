"""One process per rank on this machine, for the questions that need a training and no special links.

They are forked from a server that has imported torch once; the first that fails ends them all.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from arborcast.bench.answers import collect
from arborcast.bench.emulation.machine import real_time

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch", "torch.distributed"])


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 600,
    before_others: bool = False,
) -> list[Any]:
    """What `function(rank, *arguments)` returned on each rank, inside a default group of gloo.

    Args:
        size: number of ranks.
        function: of a module, not a local one.
        arguments: the same for all ranks.
        timeout_s: after which all processes are ended.
        before_others: run before all ordinary work of the machine, where that is allowed: for ranks that
            mostly sleep, and whose times are the point.

    Raises:
        RuntimeError: a rank failed, or the time ran out.
    """
    pipes: list[Connection] = []
    children = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(size):
                ours, theirs = _PROCESSES.Pipe()
                values = (
                    theirs,
                    rank,
                    size,
                    f"{folder}/store",
                    timeout_s,
                    before_others,
                    function,
                    arguments,
                )
                child = _PROCESSES.Process(target=_main, args=values, daemon=True)
                child.start()
                theirs.close()
                pipes.append(ours)
                children.append(child)
            return collect(pipes, timeout_s, _failure)
        finally:
            for child in children:
                child.kill()
                child.join()


def _failure(words: str, more: str | None) -> RuntimeError:
    return RuntimeError(words if more is None else f"{words}\n{more}")


def _main(
    pipe: Connection,
    rank: int,
    size: int,
    store: str,
    timeout_s: float,
    before_others: bool,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    from arborcast.backends.tensors.torch_compat import FileStore

    torch.set_num_threads(1)
    answer: tuple[str | None, Any]
    try:
        dist.init_process_group(
            "gloo",
            store=FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        with real_time() if before_others else nullcontext():
            answer = None, function(rank, *arguments)
    except Exception as error:
        answer = " ".join(f"{type(error).__name__}: {error}".split()), traceback.format_exc()
    pipe.send(answer)
    pipe.poll(None)  # until the starter ends us: what a group still has open must not end before the others
