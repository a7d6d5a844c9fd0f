"""Implicit schedules on real processes, each of which derives its own program."""

from __future__ import annotations

import importlib.util
from fractions import Fraction

import pytest

from arborcast.backends.measure import launch
from arborcast.backends.measure.job import ITEM_BYTES, Reduction, Sweep, count_for
from tests.support.drawn_implicit import KINDS, circulant, grid, implicit

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
    pytest.mark.usefixtures("forked_workers"),
]

FABRICS = (circulant(5, {1: 1, 2: 1}), grid(2, 4, hubs=True))


@pytest.mark.long
def test_everything_equals_torch() -> None:
    """Every kind by the executor of `synth run`: half of the types on five, the others on eight processes."""
    thirds = [Fraction(2, 3), Fraction(1, 3)]
    reductions = {"float32": Reduction.SUM, "float64": Reduction.AVG, "bfloat16": Reduction.MAX}
    sizes = (0, 17, 1003)
    sweeps = [
        Sweep(
            schedule := implicit(fabric, kind, shares=thirds if len(dtype) % 2 else [Fraction(1)]),
            tuple(size * ITEM_BYTES[dtype] for size in sizes),
            tuple(count_for(schedule, size * ITEM_BYTES[dtype], dtype) for size in sizes),
            dtype,
            reductions.get(dtype, Reduction.PRODUCT),
            iterations=1,
            warmup=0,
            pieces=pieces,
        )
        for first, fabric in enumerate(FABRICS)
        for turn, kind in enumerate(KINDS)
        for dtype, pieces in [*zip(ITEM_BYTES, (None, 1, 3, 2), strict=True)][(first + turn) % 2 :: 2]
    ]
    for sweep, rows in zip(sweeps, launch.run_sweeps(sweeps, timeout_s=200), strict=True):
        assert [row.wrong for row in rows] == [0, 0, 0], (sweep.schedule.topology.name, sweep)
