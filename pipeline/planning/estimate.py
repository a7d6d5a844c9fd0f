"""How long a step of a partition takes, in closed form: ranks thousands of plans before any is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from pipeline.planning.memory import peak_in_flight
from pipeline.planning.prm import Partition, Question
from pipeline.planning.tables import Floats, LayerTables


def estimates_us(
    layers: LayerTables, partition: Partition, question: Question, counts: Sequence[int]
) -> list[float]:
    """Time of a step with each of these numbers of microbatches, without contention between boundaries.

    Every microbatch counts as the largest. With f, b the passes of a stage, c, g the messages behind it:

        fill and drain   sum(f + c) + (M-1) max(f, c) + sum(b + g) + (M-1) max(b, g)
        other orders     the most over stages of: fill up to it, then M (f + b), or M/k round trips through
                         the stages behind where at most k microbatches are in flight, then drain; or over
                         boundaries of (M-1) max(c, g) more than one round trip

    and behind either what an allreduce takes longer than the stages in front of it take to drain. Infinite
    where a replica would have no sample.
    """
    number = np.array(counts)[:, None]
    costs = _costs(layers, partition, question, number)
    behind = range(len(partition.places) - 1, -1, -1)
    kept = np.array(
        [
            [peak_in_flight(question.order, it, count, question.max_in_flight) for it in behind]
            for count in counts
        ]
    )
    if question.order == "gpipe" and (kept == number).all():
        time = _fill_and_drain(costs, number)
    else:
        time = _alternating(costs, number, kept)
    drained = _before(costs[1] + costs[3])
    time += np.maximum(costs[4] - drained, 0.0).max(axis=1)
    few = question.batch < number[:, 0] * partition.devices.replicas[list(partition.places)].max()
    return [float(value) for value in np.where(few, np.inf, time)]


def _costs(
    layers: LayerTables, partition: Partition, question: Question, number: np.ndarray
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """By [count, stage]: forward, backward, message forth and back (0 behind the last), and allreduce."""
    devices, places = partition.devices, list(partition.places)
    start, end = (np.array(bounds) for bounds in zip(*pairwise(partition.cuts), strict=True))
    largest = -(-question.batch // number)
    share = -(-largest // devices.replicas[places])
    forward, backward = (
        constant[start, end] + per_sample[start, end] * share
        for constant, per_sample in (layers.forward, layers.backward)
    )
    if question.recompute:
        backward = backward + forward
    crossings = [devices.boundary(one, other) for one, other in pairwise(places)]
    size = layers.crossing_bytes[end[:-1]] * largest / layers.profile.samples
    forth, back = (
        np.pad(latency[crossings] + size * us_per_byte[crossings], ((0, 0), (0, 1)))
        for latency, us_per_byte in (devices.forward, devices.backward)
    )
    allreduce = devices.allreduce_us(places, layers.gradient_bytes[start, end])
    return forward, backward, forth, back, np.broadcast_to(allreduce, forward.shape)


def _fill_and_drain(costs: tuple[Floats, ...], number: np.ndarray) -> Floats:
    forward, backward, forth, back, _ = costs
    more = number[:, 0] - 1
    return sum(
        (passes + messages).sum(axis=1) + more * np.maximum(passes, messages).max(axis=1)
        for passes, messages in ((forward, forth), (backward, back))
    )


def _alternating(costs: tuple[Floats, ...], number: np.ndarray, kept: np.ndarray) -> Floats:
    forward, backward, forth, back, _ = costs
    both, messages = forward + backward, forth + back
    around = (both + messages)[:, ::-1].cumsum(axis=1)[:, ::-1]  # from a stage to the end and back
    outside = _before(both + messages)
    busy = outside + np.maximum(number * both, number / kept * around)
    crossing = outside + around + (number - 1) * np.maximum(forth, back)
    return np.maximum(busy, crossing).max(axis=1)


def _before(values: Floats) -> Floats:
    """Sums over the stages in front of each."""
    return values.cumsum(axis=1) - values
