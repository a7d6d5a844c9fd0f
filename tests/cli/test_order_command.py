"""`synth order` as a user runs it: from a list of hosts and what is known of the network to a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.commands import Command

SLURM = """
- topology: cluster
  tree:
    switches:
      - {switch: core, children: 'leaf[1-3]'}
      - {switch: leaf1, nodes: 'node[01-04]'}
      - {switch: leaf2, nodes: 'node[05-08]'}
      - {switch: leaf3, nodes: 'node[09-12]'}
"""
DEALT = "node[01,05,09,02,06,10,03,07,11,04,08,12]"


def test_hosts_of_slurm_are_brought_together(command: Command, tmp_path: Path) -> None:
    """Dealt round three leaves, each leaf's four hosts send away; in their order, one of them does."""
    (tmp_path / "topology.yaml").write_text(SLURM)
    ran = command("order", str(tmp_path / "topology.yaml"), "--hosts", DEALT, "-o", str(tmp_path / "hosts"))
    assert ran.status == 0
    assert "given     ring 4 messages on one link" in ran.out
    assert "best      ring 1 message on one link" in ran.out
    assert "no order of these hosts has a better ring" in ran.out
    assert "NCCL itself was not run" in ran.out
    assert "GB/s" not in ran.out  # no rate is known
    assert (tmp_path / "hosts").read_text() == "".join(f"node{n:02d} slots=1\n" for n in range(1, 13))
    again = command("order", str(tmp_path / "topology.yaml"), "--hosts", str(tmp_path / "hosts"), "--json")
    document = again.document
    assert document["order"] == [f"node{n:02d}" for n in range(1, 13)]
    assert (document["given"]["ring_link"]["messages"], document["proved"]) == (1, True)
    some = command(
        "order", str(tmp_path / "topology.yaml"), "--hosts", "node[12,01,11,02]", "--json"
    ).document
    assert some["order"] in (
        ["node12", "node11", "node01", "node02"],
        ["node01", "node02", "node12", "node11"],
    )


def test_a_cluster_of_ours_says_rates(command: Command, tmp_path: Path) -> None:
    file, listed = tmp_path / "cluster.yaml", tmp_path / "listed"
    made = command("cluster", "dgx-h100", "--hosts", "4", "--fabric", "fat-tree:4:2", "-o", str(file))
    assert made.status == 0
    ran = command("order", str(file), "--json").document
    # Up from a leaf of two hosts with 400 GB/s each lead 200; a ring of 32 ranks sends 2 * 31 / 32.
    assert ran["best"]["ring_gbps"] == ran["no_order_exceeds"]["ring_gbps"] == pytest.approx(200 / (62 / 32))
    assert ran["no_schedule_exceeds_gbps"] >= ran["best"]["ring_gbps"]
    listed.write_text("a slots=8\nb slots=8\nc slots=8\nd slots=8\n")
    told = command("order", str(file), "--hosts", str(listed))
    assert "best      the order as it is" in told.out
    assert "order     a b c d" in told.out


@pytest.mark.parametrize(
    ("to", "lines"),
    [
        ("hostfile", ["host0 slots=8", "host1 slots=8"]),
        ("slurm", ["host0"] * 8 + ["host1"] * 8),
        (
            "rankfile",
            [f"rank {rank}=host{rank // 8} slot={rank % 8}" for rank in range(16)],
        ),
        (
            "torchrun",
            [f"host{n}: --nnodes 2 --node-rank {n} --master-addr host0" for n in range(2)],
        ),
    ],
)
def test_what_is_written(command: Command, tmp_path: Path, to: str, lines: list[str]) -> None:
    file = tmp_path / "order"
    assert command("order", "dgx-a100:boxes=2", "--to", to, "-o", str(file)).status == 0
    assert file.read_text().splitlines() == lines


def test_a_scheduler_knows_no_ranks_but_who_asks_does(command: Command, tmp_path: Path) -> None:
    """What the list says of a host counts, then `--ranks-per-host`."""
    (tmp_path / "topology.yaml").write_text(SLURM)
    (tmp_path / "listed").write_text("node01 slots=2\nnode02\n")
    asked = ("order", str(tmp_path / "topology.yaml"), "--hosts", str(tmp_path / "listed"), "-o")
    for more, lines in (
        (["--ranks-per-host", "3"], ["node01 slots=2", "node02 slots=3"]),
        (["--to", "slurm"], ["node01", "node01", "node02"]),
    ):
        assert command(*asked, str(tmp_path / "made"), *more).status == 0
        assert (tmp_path / "made").read_text().splitlines() == lines


def test_unlike_hosts_of_a_cluster_are_counted(command: Command, tmp_path: Path) -> None:
    file, some = tmp_path / "unlike.yaml", tmp_path / "some.json"
    assert command("cluster", "dgx1", "dgx1", "dgx-a100", "--nic", "25", "-o", str(file)).status == 0
    assert command("order", str(file), "--json").document["order"] == ["host0", "host1", "host2"]
    some.write_text(command("show", "dgx-a100:boxes=4", "--ranks", "0-3", "--json").out)
    ran = command("order", str(some))
    assert (ran.status, "--hosts or --ranks-per-host must say" in ran.err) == (2, True)


def test_a_ring_of_cables_has_no_trees(command: Command, tmp_path: Path) -> None:
    """Four hosts in a ring: a tree joins hosts that no cable does, and a host that is moved has no way."""
    ran = command("order", "dgx-spark:4", "--ranks-per-host", "1")
    assert (ran.status, "NCCL_ALGO=Ring" in ran.out) == (0, True)
    crossed = command("order", "ring:5", "--hosts", "a,b,c,d,e").out
    assert "best      the order as it is" in crossed
    file = tmp_path / "line.yaml"
    file.write_text(
        "name: line\nranks: 3\nlinks: [{between: [0, 1], bandwidth: 1}, {between: [1, 2], bandwidth: 1}]\n"
    )
    line = command("order", str(file), "--ranks-per-host", "1")
    assert (line.status, "no order has a way from each host to the next" in line.err) == (1, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dgx1"], "dgx1: --hosts or --ranks-per-host must say what its hosts are"),
        (["dgx1", "--ranks-per-host", "3"], "the 2 hosts have 6 ranks, dgx1 has 8"),
        (["dgx1", "--ranks-per-host", "0"], "must be at least 1, got 0"),
        (["dgx1", "--hosts", "a,b,c"], "the 3 hosts have 6 ranks, dgx1 has 8"),
        (["dgx1", "--ranks-per-host", "8"], "an order needs at least two, got 1"),
        (["dgx1", "--hosts", "a,a"], "hosts: each must be named once, got a twice"),
        (["dgx1", "--hosts", "a[1-"], "--hosts: 'a[1-': brackets must close"),
    ],
)
def test_what_is_refused(command: Command, words: list[str], message: str) -> None:
    ran = command("order", *words)
    assert ran.status == 2
    assert re.search(re.escape(message), ran.err), ran.err


def test_hosts_that_the_scheduler_does_not_know(command: Command, tmp_path: Path) -> None:
    (tmp_path / "topology.yaml").write_text(SLURM)
    ran = command("order", str(tmp_path / "topology.yaml"), "--hosts", "node[01-02,77]")
    assert (ran.status, "node77: is no host of" in ran.err) == (2, True)
