"""How hypothesis draws: the same examples every time in `make test`, more and new ones in `make test-all`.

Beside it the fixture that many folders share, and what is left out where torch is not installed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Generator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings

if TYPE_CHECKING:
    from tests.support.commands import Command

# No test may depend on the speed of the machine, hence no deadline and no complaint about slow drawing.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Whether an example fails is all that mutation testing asks (tests/mutants.py).
settings.register_profile("mutants", settings.get_profile("steady"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("steady")


pytest_plugins = ("tests.suite.plugin", "tests.suite.examples")

HAS_TORCH = find_spec("torch") is not None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file that cannot be imported without torch is skipped where there is none."""
    report = yield
    said = str(report.longrepr).splitlines()
    if report.failed and not HAS_TORCH and "ModuleNotFoundError" in said[-1] and "torch" in said[-1]:
        report.outcome, report.longrepr = "skipped", (report.nodeid, 0, "Skipped: could not import 'torch'")
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the suite leaves out with whole files that need torch: pytest counts a file as one test."""
    skipped = [it for it in terminalreporter.stats.get("skipped", []) if isinstance(it, pytest.CollectReport)]
    files = {it.nodeid for it in skipped if "could not import 'torch'" in str(it.longrepr)}
    trees = (ast.parse((terminalreporter.config.rootpath / file).read_text("utf-8")) for file in files)
    tests = sum(
        isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        for tree in trees
        for node in ast.walk(tree)
    )
    if files:
        terminalreporter.write_line(
            f"{tests:,} test functions in {len(files):,} files left out: torch is not installed", yellow=True
        )


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Machine code is kept in one place for all tests, whose own caches would have it compiled in each."""
    from arborcast.synth.kernels.compiled import kernel_folder

    kernel_folder()


@pytest.fixture(scope="session", autouse=True)
def solvers(kernels: None) -> None:
    """Processes that solve are forked from one that has imported what they need."""
    from tests.support.forked_solvers import fork_solvers, server

    fork_solvers(server())


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `synth` in this process."""
    from arborcast.synth.cli import app
    from tests.support.commands import Said

    def run(*words: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["synth", *words])
        capsys.readouterr()
        status = app._status()
        said = capsys.readouterr()
        return Said(status, said.out, said.err)

    return run


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of schedules on local processes need not import torch anew, each for two seconds."""
    from tests.support.forked_workers import forks_workers

    forks_workers(monkeypatch)
