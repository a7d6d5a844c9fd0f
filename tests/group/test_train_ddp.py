from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

import torch
import torch.distributed as dist
from torch import Tensor

from examples import train_ddp
from tests.support.ranks import rendezvous, run_ranks, threads_of_gloo

RANKS_IMPORT = ("torch._dynamo", "sklearn.datasets")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_ddp.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([environ.pop("PYTHONPATH", ""), str(ROOT)]).strip(os.pathsep)
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
        env=os.environ | environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


# Whoever hangs says where, and ends.
SAY_THREADS = """
import atexit, contextlib, faulthandler, os, pathlib
def say():
    names = []
    for thread in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
            names.append((thread / "comm").read_text())
    pathlib.Path(__file__).with_name("threads-" + os.environ["RANK"]).write_text("".join(names))
if "RANK" in os.environ:
    atexit.register(say)
    faulthandler.dump_traceback_later(200, exit=True)
"""


# A simple schedule serves until those that are compared for this size are found.
GRADIENTS = r"^synth: gradients go as allreduce of .* on full:2(, until others are found)?$"


def under_torchrun(folder: Path, *options: str) -> str:
    (folder / "sitecustomize.py").write_text(SAY_THREADS)
    environ = {"ARBORCAST_TOPOLOGY": "full:2", "PYTHONPATH": str(folder)}
    done = run(*TORCHRUN, "2", str(SCRIPT), *options, **environ)
    assert done.returncode == 0, done.stderr
    for rank in range(2):  # a thread of gloo that is left at the end can abort the process
        assert "gloo" not in (folder / f"threads-{rank}").read_text()
    return done.stdout


def rank_of_example(rank: int, size: int, options: list[str]) -> str:
    os.environ["RANK"] = str(rank)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert train_ddp.main(options) == 0
    assert threads_of_gloo() == 0
    return said.getvalue()


def by_forks(folder: Path, *options: str) -> str:
    with rendezvous(2) as environ:
        told = environ | {"ARBORCAST_TOPOLOGY": "full:2"}
        said, nothing = run_ranks(2, rank_of_example, list(options), backend=None, environ=told)
    assert nothing == ""
    return str(said)


@pytest.mark.parametrize("start", [by_forks, pytest.param(under_torchrun, marks=pytest.mark.long)])
def test_both_ways_give_equal_losses(start: Callable[..., str], tmp_path: Path) -> None:
    said = start(tmp_path, "--epochs", "2", "--trace", f"{tmp_path}/rank")
    for rank in range(2):
        names = [event["name"] for event in json.loads((tmp_path / f"rank{rank}.json").read_text())]
        assert sum(name.startswith("allreduce ") for name in names) >= 11  # steps of the first epoch
    lines = said.splitlines()
    assert lines[0].split() == ["epoch", "loss,", "gloo", "loss,", "synth"]
    table = [[float(cell) for cell in line.split()] for line in lines[1:3]]
    assert [row[0] for row in table] == [1, 2]
    assert all(abs(gloo - synth) <= train_ddp.LIMIT for _, gloo, synth in table)
    assert table[1][1] < table[0][1]  # it learns
    accuracies = re.findall(r"^(gloo|synth): (\d+\.\d)% of 360 held-out images right$", said, re.MULTILINE)
    assert [name for name, _ in accuracies] == ["gloo", "synth"]
    assert re.search(GRADIENTS, said, re.MULTILINE)
    calls = re.search(r"^synth: allreduce: (\d+) by schedule", said, re.MULTILINE)
    assert calls is not None
    assert int(calls[1]) >= 2 * 11  # a bucket or more in each of 11 steps per epoch
    assert re.search(r"^largest difference .*: equal \(limit 1e-05\)$", said, re.MULTILINE)


class _Slow:
    """Takes a while to be forgotten."""

    def __del__(self) -> None:
        time.sleep(1)


def forgets_slowly(rank: int, ranks: int) -> float:
    """Trains on gloo whose thread takes a second to forget a call, and the interpreter for it."""

    def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        keep: Any = cast(Any, torch._C)._stash_obj_in_tls
        keep("slow", _Slow())  # the call takes it along
        time.sleep(rank)  # while rank 0 is in the call, its thread of gloo alone comes to have it
        future = reduce(tensor, op, async_op=True).get_future()
        keep("slow", None)
        future.wait()

    reduce = dist.all_reduce
    dist.all_reduce = all_reduce  # type: ignore[assignment]  # of this process
    store = {"init_method": f"file://{os.environ['TEST_STORE']}", "rank": rank, "world_size": ranks}
    dist.init_process_group = partial(dist.init_process_group, **store)
    count = train_ddp.HELD_OUT + 2 * train_ddp.BATCH
    images, labels = torch.zeros(count, 64), torch.arange(count) % 10
    return train_ddp.train("gloo", images, labels, epochs=1, seed=0).losses[0]


def test_gloo_that_forgets_its_last_call_slowly_does_not_hang_a_training() -> None:
    first, second = run_ranks(2, forgets_slowly, backend=None, timeout_s=40)
    assert first == second


def history(*losses: float) -> train_ddp.History:
    return train_ddp.History(list(losses), 0.5, [])


@pytest.mark.parametrize("loss", [0.30002, float("nan")])
def test_losses_that_differ_are_the_answer_no(
    loss: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    histories = {"gloo": history(0.7, 0.3), "synth": history(0.7, loss)}
    monkeypatch.setattr(train_ddp, "train", lambda backend, *_, **__: histories[backend])
    monkeypatch.setenv("RANK", "0")
    assert train_ddp.main([]) == 1
    assert "NOT equal (limit 1e-05)" in capsys.readouterr().out


def test_one_way_alone_compares_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_ddp, "train", lambda *_, **__: history(0.7, 0.3))
    monkeypatch.setenv("RANK", "0")
    assert train_ddp.main(["--backend", "synth"]) == 0
    assert "difference" not in capsys.readouterr().out


def test_without_torchrun_it_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert train_ddp.main([]) == 2
    expected = "start it with: torchrun --standalone --nproc-per-node 4 examples/train_ddp.py"
    assert capsys.readouterr().err.splitlines() == [f"train_ddp: {expected}"]


def test_without_scikit_learn_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert train_ddp.main([]) == 2
    expected = "the digits come with scikit-learn: pip install scikit-learn"
    assert capsys.readouterr().err.splitlines() == [f"train_ddp: {expected}"]
