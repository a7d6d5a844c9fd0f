"""One schedule on one buffer size, on one rank: fill, run, time, compare.

The data depends on rank and index; what a run must write holds, before it, what no right answer has.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.backends.lowering.layout import lay_out
from arborcast.backends.measure.job import Answer, Job
from arborcast.backends.measure.reference import sample_data
from arborcast.backends.measure.torch_reference import OPS, by_definition, by_torch, torch_defines
from arborcast.synth.collective import Kind


class Runner(Protocol):
    """What executes a schedule on one rank, as `backends.executors.torch_p2p.Executor` does.

    Attributes:
        rank: of this process in the schedule's topology.
    """

    rank: int

    def run(
        self,
        count: int,
        dtype: torch.dtype,
        *,
        given: Tensor | None = None,
        output: Tensor | None = None,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> None:
        """One call; see `Executor.run`."""


class Trial:
    """One size of one job on this rank; all ranks of the topology make and run it together.

    Args:
        job: what to run.
        count: elements of the whole buffer.
        executor: runs the job's schedule.
        everyone: the ranks of the topology.
        members: the ranks of the collective.
    """

    def __init__(
        self,
        job: Job,
        count: int,
        executor: Runner,
        everyone: dist.ProcessGroup,
        members: dist.ProcessGroup,
    ) -> None:
        self._job = job
        self._count = count
        self._executor = executor
        self._everyone = everyone
        self._members = members
        self._rank = executor.rank
        self._dtype: torch.dtype = getattr(torch, job.dtype)
        self._collective = job.schedule.collective
        self._takes_part = self._rank in self._collective.members
        self._layout = lay_out(job.schedule, count, ())
        self._in_place = self._layout.in_place(self._rank)
        self._output = torch.empty(self._layout.output_elements(self._rank), dtype=self._dtype)
        self._pattern = self._own_data()
        self._given = self._pattern if self._in_place else self._pattern.clone()

    def run(self) -> Answer:
        """Warm up, run, and compare every element of every run."""
        job = self._job
        by_gloo = torch_defines(self._collective.kind, job.reduction, self._dtype)
        expected = self._expected(by_gloo) if self._takes_part else None
        seconds, wrong = [], 0
        for _ in range(job.warmup + job.iterations):
            self._reset()
            dist.barrier(self._everyone)
            start = time.perf_counter()
            self._call()
            seconds.append(time.perf_counter() - start)
            wrong += self._wrong(expected)
        return Answer(tuple(seconds[job.warmup :]), wrong, "torch" if by_gloo else "definition")

    def run_back_to_back(self, *, check: bool) -> Answer:
        """Call again and again between two barriers, as nccl-tests does, then compare one more run.

        In place, what one call leaves is what the next one is given; only the run that is compared, and
        the first, begin with the data. There is always a call that does not count: plans and memory are
        made in it.
        """
        job = self._job
        self._reset()
        for _ in range(max(job.warmup, 1)):
            self._call()
        dist.barrier(self._everyone)
        times = [time.perf_counter()]
        for _ in range(job.iterations):
            self._call()
            times.append(time.perf_counter())
        dist.barrier(self._everyone)
        wrong, by_gloo = 0, torch_defines(self._collective.kind, job.reduction, self._dtype)
        if check:
            expected = self._expected(by_gloo) if self._takes_part else None
            self._reset()
            dist.barrier(self._everyone)
            self._call()
            wrong = self._wrong(expected)
        seconds = tuple(end - start for start, end in pairwise(times))
        return Answer(seconds, wrong, "torch" if by_gloo else "definition")

    def _own_data(self) -> Tensor:
        """What this rank gives; empty where it gives nothing."""
        kind = self._collective.kind
        gives = self._takes_part
        if kind in {Kind.BROADCAST, Kind.SCATTER}:
            gives = self._rank == self._collective.root
        elements = len(self._output) if self._in_place else self._layout.input_elements(self._rank)
        data = torch.empty(elements if gives else 0, dtype=self._dtype)
        reduction = self._job.reduction if kind.reduces else None
        for start, values in sample_data(
            self._collective,
            self._rank,
            len(data),
            dtype=self._job.dtype,
            reduction=reduction,
            seed=self._job.seed,
        ):
            data[start : start + len(values)] = torch.from_numpy(values).to(self._dtype)
        return data

    def _expected(self, by_gloo: bool) -> Tensor | None:
        if not by_gloo:
            return by_definition(self._job, self._rank, len(self._pattern), self._dtype)
        op = OPS[self._job.reduction]
        return by_torch(self._collective, self._members, self._pattern, len(self._output), op)

    def _reset(self) -> None:
        self._output.fill_(float("nan") if self._dtype.is_floating_point else torch.iinfo(self._dtype).min)
        if self._in_place and len(self._pattern):
            self._output.copy_(self._pattern)

    def _call(self) -> None:
        gets = self._layout.output_elements(self._rank) or self._in_place
        gives = self._layout.input_elements(self._rank)
        self._executor.run(
            self._count,
            self._dtype,
            given=self._given if gives else None,
            output=self._output if gets else None,
            op=OPS[self._job.reduction],
        )

    def _wrong(self, expected: Tensor | None) -> int:
        """Elements that are not right, and those of the input that have changed."""
        wrong = int(torch.ne(self._given, self._pattern).sum())
        return wrong + (0 if expected is None else int(torch.ne(self._output, expected).sum()))
