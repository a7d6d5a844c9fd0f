"""What every possible stage and boundary of a pipeline costs, as arrays for the dynamic program.

A stage is a range of layers on a *place*: consecutive ranks of a device order. `LayerTables` knows the
ranges, `DeviceTables` the places and the boundaries between them; both are made once and asked for every
number of microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from arborcast.pipeline.answers import kept
from arborcast.pipeline.costs.link_costs import BYTES_PER_US, LinkCosts
from arborcast.pipeline.planning.activation_search import (
    ActivationOptions,
    ActivationPolicy,
    MemoryBudget,
    Units,
)
from arborcast.pipeline.profiles import Layer, Profile
from arborcast.pipeline.stages import boundary_messages
from arborcast.synth.topology import Topology

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class LayerTables:
    """Sums over the layers [start, end) of a profile, by start (row) and end (column).

    Attributes:
        profile: of the model.
        keep_ties_together: whether layers that share a parameter must be in one stage.
    """

    profile: Profile
    keep_ties_together: bool = False

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """The layers at which a stage other than the first may begin."""
        ties = self.profile.ties if self.keep_ties_together else ()
        return tuple(
            cut
            for cut in range(1, self.profile.depth)
            if not any(tie.layers[0] < cut <= tie.layers[-1] for tie in ties)
        )

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """Whether a stage may hold these layers."""
        depth = self.profile.depth
        bounds = np.zeros(depth + 1, dtype=bool)
        bounds[[0, *self.cuts, depth]] = True
        places = np.arange(depth + 1)
        return (places[:, None] < places[None, :]) & bounds[:, None] & bounds[None, :]

    @cached_property
    def forward(self) -> tuple[Floats, Floats]:
        """Microseconds of a forward pass: the fixed part, and the rest per sample."""
        return self._time("forward_us", "forward_fixed_us")

    @cached_property
    def backward(self) -> tuple[Floats, Floats]:
        """Likewise of a backward pass."""
        return self._time("backward_us", "backward_fixed_us")

    @cached_property
    def gradient_bytes(self) -> Integers:
        """What an allreduce carries."""
        gradients: Integers = self._sum("gradient_bytes") - self._shared
        return gradients

    @cached_property
    def first_gradients(self) -> Integers:
        """For each layer the first one from there on with gradients; the number of layers where none has."""
        has = np.flatnonzero([it.gradient_bytes > 0 for it in self.profile.layers])
        places = np.searchsorted(has, np.arange(self.profile.depth + 1))
        return np.append(has, self.profile.depth)[places]

    @cached_property
    def fixed_bytes(self) -> Integers:
        """Parameters, gradients and the optimizer's state."""
        parameters: Integers = self._sum("parameter_bytes") - self._shared
        optimizer: Integers = self._sum("optimizer_bytes")
        for start, end in np.argwhere(self._shared > 0).tolist():
            optimizer[start, end] = self.profile.optimizer_bytes(start, end)
        return parameters + self.gradient_bytes + optimizer

    @cached_property
    def split_bytes(self) -> Integers:
        """Kept between the halves of split backward passes besides, with all samples of the profile."""
        split: Integers = self._sum("split_bytes")
        return split

    @cached_property
    def saved_bytes(self) -> Integers:
        """Kept for the backward pass, with all samples of the profile."""
        passing = np.array([*(layer.passing_bytes for layer in self.profile.layers), 0])
        saved: Integers = self._sum("saved_bytes") - self._sum("passing_bytes") + passing[:, None]
        return saved

    @cached_property
    def update_bytes(self) -> Integers:
        """As `Profile.update_bytes`; of nothing nothing."""
        places = np.arange(self.profile.depth + 1)
        found = self._most(np.array([[it.update_bytes for it in self.profile.layers]]))
        shared = np.zeros_like(found)
        for tie in self.profile.ties:
            before = np.searchsorted(tie.layers, places)
            inside = before[None, :] - before[:, None]
            shared += 2 * tie.size_bytes * ((inside > 0) & (inside < len(tie.layers)))
        most: Integers = np.maximum(found, shared)
        return most

    def working_bytes(self, share: int) -> Integers:
        """What operators need of so many samples, as `activations.held` says it."""
        layers, samples = self.profile.layers, self.profile.samples
        fixed = np.array([-(-it.working_fixed_bytes * samples // share) for it in layers])
        rest = np.array([it.working_bytes - it.working_fixed_bytes for it in layers])
        most = np.maximum(self._most(self.saved_bytes[:, 1:] + fixed + rest), self.saved_bytes)
        working: Integers = -(-most * share // samples) + (-self.saved_bytes * share // samples)
        return working

    def _most(self, values: NDArray[Any]) -> NDArray[Any]:
        """The largest over the layers [start, end) of values by start and layer, of nothing 0."""
        depth = self.profile.depth
        found = np.zeros((depth + 1, depth + 1), dtype=values.dtype)
        own = np.broadcast_to(values, (depth + 1, depth)) if len(values) == 1 else values
        inside = np.arange(depth)[None, :] >= np.arange(depth + 1)[:, None]
        found[:, 1:] = np.maximum.accumulate(np.where(inside, own, 0), axis=1)
        return found

    @cached_property
    def crossing_bytes(self) -> Integers:
        """What crosses the boundary before each layer, one way, with all samples; 0 at both ends."""
        return np.array([0, *(layer.output_bytes for layer in self.profile.layers[:-1]), 0])

    def units(self, menu: ActivationOptions, room: MemoryBudget) -> Units:
        """What units cost with microbatches of this size, found once."""
        key = menu, room.share, room.samples
        return kept(self._units, key, lambda: Units(self.profile, *key))

    def choice(
        self, start: int, end: int, menu: ActivationOptions, room: MemoryBudget
    ) -> ActivationPolicy | None:
        """What becomes of the results of the layers [start, end), found once for equal layers."""
        key = self._alike[max(start - 1, 0) : end], start > 0, menu, room
        units = self.units(menu, room)
        first, choice = kept(
            self._choices, key, lambda: (start, units.choice(start, end, room.in_flight, room.limit))
        )
        return choice if choice is None or first == start else choice.moved(start - first)

    @cached_property
    def _alike(self) -> tuple[int, ...]:
        """For each layer a number that it has in common with those of the same costs."""
        numbers: dict[Layer, int] = {}
        same = (replace(it, name="") for it in self.profile.layers)
        return tuple(numbers.setdefault(it, len(numbers)) for it in same)

    @cached_property
    def _units(self) -> dict[tuple[ActivationOptions, int, float], Units]:
        return {}

    @cached_property
    def _choices(self) -> dict[tuple[object, ...], tuple[int, ActivationPolicy | None]]:
        return {}

    def _time(self, whole: str, fixed: str) -> tuple[Floats, Floats]:
        constant = self._sum(fixed).astype(float)
        return constant, (self._sum(whole) - constant) / self.profile.samples

    def _sum(self, field: str) -> NDArray[Any]:
        prefix = np.array(self.profile.prefix(field))
        sums: NDArray[Any] = prefix[None, :] - prefix[:, None]
        return sums

    @cached_property
    def _shared(self) -> Integers:
        """What sums count more than once, because several of the layers use it."""
        places = np.arange(self.profile.depth + 1)
        shared = np.zeros((len(places), len(places)), dtype=np.int64)
        for tie in self.profile.ties:
            before = np.searchsorted(tie.layers, places)  # uses in front of each cut
            shared += tie.size_bytes * np.maximum(before[None, :] - before[:, None] - 1, 0)
        return shared


@dataclass(frozen=True, slots=True)
class BoundaryCosts:
    """What the messages over each boundary cost one way, in us and in us for each byte that crosses it.

    Attributes:
        latency_us: of the message with most, as in `LinkCosts.transfer_us`.
        us_per_byte: on the busiest link.
        pair_us_per_byte: between the two ranks that need longest, if they were alone.
        first_latency_us: of the messages to the replica for which that is least.
        first_us_per_byte: of the slowest message to the replica for which that is least, if it were alone.
    """

    latency_us: Floats
    us_per_byte: Floats
    pair_us_per_byte: Floats
    first_latency_us: Floats
    first_us_per_byte: Floats


class DeviceTables:
    """Places of stages on a device order, and the boundaries between a place and the next.

    A place is `replicas` ranks from position `first` on, a boundary a pair of places of which the second
    begins where the first ends. The rates of allreduces are upper limits until `find_rates` has been asked
    for them: an exact one takes milliseconds, and few of them decide anything.

    Attributes:
        network: whose links there are.
        order: of the ranks.
        first: position of each place's first rank.
        replicas: of each place.
        sender: for each boundary the place before it; boundaries are sorted by it.
        receiver: the place behind it.
        behind: for each place the run of boundaries of which it is the sender.
        rate: GB/s of an allreduce of each place, or an upper limit.
        exact: whether it is the rate.
        version: how often rates have been made exact.
    """

    def __init__(self, network: LinkCosts, order: Sequence[int]) -> None:
        self.network = network
        self.order = tuple(order)
        count = len(self.order)
        places = [(first, size) for first in range(count) for size in range(1, count - first + 1)]
        self.first = np.array([first for first, _ in places])
        self.replicas = np.array([size for _, size in places])
        at: list[list[int]] = [[] for _ in range(count + 1)]
        for index, (first, _) in enumerate(places):
            at[first].append(index)
        boundaries = [
            (index, behind) for index, (first, size) in enumerate(places) for behind in at[first + size]
        ]
        self.sender = np.array([one for one, _ in boundaries], dtype=np.int64)
        bounds = np.searchsorted(self.sender, np.arange(len(places) + 1)).tolist()
        self.behind = [slice(start, stop) for start, stop in pairwise(bounds)]
        self.receiver = np.array([other for _, other in boundaries], dtype=np.int64)
        around = _around_switches(network.topology)
        self.rate = np.array(
            [_most(network.topology, self.ranks(place), around) for place in range(len(places))]
        )
        self.exact = self.replicas == 1
        self.version = 0
        self._allreduces: tuple[LayerTables, int, Floats] | None = None

    def ranks(self, place: int) -> tuple[int, ...]:
        """Of a place, in the order."""
        first = self.first[place]
        return self.order[first : first + self.replicas[place]]

    def find_rates(self, places: Iterable[int]) -> bool:
        """Make the rates of these places exact; whether one was not."""
        unknown = sorted(place for place in set(places) if not self.exact[place])
        for place in unknown:
            self.rate[place] = float(self.network.allreduce_rate(self.ranks(place)))
            self.exact[place] = True
        self.version += bool(unknown)
        return bool(unknown)

    def boundary(self, sender: int, receiver: int) -> int:
        """The number of the boundary between two places."""
        run = self.behind[sender]
        return int(run.start + receiver - self.receiver[run.start])  # receivers are consecutive places

    def allreduce_us(self, places: Integers, size_bytes: Integers) -> Floats:
        """Of so many bytes at each of these places, as `LinkCosts.allreduce_us` where the rate is exact."""
        replicas = self.replicas[places]
        with np.errstate(divide="ignore", invalid="ignore"):
            time = replicas * self.network.collective_us + size_bytes / (self.rate[places] * BYTES_PER_US)
        return np.where((size_bytes > 0) & (replicas > 1), time, 0.0)

    def allreduces_us(self, layers: LayerTables) -> Floats:
        """Of the gradients of any range of layers on any place, by [start, end, place]."""
        if self._allreduces is None or self._allreduces[:2] != (layers, self.version):
            times = self.allreduce_us(np.arange(len(self.rate)), layers.gradient_bytes[:, :, None])
            self._allreduces = layers, self.version, times
        return self._allreduces[2]

    @cached_property
    def forward(self) -> BoundaryCosts:
        """Of the messages over each boundary."""
        return self._crossing(backward=False)

    @cached_property
    def backward(self) -> BoundaryCosts:
        """Likewise the other way."""
        return self._crossing(backward=True)

    @cached_property
    def slowest_us_per_byte(self) -> Floats:
        """Of each boundary, on the slowest link of any path between a rank before it and one behind it."""
        found = np.zeros(len(self.sender))
        alone = self._paths[1].max(axis=2, initial=0.0)
        either = np.maximum(alone, alone.T)
        for index, (one, other) in enumerate(zip(self.sender.tolist(), self.receiver.tolist(), strict=True)):
            start, middle = self.first[one], self.first[other]
            found[index] = either[start:middle, middle : middle + self.replicas[other]].max()
        return found

    def _crossing(self, *, backward: bool) -> BoundaryCosts:
        latencies, us_per_byte = self._paths
        flows = self._flows
        used = flows > 0
        if backward:  # as if the ranks behind each boundary were the receivers still
            latencies, us_per_byte = latencies.T, us_per_byte.transpose(1, 0, 2)
        count = len(self.order)
        load = (
            flows.reshape(len(flows), count * count)
            @ us_per_byte.reshape(count * count, us_per_byte.shape[2])
        ).max(axis=1, initial=0.0)
        alone = flows * us_per_byte.max(axis=2, initial=0.0)
        # By receivers: those whose own messages, each as if alone, are there first.
        side = 2 if backward else 1
        receives = used.any(axis=side)
        waits = np.where(used, latencies, 0.0)
        first, first_per_byte = (
            np.where(receives, each.max(axis=side), np.inf).min(axis=1, initial=np.inf)
            for each in (waits, alone)
        )
        message_us, most = self.network.message_us, (1, 2)
        return BoundaryCosts(
            message_us + waits.max(axis=most, initial=0.0),
            load,
            alone.max(axis=most, initial=0.0),
            message_us + first,
            first_per_byte,
        )

    @cached_property
    def _flows(self) -> Floats:
        """For each boundary, by both positions: the share of the message forth; 0 where there is none."""
        count, boundaries = len(self.order), len(self.sender)
        flows = np.zeros((boundaries, count, count))
        for index, (one, other) in enumerate(zip(self.sender.tolist(), self.receiver.tolist(), strict=True)):
            senders, receivers = int(self.replicas[one]), int(self.replicas[other])
            start, middle = self.first[one], self.first[other]
            flows[index, start:middle, middle : middle + receivers] = _shares(senders, receivers)
        return flows

    @cached_property
    def _paths(self) -> tuple[Floats, Floats]:
        """By positions of sender and receiver: the latency; and by both and link the us per byte there."""
        topology = self.network.topology
        count = len(self.order)
        number = {(link.src, link.dst): index for index, link in enumerate(topology.links)}
        latencies = np.zeros((count, count))
        load = np.zeros((count, count, len(number)))
        for i, src in enumerate(self.order):
            for j, dst in enumerate(self.order):
                hops = self.network.path(src, dst) if i != j else ()
                latencies[i, j] = float(self.network.latency_us(src, dst)) if hops else 0.0
                for hop in hops:
                    load[i, j, number[hop]] = 1 / (float(topology.bandwidth[hop]) * BYTES_PER_US)
        return latencies, load


@cache
def _shares(senders: int, receivers: int) -> Floats:
    """The share of a microbatch that goes from each sender to each receiver."""
    shares = np.zeros((senders, receivers))
    messages = boundary_messages(range(senders), range(senders, senders + receivers), 1.0)
    for (src, dst), share in messages.items():
        shares[src, dst - senders] = share
    return shares


def _around_switches(topology: Topology) -> dict[int, set[int]]:
    """What each switch has links with."""
    around: dict[int, set[int]] = {switch: set() for switch in range(topology.ranks, topology.size)}
    for link in topology.links:
        for switch, other in ((link.src, link.dst), (link.dst, link.src)):
            if switch in around:
                around[switch].add(other)
    return around


def _most(topology: Topology, ranks: Sequence[int], around: Mapping[int, set[int]]) -> float:
    """An upper limit of the rate of an allreduce among these ranks alone, GB/s.

    Every rank receives at least the buffer and sends at least the buffer; all together receive it twice for
    each rank but one, once to add up and once to spread the sum.
    """
    if len(ranks) == 1:
        return math.inf
    into, out = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0.0)
    for link in topology.links:
        for sums, rank, other in ((into, link.dst, link.src), (out, link.src, link.dst)):
            if rank not in sums:
                continue
            # A switch counts only where it leads to another of the ranks, or to a further switch.
            beyond = {other} if other not in around else around[other] - {rank}
            if any(vertex in sums or vertex in around for vertex in beyond):
                sums[rank] += float(link.bandwidth)
    return min(*into.values(), *out.values(), sum(into.values()) / (2 * len(ranks) - 2))
