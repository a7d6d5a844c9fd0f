"""The examples of users' loops: accelerate, Lightning, transformers, torch's own sharding over schedules."""

from __future__ import annotations

import re
import sys

import pytest

pytest.importorskip("torch")

from tests.group.test_train_ddp import ROOT, TORCHRUN, run


@pytest.mark.long
@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_both_ways_give_equal_losses(name: str) -> None:
    pytest.importorskip(name)
    script = str(ROOT / "examples" / f"train_{name}.py")
    done = run(*TORCHRUN, "4", script, "--epochs", "2", ARBORCAST_TOPOLOGY="full:4")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^28 steps, largest difference of losses.* \(limit 1e-05\)$", done.stdout, re.MULTILINE)
    assert re.search(r"^allreduce of 64 KiB: .* on full:4$", done.stdout, re.MULTILINE)
    if name == "accelerate":
        shares = re.findall(r"right (\d+\.\d)%", done.stdout)
        assert len(shares) == 3  # of each epoch, and by the averaged weights
        assert float(shares[1]) > float(shares[0])


@pytest.mark.long
def test_a_divided_model_gives_serial_losses_by_the_planned_collectives() -> None:
    script = str(ROOT / "examples" / "train_sharded.py")
    done = run(*TORCHRUN, "4", script, "--topology", "dgx1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^layers \[", done.stdout, re.MULTILINE)) > 1
    for what in ("collectives of a step, of all ranks", "bytes between stages"):
        counts = re.search(rf"^{what}: (\d+), planned (\d+)$", done.stdout, re.MULTILINE)
        assert counts is not None
        assert counts[1] == counts[2]


@pytest.mark.long
def test_transformers_learn_over_schedules() -> None:
    pytest.importorskip("transformers")
    script = str(ROOT / "examples" / "train_transformers.py")
    done = run(*TORCHRUN, "4", script, ARBORCAST_TOPOLOGY="full:4")
    assert done.returncode == 0, done.stderr
    counts = re.search(r"^allreduces: {'schedule': (\d+), 'gloo': 0, ", done.stdout, re.MULTILINE)
    assert counts is not None
    assert int(counts[1]) >= 40  # one or more a step


@pytest.mark.long
def test_fsdp_times_tensor_parallel_gives_serial_losses_by_schedules() -> None:
    script = str(ROOT / "examples" / "train_fsdp.py")
    done = run(*TORCHRUN, "4", script, "--steps", "10", ARBORCAST_TOPOLOGY="full:4", ARBORCAST_GLOO_BELOW="0")
    assert done.returncode == 0, done.stdout + done.stderr
    axes = re.findall(r"^(data|tensor): (\d+) by schedule, 0 by gloo:$", done.stdout, re.MULTILINE)
    assert [axis for axis, _ in axes] == ["data", "data", "tensor", "tensor"]
    assert all(
        int(calls) >= 3 * 10 for _, calls in axes
    )  # a call or more for each of three layers, each step
    for kind, ranks in (("allgather", "0,2"), ("reduce-scatter", "0,2"), ("allgather", "0,1")):
        served = rf"^    {kind} of 64 KiB: .* on full:4\[{ranks}\]"
        assert re.search(served, done.stdout, re.MULTILINE), done.stdout
    ends = re.search(r"^loss (\d+\.\d+) to (\d+\.\d+) in 10 steps$", done.stdout, re.MULTILINE)
    assert ends is not None
    assert float(ends[2]) < 0.9 * float(ends[1])  # it learns


@pytest.mark.long
def test_the_fsdp_example_says_what_it_needs() -> None:
    script = str(ROOT / "examples" / "train_fsdp.py")
    done = run(sys.executable, script)
    assert done.returncode == 2
    assert "start it with: torchrun --standalone --nproc-per-node 4" in done.stderr
    done = run(*TORCHRUN, "2", script, "--tensor-ranks", "4", ARBORCAST_TOPOLOGY="full:2")
    assert done.returncode != 0
    assert "--tensor-ranks 4 must divide 2 ranks" in done.stderr
