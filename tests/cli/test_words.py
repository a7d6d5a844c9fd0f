"""How the command speaks: help that fits, options under one name, messages that say what is meant."""

from __future__ import annotations

import json
import logging
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from arborcast import synth
from arborcast.synth.chunks.solvers.solver_child import WorkerDiedError
from arborcast.synth.cli import app as cli
from arborcast.synth.deadline import Deadline, Limit
from arborcast.synth.formats import topology_to_document
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load
from tests.support.commands import Command, refused


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A schedule of two ranks."""
    path = tmp_path / "schedule.json"
    synth.write_schedule(synth.solve(load("ring:3"), "allgather", form="explicit"), path)
    return str(path)


@pytest.mark.parametrize("words", [(), ("bench",), ("--help",), ("-h",), ("bench", "-h")])
def test_help_is_help_and_no_summary_is_cut(words: tuple[str, ...], command: Command) -> None:
    ran = command(*words)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith("Usage: ")
    assert ran.out.count("\n") > 5
    assert "..." not in ran.out.partition("Commands:")[2]


@pytest.mark.parametrize("form", ["yaml", "json", "smi"])
def test_a_topology_is_no_schedule(form: str, command: Command, tmp_path: Path) -> None:
    import yaml

    document = topology_to_document(load("ring:3"))
    text = {
        "yaml": yaml.safe_dump(document),
        "json": json.dumps(document),
        "smi": "        GPU0    GPU1\nGPU0     X      NV1\nGPU1    NV1      X\n",
    }[form]
    path = tmp_path / f"fabric.{form}"
    path.write_text(text)
    for name in ("verify", "simulate", "program"):
        refused(command(name, str(path)), f"{path}: must be a schedule", "got a topology")


def test_old_names_of_options_are_understood_and_not_shown(
    command: Command,
    file: str,
    tmp_path: Path,
) -> None:
    for words in (("show", "ring:3"), ("simulate", file, "--sizes", "1KiB")):
        for name in ("--picture", "-o", "--output"):
            drawn = tmp_path / f"{words[0]}{name}.svg"
            assert command(*words, name, str(drawn)).status == 0
            assert drawn.read_text().lstrip().startswith("<?xml")
        assert "--output" not in command(words[0], "--help").out
    assert "--size " not in command("run", "--help").out


@pytest.mark.parametrize("name", ["solve", "pareto"])
def test_no_deadline_unless_one_is_given(
    name: str,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[float | None] = []

    def noted(*asked: Any, deadline_s: Limit = None, **_: Any) -> None:
        given.append(Deadline.after(asked[2].deadline_s if name == "solve" else deadline_s).allowed_s)
        raise synth.TimedOutError("noted")

    if name == "solve":
        monkeypatch.setattr("arborcast.synth.packing.tree_solver.solve_by_trees", noted)
    else:
        monkeypatch.setattr(synth, "pareto", noted)
    assert command(name, "ring:3", "allgather").status == 3
    assert command(name, "ring:3", "allgather", "--deadline", "7").status == 3
    assert given == [None, 7.0]


def test_verbose_tells_how_far_work_has_come(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    words = ("pareto", "ring:4", "allgather", "--no-cache", "--json")
    assert command(*words).status == 0
    assert not caplog.records
    ran = command(*words, "-v")
    assert ran.status == 0
    assert ran.document["frontier"]
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "frontier of allgather on ring:4"
    assert any("steps" in line for line in told)
    assert logging.getLogger("synth").level == logging.NOTSET


def test_quiet_leaves_errors(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("arborcast.synth.topology")
    from arborcast.synth.cli.console import speaking

    with speaking(verbose=False, quiet=True):
        log.warning("a warning")
    log.warning("another")
    assert [record.getMessage() for record in caplog.records] == ["another"]


def test_the_cache_is_shown_and_cleared(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ARBORCAST_CACHE", str(tmp_path))
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "one.json").write_text("12345")
    (tmp_path / "notes.txt").write_text("of somebody")
    shown = command("cache", "--json").document
    assert (shown["folder"], shown["cleared"]) == (str(tmp_path), False)
    assert shown["parts"]["tables"] == {"files": 1, "bytes": 5}
    assert str(tmp_path) in command("cache").out
    assert (tmp_path / "tables" / "one.json").exists()
    assert command("cache", "clear").status == 0
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert command("cache", "where", "--json").document["parts"]["tables"] == {"files": 0, "bytes": 0}


def test_every_command_says_json_verbose_and_help() -> None:
    import typer

    group = typer.main.get_command(cli.app)
    for name, one in {**group.commands, **group.commands["bench"].commands}.items():  # type: ignore[attr-defined]
        if name == "bench":
            continue
        options = {option for parameter in one.params for option in parameter.opts}
        assert {"--json", "-v", "-q"} <= options, name


def test_a_solver_without_memory_is_not_called_late(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(*_: object, **__: object) -> None:
        raise WorkerDiedError("CaDiCaL: needed more memory than it was allowed")

    monkeypatch.setattr("arborcast.synth.chunks.solvers.search.run_portfolio", die)
    size = ("--chunks", "2", "--steps", "2", "--rounds", "3")
    ran = command("solve", "dgx1", "allgather", "--method", "sat", *size, "--no-cache", "--json")
    assert ran.status == 3
    assert (ran.document["timed_out"], ran.document["solver_died"]) == (False, True)
    assert "needed more memory" in ran.document["why"]


def test_a_time_that_only_limits_trees_says_so(command: Command, tmp_path: Path) -> None:
    """Lengths of this fabric that are not the same both ways prove its rate, which is of trees alone."""
    links = [
        Link(a, b, Fraction(rate)) for a, b, rate in ((0, 1, 4), (1, 3, 3), (2, 0, 2), (3, 1, 1), (3, 2, 4))
    ]
    fabric, schedule = str(tmp_path / "fabric.json"), str(tmp_path / "schedule.json")
    Path(fabric).write_text(json.dumps(topology_to_document(Topology.build("one-way", 4, links))))
    asked = (fabric, "allreduce", "--size", "1MiB")
    assert "every schedule along trees takes at least" in command("solve", *asked, "-o", schedule).out
    assert "us simulated for every schedule along trees;" in command("explain", *asked).out
    sizes = ("--sizes", "1MiB")
    assert "no less than: of every schedule along trees" in command("simulate", schedule, *sizes).out
    assert (
        '"scope": "schedules that reduce and broadcast' in command("simulate", schedule, *sizes, "--json").out
    )
    assert "along trees" not in command("explain", "ring:3", *asked[1:]).out
