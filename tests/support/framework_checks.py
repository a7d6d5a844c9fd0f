"""What PyTorch's own ways of parallel training give on four ranks, whatever the group: tensors to compare.

Every check trains the same small model on the same data, or calls collectives on known numbers, and returns
losses, parameters and results. `test_frameworks` runs them on one group after the other.
"""

# Annotations are evaluated here: DDP refuses a hook whose bucket is annotated by a string.

import itertools
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
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


# ---------------------------------------------------- what torch's own tests of its clients do on four ranks


def _functional_forms(rank: int) -> Values:
    """Waited for at once, by reading, and in the opposite order; of one tensor and of several."""
    from torch.distributed import _functional_collectives as functional

    group = _world()
    inputs = _whole_numbers(rank)
    lazy = functional.all_reduce(inputs, "max", group)
    assert isinstance(lazy, functional.AsyncCollectiveTensor)
    flying = [functional.all_gather_tensor(inputs + turn, turn % 2, group) for turn in range(4)]
    done = [functional.wait_tensor(tensor) for tensor in reversed(flying)]
    several = [inputs * 2, inputs[:3] + 1, inputs[0]]
    # Of gloo one at a time: with two in flight, its buffers sometimes wait for themselves for ever (once in
    # some 140 rounds of this check, in `~UnboundBuffer`; torch 2.13).
    begun = _waited if dist.get_backend() == "gloo" else list
    reduced = begun(functional.all_reduce_coalesced(several, "sum", group))
    gathered = begun(functional.all_gather_into_tensor_coalesced(several, group))
    scattered = begun(functional.reduce_scatter_tensor_coalesced([inputs, inputs + 1], "sum", [0, 0], group))
    swapped = functional.permute_tensor(inputs.flatten(), [1, 0, 3, 2], group)
    raw = torch.ops._c10d_functional.all_reduce(inputs, "sum", group.group_name)
    whole = torch.ops._c10d_functional.wait_tensor(raw)
    within = inputs.clone()
    torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce_(within, "min", group.group_name)
    )
    return [lazy + 0, *done, whole, within, *(it + 0 for it in [*reduced, *gathered, *scattered, swapped])]


def _waited(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    from torch.distributed import _functional_collectives as functional

    return [functional.wait_tensor(tensor) for tensor in tensors]


def _coalesced(rank: int) -> Values:
    """Several calls of a kind as one, and gradients of such sizes as FSDP's."""
    from torch.distributed.distributed_c10d import _coalescing_manager

    inputs = [_whole_numbers(rank), _whole_numbers(rank)[:4].flatten(), torch.arange(rank, rank + 4)]
    gathered = [torch.empty(RANKS * it.numel(), dtype=it.dtype) for it in inputs]
    scattered = [torch.empty(it.numel() // RANKS, dtype=it.dtype) for it in inputs]
    with _coalescing_manager():
        for output, given in zip(gathered, inputs, strict=True):
            dist.all_gather_into_tensor(output, given.flatten())
    with _coalescing_manager(async_ops=True) as manager:
        for output, given in zip(scattered, inputs, strict=True):
            dist.reduce_scatter_tensor(output, given.flatten())
    manager.wait()
    with _coalescing_manager():
        for tensor in inputs[:2]:
            dist.all_reduce(tensor)
    return [*gathered, *scattered, *inputs]


def _uneven_exchange(rank: int) -> Values:
    """Other numbers of rows for each pair of ranks, and none for some; forth, back, and gradients."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.nn.functional import all_to_all_single

    sent = [(rank + 2 * other) % 5 for other in range(RANKS)]
    received = [(other + 2 * rank) % 5 for other in range(RANKS)]
    inputs = torch.arange(sum(sent) * 3.0).view(-1, 3) + 100 * rank
    plain = torch.empty(sum(received), 3)
    work = dist.all_to_all_single(plain, inputs, received, sent, async_op=True)
    assert work is not None
    work.wait()
    lazy = functional.all_to_all_single(inputs, received, sent, _world())
    values = [plain, lazy + 1]
    for exchange in (
        lambda leaf: functional.all_to_all_single_autograd(leaf, received, sent, _world()),
        lambda leaf: all_to_all_single(torch.empty(sum(received), 3), leaf, received, sent),
    ):
        leaf = inputs.clone().requires_grad_()
        there = exchange(leaf)
        (there * there * (rank + 1)).sum().backward()
        assert leaf.grad is not None
        values += [there.detach() + 0, leaf.grad]
    return values


def _functional_gradients(rank: int) -> Values:
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.nn.functional import all_gather

    leaf = _whole_numbers(rank).requires_grad_()
    gathered = functional.all_gather_tensor_autograd(leaf, 0, _world())
    scattered = functional.reduce_scatter_tensor_autograd(gathered * gathered, "sum", 0, _world())
    (scattered * (rank + 1)).sum().backward()
    parts = all_gather(leaf)  # whose way back torch chooses by the name of the backend
    sum((part * part * (rank + other)).sum() for other, part in enumerate(parts)).backward()
    assert leaf.grad is not None
    return [gathered.detach() + 0, scattered.detach() + 0, leaf.grad]


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _meshes(rank: int) -> Values:
    """Parts of a mesh, two axes as one, one axis as two, ranks in another order, a group's own mesh."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("row", "one", "column"))
    crossed = DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("outer", "inner"))
    meshes = [
        cube["row"],
        cube["one"],
        cube["row", "column"]._flatten("both"),
        cube["one", "column"]._flatten("part"),
        crossed["outer"],
        crossed["inner"],
        DeviceMesh.from_group(crossed.get_group("inner"), "cpu"),
        DeviceMesh("cpu", [3, 1, 0, 2]),
    ]
    values = []
    for mesh in meshes:
        tensor = torch.arange(60) * (rank + 1)
        group = mesh.get_group()
        dist.all_reduce(tensor, group=group)
        gathered = functional.all_gather_tensor(tensor + rank, 0, (mesh, 0))
        values += [tensor, gathered + 0, torch.tensor([mesh.get_local_rank(), dist.get_rank(group)])]
    return values


def _redistributions(rank: int) -> Values:
    """From every placement to every one that torch allows (not to a partial sum), of uneven parts, too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    values = []
    flat, square = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2))
    line = [Replicate(), Shard(0), Shard(1)]
    cases = [(flat, (given,), (wanted,)) for given in [*line, Partial(), Partial("max")] for wanted in line]
    pairs = list(itertools.product(line, repeat=2))
    sources = [
        pairs[1],
        pairs[4],
        pairs[5],
        (Partial(), Shard(0)),
        (Shard(1), Partial()),
        (Partial(), Partial()),
    ]
    cases += [(square, given, wanted) for given in sources for wanted in pairs if given != wanted]
    whole = torch.arange(7.0 * 6).view(7, 6)
    for mesh, given, wanted in cases:
        steady = [Replicate() if it.is_partial() else it for it in given]
        local = DTensor.from_local(whole, mesh).redistribute(placements=steady).to_local()
        if any(it.is_partial() for it in given):
            local = local + rank
        source = DTensor.from_local(local, mesh, given, shape=whole.shape, stride=whole.stride())
        values.append(source.redistribute(placements=wanted).to_local())
    return values


def _sharded_tensor(rank: int) -> Values:
    """The older kind, which chooses its device by the name of the backend."""
    from torch.distributed._shard import sharded_tensor, sharding_spec

    torch.manual_seed(rank)
    spec = sharding_spec.ChunkShardingSpec(0, [f"rank:{other}/cpu" for other in range(RANKS)])
    parts = sharded_tensor.rand(spec, 10, 3)
    whole = torch.zeros(10, 3)
    parts.gather(0, out=whole if rank == 0 else None)
    return [whole, parts.local_tensor()]


def _sharded_gradient(rank: int) -> Values:
    """Backward through redistributions, and operators that choose their own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))
    left = distribute_tensor(torch.arange(40.0).view(5, 8), mesh, [Shard(1)]).requires_grad_()
    right = distribute_tensor(torch.arange(24.0).view(8, 3), mesh, [Shard(0)]).requires_grad_()
    product = left @ right  # a partial sum
    assert isinstance(product, DTensor)
    rows = product.redistribute(placements=[Shard(0)]).relu()
    assert isinstance(rows, DTensor)
    loss = rows.redistribute(placements=[Replicate()]).sum()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([left, right.grad])
    return whole_of([loss, left.grad, right.grad, norm, product.softmax(1)])


def _fsdp2_steps(
    rank: int, *shape: int, micro: int = 1, low: bool = False, keep: bool | int = True
) -> Values:
    """Steps of so many micro-batches, of which only the last brings gradients together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
    model = small_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=keep)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=keep)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = []
    for step in range(STEPS):
        for turn in range(micro):
            is_last = turn == micro - 1
            model.set_is_last_backward(is_last)
            if len(shape) == 2:
                model.set_requires_all_reduce(is_last)  # shards still meet each time
            else:
                model.set_requires_gradient_sync(is_last)
            inputs, targets = _batch(rank, micro * step + turn)
            loss = cross_entropy(model(inputs).float(), targets)
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert isinstance(norm, DTensor)
        values += [loss.detach(), norm.full_tensor()]
    return values + whole_of(model.parameters())


def _checkpoint(rank: int) -> Values:
    """A hybrid mesh's weights and moments into files by a thread, onto four shards, and whole from rank 0."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict as states
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    folder = f"{os.environ['TEST_STORE']}-{dist.get_backend()}-checkpoint"
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    models = [small_model(), small_model(seed=1)]
    fully_shard(models[0], mesh=hybrid)
    fully_shard(models[1])
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    train(rank, models[0], optimizers[0], steps=1)
    saved = dict(zip(("model", "moments"), states.get_state_dict(models[0], optimizers[0]), strict=True))
    checkpoint.async_save(saved, checkpoint_id=folder).result()  # type: ignore[attr-defined]
    read = dict(zip(("model", "moments"), states.get_state_dict(models[1], optimizers[1]), strict=True))
    checkpoint.load(read, checkpoint_id=folder)  # type: ignore[attr-defined]
    states.set_state_dict(
        models[1], optimizers[1], model_state_dict=read["model"], optim_state_dict=read["moments"]
    )
    values = train(rank, models[1], optimizers[1], steps=1)
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    whole = states.get_model_state_dict(models[1], options=options)
    assert bool(whole) == (rank == 0)
    states.set_model_state_dict(models[0], whole, options=options)
    return values + whole_of(models[0].parameters())


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
        "fsdp2": lambda rank: _fsdp2_steps(rank, RANKS),
        "hsdp": lambda rank: _fsdp2_steps(rank, 2, 2),
        "tensor parallel": _tensor_parallel,
        "tensor and data parallel": _tensor_and_data_parallel,
        "zero": _zero,
    },
    "clients": {
        "functional forms": _functional_forms,
        "functional gradients": _functional_gradients,
        "coalesced": _coalesced,
        "uneven exchange": _uneven_exchange,
        "meshes": _meshes,
        "redistributions": _redistributions,
        "sharded tensor": _sharded_tensor,
        "sharded gradient": _sharded_gradient,
        "accumulation": lambda rank: _fsdp2_steps(rank, RANKS, micro=2),
        "hybrid accumulation": lambda rank: _fsdp2_steps(rank, 2, 2, micro=2),
        "mixed precision, kept": lambda rank: _fsdp2_steps(rank, RANKS, low=True, keep=False),
        "kept on two ranks": lambda rank: _fsdp2_steps(rank, RANKS, keep=2),
        "checkpoint": _checkpoint,
    },
    "groups": {
        "functional": _functional_collectives,
        "compiled eager": partial(_compiled, backend="eager"),
        "compiled aot_eager": partial(_compiled, backend="aot_eager"),
        "objects": _objects,
    },
}
