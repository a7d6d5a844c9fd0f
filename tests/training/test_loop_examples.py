"""The examples of users' loops: accelerate, Lightning and transformers over synthesized schedules."""

from __future__ import annotations

import re

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
