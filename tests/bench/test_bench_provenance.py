"""Which code gave figures: recorded in results files, and compared with what the code is today."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from arborcast.bench.harness.provenance import doubts, provenance


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, path: str, text: str) -> str:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    git(folder, "add", path)
    git(folder, "commit", "-q", "-m", path)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    commit(tmp_path, "synth/rate.py", "1")
    commit(tmp_path, "backends/dataflow/engine.py", "1")
    return tmp_path


def test_figures_of_todays_code_are_not_doubted(checkout: Path) -> None:
    code = provenance(["synth"], checkout)
    assert code == {"folders": ["synth"], "commit": git(checkout, "rev-parse", "HEAD"), "dirty": False}
    assert doubts({"code": code}, checkout) == ""


def test_commits_to_the_code_that_figures_depend_on_make_them_old(checkout: Path) -> None:
    code = provenance(["synth"], checkout)
    commit(checkout, "backends/dataflow/engine.py", "2")
    assert doubts({"code": code}, checkout) == ""
    commit(checkout, "synth/rate.py", "2")
    commit(checkout, "synth/rate.py", "3")
    measured = code["commit"][:9]
    assert doubts({"code": code}, checkout) == f"older than the code: 2 commits to synth since {measured}"


def test_uncommitted_changes_are_recorded_where_figures_depend_on_them(checkout: Path) -> None:
    (checkout / "backends" / "dataflow" / "engine.py").write_text("2")
    assert provenance(["synth"], checkout)["dirty"] is False
    code = provenance(["synth", "backends"], checkout)
    assert code["dirty"] is True
    assert doubts({"code": code}, checkout) == f"measured with uncommitted changes on {code['commit'][:9]}"


def test_what_is_not_known_is_said(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert doubts({}, checkout) == "measured at a commit that was not recorded"
    elsewhere = {"code": {"folders": ["synth"], "commit": "0" * 40, "dirty": False}}
    assert doubts(elsewhere, checkout) == "measured at 000000000, which this history does not have"
    outside = tmp_path_factory.mktemp("outside")
    assert provenance(["synth"], outside) == {"folders": ["synth"], "commit": None, "dirty": None}
    assert doubts(elsewhere, outside) == ""
