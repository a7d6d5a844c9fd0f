"""What ranks do in the tests of the emulation: functions at module level, so that a process can find them."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from arborcast import topologies
from arborcast.bench.emulation import network
from arborcast.bench.emulation.plan import plan_emulation
from arborcast.bench.emulation.processes import run_inside


def namespace_of(pid: int | str = "self") -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def where(rank: int, address: str, store: str) -> tuple[int, str, str, str | None]:
    return rank, address, namespace_of(), os.environ.get("GLOO_SOCKET_IFNAME")


def summed(rank: int, address: str, store: str, size: int) -> float:
    """By unmodified gloo, which has to be forwarded where there is no link."""
    import torch
    import torch.distributed as dist

    shared = dist.FileStore(store, size)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor)
    return tensor[-1].item()


def fail(rank: int, address: str, store: str) -> None:
    if rank == 1:
        raise ValueError("no\nreason")
    time.sleep(600)


def die(rank: int, address: str, store: str) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def sleep(rank: int, address: str, store: str) -> None:
    time.sleep(600)


def announce(rank: int, address: str, store: str) -> None:
    """Say which process this is, and stay; ignore whatever can be ignored."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _say(f"rank {rank} {os.getpid()} {namespace_of()}")
    time.sleep(600)


def main() -> None:
    """An emulation with ranks that stay until somebody ends it."""
    with network.emulate(plan_emulation(topologies.load("star:3"), 10)) as emulation:
        for vertex in range(4):
            _say(f"vertex {vertex} {emulation.namespaces[vertex].run(own_namespace)}")
        run_inside(emulation, announce)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def own_namespace() -> str:
    return str(Path("/proc/thread-self/ns/net").readlink())


if __name__ == "__main__":
    from tests.support import emulated_ranks  # noqa: PLW0406  so that the ranks find what runs under this name

    try:
        emulated_ranks.main()
    except KeyboardInterrupt:
        sys.exit(130)
