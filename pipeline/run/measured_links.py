"""What messages between stages and sums of gradients cost on this machine, measured by the job's own ranks.

Between ranks of one machine the processors that compute copy the bytes, too, so that no data sheet says what
they cost; and a sum costs more than its bytes on the way, since ranks add. It is measured as training has
it, amid computations: ranks come to it at unequal times, and what carries it has to be woken. `profile` does
so for layers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from fractions import Fraction
from itertools import permutations

import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.pipeline.costs.link_costs import BYTES_PER_US, LinkCosts
from arborcast.pipeline.costs.live import LiveBytes
from arborcast.pipeline.run.recorder import PassRecorder
from arborcast.pipeline.run.stage_groups import Groups
from arborcast.pipeline.run.stage_messages import Messenger
from arborcast.synth.topology import Link, Topology

SIZES = 1 << 10, 1 << 23
"""Bytes of a message, and of a sum; the line through both times says what each costs besides its bytes."""

FABRIC_SIZES = 1 << 10, 1 << 18
"""The same over the links of a fabric, which are known and may be slow."""

_WIDTH = 384
"""Of matrices whose product takes about a millisecond."""


def measure_links(
    topology: Topology | None = None, *, collectives: str = "gloo", repeats: int = 15, timeout_s: float = 60.0
) -> LinkCosts:
    """Measure messages and sums as the trainer has them; every rank of the job calls it and gets the same.

    Ranks 0 and 1, 2 and 3, ... exchange messages, all pairs at once; then all ranks sum. What ranks' own work
    allows of a sum is by elapsed time on one machine; of a fabric, where that has the links in it, by the
    time of a rank's processors.

    Args:
        topology: of the job; None for ranks of one machine, of which each reaches every other one at the rate
            that was measured.
        collectives: what sums gradients, as for a `Trainer`.
        repeats: of each size; medians count, and the slowest rank.
        timeout_s: after which waiting for another rank fails.
    """
    ranks, own = dist.get_world_size(), dist.get_rank()
    groups = Groups(None, collectives, topology, timeout_s, timeout_s)
    with LiveBytes() as live:
        summing = groups.make(range(ranks))
        dist.all_reduce(torch.zeros(ranks), group=summing)
    links = Messenger(groups.job, f"rank {own}", PassRecorder(is_on=False))
    peer, handled = own ^ 1, []

    def exchange(values: Tensor) -> None:
        """There and back."""
        if peer >= ranks:
            return
        begin = time.thread_time()
        for is_sender in (own < peer, own > peer):
            way = links.send if is_sender else links.receive
            way(values, peer, 0, what="measuring", microbatch=0).wait()
        handled.append((time.thread_time() - begin) / 2 * 1e6)

    def add(values: Tensor) -> None:
        dist.all_reduce(values, group=summing)

    sizes = SIZES if topology is None else FABRIC_SIZES
    (there_and_back_us, both_ways_us), _ = _lines(groups.job, exchange, sizes, repeats)
    sum_us, byte_us = _between(groups.job, add, sizes, repeats, by_processor=topology is not None)
    handling_us = statistics.median(handled[1 : repeats + 1] or [0.0])  # of small messages
    each = live.now // max(ranks - 1, 1)
    own_costs = there_and_back_us / 2, both_ways_us / 2, handling_us, sum_us / ranks, byte_us, each
    found = torch.tensor(own_costs, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=groups.job)
    message_us, message_byte_us, handling_us, collective_us, byte_us, peer_bytes = found.tolist()
    links.close()
    groups.close()
    if topology is None:
        # One digit, so that schedules that were found for the same machine are found again.
        rate = Fraction(f"{1 / message_byte_us / BYTES_PER_US:.1g}")
        pairs = permutations(range(ranks), 2)
        topology = Topology.build("this machine", ranks, [Link(*pair, rate, Fraction(0)) for pair in pairs])
    sum_gbps = 1 / byte_us / BYTES_PER_US
    return LinkCosts(
        topology,
        message_us,
        handling_us,
        collective_us,
        sum_gbps=sum_gbps,
        peer_bytes=int(peer_bytes),
        by_ring=collectives == "gloo",
    )


def _between(
    job: dist.ProcessGroup,
    run: Callable[[Tensor], object],
    sizes: tuple[int, int],
    repeats: int,
    *,
    by_processor: bool,
) -> tuple[float, float]:
    """Of a call amid computations, as `_lines`, its bytes by one of both times."""
    factor = torch.ones(_WIDTH, _WIDTH)
    (alone, _), _ = _lines(job, lambda _: factor @ factor, sizes, repeats)
    both, of_processors = _lines(job, lambda values: (factor @ factor, run(values)), sizes, repeats)
    return max(both[0] - alone, 0.0), (of_processors if by_processor else both)[1]


def _lines(
    job: dist.ProcessGroup, run: Callable[[Tensor], object], sizes: tuple[int, int], repeats: int
) -> list[tuple[float, float]]:
    """Microseconds of one call without bytes, and of each byte: elapsed, and of this rank's processors."""
    clocks = time.perf_counter, time.process_time
    times = []
    for size in sizes:
        values, taken = torch.zeros(size // 4), []
        for _ in range(repeats + 1):  # the first one finds a connection, or a schedule
            dist.barrier(job)
            begin = [clock() for clock in clocks]
            run(values)
            taken.append([(clock() - begun) * 1e6 for clock, begun in zip(clocks, begin, strict=True)])
        times.append([statistics.median(each) for each in zip(*taken[1:], strict=True)])
    found = []
    for small, large in zip(*times, strict=True):
        each = max(large - small, 1e-3) / (sizes[1] - sizes[0])
        found.append((max(small - each * sizes[0], 0.0), each))
    return found
