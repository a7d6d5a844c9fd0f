"""What ranks on fabrics of cables do in tests: functions at module level, so that a process can find them."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from arborcast.backends import Options
from arborcast.bench.emulation.network import Emulation
from arborcast.bench.emulation.plan import plan_emulation
from arborcast.bench.switchless import pair
from arborcast.synth.formats.topology_text import topology_to_yaml
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load

STORE = "10.0.0.1", 29500
"""Where ranks meet in namespaces: at rank 0, in the management network."""

UNEQUAL = 10, 10, 25, 50
"""Rates of the cables of two hosts, in proportion."""

FABRICS: dict[str, Callable[[], Topology]] = {
    "ring of 3": lambda: load("ring:3"),
    "ring of 4": lambda: load("ring:4"),
    "line of 4": lambda: _line(4),
    "mesh of 4": lambda: load("full:4"),
    "pair by 4 cables": lambda: pair(UNEQUAL),
}


def _line(ranks: int) -> Topology:
    pairs = [(rank, rank + 1) for rank in range(ranks - 1)]
    both = [Link(a, b, Fraction(25)) for pair in pairs for a, b in (pair, pair[::-1])]
    return Topology.build(f"line:{ranks}", ranks, both)


def on_loopback(name: str) -> str:
    """A topology file of a fabric whose cables all have their ends on this host."""
    return topology_to_yaml(plan_emulation(FABRICS[name](), 100).cabled).replace('"10.1.', '"127.1.')


def in_own_namespace(
    rank: int, address: str, store: str, topology: Topology, work: Callable[..., Any]
) -> Any:
    """Work on a group whose store is in the management network; for `run_inside` of the emulation."""
    os.environ["ARBORCAST_START"] = "at once"  # simple schedules relay, too
    import arborcast.torch_backend  # noqa: F401

    meeting = dist.TCPStore(*STORE, topology.ranks, rank == 0, timedelta(seconds=60))
    dist.init_process_group(
        "synth",
        store=meeting,
        rank=rank,
        world_size=topology.ranks,
        timeout=timedelta(seconds=60),
        pg_options=Options(topology=topology, prepare=()),
    )
    found = work(rank, topology.ranks)
    meeting.add("done", 1)  # the store must not go with rank 0 before the others
    while meeting.add("done", 0) < topology.ranks:
        time.sleep(0.01)
    return found


def numbers(rank: int, count: int) -> Tensor:
    return (torch.arange(count) * (rank + 3) % 17).float()


def all_collectives(rank: int, size: int, count: int = 1000) -> dict[int, tuple[str, str]]:
    """Every collective, each element compared; the ends of each connection of this rank."""
    every = [numbers(one, size * count) for one in range(size)]
    mine, total = every[rank], sum(every[1:], every[0])
    blocks = [list(one.chunk(size)) for one in every]

    summed = mine.clone()
    dist.all_reduce(summed)
    assert torch.equal(summed, total)
    for root in (size - 1,):
        sent = mine.clone()
        dist.broadcast(sent, root)
        assert torch.equal(sent, every[root])
        reduced = mine.clone()
        dist.reduce(reduced, root)
        assert rank != root or torch.equal(reduced, total)
        gathered = [torch.empty(count) for _ in range(size)]
        dist.gather(blocks[rank][0], gathered if rank == root else None, root)
        assert rank != root or all(torch.equal(it, blocks[one][0]) for one, it in enumerate(gathered))
        part = torch.empty(count)
        dist.scatter(part, blocks[root] if rank == root else None, root)
        assert torch.equal(part, blocks[root][rank])
    whole = torch.empty(size * size * count)
    dist.all_gather_into_tensor(whole, mine)
    assert torch.equal(whole, torch.cat(every))
    own = torch.empty(count)
    dist.reduce_scatter_tensor(own, mine)
    assert torch.equal(own, total.chunk(size)[rank])
    swapped = torch.empty(size * count)
    dist.all_to_all_single(swapped, mine)
    assert torch.equal(swapped, torch.cat([blocks[one][rank] for one in range(size)]))
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank} if rank else "zero")
    assert objects == ["zero", *({"rank": one} for one in range(1, size))]
    what_schedules_never_serve(rank, size)
    dist.barrier()
    return ends()


def what_schedules_never_serve(rank: int, size: int) -> None:
    """Sends along cables, and what goes by allgathers."""
    beside = {peer for peer in ends() if peer < size}
    if rank + 1 in beside:
        dist.send(numbers(rank, 5), rank + 1)
    if rank - 1 in beside:
        taken = torch.empty(5)
        dist.recv(taken, rank - 1)
        assert torch.equal(taken, numbers(rank - 1, 5))
    both = torch.complex(numbers(rank, 5), numbers(rank + 1, 5))
    dist.all_reduce(both)
    real, imaginary = (sum(numbers(one + more, 5) for one in range(size)) for more in (0, 1))
    assert torch.equal(both, torch.complex(real, imaginary))  # type: ignore[arg-type]
    sparse = torch.sparse_coo_tensor([[rank]], [rank + 1.0], (size,))
    dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), torch.arange(1.0, size + 1))
    uneven = [torch.empty(one + 1) for one in range(size)]
    dist.all_gather(uneven, numbers(rank, rank + 1))
    assert all(torch.equal(it, numbers(one, one + 1)) for one, it in enumerate(uneven))


def ends() -> dict[int, tuple[str, str]]:
    """By rank that this one is connected with, or lane to it, the addresses of both ends."""
    group: Any = dist.group.WORLD
    channels = group._communicator.member.network.channels
    found = {}
    for peer, channel in sorted(channels.items()):
        sock = channel._socket
        found[peer] = sock.getsockname()[0], sock.getpeername()[0]
    return found


def expected_ends(topology: Topology) -> list[dict[int, tuple[str, str]]]:
    """The same for all ranks, by the topology; of several cables of two ranks the fastest come first."""
    found: list[dict[int, tuple[str, str]]] = [{} for _ in range(topology.ranks)]
    for link in topology.links:
        cables = sorted(link.cables, key=lambda it: (-it.bandwidth, sorted(it.addresses or ())))
        for lane, cable in enumerate(cables):
            if cable.addresses:
                found[link.src][link.dst + lane * topology.ranks] = cable.addresses
    return found


def sent_bytes() -> dict[str, int]:
    """By device in this network namespace, what has been sent through it."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]
    fields = [line.replace(":", " ").split() for line in lines]
    return {name: int(numbers[8]) for name, *numbers in fields}


def over_several_cables(rank: int, size: int) -> tuple[dict[int, tuple[str, str]], dict[str, float]]:
    """All collectives, also of numbers that are split; the ends, and what part each cable has carried."""
    found = all_collectives(rank, size)
    all_collectives(rank, size, count=3001)
    before, values = sent_bytes(), numbers(rank, 1 << 18)
    for _ in range(3):
        dist.all_reduce(values)
    sent = {name: after - before[name] for name, after in sent_bytes().items() if name.startswith("w")}
    return found, {name: each / sum(sent.values()) for name, each in sorted(sent.items())}


def refusals(rank: int, size: int) -> list[str]:
    """What a ring of four refuses, each in one line; the group goes on after it."""
    said = []
    group: Any = dist.group.WORLD
    apart = [rank % 2, rank % 2 + 2]
    for call in (
        lambda: dist.send(torch.zeros(1), (rank + 2) % size),
        lambda: dist.new_group(apart, use_local_synchronization=True),
        lambda: group.avoid(0, 1) or group.avoid(1, 2),
    ):
        try:
            call()
            said.append("")
        except Exception as error:
            said.append(str(error))
    all_collectives(rank, size, count=10)  # along the line that is left
    neighbours = dist.new_group([1, 2, 3], timeout=timedelta(seconds=60))
    if rank:
        one = torch.ones(5)
        dist.all_reduce(one, group=neighbours)
        assert torch.equal(one, torch.full((5,), 3.0))
    return said


def by_gloo(rank: int, address: str, store: str, size: int) -> str:
    """What unmodified gloo says of an allreduce, by the first cable of each rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = min(name for _, name in socket.if_nameindex() if name.startswith("w"))
    shared = dist.FileStore(store, size)
    try:
        dist.init_process_group(
            "gloo", store=shared, rank=rank, world_size=size, timeout=timedelta(seconds=5)
        )
        dist.all_reduce(torch.ones(1000))
    except Exception as error:
        return str(error)
    return ""


def cut(emulation: Emulation, first: int, second: int) -> None:
    """Break a cable so that no interface notices: packets of its second end are dropped."""
    number = emulation.plan.wire_of[first, second]
    emulation.namespaces[second].batch("tc", [f"qdisc replace dev w{number} root pfifo limit 0"])


TRAINED = {
    "ddp": ("several buckets", "unused parameters", "batch norm"),
    "sharded": ("fsdp2",),
    "groups": ("objects", "functional"),
}
"""Checks of `framework_checks` whose groups are joined by cables; of a ring of four, 0 and 2 are not."""


def trained(rank: int, size: int) -> dict[str, list[Any]]:
    """What they give."""
    from tests.support.framework_checks import FAMILIES

    found = {}
    for family, names in TRAINED.items():
        for name in names:
            values = FAMILIES[family][name](rank)
            found[f"{family}, {name}"] = [value.detach().clone().numpy() for value in values]
    rows = in_rows_along_cables(rank)
    found["sharded, hsdp in rows along cables"] = [value.detach().clone().numpy() for value in rows]
    return found


def pipelined(rank: int, size: int) -> list[list[float]]:
    """Losses of pipelines along a ring of four, without and with replicas, and serial ones before them."""
    from arborcast.pipeline.stages import Plan
    from arborcast.pipeline.trainer import Trainer
    from tests.support.training_cases import batches, cross_entropy, momentum, network, plan_of, serial

    given = batches(5, sizes=(12, 12, 24))
    found = [serial(network, given).losses]
    for plan in (plan_of((1,) * size), Plan([(0, 4, [0, 1]), (4, 8, [3, 2])], 3, "1f1b")):
        trainer = Trainer(network(), plan, cross_entropy, momentum, collectives="synth")
        found.append([trainer.step(*batch) for batch in given])
        trainer.close()
    return found


def in_rows_along_cables(rank: int) -> list[Tensor]:
    """A model in two shards and two replicas, whose groups are joined by cables of a ring of four."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from tests.support.framework_checks import small_model, train

    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [3, 2]]), mesh_dim_names=("replicate", "shard"))
    model = small_model()
    fully_shard(model, mesh=mesh)
    return train(rank, model)


def goes_on_training(rank: int, size: int) -> dict[str, Any]:
    """DDP on a ring whose last cable is pulled: parameters at the end, beside those of an undisturbed run.

    Also what was said.
    """
    from tests.support.framework_checks import small_model

    group: Any = dist.group.WORLD
    steps, lines = 12, []
    logging.getLogger("arborcast").addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]

    def run(pulled_at: int | None) -> list[Tensor]:
        model, kept, step = small_model(), [], 0
        replica = DistributedDataParallel(model)
        while step < steps:
            if len(kept) == step:
                kept.append({name: value.clone() for name, value in model.state_dict().items()})
            if step == pulled_at and rank == size - 1:
                device = max(name for _, name in socket.if_nameindex() if name.startswith("w"))
                subprocess.run(["ip", "link", "set", device, "down"], check=True)
            try:
                inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(100 * step + rank))
                replica(inputs).square().mean().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(parameter.grad)
                replica.zero_grad()
                step += 1
            except RuntimeError as error:
                pulled_at = None
                lines.append(str(error))
                group.go_on()
                last = torch.tensor(step)
                dist.all_reduce(last, dist.ReduceOp.MIN)
                step = int(last)
                del kept[step + 1 :]
                model.load_state_dict(kept[step])
                model.zero_grad()  # of the backward that failed
                replica = DistributedDataParallel(model)
        return [value.detach().clone() for value in model.parameters()]

    disturbed, whole = run(5), run(None)
    return {
        "disturbed": [it.numpy() for it in disturbed],
        "whole": [it.numpy() for it in whole],
        "lines": lines,
    }


def said_without_cables() -> list[str]:
    """Lines of a group that goes on without a cable, as they come."""
    lines: list[str] = []
    logging.getLogger("arborcast").addHandler(handler := logging.Handler(logging.WARNING))
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: "no answer" in record.getMessage())
    return lines


def loses_a_cable(rank: int, size: int) -> tuple[str, list[str], dict[int, tuple[str, str]]]:
    """Calls until one fails, as the last cable is cut; what is said then, and all collectives after that."""
    group: Any = dist.group.WORLD
    said, lines = "", said_without_cables()
    try:
        for turn in range(100_000):
            if rank == size - 1 and turn == 5:
                device = max(name for _, name in socket.if_nameindex() if name.startswith("w"))
                subprocess.run(
                    ["tc", "qdisc", "replace", "dev", device, "root", "pfifo", "limit", "0"], check=True
                )
            dist.all_reduce(torch.ones(100_000))
    except RuntimeError as error:
        said = str(error)
    group.go_on()
    return said, lines, all_collectives(rank, size)
