"""The record of `make test-all`, in a drawn repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.suite import all_passed
from tests.suite.all_passed import MOST, git, judged, record


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A repository with a product of 100 lines."""
    for folder in all_passed.PRODUCT:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "code.py").write_text("a line\n" * 20)
    git("init", "-q", home=tmp_path)
    commit(tmp_path)
    return tmp_path


def commit(home: Path) -> None:
    git("add", ".", home=home)
    author = ("-c", "user.name=drawn", "-c", "user.email=drawn@example.org", "-c", "commit.gpgsign=false")
    git(*author, "commit", "-qm", "drawn", home=home)


def test_without_a_record_nothing_is_refused(home: Path) -> None:
    assert judged(home, home / "none.json") == (0, "make test-all: no run is recorded yet")


def test_a_run_that_passed_counts_until_too_much_has_changed(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "passed.json"
    assert record(0, home, file) == "recorded in passed.json: commit it"
    assert judged(home, file)[1].endswith(", 0 changed lines ago")
    git("mv", "synth/code.py", "synth/moved.py", home=home)
    (home / "elsewhere.py").write_text("a line\n" * 2 * MOST)
    commit(home)
    assert judged(home, file)[1].endswith(", 0 changed lines ago")
    (home / "backends" / "code.py").write_text("another\n" * (MOST - 20))
    assert judged(home, file)[0] == 0
    (home / "pipeline" / "code.py").write_text("a line\n" * 21)
    status, said = judged(home, file)
    assert status == 1
    assert "2,001 lines of the product have changed since, the rule is at most 2,000" in said


def test_a_run_that_failed_is_told(home: Path, tmp_path: Path) -> None:
    record(1, home, file := tmp_path / "passed.json")
    assert judged(home, file) == (
        1,
        f"make test-all failed at {git('rev-parse', 'HEAD', home=home)[:12]}: mend it and run it again",
    )


def test_a_run_of_no_commit_is_not_recorded(home: Path, tmp_path: Path) -> None:
    (home / "synth" / "code.py").write_text("another\n")
    assert record(0, home, tmp_path / "passed.json") == "not recorded: the checkout is not at a commit"
    assert not (tmp_path / "passed.json").exists()


def test_a_commit_that_is_not_here_is_told(home: Path, tmp_path: Path) -> None:
    (file := tmp_path / "passed.json").write_text(json.dumps({"commit": "f" * 40, "passed": True}))
    status, said = judged(home, file)
    assert status == 1
    assert "which this checkout lacks: " in said
