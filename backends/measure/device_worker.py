"""One rank of `synth bench device`, as torchrun starts it: the kernel checked, then timed beside the library.

    torchrun ... -m arborcast.backends.measure.device_worker FOLDER    # as `device_bench` lays it out

On a GPU and on the host the same is done; they differ in memory, in the clock, and in that a graph can
capture calls on a GPU alone. The default group is of gloo; NCCL or RCCL is a group of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.backends.device.operation import Operation, compile  # noqa: A004 - as torch names it
from arborcast.backends.lowering.layout import blocks_in
from arborcast.backends.measure.device_bench import JOB, RESULT, DeviceJob
from arborcast.backends.measure.job import note_failure
from arborcast.backends.measure.torch_call import torch_call
from arborcast.backends.measure.torchrun import job_group
from arborcast.synth.collective import Collective, Kind, bandwidths
from arborcast.synth.errors import InputError
from arborcast.synth.formats.any_schedule import read_schedule
from arborcast.synth.implicit_schedule import AnySchedule

_LARGEST_SUMS = {"float8_e4m3fn": 16, "float8_e5m2": 8}
_LARGEST_SUM = 120
"""Of one element over all ranks, so that it is exact in types of 8 bits that are named, and in all others."""

Call: TypeAlias = Callable[[], Any]


def library_call(collective: Collective, given: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """A call of torch's own collective of a group; it returns what this rank gets.

    Args:
        collective: of all ranks of the group, in their order.
        given: what this rank gives, as `Operation` takes it; overwritten by kinds that work in place.
        group: whose rank i is the collective's.
    """
    kind, result = collective.kind, given
    call = torch_call(kind, collective.root, group=group)
    if kind in {Kind.SCATTER, Kind.REDUCE_SCATTER}:
        result = given.new_empty(given.numel() // group.size())
    elif kind.gathers:
        result = given.new_empty(given.numel() * group.size())
    elif kind is Kind.ALLTOALL:
        result = torch.empty_like(given)
    gets = kind not in {Kind.REDUCE, Kind.GATHER} or group.rank() == collective.root

    def run() -> Tensor:
        call(result, given)
        return result if gets else result[:0]

    return run


class DeviceRank:
    """What this rank does of a job; the default group is there."""

    def __init__(self, job: DeviceJob) -> None:
        self._job, self._on_gpu = job, job.device == "cuda"
        assert dist.group.WORLD is not None
        self._host: dist.ProcessGroup = dist.group.WORLD
        self._device, self._library = torch.device("cpu"), self._host
        if self._on_gpu:
            gpus = torch.cuda.device_count()
            self._device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
            torch.cuda.set_device(self._device)
            if job.times:
                self._library = cast(dist.ProcessGroup, dist.new_group(backend="nccl"))

    def found(self, schedules: list[AnySchedule]) -> dict[str, Any]:
        """Outcomes of checks and rows of times, the same on all ranks."""
        job = self._job
        checks: list[dict[str, Any]] = []
        rows: list[dict[str, Any]] = []
        for schedule in schedules:
            for name in job.dtypes:
                call = compile(
                    schedule,
                    dtype=getattr(torch, name),
                    device=job.device,
                    timeout_s=job.timeout_s,
                    groups=job.groups,
                    lanes=job.lanes,
                    piece=job.piece,
                )
                checks.append(self.checked(schedule.collective, call, name))
                if job.times and name == job.dtypes[0]:
                    for size in job.sizes:
                        rows += self._timed(schedule, call, size)
        return {"device": self._described(), "checks": checks, "rows": rows}

    def _given(self, collective: Collective, length: int, seed: int, dtype: str) -> Tensor:
        """What this rank gives: blocks of so many small whole numbers."""
        drawn = torch.Generator().manual_seed(seed * self._host.size() + self._host.rank())
        elements = length * (1 if collective.kind.gathers else blocks_in(collective))
        largest = _LARGEST_SUMS.get(dtype, _LARGEST_SUM)
        most = max(int(self._host.rank() < largest), largest // self._host.size())
        return torch.randint(0, most + 1, (elements,), generator=drawn)

    def checked(self, collective: Collective, call: Operation, dtype: str) -> dict[str, Any]:
        """Two calls of each length one behind the other, beside gloo in int64."""
        wrong = 0
        for length in self._job.lengths:
            pairs = []
            for seed in range(2):
                exact = self._given(collective, length, seed, dtype)
                given = exact.to(getattr(torch, dtype)).to(self._device)
                pairs.append((exact, given, call(given)))
            call.finish()
            for exact, given, got in pairs:
                wrong += _differing(given, exact)
                wrong += _differing(got, library_call(collective, exact, self._host)())
        total = torch.tensor([wrong])
        dist.all_reduce(total, group=self._host)
        return {
            "collective": str(collective.kind),
            "dtype": dtype,
            "lengths": list(self._job.lengths),
            "wrong": int(total),
        }

    def _timed(self, schedule: AnySchedule, call: Operation, size: int) -> Iterator[dict[str, Any]]:
        """A row for each way to make the call, all in turns."""
        collective, name = schedule.collective, self._job.dtypes[0]
        dtype = getattr(torch, name)
        blocks, ranks = blocks_in(collective), self._host.size()
        length = max(1, size // (dtype.itemsize * blocks))
        given = self._given(collective, length, 0, name).to(dtype).to(self._device)
        call.prepare(tuple(given.shape))
        library = "gloo" if not self._on_gpu else "RCCL" if torch.version.hip else "NCCL"
        calls: dict[tuple[str, bool], Call] = {
            ("kernel", False): lambda: call(given),
            (library, False): library_call(collective, given.clone(), self._library),
        }
        for (by, _), plain in list(calls.items()) if self._on_gpu else ():
            plain()
            call.finish()
            calls[by, True] = _captured(plain)
        times: dict[tuple[str, bool], list[float]] = {which: [] for which in calls}
        for _ in range(self._job.repeats):
            for which, one in calls.items():
                times[which].append(self._once(one, call.finish))
        # One call of `length` blocks is as long as that of the slowest rank.
        table = torch.tensor(list(times.values()), dtype=torch.float64)
        dist.all_reduce(table, dist.ReduceOp.MAX, group=self._host)
        whole = length * blocks * dtype.itemsize
        for (by, graph), slowest in zip(calls, table.tolist(), strict=True):
            median = statistics.median(slowest)
            algbw, busbw = bandwidths(collective.kind, ranks, whole, median)
            yield {
                "topology": schedule.topology.name,
                "ranks": ranks,
                "collective": str(collective.kind),
                "root": collective.root,
                "method": schedule.method.name if by == "kernel" else by,
                "by": by,
                "graph": graph,
                "dtype": self._job.dtypes[0],
                "bytes": whole,
                "time_us": median,
                "spread": max(slowest) - min(slowest),
                "algbw": algbw,
                "busbw": busbw,
            }

    def _once(self, one: Call, finish: Call) -> float:
        """Microseconds of a call, mean over calls one behind the other, the first of which does not count."""
        dist.barrier(self._host)
        one()
        first = self._mark()
        for _ in range(self._job.iterations):
            one()
        last = self._mark()
        finish()
        passed_us = first.elapsed_time(last) * 1e3 if self._on_gpu else (last - first) * 1e6
        return float(passed_us / self._job.iterations)

    def _mark(self) -> Any:
        """Now, on the current stream or on the host."""
        if not self._on_gpu:
            return time.perf_counter()
        event = cast(Any, torch.cuda).Event(enable_timing=True)
        event.record()
        return event

    def _described(self) -> dict[str, Any]:
        """What ran it."""
        if not self._on_gpu:
            return {
                "name": "host, Triton's interpreter",
                "count": 0,
                "nccl": None,
                "ranks": self._host.size(),
            }
        name, count = torch.cuda.get_device_name(self._device), torch.cuda.device_count()
        nccl = ".".join(map(str, cast(Any, torch.cuda).nccl.version()))
        return {"name": name, "count": count, "nccl": nccl, "ranks": self._host.size()}


def _captured(call: Call) -> Call:
    """The replay of a graph of a call that has been made before; all calls are over."""
    graph = torch.cuda.CUDAGraph()
    # Threads of ours and of NCCL's ask for earlier calls meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


def _differing(got: Tensor, exact: Tensor) -> int:
    """Elements that are not those of `exact`, which every type holds."""
    if got.shape != exact.shape:
        return max(got.numel(), exact.numel())
    return int(torch.ne(got.cpu(), exact.to(got.dtype)).sum())


@contextmanager
def _noting(folder: Path) -> Iterator[None]:
    """Leave there why this rank fails, where it is the first."""
    try:
        yield
    except BaseException as error:
        who = "" if isinstance(error, InputError) else f"rank {os.environ['RANK']}: "
        note_failure(folder, who + (" ".join(str(error).split()) or type(error).__name__))
        raise


def main(folder: Path) -> None:
    """Do the job of a folder; rank 0 leaves the result there."""
    job = DeviceJob(**json.loads((folder / JOB).read_text(encoding="utf-8")))
    torch.set_num_threads(1)
    # Inside, too: a group that is left takes every error of torch for a lost peer.
    with _noting(folder), job_group("bench device", job.timeout_s), _noting(folder):
        found = DeviceRank(job).found([read_schedule(folder / name) for name in job.schedules])
        if os.environ["RANK"] == "0":
            (folder / RESULT).write_text(json.dumps(found), encoding="utf-8")
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
