"""The process group "synth" under torchrun: rendezvous by the environment, restarts, interruption, the end.

The jobs are separate programs that know nothing of Arborcast but the name of the backend.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from torch._C import _distributed_c10d as c10d

from tests.support.torchrun_job import DIES_AT, STEPS, TORN_LINK, gradient, mesh, serial_result
from tests.support.waiting import until

HOME = Path(__file__).resolve().parents[2]
JOB = HOME / "tests" / "support" / "torchrun_job.py"
LIMIT_S = 150


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """What an installation leaves for torch to find, made from pyproject.toml: a folder for sys.path."""
    project = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
    folder = tmp_path / "site" / f"arborcast-{project['version']}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: arborcast\nVersion: {project['version']}\n"
    )
    points = project["entry-points"]["torch.backends"]
    lines = ["[torch.backends]", *(f"{name} = {target}" for name, target in points.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder.parent


def torchrun(
    folder: Path,
    backend: str,
    what: str,
    *,
    ranks: int,
    path: tuple[Path, ...],
    launch: tuple[str, ...] = ("--standalone",),
    **environ: str,
) -> subprocess.Popen[str]:
    """The job, started in a session of its own as a terminal would."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *launch]
    command += [str(JOB), backend, str(folder), what]
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        "ARBORCAST_GLOO_BELOW": "0",
        **environ,
    }
    return subprocess.Popen(
        command,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(job: subprocess.Popen[str], limit_s: float = LIMIT_S) -> str:
    """Its output, when all its processes are gone; ended with all of them at the limit."""
    try:
        return job.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise AssertionError(f"still runs after {limit_s} s: {job.communicate()[0][-3000:]}") from None


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


def check_trained(folder: Path, ranks: int) -> None:
    """All steps were made, in two incarnations, and the second one kept off the link that is gone."""
    first, second, end = (read(folder, name) for name in ("begun-at-0", f"begun-at-{DIES_AT}", "end"))
    assert end["total"] == serial_result(ranks)
    sums = end["counters"]["allreduce"]
    assert (sums["schedule"], sums["gloo"]) == (STEPS - DIES_AT, 0)
    # Rank 0 is joined to all others at first, and no longer to the one beyond that link.
    assert first["peers"] == [1, 2, 3]
    assert second["peers"] == [rank for rank in (1, 2, 3) if (0, rank) != TORN_LINK]


@pytest.mark.long
def test_a_job_restarts_after_a_death_and_avoids_the_link_that_is_gone(
    tmp_path: Path, installed: Path
) -> None:
    ranks = 4
    topology = tmp_path / "topology.json"
    topology.write_text(json.dumps(mesh(ranks)))
    job = torchrun(
        tmp_path,
        "synth",
        "train",
        ranks=ranks,
        path=(installed, HOME),
        launch=("--standalone", "--max-restarts", "1"),
        ARBORCAST_TOPOLOGY=str(topology),
    )
    output = finish(job)
    assert job.returncode == 0, output[-3000:]
    check_trained(tmp_path, ranks)


@pytest.mark.long
def test_two_agents_restart_a_job_although_only_one_counts_the_restart(
    tmp_path: Path, installed: Path
) -> None:
    topology = tmp_path / "topology.json"
    topology.write_text(json.dumps(mesh(4)))
    store = c10d.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    launch = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--max-restarts", "3")
    launch += ("--rdzv-conf", "is_host=false", "--rdzv-endpoint", f"localhost:{store.port}")
    jobs = [
        torchrun(
            tmp_path,
            "synth",
            "train",
            ranks=2,
            path=(installed, HOME),
            launch=launch,
            ARBORCAST_TOPOLOGY=str(topology),
        )
        for _ in range(2)
    ]
    for job in jobs:
        output = finish(job)
        assert job.returncode == 0, output[-3000:]
    check_trained(tmp_path, 4)


@pytest.mark.long
def test_cpu_synth_by_the_environment_and_an_end_without_farewell(tmp_path: Path) -> None:
    job = torchrun(
        tmp_path,
        "cpu:synth",
        "leave",
        ranks=2,
        path=(HOME,),
        IMPORT_BACKENDS="1",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        ARBORCAST_TOPOLOGY="full:2",
    )
    output = finish(job)
    assert job.returncode == 0, output[-3000:]
    expected = (gradient(0, 0) + gradient(0, 1)).sum().item()
    assert [read(tmp_path, f"left-{rank}") for rank in range(2)] == [expected] * 2
    for word in ("Traceback", "terminate called", "Segmentation", "Fatal Python error"):
        assert word not in output


def unix_sockets_of(pid: str) -> set[str]:
    """The names, each in a line of its own in /proc/net/unix, at which a process listens."""
    held = {str(it.readlink()) for it in Path(f"/proc/{pid}/fd").iterdir() if it.is_symlink()}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {line[-1] for line in lines if f"socket:[{line[6]}]" in held and line[-1].startswith("@")}


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_ended_while_its_ranks_wait_leaves_nothing(tmp_path: Path, number: int) -> None:
    ranks = 2
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    job = torchrun(
        tmp_path,
        "synth",
        "hang",
        ranks=ranks,
        path=(HOME,),
        IMPORT_BACKENDS="1",
        ARBORCAST_TOPOLOGY="full:2",
        TMPDIR=str(temporary),
    )
    files = [tmp_path / f"pid-{rank}.json" for rank in range(ranks)]
    until(
        lambda: job.poll() is not None or all(file.exists() and file.read_text() for file in files), LIMIT_S
    )
    assert job.poll() is None, finish(job)[-3000:]
    names = set.union(*(unix_sockets_of(file.read_text()) for file in files))
    assert names, "ranks on one host listen at such sockets"
    if number == signal.SIGINT:
        os.killpg(job.pid, number)  # what a terminal does
    else:
        job.send_signal(number)  # what a scheduler does
    finish(job)
    assert not names & set(Path("/proc/net/unix").read_text().split())
    assert not [path for path in temporary.rglob("*") if "torchelastic" not in str(path)]  # torchrun's own
    for file in files:
        assert not Path(f"/proc/{file.read_text()}").exists()
