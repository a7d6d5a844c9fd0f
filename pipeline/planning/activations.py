"""The choice with the least time for one stage: which layers keep, recompute or offload, under a limit.

`costs.activations` says what a choice costs. Over the ways to cut the stage into units (kept and offloaded
layers, recomputed segments) the sum of their times is to be least, so that

    (k - 1) P + max_j (P_j + t_j + o_(j-1)) <= limit

a knapsack with one more term. `least_choice` solves it exactly: it walks from the first layer to the last
over prefixes (time, P, max_j), leaves out those that another one is nowhere worse than, and goes on with the
prefix whose time, with the least that the other layers can add, is smallest (A*). That least is the
fractional knapsack: the limit says how many bytes the other layers must free, and those that free a byte at
least time do so first. So the first prefix that reaches the end is the best choice. A max_j of at most
limit / k counts as that, since P is no larger. Bytes are integers throughout.

`bounds_us` has the fractional knapsack for all stages at once, from which the dynamic program begins (`prm`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from math import inf
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from arborcast.pipeline.costs.activations import (
    Segment,
    Segments,
    Treatment,
    copy_us,
    held,
    merged,
    unit_bytes,
)
from arborcast.pipeline.profiles import Profile

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Menu:
    """What may become of results besides being kept.

    Attributes:
        recompute: whether they may be recomputed.
        offload_gbps: GB/s between each rank and host memory, each way; None where nothing may be offloaded.
    """

    recompute: bool
    offload_gbps: float | None = None


@dataclass(frozen=True, slots=True)
class Room:
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

    def holds(self, kept: int, peak: int, whole: int) -> bool:
        """Whether there is room for so many bytes with `whole` samples, of each microbatch and at most."""
        ours, most = (-(-it * self.share // whole) for it in (kept, peak))
        return (self.in_flight - 1) * ours + most <= self.limit

    def most_kept(self, peak: int, whole: int) -> float:
        """Bytes with `whole` samples that a microbatch may keep at most, where one needs `peak`."""
        left = self.limit / self.in_flight
        if self.in_flight > 1:
            left = min(left, (self.limit - peak * self.share / whole) / (self.in_flight - 1))
        return left * whole / self.share

    def even(self, whole: int) -> int:
        """What a microbatch may need with `whole` samples without being what the limit hangs on.

        None keeps more than it needs, so that there is room for microbatches that all need so much.
        """
        return self.limit // self.in_flight * whole // self.share


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of the results of a stage.

    Attributes:
        segments: of the stage.
        extra_us: that each microbatch takes longer, both passes together.
    """

    segments: Segments
    extra_us: float


def least_choice(profile: Profile, start: int, end: int, menu: Menu, room: Room) -> Choice | None:
    """The choice for the layers [start, end) that adds the least time; None where none fits.

    Complexity: exponential in the layers at worst, as of any knapsack; the numbers of bytes of a model with
    repeated layers are few, and so are the prefixes.
    """
    whole = (Segment(start, end, Treatment.KEEP),)
    if held(profile, whole, room.share).with_in_flight(room.in_flight) <= room.limit:
        return Choice(whole, 0.0)
    if room.limit < 0:
        return None
    steps = _Steps(profile, start, end, menu, room)
    number = count()
    # (least time, -layer, number, time, kept, peak, bytes of an offloaded layer before, units)
    queue: list[tuple[float, int, int, float, int, int, int, Units]] = []
    known: dict[tuple[int, int], list[tuple[float, int, int]]] = {}
    even = room.even(profile.samples)

    def push(layer: int, time: float, kept: int, peak: int, before: int, made: Units) -> None:
        if room.holds(kept, peak, profile.samples):
            least = time + steps.least_us(layer, kept, room.most_kept(peak, profile.samples))
            if least < inf:
                heapq.heappush(queue, (least, -layer, next(number), time, kept, peak, before, made))

    push(start, 0.0, 0, even, 0, None)
    while queue:
        _, minus, _, time, kept, peak, before, made = heapq.heappop(queue)
        layer = -minus
        if layer == end:
            return Choice(merged(_listed(made)), time)
        others = known.setdefault((layer, before), [])
        if any(a <= time and b <= kept and c <= peak for a, b, c in others):
            continue
        others.append((time, kept, peak))
        for unit, added_us, keeps, besides, goes in steps.after[layer - start]:
            most = max(peak, kept + keeps + besides + before)
            push(unit.end, time + added_us, kept + keeps, most, goes, (made, unit))
    return None


Units: TypeAlias = "tuple[Units, Segment] | None"
"""The last one beside those before it."""


def _listed(made: Units) -> list[Segment]:
    found: list[Segment] = []
    while made is not None:
        made, unit = made
        found.append(unit)
    return found[::-1]


class _Steps:
    """What a stage may do next behind each layer, and what the layers behind add at least."""

    def __init__(self, profile: Profile, start: int, end: int, menu: Menu, room: Room) -> None:
        self.profile, self.menu, self.share = profile, menu, room.share
        samples = room.samples
        self.start, self.end = start, end
        layers = range(start, end)
        self._forward = [profile.forward_us(it, it + 1, samples) for it in layers]
        self._copies = [
            inf
            if menu.offload_gbps is None
            else sum(copy_us(profile, it, (start, end), samples, menu.offload_gbps))
            for it in layers
        ]
        keeps = [
            unit_bytes(profile, Segment(it, it + 1, Treatment.KEEP), first=it == start)[0] for it in layers
        ]
        saved = np.array(keeps, dtype=float)
        again = np.array(self._forward) if menu.recompute else np.full(len(saved), np.inf)
        costs = np.minimum(again, self._copies)
        frees = np.isfinite(costs) & (saved > 0)
        order = [it for it in _by_ratio(costs, saved) if frees[it]]
        # By layer: what all from it on would keep; freeing the first so many bytes of it takes so long.
        sums = [0, *accumulate(keeps)]
        self._all = [sums[-1] - it for it in sums]
        self._freeing: list[tuple[list[float], list[float]]] = []
        for layer in range(len(saved) + 1):
            behind = [it for it in order if it >= layer]
            bytes_, times = (np.concatenate(([0.0], np.cumsum(it[behind]))) for it in (saved, costs))
            self._freeing.append((bytes_.tolist(), times.tolist()))
        self.after = [list(self._after(layer)) for layer in layers]

    def least_us(self, layer: int, kept: int, most: float) -> float:
        """What the layers from this one on add at least, where those before it keep so many bytes."""
        free = kept + self._all[layer - self.start] - most
        if free <= 0:
            return 0.0
        bytes_, times = self._freeing[layer - self.start]
        if free >= bytes_[-1]:
            # Sums of floats may miss the last digits of what is freed exactly.
            return times[-1] if free <= bytes_[-1] * (1 + 1e-12) else inf
        at = bisect_right(bytes_, free)
        part = (free - bytes_[at - 1]) / (bytes_[at] - bytes_[at - 1])
        return times[at - 1] + part * (times[at] - times[at - 1])

    def _after(self, layer: int) -> Iterator[tuple[Segment, float, int, int, int]]:
        """Units that begin at a layer: time, `unit_bytes` with what operators need, and what is copied."""
        first = layer == self.start
        added = 0.0
        for end in range(layer + 1, self.end + 1) if self.menu.recompute else ():
            added += self._forward[end - 1 - self.start]
            unit = Segment(layer, end, Treatment.RECOMPUTE)
            keeps, besides = unit_bytes(self.profile, unit, first=first)
            yield unit, added, keeps, besides + self.profile.working_bytes(layer, end, self.share), 0
        working = self.profile.working_bytes(layer, layer + 1, self.share)
        unit = Segment(layer, layer + 1, Treatment.KEEP)
        keeps, besides = unit_bytes(self.profile, unit, first=first)
        yield unit, 0.0, keeps, besides + working, 0
        if self.menu.offload_gbps is not None:
            unit = Segment(layer, layer + 1, Treatment.OFFLOAD)
            stays, moved = unit_bytes(self.profile, unit, first=first)
            yield unit, self._copies[layer - self.start], stays, moved + working, moved


def _by_ratio(costs: Floats, frees: Floats) -> list[int]:
    """Layers, those that free a byte at least time first."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(frees > 0, costs / np.maximum(frees, 1), np.inf)
    order: list[int] = np.argsort(ratio, kind="stable").tolist()
    return order


def bounds_us(profile: Profile, menu: Menu, samples: float, share: int, free: Floats) -> Floats:
    """What the choice of each stage adds to the time of a microbatch at least, by [start, end].

    The fractional knapsack of `least_choice`; infinite where all layers together do not free enough.

    Args:
        profile: of the model.
        menu: what may be chosen.
        samples: of a microbatch on a replica on average.
        share: samples of the largest share.
        free: bytes of each microbatch that a stage must not keep.
    """
    within = np.arange(profile.depth + 1)
    saved = np.array([it.saved_bytes * share / profile.samples for it in profile.layers])
    costs = np.full(profile.depth, np.inf)
    for layer in range(profile.depth):
        if menu.recompute:
            costs[layer] = profile.forward_us(layer, layer + 1, samples)
        if menu.offload_gbps is not None:
            # The first layer of a stage moves less, the last one runs beside nothing.
            copies = copy_us(profile, layer, (layer, profile.depth), samples, menu.offload_gbps)
            costs[layer] = min(costs[layer], sum(copies))
    times, left = np.zeros(free.shape), np.maximum(free - profile.depth, 0.0)  # as bytes are rounded up
    for layer in _by_ratio(costs, saved):
        if saved[layer] and np.isfinite(costs[layer]):
            has = (within[:-1, None] <= layer) & (layer < within[None, :])
            part = np.where(has, np.minimum(left, saved[layer]), 0.0)
            times += part * (costs[layer] / saved[layer])
            left -= part
    return np.where(left <= 1.0, times * (1 - 1e-9), np.inf)


def least_memory(profile: Profile, start: int, end: int, menu: Menu, room: Room) -> Segments:
    """The choice for the layers [start, end) that needs the least memory, whatever its time.

    Prefixes (P, max_j) that no other one is nowhere larger than are kept, layer by layer.
    """
    steps = _Steps(profile, start, end, menu, room)
    known: list[list[tuple[tuple[int, int, int], Units]]] = [[] for _ in range(end - start + 1)]
    known[0] = [((0, 0, 0), None)]
    for layer in range(start, end):
        for (kept, peak, before), made in known[layer - start]:
            for unit, _, keeps, besides, goes in steps.after[layer - start]:
                mine = kept + keeps, max(peak, kept + keeps + besides + before), goes
                at = known[unit.end - start]
                if not any(_no_more(other, mine) for other, _ in at):
                    at[:] = [it for it in at if not _no_more(mine, it[0])]
                    at.append((mine, (made, unit)))
    _, made = min(known[-1], key=lambda it: ((room.in_flight - 1) * it[0][0] + it[0][1], it[0][0]))
    return merged(_listed(made))


def _no_more(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))
