"""The history of figures: each commit's results, read from git as they were then."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from arborcast.bench.history import rows
from arborcast.bench.page import history
from arborcast.bench.page.render import part_html
from arborcast.bench.page.results import Document
from arborcast.synth.errors import InputError

CANNED = Path(__file__).parents[1] / "canned_results"


def commit(home: Path, message: str) -> str:
    for words in (["add", "-A"], ["commit", "-q", "-m", message]):
        identity = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(home), *identity, *words], check=True)
    done = subprocess.run(
        ["git", "-C", str(home), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()[:9]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    for name in ("testbed", "synthesis"):
        shutil.copy(CANNED / f"{name}.json", folder)
    return tmp_path


def change(home: Path, name: str, row: dict[str, Any]) -> None:
    path = home / "bench" / "results" / f"{name}.json"
    found = json.loads(path.read_text())
    found["rows"].append(row)
    path.write_text(json.dumps(found))


def test_figures_stand_at_the_commits_that_changed_them(home: Path) -> None:
    first = commit(home, "both")
    change(home, "synthesis", {"title": "slow", "method": "trees", "ranks": 10**6, "seconds": 77.0})
    second = commit(home, "a larger machine")
    (home / "elsewhere").write_text("no results")
    commit(home, "something else")
    change(home, "testbed", {"topology": "no method, no time"})
    commit(home, "no other figure")
    found = list(rows(home))
    assert {row["commit"] for row in found} == {first, second}
    assert {row["measure"] for row in found if row["commit"] == first} >= {
        "links",
        "first",
        "last",
        "targets",
    }
    (last,) = [row for row in found if row["commit"] == second]
    assert (last["measure"], last["value"]) == ("last", 77.0)


def test_without_a_history_the_reason_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"git log: .*not a git repository"):
        list(rows(tmp_path))


def test_the_section_draws_what_the_headline_still_has() -> None:
    document = Document("history", json.loads((CANNED / "history.json").read_text()))
    drawn = "".join(map(part_html, history.SECTION.answer(document)))
    assert drawn.count("<svg") == 2
    assert "<title>2026-01-03 bbbbbbbb2: 1.50×</title>" in drawn
    assert "of a report of old" not in drawn
    assert "All 3 changes" in drawn
