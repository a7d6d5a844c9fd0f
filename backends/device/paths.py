"""Which memory the ranks of a plan make: by what their GPUs access of each other, decided alike on all ranks.

Torch's symmetric memory maps all pairs, so that it takes a path between all; where only neighbours in the
schedule have one, as on DGX-1 or across PCIe islands, they alone share memory by IPC. A rank judges what it
sees: GPUs on its host that CUDA_VISIBLE_DEVICES does not hide from it. Hosts whose GPUs are one NVLink domain
share symmetric memory alone, of which torch judges.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, permutations
from typing import Literal

import torch

from arborcast.backends.device.memory import GroupMemory, IpcMemory, PeerMemory, PeerRanks, SymmetricMemory
from arborcast.backends.device.plan import DevicePlan
from arborcast.synth.errors import InputError

log = logging.getLogger(__name__)

_OVERLAPS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@dataclass(frozen=True, slots=True)
class RankGpu:
    """What a rank says of its GPU.

    Attributes:
        host: its name.
        uuid: the same of ranks that share it.
        index: among the GPUs that the rank sees; torch's symmetric memory tells GPUs of a host apart by it.
        accesses: of each that the rank sees, by its uuid, whether kernels here access its memory.
        overlaps: whether torch is told to let ranks of one index make symmetric memory.
    """

    host: str
    uuid: str
    index: int
    accesses: dict[str, bool]
    overlaps: bool

    @classmethod
    def here(cls) -> RankGpu:
        """The current one of this process."""
        own, seen = torch.cuda.current_device(), range(torch.cuda.device_count())
        uuids = [str(torch.cuda.get_device_properties(it).uuid) for it in seen]
        accesses = {uuids[it]: it == own or torch.cuda.can_device_access_peer(own, it) for it in seen}
        return cls(socket.gethostname(), uuids[own], own, accesses, os.environ.get(_OVERLAPS) == "1")


def choose(
    gpus: Sequence[RankGpu], neighbours: Sequence[Sequence[int]]
) -> tuple[Literal["symmetric memory", "IPC of neighbours"], str]:
    """Which memory ranks make, and why; ranks that share a GPU have a path.

    Args:
        gpus: of all ranks.
        neighbours: of each rank, the ranks whose memory it accesses.

    Raises:
        InputError: a rank has no path to a neighbour, or does not see its GPU.
    """
    if len({it.host for it in gpus}) > 1:
        return "symmetric memory", "ranks are on several hosts"
    for rank, peers in enumerate(neighbours):
        for peer in peers:
            both = f"rank {rank} and its neighbour in the schedule, rank {peer}"
            if gpus[peer].uuid not in gpus[rank].accesses:
                raise InputError(
                    f"device: {both}, must both see both GPUs, in CUDA_VISIBLE_DEVICES; "
                    f"rank {rank} does not see that of rank {peer}"
                )
            if not gpus[rank].accesses[gpus[peer].uuid]:
                raise InputError(
                    f"device: {both}, must have a path between their GPUs, torch.cuda.can_device_access_peer "
                    "finds none"
                )
    for rank, peer in permutations(range(len(gpus)), 2):
        if not gpus[rank].accesses.get(gpus[peer].uuid, False):
            return "IPC of neighbours", f"the GPU of rank {rank} does not reach that of rank {peer}"
    for rank, peer in combinations(range(len(gpus)), 2):
        if gpus[rank].index == gpus[peer].index and not all(it.overlaps for it in gpus):
            both = f"ranks {rank} and {peer} have cuda:{gpus[rank].index}"
            return "IPC of neighbours", f"{both}, and {_OVERLAPS} is not 1 on all"
    return "symmetric memory", "all GPUs reach each other"


def make_memory(plan: DevicePlan, itemsize: int, ranks: PeerRanks, device: str) -> PeerMemory:
    """The memory of this rank for a plan; all ranks make it together.

    Args:
        plan: the same on all ranks.
        itemsize: bytes of an element.
        ranks: in the order of the plan's.
        device: "cuda" for the current GPUs, "cpu" for a trial in Triton's interpreter.

    Raises:
        InputError: see `choose`; or IPC with HIP.
        ExecutionError: see `IpcMemory`.
    """
    if device == "cpu":
        return GroupMemory(plan.shape, itemsize, ranks)
    gpus = [RankGpu(**said) for said in ranks.together("use its GPU", lambda: asdict(RankGpu.here()))]
    neighbours = [plan.neighbours(rank) for rank in range(plan.ranks)]
    which, why = choose(gpus, neighbours)
    if ranks.rank == 0:
        log.info("device: %s, as %s", which, why)
    if which == "symmetric memory":
        return SymmetricMemory(plan.shape, itemsize, ranks)
    if torch.version.hip is not None:
        raise InputError(
            f"device: {which}, as {why}, needs CUDA: what torch allocates with HIP is coherent only when a "
            "kernel has ended"
        )
    return IpcMemory(plan.shape, itemsize, ranks, neighbours[ranks.rank])
