"""The bench of tensors on a device: what is compared, and a small run where root and iproute2 are."""

from __future__ import annotations

import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")

from arborcast import topologies
from arborcast.backends.staging.device import CopyCosts
from arborcast.backends.staging.ring import Ring
from arborcast.bench import staging
from arborcast.bench.emulation.delivery import delivered
from arborcast.bench.emulation.machine import why_not
from arborcast.bench.harness.document import read_document
from arborcast.synth.api import solve
from arborcast.synth.schedule import Schedule

KIB = 1 << 10
WHY_NOT = why_not()


def test_every_number_of_buffers_and_every_size_of_one_is_compared_once() -> None:
    schedule = solve(topologies.load("star:3"), "allreduce", method="trees")
    assert isinstance(schedule, Schedule)
    found = list(staging.entries(schedule, 256 * KIB, CopyCosts(Fraction(1), Fraction(5)), [64 * KIB]))
    assert [each.method for each in found[:3]] == ["host memory", "whole tensors", "chosen"]
    assert [found[0].contender.copies, found[1].columns["buffers"]] == [None, None]
    assert len({each.contender.name for each in found}) == len(found)
    rings = {each.method: each.contender.copies for each in found if each.buffer_bytes == 64 * KIB}
    assert {copies.ring for copies in rings.values() if copies} >= {Ring(4, 1), Ring(4, 2), Ring(4, 4)}
    assert "8 buffers" not in rings  # there are only four pieces
    for each in found[3:]:
        assert each.method == f"{each.columns['buffers']} buffer" + "s" * (each.columns["buffers"] > 1)


@pytest.mark.long
@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_a_small_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks: every element is checked in it, and the file holds what was found."""
    monkeypatch.setattr(staging, "delivered", partial(delivered, seconds=0.02, settle_s=0.02, passes=1))
    monkeypatch.setattr(staging, "check_delivery", lambda *_: None)
    out = tmp_path / "results" / "staging.json"
    words = "--topology star:2 --mbit 100 --copies 1 --sizes 256KiB --buffers 64KiB --runs 1 --json"
    monkeypatch.setattr(sys, "argv", ["staging.py", *words.split(), str(out)])
    staging.main()
    rows = read_document(out)["rows"]
    assert {row["method"] for row in rows} >= {"host memory", "whole tensors", "chosen", "1 buffer"}
    for row in rows:
        assert (row["topology"], row["bytes"], row["runs"]) == ("star:2", 256 * KIB, 1)
        assert row["copies_over_link"] == 1 and row["time_us"] > 0
    assert "256 KiB, copies at 1 of the link: whole tensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--runs 2", "--runs 2: kept results need at least 5; or say --json PATH"),
        ("--copies 0", "--copies and --mbit must be positive"),
    ],
)
def test_bad_words(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["staging.py", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        staging.main()
    assert message in capsys.readouterr().err
