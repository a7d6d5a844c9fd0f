"""The other side of `backends.launch`: `python -m backends.worker FOLDER` runs the jobs that lie there.

It imports torch once and then forks one process per rank. Every rank leaves its answers in the folder; the
first to fail leaves its reason, and the others are ended. Nobody outlives the process that launched us.
"""

from __future__ import annotations

import contextlib
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

from backends.errors import ExecutionError
from backends.job import Answer, Job
from backends.torch_p2p import Executor
from backends.trial import Trial

JOBS_FILE = "jobs.pickle"
FAILURE_FILE = "failure.txt"


def main(folder: Path, *, poll_s: float = 0.02, grace_s: float = 0.2) -> int:
    """Run the jobs of a folder; 0 when every rank has answered.

    Looks after the ranks every `poll_s` seconds, and `grace_s` after the first has failed, so that the one
    that the others lost can be named.
    """
    # Read before the fork: a broken file is then one error, not one per rank.
    jobs, timeout_s = pickle.loads((folder / JOBS_FILE).read_bytes())
    launcher = os.getppid()
    world = max(job.schedule.topology.ranks for job in jobs)
    running = {_fork(folder, jobs, rank, world, timeout_s): rank for rank in range(world)}
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


def _fork(folder: Path, jobs: Sequence[Job], rank: int, world: int, timeout_s: float) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        answers = _run_rank(folder, jobs, rank, world, timeout_s)
        (folder / f"rank-{rank}.pickle").write_bytes(pickle.dumps(answers))
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
    folder: Path, jobs: Sequence[Job], rank: int, world: int, timeout_s: float
) -> list[list[Answer]]:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=torch._C._distributed_c10d.FileStore(str(folder / "store"), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
        # Every process makes every group, whether it is in it or not, in the same order.
        key = tuple(sorted(ranks))
        if key not in groups:
            groups[key] = dist.new_group(list(key))
        return groups[key]

    answers = []
    for job in jobs:
        everyone = group_of(range(job.schedule.topology.ranks))
        members = group_of(job.schedule.collective.ranks)
        if rank < job.schedule.topology.ranks:
            executor = Executor(job.schedule, everyone, pieces=job.pieces, piece_bytes=job.piece_bytes)
            answers.append([Trial(job, count, executor, everyone, members).run() for count in job.counts])
        else:
            answers.append([])
    dist.destroy_process_group()
    return answers


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
