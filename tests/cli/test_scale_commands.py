"""The commands about large fabrics, faults and groups: what they refuse, what they say without an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from arborcast.synth.errors import TimedOutError
from arborcast.synth.formats import read_explicit
from tests.support.commands import Command, refused

FABRIC = """
name: branch
ranks: 4
switches: [s]
links:
  - {between: [0, s], bandwidth: 1}
  - {between: [s, 1], bandwidth: 1}
  - {between: [1, 2], bandwidth: 1}
  - {between: [2, 3], bandwidth: 1}
  - {between: [3, 0], bandwidth: 1}
"""


@pytest.fixture
def solved(command: Command, tmp_path: Path) -> str:
    """A schedule file of an allgather on four ranks and a switch."""
    (tmp_path / "branch.yaml").write_text(FABRIC)
    file = str(tmp_path / "branch.json")
    assert command("solve", str(tmp_path / "branch.yaml"), "allgather", "-o", file).status == 0
    return file


def test_where_nothing_can_be_repaired_the_cut_is_of_what_is_left(command: Command, solved: str) -> None:
    ran = command("repair", solved, "--without-rank", "3", "--without-link", "1-2", "--json")
    assert ran.status == 1
    # Ranks 0, 1, 2 and the switch are left; rank 2 is on its own.
    assert ran.document["certificate"]["certificate"] == {"kind": "cut", "side": [0, 1, "s"], "capacity": "0"}


def test_a_repair_out_of_time_leaves_the_best_it_found(
    command: Command, solved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = read_explicit(solved)

    def late(*_: object, **__: object) -> None:
        raise TimedOutError("the deadline passed", best)

    monkeypatch.setattr("arborcast.synth.faults.repair.repaired", late)
    output = tmp_path / "repaired.json"
    ran = command("repair", solved, "--without-link", "1-2", "-o", str(output), "--json")
    assert (ran.status, ran.document["timed_out"], ran.document["rate"]) == (3, True, str(best.rate))
    assert read_explicit(output) == best


def test_faults_are_named_wherever_a_fabric_is(command: Command) -> None:
    ran = command("groups", "ring:4", "--group", "allgather:0-2", "--without-rank", "3", "--json")
    # A line of three ranks: what enters its end is 2/3 of the buffer, over one link of 1 GB/s.
    assert (ran.status, ran.document["groups"][0]["rate"]) == (0, "3/2")
    ran = command("pareto", "ring:3", "allgather", "--without-link", "0-2", "--json")
    assert [(point["steps"], point["rounds"]) for point in ran.document["frontier"]] == [(2, 2)]


def test_a_large_fabric_with_a_fault_is_solved_from_the_healthy_one(command: Command) -> None:
    words = ("solve", "torus:9x9", "allgather", "--without-link", "0-1", "--json")
    found = command(*words).document
    assert found["optimal"] is True
    assert "on old trees" in found["settings"]["repaired"]
    anew = command(*words, "--form", "explicit").document
    assert (anew["rate"], "repaired" in anew["settings"]) == (found["rate"], False)


def test_a_large_file_is_not_run_here_and_not_written_out_beyond_reading(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "large.json")
    assert command("solve", "torus:12x12", "allgather", "-o", file).status == 0
    refused(command("run", file), "at most 128 ranks are run on one machine, got 144")
    monkeypatch.setattr("arborcast.synth.cli.schedule_files.MOST_EXPANDED", 1000)
    # Four trees of 143 edges for each of 144 ranks.
    refused(
        command("expand", file, "-o", str(tmp_path / "full.json")),
        "at most 1000 transfers are written out, got",
    )
    assert not (tmp_path / "full.json").exists()
