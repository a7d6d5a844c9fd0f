"""Implicit schedule files: round trips, their size, and one line for whatever is wrong with one."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth.certificate import Bound, Cut, Dual, Partition
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError, ScheduleError
from arborcast.synth.formats.any_schedule import read_schedule, write_schedule
from arborcast.synth.formats.implicit_documents import (
    from_runs,
    implicit_from_document,
    implicit_to_document,
    to_runs,
    write_implicit,
)
from arborcast.synth.formats.schedules import schedule_to_document, write_explicit
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Chunk, Method, Transfer
from arborcast.synth.symmetry.translations import Translations
from tests.formats.test_formats import scraps
from tests.support.drawn_in_network import TURNS, implicit_two_stars, two_stars
from tests.support.implicit_cases import implicit_allgather
from tests.support.refusals import refusals

SPECS = ("torus:3x4", "mi250:boxes=2", "dgx-a100:boxes=2", "dragonfly:3x2x1", "fat-tree:2x2x3", "mesh:3x3")


@cache
def case(spec: str) -> ImplicitSchedule:
    return implicit_allgather(topologies.load(spec))


def small() -> ImplicitSchedule:
    """An allgather on a ring of six ranks about a hub, one way round; every key has something to say."""
    ring = topologies.load("ring:6")
    return ImplicitSchedule.build(
        ring,
        Collective.on(ring, Kind.ALLGATHER),
        Method("drawn", 7, (("note", "by hand"),)),
        Bound(Fraction(12, 5), Cut(frozenset({1, 2, 3, 4, 5}), Fraction(2))),
        Translations.generated(ring, ring.symmetries),
        [Chunk(Fraction(1, 12), 0), Chunk(Fraction(1, 12), 0)],
        [Transfer(0, step, step + 1, step) for step in range(5)]
        + [Transfer(1, (6 - step) % 6, 5 - step, step) for step in range(5)],
    )


def test_the_file_is_as_described(tmp_path: Path) -> None:
    write_implicit(small(), tmp_path / "ring.json")
    assert (tmp_path / "ring.json").read_text() == (
        '{"format": "arborcast.implicit/1",\n'
        ' "topology": {"name": "ring:6", "ranks": 6, "switches": [], "links": ['
        '{"from": 0, "to": 1, "bandwidth": "1", "latency_us": "0"}, '
        '{"from": 0, "to": 5, "bandwidth": "1", "latency_us": "0"}], "symmetries": [["1..5", 0]]},\n'
        ' "translations": [{"order": 6, "images": ["1..5", 0]}],\n'
        ' "collective": {"kind": "allgather", "ranks": ["0..5"]},\n'
        ' "method": {"name": "drawn", "seed": 7, "note": "by hand"},\n'
        ' "rate": "12/5",\n'
        ' "bound": {"rate": "12/5", "certificate": '
        '{"kind": "cut", "side": [1, 2, 3, 4, 5], "capacity": "2"}},\n'
        ' "chunks": [{"share": "1/12", "owner": 0, "target": null},\n'
        '  {"share": "1/12", "owner": 0, "target": null}],\n'
        ' "transfers": ['
        + ",\n  ".join(
            f'{{"chunk": {chunk}, "from": {src}, "to": {dst}, "via": [], "step": {step}, "reduce": false}}'
            for step in range(5)
            for chunk, src, dst in ((0, step, step + 1), (1, (6 - step) % 6, 5 - step))
        )
        + "]}\n"
    )


def test_transfers_that_end_at_switches_are_of_the_second_version(tmp_path: Path) -> None:
    schedule = implicit_two_stars(two_stars(TURNS))
    write_implicit(schedule, tmp_path / "two.json")
    document = json.loads((tmp_path / "two.json").read_text())
    assert document == implicit_to_document(schedule) and document["format"] == "arborcast.implicit/2"
    assert document["transfers"][8]["from"] == "right" and document["transfers"][8]["to"] == "left"
    assert read_schedule(tmp_path / "two.json") == schedule
    document["format"] = "arborcast.implicit/1"
    with pytest.raises(ScheduleError, match=r"f: transfers\[0\].to: must be a whole number, got 'left'"):
        implicit_from_document(document, "f")


def test_switches_stand_in_the_order_of_their_numbers() -> None:
    document = implicit_to_document(implicit_two_stars(two_stars(TURNS)))
    document["topology"]["switches"].insert(0, "plain")
    rule = "topology.switches: those that reduce or multicast must come before those that only forward"
    with pytest.raises(ScheduleError, match=f"f: {rule}, got 'left' after 'plain'"):
        implicit_from_document(document, "f")


@pytest.mark.parametrize("spec", SPECS)
def test_schedules_survive_a_file(spec: str, tmp_path: Path) -> None:
    file = tmp_path / "implicit.json"
    links = len(case(spec).topology.links)
    for certificate in (
        Cut(frozenset({0}), Fraction(7, 2)),
        Partition((frozenset({0, 1}), frozenset({2})), Fraction(3)),
        Dual((Fraction(2, 3),) * links, Fraction(4), Fraction(5)),
        Dual(tuple(Fraction(index, 3) for index in range(links)), Fraction(4), Fraction(5)),
    ):
        schedule = replace(case(spec), bound=Bound(Fraction(9, 2), certificate))
        write_implicit(schedule, file)
        assert read_schedule(file) == schedule
        assert implicit_from_document(json.loads(file.read_text()), "f") == schedule
        assert implicit_to_document(schedule) == json.loads(file.read_text())


@pytest.mark.parametrize("spec", ["dgx-a100:boxes=128", "torus:32x32", "hypercube:10"])
def test_a_thousand_ranks_take_little_room(spec: str, tmp_path: Path) -> None:
    file = tmp_path / "large.json"
    schedule = case(spec)
    write_implicit(schedule, file)
    # A transfer to each other rank, 100 bytes each at most, and a generator or two.
    assert file.stat().st_size < 200_000
    assert read_schedule(file) == schedule


def test_either_format_by_its_key(tmp_path: Path) -> None:
    implicit, explicit = small(), small().expand()
    for name, schedule in (("implicit", implicit), ("explicit", explicit)):
        write_schedule(schedule, tmp_path / name)
        assert read_schedule(tmp_path / name) == schedule
    for content in ('{"format": "arborcast.schedule/9"}', '{"format": ["arborcast.implicit/1"]}', "[]", "{}"):
        (tmp_path / "other").write_text(content)
        known = [f"arborcast.{form}/{version}" for form in ("schedule", "implicit") for version in (1, 2)]
        rule = f"format: must be {' or '.join(known)}, got"
        with pytest.raises(ScheduleError, match=f"other: {re.escape(rule)}"):
            read_schedule(tmp_path / "other")


@pytest.mark.parametrize("spec", ["mi250:boxes=2", "dgx-a100:boxes=2"])
def test_explicit_files_are_what_their_documents_say(spec: str, tmp_path: Path) -> None:
    whole = case(spec).expand()
    write_explicit(whole, tmp_path / "explicit.json")
    document = schedule_to_document(whole)
    lists = {key: ",\n  ".join(map(json.dumps, document.pop(key))) for key in ("chunks", "transfers")}
    head = ",\n ".join(f'"{key}": {json.dumps(value)}' for key, value in document.items())
    tail = "".join(f',\n "{key}": [{text}]' for key, text in lists.items())
    assert (tmp_path / "explicit.json").read_text() == f"{{{head}{tail}}}\n"


def test_links_may_be_any_of_their_orbits() -> None:
    document = implicit_to_document(small())
    document["topology"]["links"][1] |= {"from": 3, "to": 2}
    assert implicit_from_document(document, "f") == small()
    document["topology"]["links"] = [{"between": [4, 5], "bandwidth": 1}]
    with pytest.raises(
        ScheduleError, match=r"f: topology\.links: must be one of each orbit, got 5->4 and"
    ) as one:
        implicit_from_document(implicit_to_document(case("torus:3x4")) | {"topology": _torus_twice()}, "f")
    assert "\n" not in str(one.value)
    assert implicit_from_document(document, "f") == small()


def _torus_twice() -> dict[str, Any]:
    topology = copy.deepcopy(implicit_to_document(case("torus:3x4"))["topology"])
    topology["links"].append({"from": 5, "to": 4, "bandwidth": "1"})
    return topology


def _set(*path: Any) -> Callable[[Any], None]:
    *way, last, value = path

    def change(document: Any) -> None:
        for key in way:
            document = document[key]
        document[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *refusals(__file__, "test_wrong_documents"),
        (
            ["translations", [{"order": 2, "images": [1, 0, 3, 2, 5, 4]}] * 40],
            "translations: only the identity may keep a rank in its place, 1099511627776 elements do not",
        ),
    ],
)
def test_wrong_documents(change: list[Any], message: str) -> None:
    document = implicit_to_document(small())
    _set(*change)(document := copy.deepcopy(document))
    with pytest.raises(ScheduleError, match=f"^f: {re.escape(message)}") as caught:
        implicit_from_document(document, "f")
    assert "\n" not in str(caught.value)


def test_lengths_of_orbits_are_those_of_all_their_links() -> None:
    document = copy.deepcopy(implicit_to_document(small()))
    lengths = [{"from": 0, "to": 1, "length": "1"}, {"from": 0, "to": 5, "length": "2"}]
    written = {"kind": "dual", "lengths": lengths, "capacity": "1", "distance": "1"}
    document["bound"]["certificate"] = written
    dual = implicit_from_document(document, "f").bound.certificate
    assert isinstance(dual, Dual)
    ring = small().topology
    assert dual.lengths == tuple(Fraction(1 if (link.dst - link.src) % 6 == 1 else 2) for link in ring.links)


def test_orbits_of_too_many_links_are_refused() -> None:
    ranks = 1 << 16
    document = copy.deepcopy(implicit_to_document(small()))
    document["topology"] |= {"ranks": ranks, "symmetries": []}
    document["topology"]["links"] = [{"from": 0, "to": 1 + 2 * step, "bandwidth": 1} for step in range(33)]
    document["translations"] = [{"order": ranks, "images": [f"1..{ranks - 1}", 0]}]
    with pytest.raises(ScheduleError, match="links: all orbits must have at most 2097152 links, got more"):
        implicit_from_document(document, "f")


def _paths(document: object, here: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Where a document may be changed: every entry but of the transfers, of which one is like the other."""
    items: Any = ()
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = list(enumerate(document))[:6]
    return [here, *(path for key, value in items for path in _paths(value, (*here, key)))]


@given(st.sampled_from([None, *SPECS]), st.data())
@settings(max_examples=150, deadline=None)
def test_tampered_files_load_or_are_refused_in_one_line(spec: str | None, data: st.DataObject) -> None:
    document = copy.deepcopy(implicit_to_document(case(spec) if spec else small()))
    paths = st.sampled_from(_paths(document)[1:])
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(paths)
        runs = st.sampled_from(["0..1", "3..9", "0..999999999", "9..0", "..", 0, -1, 1])
        value = data.draw(scraps | runs | st.lists(runs, max_size=3))
        try:
            _set(*way, last, value)(document)
        except (KeyError, IndexError, TypeError):
            continue  # what an earlier change took away
    try:
        again = implicit_from_document(document, "f")
    except InputError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
    else:
        assert implicit_from_document(implicit_to_document(again), "f") == again


@given(st.lists(st.integers(0, 30)))
def test_runs_are_the_numbers(numbers: list[int]) -> None:
    runs = to_runs(numbers)
    assert from_runs(runs, len(numbers), "f") == numbers
    assert len(runs) <= len(numbers)


def test_runs_drawn() -> None:
    assert to_runs([0, 1, 2, 3, 7, 5, 6, 9, 10, 11]) == ["0..3", 7, 5, 6, "9..11"]
    assert to_runs([]) == []


def test_a_file_larger_than_allowed_is_refused(tmp_path: Path) -> None:
    write_implicit(small(), tmp_path / "ring.json")
    with pytest.raises(InputError, match=r"ring.json: must be at most 100 bytes, got more"):
        read_schedule(tmp_path / "ring.json", max_bytes=100)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "ring.json"
    write_implicit(small(), file)
    before = file.read_bytes()
    with pytest.raises(ScheduleError, match="setting seed must not stand twice"):
        write_implicit(replace(small(), method=Method("drawn", 0, (("seed", 1),))), file)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["ring.json"]
