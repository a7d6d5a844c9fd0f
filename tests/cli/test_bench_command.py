"""`synth bench` as a user runs it: what it refuses before any time is spent, and its JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from arborcast.bench.fragments import RESULTS
from arborcast.synth.cli import app as cli


def ran(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    """Status, standard output and standard error of a command run in this process."""
    monkeypatch.setattr(sys, "argv", ["synth", "bench", *words])
    capsys.readouterr()
    status = cli._status()
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.parametrize("command", ["sweep", "testbed", "peers"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("allred",), "collective allred: a benchmark needs one of broadcast, reduce, allgather"),
        (("mine.yaml",), "collective mine.yaml: a benchmark needs one of broadcast, reduce, allgather"),
        (("allreduce", "--root", "2"), "--root 2: allreduce has no root"),
    ],
)
def test_collectives_are_asked_for_by_name_and_have_the_root_that_fits(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    words: tuple[str, ...],
    message: str,
) -> None:
    status, out, err = ran(monkeypatch, capsys, command, "ring:4", *words)
    assert (status, out) == (2, "")
    assert err.startswith(f"synth: {message}") and err.count("\n") == 1


def test_every_question_takes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, err = ran(monkeypatch, capsys, "compare", str(RESULTS), str(RESULTS), "--json")
    found = json.loads(out)
    assert (status, err, found["worse"], found["only_in"]) == (0, "", False, {})
    assert found["files"][RESULTS.name]["unchanged"] > 0

    small = ("fragments", "ring:3", "broadcast", "--rates", "datasheet", "--json")
    status, out, err = ran(monkeypatch, capsys, *small, "-o", str(tmp_path / "found.json"))
    assert (status, err, json.loads(out)["file"]) == (0, "", str(tmp_path / "found.json"))
    assert len(out.splitlines()) == 1 and json.loads((tmp_path / "found.json").read_text())["rows"]


def test_a_box_without_nccl_rates_is_told_what_to_take_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = ran(monkeypatch, capsys, "fragments", "ring:4,bandwidth=10")
    assert (status, out) == (2, "")
    assert err == (
        "synth: ring: has no nccl rates, its links have what bandwidth= says; take rates datasheet\n"
    )


def test_a_report_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("arborcast.bench.page", "arborcast.bench.report"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pandas", None)
    status, out, err = ran(
        monkeypatch, capsys, "report", str(RESULTS.parent), "-o", str(tmp_path / "page.html")
    )
    assert (status, out) == (2, "")
    assert err == "synth: report: needs pandas; install it with: pip install 'arborcast[bench]'\n"
