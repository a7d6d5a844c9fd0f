"""Real processes: every kind, type and reduction by both runtimes, beside torch's own collectives."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from arborcast.backends.measure import launch
from arborcast.backends.measure.job import ITEM_BYTES, RUNTIMES, Reduction, Sweep, count_for
from arborcast.backends.measure.nccl_tests import row_line
from arborcast.synth.errors import InputError
from arborcast.synth.schedule import Chunk, Transfer
from tests.support.drawn_schedules import (
    allgather_over_relay,
    custom_exchange,
    direct,
    in_rounds,
    make,
    recursive_doubling,
    ring_allreduce,
    tree_broadcast,
    uneven_allreduce,
)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
    pytest.mark.usefixtures("forked_workers"),
]


@pytest.mark.long
def test_everything_equals_torch() -> None:
    third = Fraction(1, 3)
    reduce_scatter = make(
        "reduce-scatter",
        [Chunk(third, owner) for owner in (2, 0, 1)],
        [Transfer(c, s, o, k, True) for c, o in enumerate((2, 0, 1)) for k, s in enumerate({0, 1, 2} - {o})],
        total=3,
        ranks=[1, 2, 0],
    )
    reduce = make(
        "reduce", [Chunk(Fraction(1), 2)], [Transfer(0, r, 2, 0, True) for r in (0, 1, 3)], total=4, root=2
    )
    schedules = [
        ring_allreduce(4),
        recursive_doubling(),
        tree_broadcast(),
        uneven_allreduce(),
        allgather_over_relay(),
        direct("gather", 3, root=1),
        direct("scatter", 3, root=2),
        direct("alltoall", 3),
        reduce_scatter,
        reduce,
        custom_exchange(),
        in_rounds(ring_allreduce(4)),
        in_rounds(direct("alltoall", 3)),
    ]
    sizes = (0, 3, 1003)
    # What adds does not see the schedule: all types and reductions with one, and by turns with all.
    all_ways = list(product(ITEM_BYTES, Reduction))
    asked = [
        (schedules[0], dtype, reduction, RUNTIMES[turn % 2])
        for turn, (dtype, reduction) in enumerate(all_ways)
    ]
    for (number, schedule), via in product(enumerate(schedules), RUNTIMES):
        dtype, reduction = all_ways[3 * number % len(all_ways)]
        asked.append((schedule, dtype, reduction if schedule.collective.kind.reduces else Reduction.SUM, via))
    sweeps = [
        Sweep(
            schedule,
            tuple(size * ITEM_BYTES[dtype] for size in sizes),
            tuple(count_for(schedule, size * ITEM_BYTES[dtype], dtype) for size in sizes),
            dtype,
            reduction,
            iterations=1,
            warmup=int(number == 0),
            via=via,
            pieces=(None, 3)[number % 2],
        )
        for number, (schedule, dtype, reduction, via) in enumerate(asked)
    ]
    for sweep, rows in zip(sweeps, launch.run_sweeps(sweeps, timeout_s=200), strict=True):
        assert [row.wrong for row in rows] == [0, 0, 0], sweep


def test_a_block_that_does_not_come_is_found_out() -> None:
    """Chunk 1, three quarters of block 0, never goes from rank 2 on to rank 3."""
    whole = custom_exchange()
    kept = tuple(t for t in whole.transfers if (t.chunk, t.dst) != (1, 3))
    lacking = Sweep(replace(whole, transfers=kept), (4 * 96,), (96,), iterations=1, warmup=0)
    (row,) = launch.run_local(lacking, timeout_s=100)
    assert row.wrong == 24  # of 96 in three blocks


def test_rows_and_columns() -> None:
    rows = launch.run_schedule(ring_allreduce(2), size_bytes=(1 << 12, 1 << 16), iterations=3, timeout_s=100)
    assert [(row.bytes, row.count) for row in rows] == [(1 << 12, 1 << 10), (1 << 16, 1 << 14)]
    for row in rows:
        assert row.algbw == pytest.approx(row.bytes / row.time_us / 1e3)
        assert row.busbw == pytest.approx(row.algbw)  # 2(n-1)/n = 1 for two ranks
    first = row_line(rows[0]).split()
    assert first[:5] == ["4096", "1024", "float", "sum", "-1"] and first[-1] == "0"


def test_without_torch_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'arborcast\[torch\]'"):
        launch.run_schedule(ring_allreduce(2))
