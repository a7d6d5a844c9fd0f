"""Limits of numbers of steps in `frontier.json`, by the checker that knows nothing of the package."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.synth.chunks.allreduce.partial_sums import sum_problem
from arborcast.synth.chunks.bounds.flow_bound import flow_bound
from arborcast.synth.chunks.bounds.spanning_check import spanning_costs
from arborcast.synth.chunks.bounds.step_certificate import FlowDual, StepBound, TreeDual
from arborcast.synth.chunks.bounds.step_check import certified_ratio
from arborcast.synth.chunks.limit_documents import limit_to_document
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.time_reversal import mirrored
from arborcast.synth.cli.frontier_folder import write_frontier
from arborcast.synth.collective import Collective, Demand, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.formats import topology_to_document
from arborcast.topologies import load
from tests.support.strategies import collectives, topologies
from tests.verification.conftest import FOREIGN_CHECKER

ASKED = [
    ("ring:4", "allreduce", None),
    ("dgx1", "reduce-scatter", (0, 1, 2, 3)),
    ("mesh:2x2", "reduce", None),
    ("ring:5", "allgather", None),
    ("mesh:4", "allreduce", (0, 1, 3)),
    ("star:3", "broadcast", None),
    ("rtx4090:gpus=2,streams=1", "alltoall", None),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    written, kinds = [], set()
    for number, (spec, kind, ranks) in enumerate(ASKED):
        fabric = load(spec)
        found = synth.pareto(fabric, Collective.on(fabric, kind, ranks=ranks), max_steps=4)
        written.append(tmp_path_factory.mktemp("frontiers") / str(number))
        write_frontier(found, written[-1])
        document = json.loads((written[-1] / "frontier.json").read_text())
        kinds |= {each["certificate"]["certificate"]["kind"] for each in document["limits"]}
    assert kinds == {"flows", "static", "trees"}
    return written


def read_from(folder: Path) -> Callable[[str], Any]:
    return lambda name: json.loads((folder / name).read_text())


def test_right_frontiers_are_taken(checker: ModuleType, folders: list[Path]) -> None:
    for folder in folders:
        frontier = read_from(folder)("frontier.json")
        lines = checker.check_frontier(frontier, read_from(folder))
        assert not any(checker.NOT_KNOWN in line for line in lines)
        assert sum("correct" in line for line in lines) == len(frontier["frontier"]) > 0
        assert len({line for line in lines if line.startswith("no schedule")}) == len(frontier["limits"])
    command = [sys.executable, FOREIGN_CHECKER, folders[0] / "frontier.json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr, "rounds per chunk: flows" in ran.stdout) == (0, "", True)


def claims_no_more(changed: dict[str, Any], frontier: dict[str, Any]) -> bool:
    """Whether all that a frontier says follows from what another one does."""
    shape = ("chunks", "steps", "rounds", "ratio", "least")

    def said(of: dict[str, Any]) -> set[tuple[Any, ...]]:
        points = {tuple(str(point[key]) for key in shape) for point in of["frontier"]}
        return points | {(p["chunks"], p["steps"], p["rounds"]) for p in of["frontier"] if p["proved"]}

    known = [(entry["steps"], Fraction(entry["least"])) for entry in frontier["limits"]]
    limits = [(entry["steps"], Fraction(entry["least"])) for entry in changed["limits"]]
    follow = (any(few <= steps and least <= most for steps, most in known) for few, least in limits)
    return said(changed) <= said(frontier) and all(follow)


def places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where numbers and labels stand that the checker reads."""
    ignored = ("proof", "limit", "gap", "file", "restriction", "scope", "rate", "proved_by", "capacity")
    if isinstance(value, dict):
        return [
            leaf for key, each in value.items() if key not in ignored for leaf in places(each, (*place, key))
        ]
    if isinstance(value, list):
        return [leaf for index, each in enumerate(value) for leaf in places(each, (*place, index))]
    return [place]


def tampered(frontier: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """One number made larger or smaller, one label another, or one entry left out."""
    changed = copy.deepcopy(frontier)
    part = chance.choice(("frontier", "limits"))
    holder, place = changed[part], chance.choice(places(changed[part]))
    lists = []
    for key in place[:-1]:
        lists += [holder] if isinstance(holder, list) and len(holder) > key else []
        holder = holder[key]
    was = holder[place[-1]]
    if lists[1:] and chance.random() < 0.2:
        chosen = chance.choice(lists[1:])
        del chosen[chance.randrange(len(chosen))]
    elif isinstance(was, bool):
        holder[place[-1]] = not was
    elif isinstance(was, int):
        holder[place[-1]] = was + chance.choice((-1, 1))
    elif was is not None and was[:1].isdigit():
        holder[place[-1]] = str(Fraction(was) * chance.choice((Fraction(1, 2), 2, Fraction(8, 7))))
    return changed


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.long)])
def test_what_is_tampered_with_is_refused_or_claims_no_more(
    checker: ModuleType, folders: list[Path], count: int
) -> None:
    """Some changes do no harm: a length that nothing needs, or a point that is said to be unproved."""
    chance, refused = random.Random(7), 0
    for _ in range(count):
        folder = chance.choice(folders)
        frontier = read_from(folder)("frontier.json")
        changed = tampered(frontier, chance)
        try:
            lines = checker.check_frontier(changed, read_from(folder))
            taken = not any(checker.NOT_KNOWN in line for line in lines)
        except (checker.WrongError, LookupError, TypeError, ValueError, ArithmeticError, OSError):
            taken = False
        refused += not taken
        assert not taken or claims_no_more(changed, frontier)
    assert refused > count / 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f["frontier"][0].update(rounds=3), r"\(2, 2, 3\): the schedule has"),
        (lambda f: f["frontier"][0].update(ratio="1/2"), "another ratio"),
        (lambda f: f["frontier"][0].update(least="1/2"), "its limit is 1"),
        (lambda f: f["frontier"][0]["certificates"][0].update(steps=1), "a limit of fewer steps"),
        (lambda f: f["frontier"][0]["certificates"][0].update(ratio="2"), "prove 1, the file says 2"),
        (lambda f: f["frontier"][0]["certificates"].clear(), "its limit is 0"),
        (lambda f: f["frontier"][0].update(file=f["frontier"][1]["file"]), "the schedule has"),
        (lambda f: f.update(collective="allgather"), "for others"),
        (lambda f: f["limits"][0].update(least="3"), "2 steps: another limit"),
    ],
)
def test_each_promise_of_a_frontier_is_missed(
    checker: ModuleType, folders: list[Path], change: Callable[[Any], Any], message: str
) -> None:
    frontier = read_from(folders[0])("frontier.json")
    change(frontier)
    with pytest.raises(checker.WrongError, match=message):
        checker.check_frontier(frontier, read_from(folders[0]))


def test_a_point_of_which_fewer_chunks_would_do_is_not_proved(checker: ModuleType, tmp_path: Path) -> None:
    """Its schedule in twice the chunks and rounds has the same ratio."""
    fabric = load("full:3")
    found = synth.pareto(fabric, "allgather")
    write_frontier(found, tmp_path)
    frontier = read_from(tmp_path)("frontier.json")
    (point,) = frontier["frontier"]
    file = read_from(tmp_path)(point["file"])
    file["chunks"] = [
        {**chunk, "share": str(Fraction(chunk["share"]) / 2)} for chunk in file["chunks"] for _ in "ab"
    ]
    moved = [{**each, "chunk": 2 * each["chunk"] + half} for each in file["transfers"] for half in (0, 1)]
    file.update(transfers=moved, rounds=[2 * rounds for rounds in file["rounds"]])
    point.update(chunks=2 * point["chunks"], rounds=2 * point["rounds"])
    checker.check(file)
    with pytest.raises(checker.WrongError, match="rounds would do"):
        checker.check_frontier(frontier, lambda _: file)
    point["proved"] = False
    assert checker.check_frontier(frontier, lambda _: file)


def test_limits_without_a_schedule_are_not_known(checker: ModuleType, folders: list[Path]) -> None:
    frontier = read_from(folders[0])("frontier.json")
    frontier["frontier"].clear()
    frontier["limits"][0]["least"] = "99"
    assert any(checker.NOT_KNOWN in line for line in checker.check_frontier(frontier, read_from(folders[0])))


def test_points_are_of_one_fabric(checker: ModuleType, folders: list[Path]) -> None:
    """Each is right by itself, but the last says nothing about the fabric of the first."""
    read = read_from(folders[0])
    frontier = read("frontier.json")
    last = frontier["frontier"][-1]["file"]

    def slower(name: str) -> Any:
        file = read(name)
        if name == last:
            file["topology"]["links"][0]["latency_us"] = "7"
            file["topology"]["symmetries"] = []
        return file

    assert len(frontier["frontier"]) > 1
    checker.check(slower(last))
    with pytest.raises(checker.WrongError, match="of another fabric or collective"):
        checker.check_frontier(frontier, slower)


def test_limits_at_rounded_rates_are_called_so(checker: ModuleType, tmp_path: Path) -> None:
    write_frontier(synth.pareto(load("rtx4090:gpus=2"), "allgather"), tmp_path)
    frontier = read_from(tmp_path)("frontier.json")
    assert checker.check_frontier(frontier, read_from(tmp_path))
    for point in frontier["frontier"]:
        point["scope"] = "every schedule"
    with pytest.raises(checker.WrongError, match="rates rounded down"):
        checker.check_frontier(frontier, read_from(tmp_path))


def test_flows_of_blocks_alike_have_images_of_their_own(checker: ModuleType) -> None:
    """Two of three blocks alike, and one of others: its image under a swap has one and two."""
    fabric = load("star:3")
    alike = [Demand(frozenset({2}), frozenset({end})) for end in (0, 0, 1, 1)]
    collective = Collective.custom(fabric, alike)
    problem = ChunkProblem.of(fabric, collective)
    third = Fraction(1, 3)
    links = (tuple(Fraction(link.src == 2) for link in fabric.links),)
    ways = [(route.src, route.dst) for route in problem.routes]
    own = tuple((0, ways.index((2, end)), third) for end in (0, 1))
    flow = FlowDual(links, ((((0, 0), (1, 0), (2, 1)), own),), ((1, 0, 2, 3),))
    limit = StepBound(1, certified_ratio(problem, 1, flow), flow)
    assert limit.ratio == 2
    demands = [{"at": sorted(each.sources), "to": sorted(each.targets)} for each in alike]
    stranger = checker.Fabric(topology_to_document(fabric))
    task = checker.Task({"kind": "custom", "ranks": [0, 1, 2], "demands": demands}, stranger)
    assert checker.limit_of(limit_to_document(limit, fabric), stranger, task, fabric.bandwidth_unit)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_certificates_of_steps_prove_here_what_they_prove_to_strangers(
    checker: ModuleType, data: st.DataObject
) -> None:
    """Flows as they are found, and trees under drawn lengths, of what adds up too."""
    fabric = data.draw(topologies(max_ranks=4, switches=1, symmetric=data.draw(st.booleans())))
    kinds = [kind for kind in Kind if kind is not Kind.CUSTOM]
    collective = data.draw(collectives(fabric, kinds=kinds, relays=True))
    sums = collective.kind is Kind.ALLREDUCE
    image = None if sums else mirrored(fabric, collective)
    problem = ChunkProblem.of(*image) if image else sum_problem(fabric, collective)
    assert problem.latency is not None
    steps = problem.latency + data.draw(st.integers(0, 1))
    limits = [flow_bound(problem, steps, deadline=Deadline(), sums=sums)]
    if not sums:
        rows = [[data.draw(st.integers(0, 3)) for _ in problem.capacities] for _ in range(steps)]
        used = [sum(map(int.__mul__, row, problem.capacities)) or 1 for row in rows]
        lengths = tuple(tuple(Fraction(x, of) for x in row) for row, of in zip(rows, used, strict=True))
        trees = TreeDual(lengths)
        limits.append(StepBound(steps, certified_ratio(problem, steps, trees), trees))
    stranger = checker.Fabric(topology_to_document(fabric))
    asked = {"kind": collective.kind.value, "root": collective.root, "ranks": list(collective.ranks)}
    task = checker.Task(asked, stranger)
    for limit in limits:
        assert limit is not None
        is_image = image is not None and image[0] is not fabric
        document = limit_to_document(limit, fabric, mirrored=is_image)
        said = checker.limit_of(document, stranger, task, fabric.bandwidth_unit)
        assert said.startswith(f"no schedule in {steps} steps has less than {limit.ratio} rounds per chunk")
        document["ratio"] = str(limit.ratio + Fraction(1, 1000))
        with pytest.raises(checker.WrongError, match="the file says"):
            checker.limit_of(document, stranger, task, fabric.bandwidth_unit)


@pytest.mark.parametrize("seed", range(20))
def test_cheapest_trees_to_all_cost_what_the_table_of_all_sets_says(checker: ModuleType, seed: int) -> None:
    drawn, never = random.Random(seed), 1 << 40
    steps, ranks = drawn.randint(1, 4), drawn.randint(2, 6)
    between = np.array(
        [[[drawn.choice([0, 1, 2, 5, never]) for _ in range(ranks)] for _ in range(ranks)]] * steps
    )
    between[drawn.randrange(steps)] += 1
    sends = [
        [
            {other: 0 if rank == other else int(row[other]) for other in range(ranks) if row[other] < never}
            | {rank: 0}
            for rank, row in enumerate(of_step)
        ]
        for of_step in between
    ]
    for root, expected in enumerate(spanning_costs(np.minimum(between, never), never)):
        others = sorted({*range(ranks)} - {root})
        if expected < never:
            assert checker.cheapest_to_all(sends, {root}, others) == expected
        else:
            with pytest.raises(checker.WrongError):
                checker.cheapest_to_all(sends, {root}, others)
