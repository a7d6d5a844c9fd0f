"""`examples/check_certificate.py`, which knows nothing of the package, against the package's own verifier."""

from __future__ import annotations

import ast
import copy
import json
import random
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from arborcast import topologies
from arborcast.synth import read_schedule, solve, verify, write_schedule
from arborcast.synth.bounds.layered_flows import with_least_time
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Link, Topology
from tests.verification.conftest import FOREIGN_CHECKER

QUESTIONS = [
    ("dgx1", "allreduce", "partition"),
    ("dgx1", "allgather", "cut"),
    ("dgx1", "alltoall", "dual"),
    ("dgx1", "reduce-scatter", "cut"),
    ("dgx1", "broadcast", "cut"),
    ("dgx-a100", "allreduce", "dual"),
    ("dgx-a100", "scatter", "cut"),
]


SHORT = Link(0, 2, Fraction(3), Fraction(1))  # and no link back


def cable(one: int, other: int, rate: int) -> tuple[Link, Link]:
    link = Link(one, other, Fraction(rate), Fraction(1))
    return link, link.reversed


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    written = []
    for spec, kind, certificate in QUESTIONS:
        schedule = solve(topologies.load(spec), kind)
        timed = with_least_time(schedule.topology, schedule.collective, schedule.bound, 1 << 16)
        path = folder / f"{spec}-{kind}.json"
        write_schedule(replace(schedule, bound=timed), path)
        assert json.loads(path.read_text())["bound"]["certificate"]["kind"] == certificate
        written.append(path)
    assert sum("times" in json.loads(path.read_text())["bound"] for path in written) >= 5
    sparse = Topology.build(
        "sparse", 4, [*cable(0, 1, 10), *cable(1, 2, 5), *cable(2, 3, 20), *cable(3, 0, 8), SHORT]
    )
    written.append(folder / "sparse-allreduce.json")
    write_schedule(solve(sparse, "allreduce"), written[-1])
    assert json.loads(written[-1].read_text())["bound"]["certificate"]["kind"] == "dual"
    for kind, streams in (("allgather", (1,) * 8), ("reduce", (1, None) * 4), ("alltoall", (2,) * 8)):
        fabric = replace(topologies.load("dgx1"), streams=streams, symmetries=())
        schedule = solve(fabric, kind)
        timed = with_least_time(fabric, schedule.collective, schedule.bound, 1 << 16)
        written.append(folder / f"streams-{kind}.json")
        write_schedule(replace(schedule, bound=timed), written[-1])
    return written


def test_it_takes_nothing_but_the_standard_library() -> None:
    imported = [
        node for node in ast.walk(ast.parse(FOREIGN_CHECKER.read_text())) if isinstance(node, ast.Import)
    ]
    others = [
        node.module
        for node in ast.walk(ast.parse(FOREIGN_CHECKER.read_text()))
        if isinstance(node, ast.ImportFrom)
    ]
    names = {alias.name for node in imported for alias in node.names} | set(others)
    assert names <= set(sys.stdlib_module_names)


def test_right_files_are_taken(checker: ModuleType, files: list[Path]) -> None:
    for path in files:
        lines = checker.check(json.loads(path.read_text()))
        assert lines[0].endswith("correct")
        assert len(lines) == 2 + len(json.loads(path.read_text())["bound"].get("times", ()))
    ran = subprocess.run(
        [sys.executable, FOREIGN_CHECKER, files[0]], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_what_it_does_not_know_or_cannot_read_is_no_wrong_file(
    checker: ModuleType, files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    links = [*cable(0, 1, 10), replace(SHORT, dst=1, latency_us=Fraction(9))]
    write_schedule(solve(Topology.build("beside", 2, links), "broadcast"), tmp_path / "beside.json")
    (tmp_path / "nought.json").write_text(files[0].read_text().replace('"rate": "', '"rate": "1/0', 1))
    for name, status, message in (
        ("beside.json", 2, "not known here: parallel links"),
        ("absent.json", 2, "cannot be read: No such file or directory"),
        ("nought.json", 1, "wrong: "),
    ):
        assert checker.main(tmp_path / name) == status
        assert message in capsys.readouterr().err


def leaves(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where numbers, labels and truths stand."""
    if isinstance(value, dict):
        return [leaf for key, each in value.items() for leaf in leaves(each, (*place, key))]
    if isinstance(value, list):
        return [leaf for index, each in enumerate(value) for leaf in leaves(each, (*place, index))]
    return [place]


def tampered(document: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A copy with one leaf changed, or one entry of a list left out or written twice."""
    changed = copy.deepcopy(document)
    part = chance.choice(["bound", "bound", "times", "times", "transfers", "chunks", "rate"])
    start = {"times": ("bound", "times")}.get(part, (part,))
    if part == "times" and "times" not in document["bound"]:
        start = ("bound", "certificate")
    inside: Any = changed
    for key in start:
        inside = inside[key]
    leaf = chance.choice([(*start, *place) for place in leaves(inside)])
    holder: Any = changed
    lists = []
    for key in leaf[:-1]:
        if isinstance(holder[key], list):
            lists.append(holder[key])
        holder = holder[key]
    if lists and chance.random() < 0.3:
        chosen = chance.choice(lists)
        at = chance.randrange(len(chosen))
        chosen[at : at + 1] = [] if chance.random() < 0.7 else [chosen[at]] * 2
        return changed
    was = holder[leaf[-1]]
    if isinstance(was, bool) or was is None:
        holder[leaf[-1]] = not was
    elif isinstance(was, int):
        holder[leaf[-1]] = was + chance.choice((-1, 1, 2))
    elif was[:1].isdigit():
        holder[leaf[-1]] = str(2 * int(was)) if was.isdigit() else f"1{was}"
    else:
        holder[leaf[-1]] = f"{was}x"
    return changed


def refused_here(document: dict[str, Any], path: Path) -> bool:
    path.write_text(json.dumps(document))
    try:
        return not verify(read_schedule(path)).correct
    except InputError:
        return True


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.long)])
def test_tampered_files_are_refused_by_both(
    checker: ModuleType, files: list[Path], tmp_path: Path, count: int
) -> None:
    chance = random.Random(300)
    refused = drawn = 0
    while refused < count:  # some changes do no harm: a rank named twice, tolls in another order
        drawn += 1
        path = chance.choice(files)
        document = tampered(json.loads(path.read_text()), chance)
        here = refused_here(document, tmp_path / path.name)
        there = checker.main(str(tmp_path / path.name)) != 0
        assert there == here, (path.name, document["bound"])
        refused += there
    assert drawn < 1.3 * count
