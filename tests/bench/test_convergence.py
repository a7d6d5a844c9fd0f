"""PipeDream's updates with old weights, beside copies of the model that are kept one by one."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from arborcast.bench.training.convergence import MOMENTUM, asynchronous, batches, digits  # noqa: E402
from arborcast.bench.training.digits import network  # noqa: E402

RATE = 0.05


def _with_copies(delay: int) -> list[float]:
    """Test outputs' accuracy after an epoch in which the first half is so many updates old."""
    training, (images, labels) = digits()
    model = nn.Sequential(*network(0))
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)
    kept = []
    for inputs, targets in batches(training, 0, 0):
        kept.append(copy.deepcopy(model))
        old, new = copy.deepcopy(kept[max(0, len(kept) - 1 - delay)]), kept[-1]
        new.zero_grad()
        old.zero_grad()
        cross_entropy(new[4:](old[:4](inputs)), targets).backward()
        halves = [*old[:4].parameters(), *new[4:].parameters()]
        for parameter, met in zip(model.parameters(), halves, strict=True):
            parameter.grad = met.grad
        optimizer.step()
    right = (model(images).argmax(1) == labels).sum()
    return [int(right) / len(labels)]


@pytest.mark.parametrize("stages", [1, 2])
def test_stages_meet_weights_as_old_as_their_distance_from_the_last(stages: int) -> None:
    assert asynchronous(RATE, 1, 0, stages=stages) == _with_copies(stages - 1)
    assert _with_copies(0) != _with_copies(1)
