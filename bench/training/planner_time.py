"""How long planning takes: 50 layers on 16 devices and around it, each in a process of its own.

The first plan of a process also loads compiled kernels and the packages behind them; its time stands beside
that of the second, which finds out everything about the fabric anew.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

from arborcast.bench.harness.processes import answer
from arborcast.bench.harness.turns import median_of

if TYPE_CHECKING:
    from arborcast.pipeline.profiles import Profile

LIMIT_BYTES = 3 << 29

CASES = (
    ("dgx-a100:boxes=2", 50, None),
    ("torus:4x4", 50, None),
    ("mi250", 50, None),
    ("dgx2", 50, None),
    ("dgx1", 50, None),
    ("dgx-a100:boxes=2", 50, LIMIT_BYTES),
    ("torus:4x4", 50, LIMIT_BYTES),
    ("dgx1", 50, LIMIT_BYTES),
    ("dgx-a100:boxes=2", 25, None),
    ("dgx-a100:boxes=2", 100, None),
    ("dgx-a100:boxes=4", 50, None),
)
"""Topology, layers, and the memory of each rank where it is to count."""

TARGET_S = 1.0
BATCH = 512


def drawn_profile(layers: int, *, seed: int = 0) -> Profile:
    """Layers of about the costs of a network of residual blocks, all different."""
    from arborcast.pipeline.profiles import Layer, Profile

    draw = random.Random(seed)
    made = []
    for index in range(layers):
        forward_us = draw.uniform(300, 3000)
        parameters = draw.randrange(1 << 18, 1 << 25)
        made.append(
            Layer(
                name=f"block{index}",
                forward_us=forward_us,
                backward_us=2 * forward_us,
                output_bytes=draw.randrange(1 << 18, 1 << 24),
                saved_bytes=draw.randrange(1 << 22, 1 << 26),
                parameter_bytes=parameters,
                gradient_bytes=parameters,
                optimizer_bytes=2 * parameters,
                forward_fixed_us=20.0,
                backward_fixed_us=40.0,
            )
        )
    return Profile(f"{layers} drawn layers", 64, tuple(made), source=f"drawn, seed {seed}")


def planner_rows(*, runs: int = 3) -> list[dict[str, Any]]:
    """Seconds from a profile and a topology to a plan, for each case."""
    rows = []
    for spec, layers, limit_bytes in CASES:
        found = [answer(plan_twice, spec, layers, limit_bytes) for _ in range(runs)]
        rows.append(
            found[0]
            | median_of("seconds", [each["seconds"] for each in found])
            | median_of("first_seconds", [each["first_seconds"] for each in found], "first_spread")
            | {
                "runs": runs,
                "target_s": TARGET_S if layers == 50 and found[0]["devices"] <= 16 else None,
            }
        )
    return rows


def plan_twice(spec: str, layers: int, limit_bytes: int | None) -> dict[str, Any]:
    """The same planned twice, both timed."""
    from arborcast import pipeline, topologies

    topology = topologies.load(spec)
    profile = drawn_profile(layers)
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        plan = pipeline.plan(profile, topology, batch=BATCH, memory_bytes=limit_bytes)
        seconds.append(time.perf_counter() - begin)
    return {
        "topology": topology.name,
        "devices": topology.ranks,
        "layers": layers,
        "batch": BATCH,
        "limit_bytes": limit_bytes,
        "seconds": seconds[1],
        "first_seconds": seconds[0],
        "stages": len(plan.stages),
        "replicas": [stage.replicas for stage in plan.stages],
        "microbatches": plan.microbatches,
        "order": plan.order,
    }
