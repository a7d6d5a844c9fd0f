"""The choice with the least time for one stage: which layers keep, recompute or offload, under a limit.

`costs.activations` says what a choice costs. Over the ways to cut the stage into units (kept and offloaded
layers, recomputed segments) the sum of their times is to be least, so that

    (k - 1) P + max_j (P_j + t_j + o_(j-1)) <= limit

a knapsack with one more term. `Units.choice` solves it exactly: it walks from the first layer to the last
over prefixes (time, P, max_j), leaves out those that another one is nowhere worse than, and goes on with the
prefix whose time, with the least that the other layers can add, is smallest (A*). That least is the
fractional knapsack: the limit says how many bytes the other layers must free, and those that free a byte at
least time do so first. So the first prefix that reaches the end is the best choice. A max_j of at most
limit / k counts as that, since P is no larger. Bytes are integers throughout.

`Units.bounds_us` has the fractional knapsack for all stages at once, from which the dynamic program begins
(`stage_dp`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from arborcast.pipeline.costs.saved_bytes import (
    BYTES_PER_US,
    Segment,
    Segments,
    Treatment,
    held_bytes,
    merged,
)
from arborcast.pipeline.profiles import Profile
from arborcast.synth.kernels.compiled import Ints, kernel

Floats: TypeAlias = NDArray[np.float64]

TREATMENTS = tuple(Treatment)
"""By the numbers that kernels know them by."""

KEEP, RECOMPUTE, OFFLOAD = range(3)


@dataclass(frozen=True, slots=True)
class ActivationOptions:
    """What may become of results besides being kept.

    Attributes:
        recompute: whether they may be recomputed.
        offload_gbps: GB/s between each rank and host memory, each way; None where nothing may be offloaded.
    """

    recompute: bool
    offload_gbps: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What a stage has to make do with.

    Attributes:
        share: samples of the largest share of a microbatch, which memory must hold.
        samples: of one microbatch on a replica on average, whose time counts.
        in_flight: microbatches at once, at least 1.
        limit: bytes of activations.
    """

    share: int
    samples: float
    in_flight: int
    limit: int


@dataclass(frozen=True, slots=True)
class ActivationPolicy:
    """What becomes of the results of a stage.

    Attributes:
        segments: of the stage.
        extra_us: that each microbatch takes longer, both passes together.
    """

    segments: Segments
    extra_us: float

    def moved(self, layers: int) -> ActivationPolicy:
        """The same so many layers further on."""
        segments = (replace(it, start=it.start + layers, end=it.end + layers) for it in self.segments)
        return replace(self, segments=tuple(segments))


@dataclass(frozen=True)
class Units:
    """What the units of a model cost with one size of microbatches, as arrays by layer.

    Attributes:
        profile: of the model.
        menu: what may be chosen.
        share: as in a `MemoryBudget`.
        samples: likewise.
    """

    profile: Profile
    menu: ActivationOptions
    share: int
    samples: float

    def choice(self, start: int, end: int, in_flight: int, limit: int) -> ActivationPolicy | None:
        """The choice for the layers [start, end) that adds the least time in a room; None where none fits.

        Complexity: exponential in the layers at worst, as of any knapsack; the numbers of bytes of a model
        with repeated layers are few, and so are the prefixes.
        """
        times, sizes, besides = self._stage(start, end)
        sums = sizes[0].cumsum()
        kept, peak = (
            int(-(-it * self.share // self.profile.samples)) for it in (sums[-1], (sums + sizes[3]).max())
        )
        if (in_flight - 1) * kept + peak <= limit:
            return ActivationPolicy((Segment(start, end, Treatment.KEEP),), 0.0)
        if limit < 0:
            return None
        order = _by_ratio(times.min(axis=0), sizes[0])
        room = np.array([self.share, self.profile.samples, in_flight, limit])
        added_us, ends, treatments = _least_units(times, sizes, besides, order, room)
        if not len(ends):
            return None
        return ActivationPolicy(_segments(start, ends.tolist(), treatments.tolist()), added_us)

    def least_memory(self, start: int, end: int, in_flight: int) -> Segments:
        """A choice for the layers [start, end) under the least limit that leaves one."""
        most = held_bytes(self.profile, (Segment(start, end, Treatment.KEEP),), self.share, in_flight)
        least = bisect_left(
            range(most), True, key=lambda it: self.choice(start, end, in_flight, it) is not None
        )
        found = self.choice(start, end, in_flight, least)
        assert found is not None, "all can be kept"
        return found.segments

    def bounds_us(self, free: Floats) -> Floats:
        """What the choice of each stage adds to the time of a microbatch at least.

        The fractional knapsack; infinite where all layers together do not free enough.

        Args:
            free: bytes of each microbatch that a stage must not keep, by [start, end].

        Returns:
            Microseconds, likewise.
        """
        return _knapsacks_us(*self._least_costs, free)

    @cached_property
    def _least_costs(self) -> tuple[Floats, Floats, Ints]:
        """What each layer costs and frees at best, and the order in which to free them."""
        depth = self.profile.depth
        # The first layer of a stage moves less, the last one runs beside nothing.
        costs = np.array([self._stage(layer, depth)[0][:, 0].min() for layer in range(depth)])
        saved = np.array([it.saved_bytes * self.share / self.profile.samples for it in self.profile.layers])
        return costs, saved, _by_ratio(costs, saved)

    def _stage(self, start: int, end: int) -> tuple[Floats, Ints, Ints]:
        """Of the layers [start, end): times, bytes, and those of segments, as `_least_units` takes them."""
        kept, taken = self._kept[start:end].copy(), self._taken[start:end]
        kept[0] = self.profile.layers[start].saved_bytes
        stays = np.zeros_like(kept)
        stays[0] = min(taken[0], kept[0])
        times = np.full((2, end - start), np.inf)
        if self.menu.recompute:
            times[0] = self._passes_us[0, start:end]
        if self.menu.offload_gbps is not None:
            copy_us = (kept - stays) * self.samples / self.profile.samples
            copy_us /= self.menu.offload_gbps * BYTES_PER_US
            beside = np.zeros_like(times)
            beside[:, :-1] = self._passes_us[:, start + 1 : end]
            times[1] = np.maximum(copy_us - beside, 0.0).sum(axis=0)
        sizes = np.stack([kept, stays, taken, self._working[start:end]])
        return times, sizes, self._besides[start:end, start:end]

    @cached_property
    def _passes_us(self) -> Floats:
        """Forward and backward of each layer."""
        fields = ("forward_us", "forward_fixed_us"), ("backward_us", "backward_fixed_us")
        total, fixed = np.array([[self._values(it) for it in both] for both in fields]).swapaxes(0, 1)
        passes: Floats = fixed + (total - fixed) * (self.samples / self.profile.samples)
        return passes

    @cached_property
    def _kept(self) -> Ints:
        """Bytes of each layer that is not the first of its stage."""
        kept: Ints = np.array(self._values("saved_bytes")) - np.array(self._values("passing_bytes"))
        return kept

    @cached_property
    def _taken(self) -> Ints:
        """Bytes that each layer takes in; the batch is there anyway."""
        return np.array([0, *self._values("output_bytes")[:-1]])

    @cached_property
    def _working(self) -> Ints:
        """What operators of each layer need besides, as `Profile.working_bytes`."""
        fixed = np.array(self._values("working_fixed_bytes"))
        rest = np.array(self._values("working_bytes")) - fixed
        working: Ints = rest - (-fixed * self.profile.samples // self.share)
        return working

    @cached_property
    def _besides(self) -> Ints:
        """What recomputed segments need besides what they keep, by first and last layer."""
        inside = np.tri(self.profile.depth, dtype=bool).T
        passing = np.array(self._values("passing_bytes"))
        sums = np.where(inside, self._kept, 0).cumsum(axis=1) + passing[:, None]
        most = np.maximum.accumulate(np.where(inside, sums + self._working, 0), axis=1)
        besides: Ints = np.maximum(sums - self._taken[:, None], 0) + np.maximum(most - sums, 0)
        return besides

    def _values(self, field: str) -> list[int]:
        return [getattr(it, field) for it in self.profile.layers]


def _segments(start: int, ends: Sequence[int], treatments: Sequence[int]) -> Segments:
    """Units as the segments of a stage that begins there."""
    begins = (0, *ends[:-1])
    return merged(
        Segment(start + begin, start + end, TREATMENTS[treatment])
        for begin, end, treatment in zip(begins, ends, treatments, strict=True)
    )


def _by_ratio(costs: Floats, frees: NDArray[Any]) -> Ints:
    """Layers that can free bytes, those that free one at least time first."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(frees > 0, costs / np.maximum(frees, 1), np.inf)
    order = np.argsort(ratio, kind="stable")
    return order[np.isfinite(costs[order]) & (frees[order] > 0)]


@kernel
def _next_units(times: Floats, sizes: Ints, besides: Ints, layer: int) -> Ints:
    """Units that begin at a layer, one a row: end, treatment, bytes kept, needed besides, copied."""
    depth = times.shape[1]
    kept, stays, working = sizes[0, layer], sizes[1, layer], sizes[3, layer]
    units = np.zeros((depth - layer + 2, 5), dtype=np.int64)
    count = 0
    if times[0, layer] < np.inf:
        for end in range(layer + 1, depth + 1):
            units[count, 0], units[count, 1] = end, RECOMPUTE
            units[count, 2], units[count, 3] = sizes[2, layer], besides[layer, end - 1]
            count += 1
    units[count, 0], units[count, 1], units[count, 2], units[count, 3] = layer + 1, KEEP, kept, working
    count += 1
    if times[1, layer] < np.inf:
        units[count, 0], units[count, 1], units[count, 2] = layer + 1, OFFLOAD, stays
        units[count, 3], units[count, 4] = kept - stays + working, kept - stays
        count += 1
    return units[:count]


@kernel
def _least_units(
    times: Floats, sizes: Ints, besides: Ints, order: Ints, room: Ints
) -> tuple[float, Ints, Ints]:
    """The best way through a stage, by A*.

    Args:
        times: what it takes to repeat a layer's forward pass, and its copies; infinite where that may not be.
        sizes: of each layer the bytes that it keeps, that it keeps where it is offloaded, that it takes in,
            and that operators need.
        besides: what recomputed segments need besides what they keep, by first and last layer.
        order: layers that can free bytes, those that free one at least time first.
        room: samples of the share, of the profile, microbatches in flight, bytes of activations.

    Returns:
        The time that is added, the ends of units and their treatments; no units where nothing fits.
    """
    depth = times.shape[1]
    share, whole, in_flight, limit = room[0], room[1], room[2], room[3]
    freed, takes = _freeing(times, sizes, order)
    behind = np.zeros(depth + 1, dtype=np.int64)
    behind[:depth] = sizes[0][::-1].cumsum()[::-1]
    # Prefixes, in the order in which they are found: where they end, bytes kept, at most, copied last; the
    # prefix without the last unit and its treatment. Beside them their times, and which one is next to be
    # compared with.
    made = [(0, 0, limit // in_flight * whole // share, 0, -1, KEEP)]
    spent, others = [0.0], [-1]
    known = np.full((depth + 1, 2), -1, dtype=np.int64)
    queue = [(0.0, 0, 0)]  # less time with the least that others add, longer, found earlier
    while queue:
        prefix = heapq.heappop(queue)[2]
        layer, kept, peak, before, _, _ = made[prefix]
        time = spent[prefix]
        if layer == depth:
            way, at = np.empty((depth, 2), dtype=np.int64), depth
            while prefix > 0:
                at -= 1
                way[at, 0], way[at, 1] = made[prefix][0], made[prefix][5]
                prefix = made[prefix][4]
            return time, way[at:, 0].copy(), way[at:, 1].copy()
        other = known[layer, min(before, 1)]
        while other >= 0 and (spent[other] > time or made[other][1] > kept or made[other][2] > peak):
            other = others[other]
        if other >= 0:
            continue
        others[prefix] = known[layer, min(before, 1)]
        known[layer, min(before, 1)] = prefix
        again = 0.0
        units = _next_units(times, sizes, besides, layer)
        for at in range(len(units)):
            end, treatment, keeps = units[at, 0], units[at, 1], kept + units[at, 2]
            most = max(peak, keeps + units[at, 3] + before)
            ours, peaks = -(-keeps * share // whole), -(-most * share // whole)
            if treatment == RECOMPUTE:
                again += times[0, end - 1]
            if (in_flight - 1) * ours + peaks > limit:
                continue
            added = time
            if treatment != KEEP:
                added += again if treatment == RECOMPUTE else times[1, layer]
            least = added + _knapsack_us(freed[end], takes[end], keeps + behind[end] - _most_kept(room, most))
            if least < np.inf:
                heapq.heappush(queue, (least, -end, len(made)))
                made.append((end, keeps, most, units[at, 4], prefix, treatment))
                spent.append(added)
                others.append(-1)
    none = np.empty(0, dtype=np.int64)
    return np.inf, none, none


@kernel
def _most_kept(room: Ints, peak: int) -> float:
    """Bytes with all samples of the profile that a microbatch may keep at most, where one needs `peak`."""
    share, whole, in_flight, limit = room[0], room[1], room[2], room[3]
    left = limit / in_flight
    if in_flight > 1:
        left = min(left, (limit - peak * share / whole) / (in_flight - 1))
    return float(left * whole / share)


@kernel
def _freeing(times: Floats, sizes: Ints, order: Ints) -> tuple[Floats, Floats]:
    """Bytes that the layers from each one on free at least, the cheapest 0, 1, ... of them, and the time."""
    depth = times.shape[1]
    freed = np.zeros((depth + 1, len(order) + 1))
    takes = np.zeros((depth + 1, len(order) + 1))
    for first in range(depth + 1):
        for at, layer in enumerate(order):
            has = layer >= first
            freed[first, at + 1] = freed[first, at] + (sizes[0, layer] if has else 0)
            takes[first, at + 1] = takes[first, at] + (min(times[0, layer], times[1, layer]) if has else 0.0)
    return freed, takes


@kernel
def _knapsack_us(freed: Floats, takes: Floats, free: float) -> float:
    """What it takes at least to free so many bytes, parts of layers too."""
    if free <= 0.0:
        return 0.0
    if free >= freed[-1]:
        # Sums of floats may miss the last digits of what is freed exactly.
        return float(takes[-1]) if free <= freed[-1] * (1 + 1e-12) else np.inf
    at = np.searchsorted(freed, free, side="right")
    part = (free - freed[at - 1]) / (freed[at] - freed[at - 1])
    return float(takes[at - 1] + part * (takes[at] - takes[at - 1]))


@kernel
def _knapsacks_us(costs: Floats, saved: Floats, order: Ints, free: Floats) -> Floats:
    """As `Units.bounds_us`, with what each layer costs and frees, in this order."""
    depth = len(costs)
    found = np.zeros(free.shape)
    for start in range(free.shape[0]):
        for end in range(free.shape[1]):
            left = max(free[start, end] - depth, 0.0)  # as bytes are rounded up
            time = 0.0
            for layer in order:
                if left <= 0.0:
                    break
                if start <= layer < end:
                    part = min(left, saved[layer])
                    time += part * (costs[layer] / saved[layer])
                    left -= part
            found[start, end] = time * (1 - 1e-9) if left <= 1.0 else np.inf
    return found
