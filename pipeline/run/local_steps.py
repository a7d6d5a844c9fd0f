"""Steps of optimizers on the parts that a rank holds, where each element of a parameter steps by itself.

`DTensor` decides anew for each operator how it is to be divided: a step of AdamW on small parts took three
times as long as on the parts themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, optim

from arborcast.pipeline.run.prepared_layers import is_sharded, local, over

_BY_ELEMENT = frozenset(
    (
        *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam),
        *(optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
    )
)
"""Others may ask for norms of whole parameters; so may classes made of these."""


@contextmanager
def on_parts(optimizer: optim.Optimizer | None) -> Iterator[None]:
    """While it is entered, an optimizer of such a kind has this rank's parts for parameters and their state.

    Args:
        optimizer: None where there is none.
    """
    if optimizer is None or type(optimizer) not in _BY_ELEMENT:
        yield
        return
    state: dict[Any, dict[str, Any]] = optimizer.state
    whole: dict[Tensor, Tensor] = {}  # by part
    with torch.no_grad():  # in which parts are the same tensors each time
        for group in optimizer.param_groups:
            for at, parameter in enumerate(group["params"]):
                if parameter.grad is None or not is_sharded(parameter) or not parameter.dim():
                    continue
                group["params"][at] = part = local(parameter)
                whole[part], part.grad = parameter, local(parameter.grad)
                if parameter in state:
                    state[part] = {key: _part(value) for key, value in state[parameter].items()}
    try:
        yield
    finally:
        for group in optimizer.param_groups:
            group["params"] = [whole.get(it, it) for it in group["params"]]
        with torch.no_grad():
            for part, parameter in whole.items():
                part.grad = None
                for key, value in state.pop(part, {}).items():
                    own = state[parameter]
                    if _part(own.get(key)) is not value:
                        is_alike = isinstance(value, Tensor) and value.shape == part.shape
                        own[key] = over(value, parameter) if is_alike else value


def _part(value: Any) -> Any:
    return local(value) if isinstance(value, Tensor) else value
