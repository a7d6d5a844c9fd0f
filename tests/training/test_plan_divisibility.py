"""What no plan may divide: refused in one line that names the part and the stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.model.traced import trace
from arborcast.pipeline.run.divisibility import check_divisible
from arborcast.pipeline.stages import Plan

REPLICATED = Plan([(0, 1, [0]), (1, 3, [1, 2])], microbatches=1)
SINGLE = Plan([(0, 1, [0]), (1, 3, [1])], microbatches=1)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (nn.InstanceNorm1d(4, track_running_stats=True), "keeps running statistics"),
        (nn.Embedding(8, 4, max_norm=1.0), "max_norm"),
        (nn.EmbeddingBag(8, 4, max_norm=1.0), "max_norm"),
        (nn.Embedding(8, 4, scale_grad_by_freq=True), "scale_grad_by_freq"),
    ],
)
def test_what_depends_on_the_samples_of_others_has_one_rank(part: nn.Module, why: str) -> None:
    model = Divisible([nn.Identity(), nn.Sequential(nn.Identity(), part), nn.Identity()])
    with pytest.raises(PlanError, match=rf"plan: stage 1: 1\.1 .*{why}.*one rank, got 2"):
        check_divisible(model, REPLICATED)
    check_divisible(model, SINGLE)


def test_what_depends_on_its_own_samples_alone_may_have_replicas() -> None:
    parts = [nn.Embedding(8, 4), nn.InstanceNorm1d(4), nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4))]
    check_divisible(Divisible(parts), REPLICATED)


def test_norms_that_two_stages_use_stay_on_one() -> None:
    norm = nn.BatchNorm1d(4)
    model = Divisible([norm, nn.Linear(4, 4), norm])
    with pytest.raises(PlanError, match=r"plan: 0 and 2 share their running statistics .* stages 0 and 1"):
        check_divisible(model, SINGLE)
    check_divisible(model, Plan([(0, 3, [0, 1])], microbatches=1))
    check_divisible(Divisible([nn.BatchNorm1d(4), nn.Identity(), nn.BatchNorm1d(4)]), SINGLE)


class Named(nn.Module):
    """An embedding inside an unmodified model."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4, **options)  # type: ignore[arg-type]
        self.head = nn.Linear(4, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.head(self.embedding(words)))


def test_traced_models_are_looked_into() -> None:
    words = torch.zeros(4, dtype=torch.int64)
    for options, refused in ({}, False), ({"scale_grad_by_freq": True}, True):
        model = trace(Named(**options), words, evaluation=False)
        plan = Plan([(0, model.depth, [0, 1])], microbatches=1)
        if refused:
            with pytest.raises(PlanError, match=r"stage 0: embedding.* whole batch names a row"):
                check_divisible(model, plan)
        else:
            check_divisible(model, plan)
