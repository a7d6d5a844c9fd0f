"""`examples/check_certificate.py`, which knows nothing of the package, against the package's own verifier."""

from __future__ import annotations

import ast
import copy
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth import AlltoallvPlanner, read_schedule, solve, verify, write_schedule
from arborcast.synth.bounds.layered_flows import with_least_time
from arborcast.synth.certificate import Scope
from arborcast.synth.certification import certified_scope, dual_or_none
from arborcast.synth.certification.proven_rates import share_leaving
from arborcast.synth.collective import Collective, Demand, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats.documents import topology_to_document
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.ports import ported
from arborcast.synth.topology import Link, Switch, Topology
from tests.support import able_fabrics
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


SIZES = tuple(tuple(0 if one == other else 512 * (one + 2 * other) for other in range(8)) for one in range(8))
ADDER = Switch("hub", reduces=True, multicasts=True, turns=True, adder=Fraction(2), trees=9)


def of_each_form() -> Iterator[tuple[str, AnySchedule]]:
    """What only some files have: relays, translations, switches that add, blocks that differ, demands."""
    for spec, ranks in (("dgx1", 6), ("dgx-a100", 5), ("star:6,in-network=turn", 4)):
        whole = topologies.load(spec)
        for kind in (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.REDUCE):
            part = Collective(kind, tuple(range(ranks)), 1 if kind.has_root else None)
            yield "relays", solve(whole, part)
    for spec in ("torus:4x4", "dgx-a100:boxes=2", "star:6,in-network=turn"):
        for kind in (Kind.ALLREDUCE, Kind.REDUCE_SCATTER, Kind.ALLTOALL):
            yield "implicit", solve(topologies.load(spec), kind, form="implicit")
    for spec in ("star:6,in-network=loopback", "fat-tree:2x2x2,in-network=turn"):
        for kind in (Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCE_SCATTER):
            yield "able", solve(topologies.load(spec), kind)
    cables = [link for rank in range(4) for link in cable(rank, 4, 5)]
    limited = Topology.build("limited", 4, [*cables, *cable(0, 1, 1)], [ADDER])
    yield "able", solve(limited, "allreduce")
    dgx1 = topologies.load("dgx1")
    yield "blocks", AlltoallvPlanner(dgx1).plan(SIZES).schedule()
    halo = [Demand(frozenset({0}), frozenset({1, 3})), Demand(frozenset({1, 2}), frozenset({0}))]
    ring = topologies.load("ring:4")
    yield "blocks", solve(ring, Collective.custom(ring, halo))


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    folder = tmp_path_factory.mktemp("forms")
    written: dict[str, list[Path]] = {}
    for number, (form, schedule) in enumerate(of_each_form()):
        path = folder / f"{form}-{number}.json"
        write_schedule(schedule, path)
        written.setdefault(form, []).append(path)
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


def test_right_files_are_taken(checker: ModuleType, files: list[Path], forms: dict[str, list[Path]]) -> None:
    for path in [*files, *(path for written in forms.values() for path in written)]:
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


def late(document: dict[str, Any]) -> None:
    """What the last rank adds in the switch comes one step after the sum has gone on."""
    last = [each for each in document["transfers"] if each["chunk"] == 0 and each["step"] == 0][-1]
    last["step"] = 1


def unlooped(document: dict[str, Any]) -> None:
    """The rank that gets a sum of a switch with loopback gave nothing to it there."""
    sums = [each for each in document["transfers"] if each["chunk"] == 0 and each["step"] == 0]
    (to,) = (each["to"] for each in document["transfers"] if each["chunk"] == 0 and each["step"] == 1)
    document["transfers"].remove(next(each for each in sums if each["from"] == to))


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
    parts = ["bound", "bound", "times", "times", "transfers", "transfers", "chunks", "rate", "collective"]
    parts += ["translations", "links"] if document.get("translations") else []
    parts += ["switches"] if any(isinstance(each, dict) for each in document["topology"]["switches"]) else []
    part = chance.choice(parts)
    within = {"times": ("bound", "times"), **{key: ("topology", key) for key in ("links", "switches")}}
    start = within.get(part, (part,))
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
    elif ".." in was:
        holder[leaf[-1]] = f"{was}{chance.randrange(3)}"
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


def tamper(checker: ModuleType, files: list[Path], folder: Path, count: int, seed: int = 300) -> int:
    """Tampered files until so many are refused by both; how many were made."""
    chance = random.Random(seed)
    refused = drawn = 0
    while refused < count:  # some changes do no harm: a rank named twice, tolls in another order
        drawn += 1
        path = chance.choice(files)
        document = tampered(json.loads(path.read_text()), chance)
        here = refused_here(document, folder / path.name)
        there = checker.main(str(folder / path.name)) != 0
        assert there == here, (path.name, document["bound"])
        refused += there
    return drawn


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.long)])
def test_tampered_files_are_refused_by_both(
    checker: ModuleType, files: list[Path], tmp_path: Path, count: int
) -> None:
    assert tamper(checker, files, tmp_path, count) < 1.3 * count


@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize("form", ["relays", "implicit", "able", "blocks"])
def test_tampered_files_of_each_form_are_refused_by_both(
    checker: ModuleType, forms: dict[str, list[Path]], tmp_path: Path, form: str, count: int
) -> None:
    assert tamper(checker, forms[form], tmp_path, count) < 1.6 * count


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("implicit", lambda d: d["translations"].pop(), "the chunks are not the blocks"),
        (
            "implicit",
            lambda d: d["translations"][0].update(order=2),
            "a translation of order 4, the file says 2",
        ),
        ("implicit", lambda d: d["topology"]["links"][0].update(bandwidth="1/2"), "a rate of"),
        ("implicit", lambda d: d["transfers"].pop(), "does not end where it must"),
        ("able", lambda d: d["topology"]["switches"][0].update(multicasts=False), "copies that cannot"),
        ("able", lambda d: d["topology"]["switches"][0].update(reduces=False), "adds that cannot"),
        ("able", lambda d: d["transfers"].pop(1), "does not end where it must"),
        ("able", late, "a switch adds to what has gone on"),
        ("able", unlooped, "nothing loops back"),
        (
            "relays",
            lambda d: d["collective"]["ranks"].append(6),
            "the chunks are not the blocks|end where it must",
        ),
        ("relays", lambda d: d["bound"]["certificate"].update(distance="9"), "lengths prove a distance of 8"),
        ("blocks", lambda d: d["collective"]["sizes"][0].__setitem__(1, 7), "the chunks are not the blocks"),
    ],
)
def test_each_promise_of_a_form_is_missed(
    checker: ModuleType, forms: dict[str, list[Path]], form: str, change: Callable[[Any], Any], message: str
) -> None:
    document = json.loads(forms[form][0].read_text())
    change(document)
    with pytest.raises(checker.WrongError, match=message):
        checker.check(document)


SOME = ("mi300x", "leonardo:boxes=2", "dgx-h100", "torus:3x3", "fat-tree:2x2x2,in-network=both", "rtx4090")


@pytest.mark.parametrize(
    "specs", [SOME, pytest.param([entry.name for entry in topologies.catalog()], marks=pytest.mark.long)]
)
def test_what_is_solved_of_the_catalog_is_taken(
    checker: ModuleType, specs: Sequence[str], tmp_path: Path
) -> None:
    """All kinds on every machine of at most 64 ranks; a shape that must be told its size is in the sample."""
    seen: set[object] = set()
    taken = 0
    for spec in specs:
        try:
            fabric = topologies.load(spec)
        except InputError:
            continue
        if fabric.ranks > 64 or (fabric.links, fabric.switches, fabric.streams) in seen:
            continue
        seen.add((fabric.links, fabric.switches, fabric.streams))
        for kind in Kind:
            if kind is Kind.CUSTOM:
                continue
            schedule = solve(fabric, kind, deadline_s=60.0, on_deadline="best")
            write_schedule(schedule, tmp_path / "solved.json")
            assert checker.main(str(tmp_path / "solved.json")) == 0, (spec, kind)
            taken += 1
    assert taken == 8 * len(seen) >= 48


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 1 << 20))
def test_any_link_lengths_prove_here_what_they_prove_to_strangers(checker: ModuleType, seed: int) -> None:
    """On fabrics with relays, switches of any abilities, prices of adders, streams and lengths of nothing."""
    chance = random.Random(seed)
    fabric = able_fabrics.drawn(seed)
    if chance.random() < 0.3:
        fabric = replace(fabric, streams=tuple(chance.choice([None, 1, 2]) for _ in range(fabric.ranks)))
    kind = chance.choice([kind for kind in Kind if kind is not Kind.CUSTOM])
    count = chance.randint(2, fabric.ranks)
    root = chance.randrange(count) if kind.has_root else None
    collective = Collective(kind, tuple(range(count)), root)
    limited = ported(fabric)
    lengths = tuple(Fraction(chance.choice([0, 0, 1, 1, 2, 3])) for _ in limited.links)
    prices = tuple(Fraction(chance.randint(0, 2)) for _ in limited.limited_adders)
    document = topology_to_document(fabric)
    there = checker.Fabric(document)
    task = checker.Task({"kind": kind.value, "root": root, "ranks": list(range(count))}, there)
    side = frozenset(chance.sample(range(fabric.size), chance.randint(1, fabric.size)))
    assert task.leaving(side) == share_leaving(collective, side)
    there = checker.with_ports(document, there.streams)
    ends = [(limited.label(link.src), limited.label(link.dst)) for link in limited.links]
    named = {(there.vertex(a), there.vertex(b)): far for (a, b), far in zip(ends, lengths, strict=True)}
    theirs = [named[tail, head] for tail, head, *_ in there.links]
    paid = {there.vertex(limited.label(v)): p for v, p in zip(limited.limited_adders, prices, strict=True)}
    try:
        dual = dual_or_none(limited, collective, lengths, prices)
    except InputError:  # a rank that cannot be reached
        with pytest.raises(checker.WrongError, match="cannot reach each other"):
            checker.travelled(there, theirs, paid, task)
        return
    distance = checker.travelled(there, theirs, paid, task)
    assert distance == (0 if dual is None else dual.distance)
    if dual is not None and kind is Kind.ALLREDUCE:  # the checker may know more schedules that go as far
        every = certified_scope(limited, collective, dual) is Scope.EVERY_SCHEDULE
        assert not every or checker.either_way(there, theirs, task) >= distance
