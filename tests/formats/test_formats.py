from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.certificate import Bound, Certificate, Cut, Dual, Partition, Scope
from arborcast.synth.collective import NAMED_KINDS, Collective
from arborcast.synth.errors import InputError, ScheduleError, TopologyError
from arborcast.synth.formats import (
    bound_from_document,
    bound_to_document,
    certificate_from_document,
    certificate_to_document,
    read_explicit,
    schedule_from_document,
    schedule_to_document,
    topology_from_document,
    topology_to_document,
    write_explicit,
)
from arborcast.synth.formats.atomic import replacing, write_atomically
from arborcast.synth.formats.numerals import parse_number, shorten
from arborcast.synth.formats.reading import parse_json, read_text
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Link, Switch, Topology
from tests.support.refusals import refusals, refuses
from tests.support.strategies import collectives, topologies

# Two ranks on a switch: the file of a broadcast over it, to the letter of the design.
PAIR = Topology.build(
    "pair",
    2,
    [Link(*hop, Fraction(25, 2), Fraction(7, 10)) for hop in ((0, 2), (1, 2), (2, 0), (2, 1))],
    ["sw"],
    [[1, 0, 2]],
)
BROADCAST = Schedule.build(
    PAIR,
    Collective.on(PAIR, "broadcast"),
    Method("trees", 3, (("epsilon", "1/10"), ("iterations", 12), ("note", None))),
    Bound(Fraction(25, 2), Cut(frozenset({0, 2}), Fraction(25, 2))),
    [Chunk(Fraction(1, 3), 0), Chunk(Fraction(2, 3), 0)],
    [Transfer(0, 0, 1, 0, False, (2,)), Transfer(1, 0, 1, 0, False, (2,))],
)
DOCUMENT: dict[str, Any] = {
    "format": "arborcast.schedule/1",
    "topology": {
        "name": "pair",
        "ranks": 2,
        "switches": ["sw"],
        "links": [
            {"from": 0, "to": "sw", "bandwidth": "25/2", "latency_us": "7/10"},
            {"from": 1, "to": "sw", "bandwidth": "25/2", "latency_us": "7/10"},
            {"from": "sw", "to": 0, "bandwidth": "25/2", "latency_us": "7/10"},
            {"from": "sw", "to": 1, "bandwidth": "25/2", "latency_us": "7/10"},
        ],
        "symmetries": [[1, 0, "sw"]],
    },
    "collective": {"kind": "broadcast", "root": 0, "ranks": [0, 1]},
    "method": {"name": "trees", "seed": 3, "epsilon": "1/10", "iterations": 12, "note": None},
    "rate": "25/2",
    "bound": {"rate": "25/2", "certificate": {"kind": "cut", "side": [0, "sw"], "capacity": "25/2"}},
    "rounds": None,
    "chunks": [
        {"share": "1/3", "owner": 0, "target": None},
        {"share": "2/3", "owner": 0, "target": None},
    ],
    "transfers": [
        {"chunk": 0, "from": 0, "to": 1, "via": ["sw"], "step": 0, "reduce": False},
        {"chunk": 1, "from": 0, "to": 1, "via": ["sw"], "step": 0, "reduce": False},
    ],
}

shares = st.fractions(min_value=Fraction(1, 1000), max_value=3, max_denominator=10**6)


@st.composite
def schedules(draw: Callable) -> Schedule:
    """Well-formed schedules, most of which do nothing useful."""
    topology = draw(topologies(max_ranks=4, symmetric=draw(st.booleans())))
    ranks = st.integers(0, topology.ranks - 1)
    chunks = [
        Chunk(share, owner, target)
        for share, owner, target in draw(st.lists(st.tuples(shares, ranks, st.none() | ranks), min_size=1))
    ]
    direct = [pair for pair in topology.bandwidth if max(pair) < topology.ranks]
    paths = [(pair[0], pair[1], ()) for pair in direct]
    paths += [
        (src, dst, (switch,))
        for (src, switch) in topology.bandwidth
        for (other, dst) in topology.bandwidth
        if other == switch and switch >= topology.ranks and src < topology.ranks and dst < topology.ranks
    ]
    transfers = [
        Transfer(chunk, path[0], path[1], step, reduce, path[2])
        for chunk, path, step, reduce in draw(
            st.lists(
                st.tuples(
                    st.integers(0, len(chunks) - 1),
                    st.sampled_from(paths),
                    st.integers(0, 5),
                    st.booleans(),
                )
            )
            if paths
            else st.just([])
        )
    ]
    rounds = draw(st.none() | st.lists(st.integers(1, 9), min_size=6, max_size=8))
    return Schedule(
        topology,
        draw(collectives(topology, relays=True)),
        Method(draw(st.text("abcxyz-", min_size=1)), draw(st.integers(0, 2**40))),
        Bound(draw(shares), draw(certificates(topology)), draw(st.sampled_from(Scope))),
        tuple(chunks),
        tuple(transfers),
        draw(st.just(Fraction(0)) | shares),
        None if rounds is None else tuple(rounds),
    )


@st.composite
def certificates(draw: Callable, topology: Topology) -> Certificate:
    vertices = st.frozensets(st.integers(0, topology.size - 1))
    match draw(st.sampled_from(["cut", "partition", "dual"])):
        case "cut":
            return Cut(draw(vertices), draw(shares))
        case "partition":
            return Partition(tuple(draw(st.lists(vertices, max_size=4))), draw(shares))
    count = len(topology.links)
    return Dual(tuple(draw(st.lists(shares, min_size=count, max_size=count))), draw(shares), draw(shares))


# --- round trips --------------------------------------------------------------------------------------


def test_the_file_is_as_the_design_says(tmp_path: Path) -> None:
    assert schedule_to_document(BROADCAST) == DOCUMENT
    write_explicit(BROADCAST, tmp_path / "s.json")
    assert json.loads((tmp_path / "s.json").read_text()) == DOCUMENT
    assert read_explicit(tmp_path / "s.json") == BROADCAST


@given(schedules())
@settings(max_examples=60)
def test_schedules_survive_a_file(tmp_path_factory: pytest.TempPathFactory, schedule: Schedule) -> None:
    path = tmp_path_factory.mktemp("schedules") / "s.json"
    write_explicit(schedule, path)
    assert read_explicit(path) == schedule
    assert json.loads(path.read_text()) == schedule_to_document(schedule)


@given(topologies(max_ranks=5, symmetric=False, connected=False), st.data())
@settings(max_examples=60)
def test_topologies_and_bounds_survive_a_document(topology: Topology, data: st.DataObject) -> None:
    assert topology_from_document(topology_to_document(topology), "f") == topology
    certificate = data.draw(certificates(topology))
    assert (
        certificate_from_document(certificate_to_document(certificate, topology), topology, "f")
        == certificate
    )
    bound = Bound(data.draw(shares), certificate, data.draw(st.sampled_from(Scope)))
    document = bound_to_document(bound, topology)
    assert bound_from_document(document, topology, "f") == bound
    assert ("scope" in document) == (bound.scope is Scope.TREES)


def test_optional_keys_may_be_left_out() -> None:
    short = copy.deepcopy(DOCUMENT)
    del short["rounds"]
    for chunk in short["chunks"]:
        del chunk["target"]
    for transfer in short["transfers"]:
        del transfer["reduce"]
    assert schedule_from_document(short, "f") == BROADCAST


def test_what_switches_can_do() -> None:
    able = Switch("b", reduces=True, multicasts=True, loopback=True, adder=Fraction(25, 2), trees=4)
    slow = Switch("c", reduces=True, latency_us=Fraction(7, 10), stores=True)
    summing = Topology.build("sum", 1, [Link(0, 1, 1), Link(3, 0, 2)], [able, slow, Switch("a")])
    document = topology_to_document(summing)
    assert document["switches"] == [
        {"name": "b", "reduces": True, "multicasts": True, "loopback": True, "adder": "25/2", "trees": 4},
        {"name": "c", "reduces": True, "latency_us": "7/10", "stores": True},
        "a",
    ]
    assert topology_from_document(document, "f") == summing


def test_files_name_switches_in_any_order() -> None:
    links = [{"from": "plain", "to": 0, "bandwidth": 1}, {"from": 0, "to": "sum", "bandwidth": 2}]
    switches = ["plain", {"name": "sum", "reduces": True}]
    same = [0, "plain", "sum"]
    document = {"name": "t", "ranks": 1, "switches": switches, "links": links, "symmetries": [same]}
    drawn = Topology.build(
        "t", 1, [Link(2, 0, 1), Link(0, 1, 2)], [Switch("sum", reduces=True), "plain"], [[0, 1, 2]]
    )
    assert topology_from_document(document, "f") == drawn
    document["switches"] = ["plain", {"name": "sum", "turns": True}]
    with pytest.raises(InputError, match=r"f: switches\[1\]: switch sum: one that turns must reduce"):
        topology_from_document(document, "f")


SWITCHED: dict[str, Any] = {
    **DOCUMENT,
    "format": "arborcast.schedule/2",
    "topology": {**DOCUMENT["topology"], "switches": [{"name": "sw", "multicasts": True}]},
    "transfers": [
        {"chunk": 0, "from": 0, "to": "sw", "via": [], "step": 0, "reduce": False},
        {"chunk": 1, "from": 0, "to": 1, "via": ["sw"], "step": 0, "reduce": False},
        {"chunk": 0, "from": "sw", "to": 1, "via": [], "step": 1, "reduce": False},
    ],
}


def test_transfers_that_end_at_switches_are_of_the_second_version(tmp_path: Path) -> None:
    """It is written for these alone; a reader of the first one takes them for what they are not, and errs."""
    able = replace(PAIR, switches=(Switch("sw", multicasts=True),))
    first, second = BROADCAST.transfers
    moved = (replace(first, dst=2, via=()), second, Transfer(0, 2, 1, 1))
    schedule = replace(BROADCAST, topology=able, transfers=moved)
    write_explicit(schedule, tmp_path / "s.json")
    assert json.loads((tmp_path / "s.json").read_text()) == schedule_to_document(schedule) == SWITCHED
    assert read_explicit(tmp_path / "s.json") == schedule_from_document(SWITCHED, "f") == schedule
    assert schedule_from_document({**DOCUMENT, "format": "arborcast.schedule/2"}, "f") == BROADCAST
    assert (
        schedule_to_document(replace(schedule, transfers=BROADCAST.transfers))["format"] == DOCUMENT["format"]
    )
    with pytest.raises(ScheduleError, match=r"f: transfers\[0\].to: must be a whole number, got 'sw'"):
        schedule_from_document({**SWITCHED, "format": "arborcast.schedule/1"}, "f")


@refuses("path", "value", "message")
def test_wrong_ends_at_switches(path: tuple[str | int, ...], value: object, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        schedule_from_document(_with(SWITCHED, ("transfers", *path), value), "f")
    plain = _with(SWITCHED, ("topology", "switches"), ["sw"])
    with pytest.raises(ScheduleError, match="f: transfer 0: ends at switch sw, which only forwards"):
        schedule_from_document(plain, "f")


def test_what_is_well_formed_but_wrong_loads() -> None:
    wrong = copy.deepcopy(DOCUMENT)
    wrong["chunks"][0] = {"share": "9/3", "owner": 1, "target": None}
    wrong["rate"] = "1000"
    wrong["bound"]["certificate"]["capacity"] = "1"
    del wrong["transfers"][1]
    assert schedule_from_document(wrong, "f").chunks[0] == Chunk(Fraction(3), 1)


# --- topology documents -------------------------------------------------------------------------------


def test_between_is_both_directions_and_numbers_are_exact() -> None:
    document = {
        "ranks": 2,
        "links": [
            {"between": [0, 1], "bandwidth": 0.7, "latency_us": "1e-3"},
            {"from": 1, "to": 0, "bandwidth": "25/2", "latency_us": 0.001},
        ],
    }
    topology = topology_from_document(document, "some/where.yaml")
    assert topology.bandwidth == {(0, 1): Fraction(7, 10), (1, 0): Fraction(132, 10)}
    assert topology.latency_us[0, 1] == Fraction(1, 1000)
    assert topology.name == "where"


def test_symmetries_of_the_ranks_alone_leave_the_switches_in_place() -> None:
    document = copy.deepcopy(DOCUMENT["topology"])
    document["symmetries"] = [[1, 0]]
    assert topology_from_document(document, "f").symmetries == ((1, 0, 2),)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        *refusals(__file__, "test_wrong_topology_documents"),
        (("links", 2, "bandwidth"), 10**500, "must have at most 400 digits"),
    ],
)
def test_wrong_topology_documents(path: tuple[str | int, ...], value: object, message: str) -> None:
    with pytest.raises(TopologyError, match=message) as caught:
        topology_from_document(_with(DOCUMENT["topology"], path, value), "f")
    assert "\n" not in str(caught.value)


# --- schedule documents -------------------------------------------------------------------------------


@refuses("path", "value", "message")
def test_wrong_schedule_documents(path: tuple[str | int, ...], value: object, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        schedule_from_document(_with(DOCUMENT, path, value), "f")
    assert "\n" not in str(caught.value)


def test_a_dual_names_every_link_once() -> None:
    dual = certificate_to_document(Dual((Fraction(1),) * 4, Fraction(1), Fraction(2)), PAIR)
    for lengths, message in (
        (dual["lengths"][1:], "certificate.*lengths: must name every link, got none for 0->sw"),
        (dual["lengths"] + dual["lengths"][:1], r"lengths\[4\]: must name each link once, got 0->'sw'"),
        ([{"from": 0, "to": 1, "length": 1}], r"lengths\[0\]: must name a link of the topology, got 0->1"),
    ):
        with pytest.raises(ScheduleError, match=message):
            bound_from_document({"rate": "1", "certificate": {**dual, "lengths": lengths}}, PAIR, "f")


def test_a_dual_names_every_limited_adder_once() -> None:
    switches = [
        Switch("one", reduces=True, adder=Fraction(1)),
        Switch("two", reduces=True, adder=Fraction(1)),
    ]
    able = Topology.build(
        "adders", 2, [Link(0, 2, Fraction(1)), Link(3, 1, Fraction(1))], [*switches, Switch("plain")]
    )
    priced = Dual((Fraction(1),) * 2, Fraction(1), Fraction(2), (Fraction(1, 3), Fraction(0)))
    dual = certificate_to_document(priced, able)
    assert dual["adders"] == [{"switch": "one", "price": "1/3"}, {"switch": "two", "price": "0"}]
    assert certificate_from_document({**dual, "adders": dual["adders"][::-1]}, able, "f") == priced
    without = {key: value for key, value in dual.items() if key != "adders"}
    assert certificate_from_document(without, able, "f") == replace(priced, adders=())
    for adders, message in (
        (dual["adders"][1:], "adders: must name every limited adder, got none for one"),
        (dual["adders"] + dual["adders"][:1], r"adders\[2\].switch: must name each switch once, got 'one'"),
        ([{"switch": "plain", "price": 1}], r"adders\[0\].switch: must name a switch whose adder is limited"),
    ):
        with pytest.raises(ScheduleError, match=message):
            certificate_from_document({**dual, "adders": adders}, able, "f")


def test_a_setting_must_not_hide_the_seed(tmp_path: Path) -> None:
    hiding = copy.copy(BROADCAST)
    object.__setattr__(hiding, "method", Method("mwu", 0, (("seed", 7),)))
    with pytest.raises(ScheduleError, match="setting seed must not stand twice"):
        write_explicit(hiding, tmp_path / "s.json")
    assert list(tmp_path.iterdir()) == []


def _with(document: object, path: tuple[str | int, ...], value: object) -> Any:
    if not path:
        return value
    changed: Any = copy.deepcopy(document)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


# --- files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1, column 1: must be JSON"),
        (b"\xff\xfe", "must be UTF-8 text, got byte 0xff at 0"),
        (b'{"a": "\0"}', "must be text, got a NUL byte at 7"),
        (b'{"format": 1,', "line 1, column 14: must be JSON"),
        (b'{"a": 1, "a": 2}', "key 'a' must stand once in its object, got it more often"),
        (b'{"a": NaN}', "numbers must be finite, got NaN"),
        (b'{"a": 1e999999999}', "must have an exponent of at most 60"),
        (b'{"a": ' + b"9" * 5000 + b"}", "whole numbers must have fewer digits"),
        (b"[" * 200_000, "must not be nested this deep"),
        (b'{"format": "arborcast.schedule/1"}', "topology: is missing"),
        (b"x" * 2000, "must be at most 1000 bytes, got more"),
    ],
)
def test_unreadable_schedule_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"s.json: .*{message}") as caught:
        read_explicit(path, max_bytes=10**6 if len(content) > 2000 else 1000)
    assert "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none.json", "No such file or directory"),
        (tmp_path / ("x" * 300), "File name too long"),
        (Path("a\0b"), "null byte"),
        (Path("/dev/zero"), "must be at most 1000 bytes"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            read_text(path, max_bytes=1000)
        assert "\n" not in str(caught.value)


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda raw: raw.decode("latin-1")))
def test_any_text_is_json_or_one_line(text: str) -> None:
    try:
        parse_json(text, "f")
    except InputError as error:
        assert "\n" not in str(error)


scraps = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["sw", "1/0", "1/3", "-2", 10**400, "9" * 900, "allreduce", "cut", "dual", "partition"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _paths(document: object, here: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    return [here, *(path for key, value in items for path in _paths(value, (*here, key)))]


@given(st.data())
@settings(max_examples=400)
def test_tampered_schedules_load_or_are_refused_in_one_line(data: st.DataObject) -> None:
    changed: Any = data.draw(st.sampled_from([DOCUMENT, SWITCHED]))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(_paths(changed)[1:]))
        value = data.draw(scraps | st.sampled_from(_paths(DOCUMENT)).map(lambda p: _at(DOCUMENT, p)))
        changed = _with(changed, path, value)
    try:
        again = schedule_from_document(changed, "f")
    except InputError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
    else:
        assert schedule_from_document(schedule_to_document(again), "f") == again


def _at(document: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


# --- writing ------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    write_atomically(path, "old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"half of the n")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_writing_keeps_mode_and_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("new", 0o640)


def test_new_files_obey_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_atomically(tmp_path / "new", b"content")
    finally:
        os.umask(old)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


def test_devices_are_written_to_and_not_replaced() -> None:
    write_atomically("/dev/null", "gone")
    assert not Path("/dev/null").is_file()


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path, "must be a file to write to, got a directory"),
        (tmp_path / "none" / "s.json", "cannot be written: No such file or directory"),
        ("a\0b", "the name holds a NUL"),
    ):
        with pytest.raises(InputError, match=message):
            write_atomically(path, "x")


# --- numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "number"),
    [
        *(
            (3, "3"),
            ("3", "3"),
            (0.7, "7/10"),
            ("0.70", "7/10"),
            (".5", "1/2"),
            ("5.", "5"),
            (" 25/2 ", "25/2"),
        ),
        *(("-1/3", "-1/3"), ("1e3", "1000"), ("2.5e-1", "1/4"), (1e22, "10000000000000000000000")),
    ],
)
def test_numbers(written: object, number: str) -> None:
    assert parse_number(written) == Fraction(number)


@pytest.mark.parametrize(
    "written", ["", "1/-2", "1_000", "0x10", "½", "٣", "1 2", "--1", "1e", True, None, [1]]
)
def test_no_numbers(written: object) -> None:
    with pytest.raises(ValueError, match="must be a number"):
        parse_number(written)


@given(st.fractions())
def test_fractions_are_read_as_written(number: Fraction) -> None:
    assert parse_number(str(number)) == number


@given(scraps)
def test_values_in_messages_are_short_and_on_one_line(value: object) -> None:
    assert len(shorten(value)) < 200
    assert "\n" not in shorten(value)


def test_kinds_are_all_writable() -> None:
    for kind in NAMED_KINDS:
        document = {**DOCUMENT, "collective": {"kind": kind.value, "root": None, "ranks": [0, 1]}}
        document["collective"]["root"] = 0 if kind.has_root else None
        assert schedule_from_document(document, "f").collective.kind is kind
