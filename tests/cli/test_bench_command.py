"""`synth bench` as a user runs it: its JSON, and what it needs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from arborcast.bench.fragments import RESULTS
from tests.support.commands import Command, refused


def test_every_question_takes_json(command: Command, tmp_path: Path) -> None:
    ran = command("bench", "compare", str(RESULTS), str(RESULTS), "--json")
    assert (ran.status, ran.err, ran.document["worse"], ran.document["only_in"]) == (0, "", False, {})
    assert ran.document["files"][RESULTS.name]["unchanged"] > 0

    small = ("fragments", "ring:3", "broadcast", "--rates", "datasheet", "--json")
    ran = command("bench", *small, "-o", str(tmp_path / "found.json"))
    assert (ran.status, ran.err, ran.document["file"]) == (0, "", str(tmp_path / "found.json"))
    assert json.loads((tmp_path / "found.json").read_text())["rows"]


def test_a_report_without_its_packages_says_what_to_install(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    ran = command("bench", "report", str(RESULTS.parent), "-o", str(tmp_path / "page.html"))
    refused(ran, "report: needs jinja2; install it with: pip install 'arborcast[bench]'")


def test_a_report_refuses_results_without_their_commit(command: Command, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "ddp.json").write_text('{"question": "?", "rows": []}')
    page = tmp_path / "page.html"
    assert command("bench", "report", str(tmp_path / "results"), "-o", str(page)).status == 0
    assert "ddp.json</code> was measured at a commit that was not recorded" in page.read_text()
