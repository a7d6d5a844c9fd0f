"""The other side of `launch`: `python -m arborcast.backends.measure.worker FOLDER PIPE` runs its sweeps.

It imports torch once and then forks one process per rank. Rank 0 says each row at once; the first to fail
leaves its reason in the folder, and the others are ended. Nobody outlives the process that launched us.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from arborcast.backends.errors import ExecutionError
from arborcast.backends.measure.job import Row, Sweep
from arborcast.backends.measure.sweep import run_sweep
from arborcast.backends.tensors.torch_compat import FileStore, PrefixStore

SWEEPS_FILE = "sweeps.pickle"
FAILURE_FILE = "failure.txt"


def main(folder: Path, mouth: int, *, poll_s: float = 0.02, grace_s: float = 0.2) -> int:
    """Run the sweeps of a folder; 0 when every rank has ended well. Rank 0 writes lines to the pipe `mouth`.

    Looks after the ranks every `poll_s` seconds, and `grace_s` after the first has failed, so that the one
    that the others lost can be named.
    """
    # Read before the fork: a broken file is then one error, not one per rank.
    sweeps, timeout_s = pickle.loads((folder / SWEEPS_FILE).read_bytes())
    launcher = os.getppid()
    world = max(sweep.schedule.topology.ranks for sweep in sweeps)
    running = {_fork(folder, sweeps, rank, world, timeout_s, mouth): rank for rank in range(world)}
    os.close(mouth)  # it ends when rank 0 does
    try:
        while running and os.getppid() == launcher:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                time.sleep(poll_s)
            elif status:
                time.sleep(grace_s)
                ended = {child: status} | _ended()
                _name_the_killed(folder, ended, running)
                for child in ended:
                    del running[child]
                return 1
            else:
                del running[child]
        return 1 if running else 0
    finally:
        for child in running:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _ended() -> dict[int, int]:
    """Children that have ended unnoticed, with their status."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (pair := os.waitpid(-1, os.WNOHANG))[0]:
            ended[pair[0]] = pair[1]
    return ended


def _name_the_killed(folder: Path, ended: dict[int, int], rank_of: dict[int, int]) -> None:
    """A rank that was killed could not say so; the others only report that they lost it."""
    for child, status in ended.items():
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            reason = f"rank {rank_of[child]} was ended by signal {signal.Signals(-code).name}"
            (folder / FAILURE_FILE).write_text(reason, encoding="utf-8")


def _fork(folder: Path, sweeps: Sequence[Sweep], rank: int, world: int, timeout_s: float, mouth: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        if rank:
            os.close(mouth)
        _run_rank(folder, sweeps, rank, world, timeout_s, mouth)
        status = 0
    except BaseException as error:
        traceback.print_exc()
        reason = " ".join(str(error).split()) or type(error).__name__
        _note_failure(folder, reason if isinstance(error, ExecutionError) else f"rank {rank}: {reason}")
    finally:
        sys.stderr.flush()
        os._exit(status)


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
