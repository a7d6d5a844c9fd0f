"""SPP's dynamic program (PRM): layers into stages, stages onto places of a device order.

`W(l, s, r, i)` of the source counts stages from the front. Here they are counted from the back, because
what an order keeps in flight depends on the stages *behind* a stage: one table then serves every number of
stages, with the memory limit exact for each.

    least[t][l, p] = the least possible maximum of any stage's total time or any boundary's, with the layers
                     from l on in t stages, the first of them on place p and the others right behind it
                   = min over cuts m of max(stage(l, m, p), onwards[t-1][m, p])
    onwards[t][m, p] = min over places q right behind p of max(boundary(m, p, q), least[t][m, q])

Source: SPP (arXiv 2204.10562), section IV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from arborcast.pipeline.planning.memory import peak_in_flight
from arborcast.pipeline.planning.tables import DeviceTables, Floats, Integers, LayerTables
from arborcast.pipeline.stages import Stage

Costs: TypeAlias = Callable[[int], Callable[[int], Floats]]
"""What a stage costs, by the number of stages behind it; by its first layer; by [end - first - 1, place]."""


@dataclass(frozen=True, slots=True)
class PartitionProblem:
    """What a partition is sought for.

    Attributes:
        batch: samples.
        microbatches: that it is divided into.
        order: one of `ORDERS`; it only matters where memory is limited.
        recompute: whether a backward pass repeats its forward pass.
        max_in_flight: most microbatches in flight, or None.
        limits: bytes of memory of each rank; None for no limit.
    """

    batch: int
    microbatches: int
    order: str = "1f1b"
    recompute: bool = False
    max_in_flight: int | None = None
    limits: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class PlacedStages:
    """Stages on places of a device order, with what they cost.

    Attributes:
        value_us: the least possible maximum of any stage's total time or any boundary's.
        cuts: where stages begin, then the number of layers.
        places: of each stage, by their numbers in `devices`.
        devices: the tables that know the places.
        exact: whether the rates of all its places were, when it was found; otherwise it may cost more.
    """

    value_us: float
    cuts: tuple[int, ...]
    places: tuple[int, ...]
    devices: DeviceTables
    exact: bool

    @property
    def stages(self) -> tuple[Stage, ...]:
        """As a plan takes them."""
        bounds = pairwise(self.cuts)
        return tuple(
            Stage(start, end, self.devices.ranks(place))
            for (start, end), place in zip(bounds, self.places, strict=True)
        )


def partitions(
    layers: LayerTables,
    devices: DeviceTables,
    question: PartitionProblem,
    most_stages: int,
    *,
    exact: bool = True,
    published: bool = False,
) -> dict[int, PlacedStages]:
    """For every number of stages up to `most_stages` the best partition, where there is one.

    A stage on r ranks takes M times (forward + backward) of 1/r of a microbatch, recomputation another
    forward, and one allreduce of its gradients among exactly its ranks. A boundary takes M times the slower
    direction: activations and gradients use different links, or different directions of a link. Ranks at
    both ends of the order may stay without work. Of equals, fewer ranks and earlier ones count, then
    earlier cuts.

    As `published`, a boundary takes activations one after the other with gradients, both over the slowest
    link that is involved, as many at once as the smaller stage has replicas, and all ranks have work.

    Allreduces begin with upper limits of their rates. With `exact`, those that a best partition uses are
    made exact until all of them are, so that the result is as if all had been known. (Without, that holds
    for the partitions that are marked as exact.)

    Complexity: O(S (L^2 n^2 + L n^3)) for L layers, n ranks and S stages, in numpy.
    """
    boundary = (_published_boundary_us if published else _boundary_us)(layers, devices, question)
    while True:
        costs = _filtered(layers, devices, question)
        found = _solved(devices, boundary, costs, most_stages, every_rank=published)
        places = {place for partition in found.values() for place in partition.places}
        if not exact or not devices.find_rates(places):
            return found


def _filtered(layers: LayerTables, devices: DeviceTables, question: PartitionProblem) -> Costs:
    """Total time of a stage; infinite where memory is too small."""
    stage = _stage_us(layers, devices, question)
    if question.limits is None:
        return lambda behind: lambda start: stage[start, start + 1 :]
    room = _MemoryFit(layers, devices, question)
    most = room.most_in_flight()

    def costs(behind: int) -> Callable[[int], Floats]:
        need = room.in_flight(behind)
        return lambda start: np.where(most[start, start + 1 :] >= need, stage[start, start + 1 :], np.inf)

    return costs


def closest_to_fitting(
    layers: LayerTables, devices: DeviceTables, question: PartitionProblem, stages: Sequence[int]
) -> PlacedStages | None:
    """The partition into one of these numbers of stages (ascending) whose fullest rank misses least memory.

    The value is in bytes, of need beyond the limit. None where the batch has too few samples.
    """
    room = _MemoryFit(layers, devices, question)
    possible = np.isfinite(_stage_us(layers, devices, question))
    boundary = np.full((layers.profile.depth, len(devices.sender)), -np.inf)

    def costs(behind: int) -> Callable[[int], Floats]:
        missing = np.where(possible, room.missing(behind), np.inf)
        return lambda start: missing[start, start + 1 :]

    found = _solved(devices, boundary, costs, stages[-1])
    there = [found[number] for number in stages if number in found]
    return min(there, key=lambda partition: partition.value_us, default=None)


def _solved(
    devices: DeviceTables, boundary: Floats, costs: Costs, most_stages: int, *, every_rank: bool = False
) -> dict[int, PlacedStages]:
    program = _Program(devices, boundary, costs, every_rank=every_rank)
    found = {}
    for count in range(1, most_stages + 1):
        program.add_stage()
        partition = program.best()
        if partition is not None:
            found[count] = partition
    return found


class _Program:
    """The tables `least` and `onwards`, one stage after another from the back."""

    def __init__(
        self, devices: DeviceTables, boundary: Floats, costs: Costs, *, every_rank: bool = False
    ) -> None:
        self.devices = devices
        self.costs = costs
        free = np.zeros(len(devices.first))
        ends = devices.first + devices.replicas
        self.first = np.where(devices.first > 0, np.inf, 0.0) if every_rank else free
        self.last = np.where(ends < len(devices.order), np.inf, 0.0) if every_rank else free
        self.boundary = boundary
        self.depth = len(boundary)
        # Boundaries are sorted by sender, so that those of one sender are a run.
        self.senders, self.runs = np.unique(devices.sender, return_index=True)
        self.least: list[Floats] = []
        self.onwards: list[Floats] = []

    def add_stage(self) -> None:
        """Put one more stage in front."""
        behind = len(self.least)
        if not behind:
            last = np.array([self.costs(0)(start)[-1] for start in range(self.depth)])
            self.least.append(last + self.last)
            return
        onwards = np.full(self.least[-1].shape, np.inf)
        if len(self.senders):
            ways = np.maximum(self.boundary, self.least[-1][:, self.devices.receiver])
            onwards[:, self.senders] = np.minimum.reduceat(ways, self.runs, axis=1)
        self.onwards.append(onwards)
        least = np.full(onwards.shape, np.inf)
        # Row by row, from the cuts behind each: half of the work, and in the processor's cache.
        cost = self.costs(behind)
        for start in range(self.depth - 1):
            np.maximum(cost(start)[:-1], onwards[start + 1 :]).min(axis=0, out=least[start])
        self.least.append(least)

    def best(self) -> PlacedStages | None:
        """The best partition into all stages so far; None where there is none."""
        count = len(self.least)
        value = self.least[count - 1][0] + self.first
        if not np.isfinite(value.min()):
            return None
        place = int(value.argmin())
        cuts, places = [0], [place]
        for behind in range(count - 1, 0, -1):
            cost = self.costs(behind)(cuts[-1])[:-1, place]
            ways = np.maximum(cost, self.onwards[behind - 1][cuts[-1] + 1 :, place])
            cut = cuts[-1] + 1 + int(ways.argmin())
            run = self.devices.behind[place]
            receivers = self.devices.receiver[run]
            after = np.maximum(self.boundary[cut, run], self.least[behind - 1][cut, receivers])
            place = int(receivers[after.argmin()])
            cuts.append(cut)
            places.append(place)
        exact = bool(self.devices.exact[places].all())
        return PlacedStages(float(value.min()), (*cuts, self.depth), tuple(places), self.devices, exact)


class _MemoryFit:
    """Which stages fit into memory, by the number of microbatches that they keep."""

    def __init__(self, layers: LayerTables, devices: DeviceTables, question: PartitionProblem) -> None:
        assert question.limits is not None
        self.question = question
        self.needs = Needs(layers, question, len(devices.order))
        self.size = devices.replicas - 1
        self.limit = np.array(
            [min(question.limits[rank] for rank in devices.ranks(place)) for place in range(len(self.size))]
        )

    def in_flight(self, behind: int) -> int:
        """Microbatches that a stage keeps with so many stages behind it."""
        it = self.question
        return peak_in_flight(it.order, behind, it.microbatches, it.max_in_flight)

    def missing(self, behind: int) -> Integers:
        """Bytes beyond the limit, with so many stages behind; negative where there is room."""
        need = self.needs.fixed + self.in_flight(behind) * self.needs.each
        missing: Integers = need[:-1, :, self.size] - self.limit
        return missing

    def most_in_flight(self) -> Integers:
        """How many microbatches there is room for; less than 1 where there is none for any."""
        left = self.limit - self.needs.fixed[:-1, :, self.size]
        each = self.needs.each[:-1, :, self.size]
        most: Integers = np.where(left < 0, 0, left // np.maximum(each, 1))
        return np.where((each == 0) & (left >= 0), self.question.microbatches, most)


class Needs:
    """Bytes that a rank needs for layers [start, end) with 1, 2, ... replicas, as `memory.stage_memory`.

    Attributes:
        fixed: weights, gradients, optimizer, messages, and what is there once for all microbatches, by
            [start, end, replicas - 1].
        each: what every microbatch in flight adds.
    """

    def __init__(self, layers: LayerTables, question: PartitionProblem, ranks: int) -> None:
        largest = -(-question.batch // question.microbatches)
        share = -(-largest // np.arange(1, ranks + 1))
        samples = layers.profile.samples
        crossing = np.ceil(layers.crossing_bytes[:, None] * share / samples).astype(np.int64)
        inputs, outputs = crossing[:, None, :], crossing[None, :, :]
        saved = np.ceil(layers.saved_bytes[:, :, None] * share / samples).astype(np.int64)
        self.fixed: Integers = layers.fixed_bytes[:, :, None] + 2 * (inputs + outputs)
        self.each: Integers = saved
        if question.recompute:
            self.fixed = self.fixed + np.maximum(saved - inputs, 0)
            self.each = np.broadcast_to(inputs, saved.shape)


def _stage_us(layers: LayerTables, devices: DeviceTables, question: PartitionProblem) -> Floats:
    """Total time of a stage by [start, end, place]; infinite where there must not be one."""
    count = question.microbatches
    (fixed_forward, forward), (fixed_backward, backward) = layers.forward, layers.backward
    passes = 2 if question.recompute else 1
    fixed = count * (passes * fixed_forward + fixed_backward)
    rest = question.batch * (passes * forward + backward)
    replicas = np.arange(1, len(devices.order) + 1)
    compute = fixed[:, :, None] + rest[:, :, None] / replicas
    possible = layers.allowed[:, :, None] & (replicas * count <= question.batch)
    compute = np.where(possible, compute, np.inf)[:-1]  # no stage begins behind the last layer
    total: Floats = compute[:, :, devices.replicas - 1] + devices.allreduces_us(layers)[:-1]
    return total


def _boundary_us(layers: LayerTables, devices: DeviceTables, question: PartitionProblem) -> Floats:
    """Total time of a boundary by [layer behind it, boundary]."""
    share = question.batch / question.microbatches / layers.profile.samples
    size = layers.crossing_bytes[: layers.profile.depth, None] * share
    ways = [way.latency_us + size * way.us_per_byte for way in (devices.forward, devices.backward)]
    return question.microbatches * np.maximum(*ways)


def _published_boundary_us(layers: LayerTables, devices: DeviceTables, question: PartitionProblem) -> Floats:
    """The same by the source's formula: both ways, over the slowest link times the smaller replica count."""
    share = question.batch / question.microbatches / layers.profile.samples
    size = layers.crossing_bytes[: layers.profile.depth, None] * share
    pairs = np.minimum(devices.replicas[devices.sender], devices.replicas[devices.receiver])
    us_per_byte = devices.slowest_us_per_byte / pairs
    both: Floats = question.microbatches * 2 * size * us_per_byte
    return both
