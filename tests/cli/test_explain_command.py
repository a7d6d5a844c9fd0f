"""`synth explain` as a user runs it: what NCCL does by its model, what is possible, what to do about it."""

from __future__ import annotations

import shlex
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from arborcast import synth, topologies
from arborcast.synth.formats.words import gigabytes
from tests.support.commands import Command

DEALT = """
name: 4 x one
ranks: 4
switches: [left, right, core]
links:
  - {between: [0, left], bandwidth: 50}
  - {between: [1, right], bandwidth: 50}
  - {between: [2, left], bandwidth: 50}
  - {between: [3, right], bandwidth: 50}
  - {between: [left, core], bandwidth: 25}
  - {between: [right, core], bandwidth: 25}
"""
SQUARE = """
name: square-with-a-diagonal
ranks: 4
links:
  - {between: [0, 1], bandwidth: 25}
  - {between: [1, 2], bandwidth: 25}
  - {between: [2, 3], bandwidth: 25}
  - {between: [3, 0], bandwidth: 25}
  - {between: [0, 2], bandwidth: 25}
"""


def test_a_fragment_is_explained_and_its_advice_works(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("square.yaml").write_text(SQUARE)
    words = ("explain", "square.yaml", "allreduce", "--size", "16MiB")
    told = command(*words, "--picture", "idle.svg")
    assert told.status == 0, told.err
    assert "NCCL itself was not run" in told.out
    assert b"carries nothing" in (tmp_path / "idle.svg").read_bytes()
    found = command(*words, "--json").document
    few = topologies.load("square.yaml")
    rings = synth.solve(few, "allreduce", method="multiring")
    carried: Counter[tuple[int, int]] = Counter()
    for transfer in rings.transfers:
        carried[transfer.src, transfer.dst] += rings.chunks[transfer.chunk].share
    idle = {tuple(hop) for hop in found["rings"]["idle"]}
    assert idle == set(few.bandwidth) - set(carried) == {(0, 2), (2, 0)}
    used = sum(carried.values()) * rings.rate / sum(few.bandwidth.values())
    assert found["rings"]["used"] == pytest.approx(float(used))
    assert Fraction(found["limit"]) == synth.bound(few, "allreduce").rate
    assert found["least_us"] <= found["best"]["time_us"] < found["rings"]["time_us"]
    chosen, *others = found["nccl"]["rows"]
    assert {row["method"] for row in (chosen, *others)} == {"nccl-ring-model", "nccl-tree-model"}
    assert all(chosen["time_us"] <= row["time_us"] for row in others)
    assert [it["what"] for it in found["advice"]] == ["graph", "schedule"]
    for line in (line for it in found["advice"] for line in it["commands"]):
        assert line in told.out
        name, *rest = shlex.split(line, comments=True)
        if name == "synth":
            ran = command(*rest)
            assert ran.status == 0, ran.err
    assert "<graphs" in (tmp_path / "graph.xml").read_text()
    assert synth.simulate(synth.read_schedule("fast.json"), 16 << 20).time_us == found["best"]["time_us"]


def test_what_has_no_ring_is_said_to_have_none(command: Command) -> None:
    ran = command("explain", "mesh:1x4", "allreduce", "--json").document
    assert ran["rings"] is None and ran["nccl"]["rows"] == []
    assert "ring" in ran["unknown"]["rings"]
    assert [it["what"] for it in ran["advice"]] == ["schedule"]


def test_other_collectives_are_beyond_the_model(command: Command) -> None:
    ran = command("explain", "ring:4", "broadcast", "--root", "2")
    assert "its model knows nothing of this: broadcast: the NCCL model covers only" in ran.out


def test_hosts_that_a_scheduler_dealt_out_are_to_be_ordered(command: Command, tmp_path: Path) -> None:
    """Each host's neighbour in the list hangs under the other leaf: four messages cross where two do."""
    file = tmp_path / "dealt out.yaml"
    file.write_text(DEALT)
    advice = command("explain", str(file), "allreduce", "--no-in-network", "--json").document["advice"]
    assert advice[0]["what"] == "order"
    assert advice[0]["commands"] == [f"synth order '{file}' -o hosts"]
    ordered = command("order", str(file), "--json").document
    assert gigabytes(Fraction(ordered["best"]["ring_gbps"]).limit_denominator(100)) in advice[0]["gain"]
    again = tmp_path / "ordered.yaml"
    again.write_text(DEALT.replace("[1, right]", "[1, left]").replace("[2, left]", "[2, right]"))
    later = command("explain", str(again), "allreduce", "--json").document["advice"]
    assert "order" not in [it["what"] for it in later]
