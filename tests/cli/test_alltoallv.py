"""`synth alltoallv`: a matrix from a file, planned, proved, written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arborcast import synth
from tests.support.commands import Command, refused
from tests.support.refusals import refuses


@pytest.mark.parametrize(
    ("name", "text"), [("m.csv", "0,8,0\n0,0,0\n2,0,0\n"), ("m.json", "[[0,8,0],[0,0,0],[2,0,0]]")]
)
def test_a_matrix_from_a_file(command: Command, tmp_path: Path, name: str, text: str) -> None:
    matrix, schedule = tmp_path / name, tmp_path / "plan.json"
    matrix.write_text(text)
    said = command("alltoallv", "ring:3,bandwidth=2", str(matrix), "-o", str(schedule), "--json")
    assert said.status == 0, said.err
    document = json.loads(said.out)
    # 8 bytes leave rank 0 over two links of 2 GB/s.
    assert (document["optimal"], document["gap"], document["links_us"]) == (True, "0", 0.002)
    assert document["limit_us"] == document["links_us"] < document["pairwise_us"]
    assert synth.verify(synth.read_schedule(schedule)).correct
    words = command("alltoallv", "ring:3,bandwidth=2", str(matrix)).out
    assert "optimal: equal to the bound" in words
    assert "0.002 us busiest link" in words


@refuses("text", "message")
def test_what_is_no_matrix(command: Command, tmp_path: Path, text: str, message: str) -> None:
    matrix = tmp_path / "m.csv"
    matrix.write_text(text)
    refused(command("alltoallv", "ring:3", str(matrix)), message)


def test_other_commands_say_what_they_cannot_do(command: Command, tmp_path: Path) -> None:
    matrix, schedule = tmp_path / "m.csv", tmp_path / "plan.json"
    matrix.write_text("0,8,0\n0,0,0\n2,0,0\n")
    assert command("alltoallv", "ring:3", str(matrix), "-o", str(schedule)).status == 0
    assert command("simulate", str(schedule), "--sizes", "1KiB").status == 0
    for words in (("run", str(schedule)), ("export", str(schedule), "-o", str(tmp_path / "x.xml"))):
        refused(command(*words), "its blocks differ in size")
