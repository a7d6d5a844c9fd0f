"""Six real processes: programs by messages, the process group, DDP, pipelines. `test_processes.py` runs it.

Every rank writes what it got, sent and lost to a file in the folder. Nothing is judged here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections import Counter
from contextlib import ExitStack
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from arborcast import backends, pipeline, synth

COUNT, RANKS, REPLICAS, GROUPS = 1200, 6, [0, 1, 2, 3], Path(__file__).parent / "samples" / "groups-1"
PLAN = pipeline.Plan([(0, 3, REPLICAS), (3, 6, [4]), (6, 8, [5])], microbatches=2)
BATCH = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(1)).unbind()
OF_GROUP: dict[str, Any] = {
    "allreduce": dist.all_reduce,
    "broadcast": partial(dist.broadcast, src=0),
    "allgather": dist.all_gather_into_tensor,
    "reduce_scatter": dist.reduce_scatter_tensor,
}


def after(call: Any, kind: str) -> list[int]:
    """What a collective leaves on this rank, of data that depends on rank and index."""
    given = torch.arange(COUNT) * (dist.get_rank() + 1) + dist.get_rank() ** 2
    count = {"allgather": COUNT * RANKS, "reduce_scatter": COUNT // RANKS}.get(kind)
    out = given if count is None else given.new_zeros(count)
    call(*([out] if count is None else [out, given]))
    return out.tolist()  # type: ignore[no-any-return]


def noted(sent: Counter[str], name: str, call: Any, *tensors: Any) -> None:
    """Call, and add under that name what goes to each peer by torch's messages, in bytes."""
    send = dist.ProcessGroup.send

    def noting(group: Any, parts: Any, peer: int, tag: int) -> Any:
        sent[f"{name} to {peer}"] += parts[0].nbytes
        return send(group, parts, peer, tag)

    with mock.patch.object(dist.ProcessGroup, "send", noting):
        call(*tensors)


def by_messages(kind: str, folder: Path, sent: Counter[str]) -> Any:
    """Let a collective of the replicas' gloo group go by `Executor`."""
    otherwise, name = getattr(dist.ProcessGroup, kind), f"replicas {kind}"
    executor = cache(lambda group: backends.Executor(synth.read_schedule(folder / name), group))

    def run(group: Any, tensors: Any, *options: Any) -> Any:
        if group.size() != len(REPLICAS):
            return otherwise(group, tensors, *options)
        noted(sent, "by messages", getattr(executor(group), kind), tensors[0])
        sent[f"by messages {kind}"] += tensors[0].nbytes
        return SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)

    return mock.patch.object(dist.ProcessGroup, kind, run)


def by_engine(traces: ExitStack, path: Path) -> Any:
    """Trace the group that a trainer makes for its replicas."""

    def making(*arguments: Any, make: Any = dist.new_group, **options: Any) -> Any:
        group = make(*arguments, **options)
        if isinstance(group, backends.SynthGroup):
            traces.enter_context(group.trace(path))
        return group

    return mock.patch.object(dist, "new_group", making)


def network() -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(it for ends in pairwise((16, 64, 64, 32, 16)) for it in (nn.Linear(*ends), nn.Tanh()))
    )


def in_one(model: nn.Module, rows: slice) -> dict[str, Any]:
    """Three steps with these rows of the batch."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(BATCH[0][rows]), BATCH[1][rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": torch.cat([it.flatten() for it in model.parameters()]).tolist()}


def in_stages(collectives: str) -> dict[str, Any]:
    """Three steps by the plan."""
    asked = pipeline.Divisible(*network()), PLAN, nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1)
    with pipeline.Trainer(*asked, collectives=collectives) as trainer:
        losses = [trainer.step(*BATCH) for _ in range(3)]
        weights = torch.cat([it.flatten() for it in trainer.state_dict().values()])
    return {"losses": losses, "weights": weights.tolist()}


def main(rank: int, folder: Path) -> None:
    """All of it on one rank."""
    dist.init_process_group("synth", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    gloo, sent, found = dist.new_group(backend="gloo"), Counter[str](), {"messages": {}}
    found["group"] = {kind: after(call, kind) for kind, call in OF_GROUP.items()}
    for name in (*OF_GROUP, "ring allreduce"):
        executor, kind = backends.Executor(synth.read_schedule(folder / name), gloo), name.split()[-1]
        found["messages"][name] = after(partial(noted, sent, name, getattr(executor, kind)), kind)
    found["serial"] = in_one(network(), slice(None))
    found["ddp"] = in_one(nn.parallel.DistributedDataParallel(network()), slice(rank, None, RANKS))
    with ExitStack() as traces, by_engine(traces, folder / f"engine {rank}"):
        found["by engine"] = in_stages("synth")
    with by_messages("allreduce", folder, sent), by_messages("broadcast", folder, sent):
        found["by messages"] = in_stages("gloo")
    joint = dist.new_group(REPLICAS, backend="synth", pg_options=backends.Options(groups=GROUPS))
    if rank in REPLICAS:
        dist.all_reduce(total := torch.tensor([rank + 1]), group=joint)
        found["joint"] = total.item()
    (folder / f"rank {rank}").write_text(json.dumps(found | {"sent": sent}), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ |= {"ARBORCAST_TOPOLOGY": "dgx1", "ARBORCAST_RANKS": "0-5", "ARBORCAST_METHOD": "trees"}
    os.environ["ARBORCAST_START"] = "wait"
    torch.set_num_threads(1)
    in_one(network(), slice(None))  # imports once what every rank will need
    fork, folder = multiprocessing.get_context("fork"), Path(sys.argv[1])
    jobs = [fork.Process(target=main, args=(rank, folder)) for rank in range(RANKS)]
    for doing in ("start", "join"):
        for job in jobs:
            getattr(job, doing)()
    sys.exit(any(job.exitcode for job in jobs))
