"""RaNNC's partitioner: layers into blocks of about the same time, blocks into as few stages as memory allows.

Its three phases. (1) Atomic subcomponents: what lies between two cuts at values that have a sample dimension,
operators of parameters alone copied to whoever uses them. Those are the layers of a profile (`model.traced`).
(2) Blocks: at most 32, merged so that the longest takes as little as can be, cut where fewer bytes cross.
(3) Stages, for `width` devices of one pipeline:

    V[s][b][d] = min over k, n of  max(F[s-1][k][d-n], f(k..b, n)) + max(B[s-1][k][d-n], b(k..b, n))

is the slowest forward pass and the slowest backward pass of the blocks 0..b in s stages on d devices, the
last of them on n; f and b count messages in and out. F and B are those of the V that is kept, so that the
program is a heuristic, as published; ranges that do not fit into memory are left out. A pipeline takes one
host, or two, ... and is repeated on all others; the first number of hosts and stages for which anything fits
is taken. So a model that fits on one device is trained by data parallelism alone.

Source: Tanaka, Taura, Hanawa, Torisawa, IPDPS 2021 (arXiv 2103.16063), sections III and IV.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise, product
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np

from arborcast.pipeline.costs.link_costs import BYTES_PER_US, LinkCosts
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.model.balance import balanced_cuts
from arborcast.pipeline.planning.device_order import device_order
from arborcast.pipeline.planning.hosts import Groups, levels
from arborcast.pipeline.planning.planning_problem import PlanningProblem
from arborcast.pipeline.planning.tables import Floats, Integers
from arborcast.pipeline.stages import Plan, Stage

BLOCKS = 32
"""Blocks at most, as published."""

SLACK = 0.25
"""By how much the longest block may take longer than it must, for cuts that fewer bytes cross; ours."""

StageCost: TypeAlias = Callable[[int, int, int], tuple[float, float]]
"""`cost(start, end, devices)`: forward and backward of a microbatch; infinite where memory is too small."""


class BlockRange(NamedTuple):
    """Blocks [start, end) on so many devices of each pipeline."""

    start: int
    end: int
    devices: int


def rannc(problem: PlanningProblem) -> Plan:
    """RaNNC's plan, in GPipe's order; it recomputes wherever there are several microbatches.

    Published bandwidths are constants; here messages cost what the narrowest path inside a pipeline does.

    Raises:
        PlanError: nothing fits (by how much, in the most stages that there can be), or no path leads on.
        BatchError: there are fewer samples than microbatches, or in one of them fewer than pipelines.
    """
    problem.check_batch()
    asked = _Blocks(problem, _bounds(problem))
    blocks = len(asked.bounds) - 1
    hosts = _hosts(problem.network)
    tried: tuple[Groups, int] | None = None  # the last pipelines, the most stages on them
    for used in range(1, len(hosts) + 1):
        least, most = (used - 1) * len(hosts[0]) + 1, min(used * len(hosts[0]), blocks)
        if len(hosts) % used or least > most:
            continue  # pipelines are alike, and take all of their hosts
        pipelines = tuple(sum(hosts[at : at + used], ()) for at in range(0, len(hosts), used))
        tried = pipelines, most
        plan = asked.plan(pipelines, range(least, most + 1))
        if plan is not None:
            with contextlib.suppress(PlanError):  # ranks may have less memory than those that costs are of
                return problem.fitted([plan])
    if tried is not None:
        (pipelines, most), free = tried, replace(problem, memory_bytes=None)
        plan = _Blocks(free, asked.bounds).plan(pipelines, range(most, most + 1))
        if plan is not None:
            return problem.fitted([plan])
    raise PlanError(
        f"rannc: {blocks} blocks in any number of stages must take all ranks of a pipeline "
        f"with {problem.batch} samples in {problem.microbatches} microbatches, and do not"
    )


def stages(blocks: int, devices: int, counts: range, cost: StageCost) -> tuple[BlockRange, ...] | None:
    """All blocks on all devices in the first of these numbers of stages that fits (phase 3); None for none.

    Complexity: O(S blocks^2 devices^2) for S stages, in numpy.
    """
    times = np.full((2, blocks, blocks + 1, devices + 1), np.inf)
    for start, end in combinations(range(blocks + 1), 2):
        for on in range(1, devices + 1):
            times[:, start, end, on] = cost(start, end, on)
    slowest = np.full((2, blocks + 1, devices + 1), np.inf)  # forward and backward, by blocks and devices
    slowest[:, 0, 0] = 0.0
    choices: list[tuple[Integers, Integers]] = []
    for count in range(1, counts.stop):
        slowest, *choice = _one_more(slowest, times)
        choices.append((choice[0], choice[1]))
        if count in counts and np.isfinite(slowest[0, blocks, devices]):
            return _traced(choices, blocks, devices)
    return None


def _one_more(slowest: Floats, times: Floats) -> tuple[Floats, Integers, Integers]:
    """With one more stage: the slowest passes, where the last stage begins, on how many devices it is."""
    _, ends, totals = slowest.shape
    made = np.full(slowest.shape, np.inf)
    value = np.full((ends, totals), np.inf)
    begin, devices = np.zeros((2, ends, totals), dtype=np.int64)
    for end, on in product(range(1, ends), range(1, totals)):
        # By [which pass, first block, devices before].
        passes = np.maximum(slowest[:, :end, : totals - on], times[:, :end, end, on, None])
        sums = passes.sum(axis=0)
        start = sums.argmin(axis=0)
        least = sums[start, np.arange(totals - on)]
        better = np.flatnonzero(least < value[end, on:])
        value[end, on + better] = least[better]
        made[:, end, on + better] = passes[:, start[better], better]
        begin[end, on + better], devices[end, on + better] = start[better], on
    return made, begin, devices


def _traced(choices: list[tuple[Integers, Integers]], end: int, total: int) -> tuple[BlockRange, ...]:
    parts = []
    for begin, devices in reversed(choices):
        parts.append(BlockRange(int(begin[end, total]), end, int(devices[end, total])))
        end, total = parts[-1].start, total - parts[-1].devices
    return tuple(reversed(parts))


def _recomputes(problem: PlanningProblem) -> bool:
    return problem.microbatches > 1


def _bounds(problem: PlanningProblem) -> tuple[int, ...]:
    """The layers at which blocks begin, and the number of layers (phase 2).

    More than `BLOCKS` where a block of several layers would not fit on any number of devices.
    """
    depth = problem.profile.depth
    crossing = [0.0, *(problem.profile.output_bytes(cut, problem.samples) for cut in range(1, depth))]
    fit = problem.range_fits(recompute=_recomputes(problem), order="gpipe")
    ranks = problem.ranks[: problem.batch // problem.microbatches]
    most = BLOCKS
    while True:
        cuts = balanced_cuts(problem.layer_us, min(most, depth), costs=crossing, slack=SLACK)
        bounds = (0, *cuts, depth)
        if most >= depth or all(b == a + 1 or fit(a, b, ranks, 0) for a, b in pairwise(bounds)):
            return bounds
        most *= 2


@dataclass(frozen=True)
class _Blocks:
    """Blocks of layers, which begin at `bounds`, and pipelines of them."""

    problem: PlanningProblem
    bounds: tuple[int, ...]

    def plan(self, pipelines: Groups, counts: range) -> Plan | None:
        """The first number of stages that fits on all devices of each pipeline; None for none.

        Samples stay on their pipeline.
        """
        found = stages(len(self.bounds) - 1, len(pipelines[0]), counts, self._stage_cost(pipelines))
        if found is None:
            return None
        made, first = [], 0
        for part in found:
            ranks = (rank for pipeline in pipelines for rank in pipeline[first : first + part.devices])
            made.append(Stage(self.bounds[part.start], self.bounds[part.end], tuple(ranks)))
            first += part.devices
        return self.problem.plan(made, "gpipe", "rannc", recompute=_recomputes(self.problem))

    def _stage_cost(self, pipelines: Groups) -> StageCost:
        """Times of a stage on so many devices of each pipeline, with its messages each way."""
        problem, profile = self.problem, self.problem.profile
        fit = problem.range_fits(recompute=_recomputes(problem), order="gpipe")
        widths = (float(problem.network.width(*it)) * BYTES_PER_US for it in pairwise(pipelines[0]))
        us_per_byte = max((1 / it for it in widths), default=0.0)

        @cache
        def cost(start: int, end: int, devices: int) -> tuple[float, float]:
            replicas = devices * len(pipelines)
            ranks = tuple(rank for pipeline in pipelines for rank in pipeline[:devices])
            start, end = self.bounds[start], self.bounds[end]
            if replicas > problem.batch // problem.microbatches or not fit(start, end, ranks, 0):
                return inf, inf
            share = problem.samples / replicas
            sizes = (profile.output_bytes(cut, share) for cut in (start, end) if 0 < cut < profile.depth)
            messages_us = sum(sizes) * us_per_byte
            forward = profile.forward_us(start, end, share)
            backward = profile.backward_us(start, end, share) + _recomputes(problem) * forward
            return forward + messages_us, backward + messages_us

        return cost


def _hosts(network: LinkCosts) -> Groups:
    """What the source is told: the widest groups of ranks that are not all ranks, neighbours side by side."""
    found = levels(network)
    hosts = found[-2] if len(found) > 1 else found[0]
    return tuple(tuple(host[rank] for rank in device_order(network.topology.subset(host))) for host in hosts)
