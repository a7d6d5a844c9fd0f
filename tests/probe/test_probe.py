"""`synth probe` as torchrun starts it: real processes on loopback, short measurements."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from arborcast import synth, topologies
from arborcast.backends.probe.measurements import Measurements
from arborcast.backends.probe.measuring import Effort, Meeting, measure
from arborcast.backends.probe.traffic import Period, flood, ping_pong
from arborcast.backends.transport.network import Network
from arborcast.synth.formats import topology_to_document
from tests.support.commands import Said, run_job, run_jobs
from tests.support.ranks import run_ranks
from tests.support.waiting import PATIENCE_S

SHORT = ("--repeats", "2", "--load-repeats", "1", "--pings", "10", "--window", "0.01")
GENEROUS = ("--tolerance", "1000")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A measured file, and what was said."""
    file = tmp_path_factory.mktemp("probe") / "fabric.yaml"
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    ran = subprocess.run(
        [*words, "-m", "arborcast", "probe", "-o", str(file), *SHORT],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return file, ran.stdout.splitlines()


def test_torchrun_measures_a_fabric_that_can_be_used(by_torchrun: tuple[Path, list[str]]) -> None:
    file, lines = by_torchrun
    assert lines[0].split() == ["pair", "latency", "us", "GB/s", "spread", "loaded", "GB/s"]
    assert [line.split()[0] for line in lines[1:3]] == ["0->1", "1->0"]
    assert lines[-1].split() == ["written", str(file)]
    assert any(line.startswith("resembles  ") for line in lines)
    fabric = topologies.load(str(file))
    assert (fabric.name, fabric.ranks) == ("fabric", 2)
    assert re.search(rf"# host +{re.escape(socket.gethostname())}: ranks 0, 1\n", file.read_text())
    schedule = synth.solve(fabric, "allreduce")
    assert synth.verify(schedule).correct


def test_a_measured_file_is_not_contradicted(by_torchrun: tuple[Path, list[str]]) -> None:
    options = ("--transport", "sockets", "--parallel-rounds", *SHORT, *GENEROUS)
    ran = run_job(2, "probe", "--check", str(by_torchrun[0]), "--json", *options)
    assert [rank.status for rank in ran] == [0, 0], ran
    assert [rank.err for rank in ran] == ["", ""]
    document = json.loads(ran[0].out)
    assert document["check"]["contradictions"] == []
    assert document["file"] is None
    assert document["exact"] is False
    assert isinstance(document["resembles"]["found"], bool)  # what it is like depends on this machine's load
    assert {pair["transport"] for pair in document["pairs"]} == {"sockets"}
    assert document["hosts"] == [socket.gethostname()] * 2
    assert len(document["pairs"]) == 2
    for pair in document["pairs"]:
        low, middle, high = pair["bandwidth"]
        assert 0 < low <= middle <= high
        assert 0 < pair["latency_us"][0] <= pair["latency_us"][1] <= pair["latency_us"][2]


def test_streams_are_measured_where_they_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "measured.yaml"
    ran = run_job(4, "probe", "--streams", "--json", "-o", str(file), *SHORT)
    assert [rank.status for rank in ran] == [0] * 4, ran
    document = json.loads(ran[0].out)
    loads = [sorted((flow["from"], flow["to"]) for flow in load) for load in document["loads"]]
    for rank in range(4):
        after = [(rank + distance) % 4 for distance in (1, 2, 3)]
        for count in (2, 3):
            assert sorted((rank, other) for other in after[:count]) in loads
            assert sorted((other, rank) for other in after[:count]) in loads
    found = topologies.load(str(file))
    assert topology_to_document(found).get("streams") == document["topology"].get("streams")
    assert all(count in (1, 2, None) for count in found.streams)


def test_a_link_that_is_far_too_fast_is_contradicted(tmp_path: Path) -> None:
    said = tmp_path / "said.yaml"
    said.write_text(
        "name: said\nranks: 4\nlinks:\n"
        "  - {between: [0, 3], bandwidth: 1}\n"
        "  - {between: [0, 1], bandwidth: 1000000000}\n"
        "  - {between: [1, 3], bandwidth: 1}\n"
        "  - {between: [2, 3], bandwidth: 1}\n"
    )
    file = tmp_path / "measured.yaml"
    ran = run_job(3, "probe", "--check", str(said), "--ranks", "1,3,0", "-o", str(file), *SHORT, *GENEROUS)
    assert [rank.status for rank in ran] == [1, 1, 1]
    lines = [line for line in ran[0].err.splitlines() if str(said) in line]
    # Ranks 0 and 2 of the processes are 1 and 0 of the file.
    assert [line.split()[2] for line in lines] == ["0->2:", "2->0:"]
    assert all("says 1e+09 GB/s" in line and "times slower" in line for line in lines)
    assert [rank.err for rank in ran[1:]] == ["", ""]
    assert file.exists()


WRONG = {
    ("--check", "dgx1"): "--check dgx1: has 8 ranks, but 2 processes measure; choose as many with --ranks",
    ("--check", "dgx1", "--ranks", "0-2"): (
        "--check dgx1: has 3 ranks, but 2 processes measure; choose as many with --ranks"
    ),
    ("--like", "dgx1"): "--like dgx1: has 8 ranks, but 2 processes measure",
    ("--ranks", "0,1"): "--ranks 0,1: goes with --check SPEC only",
    ("--cables", "--streams"): "--streams: does not go with --cables",
    ("--repeats", "0"): "Invalid value for '--repeats': must be at least 1, got 0",
    ("--transport", "pigeon"): (
        "Invalid value for '--transport': must be one of 'auto', 'sockets', 'shared memory', got 'pigeon'"
    ),
    ("--tolerance", "-1"): "--tolerance: must not be negative, got -1",
    ("--nonsense",): "No such option: --nonsense",
}


def test_wrong_input_is_one_line_of_rank_0() -> None:
    said = run_jobs(2, [("probe", *options) for options in WRONG])
    for line, ran in zip(WRONG.values(), said, strict=True):
        assert ran == [Said(2, "", f"synth: {line}\n"), Said(2, "", "")]


def test_without_torchrun_it_says_how_to_start() -> None:
    variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {name: value for name, value in os.environ.items() if name not in variables}
    ran = subprocess.run(
        [sys.executable, "-m", "arborcast", "probe"],
        env={**environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == (
        "synth: probe: must run on several processes, as in: torchrun --nproc-per-node 4 --no-python "
        "synth probe -o fabric.yaml (RANK is not set)\n"
    )


def test_one_process_is_too_few() -> None:
    line = "synth: probe: must run on at least 2 processes, got 1\n"
    assert run_job(1, "probe") == [Said(2, "", line)]


def network_of(rank: int, size: int, transport: str) -> Network:
    store = torch.distributed.distributed_c10d._get_default_store()
    own = torch.distributed.PrefixStore(transport, store)
    network = Network(own, rank, size, timeout_s=90, transport=transport)
    network.connect(range(size))
    return network


TRANSPORTS = ("sockets", "shared memory")


def all_directions(rank: int, size: int) -> list[dict[str, Any]]:
    return [in_all_directions(network_of(rank, size, transport), rank, size) for transport in TRANSPORTS]


def in_all_directions(network: Network, rank: int, size: int) -> dict[str, Any]:
    others = [other for other in range(size) if other != rank]
    found: dict[str, Any] = {"pings": {}}
    for first in range(size):
        for second in range(first + 1, size):
            if rank in (first, second):
                peer = first + second - rank
                found["pings"][peer] = ping_pong(
                    network.channels[peer], begins=rank == first, repeats=5, timeout_s=90
                )
    for turn in range(3):  # what one experiment leaves behind would spoil the next
        torch.distributed.barrier()
        found[f"flood {turn}"] = flood(
            network.channels, to=others, of=others, period=Period(0.02, 0.005), timeout_s=90
        )
    torch.distributed.barrier()
    network.close()
    return found


def test_all_ranks_may_send_to_all_at_once() -> None:
    of_ranks = run_ranks(3, all_directions)
    for rank, found in ((rank, found) for rank, both in enumerate(of_ranks) for found in both):
        others = {0, 1, 2} - {rank}
        assert set(found["pings"]) == others
        for pings in found["pings"].values():
            assert len(pings.one_way_us) == 5
            assert min(pings.one_way_us) > 0
            assert pings.work_us > 0
        for turn in range(3):
            assert set(found[f"flood {turn}"]) == others
            assert all(rate > 0 for rate in found[f"flood {turn}"].values())


def measured_twice(rank: int, size: int) -> list[Measurements]:
    """One after the other, and in rounds of pairs."""
    effort = Effort(pings=5, repeats=2, load_repeats=1, period=Period(0.005, 0.002))
    network = network_of(rank, size, "auto")
    store = torch.distributed.distributed_c10d._get_default_store()
    meeting = Meeting(torch.distributed.PrefixStore("meeting", store), rank, size)
    found = [measure(network, meeting, replace(effort, parallel=parallel)) for parallel in (False, True)]
    network.close()
    return found


def test_all_ranks_know_the_same() -> None:
    first, *others = run_ranks(4, measured_twice)
    assert all(other == first for other in others)
    for parallel, found in zip((False, True), first, strict=True):
        assert found.exact is not parallel
        assert len(found.solo) == len(found.latency_us) == len(found.transports) == 12
        assert {spread.repeats for spread in found.solo.values()} == {2}
        assert len(found.loads[0].rates) == (2 if parallel else 3)


def lost_peer(rank: int, size: int) -> str:
    network = network_of(rank, size, "sockets")
    torch.distributed.barrier()
    if rank == 1:
        assert select.select([network.channels[0].fileno()], [], [], PATIENCE_S)[0]  # something has come
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        flood(network.channels, to=[1], of=[], period=Period(60, 0.01), timeout_s=90)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_rank_that_dies_is_named() -> None:
    found = run_ranks(2, lost_peer, may_fail=True)
    assert found[0] == "ChannelClosedError: rank 1 closed its connection: it died or was ended"
