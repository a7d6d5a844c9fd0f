"""Judges of programs: those that die or hang, and what they are asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from arborcast.backends.programs import sccl
from arborcast.backends.programs.program import ProgramError
from arborcast.bench import judges
from arborcast.bench.contest.cases import CASES
from arborcast.synth.collective import Kind
from arborcast.synth.formats.results import Row
from arborcast.synth.implicit_schedule import AnySchedule


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Row]]:
    """Rows of one case, a broadcast and an allgather, by a drawn msccl-tools whose check runs a statement."""
    small = min(CASES, key=lambda case: case.topology.ranks)
    monkeypatch.setattr(judges, "CASES", [small])
    monkeypatch.setattr(sccl, "NAMES", {kind: sccl.NAMES[kind] for kind in (Kind.BROADCAST, Kind.ALLGATHER)})

    def run(statement: str) -> list[Row]:
        package = tmp_path / "msccl"
        (package / "topologies").mkdir(parents=True)
        (package / "topologies" / "topology.py").write_text("class Topology: pass\n")
        (package / "serialization.py").write_text(
            f"class MSCCLDecoder:\n    def decode(self, text):\n        {statement}\n"
        )
        return list(judges.rows({"msccl-tools": tmp_path}))

    return run


@pytest.mark.parametrize(
    ("statement", "limit_s", "why"),
    [
        ("import os; os._exit(1)", 600, "the check ended without a word"),
        ("import time; time.sleep(600)", 1, "must end within 1 s"),
    ],
)
def test_a_judge_that_dies_or_hangs_gives_no_answer(
    judged: Callable[[str], list[Row]],
    monkeypatch: pytest.MonkeyPatch,
    statement: str,
    limit_s: int,
    why: str,
) -> None:
    monkeypatch.setattr(judges, "LIMIT_S", limit_s, raising=False)
    rows = judged(statement)
    assert [row["verdict"] for row in rows] == ["no answer"] * 3
    assert all(why in row["why"] for row in rows)


def test_the_damaged_file_is_told_by_its_own_collective(
    judged: Callable[[str], list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allgather does not fit, so that the file with a send less is a broadcast."""
    write = sccl.write

    def refuse(schedule: AnySchedule) -> str:
        if schedule.collective.kind is Kind.ALLGATHER:
            raise ProgramError("too many steps")
        return write(schedule)

    monkeypatch.setattr(sccl, "write", refuse)
    rows = judged("raise SystemExit('refused by the drawing')")
    assert [(row["collective"], row["verdict"]) for row in rows] == [
        ("broadcast", "not passed"),
        ("allgather", "does not fit"),
        ("broadcast", "refused"),
    ]
