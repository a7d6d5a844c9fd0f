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

_WIDTH = 384
"""Of matrices whose product takes about a millisecond."""


def measure_links(
    topology: Topology | None = None, *, collectives: str = "gloo", repeats: int = 15, timeout_s: float = 60.0
) -> LinkCosts:
    """Measure messages and sums as the trainer has them; every rank of the job calls it and gets the same.

    Ranks 0 and 1, 2 and 3, ... exchange messages, all pairs at once; then all ranks sum.

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

    there_and_back_us, both_ways_us = _line(groups.job, exchange, repeats)
    sum_us, byte_us = _between(groups.job, lambda values: dist.all_reduce(values, group=summing), repeats)
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
        topology, message_us, handling_us, collective_us, sum_gbps=sum_gbps, peer_bytes=int(peer_bytes)
    )


def _between(job: dist.ProcessGroup, run: Callable[[Tensor], object], repeats: int) -> tuple[float, float]:
    """As `_line`, of a call amid computations."""
    factor = torch.ones(_WIDTH, _WIDTH)
    alone, _ = _line(job, lambda _: factor @ factor, repeats)
    both, byte_us = _line(job, lambda values: (factor @ factor, run(values)), repeats)
    return max(both - alone, 0.0), byte_us


def _line(job: dist.ProcessGroup, run: Callable[[Tensor], object], repeats: int) -> tuple[float, float]:
    """Microseconds of one call without bytes, and of each byte."""
    times = []
    for size in SIZES:
        values, taken = torch.zeros(size // 4), []
        for _ in range(repeats + 1):  # the first one finds a connection, or a schedule
            dist.barrier(job)
            begin = time.perf_counter()
            run(values)
            taken.append((time.perf_counter() - begin) * 1e6)
        times.append(statistics.median(taken[1:]))
    each = max(times[1] - times[0], 1e-3) / (SIZES[1] - SIZES[0])
    return max(times[0] - each * SIZES[0], 0.0), each
