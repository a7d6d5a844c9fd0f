"""How long a step of a partition takes, in closed form: ranks thousands of plans before any is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeline.planning.memory import peak_in_flight
from pipeline.planning.prm import Partition
from pipeline.planning.tables import Floats, Integers, LayerTables


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Of the stages of a partition (columns) with each of some numbers of microbatches (rows), in us.

    Attributes:
        number: of microbatches, one column.
        forward: of one microbatch, the largest.
        backward: likewise, with what recomputation adds.
        forth: of its messages behind the stage; 0 behind the last.
        back: of its gradients' messages.
        allreduce: once.
        possible: whether every replica has a sample.
    """

    number: Integers
    forward: Floats
    backward: Floats
    forth: Floats
    back: Floats
    allreduce: Floats
    possible: NDArray[np.bool_]


def step_costs(
    layers: LayerTables, partition: Partition, *, batch: int, recompute: bool, counts: Sequence[int]
) -> StepCosts:
    """What a step is made of, for each of these numbers of microbatches."""
    devices, places = partition.devices, np.array(partition.places)
    number = np.array(counts)[:, None]
    start, end = np.array(partition.cuts[:-1]), np.array(partition.cuts[1:])
    largest = -(-batch // number)
    share = -(-largest // devices.replicas[places])
    forward, backward = (
        constant[start, end] + per_sample[start, end] * share
        for constant, per_sample in (layers.forward, layers.backward)
    )
    crossings = [devices.boundary(one, other) for one, other in pairwise(partition.places)]
    size = layers.crossing_bytes[end[:-1]] * largest / layers.profile.samples
    messages = np.zeros((2, *forward.shape))
    for way, (latency, us_per_byte) in enumerate((devices.forward, devices.backward)):
        messages[way, :, :-1] = latency[crossings] + size * us_per_byte[crossings]
    return StepCosts(
        number=number,
        forward=forward,
        backward=backward + forward if recompute else backward,
        forth=messages[0],
        back=messages[1],
        allreduce=devices.allreduce_us(places, layers.gradient_bytes[start, end]),
        possible=batch >= number[:, 0] * devices.replicas[places].max(),
    )


def estimates_us(costs: StepCosts, order: str, max_in_flight: int | None = None) -> list[float]:
    """Time of a step with each number of microbatches, without contention between boundaries.

    With f, b the passes of a stage, c, g the messages behind it:

        fill and drain   sum(f + c) + (M-1) max(f, c) + sum(b + g) + (M-1) max(b, g)
        other orders     the most over stages of: fill up to it, then M (f + b), or M/k round trips through
                         the stages behind where at most k microbatches are in flight, then drain; or over
                         boundaries of (M-1) max(c, g) more than one round trip

    and behind either what an allreduce takes longer than the stages in front of it take to drain. Infinite
    where a replica would have no sample.
    """
    number, stages = costs.number, costs.forward.shape[1]
    unlimited = [
        peak_in_flight(order, behind, int(number.max()), max_in_flight) for behind in reversed(range(stages))
    ]
    kept = np.minimum(np.array(unlimited), number)
    if order == "gpipe" and (kept == number).all():
        time = _fill_and_drain(costs)
    else:
        time = _alternating(costs, kept)
    drained = _before(costs.backward + costs.back)
    time = time + np.maximum(costs.allreduce - drained, 0.0).max(axis=1)
    estimates: list[float] = np.where(costs.possible, time, np.inf).tolist()
    return estimates


def _fill_and_drain(costs: StepCosts) -> Floats:
    more = costs.number[:, 0] - 1
    time: Floats = np.zeros(len(more))
    for passes, messages in ((costs.forward, costs.forth), (costs.backward, costs.back)):
        time = time + (passes + messages).sum(axis=1) + more * np.maximum(passes, messages).max(axis=1)
    return time


def _alternating(costs: StepCosts, kept: Integers) -> Floats:
    both, messages = costs.forward + costs.backward, costs.forth + costs.back
    around = (both + messages)[:, ::-1].cumsum(axis=1)[:, ::-1]  # from a stage to the end and back
    outside = _before(both + messages)
    busy = np.maximum(costs.number * both, costs.number / kept * around)
    crossing = around + (costs.number - 1) * np.maximum(costs.forth, costs.back)
    time: Floats = (outside + np.maximum(busy, crossing)).max(axis=1)
    return time


def _before(values: Floats) -> Floats:
    """Sums over the stages in front of each."""
    sums: Floats = values.cumsum(axis=1) - values
    return sums
