"""One question, one answer: from Python, from the command, in a sweep and in the process group."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from arborcast import synth
from arborcast.backends.schedules.synthesis import tables
from arborcast.synth.api import approach
from arborcast.synth.errors import InputError
from arborcast.synth.faults.faulty import Faulty, left_of, without
from arborcast.synth.formats.any_schedule import any_schedule_to_document
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.solve_options import SolveKeywords, SolveOptions
from arborcast.synth.sweeps.answering import answered
from arborcast.synth.sweeps.questions import Question
from arborcast.topologies import load
from tests.support.commands import Command

OPTIONS = {"size_bytes": "--size", "max_trees": "--max-trees", "max_height": "--max-height"}

QUESTIONS = [
    # fabric, cables that are down, collective, method, wishes, form of the answer
    ("dgx1", (), "allreduce", "auto", {}, "explicit"),
    ("mesh:2x3", (), "broadcast", "auto", {"size_bytes": 1 << 16}, "explicit"),
    ("mesh:2x3", (), "allgather", "auto", {"max_trees": 2}, "explicit"),
    ("mesh:2x3", (), "allgather", "auto", {"max_height": 3}, "explicit"),
    ("dgx1", ("0-1",), "reduce-scatter", "auto", {}, "explicit"),
    ("mi250", (), "alltoall", "auto", {}, "explicit"),
    ("torus:8x8", (), "allgather", "auto", {}, "explicit"),
    ("torus:8x9", (), "allgather", "auto", {}, "implicit"),
    ("torus:8x9", (), "allreduce", "trees", {}, "implicit"),
    ("torus:8x9", (), "allgather", "auto", {"size_bytes": 1 << 12}, "implicit"),
    ("torus:8x9", (), "reduce-scatter", "auto", {"max_trees": 1}, "implicit"),
    ("torus:8x9", (), "allgather", "auto", {"max_height": 12}, "implicit"),
    ("torus:8x9", (), "alltoall", "auto", {}, "implicit"),
    ("torus:8x9", (), "broadcast", "auto", {}, "explicit"),
    pytest.param("torus:8x9", ("0-1",), "allgather", "auto", {}, "explicit", marks=pytest.mark.long),
    pytest.param(
        *("torus:8x9", ("0-1",), "allgather", "auto", {"size_bytes": 1 << 24}, "explicit"),
        marks=pytest.mark.long,
    ),
    ("mesh:9x9", (), "allgather", "auto", {}, "explicit"),
    ("dgx-a100:boxes=16", (), "allreduce", "auto", {}, "implicit"),
]


def as_bytes(schedule: AnySchedule) -> bytes:
    return json.dumps(any_schedule_to_document(schedule), sort_keys=True).encode()


def fabric_of(spec: str, down: tuple[str, ...]) -> synth.Topology | Faulty:
    whole = load(spec)
    return without(whole, links=down) if down else whole


@pytest.mark.parametrize(("spec", "down", "kind", "method", "wishes", "form"), QUESTIONS)
def test_all_doors_give_the_same_bytes(
    spec: str,
    down: tuple[str, ...],
    kind: str,
    method: str,
    wishes: dict[str, Any],
    form: str,
    command: Command,
    tmp_path: Path,
) -> None:
    fabric = fabric_of(spec, down)
    found = synth.solve(fabric, kind, method=method, **wishes)
    assert ("explicit" if isinstance(found, synth.Schedule) else "implicit") == form
    said = found.method.settings
    assert any(name == "repaired" for name, _ in said) == bool(down and load(spec).ranks > 64)

    file = tmp_path / "schedule.json"
    options = [word for name, value in wishes.items() for word in (OPTIONS[name], str(value))]
    options += [word for cable in down for word in ("--without-link", cable)]
    assert command("solve", spec, kind, "--method", method, *options, "-o", str(file)).status == 0
    assert as_bytes(synth.read_schedule(file)) == as_bytes(found)

    size = wishes.get("size_bytes")
    knobs = SolveOptions(**{name: wish for name, wish in wishes.items() if name != "size_bytes"})
    asked = synth.Collective.on(left_of(fabric), kind)
    first = next(tables(fabric, asked, method, knobs)).entries[0].schedule
    # With a size, the first of the group's table is the best rate, with which all comparisons begin.
    assert as_bytes(first) == as_bytes(found if size is None else approach(fabric, asked).answer())

    if method == "auto":
        cables = tuple((int(a), int(b)) for a, b in (cable.split("-") for cable in down))
        question = Question(tuple(range(load(spec).ranks)), cables, asked.kind, asked.root)
        answer = answered(load(spec), question, knobs, None if size is None else [size])
        (choice,) = answer.document["choices"]
        assert json.loads(answer.files[choice["file"]]) == any_schedule_to_document(found)


def test_the_form_can_be_asked_for() -> None:
    small, large = load("ring:6"), load("ring:66")
    implicit = synth.solve(small, "allgather", form="implicit")
    assert isinstance(implicit, synth.ImplicitSchedule)
    assert implicit.rate == synth.solve(small, "allgather").rate
    explicit = synth.solve(large, "allgather", form="explicit")
    assert isinstance(explicit, synth.Schedule)
    assert explicit.rate == synth.solve(large, "allgather").rate
    with pytest.raises(InputError, match="form big: must be one of auto, explicit, implicit"):
        synth.solve(small, "allgather", form="big")  # type: ignore[call-overload]
    with pytest.raises(InputError, match="broadcast: has no implicit form"):
        synth.solve(small, "broadcast", form="implicit")


def test_wishes_mean_the_same_at_every_number_of_ranks() -> None:
    for ranks in (6, 66):
        fabric = load(f"ring:{ranks}")
        limited = synth.solve(fabric, "allgather", max_height=ranks - 2)
        assert limited.height <= ranks - 2
        assert limited.rate <= synth.bound(fabric, "allgather").rate
        with pytest.raises(InputError, match="method auto: takes no epsilon, which is for mwu"):
            synth.solve(fabric, "allgather", epsilon=Fraction(1, 10))
        with pytest.raises(InputError, match="method trees: takes no size, which is for auto"):
            synth.solve(fabric, "allgather", method="trees", size_bytes=1024)
        with pytest.raises(InputError, match="alltoall: takes no maximum height"):
            synth.solve(fabric, "alltoall", max_height=3)


def test_keywords_of_solve_are_the_fields_of_its_options() -> None:
    assert SolveKeywords.__annotations__.keys() == SolveOptions.__dataclass_fields__.keys()
