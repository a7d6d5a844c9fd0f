"""What a group asks of its NCCL, where one that notes it stands in; meta tensors stand for a GPU's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from arborcast.backends.group import making, process_group
from arborcast.backends.tensors import torch_compat
from arborcast.backends.tensors.torch_compat import PeerCalls
from tests.support.ranks import StandingRanks, run_ranks

ranks = StandingRanks(2, backend="gloo")


class Notes:
    """Of what is called; nothing is sent."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def noted(tensors: Any = None, peer: int | None = None, tag: int = 0) -> Notes:
            self.lines.append(name if peer is None else f"{name} {tensors[0].numel()} {peer} {tag}")
            return self

        return noted


def asked_of_nccl(rank: int, size: int) -> list[str]:
    group: Any = dist.new_group(backend="synth")
    other: Any = dist.new_group(backend="synth")
    notes = Notes()
    for one in (group, other):
        one._nccl, one._peer_calls = notes, PeerCalls(notes)
    peer = 1 - rank
    sent, received = torch.empty(7, device="meta"), torch.empty(9, device="meta")
    batch = [
        dist.P2POp(dist.isend, sent, peer, group, tag=1),
        dist.P2POp(dist.irecv, received, peer, group, tag=2),
        dist.P2POp(dist.isend, received, peer, group),
    ]
    for _ in range(2):
        for work in dist.batch_isend_irecv(batch):
            work.wait()
    work = dist.isend(sent, peer, group)
    assert work is not None
    dist.recv(received, peer, group)
    work.wait()
    on_host = [
        dist.P2POp(dist.isend, torch.ones(3), peer, group),
        dist.P2POp(dist.irecv, torch.empty(3), peer, group),
    ]
    for each in dist.batch_isend_irecv(on_host):
        each.wait()
    dist.barrier(group)
    other.abort()
    dist.destroy_process_group(group)
    return notes.lines


def test_batches_are_one_call_and_ends_reach_nccl() -> None:
    for rank, lines in enumerate(ranks(asked_of_nccl)):
        peer = 1 - rank
        together = [f"send 7 {peer} 1", f"recv 9 {peer} 2", f"send 9 {peer} 0"]
        batch = ["_start_coalescing", *together, "_end_coalescing", "wait"]
        alone = [f"send 7 {peer} 0", f"recv 9 {peer} 0", "wait", "wait"]
        assert lines == [*batch, *batch, *alone, "abort", "shutdown"]


@ranks.check
def test_devices_that_are_named_go_by_schedules_and_others_by_gloo(rank: int, size: int) -> None:
    for name in ("synth", "cpu:synth", "cpu:gloo,cuda:synth"):
        group: Any = dist.new_group(backend=name)
        given = torch.full((1 << 15,), float(rank + 1))
        dist.all_reduce(given, group=group)
        assert given.unique() == 3
        counted, by_gloo = group.counters()["allreduce"], name.startswith("cpu:gloo")
        assert (counted["schedule"], counted.get("handed over", 0)) == ((0, 1) if by_gloo else (1, 0))
        dist.destroy_process_group(group)


def given_to_nccl(rank: int, size: int) -> tuple[Any, ...]:
    class Stand:  # in for what a build of torch with GPUs has
        class Options:
            is_high_priority_stream = True

    seen: list[Any] = []

    def new_nccl(store: Any, rank: int, size: int, timeout: Any, options: Any) -> Any:
        seen.append(options)
        return torch_compat.new_holder_of_names(rank, size)

    process_group.has_nccl = making.has_nccl = lambda: True  # type: ignore[attr-defined]
    process_group.new_nccl = new_nccl  # type: ignore[attr-defined]
    torch._C._distributed_c10d.ProcessGroupNCCL = Stand  # type: ignore[attr-defined]
    options = Stand.Options()
    own: Any = dist.new_group(backend="synth", pg_options=options)
    bound = torch.device("cuda", rank)
    on_device: Any = dist.new_group(backend="synth", device_id=bound)
    return seen[0] is options, seen[1] is None, own.bound_device_id, on_device.bound_device_id == bound


def test_options_of_nccl_and_the_device_of_a_group_arrive() -> None:
    assert run_ranks(2, given_to_nccl) == [(True, True, None, True)] * 2
