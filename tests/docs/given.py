"""Files that readers of docs/ have from elsewhere: `python -m tests.docs.given NAME...` writes them."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.docs.snippets import ROOT
from tests.support.nccl_files import busid, gpu, nic, system
from tests.topologies.test_nvidia_smi import DGX1


def host(gpus: int, *, hosts: tuple[str, ...] = ()) -> str:
    """NCCL's XML of a host (or so many) of which each GPU has links to the next and a NIC."""
    pairs = [
        gpu(dev, [(busid((dev + 1) % gpus), 3, "0x030200"), (busid((dev - 1) % gpus), 3, "0x030200")])
        for dev in range(gpus)
    ]
    nics = [nic(f"mlx5_{index}", 100000, address=f"0000:e{index}:00.0") for index in range(gpus)]
    each = [*pairs, *nics]
    return system(each, each, hosts=list(hosts)) if hosts else system(each)


def square() -> str:
    page = (ROOT / "docs/tutorials/your-machine.md").read_text(encoding="utf-8")
    return page.partition("<<'END'\n")[2].partition("END\n")[0]


FILES = {
    "machine.xml": lambda: host(4),
    "old.xml": lambda: host(2),
    "new.xml": lambda: host(4),
    "rack.xml": lambda: host(2, hosts=("0x1", "0x2")),
    "square.yaml": square,
    "nvidia-smi": lambda: f"#!/bin/sh\ntest \"$1\" = topo || exit 0\ncat <<'END'\n{DGX1}\nEND\n",
}

if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(FILES[path.name](), encoding="utf-8")
        path.chmod(0o755)
