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
from arborcast.pipeline.planning.memory_need import Limit, RangeFits, fitted, range_fits
from arborcast.pipeline.planning.tables import Floats, Integers
from arborcast.pipeline.profiles import Profile
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


def rannc(
    profile: Profile,
    network: LinkCosts,
    *,
    batch: int,
    microbatches: int,
    memory_bytes: Limit | None = None,
    count: int | None = None,
    recompute: bool | None = None,
) -> Plan:
    """RaNNC's plan, in GPipe's order.

    Published bandwidths are constants; here messages cost what the narrowest path inside a pipeline does.

    Args:
        profile: of the model.
        network: whose ranks are all used.
        batch: samples of a step.
        microbatches: that they are divided into.
        memory_bytes: of every rank, or by rank; None for no limit.
        count: of stages; None for as few as fit.
        recompute: None for what is published: wherever there are several microbatches.

    Raises:
        PlanError: nothing fits (by how much, in the most stages that there can be), or no path leads on.
        BatchError: there are fewer samples than microbatches, or in one of them fewer than pipelines.
    """
    Plan([(0, profile.depth, (0,))], microbatches).microbatch_sizes(batch)  # raises where it must
    again = microbatches > 1 if recompute is None else recompute
    asked = _Problem(profile, network, batch, microbatches, again, memory_bytes)
    bounds = asked.blocks()
    hosts = _hosts(network)
    most_blocks = len(bounds) - 1
    tried: tuple[Groups, range] | None = None  # the last
    for used in range(1, len(hosts) + 1):
        least, most = (used - 1) * len(hosts[0]) + 1, min(used * len(hosts[0]), most_blocks)
        counts = range(least, most + 1) if count is None else range(max(count, least), min(count, most) + 1)
        if len(hosts) % used or not counts:
            continue  # pipelines are alike, and take all of their hosts
        pipelines = tuple(sum(hosts[at : at + used], ()) for at in range(0, len(hosts), used))
        tried = pipelines, counts[-1:]
        found = stages(most_blocks, len(pipelines[0]), counts, asked.stage_cost(bounds, pipelines))
        if found is not None:
            with contextlib.suppress(PlanError):  # ranks may have less memory than those that costs are of
                return fitted([asked.plan(found, bounds, pipelines)], profile, memory_bytes, batch)
    if tried is not None:
        (pipelines, counts), free = tried, replace(asked, memory_bytes=None)
        found = stages(most_blocks, len(pipelines[0]), counts, free.stage_cost(bounds, pipelines))
        if found is not None:
            return fitted([free.plan(found, bounds, pipelines)], profile, memory_bytes, batch)
    raise PlanError(
        f"rannc: {most_blocks} blocks in {count or 'any number of'} stages must take all ranks of a pipeline "
        f"with {batch} samples in {microbatches} microbatches, and do not"
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


@dataclass(frozen=True)
class _Problem:
    """What is partitioned, for one number of microbatches."""

    profile: Profile
    network: LinkCosts
    batch: int
    microbatches: int
    recompute: bool
    memory_bytes: Limit | None

    def blocks(self) -> tuple[int, ...]:
        """The layers at which blocks begin, and the number of layers (phase 2).

        More than `BLOCKS` where a block of several layers would not fit on any number of devices.
        """
        profile, samples = self.profile, self.batch / self.microbatches
        times = [
            profile.forward_us(it, it + 1, samples) + profile.backward_us(it, it + 1, samples)
            for it in range(profile.depth)
        ]
        crossing = [0.0, *(profile.output_bytes(cut, samples) for cut in range(1, profile.depth))]
        fit = self._fit()
        ranks = tuple(range(min(self.network.topology.ranks, self.batch // self.microbatches)))
        most = BLOCKS
        while True:
            cuts = balanced_cuts(times, min(most, profile.depth), costs=crossing, slack=SLACK)
            bounds = (0, *cuts, profile.depth)
            if most >= profile.depth or all(
                b == a + 1 or fit is None or fit(a, b, ranks, 0) for a, b in pairwise(bounds)
            ):
                return bounds
            most *= 2

    def stage_cost(self, bounds: tuple[int, ...], pipelines: Groups) -> StageCost:
        """Times of a stage on so many devices of each pipeline, with its messages each way."""
        profile, fit = self.profile, self._fit()
        whole = self.batch // self.microbatches
        widths = (float(self.network.width(*it)) * BYTES_PER_US for it in pairwise(pipelines[0]))
        us_per_byte = max((1 / it for it in widths), default=0.0)

        @cache
        def cost(start: int, end: int, devices: int) -> tuple[float, float]:
            replicas = devices * len(pipelines)
            ranks = tuple(rank for pipeline in pipelines for rank in pipeline[:devices])
            start, end = bounds[start], bounds[end]
            if replicas > whole or (fit is not None and not fit(start, end, ranks, 0)):
                return inf, inf
            share = self.batch / self.microbatches / replicas
            sizes = (profile.output_bytes(cut, share) for cut in (start, end) if 0 < cut < profile.depth)
            messages_us = sum(sizes) * us_per_byte
            forward = profile.forward_us(start, end, share)
            backward = profile.backward_us(start, end, share) + self.recompute * forward
            return forward + messages_us, backward + messages_us

        return cost

    def plan(self, parts: tuple[BlockRange, ...], bounds: tuple[int, ...], pipelines: Groups) -> Plan:
        """The stages on their devices of every pipeline, so that samples stay on their pipeline."""
        made, first = [], 0
        for part in parts:
            ranks = (rank for pipeline in pipelines for rank in pipeline[first : first + part.devices])
            made.append(Stage(bounds[part.start], bounds[part.end], tuple(ranks)))
            first += part.devices
        return Plan(
            made,
            self.microbatches,
            "gpipe",
            recompute=self.recompute,
            topology=self.network.topology,
            model=self.profile.model,
            method="rannc",
        )

    def _fit(self) -> RangeFits | None:
        if self.memory_bytes is None:
            return None
        return range_fits(
            self.profile,
            self.memory_bytes,
            tuple(range(self.network.topology.ranks)),
            batch=self.batch,
            microbatches=self.microbatches,
            recompute=self.recompute,
            order="gpipe",
        )


def _hosts(network: LinkCosts) -> Groups:
    """What the source is told: the widest groups of ranks that are not all ranks, neighbours side by side."""
    found = levels(network)
    hosts = found[-2] if len(found) > 1 else found[0]
    return tuple(tuple(host[rank] for rank in device_order(network.topology.subset(host))) for host in hosts)
