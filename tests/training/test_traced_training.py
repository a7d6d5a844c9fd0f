"""Unmodified models in real processes: cut by their graphs and trained by the trainer as serially."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arborcast.pipeline.model.traced import trace
from arborcast.pipeline.stages import divided
from arborcast.pipeline.trainer import Trainer
from tests.support.ranks import run_ranks
from tests.support.traced_models import Language, Residual
from tests.support.training_cases import momentum, plan_of

RANKS_IMPORT = ("torch._dynamo", "torch.export._trace")

STEPS, MICROBATCHES = 5, 2
REPLICAS = {"residual": [1, 2, 1], "language": [1, 1, 2]}


def residual() -> nn.Module:
    torch.manual_seed(0)
    return Residual()


def language() -> nn.Module:
    """Without dropout, whose random numbers differ from process to process."""
    torch.manual_seed(0)
    model = Language()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def batches(name: str) -> list[tuple[Any, Tensor]]:
    """Batches of 9 and 6 samples: shares of 5, 4, 3, 2 and 1."""
    torch.manual_seed(1)
    found: list[tuple[Any, Tensor]] = []
    for step in range(STEPS):
        samples = (9, 6)[step % 2]
        if name == "residual":
            found.append((torch.randn(samples, 2, 4, 4), torch.randn(samples, 3)))
        else:
            inputs = torch.randint(0, 11, (samples, 5)), torch.rand(samples, 5)
            found.append((inputs, torch.randn(samples, 5, 11)))
    return found


MAKE: dict[str, Callable[[], nn.Module]] = {"residual": residual, "language": language}
mse = nn.functional.mse_loss


def serial(name: str) -> tuple[list[float], dict[str, Any], float]:
    model = MAKE[name]()
    optimizer = momentum(model.parameters())
    losses = []
    for inputs, targets in batches(name):
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        sizes = divided(len(targets), MICROBATCHES)
        optimizer.zero_grad()
        total = 0.0
        for *x, y in zip(*(value.split(sizes) for value in (*given, targets)), strict=True):
            loss = mse(model(*x), y) * (len(y) / len(targets))
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    inputs, targets = batches(name)[0]
    with torch.no_grad():
        last = mse(model.eval()(*(inputs if isinstance(inputs, tuple) else (inputs,))), targets)
    return losses, {key: value.numpy() for key, value in model.state_dict().items()}, last.item()


def trained(rank: int, size: int, name: str) -> tuple[list[float], dict[str, Any], float]:
    torch.set_num_threads(1)
    given = batches(name)
    layered = trace(MAKE[name](), given[0][0])
    plan = plan_of(REPLICAS[name], depth=layered.depth, microbatches=MICROBATCHES)
    with Trainer(layered, plan, mse, momentum, collectives="gloo") as trainer:
        losses = [trainer.step(*batch) for batch in given]
        state = {key: value.numpy().copy() for key, value in trainer.state_dict().items()}
        return losses, state, trainer.evaluate(*given[0])


@pytest.mark.parametrize("name", ["residual", pytest.param("language", marks=pytest.mark.long)])
@pytest.mark.long
def test_traced_models_train_as_serially(name: str) -> None:
    """Skip connections and batch norm over replicas; two inputs and weights tied between both ends."""
    losses, state, last = serial(name)
    for found in run_ranks(4, trained, name, environ={"ARBORCAST_TOPOLOGY": "full:4"}):
        np.testing.assert_allclose(found[0], losses, atol=1e-6, rtol=0)
        assert found[1].keys() == state.keys()
        for key, value in found[1].items():
            np.testing.assert_allclose(value, state[key], atol=2e-6, rtol=0, err_msg=key)
        assert found[2] == pytest.approx(last, abs=1e-6)
