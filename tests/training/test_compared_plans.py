"""Every plan of a comparison is trained by, in real processes, and equal to serial training."""

from __future__ import annotations

from pathlib import Path

import pytest

from arborcast.pipeline.costs.devices import with_reserve
from arborcast.pipeline.planning.formats import read_plan, write_plan
from arborcast.pipeline.planning.plan_comparison import compare
from arborcast.pipeline.profiles import Layer, Profile
from arborcast.pipeline.trainer import Trainer
from tests.support.ranks import run_ranks
from tests.support.training_cases import (
    LAYERS,
    batches,
    cross_entropy,
    momentum,
    network,
    serial,
)

RANKS_IMPORT = ("torch._dynamo",)
STEPS = 3
LIMIT = 40_000_000
SIZE = 16


def trained_by_all(rank: int, size: int, folder: str) -> dict[str, list[float]]:
    losses = {}
    for file in sorted(Path(folder).glob("*.json")):
        with Trainer(network(), read_plan(file), cross_entropy, momentum, timeout_s=60.0) as trainer:
            losses[file.stem] = [trainer.step(*batch) for batch in batches(STEPS, (SIZE,))]
    return losses


@pytest.mark.long
def test_every_plan_of_a_comparison_trains_as_serially(tmp_path: Path) -> None:
    """Costs are drawn so that memory and messages make the methods differ."""
    layers = (
        Layer(f"l{i}", 100.0, 200.0, 10_000, 4_000_000, 5_000_000, 5_000_000, 5_000_000)
        for i in range(LAYERS)
    )
    found = compare(
        Profile("drawn", SIZE, tuple(layers)), "full:4", memory_bytes=with_reserve(LIMIT), microbatches=4
    )
    plans = {it.method: it.plan for it in found.alternatives if it.plan is not None}
    assert set(plans) >= {"arborcast", "gpipe", "pipedream", "rannc", "spp"}
    assert len({(plan.stages, plan.order, plan.recompute) for plan in plans.values()}) >= 4
    for method, plan in plans.items():
        write_plan(plan, tmp_path / f"{method}.json")
    expected = serial(network, batches(STEPS, (SIZE,))).losses
    for losses in run_ranks(4, trained_by_all, str(tmp_path)):
        assert losses == {method: pytest.approx(expected, abs=1e-6) for method in plans}
