"""One rank's part of a sweep over sizes as nccl-tests makes it; all ranks learn all rows, rank 0 says them.

It runs within a default process group of gloo that has as many ranks as the schedule's topology: that of
`backends.measure.worker`, or that of a job that torchrun started (`run_under_torchrun`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist

from arborcast.backends.executors.engine_runner import EngineRunner
from arborcast.backends.executors.torch_p2p import DEFAULT_PIECE_BYTES, Executor
from arborcast.backends.measure.job import LOOPBACK_PIECE_BYTES, Row, Sweep, row_of
from arborcast.backends.measure.torchrun import job_group
from arborcast.backends.measure.trial import Runner, Trial
from arborcast.backends.schedules.rendezvous import are_on_one_host
from arborcast.backends.tensors.torch_compat import PrefixStore, Store
from arborcast.synth.errors import InputError

_PREFIX = "arborcast/sweep"


def run_under_torchrun(
    prepare: Callable[[int], Sweep], *, timeout_s: float, on_row: Callable[[Row], None]
) -> tuple[Row, ...]:
    """The rows of a sweep on the processes that torchrun started, of which this is one; the same on all.

    Args:
        prepare: given the number of processes, on rank 0 alone: the others need no file.
        timeout_s: how long a rank may come late or be silent.
        on_row: called with each row as it is there, on rank 0 alone.

    Raises:
        InputError: what `prepare` raises, on all ranks, or settings in the environment that break a rule.
        ExecutionError: a rank is gone, does not come or does not answer.
    """
    torch.set_num_threads(1)
    with job_group("bench run", timeout_s):
        speaks = dist.get_rank() == 0
        plan_or_error: list[Sweep | InputError | None] = [None]
        if speaks:
            try:
                plan_or_error = [prepare(dist.get_world_size())]
            except InputError as error:
                plan_or_error = [error]
        dist.broadcast_object_list(plan_or_error, src=0)
        sweep = plan_or_error[0]
        if isinstance(sweep, InputError):
            raise sweep
        assert sweep is not None, "rank 0 says what to do, or why not"
        store = dist.distributed_c10d._get_default_store()
        return run_sweep(sweep, store, timeout_s=timeout_s, on_row=on_row if speaks else None)


def run_sweep(
    sweep: Sweep,
    store: Store,
    *,
    timeout_s: float,
    on_row: Callable[[Row], None] | None,
    groups: dict[tuple[int, ...], dist.ProcessGroup] | None = None,
) -> tuple[Row, ...]:
    """The rows of a sweep, on every rank that takes part; `on_row` is called with each as it is there.

    Args:
        sweep: of a schedule on as many ranks as the default group has, or on the first of them.
        store: that all ranks share, and nobody else.
        timeout_s: to connect within, and without progress.
        on_row: None where this rank says nothing.
        groups: by their ranks, those that earlier sweeps have made; new ones are added.

    Raises:
        ExecutionError: a rank is gone or does not answer.
    """
    groups = {} if groups is None else groups

    def group_of(ranks: Iterable[int]) -> dist.ProcessGroup:
        # Every process makes every group, whether it is in it or not, in the same order.
        key = tuple(sorted(ranks))
        if key not in groups:
            groups[key] = dist.new_group(list(key))
        return groups[key]

    everyone = group_of(range(sweep.schedule.topology.ranks))
    members = group_of(sweep.schedule.collective.ranks)
    if dist.get_rank() >= sweep.schedule.topology.ranks:
        return ()
    rows = []
    with _runner(sweep, store, everyone, timeout_s) as runner:
        for asked, count in zip(sweep.asked_bytes, sweep.counts, strict=True):
            seconds, found = Trial(sweep, count, runner, everyone, members).run()
            times = torch.tensor(seconds, dtype=torch.float64)
            of_ranks = [torch.empty_like(times) for _ in range(everyone.size())]
            dist.all_gather(of_ranks, times, group=everyone)
            wrong = torch.tensor([found])
            dist.all_reduce(wrong, group=everyone)
            rows.append(row_of(sweep, asked, count, [rank.tolist() for rank in of_ranks], int(wrong)))
            if on_row is not None:
                on_row(rows[-1])
    return tuple(rows)


@contextlib.contextmanager
def _runner(sweep: Sweep, store: Store, everyone: dist.ProcessGroup, timeout_s: float) -> Iterator[Runner]:
    """What executes the schedule; where something fails, the other ranks are plan_or_error."""
    schedule = sweep.schedule
    if sweep.via == "messages":
        here = are_on_one_host(PrefixStore(_PREFIX, store), everyone.rank(), everyone.size())
        piece_bytes = LOOPBACK_PIECE_BYTES if here else DEFAULT_PIECE_BYTES
        yield Executor(schedule, everyone, pieces=sweep.pieces, piece_bytes=piece_bytes)
        return
    own = PrefixStore(_PREFIX, store)
    runner = EngineRunner(schedule, own, everyone.rank(), timeout_s=timeout_s)
    try:
        yield runner
    except BaseException as error:
        runner.give_up(f"rank {runner.rank}: {str(error) or type(error).__name__}")
        raise
    finally:
        runner.close()
