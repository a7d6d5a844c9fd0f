"""`synth probe` on one rank: join the others, measure, let rank 0 conclude, end alike.

Rank 0 alone reads files, concludes and speaks. What it decides before the measurement (the input is wrong)
and after it (a file is contradicted) it tells the others, so that all end with the same status.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from arborcast.backends.measure.torchrun import job_group
from arborcast.backends.probe.measurements import Measurements
from arborcast.backends.probe.measuring import Effort, measure
from arborcast.backends.transport.network import Network

_PREFIX = "arborcast/probe"


def run(
    *,
    prepare: Callable[[int], int],
    conclude: Callable[[Measurements], int],
    effort: Effort,
    transport: str,
    address: str | None = None,
) -> int:
    """Measure between all processes that torchrun started; the exit status, the same on all ranks.

    Args:
        prepare: on rank 0 before the measurement, with the number of ranks; returns the status to end with,
            0 to go on. What it has to say it says before: torchrun ends all ranks soon after one.
        conclude: on rank 0 after it; returns the status, and the same holds.
        effort: how long to measure.
        transport: of `Network`.
        address: of `Network`.

    Raises:
        ExecutionError: a rank is gone, does not come or does not answer.
    """
    torch.set_num_threads(1)
    with job_group("probe", effort.timeout_s):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if status := _told(prepare(ranks) if rank == 0 else 0):
            return status
        store = dist.distributed_c10d.PrefixStore(_PREFIX, dist.distributed_c10d._get_default_store())
        network = Network(
            store,
            rank,
            ranks,
            timeout_s=effort.timeout_s,
            transport=transport,
            address=address,
        )
        try:
            measured = measure(network, dist.distributed_c10d._get_default_group(), effort)
        except Exception as error:
            network.abort(f"gave up: {error}")
            raise
        network.close()
        return _told(conclude(measured) if rank == 0 else 0)


def _told(status: int) -> int:
    """The status that rank 0 says."""
    said = torch.tensor([status])
    dist.broadcast(said, src=0)
    return int(said)
