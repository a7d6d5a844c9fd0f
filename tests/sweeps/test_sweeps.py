"""Sweeps: which questions there are, answers kept and resumed, schedules found again for any allocation."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import networkx
import pytest
from hypothesis import given

from arborcast import topologies
from arborcast.synth.api import bound, solve
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError, TopologyError
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.sweeps.answering import INFEASIBLE, SOLVED
from arborcast.synth.sweeps.questions import Question, questions
from arborcast.synth.sweeps.sweep import Progress, sweep
from arborcast.synth.sweeps.table import Table, renumbered
from arborcast.synth.symmetry.isomorphism import ComparableTopology
from arborcast.synth.topology import Link, Topology
from arborcast.synth.verification.verifier import verify
from tests.support.commands import Command
from tests.support.refusals import refuses
from tests.support.strategies import topologies as drawn_topologies


def shuffled(topology: Topology, seed: int) -> tuple[Topology, list[int]]:
    """The same graph with its ranks and switches renumbered at random."""
    chance = random.Random(seed)
    ranks, switches = list(range(topology.ranks)), list(range(topology.ranks, topology.size))
    chance.shuffle(ranks)
    chance.shuffle(switches)
    images = ranks + switches
    names = [""] * len(switches)
    for place, image in enumerate(switches):
        names[image - topology.ranks] = topology.switches[place].name
    links = (
        Link(images[link.src], images[link.dst], link.bandwidth, link.latency_us) for link in topology.links
    )
    return Topology.build("shuffled", topology.ranks, links, names), images


# ---------------------------------------------------------------------------------------- isomorphism


@given(drawn_topologies())
def test_a_renumbered_topology_is_found_to_be_the_same(topology: Topology) -> None:
    other, _ = shuffled(topology, 3)
    images = ComparableTopology(topology, latencies=True).isomorphism(
        ComparableTopology(other, latencies=True)
    )
    assert images is not None
    assert {
        (images[link.src], images[link.dst]): (link.bandwidth, link.latency_us) for link in topology.links
    } == {(link.src, link.dst): (link.bandwidth, link.latency_us) for link in other.links}


def test_roots_and_latencies_tell_topologies_apart() -> None:
    links = [Link(src, dst, Fraction(1)) for src, dst in ((0, 1), (1, 0), (1, 2), (2, 1))]
    path = Topology.build("path", 3, links)
    plain = ComparableTopology(path, colours=[1, 0, 0])
    assert plain.isomorphism(ComparableTopology(path, colours=[0, 0, 1])) == (2, 1, 0)
    assert plain.isomorphism(ComparableTopology(path, colours=[0, 1, 0])) is None
    slow = Topology.build("slow", 3, [replace(link, latency_us=Fraction(5)) for link in links])
    assert ComparableTopology(path).isomorphism(ComparableTopology(slow)) is not None
    assert (
        ComparableTopology(path, latencies=True).isomorphism(ComparableTopology(slow, latencies=True)) is None
    )


@given(drawn_topologies())
def test_a_renumbered_schedule_is_as_good_and_as_proved(topology: Topology) -> None:
    if bound(topology, "allreduce").rate == 0:
        return
    other, images = shuffled(topology, 5)
    before = solve(topology, "allreduce", method="trees")
    after = renumbered(before, other, tuple(images))
    verdict = verify(after)
    assert verdict.correct, verdict.errors
    assert (after.rate, verdict.rate) == (before.rate, before.rate)


# ------------------------------------------------------------------------------------------ questions


def test_the_questions_about_a_ring_are_its_classes() -> None:
    ring = topologies.load("ring:6")
    asked = list(questions(ring, sizes=[3], kinds=[Kind.ALLGATHER]))
    # Of three ranks: a path, a pair and one alone (014 is its mirror image), and three that are alone.
    assert [question.ranks for question in asked] == [(0, 1, 2), (0, 1, 3), (0, 2, 4)]
    assert all(question.failed == () for question in asked)


def test_failures_are_asked_once_for_each_orbit() -> None:
    ring = topologies.load("ring:6")
    asked = [question.failed for question in questions(ring, failures=2, kinds=[Kind.ALLREDUCE])]
    # One cable: all are alike. Two: the way between them has 0, 1 or 2 cables on its shorter side.
    assert asked == [(), ((0, 1),), ((0, 1), (0, 5)), ((0, 1), (2, 3)), ((0, 1), (3, 4))]


def test_failures_of_a_dgx1_are_those_of_networkx() -> None:
    box = topologies.load("dgx1")
    found = [question.failed for question in questions(box, failures=1, kinds=[Kind.ALLREDUCE])]
    classes: list[networkx.DiGraph[int]] = []
    cables = sorted({(link.src, link.dst) for link in box.links if link.src < link.dst})
    for cable in cables:
        graph: networkx.DiGraph[int] = networkx.DiGraph()
        graph.add_nodes_from(range(8))
        for link in box.links:
            if {link.src, link.dst} != set(cable):
                graph.add_edge(link.src, link.dst, rate=link.bandwidth)
        match = networkx.algorithms.isomorphism.numerical_edge_match("rate", 0)
        if not any(networkx.is_isomorphic(graph, known, edge_match=match) for known in classes):
            classes.append(graph)
    assert len(found) == 1 + len(classes)


def test_roots_are_asked_for_one_of_each_orbit() -> None:
    asked = [question.root for question in questions(topologies.load("dgx1"), kinds=[Kind.BROADCAST])]
    assert asked == [0, 2]  # two orbits of roots
    assert [question.root for question in questions(topologies.load("ring:4"), kinds=[Kind.REDUCE])] == [0]


def test_what_cannot_be_listed_is_refused() -> None:
    with pytest.raises(InputError, match="at most 16 ranks"):
        list(questions(topologies.load("torus:5x5"), sizes=[3]))
    with pytest.raises(InputError, match="failures: must be at least 0, got -1"):
        list(questions(topologies.load("ring:4"), failures=-1))
    with pytest.raises(
        InputError, match="100000 sets of failed cables are listed; up to 3 of 192 are 1179808"
    ):
        list(questions(topologies.load("torus:4x4x4"), failures=3))


# -------------------------------------------------------------------------------------------- sweeps


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of the fragments of three and four GPUs of a DGX-1, one cable down at the most."""
    folder = tmp_path_factory.mktemp("sweep") / "table"
    machine = topologies.load("dgx1")
    asked = list(questions(machine, sizes=[3, 4], failures=1, kinds=[Kind.ALLREDUCE, Kind.BROADCAST]))
    assert sweep(machine, asked, folder) == len(asked)
    return folder


def test_every_allocation_is_served_at_its_limit(swept: Path) -> None:
    table = Table.read(swept)
    box = topologies.load("dgx1")
    for ranks in combinations(range(8), 4):
        left = box.subset(ranks)
        limit = bound(left, "allreduce").rate
        if limit == 0:
            with pytest.raises(InputError, match="is infeasible, as on ranks"):
                table.find("allreduce", ranks=ranks)
            continue
        found = table.find("allreduce", ranks=ranks)
        assert found.topology.links == left.links
        assert found.rate == limit
        assert verify(found).correct


def test_ranks_in_any_order_with_failures_and_roots(swept: Path) -> None:
    table = Table.read(swept)
    box = topologies.load("dgx1")
    order = (6, 2, 3, 0)
    for root in range(4):
        for failed in ((), ((0, 1),), ((2, 1),)):
            asked = Question(order, tuple((min(hop), max(hop)) for hop in failed), Kind.BROADCAST, root)
            topology = asked.topology(box)
            limit = bound(topology, "broadcast", root=root).rate
            if limit == 0:
                with pytest.raises(
                    InputError, match=r"broadcast on dgx1.* is infeasible, as on ranks .*: rank"
                ):
                    table.find("broadcast", ranks=order, failed=failed, root=root)
                continue
            found = table.find("broadcast", ranks=order, failed=failed, root=root)
            assert found.collective.root == root
            assert found.topology.bandwidth == topology.bandwidth
            assert found.rate == limit
            assert verify(found).correct


def test_an_answer_that_is_not_there_is_said(swept: Path) -> None:
    with pytest.raises(InputError, match="has no answer for allgather"):
        Table.read(swept).find("allgather", ranks=(0, 1, 2))
    with pytest.raises(InputError, match=r"sweep\.json: cannot be read"):
        Table.read(swept.parent)
    with pytest.raises(InputError, match="collective allsum: must be one of broadcast, reduce"):
        Table.read(swept).find("allsum")


@refuses("change", "message")
def test_a_damaged_answer_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = tmp_path / "table"
    sweep(topologies.load("ring:3"), [Question((0, 1, 2), (), Kind.ALLGATHER)], folder)
    (path,) = (folder / "answers").iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=message) as error:
        Table.read(folder)
    assert str(path) in str(error.value)


def test_a_sweep_that_was_stopped_at_once_goes_on(tmp_path: Path) -> None:
    machine, folder = topologies.load("ring:3"), tmp_path / "table"
    asked = [Question((0, 1, 2), (), Kind.ALLGATHER)]
    sweep(machine, [], folder)
    for name in ("answers", "schedules"):
        (folder / name).rmdir()
    assert sweep(machine, asked, folder) == 1


def test_what_is_too_large_to_compare_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torus = topologies.load("torus:4x4")
    shape = ComparableTopology(torus)
    with pytest.raises(TopologyError, match="torus:4x4: to be compared"):
        monkeypatch.setattr("arborcast.synth.symmetry.isomorphism._EFFORT", 10)
        ComparableTopology(torus)
    shape._refiner.left = 10
    with pytest.raises(TopologyError, match="torus:4x4: to be compared"):
        shape.isomorphism(shape)


def test_a_sweep_goes_on_where_it_was_left(tmp_path: Path) -> None:
    machine, folder = topologies.load("ring:4"), tmp_path / "table"
    asked = list(questions(machine, sizes=[2, 3, 4], kinds=[Kind.ALLGATHER]))
    assert sweep(machine, asked[:2], folder) == 2
    kept = {path: path.stat().st_mtime_ns for path in (folder / "answers").iterdir()}
    told: list[Progress] = []
    assert sweep(machine, asked, folder, listen=told.append) == len(asked) - 2
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items())
    assert [now.done for now in told] == list(range(2, len(asked) + 1))
    assert sweep(machine, asked, folder, jobs=2) == 0
    statuses = {answer["status"] for answer in Table.read(folder).answers.values()}
    assert statuses == {SOLVED, INFEASIBLE}  # two opposite ranks of a ring are not joined


def test_an_interrupted_sweep_leaves_whole_answers(tmp_path: Path) -> None:
    machine, folder = topologies.load("ring:5"), tmp_path / "table"
    asked = list(questions(machine, sizes=[2, 3, 4, 5], kinds=[Kind.ALLGATHER, Kind.ALLREDUCE]))

    def give_up(now: Progress) -> None:
        if now.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(machine, asked, folder, listen=give_up)
    answers = Table.read(folder).answers
    assert len(answers) == 3
    for document in answers.values():
        for choice in document["choices"]:
            assert (folder / "schedules" / choice["file"]).exists()
    assert sweep(machine, asked, folder) == len(asked) - 3


def test_jobs_do_not_change_what_is_found(tmp_path: Path) -> None:
    machine = topologies.load("dgx1")
    asked = list(questions(machine, sizes=[3], kinds=[Kind.ALLREDUCE]))
    texts: list[dict[str, Any]] = []
    for jobs in (1, 2):
        folder = tmp_path / str(jobs)
        sweep(machine, asked, folder, jobs=jobs)
        texts.append({path.name: path.read_text() for path in (folder / "schedules").iterdir()})
    assert texts[0] == texts[1] != {}


@pytest.mark.long
def test_a_worker_of_a_cluster_that_dies_changes_nothing(tmp_path: Path) -> None:
    """Each fragment of four GPUs of a box, by two workers, one of which is killed behind the third answer."""
    distributed = pytest.importorskip("distributed", reason="an optional extra: arborcast[dask]")
    from arborcast.synth.chunks.solvers.jobs import running_on

    machine = topologies.load("dgx1")
    asked = list(questions(machine, sizes=[4], kinds=[Kind.ALLREDUCE, Kind.ALLGATHER]))
    texts: list[dict[str, str]] = []
    for folder, workers in ((tmp_path / "alone", 0), (tmp_path / "cluster", 2)):
        if not workers:
            sweep(machine, asked, folder)
        else:
            with distributed.LocalCluster(
                n_workers=workers, threads_per_worker=1, dashboard_address=None, processes=True
            ) as cluster:
                killed: list[int] = []

                def kill_one(now: Progress, cluster: Any = cluster, killed: list[int] = killed) -> None:
                    if now.done >= 3 and not killed:
                        killed.append(next(iter(cluster.workers.values())).pid)
                        os.kill(killed[0], signal.SIGKILL)

                with running_on(cluster.scheduler_address):
                    assert sweep(machine, asked, folder, jobs=workers, listen=kill_one) == len(asked)
                assert killed
        files = [path for path in folder.rglob("*") if path.is_file()]
        took = re.compile(r'"seconds": [\d.e-]+')  # all else is the same, byte for byte
        texts.append({str(path.relative_to(folder)): took.sub("", path.read_text()) for path in files})
    assert texts[0] == texts[1]


def test_choices_over_sizes_serve_every_size(tmp_path: Path) -> None:
    machine, folder = topologies.load("dgx1"), tmp_path / "table"
    asked = [Question((0, 1, 2), (), Kind.ALLGATHER)]
    sweep(machine, asked, folder, sizes=[1 << power for power in range(10, 27, 4)])
    table = Table.read(folder)
    (document,) = table.answers.values()
    assert document["choices"][0]["from_bytes"] == 0
    small, large = (table.find("allgather", ranks=(0, 1, 2), size_bytes=size) for size in (8, 1 << 26))
    assert small.steps <= large.steps
    assert large.rate == bound(machine.subset([0, 1, 2]), "allgather").rate


def test_a_folder_of_another_sweep_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    ring = topologies.load("ring:4")
    asked = list(questions(ring, kinds=[Kind.ALLGATHER]))
    sweep(ring, asked, folder)
    with pytest.raises(InputError, match="seed: must be 0 as before, got 1; the folder holds another sweep"):
        sweep(ring, asked, folder, options=SolveOptions(seed=1))
    with pytest.raises(InputError, match="topology: the folder holds another sweep"):
        sweep(topologies.load("ring:5"), asked, folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(InputError, match="must be an empty folder or one with a sweep"):
        sweep(ring, asked, tmp_path / "other")


def test_the_command(command: Command, tmp_path: Path) -> None:
    folder = str(tmp_path / "table")
    words = ("sweep", "ring:4", "--fragments", "3-4", "--failures", "1", "--collectives", "allreduce")
    ran = command(*words, "-o", folder, "--json")
    assert ran.status == 0
    document = ran.document
    # Four ranks with no cable or one down; three ranks (a path) with none or one.
    assert (document["questions"], document["answered_now"]) == (4, 4)
    assert [answer["status"] for answer in document["answers"]].count(SOLVED) == 3
    again = command(*words, "-o", folder)
    assert "0 answered now, 4 before" in again.out
    heads = json.loads((tmp_path / "table" / "sweep.json").read_text())
    assert heads["format"] == "arborcast.sweep/1"
