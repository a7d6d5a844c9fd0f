"""How long a step of a partition takes at least, in closed form: ranks plans before any is simulated.

What is counted is what no order can avoid: the first microbatch must come to a stage, the stage must do all
its passes, and the last gradients must get back. So the simulator is never faster, and a search that has
found a plan may forget all plans whose estimate is longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from arborcast.pipeline.costs.saved_bytes import extra_us
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.planning.memory_need import peak_in_flight
from arborcast.pipeline.planning.stage_dp import PlacedStages
from arborcast.pipeline.planning.tables import BoundaryCosts, Floats, Integers, LayerTables
from arborcast.pipeline.stages import BUCKET_BYTES


class PassTimes(NamedTuple):
    """Of the stages of a partition (columns) with each of some numbers of microbatches (rows), in us.

    Attributes:
        one: of the smallest microbatch on the replica with least of it.
        least: of all microbatches, on the replica with least of them.
        most: of all microbatches, on the replica with most of them.
    """

    one: Floats
    least: Floats
    most: Floats


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step of a partition is made of; messages are those behind a stage, 0 behind the last.

    Attributes:
        number: of microbatches, one column.
        forward: passes.
        backward: likewise, with what recomputation adds.
        forth: messages, where a replica counts for the time until its own are there.
        back: likewise of gradients.
        allreduce: what is left of each stage's at least, once its last backward pass is through.
        possible: for each number of microbatches, whether every replica has a sample.
    """

    number: Integers
    forward: PassTimes
    backward: PassTimes
    forth: PassTimes
    back: PassTimes
    allreduce: Floats
    possible: NDArray[np.bool_]


def step_costs(
    layers: LayerTables,
    partition: PlacedStages,
    *,
    batch: int,
    recompute: bool,
    counts: Sequence[int],
    offload_gbps: float | None = None,
) -> StepCosts:
    """What a step is made of, for each of these numbers of microbatches.

    What choices by layer add is counted for microbatches as large as on average: no less than that is added.
    """
    devices, places = partition.devices, np.array(partition.places)
    number = np.array(counts)[:, None]
    start, end = np.array(partition.cuts[:-1]), np.array(partition.cuts[1:])
    replicas = devices.replicas[places]
    smallest, larger = np.divmod(batch, number)  # so many microbatches have one sample more
    one = smallest // replicas
    least = larger * ((smallest + 1) // replicas) + (number - larger) * one
    most = larger * -(-(smallest + 1) // replicas) + (number - larger) * -(-smallest // replicas)

    sizes = ((np.ones_like(number), one), (number, least), (number, most))

    def passes(times: tuple[Floats, Floats]) -> PassTimes:
        fixed, per_sample = times[0][start, end], times[1][start, end]
        return PassTimes(*(count * fixed + samples * per_sample for count, samples in sizes))

    crossings = np.array([devices.boundary(a, b) for a, b in pairwise(partition.places)], dtype=np.int64)
    sample_bytes = layers.crossing_bytes[end[:-1]] / layers.profile.samples
    wider = np.maximum(replicas[:-1], replicas[1:])

    def messages(way: BoundaryCosts) -> PassTimes:
        whole = wider * (smallest // wider)  # samples that divide evenly
        first = sample_bytes * way.first_us_per_byte[crossings]
        pair = (
            number * devices.network.message_us
            + sample_bytes * whole * number * way.pair_us_per_byte[crossings]
        )
        link = sample_bytes * whole * number * way.us_per_byte[crossings]
        found = (
            way.first_latency_us[crossings] + whole * first,
            number * whole * first,
            np.maximum(pair, link),
        )
        padded = np.zeros((3, len(number), len(places)))
        padded[:, :, :-1] = found
        return PassTimes(*padded)

    forward, backward = passes(layers.forward), passes(layers.backward)
    if recompute:
        backward = PassTimes(*np.add(forward, backward))
    if partition.segments:
        forward, backward = _with_extra(layers, partition, offload_gbps, (forward, backward), number, sizes)
    gradients = layers.gradient_bytes[start, end]
    allreduce = devices.allreduce_us(places, gradients)
    # Buckets may begin within the last backward pass, the last one once it comes to layers without gradients.
    most_samples = -(-(smallest + (larger > 0)) // replicas)
    last_pass, without = (
        layers.profile.crowding
        * (layers.backward[0][start, to] + most_samples * layers.backward[1][start, to])
        for to in (end, np.minimum(layers.first_gradients[start], end))
    )
    last_bucket = ((gradients - 1) % BUCKET_BYTES + 1) / np.maximum(gradients, 1)
    return StepCosts(
        number=number,
        forward=forward,
        backward=backward,
        forth=messages(devices.forward),
        back=messages(devices.backward),
        allreduce=np.maximum(np.maximum(allreduce - last_pass, allreduce * last_bucket - without), 0.0),
        possible=batch >= number[:, 0] * replicas.max(),
    )


def _with_extra(
    layers: LayerTables,
    partition: PlacedStages,
    offload_gbps: float | None,
    passes: tuple[PassTimes, PassTimes],
    number: Integers,
    sizes: Sequence[tuple[Integers, Integers]],
) -> tuple[PassTimes, PassTimes]:
    """Passes with what the choices of each stage add."""
    added = np.zeros((2, len(sizes), *np.broadcast_shapes(number.shape, sizes[0][1].shape)))
    for part, (count, samples) in enumerate(sizes):
        for stage, segments in enumerate(partition.segments):
            for row in range(len(number)):
                each = samples[row, stage] / count[row, 0]
                both = extra_us(layers.profile, segments, each, offload_gbps)
                added[:, part, row, stage] = count[row, 0] * np.array(both)
    forward, backward = (PassTimes(*np.add(it, more)) for it, more in zip(passes, added, strict=True))
    return forward, backward


def estimates_us(costs: StepCosts, order: str, max_in_flight: int | None = None) -> list[float]:
    """The least time of a step with each number of microbatches.

    It is the most over stages of: the way of a microbatch up to it; there all passes, or as many round trips
    through the stages behind as are needed where at most k microbatches are in flight; and the way back with
    the allreduces that cannot begin before. Likewise over boundaries, which all messages one way must cross.
    An order that drains does so twice, forth and then back. Infinite where a replica would have no sample.
    """
    number, stages = costs.number, costs.forward.one.shape[1]
    unlimited = [
        peak_in_flight(order, behind, int(number.max()), max_in_flight) for behind in reversed(range(stages))
    ]
    kept = np.minimum(np.array(unlimited), number)
    home = _way_home(costs)
    time = _alternating(costs, kept, home)
    if ORDERS[order].drains and (kept == number).all():
        time = np.maximum(time, _fill_and_drain(costs, home))
    estimates: list[float] = np.where(costs.possible, time, np.inf).tolist()
    return estimates


def _fill_and_drain(costs: StepCosts, home: Floats) -> Floats:
    """Where the last stage's first backward pass waits for its last forward pass."""
    forward, backward, forth, back = costs.forward, costs.backward, costs.forth, costs.back
    more = np.maximum(forward.least - forward.one, forth.least - forth.one).max(axis=1)
    filled = (forward.one + forth.one).sum(axis=1) + more
    behind = _behind(backward.one + back.one) + back.one
    busy = np.maximum(backward.most + behind, back.most - back.one + backward.one + behind)
    time: Floats = filled + (busy + home).max(axis=1)
    return time


def _alternating(costs: StepCosts, kept: Integers, home: Floats) -> Floats:
    """Where a stage's next forward passes wait for backward passes."""
    forward, backward, forth, back = costs.forward, costs.backward, costs.forth, costs.back
    both = forward.one + backward.one
    messages = forth.one + back.one
    around = both + _behind(both + messages) + messages  # from a stage to the end and back
    there = (forward.one + forth.one).cumsum(axis=1) - (forward.one + forth.one)
    # At most `kept` at once: after so many round trips the last few still go through, one behind the other.
    turns, rest = np.divmod(costs.number - 1, kept)
    one_more = np.maximum(np.maximum(forward.one, backward.one), both[:, -1:])
    busy = np.maximum(forward.most + backward.most, (turns + 1) * around + rest * one_more)
    crossing = around + np.maximum(forth.most - forth.one, back.most - back.one)
    time: Floats = (there + np.maximum(busy, crossing) + home).max(axis=1)
    return time


def _behind(values: Floats) -> Floats:
    """Sums over the stages behind each."""
    sums: Floats = values[:, ::-1].cumsum(axis=1)[:, ::-1] - values
    return sums


def _way_home(costs: StepCosts) -> Floats:
    """From a stage's last backward pass until the end of the last allreduce that has to wait for it."""
    home: Floats = np.zeros_like(costs.allreduce)
    home[:, 0] = costs.allreduce[:, 0]
    for stage in range(1, home.shape[1]):
        back = costs.back.one[:, stage - 1] + costs.backward.one[:, stage - 1]
        home[:, stage] = np.maximum(home[:, stage - 1] + back, costs.allreduce[:, stage])
    return home
