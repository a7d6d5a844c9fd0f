"""SPP's dynamic program (PRM): layers into stages, stages onto places of a device order.

`W(l, s, r, i)` of the source counts stages from the front. Here they are counted from the back, because
what an order keeps in flight depends on the stages *behind* a stage: one table then serves every number of
stages, with the memory limit exact for each.

    least[t][l, p] = the least possible maximum of any stage's total time or any boundary's, with the layers
                     from l on in t stages, the first of them on place p and the others right behind it
                   = min over cuts m of max(stage(l, m, p), onwards[t-1][m, p])
    onwards[t][m, p] = min over places q right behind p of max(boundary(m, p, q), least[t][m, q])

Under a memory limit `stage` may include the least time that keeping, recomputing or offloading the results of
each layer adds (`planning.activations`). It begins with a lower limit for every stage; those that a best
partition uses are made exact until all of them are, so that the result is as if all had been known.

Source: SPP (arXiv 2204.10562), section IV.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf

import numpy as np

from arborcast.pipeline.costs.devices import usable
from arborcast.pipeline.costs.saved_bytes import Segments
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.planning.activation_search import ActivationOptions, MemoryBudget
from arborcast.pipeline.planning.memory_need import peak_in_flight
from arborcast.pipeline.planning.tables import DeviceTables, Floats, Integers, LayerTables
from arborcast.pipeline.stages import Stage
from arborcast.synth.kernels.compiled import kernel


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
        menu: what may become of the results of layers under these limits; None for what `recompute` says.
    """

    batch: int
    microbatches: int
    order: str = "1f1b"
    recompute: bool = False
    max_in_flight: int | None = None
    limits: tuple[int, ...] | None = None
    menu: ActivationOptions | None = None

    def in_flight(self, behind: int) -> int:
        """Microbatches that a stage keeps with so many stages behind it."""
        return peak_in_flight(self.order, behind, self.microbatches, self.max_in_flight)


@dataclass(frozen=True, slots=True)
class PlacedStages:
    """Stages on places of a device order, with what they cost.

    Attributes:
        value_us: the least possible maximum of any stage's total time or any boundary's.
        cuts: where stages begin, then the number of layers.
        places: of each stage, by their numbers in `devices`.
        devices: the tables that know the places.
        exact: whether the rates of all its places were, when it was found; otherwise it may cost more.
        segments: of each stage, where they were chosen by layer; else empty.
    """

    value_us: float
    cuts: tuple[int, ...]
    places: tuple[int, ...]
    devices: DeviceTables
    exact: bool
    segments: tuple[Segments, ...] = ()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """As a plan takes them."""
        bounds = pairwise(self.cuts)
        chosen = self.segments or [()] * len(self.places)
        return tuple(
            Stage(start, end, self.devices.ranks(place), segments)
            for (start, end), place, segments in zip(bounds, self.places, chosen, strict=True)
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
    fit = None if question.limits is None else _MemoryFit(layers, devices, question)
    chosen = None if fit is None or question.menu is None else _ByLayer(layers, fit, question, question.menu)
    stage = _stage_us(layers, devices, question)
    while True:
        added = chosen or fit or _Added(layers, devices)
        found = _solved(devices, boundary, stage, added, most_stages, every_rank=published)
        if chosen is not None and chosen.find(found):
            continue
        places = {place for partition in found.values() for place in partition.places}
        if not exact or not devices.find_rates(places):
            return found if chosen is None else {count: chosen.said(it) for count, it in found.items()}
        stage = _stage_us(layers, devices, question)


def closest_to_fitting(
    layers: LayerTables, devices: DeviceTables, question: PartitionProblem, stages: Sequence[int]
) -> PlacedStages | None:
    """The partition into one of these numbers of stages (ascending) whose fullest rank misses least memory.

    The value is in bytes, of need beyond the limit. None where the batch has too few samples.
    """
    possible = np.where(np.isfinite(_stage_us(layers, devices, question)), 0.0, np.inf)
    boundary = np.full((layers.profile.depth, len(devices.sender)), -np.inf)
    missing = _Missing(layers, devices, question)
    found = _solved(devices, boundary, possible, missing, stages[-1])
    there = [found[number] for number in stages if number in found]
    return min(there, key=lambda partition: partition.value_us, default=None)


class _Added:
    """What stages cost beyond the time of their passes and allreduces: nothing where memory is not limited.

    Attributes:
        kinds: of each place; all of a kind are alike.
    """

    def __init__(self, layers: LayerTables, devices: DeviceTables) -> None:
        self.kinds: Integers = np.zeros(len(devices.replicas), dtype=np.int64)
        self._none = np.zeros((layers.profile.depth, layers.profile.depth + 1, 1))

    def added(self, behind: int) -> Floats:
        """By [start, end, kind], with so many stages behind."""
        return self._none


def _solved(
    devices: DeviceTables,
    boundary: Floats,
    stage: Floats,
    added: _Added,
    most_stages: int,
    *,
    every_rank: bool = False,
) -> dict[int, PlacedStages]:
    program = _StageTables(devices, boundary, stage, added, every_rank=every_rank)
    found = {}
    for count in range(1, most_stages + 1):
        program.add_stage()
        partition = program.best()
        if partition is not None:
            found[count] = partition
    return found


class _StageTables:
    """The tables `least` and `onwards`, one stage after another from the back."""

    def __init__(
        self, devices: DeviceTables, boundary: Floats, stage: Floats, added: _Added, *, every_rank: bool
    ) -> None:
        self.devices, self.boundary, self.stage, self.costs = devices, boundary, stage, added
        free = np.zeros(len(devices.first))
        ends = devices.first + devices.replicas
        self.first = np.where(devices.first > 0, np.inf, 0.0) if every_rank else free
        self.last = np.where(ends < len(devices.order), np.inf, 0.0) if every_rank else free
        self.depth = len(boundary)
        self.added: list[Floats] = []
        self.least: list[Floats] = []
        self.onwards: list[Floats] = []

    def add_stage(self) -> None:
        """Put one more stage in front."""
        added = self.costs.added(len(self.least))
        self.added.append(added)
        if len(self.added) == 1:
            last = self.stage[:, -1] + added[:, -1, self.costs.kinds]
            self.least.append(last + self.last)
            return
        devices = self.devices
        onwards = _onwards(self.boundary, devices.sender, devices.receiver, self.least[-1])
        self.onwards.append(onwards)
        self.least.append(_one_more(self.stage, added, self.costs.kinds, onwards))

    def best(self) -> PlacedStages | None:
        """The best partition into all stages so far; None where there is none."""
        count = len(self.least)
        value = self.least[count - 1][0] + self.first
        if not np.isfinite(value.min()):
            return None
        place = int(value.argmin())
        cuts, places = [0], [place]
        for behind in range(count - 1, 0, -1):
            ends = slice(cuts[-1] + 1, self.depth)
            cost = self.stage[cuts[-1], ends, place]
            cost = cost + self.added[behind][cuts[-1], ends, self.costs.kinds[place]]
            ways = np.maximum(cost, self.onwards[behind - 1][ends, place])
            cut = cuts[-1] + 1 + int(ways.argmin())
            run = self.devices.behind[place]
            receivers = self.devices.receiver[run]
            after = np.maximum(self.boundary[cut, run], self.least[behind - 1][cut, receivers])
            place = int(receivers[after.argmin()])
            cuts.append(cut)
            places.append(place)
        exact = bool(self.devices.exact[places].all())
        return PlacedStages(float(value.min()), (*cuts, self.depth), tuple(places), self.devices, exact)


@kernel
def _onwards(boundary: Floats, sender: Integers, receiver: Integers, least: Floats) -> Floats:
    """The best ways on from each place, by the cut behind it."""
    onwards = np.full(least.shape, np.inf)
    for cut in range(least.shape[0]):
        for way in range(len(sender)):
            value = max(boundary[cut, way], least[cut, receiver[way]])
            onwards[cut, sender[way]] = min(onwards[cut, sender[way]], value)
    return onwards


@kernel
def _one_more(stage: Floats, added: Floats, kinds: Integers, onwards: Floats) -> Floats:
    """What is least with one more stage in front of the best ways on."""
    depth, places = onwards.shape
    least = np.full((depth, places), np.inf)
    for start in range(depth - 1):
        for end in range(start + 1, depth):
            for place in range(places):
                value = max(stage[start, end, place] + added[start, end, kinds[place]], onwards[end, place])
                least[start, place] = min(least[start, place], value)
    return least


class _MemoryFit(_Added):
    """Which stages fit into memory, by the number of microbatches that they keep.

    Attributes:
        kinds: of each place; places are alike that have as many replicas with as much memory.
        replicas: of each kind.
        limit: bytes of each kind's rank that has least, without the reserve.
    """

    def __init__(self, layers: LayerTables, devices: DeviceTables, question: PartitionProblem) -> None:
        assert question.limits is not None
        self.question = question
        self.needs = Needs(layers, question, len(devices.order), devices.network.peer_bytes)
        limits = [
            usable(min(question.limits[it] for it in devices.ranks(at)))
            for at in range(len(devices.replicas))
        ]
        pairs = list(zip(devices.replicas.tolist(), limits, strict=True))
        different = {pair: kind for kind, pair in enumerate(dict.fromkeys(pairs))}
        self.kinds = np.array([different[pair] for pair in pairs])
        self.replicas, self.limit = np.array(list(different)).T

    def added(self, behind: int) -> Floats:
        """Infinite where memory is too small."""
        return np.where(self._most_in_flight >= self.question.in_flight(behind), 0.0, np.inf)

    def left(self, *, working: bool = True) -> Integers:
        """Bytes that are left for activations, by [start, end, kind]; -1 where the update does not fit."""
        needs, size = self.needs, self.replicas - 1
        fixed = (needs.fixed if working else needs.fixed - needs.working)[:-1, :, size]
        left: Integers = np.where(needs.update[:-1, :, size] > self.limit, -1, self.limit - fixed)
        return left

    @cached_property
    def _most_in_flight(self) -> Integers:
        """How many microbatches there is room for; less than 1 where there is none for any."""
        left = self.left()
        each = self.needs.each[:-1, :, self.replicas - 1]
        most: Integers = np.where(left < 0, 0, left // np.maximum(each, 1))
        return np.where((each == 0) & (left >= 0), self.question.microbatches, most)


class _Missing(_MemoryFit):
    """Bytes beyond the limit instead of time."""

    def added(self, behind: int) -> Floats:
        """Negative where there is room."""
        needs, size = self.needs, self.replicas - 1
        need = np.maximum(needs.fixed + self.question.in_flight(behind) * needs.each, needs.update)
        missing: Floats = (need[:-1, :, size] - self.limit).astype(float)
        return missing


class _ByLayer(_Added):
    """What the best choice for each stage adds to a microbatch: a lower limit until `find` makes it exact."""

    def __init__(
        self, layers: LayerTables, fit: _MemoryFit, question: PartitionProblem, menu: ActivationOptions
    ) -> None:
        self.layers, self.fit, self.question, self.menu = layers, fit, question, menu
        self.kinds = fit.kinds
        self._left = fit.left(working=False)
        self._tables: dict[int, Floats] = {}
        self._exact: dict[tuple[int, int, int, int], Segments] = {}

    def added(self, behind: int) -> Floats:
        """All microbatches together."""
        in_flight = self.question.in_flight(behind)
        if in_flight not in self._tables:
            tables = [self._bound_us(kind, in_flight) for kind in range(len(self.fit.replicas))]
            self._tables[in_flight] = np.stack(tables, axis=2)
        return self.question.microbatches * self._tables[in_flight]

    def find(self, found: Mapping[int, PlacedStages]) -> bool:
        """Make exact what these partitions use; whether that changes what one of them costs."""
        changed = False
        for partition in found.values():
            for key in self._keys(partition):
                if key not in self._exact:
                    changed |= self._find(*key)
        return changed

    def said(self, partition: PlacedStages) -> PlacedStages:
        """A partition with the choices of its stages."""
        return replace(partition, segments=tuple(self._exact[key] for key in self._keys(partition)))

    def _keys(self, partition: PlacedStages) -> Iterator[tuple[int, int, int, int]]:
        for index, (start, end) in enumerate(pairwise(partition.cuts)):
            in_flight = self.question.in_flight(len(partition.places) - 1 - index)
            yield in_flight, start, end, int(self.kinds[partition.places[index]])

    def _find(self, in_flight: int, start: int, end: int, kind: int) -> bool:
        left = self._room(kind, in_flight)[start]
        room = self._budget(kind, in_flight, int(left[end]))
        choice = self.layers.choice(start, end, self.menu, room)
        added_us = inf if choice is None else choice.extra_us
        self._exact[in_flight, start, end, kind] = () if choice is None else choice.segments
        table = self._tables[in_flight][start, :, kind]
        before = table.copy()
        if choice is None or self.menu.offload_gbps is None:
            # With as little room, more layers at the end need no less: any choice for them is one for these.
            # (A copy at the end of these has nothing to run beside, so that this is not so of its time.)
            more = np.flatnonzero(left[end:] <= left[end]) + end
            table[more] = np.maximum(table[more], added_us)
        table[end] = added_us
        return not np.array_equal(before, table)

    def _room(self, kind: int, in_flight: int) -> Integers:
        """Bytes for activations by [start, end], where so many microbatches have their messages, too."""
        size, left = int(self.fit.replicas[kind]) - 1, self._left[:, :, kind]
        room: Integers = np.where(left < 0, -1, left - in_flight * self.fit.needs.crossing[:-1, :, size])
        return room

    def _budget(self, kind: int, in_flight: int, left: int) -> MemoryBudget:
        size, it = int(self.fit.replicas[kind]), self.question
        share = -(-it.batch // it.microbatches)
        return MemoryBudget(-(-share // size), it.batch / it.microbatches / size, in_flight, left)

    def _bound_us(self, kind: int, in_flight: int) -> Floats:
        room = self._budget(kind, in_flight, 0)
        left = self._room(kind, in_flight)
        saved = self.layers.saved_bytes[:-1] * (room.share / self.layers.profile.samples)
        bound = self.layers.units(self.menu, room).bounds_us(saved - left / in_flight)
        return np.where(left < 0, np.inf, bound)


class Needs:
    """Bytes that a rank needs for layers [start, end) with 1, 2, ... replicas, as `memory.stage_memory`.

    Attributes:
        fixed: weights, gradients, optimizer, messages, buffers of the replicas' group, and what is there once
            for all microbatches, by [start, end, replicas - 1].
        each: what every microbatch in flight adds.
        crossing: the part of `each` that is not activations: messages, and what is left between the halves
            of a split backward pass.
        working: the part of `fixed` that operators need where all results are kept.
        update: what the update needs, when none is in flight.
    """

    def __init__(
        self, layers: LayerTables, question: PartitionProblem, ranks: int, peer_bytes: int = 0
    ) -> None:
        largest = -(-question.batch // question.microbatches)
        share = -(-largest // np.arange(1, ranks + 1))
        samples = layers.profile.samples
        crossing = np.ceil(layers.crossing_bytes[:, None] * share / samples).astype(np.int64)
        inputs, outputs = crossing[:, None, :], crossing[None, :, :]
        saved = np.ceil(layers.saved_bytes[:, :, None] * share / samples).astype(np.int64)
        self.working: Integers = np.stack([layers.working_bytes(int(it)) for it in share], axis=-1)
        crossing = np.broadcast_to(inputs + outputs, saved.shape)
        if ORDERS[question.order].splits:
            between = np.ceil(layers.split_bytes[:, :, None] * share / samples).astype(np.int64)
            crossing = crossing + between
        lasting = layers.fixed_bytes[:, :, None] + peer_bytes * np.arange(ranks)
        fixed = lasting + 4 * inputs + outputs
        self.fixed: Integers = fixed + self.working
        self.update: Integers = lasting + layers.update_bytes[:, :, None]
        self.each: Integers = saved + crossing
        if question.recompute:
            self.fixed = fixed + np.maximum(saved + self.working - inputs, 0)
            self.each = inputs + crossing
        self.crossing = crossing


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
