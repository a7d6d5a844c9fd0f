"""Beside a user's own `backends/`, `synth.py`, ... `import torch` and training over "synth" work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import arborcast

NAMES = ("backends", "bench", "pipeline", "synth", "topologies")

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import backends, bench, pipeline, synth, topologies

assert all(module.OWNER == "user" for module in (backends, bench, pipeline, synth, topologies))
assert not [name for name in sys.modules if name.startswith("arborcast.backends")], "nothing loads before use"
rank = int(sys.argv[1])
dist.init_process_group("synth", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
weight = torch.full((3,), 0.5, requires_grad=True)
(torch.full((2, 3), 1.0 + rank) @ weight).sum().backward()
dist.all_reduce(weight.grad, dist.ReduceOp.AVG)
print(weight.grad.tolist())
dist.destroy_process_group()
"""


@pytest.mark.long
def test_training_beside_modules_of_the_same_names(tmp_path: Path) -> None:
    """Rank 0 has them as folders, rank 1 as files."""
    ranks = []
    for rank, form in enumerate(("{}/__init__.py", "{}.py")):
        home = tmp_path / str(rank)
        for name in NAMES:
            file = home / form.format(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("OWNER = 'user'\n")
        script = home / "train.py"
        script.write_text(SCRIPT)
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(tmp_path / "store")],
                cwd=home,
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(arborcast.__file__).parents[1]),
                    "ARBORCAST_TOPOLOGY": "full:2",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for process in ranks:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        # Two samples of 1 on rank 0 and of 2 on rank 1: sums of gradients 2 and 4, their mean is 3.
        assert out == "[3.0, 3.0, 3.0]\n"
