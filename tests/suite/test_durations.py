"""Folders keep to their budgets, and the judge of them is right about drawn ones."""

from __future__ import annotations

import multiprocessing
import re
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.suite import durations
from tests.suite.durations import CHANGED, COUNTS, REST, Measured, objection, processor_seconds, read, write

HOME = Path(__file__).parents[1]
FOLDERS = sorted({it.relative_to(HOME).parts[0] for it in HOME.glob("*/**/test_*.py")})
WHOLE_S = 2 * 8 * 60
"""Of processors: `make test` on two, in eight minutes."""

MEASURED = Measured(30, {"test_a.py::test_slow": (2, 20.0), REST: (18, 1.8)})
COUNTED = {"test_a.py::test_slow": 2, "test_a.py::test_quick": 10, "test_b.py::test_quick": 8}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_keeps_to_its_budget(folder: str, request: pytest.FixtureRequest) -> None:
    counts = request.config.stash[COUNTS].get(folder)
    if counts is None:
        pytest.skip("only part of the folder was collected")
    if request.config.option.measure or not durations.FILE.exists():
        pytest.skip("nothing is measured yet: make durations")
    if said := objection(folder, read().get(folder), counts):
        pytest.fail(said, pytrace=False)


def test_all_budgets_together_are_those_of_make_test() -> None:
    assert sum(it.budget_s for it in read().values()) <= WHOLE_S


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({}, ""),
        ({"test_a.py::test_new": 4}, ""),  # a fifth of 20
        ({"test_a.py::test_new": 5}, "25% of its cases are others than were measured: run `make durations"),
        ({"test_a.py::test_quick": 0}, "50% of its cases are others"),
        (
            {"test_a.py::test_slow": 3},
            "21 cases take 32 processor seconds, .* is 30; most take test_a.py::test_slow",
        ),
    ],
)
def test_a_folder_fails_over_its_budget_or_when_its_figures_are_of_other_cases(
    counts: dict[str, int], said: str
) -> None:
    found = objection("drawn", MEASURED, COUNTED | counts)
    assert re.search(said, found) if said else not found


def test_a_folder_without_figures_is_refused() -> None:
    assert objection("drawn", None, COUNTED).startswith("tests/drawn was never measured: run `make durations")


def test_what_was_measured_is_read_back(tmp_path: Path) -> None:
    seconds = {"test_a.py::test_slow": 20.0, "test_a.py::test_quick": 0.8, "test_b.py::test_quick": 0.7}
    measured = Measured.of(30, COUNTED, Counter(seconds))
    assert measured == Measured(30, {"test_a.py::test_slow": (2, 20.0), REST: (18, 1.5)})
    assert measured.seconds(COUNTED) == pytest.approx(21.5)
    assert measured.changed(COUNTED) == 0 < CHANGED
    write({"drawn": measured, "empty": Measured.of(1, {}, {})}, file := tmp_path / "durations.json")
    assert read(file) == {"drawn": measured, "empty": Measured(1, {REST: (0, 0)})}


def burn(ready: Connection) -> None:
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    ready.send(None)
    ready.poll(None)


def test_processor_seconds_count_children_that_live_and_that_ended() -> None:
    before = processor_seconds()
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=burn, args=(theirs,))
    child.start()
    ours.recv()
    alive = processor_seconds()
    ours.send(None)
    child.join()
    for now in (alive, processor_seconds()):
        assert now - before >= 0.25
