"""The benchmark of frontiers, and what SCCL's tool is asked: rows hold what readers rely on."""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path

import pytest

from arborcast import topologies
from arborcast.bench.adapters import sccl
from arborcast.bench.adapters.answer import CannotAskError
from arborcast.bench.harness.processes import run
from arborcast.synth.collective import Collective
from tests.support.waiting import PATIENCE_S


def test_its_dgx1_is_ours_renumbered() -> None:
    """The pairs that it joins by two links, from the comment in its description; the others have one."""
    ranks = sccl.DGX1_RANKS
    double = [(0, 1), (1, 3), (3, 2), (4, 5), (5, 7), (7, 6), (0, 4), (2, 6)]
    single = [(0, 2), (0, 3), (1, 2), (1, 5), (3, 7), (4, 6), (4, 7), (5, 6)]
    theirs = {frozenset(pair): 2 for pair in double} | {frozenset(pair): 1 for pair in single}
    topology = topologies.load("dgx1")
    ours = {
        frozenset((ranks[link.src], ranks[link.dst])): capacity
        for link, capacity in zip(topology.links, topology.capacities, strict=True)
    }
    assert ours == theirs
    assert sorted(ranks) == list(range(8))


def test_questions_are_asked_by_name_or_by_a_file(tmp_path: Path) -> None:
    dgx1 = topologies.load("dgx1")
    gather = Collective.on(dgx1, "gather", root=3)
    assert sccl.arguments_of(dgx1, gather, tmp_path) == ["DGX1", "Gather", "--root", "1"]
    assert not list(tmp_path.iterdir())
    ring = topologies.load("ring:3").reversed()
    arguments = sccl.arguments_of(ring, Collective.on(ring, "allgather"), tmp_path)
    assert arguments == ["custom", "--topology-file", str(tmp_path / "topology.json"), "Allgather"]
    document = json.loads((tmp_path / "topology.json").read_text())
    assert document["links"] == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]


def test_what_it_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    star = topologies.load("dgx-a100")
    with pytest.raises(CannotAskError, match="topologies without switches only"):
        sccl.arguments_of(star, Collective.on(star, "allgather"), tmp_path)
    ring = topologies.load("ring:4")
    with pytest.raises(CannotAskError, match="among all ranks only"):
        sccl.arguments_of(ring, Collective.on(ring, "allgather", ranks=[0, 1, 2]), tmp_path)


def test_children_end_with_the_process_that_is_stopped(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    child = f"import signal; file = open({str(pipe)!r}, 'w', 1); print('here', file=file); signal.pause()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    for limit_s in (1, 4, 16, 64):  # until the child has come so far
        assert run([sys.executable, "-c", parent], limit_s).timed_out
        if select.select([reading], [], [], 0)[0] and os.read(reading, 5):
            break
    else:
        pytest.fail("the child did not start")
    # Nothing and nobody else holds the other end: what remains to be read is the end.
    assert select.select([reading], [], [], PATIENCE_S)[0]
    assert os.read(reading, 1) == b""
    os.close(reading)
