"""InfraGraph in and out, and fabrics of schedulers' files: read back by ours, and by upstream where it is."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.synth.errors import InputError, TopologyError
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load, load_machine
from arborcast.topologies.readers.infragraph import of_infragraph, to_infragraph
from tests.support.commands import Command, refused
from tests.support.strategies import topologies as fabrics


def joined(one: str, other: str, scheme: str, link: str) -> dict[str, Any]:
    """An edge of a device."""
    return {"ep1": {"component": one}, "ep2": {"component": other}, "scheme": scheme, "link": link}


PCIE = {"physical": {"bandwidth": {"choice": "gigabits_per_second", "gigabits_per_second": 256}}}
NIC = {
    "name": "nic",
    "components": [
        {"name": "asic", "choice": "nic", "count": 1},
        {"name": "port", "choice": "port", "count": 2},
    ],
    "links": [{"name": "chip", **PCIE}],
    "edges": [
        {"ep1": {"component": "asic"}, "ep2": {"component": "port"}, "scheme": "many2many", "link": "chip"}
    ],
}
HOST = {
    "name": "host",
    "components": [
        {"name": "gpu", "choice": "xpu", "count": 4},
        {"name": "memory", "choice": "memory", "count": 1},
        {"name": "switch", "choice": "switch", "count": 2},
        {"name": "nic", "choice": "device", "count": 1},
    ],
    "links": [{"name": "pcie", **PCIE}, {"name": "nvlink"}],
    "edges": [
        joined("gpu[:2]", "switch[0]", "many2many", "pcie"),
        joined("gpu[2:]", "switch[-1]", "many2many", "pcie"),
        joined("gpu[::2]", "gpu[1::2]", "one2one", "nvlink"),
        joined("gpu", "memory", "many2many", "pcie"),
        joined("switch", "nic.asic", "many2many", "pcie"),
    ],
}  # fmt: skip
CLUSTER: dict[str, Any] = {
    "name": "pair",
    "devices": [HOST, NIC],
    "instances": [{"name": "node", "device": "host", "count": 2}],
    "links": [{"name": "cable", "physical": {
        "bandwidth": {"choice": "gigabytes_per_second", "gigabytes_per_second": 12.5},
        "latency": {"choice": "ns", "ns": 1500},
    }}],
    "edges": [{
        "ep1": {"instance": "node[0]", "component": "nic.port"},
        "ep2": {"instance": "node[1]", "component": "nic.port"},
        "scheme": "one2one",
        "link": "cable",
    }],
}  # fmt: skip
"""Two hosts of four GPUs in pairs, joined by both ports of a NIC that is a device of its own."""


def test_a_document_is_drawn() -> None:
    machine = of_infragraph(CLUSTER, "pair.yaml", {"nvlink": Fraction(50)})
    topology = machine.topology
    assert machine.devices[:2] == ("node.0.gpu.0", "node.0.gpu.1")
    assert machine.hosts == (0, 0, 0, 0, 1, 1, 1, 1)
    host = ["switch.0", "switch.1", "nic.0.asic.0", "nic.0.port.0", "nic.0.port.1"]
    assert [it.name for it in topology.switches] == [f"node.{box}.{name}" for box in (0, 1) for name in host]

    def label(vertex: int) -> str:
        return str(topology.label(vertex)).removeprefix("node.")

    drawn = {
        (label(it.src), label(it.dst), float(it.bandwidth), float(it.latency_us))
        for it in topology.links
        if it.src < it.dst
    }
    inside = {
        ("0", "1", 50), ("2", "3", 50),
        ("0", "0.switch.0", 32), ("1", "0.switch.0", 32), ("2", "0.switch.1", 32), ("3", "0.switch.1", 32),
        ("0.switch.0", "0.nic.0.asic.0", 32), ("0.switch.1", "0.nic.0.asic.0", 32),
        ("0.nic.0.asic.0", "0.nic.0.port.0", 32), ("0.nic.0.asic.0", "0.nic.0.port.1", 32),
    }  # fmt: skip

    def moved(end: str | int) -> str | int:
        """The same on the other host."""
        if isinstance(end, int):
            return end
        return str(int(end) + 4) if end.isdecimal() else end.replace("0.", "1.", 1)

    both = inside | {tuple(map(moved, row)) for row in inside}
    assert drawn == {(*row, 0) for row in both} | {
        (f"0.nic.0.port.{port}", f"1.nic.0.port.{port}", 12.5, 1.5) for port in (0, 1)
    }


def test_rates_are_said_beside_and_never_guessed(tmp_path: Path, command: Command) -> None:
    file, made = tmp_path / "pair.yaml", tmp_path / "made.yaml"
    file.write_text(yaml.safe_dump(json.loads(json.dumps(CLUSTER))))
    refused(
        command("bound", str(file), "allreduce"),
        "pair.yaml: does not say how fast nvlink are",
        "--link-rates nvlink=GB/S",
    )
    refused(command("cluster", str(file), "--link-rates", "cable=1"), "does not say how fast nvlink are")
    refused(command("cluster", str(file), "--link-rates", "nvlink=0"), "--link-rates nvlink: must be above 0")
    refused(command("cluster", str(file), str(file), "--link-rates", "nvlink=1"), "goes with one file, got 2")
    assert command("cluster", str(file), "--link-rates", "nvlink=50,cable=99", "-o", str(made)).status == 0
    assert load(str(made)).links == of_infragraph(CLUSTER, "", {"nvlink": Fraction(50)}).topology.links
    file.write_text("ranks: 2\nlinks: []\n")
    refused(
        command("cluster", str(file), "--link-rates", "nvlink=1"), "must be a file of InfraGraph, topograph"
    )


def test_topograph_gives_a_fabric_of_hosts(tmp_path: Path, command: Command) -> None:
    file = tmp_path / "graph.json"
    hosts = [{"id": f"host{n}", "network_layers": [f"leaf{n // 2}", "spine"]} for n in range(4)]
    file.write_text(json.dumps({"instances": hosts}))
    refused(command("cluster", str(file), "--link-rates", "1=50"), "how fast its layers are", "2=GB/S")
    made = tmp_path / "made.yaml"
    assert command("cluster", str(file), "--link-rates", "1=50,2=80", "-o", str(made)).status == 0
    topology = load(str(made))
    assert topology.ranks == 4
    rates = {(topology.label(it.src), topology.label(it.dst)): it.bandwidth for it in topology.links}
    assert rates[0, "leaf0"] == rates["leaf1", 3] == 50
    assert rates["leaf0", "spine"] == rates["spine", "leaf1"] == 80
    assert synth.bound(topology, "allgather").rate == Fraction(4 * 50, 3)


@pytest.mark.few(20)
@settings(max_examples=100, deadline=None)
@given(fabrics(max_ranks=6, switches=3))
def test_what_is_written_is_read_back(topology: Topology) -> None:
    again = of_infragraph(yaml.safe_load(to_infragraph(topology)), "written").topology
    loose = {link.src for link in topology.links}
    names = [it.name for it in again.switches]
    places = [int(name.rsplit(".", 1)[1]) + topology.ranks for name in names]
    images = [*range(topology.ranks), *places]
    back = {(images[it.src], images[it.dst]): (it.bandwidth, it.latency_us) for it in again.links}
    ours = {(it.src, it.dst): (it.bandwidth, it.latency_us) for it in topology.links}
    assert back == {hop: said for hop, said in ours.items() if {*hop} <= {*images}}
    assert again.ranks == topology.ranks and loose >= {*places}
    assert synth.bound(again, "allgather").rate == synth.bound(topology, "allgather").rate


def test_links_that_differ_by_direction_are_refused(tmp_path: Path, command: Command) -> None:
    topology = Topology.build("one-way", 2, [Link(0, 1, Fraction(2)), Link(1, 0, Fraction(1))])
    with pytest.raises(TopologyError, match="one-way: 0->1: must be as the link back"):
        to_infragraph(topology)
    file = str(tmp_path / "h.yaml")
    wrong = command("show", "dgx-h100", "--infragraph", file)
    refused(wrong, "dgx-h100: InfraGraph cannot say switch loopback, ", "--no-in-network leaves out")
    assert command("show", "dgx-h100", "--no-in-network", "--infragraph", file).status == 0
    said = command("show", "dgx-a100:boxes=2", "--infragraph", str(tmp_path / "a.yaml"))
    assert (said.status, said.err) == (0, "")
    assert load_machine(str(tmp_path / "a.yaml")).topology.name == "dgx-a100-boxes-2"


def edge(change: dict[str, Any]) -> dict[str, Any]:
    """The first edge of a host changed, the others left out."""
    return {"devices": [{**HOST, "edges": [{**HOST["edges"][0], **change}]}, NIC]}  # type: ignore[dict-item]


DOLLS = {
    "devices": [
        {"name": f"d{at}", "components": [{"name": f"d{at + 1}", "choice": "device", "count": 9999}]}
        for at in range(4)
    ]
    + [{"name": "d4", "components": []}],
    "instances": [{"name": "node", "device": "d0", "count": 1}],
}
"""Devices in devices, too many to look into, that hold nothing."""

ITSELF = {**NIC, "components": [{"name": "nic", "choice": "device", "count": 1}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"instances": [{"name": "node", "device": "box", "count": 1}]},
            "node.0: there is no device 'box'",
        ),
        ({"devices": [HOST]}, "instance node.0.nic.0: there is no device 'nic'"),
        ({"devices": [HOST, ITSELF]}, "device nic: contains itself"),
        (edge({"link": "x"}), r"host: edges\[0\]: there is no link 'x'"),
        (edge({"ep1": {"component": "gpu[9]"}}), r"host: edges\[0\]: names no component"),
        (edge({"ep1": {"component": "g p u"}}), r"host: edges\[0\]: names no component"),
        (edge({"scheme": "ring"}), r"devices\[0\].*scheme"),
        (edge({"ep2": {"component": "nic[0]"}}), "is no component"),
        (
            {"instances": [{"name": "node", "device": "nic", "count": 2}], "edges": []},
            "component of choice xpu",
        ),
        ({"instances": [{"name": "node", "device": "host", "count": 60000}]}, "at most 65536 components"),
        (DOLLS, "more than 65536 devices"),
    ],
)
def test_what_breaks_a_rule_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message) as raised:
        of_infragraph(CLUSTER | change, "pair.yaml", {"nvlink": Fraction(1)})
    assert str(raised.value).startswith("pair.yaml") and "\n" not in str(raised.value)


@pytest.mark.few(60)
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mangled_documents_are_refused_in_one_line(data: st.DataObject) -> None:
    text = json.dumps(CLUSTER)
    at = data.draw(st.integers(0, len(text) - 1))
    text = text[:at] + data.draw(st.sampled_from(["", "0", '"', "[", "9", "."])) + text[at + 1 :]
    try:
        document = json.loads(text)
    except ValueError:
        return
    try:
        of_infragraph(document, "pair.yaml", {"nvlink": Fraction(1)})
    except InputError as error:
        assert "\n" not in str(error)


def test_upstream_reads_what_we_write_and_sees_what_we_read() -> None:
    service = pytest.importorskip("infragraph.infragraph_service")
    upstream = service.InfraGraphService()
    topology = load("dgx-a100:boxes=2")
    upstream.set_graph(to_infragraph(topology))
    edges = upstream.get_networkx_graph().edges(data=True)

    def vertex(name: str) -> int:
        *_, kind, number = name.split(".")
        return int(number) + (topology.ranks if kind == "switch" else 0)

    assert {frozenset(map(vertex, pair)): rate["bandwidth"] for *pair, rate in edges} == {
        frozenset((it.src, it.dst)): f"{float(it.bandwidth)} GBps" for it in topology.links
    }
    upstream.set_graph(yaml.safe_dump(CLUSTER))
    seen = {frozenset(pair) for pair in upstream.get_networkx_graph().edges()}
    machine = of_infragraph(CLUSTER, "pair", {"nvlink": Fraction(1)})
    names = [*machine.devices, *(it.name for it in machine.topology.switches)]
    ours = {frozenset((names[it.src], names[it.dst])) for it in machine.topology.links}
    assert ours == {pair for pair in seen if not any("memory" in end for end in pair)}
