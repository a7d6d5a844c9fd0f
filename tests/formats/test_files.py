from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.errors import InputError, TopologyError
from arborcast.synth.formats import topology_to_document
from arborcast.synth.formats.yaml_text import parse_yaml
from arborcast.synth.topology import Topology
from arborcast.topologies.files import load_file
from arborcast.topologies.rates import Rates
from arborcast.topologies.readers.options import Said
from tests.support.refusals import refusals
from tests.support.strategies import topologies

EXAMPLES = sorted((Path(__file__).parents[2] / "topologies" / "examples").glob("*.yaml"))
DRAWN = """
name: square-with-a-diagonal
ranks: 4
switches: [nvswitch]           # {name: nvswitch, reduces: true} for in-network reduction
links:
  - {between: [0, 1], bandwidth: 25, latency_us: 0.7}      # both directions
  - {from: 0, to: nvswitch, bandwidth: 25/2}               # one direction
"""


def written(folder: Path, text: str | bytes, name: str = "t.yaml") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_the_file_of_the_design(tmp_path: Path) -> None:
    topology = load_file(written(tmp_path, DRAWN)).topology
    assert topology.bandwidth == {(0, 1): 25, (1, 0): 25, (0, 4): Fraction(25, 2)}
    assert topology.latency_us == {(0, 1): Fraction(7, 10), (1, 0): Fraction(7, 10), (0, 4): 0}
    assert topology.name == "square-with-a-diagonal"
    assert [switch.name for switch in topology.switches] == ["nvswitch"]


@given(topologies(max_ranks=5, symmetric=False, connected=False))
@settings(max_examples=40)
def test_yaml_and_json_hold_the_same(tmp_path_factory: pytest.TempPathFactory, topology: Topology) -> None:
    folder = tmp_path_factory.mktemp("topologies")
    document = topology_to_document(topology)
    assert load_file(written(folder, yaml.safe_dump(document))).topology == topology
    assert load_file(written(folder, json.dumps(document), "t.json")).topology == topology
    assert load_file(written(folder, json.dumps(document), "t.txt")).topology == topology


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load(path: Path) -> None:
    topology = load_file(path).topology
    assert topology.name == path.stem
    assert topology.links


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# only a comment", None),
        ("a: 1", {"a": 1}),
        ("[0.7, .5, 1., 1e3, -2.5e-1]", [Fraction(7, 10), Fraction(1, 2), 1, 1000, Fraction(-1, 4)]),
        # text that YAML 1.1 would take for something else
        (
            "[no, on, 1:30, 0x10, 1_000, 2020-01-01, .nan, .inf]",
            ["no", "on", "1:30", "0x10", "1_000", "2020-01-01", ".nan", ".inf"],
        ),
        ("[null, ~, true, False]", [None, None, True, False]),
        ("a:", {"a": None}),
        ("['3', \"0.5\", 'null']", ["3", "0.5", "null"]),
        ("{a: [{b: c}], d: {}}", {"a": [{"b": "c"}], "d": {}}),
        ("a:\n- 1\n- x: 2\n  y: |\n    text\n", {"a": [1, {"x": 2, "y": "text\n"}]}),
    ],
)
def test_yaml_values(text: str, value: object) -> None:
    assert parse_yaml(text, "f") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *refusals(__file__, "test_refused_yaml"),
        ("[" * 100_000, "line 1, column 33: must be nested at most 32 deep"),
        ("a: " + "9" * 10_000, "line 1, column 4: must have at most 400 digits"),
    ],
)
def test_refused_yaml(text: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^f: {message}") as caught:
        parse_yaml(text, "f")
    assert "\n" not in str(caught.value)


def test_a_billion_laughs_are_refused() -> None:
    lines = ["a0: &a0 [lol]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    with pytest.raises(InputError, match="line 2, column 10: must not use aliases"):
        parse_yaml("\n".join(lines), "f")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        *refusals(__file__, "test_wrong_files"),
        ("t.yaml", b"\x80", "t.yaml: must be UTF-8 text, got byte 0x80 at 0"),
        ("t", "x" * 2000, "t: must be at most 1000 bytes, got more"),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, text: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_file(written(tmp_path, text, name), max_bytes=1000)
    assert "\n" not in str(caught.value)


def test_options_that_do_not_go_with_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, DRAWN)
    with pytest.raises(
        TopologyError, match=r"gpu= \(--gpu\) does not go with YAML, which holds its own links"
    ):
        load_file(path, Said(gpu="v100"))
    with pytest.raises(TopologyError, match=r"pcie=True \(--pcie\) does not go with YAML"):
        load_file(path, Said(pcie=True))
    with pytest.raises(
        TopologyError, match=r"rates nccl \(--rates\) does not go with YAML, .*; take rates datasheet"
    ):
        load_file(path, Said(rates=Rates.NCCL))


fragments = st.sampled_from(
    [
        *"{}[]:,-?&*!|>'\"%@`#\n\t ~",
        *("ranks: 2", "links:", "- ", "between", "bandwidth: 1", "GPU0 ", "<", "\\x", "X", "NV2", "GPU1"),
        *("system", "&a", "*a", "!!float", "---", "...", "1e5", "\x85", "\ufeff", "\u2028"),
    ]
)


@given(st.lists(fragments | st.text(max_size=3), max_size=30).map("".join))
@settings(max_examples=500)
def test_any_text_is_a_topology_or_one_line(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    try:
        content = text.encode()
    except UnicodeEncodeError:  # lone surrogates
        content = text.encode("utf-16", "surrogatepass")
    path = written(tmp_path_factory.getbasetemp(), content, "fuzz")
    for name in ("fuzz", "fuzz.yaml", "fuzz.json", "fuzz.xml"):
        path = path.rename(path.with_name(name))
        try:
            load_file(path)
        except InputError as error:
            assert len(str(error).splitlines()) == 1


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_any_bytes_are_a_topology_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = written(tmp_path_factory.getbasetemp(), content, "bytes")
    try:
        load_file(path)
    except InputError as error:
        assert len(str(error).splitlines()) == 1


@given(st.data())
@settings(max_examples=300)
def test_mutilated_yaml_is_a_topology_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    text = DRAWN
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 8))
        text = text[:start] + data.draw(fragments | st.just("")) + text[start + length :]
    path = written(tmp_path_factory.getbasetemp(), text, "mutilated.yaml")
    try:
        load_file(path)
    except InputError as error:
        assert len(str(error).splitlines()) == 1
