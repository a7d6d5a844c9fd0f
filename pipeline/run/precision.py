"""Training in 16-bit arithmetic across stages, equal to serial autocast with a gradient scaler.

The scale is the same on every rank because all ranks of the job hear of an infinite gradient on any of them
before any rank lets its optimizer step. The scale itself is that of `torch.amp.GradScaler`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arborcast.synth.errors import InputError

_TYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Precision:
    """What arithmetic a training is done in, and for float16 the scale of its loss.

    In a step: passes under `autocast()`, `scale(loss).backward()`, after all gradients are summed `unscale`,
    clipping, then `step` and `update`. On a rank without work: `unscale(())`, `step(None)` and `update`.

    Args:
        dtype: "float32", "bfloat16" or "float16"; only the last scales gradients.
        device: type of the device, as for `torch.autocast`.
        group: of all ranks of the job, those without work included; None for the default group, or for
            this process alone where there is none.
        init_scale: the first factor of the loss.
        growth_factor: of the scale after `growth_interval` steps without an infinite gradient.
        backoff_factor: of the scale after a step that was skipped because of one.
        growth_interval: in steps.

    Raises:
        InputError: a value is out of range.
    """

    def __init__(
        self,
        dtype: str = "float32",
        device: str = "cpu",
        group: dist.ProcessGroup | None = None,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        """Begin with the first scale."""
        if dtype not in _TYPES:
            raise InputError(f"precision: dtype must be one of {', '.join(_TYPES)}, got {dtype}")
        rules = (
            ("init_scale", init_scale, "positive and finite", 0 < init_scale < math.inf),
            ("growth_factor", growth_factor, "more than 1", growth_factor > 1),
            ("backoff_factor", backoff_factor, "between 0 and 1", 0 < backoff_factor < 1),
            ("growth_interval", growth_interval, "at least 1", growth_interval >= 1),
        )
        for name, value, rule, holds in rules:
            if not holds:
                raise InputError(f"precision: {name} must be {rule}, got {value}")
        self.dtype, self.device, self._group = dtype, device, group
        self._scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=self.scales,
        )
        self._scaler.scale(torch.zeros(()))  # it makes its tensors on first use
        # One number that is infinite where a gradient of any rank is: what the scaler is told of.
        self._told = nn.Parameter(torch.zeros(()))
        self._optimizer_of_it = torch.optim.SGD([self._told], lr=0.0)
        self._found: bool | None = None

    @property
    def scales(self) -> bool:
        """Whether losses are scaled."""
        return self.dtype == "float16"

    @property
    def current_scale(self) -> float:
        """The factor of the loss in this step."""
        return self._scaler.get_scale()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """In which forward passes and losses are computed; backward passes follow by themselves."""
        if self.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device, dtype=_TYPES[self.dtype])

    def no_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """In which backward passes are computed where a forward pass may be under way around them.

        Its types follow by themselves; autocast would change those of layers that are kept in float32.
        """
        if self.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device, enabled=False)

    def scale(self, loss: Tensor) -> Tensor:
        """What backward passes begin with."""
        if not self.scales:
            return loss
        # A tensor, not a number: a float16 loss then becomes float32 instead of infinite.
        return loss * torch.full((), self.current_scale, dtype=torch.float32, device=loss.device)

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide this rank's summed gradients by the scale, in place, and hear of all ranks' infinite ones.

        One allreduce of one number over all ranks, for float16 only.

        Raises:
            InputError: a gradient is float16, of which small ones are lost for ever.
        """
        if not self.scales:
            return
        if self._found is not None:
            raise RuntimeError("precision: unscale must be called once in a step, got a second call")
        # As GradScaler: the reciprocal in double precision, rounded once.
        inverse = torch.tensor(1.0 / self.current_scale, dtype=torch.float32).item()
        finite, half = [], False
        with torch.no_grad():
            for gradient in gradients:
                half = half or gradient.dtype == torch.float16
                finite.append(torch.isfinite(gradient).all())
                gradient.mul_(inverse)
        found = bool(finite) and not bool(torch.stack(finite).all())
        flag = torch.tensor([2.0 if half else float(found)])  # errors too are heard of by all ranks
        if self._group is not None or dist.is_initialized():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        if flag.item() == 2:
            raise InputError("precision: parameters must be float32 to be scaled, got float16 ones")
        self._found = bool(flag.item())

    def step(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Let the optimizer step unless some rank has an infinite gradient; whether it was let.

        Args:
            optimizer: of this rank; None where there is none. All ranks get the same answer.
        """
        if self.scales and self._found is None:
            raise RuntimeError("precision: step must follow unscale")
        if self._found:
            return False
        if optimizer is not None:
            optimizer.step()
        return True

    def update(self) -> None:
        """End the step: the scale of the next one."""
        if not self.scales:
            return
        if self._found is None:
            raise RuntimeError("precision: update must follow unscale")
        self._told.grad = torch.tensor(math.inf if self._found else 0.0)
        self._found = None
        self._scaler.unscale_(self._optimizer_of_it)
        self._scaler.update()

    def state_dict(self) -> dict[str, float | int]:
        """What `load_state_dict` takes, and that of `torch.amp.GradScaler` too; empty without scaling."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Go on from a saved state, which may come from `torch.amp.GradScaler`; without scaling, nothing.

        Raises:
            InputError: the state is of a training without scaling, or lacks an entry.
        """
        if not self.scales:
            return
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise InputError(
                f"precision: a state of float16 must have {', '.join(missing)}, got {sorted(state)}"
            )
        self._scaler.load_state_dict(dict(state))
