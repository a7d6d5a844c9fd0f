"""One schedule on one buffer size, on one rank: fill, run, time, compare with torch's own collective.

Torch has no custom collective: what that must give is worked out from everybody's data. Data depend on rank
and index; what a run must write holds, before it, what no right answer has.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.backends.executors.engine_runner import EngineRunner
from arborcast.backends.executors.torch_p2p import Executor
from arborcast.backends.lowering.layout import lay_out
from arborcast.backends.measure.job import Reduction, Sweep
from arborcast.backends.measure.samples import sample_data, sample_values
from arborcast.synth.collective import Collective, Kind

OPS = {reduction: getattr(dist.ReduceOp, reduction.name) for reduction in Reduction}

Runner: TypeAlias = Executor | EngineRunner
"""What executes a schedule on one rank."""


@dataclass(eq=False)
class Trial:
    """One size of a sweep on this rank; all ranks of the topology make and run it together.

    Args:
        sweep: what to run.
        count: elements of the whole buffer.
        executor: runs the sweep's schedule.
        everyone: the ranks of the topology.
        members: the ranks of the collective.
    """

    sweep: Sweep
    count: int
    executor: Runner
    everyone: dist.ProcessGroup
    members: dist.ProcessGroup

    def __post_init__(self) -> None:
        """Make what the rank gives and gets."""
        self._rank = self.executor.rank
        self._dtype: torch.dtype = getattr(torch, self.sweep.dtype)
        self._collective = self.sweep.schedule.collective
        self._takes_part = self._rank in self._collective.members
        self._layout = lay_out(self.sweep.schedule, self.count, ())
        self._in_place = self._layout.in_place(self._rank)
        self._output = torch.empty(self._layout.output_elements(self._rank), dtype=self._dtype)
        self._pattern = self._own_data()
        self._given = self._pattern if self._in_place else self._pattern.clone()

    def run(self) -> tuple[list[float], int]:
        """Call again and again between two barriers, as nccl-tests does, then compare one more call.

        In place, what one call leaves is what the next one is given; only the call that is compared, and
        the first, begin with the data. There is always a call that does not count: plans and memory are
        made in it.

        Returns:
            seconds of the calls that count, and how many elements of this rank were wrong in the last one.
        """
        self._reset()
        for _ in range(max(self.sweep.warmup, 1)):
            self._call()
        dist.barrier(self.everyone)
        times = [time.perf_counter()]
        for _ in range(self.sweep.iterations):
            self._call()
            times.append(time.perf_counter())
        dist.barrier(self.everyone)
        wrong = 0
        if self.sweep.check:
            expected = self._expected() if self._takes_part else None
            self._reset()
            dist.barrier(self.everyone)
            self._call()
            wrong = self._wrong(expected)
        return [end - start for start, end in pairwise(times)], wrong

    def _own_data(self) -> Tensor:
        """What this rank gives; empty where it gives nothing."""
        kind = self._collective.kind
        gives = self._takes_part
        if kind in {Kind.BROADCAST, Kind.SCATTER}:
            gives = self._rank == self._collective.root
        elements = len(self._output) if self._in_place else self._layout.input_elements(self._rank)
        data = torch.empty(elements if gives else 0, dtype=self._dtype)
        reduction = self.sweep.reduction if kind.reduces else None
        for start, values in sample_data(
            self._collective,
            self._rank,
            len(data),
            dtype=self.sweep.dtype,
            reduction=reduction,
            seed=self.sweep.seed,
        ):
            data[start : start + len(values)] = torch.from_numpy(values).to(self._dtype)
        return data

    def _expected(self) -> Tensor | None:
        if self._collective.kind is Kind.CUSTOM:
            return self._expected_blocks()
        reduction = self.sweep.reduction
        # gloo cannot average integers.
        by_hand = reduction is Reduction.AVG and not self._dtype.is_floating_point
        op = OPS[Reduction.SUM if by_hand else reduction]
        output = by_torch(self._collective, self.members, self._pattern, len(self._output), op)
        if by_hand and self._collective.kind.reduces and output is not None:
            output.div_(len(self._collective.ranks), rounding_mode="trunc")
        return output

    def _expected_blocks(self) -> Tensor:
        """Of a custom collective: the own data, with what the sources hold in the blocks that must come."""
        output, demands = self._pattern.clone(), self._collective.demands
        block = len(output) // len(demands)
        for index, demand in enumerate(demands):
            if self._rank in demand.targets:
                values = sample_values(
                    min(demand.sources),
                    block,
                    dtype=self.sweep.dtype,
                    reduction=None,
                    ranks=len(self._collective.ranks),
                    seed=self.sweep.seed,
                    start=index * block,
                )
                output[index * block :][:block] = torch.from_numpy(values).to(self._dtype)
        return output

    def _reset(self) -> None:
        self._output.fill_(float("nan") if self._dtype.is_floating_point else torch.iinfo(self._dtype).min)
        if self._in_place and len(self._pattern):
            self._output.copy_(self._pattern)

    def _call(self) -> None:
        gets = self._layout.output_elements(self._rank) or self._in_place
        gives = self._layout.input_elements(self._rank)
        self.executor.run(
            self.count,
            self._dtype,
            given=self._given if gives else None,
            output=self._output if gets else None,
            op=OPS[self.sweep.reduction],
        )

    def _wrong(self, expected: Tensor | None) -> int:
        """Elements that are not right, and those of the input that have changed."""
        wrong = int(torch.ne(self._given, self._pattern).sum())
        return wrong + (0 if expected is None else int(torch.ne(self._output, expected).sum()))


def by_torch(
    collective: Collective,
    group: dist.ProcessGroup,
    given: Tensor,
    output_elements: int,
    op: dist.ReduceOp.RedOpType,
) -> Tensor | None:
    """The output of this rank by torch's collectives; None where it gets none. Never changes `given`.

    Torch spreads, adds up or gathers all that anybody gives, of which each rank has its part.

    Args:
        collective: which one.
        group: of the collective's ranks; torch orders them by number.
        given: this rank's data: empty where it gives none.
        output_elements: how many it gets.
        op: ignored where nothing is reduced.
    """
    kind, ranks = collective.kind, collective.ranks
    own = ranks.index(dist.get_rank())
    if kind in {Kind.BROADCAST, Kind.SCATTER}:
        elements = output_elements * (len(ranks) if kind is Kind.SCATTER else 1)
        everything = given.clone() if len(given) else torch.empty(elements, dtype=given.dtype)
        dist.broadcast(everything, collective.root, group=group)
    elif kind.reduces:
        everything = given.clone()
        dist.all_reduce(everything, op, group=group)
    else:
        order = sorted(ranks)
        of_ranks = [torch.empty_like(given) for _ in order]
        dist.all_gather(of_ranks, given, group=group)
        parts = [of_ranks[order.index(rank)] for rank in ranks]
        if kind is Kind.ALLTOALL:
            parts = [part.view(len(ranks), -1)[own] for part in parts]
        everything = torch.cat(parts)
    if kind in {Kind.SCATTER, Kind.REDUCE_SCATTER}:
        everything = everything.view(len(ranks), -1)[own]
    return everything if output_elements else None
