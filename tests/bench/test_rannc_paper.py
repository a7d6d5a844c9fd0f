"""RaNNC's experiments: the models have the published size, and their costs are those of the whole model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arborcast.bench.training import rannc_paper as paper
from arborcast.pipeline.costs.analytic import analyse
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.planning.alternatives import data_parallel
from arborcast.pipeline.planning.plan_prediction import predict
from arborcast.topologies import load

SMALL = paper.Shape("small", 3, 64, 4, 96, 1000)


def weights(shape: paper.Shape) -> int:
    """Embeddings and their norm; four matrices of attention, two of feed-forward, two norms; the head."""
    width, inner = shape.width, shape.inner
    embedding = (shape.vocabulary + 512 + 2) * width + 2 * width
    block = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    head = width * width + width + 2 * width + shape.vocabulary
    return embedding + shape.blocks * block + head


def test_models_have_the_published_size() -> None:
    assert weights(paper.TALL) == pytest.approx(1.85e9, rel=0.005)
    assert weights(paper.LARGE) == pytest.approx(0.33e9, rel=0.02)
    assert paper.parameters(paper.costs(SMALL, 8)) == weights(SMALL)


def test_blocks_cost_what_one_costs() -> None:
    """The profile is that of all layers analysed, with the optimizer's state."""
    import torch
    from torch.nn import functional

    from arborcast.pipeline.zoo.bert import bert_for_tokens

    with torch.device("meta"):
        model = bert_for_tokens(64, 4, 3, inner=96, vocabulary=1000).half()
        tokens = torch.zeros(8, paper.TOKENS, dtype=torch.long)
    whole = analyse(
        model,
        ((tokens, tokens, torch.zeros_like(tokens, dtype=torch.bool)), tokens),
        paper.DEVICE,
        loss_fn=lambda scores, tokens: functional.cross_entropy(scores.flatten(0, 1), tokens.flatten()),
    )
    found = paper.costs(SMALL, 8)
    assert [it.layers for it in found.ties] == [it.layers for it in whole.ties] == [(0, 4)]
    for ours, theirs in zip(found.layers, whole.layers, strict=True):
        assert replace(ours, name="", optimizer_bytes=0) == replace(theirs, name="", optimizer_bytes=0)
        assert ours.optimizer_bytes == 12 * ours.gradient_bytes // 2


def test_rows_of_all_experiments_have_the_same_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TALL": SMALL, "LARGE": SMALL, "TALL_BATCH": 8}.items():
        monkeypatch.setattr(paper, name, value)
    rows = paper.tall_rows((8,))
    columns = set(paper._large(paper.Way("data-parallel", 1, None, 64), SMALL.blocks)) | {"experiment"}
    assert [set(row) for row in rows] == [columns] * 3


@pytest.mark.long
def test_megatron_in_one_part_is_data_parallelism() -> None:
    profile, network = paper.costs(SMALL, 8), LinkCosts(load("ndv2"))
    plan = data_parallel(profile, network, batch=64)
    row = paper.megatron(SMALL, network, 1, 64)
    assert row["time_us"] == pytest.approx(predict(plan, profile, network, batch=64).time_us)
    assert not row["recompute"]
    halves = paper.costs(SMALL, 8, parts=2)
    # Of a block: half of all matrices and of the biases inside, whole norms and biases behind the sums.
    whole, half = (it.layers[1].gradient_bytes // 2 for it in (profile, halves))
    assert half == (whole - 6 * 64) // 2 + 6 * 64


def test_ours_on_one_host_is_the_same_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "LIMIT_BYTES", 4 << 20)
    profile, network = paper.costs(SMALL, 8), LinkCosts(load("ndv2:boxes=2"))
    plan = paper.over_hosts(profile, network, 128)
    inside = [tuple(rank for rank in stage.ranks if rank < 8) for stage in plan.stages]
    assert [stage.ranks for stage in plan.stages] == [
        (*ranks, *(rank + 8 for rank in ranks)) for ranks in inside
    ]
