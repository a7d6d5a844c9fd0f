"""Topology files for people: what is written reads back as the same topology, whatever names are like."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from arborcast.synth.formats import topology_from_document
from arborcast.synth.formats.topology_text import topology_to_yaml
from arborcast.synth.formats.yaml_text import parse_yaml
from arborcast.synth.topology import Link, Switch, Topology
from tests.support.strategies import topologies


def test_a_drawn_file() -> None:
    links = [
        Link(0, 1, Fraction(25), Fraction(7, 10)),
        Link(1, 0, Fraction(25), Fraction(7, 10)),
        Link(1, 2, Fraction(25, 3)),
    ]
    topology = Topology.build("two and a switch", 2, [*links, Link(2, 0, Fraction(1))], [Switch("no", True)])
    text = topology_to_yaml(
        topology,
        head=["what it is", ""],
        foot=["the end"],
        gpu=["a100", "h100"],
        group=lambda link: "with the switch" if 2 in (link.src, link.dst) else "",
    )
    assert text == (
        "# what it is\n"
        "#\n"
        "\n"
        'name: "two and a switch"\n'
        "ranks: 2\n"
        "gpu: [a100, h100]\n"
        "switches: [{name: no, reduces: true}]\n"
        "links:\n"
        "  - {between: [0, 1], bandwidth: 25, latency_us: 0.7}\n"
        "  # with the switch\n"
        "  - {from: 1, to: no, bandwidth: 25/3, latency_us: 0}\n"
        "  - {from: no, to: 0, bandwidth: 1, latency_us: 0}\n"
        "\n"
        "# the end\n"
    )


names = st.text(min_size=1, max_size=8).filter(str.isprintable) | st.sampled_from(
    ["true", "~", "1", "a: b", "#"]
)


@given(topologies(), st.data())
def test_any_topology_comes_back(topology: Topology, data: st.DataObject) -> None:
    count = len(topology.switches)
    called = data.draw(st.lists(names, min_size=count, max_size=count, unique=True))
    switches = sorted((Switch(name, len(name) > 4) for name in called), key=lambda it: not it.is_able)
    odd = replace(topology, name=data.draw(names), switches=tuple(switches))
    text = topology_to_yaml(odd, head=["made up"], foot=["end"], group=lambda link: f"from {link.src}")
    assert topology_from_document(parse_yaml(text, "f"), "f") == odd
