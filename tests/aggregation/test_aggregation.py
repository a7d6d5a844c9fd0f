"""Schedules through switches that add and multicast, on real processes: results, faults, strangers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from arborcast.backends.executors.engine_runner import EngineRunner  # noqa: E402
from arborcast.backends.options import Options  # noqa: E402
from arborcast.synth.schedule import Schedule  # noqa: E402
from arborcast.synth.topology import Switch  # noqa: E402
from tests.support.in_network import aggregators, shared_roots, star, turning, two_levels  # noqa: E402
from tests.support.ranks import run_ranks, store_path  # noqa: E402

LOOPBACK = Switch("nvls", reduces=True, multicasts=True, loopback=True)
PLAIN = Switch("s", reduces=True, multicasts=True)


def runner(schedule: Schedule, rank: int, options: Options, timeout_s: float = 30) -> EngineRunner:
    store = dist.FileStore(str(store_path()), schedule.topology.ranks)
    return EngineRunner(schedule, store, rank, timeout_s=timeout_s, options=options)


def contribution(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    chance = torch.Generator().manual_seed(rank)
    return (torch.rand(count, generator=chance, dtype=torch.float64) * 100 - 50).to(dtype)


TYPES = (torch.float32, torch.int64, torch.bfloat16, torch.float16)
Order = tuple["Order | int", ...] | int  # who is added to whom, from the left


def added(order: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Torch's sum in an order of ranks, and of sums of them."""
    if isinstance(order, int):
        return contribution(order, count, dtype)
    total = added(order[0], count, dtype)
    for one in order[1:]:
        total = total + added(one, count, dtype)
    return total


def wrong_sums(
    rank: int, size: int, schedule: Schedule, options: Options, counts: list[int], orders: list[Any]
) -> list[str]:
    """Calls after which this rank has other bits than torch, with the order of each chunk's sum."""
    made = runner(schedule, rank, options)
    wrong = []
    for count in counts:
        for dtype in TYPES:
            data = contribution(rank, count, dtype)
            made.run(count, dtype, output=data)
            cuts = [count * chunk // len(orders) for chunk in range(len(orders) + 1)]
            parts = [
                added(order, count, dtype)[a:b] for order, (a, b) in zip(orders, pairwise(cuts), strict=True)
            ]
            if not torch.equal(data, torch.cat(parts)):
                wrong.append(f"{count} of {dtype}")
    made.close()
    return wrong


@pytest.mark.parametrize(
    ("schedule", "orders"),
    [
        (turning(star(4)), [(0, 1, 2, 3)]),
        (turning(two_levels(2, 2)), [((0, 1), (2, 3))]),
        (shared_roots(star(3, PLAIN)), [(0, (1, 2)), (1, (0, 2)), (2, (0, 1))]),
        (shared_roots(star(3, LOOPBACK)), [(0, 1, 2)] * 3),
    ],
    ids=lambda value: value.topology.name if isinstance(value, Schedule) else "",
)
def test_sums_are_torchs_in_the_order_of_adding(schedule: Schedule, orders: list[Any]) -> None:
    size = schedule.topology.ranks
    counts = [0, 1, 1000, 200_003]
    with aggregators(len(schedule.topology.switches)) as (made, options):
        wrong = run_ranks(size, wrong_sums, schedule, options, counts, orders, backend=None)
    assert wrong == [[]] * size
    assert [one.served for one in made] == [1] * len(made)
