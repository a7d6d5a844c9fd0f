"""The forms in which `torch.compile` meets a process group, each compared with the same without it.

A form is a function of rank and size that runs inside a default group and raises where results differ.
Torch's own tests of them do not ship with torch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from arborcast.backends.tensors.torch_compat import all_gather_single, reduce_scatter_single

COUNT = 24
"""Elements of a tensor, which 2, 3 and 4 ranks divide."""

TIMEOUT = timedelta(seconds=60)

Form = Callable[[int, int], None]
Step = Callable[[Tensor], Tensor]


def run_form(form: Form, rank: int, size: int, backend: str, address: str, pipe: Any) -> None:
    """Run a form on one rank, in a default group of its own; what it raises goes through the pipe.

    Args:
        form: one of `FORMS`.
        rank: of this process.
        size: ranks of the group.
        backend: that the group is made of.
        address: where the ranks meet.
        pipe: to whoever started this process.
    """
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        form(rank, size)
        dist.barrier()
    except Exception:
        pipe.send(traceback.format_exc())
        raise
    dist.destroy_process_group()


def _alike(step: Step) -> Form:
    """A form whose step gives the same compiled and not, the second time as well."""

    def form(rank: int, size: int) -> None:
        compiled = torch.compile(step, backend="aot_eager")
        for turn in range(2):
            given = torch.arange(COUNT, dtype=torch.float32) * (rank + 1) + turn
            torch.testing.assert_close(compiled(given.clone()), step(given.clone()))

    return form


def _in_place(collective: Callable[[Tensor], Any]) -> Step:
    def step(given: Tensor) -> Tensor:
        tensor = given * 2
        collective(tensor)
        return tensor + 1

    return step


def _all_reduce_asynchronous(given: Tensor) -> Tensor:
    tensor = given * 2
    work = dist.all_reduce(tensor, async_op=True)
    other = given.square()
    assert work is not None
    work.wait()
    return tensor + other


def _all_gather(given: Tensor) -> Tensor:
    parts = [torch.empty_like(given) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, given * 2)
    return torch.stack(parts) + 1


def _into(whole: Callable[[int], int], collective: Callable[[Tensor, Tensor], Any]) -> Step:
    """Of a collective whose result has so many elements on so many ranks."""

    def step(given: Tensor) -> Tensor:
        result = torch.empty(whole(dist.get_world_size()))
        collective(result, given * 2)
        return result + 1

    return step


def _functional(collective: Callable[[Tensor], Any]) -> Step:
    def step(given: Tensor) -> Tensor:
        result: Tensor = functional.wait_tensor(collective(given * 2))  # type: ignore[no-untyped-call]
        return result + 1

    return step


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _train(rank: int, wrap: Callable[[nn.Module], Any], *, whole_step: bool = False) -> list[Tensor]:
    """Three steps of a small model on this rank's data: its weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(given: Tensor) -> None:
        wrapped(given).square().mean().backward()

    taken = torch.compile(step, backend="aot_eager") if whole_step else step
    for turn in range(3):
        optimizer.zero_grad()
        taken(torch.arange(32.0).view(4, 8) / (rank + turn + 1))
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _trains_alike(wrap: Callable[[nn.Module], Any], *, whole_step: bool = False) -> Form:
    def form(rank: int, size: int) -> None:
        expected = _train(rank, DistributedDataParallel)
        for got, wanted in zip(_train(rank, wrap, whole_step=whole_step), expected, strict=True):
            torch.testing.assert_close(got, wanted)

    return form


_compiled: Callable[[Any], Any] = partial(torch.compile, backend="aot_eager")

FORMS: dict[str, Form] = {
    "compile(DDP(model))": _trains_alike(lambda model: _compiled(DistributedDataParallel(model))),
    "compile(DDP(model, static_graph=True))": _trains_alike(
        lambda model: _compiled(DistributedDataParallel(model, static_graph=True))
    ),
    "DDP(compile(model))": _trains_alike(lambda model: DistributedDataParallel(_compiled(model))),
    "compile(step) with DDP, backward inside": _trains_alike(DistributedDataParallel, whole_step=True),
    "all_reduce": _alike(_in_place(dist.all_reduce)),
    "all_reduce of MAX": _alike(_in_place(lambda tensor: dist.all_reduce(tensor, op=dist.ReduceOp.MAX))),
    "all_reduce, asynchronous": _alike(_all_reduce_asynchronous),
    "broadcast": _alike(_in_place(lambda tensor: dist.broadcast(tensor, 1))),
    "barrier": _alike(_in_place(lambda _: dist.barrier())),
    "all_gather": _alike(_all_gather),
    "all_gather_into_tensor": _alike(_into(lambda size: size * COUNT, all_gather_single)),
    "reduce_scatter_tensor": _alike(_into(lambda size: COUNT // size, reduce_scatter_single)),
    "all_to_all_single": _alike(_into(lambda _: COUNT, dist.all_to_all_single)),
    "functional all_reduce": _alike(_functional(lambda it: functional.all_reduce(it, "sum", _world()))),
    "functional all_gather_tensor": _alike(
        _functional(lambda it: functional.all_gather_tensor(it, 0, _world()))
    ),
    "functional reduce_scatter_tensor": _alike(
        _functional(lambda it: functional.reduce_scatter_tensor(it, "sum", 0, _world()))
    ),
    "functional broadcast": _alike(_functional(lambda it: functional.broadcast(it, 0, _world()))),
}
"""By what is compiled; collectives stand between other operations of one function."""
