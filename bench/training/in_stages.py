"""A model trained in parts as in one piece: the same losses and weights, or why it is refused.

The stages run one after another in this process, on what their predecessors give, microbatch by microbatch,
as ranks do. What is random in training is switched off, since stages draw other numbers than serial training.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from arborcast.bench.training.user_models import SAMPLES, UserModel, catalog
from arborcast.pipeline.errors import PartitionError
from arborcast.pipeline.model.traced import Traced, trace

LIMIT = 1e-6
"""Of losses and weights, relative where the largest is above 1."""
COLUMNS = (
    "model",
    "stages",
    "result",
    "loss_difference",
    "weight_difference",
    "evaluation_difference",
    "microbatches",
    "returns_loss",
    "legal_cuts",
    "reason",
)
"""Of a row."""
LEARNING_RATE = 0.002
"""With momentum 0.9. At five times that, some vision models multiply the last bits of float32 past
the limit."""
SHARES = ((0, 3), (3, 5))
"""Of the samples: two microbatches."""


def rows_of_all(*, most: int | None = None, steps: int = 20) -> list[dict[str, Any]]:
    """Of all models that are there, or the first ones; two at a time."""
    count = len(catalog()[:most])
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as workers:
        return [row for rows in workers.map(_rows_of, range(count), [steps] * count) for row in rows]


def _rows_of(index: int, steps: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return list(examine(catalog()[index], steps=steps))


def examine(model: UserModel, *, steps: int = 20, stages: Sequence[int] = (2, 4)) -> Iterator[dict[str, Any]]:
    """A row for each number of stages: the largest differences from serial training, or why it is refused."""
    torch.manual_seed(0)
    built = deterministic(model.make())
    try:
        traced = trace(built, model.batch(), layers=max(stages))
    except PartitionError as error:
        for count in stages:
            yield dict.fromkeys(COLUMNS) | {
                "model": model.name,
                "stages": count,
                "result": "refused",
                "reason": str(error),
            }
        return
    first = {name: value.clone() for name, value in built.state_dict().items()}
    shares = ((0, SAMPLES),) if _has_batch_norm(built) else SHARES
    expected, last = _trained(model, lambda *batch: _serially(model, built, *batch), built, steps)
    assert last is not None, "serial training can always be evaluated"
    weights = {name: value.clone() for name, value in built.state_dict().items()}
    for count in stages:
        built.load_state_dict(first)
        parts = _Parts(model, traced, count, shares)
        losses, evaluated = _trained(model, parts.run, parts.whole, steps)
        found = built.state_dict()
        differences = {
            "loss_difference": max(map(_difference, losses, expected)),
            "weight_difference": max(_difference(found[name], value) for name, value in weights.items()),
            "evaluation_difference": None if evaluated is None else _difference(evaluated, last),
        }
        within = all(value is None or value <= LIMIT for value in differences.values())
        fault = "not evaluated" if within else "differs"
        yield {
            "model": model.name,
            "stages": count,
            "result": "equal" if within and evaluated is not None else fault,
            **differences,
            "microbatches": len(shares),
            "returns_loss": bool(traced.losses),
            "legal_cuts": sum(not cut.fault for cut in traced.training.cuts),
            "reason": traced.evaluation if isinstance(traced.evaluation, str) else "",
        }


def deterministic(model: nn.Module) -> nn.Module:
    """The model without dropout and the like."""
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name, value in vars(holder).items() if holder is not None else ():
                is_share = isinstance(value, float) and 0 < value < 1
                if is_share and ("drop" in name or name in {"p", "mask_time_prob"}):
                    setattr(holder, name, 0.0)
    return model.train()


def _trained(model: UserModel, run: Any, module: nn.Module, steps: int) -> tuple[list[Tensor], Tensor | None]:
    """Losses of all steps, and of the first batch in evaluation afterwards; None where that is refused."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=0.9), []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(run(*_batch(model, step)))
        optimizer.step()
    module.eval()
    with torch.no_grad():
        try:
            last = run(*_batch(model, 0))
        except PartitionError:
            last = None
    module.train()
    return losses, last


def _batch(model: UserModel, step: int) -> tuple[Any, Any]:
    torch.manual_seed(1 + step)
    return model.batch(), model.targets() if model.targets is not None else None


def _serially(model: UserModel, built: nn.Module, inputs: Any, targets: Any) -> Tensor:
    output = built(**inputs) if isinstance(inputs, dict) else built(inputs)
    if model.loss_fn is not None:
        loss = model.loss_fn(output, targets)
    else:
        loss = output if isinstance(output, Tensor) else output["loss"]
    if loss.requires_grad:
        torch.autograd.backward(loss)
    return loss.detach()


class _Parts(nn.Module):
    """Some stages of a model, in one process."""

    def __init__(
        self, model: UserModel, traced: Traced, count: int, shares: Sequence[tuple[int, int]]
    ) -> None:
        super().__init__()
        bounds = [traced.depth * stage // count for stage in range(count + 1)]
        self.model, self.traced, self.shares = model, traced, shares
        self.whole = traced.divide(0, traced.depth)
        self.stages = [traced.divide(start, end) for start, end in pairwise(bounds)]

    def run(self, inputs: Any, targets: Any) -> Tensor:
        """The loss of a batch; gradients add up where they are wanted."""
        given = self.traced.tensors_of(inputs)
        labels = [given[index] for index in self.traced.labels]
        for stage in self.stages:
            stage.train(self.whole.training)
        if self.traced.losses:
            self.stages[-1].begin_loss(labels, SAMPLES)
        total = torch.zeros(())
        for start, stop in self.shares:
            passes, output = self._forward([value[start:stop] for value in given])
            if self.traced.losses:
                loss = self.stages[-1].loss(output, [label[start:stop] for label in labels])
            else:
                assert self.model.loss_fn is not None, "the model returns none"
                loss = self.model.loss_fn(output, targets[start:stop]) * ((stop - start) / SAMPLES)
            total = total + loss.detach()
            if loss.requires_grad:
                _backward(passes, loss)
        return total

    def _forward(self, values: Sequence[Tensor]) -> tuple[list[tuple[list[Tensor], tuple[Tensor, ...]]], Any]:
        """What each stage took and gave, and what the last one returned."""
        passes = []
        for stage in self.stages:
            # As what came in a message.
            taken = [value.detach().clone().requires_grad_(value.requires_grad) for value in values]
            output = stage(*taken)
            values = output if isinstance(output, tuple) else (output,)
            passes.append((taken, tuple(values)))
        return passes, output


def _backward(passes: Sequence[tuple[list[Tensor], tuple[Tensor, ...]]], loss: Tensor) -> None:
    ends: Sequence[Tensor] = [loss]
    gradients: Sequence[Tensor | None] = [torch.ones(())]
    for index in reversed(range(len(passes))):
        pairs = [
            (end, it) for end, it in zip(ends, gradients, strict=True) if end.requires_grad and it is not None
        ]
        if pairs:
            torch.autograd.backward([end for end, _ in pairs], [it for _, it in pairs])
        gradients = [value.grad for value in passes[index][0]]
        ends = passes[index - 1][1]


def _has_batch_norm(model: nn.Module) -> bool:
    """It normalises each microbatch, so that only a batch in one piece is as in serial training."""
    return any(isinstance(it, nn.modules.batchnorm._BatchNorm) for it in model.modules())


def _difference(found: Tensor, expected: Tensor) -> float:
    """Of the largest element, relative to the largest of all where that is above 1."""
    if not found.numel():
        return 0.0
    largest = max(1.0, float(expected.abs().max()))
    return float((found.double() - expected.double()).abs().max()) / largest
