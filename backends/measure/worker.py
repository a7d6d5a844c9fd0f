"""The other side of `launch`, in a child process: one more for each rank, forked when torch is imported.

Rank 0 says each row at once; the first to fail leaves its reason in a folder, and the others are ended.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from arborcast.backends.errors import ExecutionError
from arborcast.backends.measure.job import FAILURE_FILE, Row, RunError, Sweep, note_failure
from arborcast.backends.measure.sweep import run_sweep
from arborcast.backends.tensors.torch_compat import FileStore, PrefixStore

GRACE_S = 0.2
"""So long after the first rank has failed all are looked at again: one that the others lost can be named."""


def rows_of(folder: Path, sweeps: Sequence[Sweep], timeout_s: float) -> Iterator[Row]:
    """The rows of all sweeps, as they come, in an empty folder; every rank has ended well when they end.

    Raises:
        RunError: a rank failed.
    """
    # Gloo looks up the host's name otherwise, which not every machine can resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    world = max(sweep.schedule.topology.ranks for sweep in sweeps)
    fork = multiprocessing.get_context("fork")
    heard, says = fork.Pipe(duplex=False)
    arguments = [(folder, sweeps, rank, world, timeout_s, says) for rank in range(world)]
    ranks = [fork.Process(target=_run_or_note, args=each) for each in arguments]
    try:
        for rank in ranks:
            rank.start()
        while (running := [it.sentinel for it in ranks if it.exitcode is None]) or heard.poll():
            if heard in wait([heard, *running]):
                yield heard.recv()
            elif any(it.exitcode for it in ranks):
                time.sleep(GRACE_S)
                _name_the_killed(folder, [it.exitcode or 0 for it in ranks])
                raise RunError((folder / FAILURE_FILE).read_text(encoding="utf-8"))
    finally:
        for rank in ranks:
            if rank.pid is not None:
                rank.kill()
                rank.join()


def _name_the_killed(folder: Path, codes: Sequence[int]) -> None:
    """A rank that was killed could not say so; the others only report that they lost it."""
    for rank, code in enumerate(codes):
        if code < 0:
            reason = f"rank {rank} was ended by signal {signal.Signals(-code).name}"
            (folder / FAILURE_FILE).write_text(reason, encoding="utf-8")


def _run_or_note(
    folder: Path,
    sweeps: Sequence[Sweep],
    rank: int,
    world: int,
    timeout_s: float,
    says: Connection[Row, Row],
) -> None:
    """One rank, from beginning to end."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        torch.set_num_threads(1)
        store = FileStore(str(folder / "store"), world)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for number, sweep in enumerate(sweeps):
            own, on_row = PrefixStore(str(number), store), None if rank else says.send
            run_sweep(sweep, own, timeout_s=timeout_s, on_row=on_row, groups=groups)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        note_failure(folder, reason if isinstance(error, ExecutionError) else f"rank {rank}: {reason}")
        raise


def _end_with_parent() -> None:
    """Nobody outlives the process that forked it, nor that one ours."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "ranks are forked"
    parent.join()
    os._exit(1)
