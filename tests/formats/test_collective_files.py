"""Files of custom collectives: what is read, and one line for everything that is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth.bounds import bound, certified_rate
from arborcast.synth.collective import Collective, Demand
from arborcast.synth.errors import CollectiveError, InputError
from arborcast.synth.formats import collective_from_document, read_collective
from tests.support.refusals import refusals

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "collectives").glob("*.yaml"))
RING = topologies.load("ring:4")

HALO = """\
name: halo-exchange          # printable, one line
blocks:                      # all of the same size
  - {at: [0], to: [1, 3]}
  - {at: [1, 2], to: [0]}
"""


def demand(sources: set[int], targets: set[int]) -> Demand:
    return Demand(frozenset(sources), frozenset(targets))


HALO_DEMANDS = (demand({0}, {1, 3}), demand({1, 2}, {0}))


def written(folder: Path, text: str | bytes, name: str = "halo.yaml") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_file_in_either_language(tmp_path: Path) -> None:
    wanted = Collective.custom(RING, HALO_DEMANDS)
    assert read_collective(written(tmp_path, HALO), RING) == wanted
    document = {"blocks": [{"at": [0], "to": [1, 3]}, {"at": [2, 1], "to": [0]}]}
    for name in ("halo.json", "halo"):
        assert read_collective(written(tmp_path, json.dumps(document), name), RING) == wanted
    assert read_collective(written(tmp_path, HALO), topologies.load("ring:9")) == wanted


def test_who_holds_a_block_already_has_nothing_to_get(tmp_path: Path) -> None:
    path = written(tmp_path, "blocks: [{at: [0, 1], to: [0, 1, 2]}, {at: [0, 1], to: [2]}]")
    # blocks may be alike: together they are one of twice the size
    assert read_collective(path, RING).demands == (demand({0, 1}, {2}),) * 2


def test_relays_are_not_named(tmp_path: Path) -> None:
    """The fragment is ranks 0..3 of a fabric of nine, whose other ranks are relays."""
    path, fabric = written(tmp_path, HALO), topologies.load("ring:9")
    assert read_collective(path, fabric, ranks=4).relays(fabric) == (4, 5, 6, 7, 8)
    with pytest.raises(CollectiveError, match=r"blocks\[0\].to: rank must be in 0..2, got 3"):
        read_collective(path, fabric, ranks=3)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples(path: Path) -> None:
    for spec in ("dgx1", "torus:2x4", "dgx-a100"):
        fabric = topologies.load(spec)
        collective = read_collective(path, fabric)
        found = bound(fabric, collective)
        assert len(collective.ranks) == 8 and found.rate > 0
        assert certified_rate(fabric, collective, found.certificate) == found.rate
    with pytest.raises(
        CollectiveError, match=rf"{path.name}: blocks\[0\].(at|to): rank must be in 0..3, got 4"
    ):
        read_collective(path, RING)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *refusals(__file__, "test_wrong_collective_files"),
        (b"\xff", "halo.yaml: must be UTF-8 text"),
        ("#" * 2000, "halo.yaml: must be at most 1000 bytes, got more"),
    ],
)
def test_wrong_collective_files(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_collective(written(tmp_path, text), RING, max_bytes=1000)
    assert len(str(caught.value).splitlines()) == 1


def test_no_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent.yaml: cannot be read: No such file"):
        read_collective(tmp_path / "absent.yaml", RING)


scraps = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.data())
@settings(max_examples=300)
def test_tampered_documents_are_read_or_refused_in_one_line(data: st.DataObject) -> None:
    document = {"name": "halo", "blocks": [{"at": [0], "to": [1, 3]}, {"at": [1, 2], "to": [0]}]}
    for _ in range(data.draw(st.integers(1, 3))):
        here: object = document
        while True:
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))  # type: ignore[arg-type]
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            inner = here[key]  # type: ignore[index]
            if not isinstance(inner, dict | list) or not data.draw(st.booleans()):
                here[key] = data.draw(scraps)  # type: ignore[index]
                break
            here = inner
    try:
        collective_from_document(document, RING, "x").check(RING)
    except InputError as error:
        assert str(error).startswith("x: ") and len(str(error).splitlines()) == 1


@given(
    st.lists(
        st.sampled_from(
            [*"{}[]:,-&*!'\"#\n\t 0123", "blocks:", "- ", "at: ", "to: ", "name: ", "[1, 2]", "1e9"]
        )
        | st.text(max_size=2),
        max_size=25,
    ).map("".join)
)
@settings(max_examples=300)
def test_any_text_is_read_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = written(tmp_path_factory.getbasetemp(), text.encode("utf-8", "surrogatepass"), "fuzz.yaml")
    try:
        read_collective(path, RING)
    except InputError as error:
        assert len(str(error).splitlines()) == 1
