"""First calls of a group whose schedules are in no cache: simple ones at once, the change, and who dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from arborcast import topologies
from arborcast.backends import Options
from arborcast.backends.group.communicator import SERVED
from arborcast.backends.schedules import held, synthesis
from arborcast.backends.schedules.schedule_table import ScheduleTable
from arborcast.backends.schedules.simple import SIMPLE, simple_table
from arborcast.backends.transport.network import Network
from arborcast.synth.chunks.solvers.cache import ChunkCache
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import TimedOutError
from arborcast.synth.kernels.compiled import kernel_folder
from arborcast.synth.schedule import Method
from arborcast.synth.selection import Choice
from arborcast.synth.verification.verifier import verify
from tests.support.ranks import Failure, StandingRanks, run_ranks
from tests.support.waiting import until

RANKS = 3
ranks = StandingRanks(RANKS, backend="gloo", environ={"ARBORCAST_START": "at once"})


def new_group(**options: Any) -> Any:
    """A group for which nothing is in a cache unless options say so."""
    told: Any = Options(**{"topology": "ring:3", "cache": False, **options})
    return dist.new_group(backend="synth", pg_options=told)


@pytest.mark.parametrize(
    "spec", ["full:2", "full:7", "full:33", "ring:5", "mesh:2x3", "dgx1", "star:4", "dgx2", "torus:3x4"]
)
def test_a_simple_schedule_is_right_on_any_fabric_and_has_few_peers_on_a_mesh(spec: str) -> None:
    fabric = topologies.load(spec).forwarding
    for kind in SERVED:
        table = simple_table(fabric, Collective.on(fabric, kind, root=1))
        assert table is not None
        (entry,) = table.entries
        assert entry.schedule.method.name == SIMPLE
        assert verify(entry.schedule).correct
        # A block goes to the root and nobody else where they are joined.
        is_thin = spec[:4] == "full" and kind not in {Kind.GATHER, Kind.SCATTER}
        most = 2 * (fabric.ranks - 1).bit_length() if is_thin else fabric.ranks
        assert max(len(table.peers(rank)) for rank in range(fabric.ranks)) <= most


def test_there_is_none_where_a_rank_cannot_be_reached_or_making_it_takes_long() -> None:
    apart = topologies.load("ring:4").subset([0, 2])  # without a link between them
    assert simple_table(apart, Collective.on(apart, "allreduce")) is None
    large = topologies.load("full:256")
    assert simple_table(large, Collective.on(large, "allgather")) is None


def found_when_told(told: Path, fails: bool) -> Any:
    """What finds a table in place of the synthesis: nothing until a file is there."""

    def find(fabric: Any, kind: Kind, root: int | None, *_: object) -> ScheduleTable:
        until(told.exists)
        if fails:
            raise TimedOutError("there was no schedule within 1 s")
        return another(fabric, kind, root or 0)

    return find


def another(fabric: Any, kind: Kind, root: int = 0) -> ScheduleTable:
    """A table that is not the simple one, made in a moment."""
    simple = simple_table(fabric, Collective.on(fabric, kind, root=root))
    assert simple is not None
    return ScheduleTable.of([Choice(0, replace(simple.entries[0].schedule, method=Method("another")))])


def calls(group: Any, count: int) -> list[str]:
    """How many calls, each checked, and what serves after each."""
    served = []
    rank, size = group.rank(), group.size()
    for call in range(count):
        tensor = torch.full((1000,), float(rank + call))
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.full((1000,), float(sum(range(size)) + size * call)))
        served.append(group.explain(4000).removeprefix("allreduce of 4000 B: "))
    return served


def changing(rank: int, size: int, folder: Path, fails: bool) -> tuple[list[str], list[str], list[str]]:
    with mock.patch.object(held, "synthesize_table", found_when_told(folder / "told", fails)):
        group = new_group()
        before = calls(group, 20)
        if rank == 0:
            (folder / "told").touch()
        dist.barrier(group)
        if rank == 0:
            changes = group._communicator._schedules._changes
            until(lambda: all(it.found.done() for it in changes.values()))
        between = calls(group, 30)
        group.prepare("broadcast")
        return before, between, [group.explain(4000, "broadcast")]


@pytest.mark.parametrize("fails", [False, True])
def test_all_ranks_change_at_one_call_and_every_sum_is_right(tmp_path: Path, fails: bool) -> None:
    results = ranks(changing, tmp_path, fails)
    assert results[1:] == results[:-1], "ranks changed at different calls"
    before, between, after = results[0]
    assert all(SIMPLE in line and "until others are found" in line for line in before)
    assert "until" not in between[-1] and "until" not in after[0]
    method = SIMPLE if fails else "another"
    assert method in between[-1] and method in after[0]
    changed = [("until" in line) for line in between]
    assert changed == sorted(changed, reverse=True) and len(changed) - sum(changed) >= 30 - held.ASK_EVERY


def explained_meanwhile(rank: int, size: int, told: Path) -> str:
    """What `explain` says of a collective while another's first schedule is on its way to the table."""
    said, connect = [], Network.connect

    def connecting(network: Network, peers: Any) -> None:
        said.append(group.explain(4000))
        connect(network, peers)

    with mock.patch.object(held, "synthesize_table", found_when_told(told, False)):
        group = new_group()
        group.prepare("allreduce")
        with mock.patch.object(Network, "connect", connecting):
            dist.broadcast(torch.ones(10), 1, group=group)
    return said[0]


def test_explain_does_not_wait_for_other_schedules(tmp_path: Path) -> None:
    for line in ranks(explained_meanwhile, tmp_path):
        assert line.startswith("allreduce of 4000 B: another (") and "until" not in line


def changing_by_synthesis(rank: int, size: int) -> list[str]:
    """What serves after each call, from the first to some after the change."""
    group = new_group(cache=True)
    served = calls(group, 1)
    while "until others are found" in served[-1]:
        time.sleep(0.01)  # rank 0's child computes
        served += calls(group, 1)
    served += calls(group, 20)
    dist.barrier(group)
    return served


@pytest.mark.long
def test_a_table_that_is_really_synthesized_takes_over_at_one_call(tmp_path: Path) -> None:
    environ = {
        "ARBORCAST_START": "at once",
        "ARBORCAST_CACHE": str(tmp_path),
        "NUMBA_CACHE_DIR": str(kernel_folder() or tmp_path),  # only tables are missing
    }
    for starts_cold in (True, False):
        first, *others = run_ranks(RANKS, changing_by_synthesis, environ=environ)
        assert others == [first] * (RANKS - 1), "ranks changed at different calls"
        by_simple = [SIMPLE in line for line in first]
        assert by_simple == sorted(by_simple, reverse=True) and by_simple[0] is starts_cold
        assert len(set(first[sum(by_simple) :])) == 1, first[-1]


def dying(rank: int, size: int) -> str:
    with mock.patch.object(held, "synthesize_table", found_when_told(Path("never"), fails=False)):
        group = new_group()
        calls(group, 5)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            calls(group, 1000)
        except RuntimeError as error:
            return str(error)
    return "nothing"


def test_a_death_while_schedules_are_looked_for_is_noticed() -> None:
    *alive, dead = run_ranks(RANKS, dying, environ={"ARBORCAST_START": "at once"}, may_fail=True)
    assert isinstance(dead, Failure)
    assert all("rank 2" in said for said in alive)


def with_what_is_kept(rank: int, size: int, folder: Path) -> str:
    refused = AssertionError("a child process was started")
    with (
        mock.patch.object(synthesis, "Worker", side_effect=refused),
        mock.patch.dict(os.environ, ARBORCAST_CACHE=str(folder)),
    ):
        return calls(new_group(cache=True, prepare=("allreduce",)), 1)[0]


def test_what_is_kept_serves_the_first_call_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARBORCAST_CACHE", str(tmp_path))
    fabric = topologies.load("ring:3").forwarding
    collective = Collective.on(fabric, "allreduce")
    folder = ChunkCache(tmp_path / "tables")
    table = another(fabric, Kind.ALLREDUCE)
    key = synthesis._key(folder, fabric, collective, Options())
    folder.put_json(key, table.to_bytes().decode())
    before = sorted(tmp_path.rglob("*"))
    assert all(served.startswith("another ") for served in ranks(with_what_is_kept, tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


HIDDEN_AND_BROKEN = """
import sys
sys.modules["arborcast"] = None
import torch
print("synth" in torch.distributed.Backend.backend_list)
del sys.modules["arborcast"]  # and now the one of this folder
torch._import_device_backends()
print("synth" in torch.distributed.Backend.backend_list)
"""


def test_torch_is_imported_where_the_package_is_hidden_or_broken(tmp_path: Path) -> None:
    """It fails with whatever the backends that it looks for raise."""
    (tmp_path / "arborcast.py").write_text("")
    ended = subprocess.run(
        [sys.executable, "-c", HIDDEN_AND_BROKEN],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "always"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert ended.stdout == "False\nFalse\n"
    assert ended.stderr.count('UserWarning: arborcast gives torch no process group "synth"') == 2
