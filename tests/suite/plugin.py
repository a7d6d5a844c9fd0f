"""Counts the cases of whole folders for `durations.py`, and measures them with `--measure`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.suite import durations

SPENT = pytest.StashKey[dict[str, Counter[str]]]()
FACTOR = 1.25
"""A folder that is new in `durations.json` may become so much slower."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--measure", action="store_true", help="write what these folders take (make durations)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Count, before `-m` and `-k` leave some out, in folders that are collected in whole."""
    if config.option.measure and config.option.keyword:
        raise pytest.UsageError("--measure is about all cases of a folder: leave -k out")
    home = config.rootpath / "tests"
    asked = [Path(config.invocation_params.dir, it.partition("::")[0]).resolve() for it in config.args]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for found in map(durations.place, items):
        if found is not None and any((home / found[0]).is_relative_to(it) for it in asked):
            counts[found[0]][found[1]] += 1
    config.stash[durations.COUNTS] = dict(counts)
    config.stash[SPENT] = defaultdict(Counter)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    found = durations.place(item) if item.config.option.measure else None
    if found is None:
        return (yield)
    before = durations.processor_seconds()
    result = yield
    # Of a process that ended unnoticed, its time is lost.
    item.config.stash[SPENT][found[0]][found[1]] += max(durations.processor_seconds() - before, 0)
    return result


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if not config.option.measure or session.testsfailed or session.shouldstop:
        return  # what failed or was left out took another time
    known = durations.read()
    for folder, counts in config.stash[durations.COUNTS].items():
        seconds = config.stash[SPENT][folder]
        total = max(round(FACTOR * sum(seconds.values())), 1)
        budget_s = known[folder].budget_s if folder in known else total
        known[folder] = durations.Measured.of(budget_s, counts, seconds)
    durations.write(known)
