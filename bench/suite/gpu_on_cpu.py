"""Tests that want GPUs, on CPU tensors: whatever names a GPU means the CPU.

What torch's tests show with GPUs (DDP and its hooks, subgroups, averagers) is mostly not about GPUs. Under
`working`, tensors and modules that are moved to a GPU stay, new ones are made on the CPU, DDP is told of no
devices, and streams do nothing. Tests about the GPU itself fail, on gloo as well.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

GPUS = 8
"""As many as the tests may find."""


def let_tests_run() -> None:
    """Have tests imported from now on without what skips them where there is no GPU."""
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    common.skip_if_no_gpu = lambda test: test
    common.skip_if_lt_x_gpu = common.nccl_skip_if_lt_x_gpu = lambda *_, **__: lambda test: test


@contextmanager
def working() -> Iterator[None]:
    """Tests within take CPU tensors for those of a GPU."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.overrides import TorchFunctionMode

    def on_cpu(value: Any) -> Any:
        if isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda")):
            return torch.device("cpu") if torch.device(value).type == "cuda" else value
        return value

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.cuda:
                return args[0]
            if function is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int):
                args = (args[0], "cpu", *args[2:])
            kwargs = {key: on_cpu(value) for key, value in (kwargs or {}).items()}
            if isinstance(kwargs.get("device"), int):
                kwargs["device"] = "cpu"
            return function(*map(on_cpu, args), **kwargs)

    wrap = DistributedDataParallel.__init__

    def without_devices(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **rest: Any
    ) -> None:
        wrap(self, module, **rest)

    def stays(module: Any, *_: Any, **__: Any) -> Any:
        return module

    move = torch.nn.Module.to

    def moved(module: Any, *args: Any, **named: Any) -> Any:
        if args and isinstance(args[0], int | str | torch.device):
            args = ("cpu", *args[1:])
        return move(module, *args, **named)

    class Stream(mock.MagicMock):  # torch asks for the class
        pass

    nothing: dict[str, Callable[..., Any]] = {
        "set_device": lambda *_: None,
        "device_count": lambda: GPUS,
        "current_device": lambda: 0,
        "synchronize": lambda *_: None,
        "Stream": Stream,
        "Event": Stream,
        "current_stream": lambda *_: Stream(),
        "stream": lambda *_: nullcontext(),
        "device": lambda *_: nullcontext(),
    }
    with ExitStack() as patched:
        for name, function in nothing.items():
            patched.enter_context(mock.patch.object(torch.cuda, name, function))
        patched.enter_context(mock.patch.object(DistributedDataParallel, "__init__", without_devices))
        patched.enter_context(mock.patch.object(torch.nn.Module, "cuda", stays))
        patched.enter_context(mock.patch.object(torch.nn.Module, "to", moved))
        patched.enter_context(OnCpu())
        yield
