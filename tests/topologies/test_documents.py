"""Topology files: links that stand twice, and versions."""

from __future__ import annotations

from fractions import Fraction

import pytest

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.topology_text import topology_to_yaml
from arborcast.topologies.readers.topology_documents import parse_document
from tests.support.refusals import refuses

HEAD = "ranks: 2\nlinks:\n  - {between: [0, 1], bandwidth: 25, latency_us: 1}\n"


def both(second: str, *, version: str = "") -> str:
    return f"{version}{HEAD}  - {second}\n"


@pytest.mark.parametrize(
    "second",
    ["{between: [1, 0], bandwidth: 5, latency_us: 1}", "{from: 0, to: 1, bandwidth: 5, latency_us: 1}"],
)
def test_a_link_that_stands_twice_is_said(second: str) -> None:
    machine = parse_document(both(second), "f", "YAML")
    assert machine.topology.bandwidth[0, 1] == 30
    assert len(machine.notes) == 1
    assert "links[1] joins" in machine.notes[0] and "parallel: true says" in machine.notes[0]
    meant = parse_document(both(second.replace("bandwidth", "parallel: true, bandwidth")), "f", "YAML")
    assert (meant.topology, meant.notes) == (machine.topology, ())


@pytest.mark.parametrize(
    "second",
    ["{between: [0, 1], bandwidth: 5, latency_us: 9}", "{from: 1, to: 0, bandwidth: 5, latency_us: 1}"],
)
def test_version_2_wants_to_be_told(second: str) -> None:
    with pytest.raises(TopologyError, match=r"^f: links\[1\]: . and . have a link already; parallel: true"):
        parse_document(both(second, version="version: 2\n"), "f", "YAML")
    told = parse_document(
        both(second.replace("bandwidth", "parallel: true, bandwidth"), version="version: 2\n"), "f", "YAML"
    )
    assert sum(link.bandwidth for link in told.topology.links if link.src == 0 or link.dst == 0) >= Fraction(
        55
    )
    assert parse_document(f"version: 2\n{HEAD}", "f", "YAML").notes == ()


def test_links_of_one_way_each_and_of_unequal_latency_are_no_repetition() -> None:
    text = "ranks: 2\nlinks:\n  - {from: 0, to: 1, bandwidth: 25}\n  - {from: 1, to: 0, bandwidth: 25}\n"
    assert parse_document("version: 2\n" + text, "f", "YAML").notes == ()
    assert parse_document(both("{between: [0, 1], bandwidth: 5, latency_us: 9}"), "f", "YAML").notes == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"version: 3\n{HEAD}", "f: version must be 1 or 2, got 3"),
        (
            both("{between: [0, 1], bandwidth: 5, parallel: maybe}"),
            r"links\[1\].parallel: must be true, got 'maybe'",
        ),
    ],
)
def test_wrong_words(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        parse_document(text, "f", "YAML")


CABLE = "ranks: 3\nlinks:\n  - {between: [0, 1], bandwidth: 25, addresses: [10.1.0.1, 10.1.0.2]}\n"


def test_addresses_of_a_cable_are_turned_round_with_it() -> None:
    topology = parse_document(CABLE, "f", "YAML").topology
    assert [(link.src, link.dst, link.addresses) for link in topology.links] == [
        (0, 1, ("10.1.0.1", "10.1.0.2")),
        (1, 0, ("10.1.0.2", "10.1.0.1")),
    ]
    assert topology.reversed() == topology
    assert {link.addresses for link in topology.without_addresses.links} == {None}
    assert parse_document(topology_to_yaml(topology), "f", "YAML").topology == topology


@refuses("second", "message")
def test_addresses_that_cannot_be(second: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        parse_document(f"{CABLE}  - {second}\n", "f", "YAML")


def test_no_symmetry_takes_a_cable_to_another_one() -> None:
    turned = f"{CABLE}symmetries: [[1, 0, 2]]\n"
    with pytest.raises(TopologyError, match=r"maps link 0->1 to 1->0; both must be alike in all but"):
        parse_document(turned, "f", "YAML")
    plain = parse_document(CABLE, "f", "YAML").topology.without_addresses
    plain.check_symmetry((1, 0, 2))
