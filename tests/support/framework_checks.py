"""What PyTorch's own ways of parallel training give on four ranks, whatever the group: tensors to compare.

Every check trains the same small model on the same data, or calls collectives on known numbers, and returns
losses, parameters and results. `test_frameworks` runs them on one group after the other.
"""

# Annotations are evaluated here: DDP refuses a hook whose bucket is annotated by a string.

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

RANKS = 4
STEPS = 3

Values: TypeAlias = list[Tensor]
Check: TypeAlias = Callable[[int], Values]


# --------------------------------------------------------------------------------- the model and its data


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def _batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Other data on each rank and in each step, the same on all backends."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(12, 16, generator=generator), torch.randint(8, (12,), generator=generator)


def train(
    rank: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = STEPS,
) -> Values:
    """The loss of each step and the parameters after it."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    values = []
    for step in range(steps):
        inputs, targets = _batch(rank, step)
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values += [loss.detach(), *whole_of(model.parameters())]
    return values


def whole_of(tensors: Iterable[Tensor]) -> Values:
    """Clones; those of distributed tensors are whole on every rank."""
    from torch.distributed.tensor import DTensor

    return [
        (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for tensor in tensors
    ]


# ---------------------------------------------------------------------------------------------------- DDP


def _ddp(rank: int, **options: Any) -> Values:
    # 0.002 MB: a bucket or two per layer
    return train(rank, DistributedDataParallel(small_model(), bucket_cap_mb=0.002, **options))


class _Branching(nn.Module):
    """A network of which each rank uses another part in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 32)
        self.branches = nn.ModuleList(_seeded(branch, 32, 8) for branch in range(3))
        self.steps = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.steps += 1
        branch = (dist.get_rank() + self.steps) % 2  # the last branch is used by nobody
        result: Tensor = self.branches[branch](torch.relu(self.trunk(inputs)))
        return result


def _seeded(seed: int, inputs: int, outputs: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs)


def _unused_parameters(rank: int) -> Values:
    torch.manual_seed(5)
    return train(rank, DistributedDataParallel(_Branching(), find_unused_parameters=True))


def _accumulation(rank: int) -> Values:
    model = DistributedDataParallel(small_model(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = []
    for step in range(2 * STEPS):
        inputs, targets = _batch(rank, step)
        with nullcontext() if step % 2 else model.no_sync():
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
            values += [loss.detach(), *whole_of(model.parameters())]
    return values


def _batch_norm(rank: int) -> Values:
    torch.manual_seed(2)
    network = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
    model = DistributedDataParallel(network)  # broadcasts the buffers of rank 0
    values = train(rank, model)
    with torch.no_grad():
        model(_batch(0, 0)[0])  # the forward pass takes over those buffers before it uses them
    return values + whole_of(network.buffers())


def _uneven_inputs(rank: int) -> Values:
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(small_model(), bucket_cap_mb=0.002)
    with Join([model]):
        losses = train(rank, model, steps=1 + rank % 3)
    return [*losses[:1], *whole_of(model.parameters())]


def _hooked(rank: int, hook: str) -> Values:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    # One bucket for PowerSGD: its later rounds start in callbacks, and with two of them ranks may call those
    # of one bucket and of the other in another order (it hangs on gloo, too).
    model = DistributedDataParallel(small_model(), bucket_cap_mb=25 if hook == "power" else 0.002)
    if hook == "power":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "python":
        model.register_comm_hook(None, _averaging_hook)
    elif hook == "bf16":
        # By itself torch refuses it off CUDA, by its name; as a part of another hook it runs.
        model.register_comm_hook(None, _bf16_hook)
    else:
        model.register_comm_hook(None, getattr(default_hooks, hook))
    return train(rank, model)


def _averaging_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0] / RANKS)


def _bf16_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    assert dist.group.WORLD is not None
    return default_hooks.bf16_compress_hook(dist.group.WORLD, bucket)


# ------------------------------------------------------------------------- sharded, and across two axes


def _fsdp2(rank: int, *shape: int) -> Values:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = small_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(rank, model)


def _tensor_parallel(rank: int) -> Values:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(),
        "4": ColwiseParallel(output_layouts=_replicated()),
    }
    model = parallelize_module(small_model(), init_device_mesh("cpu", (RANKS,)), plan)
    return train(0, model)  # all ranks share one batch


def _replicated() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def _tensor_and_data_parallel(rank: int) -> Values:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(
        small_model(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    fully_shard(model, mesh=mesh["data"])
    return train(mesh.get_local_rank("data"), model)


def _zero(rank: int) -> Values:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(small_model(), bucket_cap_mb=0.002)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    return train(rank, model, optimizer)


# ------------------------------------------------------------------------------- groups and collectives


def calls_by_schedule(group: dist.ProcessGroup) -> int:
    """How many calls of a group schedules served; 0 for gloo."""
    counters = getattr(group, "counters", dict)()
    return sum(calls["schedule"] for calls in counters.values())


def _mesh(rank: int) -> Values:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    values = []
    for axis in ("row", "column"):
        tensor = torch.arange(1000) * (rank + 1)
        dist.all_reduce(tensor, group=mesh.get_group(axis))
        values.append(tensor)
    dist.broadcast(values[0], group=mesh.get_group("row"), group_src=1)
    return values


def _groups_at_once(rank: int) -> Values:
    """Work in flight in three overlapping groups, waited for in the opposite order."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1, 2], [1, 2, 3], [3, 0])]
    flying = []
    for turn in range(4):
        for number, group in enumerate(groups):
            if dist.get_rank(group) >= 0:
                tensor = torch.arange(500) * (rank + 1) + 10_000 * number + turn
                flying.append((tensor, dist.all_reduce(tensor, group=group, async_op=True)))
    whole = torch.full((300,), rank + 1)
    dist.all_reduce(whole)
    for _, work in reversed(flying):
        assert work is not None
        work.wait()
    if dist.get_backend() != "gloo":
        assert all(calls_by_schedule(group) > 0 for group in groups if dist.get_rank(group) >= 0)
    return [whole, *(tensor for tensor, _ in flying)]


def _functional(inputs: Tensor) -> tuple[Tensor, ...]:
    from torch.distributed import _functional_collectives as functional

    group = dist.group.WORLD
    assert group is not None
    summed = functional.all_reduce(inputs * 2, "sum", group)
    averaged = functional.all_reduce(inputs * 2, "avg", group)
    gathered = functional.all_gather_tensor(inputs + 1, 0, group)
    scattered = functional.reduce_scatter_tensor(inputs * 3, "sum", 0, group)
    sent = functional.broadcast(inputs, 2, group)
    return summed + 1, averaged, gathered * 2, scattered + 1, sent * 1


def _functional_collectives(rank: int) -> Values:
    return list(_functional(_whole_numbers(rank)))


def _compiled(rank: int, backend: str) -> Values:
    torch._dynamo.reset()
    function = torch.compile(_functional, backend=backend, fullgraph=True)
    return [value for _ in range(2) for value in function(_whole_numbers(rank))]


def _whole_numbers(rank: int) -> Tensor:
    return (torch.arange(RANKS * 50) * (rank + 1)).to(torch.float32).view(RANKS * 5, 10)


def _objects(rank: int) -> Values:
    items: list[Any] = [None] * 2
    if rank == 1:
        items = [{"layers": [1, 2, 3]}, "x" * 5000]
    dist.broadcast_object_list(items, src=1)
    assert items == [{"layers": [1, 2, 3]}, "x" * 5000]
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, {"rank": rank, "text": "y" * (100 * rank)})
    assert gathered == [{"rank": other, "text": "y" * (100 * other)} for other in range(RANKS)]
    return [torch.tensor([len(item["text"]) for item in gathered])]


def _barrier(rank: int) -> Values:
    """Nobody passes the second barrier before all have written."""
    folder = Path(f"{os.environ['TEST_STORE']}-{dist.get_backend()}-barrier")
    folder.mkdir(exist_ok=True)
    dist.barrier()
    (folder / str(rank)).touch()
    work = dist.barrier(async_op=True)
    assert work is not None
    work.wait()
    return [torch.tensor([len(list(folder.iterdir()))])]


def _plain_collectives(rank: int) -> Values:
    """What is not overridden falls through to gloo; what is mixes with it in order."""
    tensor = torch.arange(400) + rank
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    gathered = [torch.empty_like(tensor) for _ in range(RANKS)]
    dist.all_gather(gathered, tensor + rank)
    part = torch.empty(100, dtype=torch.int64)
    dist.reduce_scatter_tensor(part, tensor + rank)
    dist.reduce(tensor, dst=3)
    exchanged = torch.empty_like(part)
    dist.all_to_all_single(exchanged, part)
    blocks = [torch.full((30,), 7 * other) for other in range(RANKS)] if rank == 2 else None
    received = torch.empty(30, dtype=torch.int64)
    dist.scatter(received, blocks, src=2)
    if rank == 3:
        dist.send(received, dst=0)
    elif rank == 0:
        dist.recv(received, src=3)
    total = tensor if rank == 3 else torch.zeros(1)  # the others keep what reduce leaves there
    return [total, *gathered, part, exchanged, received]


# --------------------------------------------------------------------------------------------- the checks


FAMILIES: dict[str, dict[str, Check]] = {
    "ddp": {
        "several buckets": _ddp,
        "bucket view": partial(_ddp, gradient_as_bucket_view=True),
        "static graph": partial(_ddp, static_graph=True),
        "unused parameters": _unused_parameters,
        "accumulation": _accumulation,
        "batch norm": _batch_norm,
        "uneven inputs": _uneven_inputs,
        "fp16 hook": partial(_hooked, hook="fp16_compress_hook"),
        "bf16 hook": partial(_hooked, hook="bf16"),
        "allreduce hook": partial(_hooked, hook="allreduce_hook"),
        "power hook": partial(_hooked, hook="power"),
        "python hook": partial(_hooked, hook="python"),
    },
    "sharded": {
        "fsdp2": lambda rank: _fsdp2(rank, RANKS),
        "hsdp": lambda rank: _fsdp2(rank, 2, 2),
        "tensor parallel": _tensor_parallel,
        "tensor and data parallel": _tensor_and_data_parallel,
        "zero": _zero,
    },
    "groups": {
        "mesh": _mesh,
        "groups at once": _groups_at_once,
        "functional": _functional_collectives,
        "compiled eager": partial(_compiled, backend="eager"),
        "compiled aot_eager": partial(_compiled, backend="aot_eager"),
        "objects": _objects,
        "plain collectives": _plain_collectives,
        "barrier": _barrier,
    },
}
