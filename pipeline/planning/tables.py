"""What every possible stage and boundary of a pipeline costs, as arrays for the dynamic program.

A stage is a range of layers on a *place*: consecutive ranks of a device order. `LayerTables` knows the
ranges, `DeviceTables` the places and the boundaries between them; both are made once and asked for every
number of microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline.costs import Profile
from pipeline.network import BYTES_PER_US, Network, boundary_messages
from synth.topology import Topology

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
        return self._sum("gradient_bytes") - self._shared

    @cached_property
    def fixed_bytes(self) -> Integers:
        """Parameters, gradients and the optimizer's state."""
        parameters = self._sum("parameter_bytes") - self._shared
        return parameters + self.gradient_bytes + self._sum("optimizer_bytes")

    @cached_property
    def saved_bytes(self) -> Integers:
        """Kept for the backward pass, with all samples of the profile."""
        return self._sum("saved_bytes")

    @cached_property
    def crossing_bytes(self) -> Integers:
        """What crosses the boundary before each layer, one way, with all samples; 0 at both ends."""
        return np.array([0, *(layer.output_bytes for layer in self.profile.layers[:-1]), 0])

    def _time(self, whole: str, fixed: str) -> tuple[Floats, Floats]:
        constant = self._sum(fixed).astype(float)
        return constant, (self._sum(whole) - constant) / self.profile.samples

    def _sum(self, field: str) -> NDArray:  # type: ignore[type-arg]
        prefix = np.array(self.profile.prefix(field))
        return prefix[None, :] - prefix[:, None]

    @cached_property
    def _shared(self) -> Integers:
        """What sums count more than once, because several of the layers use it."""
        places = np.arange(self.profile.depth + 1)
        shared = np.zeros((len(places), len(places)), dtype=np.int64)
        for tie in self.profile.ties:
            before = np.searchsorted(tie.layers, places)  # uses in front of each cut
            shared += tie.size_bytes * np.maximum(before[None, :] - before[:, None] - 1, 0)
        return shared


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
        rate: GB/s of an allreduce of each place, or an upper limit.
        exact: whether it is the rate.
    """

    def __init__(self, network: Network, order: Sequence[int]) -> None:
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
        self.receiver = np.array([other for _, other in boundaries], dtype=np.int64)
        self._fragments = [network.topology.subset(sorted(self.ranks(place))) for place in range(len(places))]
        self.rate = np.array([_most(fragment) for fragment in self._fragments])
        self.exact = self.replicas == 1

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
        return bool(unknown)

    def boundary(self, sender: int, receiver: int) -> int:
        """The number of the boundary between two places."""
        return int(np.flatnonzero((self.sender == sender) & (self.receiver == receiver))[0])

    def allreduce_us(self, places: ArrayLike, size_bytes: ArrayLike) -> Floats:
        """Of so many bytes at each of these places, as `Network.allreduce_us` where the rate is exact."""
        size, replicas = np.asarray(size_bytes), self.replicas[places]
        with np.errstate(divide="ignore", invalid="ignore"):
            time = replicas * self.network.collective_us + size / (self.rate[places] * BYTES_PER_US)
        return np.where((size > 0) & (replicas > 1), time, 0.0)

    @cached_property
    def forward(self) -> tuple[Floats, Floats]:
        """Of the messages over each boundary: the latency in us, and the us per byte that crosses it."""
        return self._transfers(backward=False)

    @cached_property
    def backward(self) -> tuple[Floats, Floats]:
        """Likewise the other way."""
        return self._transfers(backward=True)

    def _transfers(self, *, backward: bool) -> tuple[Floats, Floats]:
        """As `Network.transfer_us`, for all boundaries together."""
        count, boundaries = len(self.order), len(self.sender)
        latencies, us_per_byte = self._paths
        shares: dict[tuple[int, int], Floats] = {}
        share_of = np.zeros((boundaries, count, count))
        for index, (one, other) in enumerate(zip(self.sender, self.receiver, strict=True)):
            senders, receivers = self.replicas[one], self.replicas[other]
            if (senders, receivers) not in shares:
                shares[senders, receivers] = _shares(senders, receivers)
            start, middle = self.first[one], self.first[other]
            share_of[index, start:middle, middle : middle + receivers] = shares[senders, receivers]
        if backward:
            share_of = share_of.transpose(0, 2, 1)
        latency = np.where(share_of > 0, latencies, 0.0).max(axis=(1, 2), initial=0.0)
        load = share_of.reshape(boundaries, count * count) @ us_per_byte
        return self.network.message_us + latency, load.max(axis=1, initial=0.0)

    @cached_property
    def _paths(self) -> tuple[Floats, Floats]:
        """By positions of sender and receiver: the latency; and by both and link the us per byte there."""
        topology = self.network.topology
        count = len(self.order)
        number = {(link.src, link.dst): index for index, link in enumerate(topology.links)}
        latencies = np.zeros((count, count))
        load = np.zeros((count * count, len(number)))
        for i, src in enumerate(self.order):
            for j, dst in enumerate(self.order):
                hops = self.network.path(src, dst) if i != j else ()
                latencies[i, j] = float(sum((topology.latency_us[hop] for hop in hops), Fraction(0)))
                for hop in hops:
                    load[i * count + j, number[hop]] = 1 / (float(topology.bandwidth[hop]) * BYTES_PER_US)
        return latencies, load


def _shares(senders: int, receivers: int) -> Floats:
    """The share of a microbatch that goes from each sender to each receiver."""
    shares = np.zeros((senders, receivers))
    messages = boundary_messages(range(senders), range(senders, senders + receivers), 1.0)
    for (src, dst), share in messages.items():
        shares[src, dst - senders] = share
    return shares


def _most(fragment: Topology) -> float:
    """An upper limit of the rate of an allreduce, GB/s.

    Every rank receives at least the buffer and sends at least the buffer; all together receive it twice for
    each rank but one, once to add up and once to spread the sum.
    """
    if fragment.ranks == 1:
        return float("inf")
    into = [0.0] * fragment.ranks
    out = [0.0] * fragment.ranks
    for link in fragment.links:
        if link.dst < fragment.ranks:
            into[link.dst] += float(link.bandwidth)
        if link.src < fragment.ranks:
            out[link.src] += float(link.bandwidth)
    return min(*into, *out, sum(into) / (2 * fragment.ranks - 2))
