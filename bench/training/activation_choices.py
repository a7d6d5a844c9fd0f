"""BERT-Large on a DGX-1 under limits of memory: what keeping, recomputing and offloading results costs.

All figures are predicted; that ranks hold what is predicted, `tests/training/test_treated_passes.py` shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MODEL, SPEC, BATCH, ORDER = "bert-large", "dgx1", 64, "1f1b"
LIMITS_GIB = (8.0, 4.0, 2.25, 1.0)
OFFLOAD_GBPS = 12.0
"""What a PCIe 3.0 slot of 16 lanes gives a copy."""

COLUMNS = ("limit_gib", "way", "time_us", "memory_bytes", "replicas", "microbatches", "treated", "why_not")

WAYS: dict[str, dict[str, Any]] = {
    "keep all": {"recompute": False},
    "recompute all": {"recompute": True},
    "by layer": {},
    "offload by layer": {"recompute": False, "offload_gbps": OFFLOAD_GBPS},
    "both by layer": {"offload_gbps": OFFLOAD_GBPS},
}


def choice_rows(limits_gib: Sequence[float] = LIMITS_GIB) -> list[dict[str, Any]]:
    """The best plan of each way under each limit, or why there is none."""
    from arborcast import topologies
    from arborcast.pipeline import zoo
    from arborcast.pipeline.costs.link_costs import LinkCosts
    from arborcast.pipeline.costs.saved_bytes import described
    from arborcast.pipeline.errors import PlanError
    from arborcast.pipeline.planning.plan_prediction import predict
    from arborcast.pipeline.planning.planner import plan

    profile, fabric = zoo.analytic_profile(MODEL, "v100"), topologies.load(SPEC)
    network = LinkCosts(fabric)
    rows = []
    for gib in limits_gib:
        for way, wishes in WAYS.items():
            row: dict[str, Any] = dict.fromkeys(COLUMNS) | {"limit_gib": gib, "way": way}
            rows.append(row)
            limit = int(gib * 2**30)
            try:
                made = plan(profile, fabric, batch=BATCH, order=ORDER, memory_bytes=limit, **wishes)
            except PlanError as error:
                row["why_not"] = str(error)
                continue
            found = predict(made, profile, network, batch=BATCH)
            row["time_us"], row["memory_bytes"] = found.time_us, max(it.total for it in found.memory)
            row["replicas"] = [it.replicas for it in made.stages]
            row["microbatches"] = made.microbatches
            row["treated"] = {
                index: described(it.segments) for index, it in enumerate(made.stages) if it.segments
            }
    return rows
