"""Optimizers that step on the parts of a rank, against the same ones that step on `DTensor`s."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn, optim

from arborcast.pipeline.run.local_steps import on_parts
from arborcast.pipeline.run.prepared_layers import full, is_sharded
from tests.support.ranks import run_ranks


class Watched(optim.SGD):
    """Notes what it is given; a class made of another may do anything."""

    def step(self, closure=None):
        """As `SGD`."""
        self.sharded = [is_sharded(it) for group in self.param_groups for it in group["params"]]
        return super().step(closure)


KINDS = {
    "Adam": (optim.Adam, {"amsgrad": True}),
    "AdamW": (optim.AdamW, {}),
    "Adagrad": (optim.Adagrad, {}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.5}),
    "SGD": (optim.SGD, {"momentum": 0.9}),
    "plain SGD": (optim.SGD, {}),
    "a class of the user's": (Watched, {}),
}


def stepped(mesh, name, is_on_parts):
    """Values and state after three steps, whole; and where state is divided."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    pairs = [(torch.randn(4, 6), Shard(1)), (torch.randn(4), Replicate()), (torch.randn(()), Replicate())]
    parameters = [nn.Parameter(distribute_tensor(it, mesh, [how])) for it, how in pairs]
    parameters += [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2))]
    kind, options = KINDS[name]
    optimizer = kind(parameters, lr=0.1, **options)
    for _ in range(3):
        for parameter, (value, how) in zip(parameters, pairs, strict=False):
            parameter.grad = distribute_tensor(torch.randn_like(value), mesh, [how])
        parameters[3].grad = torch.randn(3)  # the last one has none
        with on_parts(optimizer) if is_on_parts else nullcontext():
            optimizer.step()
    assert all(it is own for it, own in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    states = optimizer.state_dict()["state"]
    whole = {(at, key): full(torch.as_tensor(it)) for at, own in states.items() for key, it in own.items()}
    divided = {(at, key): is_sharded(it) for at, own in states.items() for key, it in own.items()}
    return [full(it.detach()) for it in parameters], whole, divided, getattr(optimizer, "sharded", None)


def compared(rank, size):
    """By optimizer which parameters it was given sharded, if it says so; both ways are the same."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh, told = init_device_mesh("cpu", (size,)), {}
    for name in KINDS:
        (*found, divided, told[name]), (*wanted, wanted_divided, _) = (
            stepped(mesh, name, it) for it in (1, 0)
        )
        assert divided == wanted_divided, name
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    return told


def test_a_step_on_parts_is_the_step():
    """Of sharded, replicated, single and plain parameters, and of one without a gradient."""
    for told in run_ranks(2, compared):
        assert told == dict.fromkeys(KINDS) | {"a class of the user's": [True, True, True, False, False]}
