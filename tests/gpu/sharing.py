"""Ranks that share one GPU, as far as there are fewer GPUs than ranks.

NCCL refuses two ranks of one host on one GPU. Told that each is a host of its own, it sends over sockets.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def take_gpu(rank: int, size: int) -> torch.device:
    """The GPU of one of `size` ranks, which becomes this process's; to be called before NCCL is."""
    count = torch.cuda.device_count()
    os.environ["LOCAL_RANK"] = str(rank % count)
    torch.cuda.set_device(rank % count)
    if count < size:
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return torch.device("cuda", rank % count)


def join_nccl(rank: int, size: int) -> torch.device:
    """A default group of gloo and NCCL, where `run_ranks` has made none."""
    device = take_gpu(rank, size)
    store = f"file://{os.environ['TEST_STORE']}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=rank, world_size=size)
    return device
