from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from arborcast import pipeline, topologies
from arborcast.synth.errors import InputError
from examples import train_pipeline
from tests.group.test_train_ddp import ROOT, TORCHRUN, run
from tests.support.ranks import rendezvous, run_ranks, threads_of_gloo

RANKS_IMPORT = ("torch._dynamo", "torch.export._trace", "sklearn.datasets")

SCRIPT = ROOT / "examples" / "train_pipeline.py"


PLAN = pipeline.Plan(
    [(0, 3, [0]), (3, 8, [2, 1])], 4, "pe", topology=topologies.load("full:3"), model="digits"
)


def examples_of(
    rank: int, size: int, calls: list[list[str]], told: list[dict[str, str]]
) -> list[tuple[int, str, str]]:
    """The status of each call, and what the rank says there."""
    os.environ["RANK"] = str(rank)
    found = []
    for arguments, settings in zip(calls, told, strict=True):
        os.environ |= settings
        said, complained = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
            status = train_pipeline.main(arguments)
        assert threads_of_gloo() == 0, arguments
        found.append((status, said.getvalue(), complained.getvalue()))
    return found


def test_a_plan_is_refused_by_all_or_its_losses_are_serial_ones(tmp_path: Path) -> None:
    pipeline.write_plan(PLAN, tmp_path / "plan.json")
    pictures = ["-o", str(tmp_path / "loss.svg"), "--timeline", str(tmp_path / "timeline.png")]
    options = ["--plan", str(tmp_path / "plan.json"), "--steps", "4", "--collectives", "gloo", *pictures]
    too_large = replace(PLAN, stages=((0, 3, (0,)), (3, 8, (3,))), topology=None)
    pipeline.write_plan(too_large, tmp_path / "large.json")
    calls = [["--plan", str(tmp_path / "large.json")], options]
    with rendezvous(3) as first, rendezvous(3) as second:
        results = run_ranks(3, examples_of, calls, [first, second], backend=None)
    (refused, (status, said, _)), *others = results
    assert refused == (2, "", "train_pipeline: plan: rank must be in 0..2 of topology full:3, got 3\n")
    assert status == 0
    assert others == [[(2, "", ""), (0, "", "")]] * 2  # one rank speaks, all know
    lines = said.splitlines()
    assert lines[0] == "digits: 2 stages of 1, 2 ranks, 4 microbatches, order pe (by hand)"
    assert lines[1] == "  stage 0 on rank 0: 0 Linear, 1 Tanh, 2 Linear"
    table = [line.split() for line in lines if re.match(r" +\d+ ", line)]
    assert [row[0] for row in table] == ["1", "2", "3", "4"]
    assert all(abs(float(row[1]) - float(row[2])) <= train_pipeline.LIMIT for row in table)
    assert re.fullmatch(r"largest difference .*: equal \(limit 1e-06\)", lines[-1])
    assert (tmp_path / "loss.svg").read_text().startswith("<?xml")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_under_torchrun_it_makes_a_plan_and_learns() -> None:
    done = run(*TORCHRUN, "4", str(SCRIPT), "--steps", "30", ARBORCAST_TOPOLOGY="full:4")
    assert done.returncode == 0, done.stderr
    assert re.match(r"digits: [234] stages.*, 8 microbatches, order (gpipe|1f1b|pe) ", done.stdout)
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if re.match(r" +\d+ ", line)]
    assert losses[-1] < 0.8 * losses[0]
    assert re.search(r"^largest difference .*: equal \(limit 1e-06\)$", done.stdout, re.MULTILINE)


def test_a_plan_for_more_ranks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline.write_plan(PLAN, tmp_path / "plan.json")
    monkeypatch.setattr(train_pipeline.dist, "get_world_size", lambda: 2)  # type: ignore[attr-defined]
    asked = train_pipeline.parse(["--plan", str(tmp_path / "plan.json")])
    with pytest.raises(InputError, match=r"plan: ranks must be in 0\.\.1 of this job, got 2"):
        train_pipeline.make_plan(asked, train_pipeline.batches(1, 0), 0.0)


@pytest.mark.long
def test_by_default_it_is_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_pipeline.dist, "get_world_size", lambda: 4)  # type: ignore[attr-defined]
    monkeypatch.delenv("ARBORCAST_TOPOLOGY", raising=False)
    data = train_pipeline.batches(1, 0)
    plan, prediction = train_pipeline.make_plan(train_pipeline.parse([]), data, 0.0)
    assert len(plan.stages) >= 2
    assert prediction.time_us == prediction.timeline.time_us
    alone, _ = train_pipeline.make_plan(train_pipeline.parse(["--stages", "1"]), data, 0.0)
    assert len(alone.stages) == 1


@pytest.mark.parametrize("other", [0.30001, float("nan")])
def test_losses_that_differ_are_the_answer_no(other: float, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_pipeline.show([0.7, 0.3], [0.7, 0.3 + 5e-7])
    assert not train_pipeline.show([0.7, 0.3], [0.7, other])
    assert "NOT equal (limit 1e-06)" in capsys.readouterr().out


@pytest.mark.parametrize("option", [("--stages", "2"), ("--order", "pe"), ("--microbatches", "4")])
def test_a_plan_says_it_all(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_pipeline.main(["--plan", "plan.json", *option])
    said = capsys.readouterr().err
    assert f"{option[0]}: must be left out with --plan, which says it, got {option[1]}" in said


def test_without_torchrun_it_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert train_pipeline.main([]) == 2
    expected = "start it with: torchrun --standalone --nproc-per-node 4 examples/train_pipeline.py"
    assert capsys.readouterr().err.splitlines() == [f"train_pipeline: {expected}"]


def test_without_scikit_learn_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert train_pipeline.main([]) == 2
    assert "the digits come with scikit-learn: pip install scikit-learn" in capsys.readouterr().err
