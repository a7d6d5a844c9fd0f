"""The other side of `launch`: `python -m arborcast.backends.measure.worker FOLDER PIPE` runs its sweeps.

It imports torch once and then forks one process per rank. Rank 0 says each row at once; the first to fail
leaves its reason in the folder, and the others are ended. Nobody outlives the process that launched us.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

from arborcast.backends.errors import ExecutionError
from arborcast.backends.measure.job import Row, Sweep
from arborcast.backends.measure.sweep import run_sweep
from arborcast.backends.tensors.torch_compat import FileStore, PrefixStore

SWEEPS_FILE = "sweeps.pickle"
FAILURE_FILE = "failure.txt"


def main(folder: Path, mouth: int, *, poll_s: float = 0.5, grace_s: float = 0.2) -> int:
    """Run the sweeps of a folder; 0 when every rank has ended well. Rank 0 writes lines to the pipe `mouth`.

    Looks every `poll_s` seconds whether the launcher is there, and `grace_s` after the first rank has failed
    once more at all of them, so that the one that the others lost can be named.
    """
    # Read before the fork: a broken file is then one error, not one per rank.
    sweeps, timeout_s = pickle.loads((folder / SWEEPS_FILE).read_bytes())
    launcher = os.getppid()
    world = max(sweep.schedule.topology.ranks for sweep in sweeps)
    fork = multiprocessing.get_context("fork")
    arguments = [(folder, sweeps, rank, world, timeout_s, mouth) for rank in range(world)]
    ranks = [fork.Process(target=_run_or_note, args=each) for each in arguments]
    try:
        for rank in ranks:
            rank.start()
        os.close(mouth)  # it ends when rank 0 does
        while (running := [it.sentinel for it in ranks if it.exitcode is None]) and os.getppid() == launcher:
            wait(running, poll_s)
            if any(it.exitcode for it in ranks):
                time.sleep(grace_s)
                _name_the_killed(folder, [it.exitcode or 0 for it in ranks])
                return 1
        return 1 if running else 0
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
    folder: Path, sweeps: Sequence[Sweep], rank: int, world: int, timeout_s: float, mouth: int
) -> None:
    if rank:
        os.close(mouth)
    try:
        _run_rank(folder, sweeps, rank, world, timeout_s, mouth)
    except BaseException as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        _note_failure(folder, reason if isinstance(error, ExecutionError) else f"rank {rank}: {reason}")
        raise


def _note_failure(folder: Path, reason: str) -> None:
    """Keep the first reason only: later ones are mostly its consequences."""
    with contextlib.suppress(FileExistsError), (folder / FAILURE_FILE).open("x", encoding="utf-8") as file:
        file.write(reason)


def _run_rank(
    folder: Path, sweeps: Sequence[Sweep], rank: int, world: int, timeout_s: float, mouth: int
) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
    )

    def say(row: Row) -> None:
        os.write(mouth, (json.dumps(row.to_document()) + "\n").encode())

    on_row = say if rank == 0 else None
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for number, sweep in enumerate(sweeps):
        own = PrefixStore(str(number), store)
        run_sweep(sweep, own, timeout_s=timeout_s, on_row=on_row, groups=groups)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
