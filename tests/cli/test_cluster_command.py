"""`synth cluster` as a user runs it, and topologies that other commands print read back."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast.synth.errors import InputError, TopologyError
from arborcast.topologies import Nic, load, load_machine
from arborcast.topologies.readers.topology_documents import parse_document
from tests.support.commands import Command, refused
from tests.support.nccl_files import busid, gpu, nic, system
from tests.support.refusals import refuses

PAIR = """
name: pair
ranks: 2
links: [{between: [0, 1], bandwidth: 100}]
"""


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A file of one host."""
    file = tmp_path / "pair.yaml"
    file.write_text(PAIR)
    return file


def test_the_file_of_a_pod_is_written_read_and_edited(command: Command, host: Path, tmp_path: Path) -> None:
    pod = tmp_path / "pod.yaml"
    said = command("cluster", str(host), "--hosts", "4", "--nic", "25", "--fabric", "rail", "-o", str(pod))
    assert (said.status, said.err) == (0, "")
    assert "4 x pair, rail: 8 ranks, 2 switches" in said.out
    lines = pod.read_text().splitlines()
    assert lines[:3] == [
        "# Made by `synth cluster`, fabric rail. Bandwidths are GB/s each way (1e9 bytes), latencies us.",
        "# Every NIC has 25 GB/s, as --nic says.",
        f"# host0 to host3: ranks 0-7, {host}",
    ]
    assert "  # host3 to the fabric" in lines
    assumed = 'latency_assumed: "of InfiniBand, for an unknown network"'
    assert f"  - {{between: [7, fabric1], bandwidth: 25, latency_us: 0.85, {assumed}}}" in lines
    assert len(load(str(pod)).symmetries) == 2
    # six eighths of the buffer enter each host through two NICs
    assert command("bound", str(pod), "allgather", "--json").document["rate"] == "200/3"
    pod.write_text(pod.read_text().replace("bandwidth: 25,", "bandwidth: 50,"))
    assert load(str(pod)).bandwidth[7, 9] == 50


def test_hosts_are_called_by_their_files(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for suffix in ("yaml", "yml", "json"):
        Path(f"pair.{suffix}").write_text(command("show", "ring:2", "--json").out)
        said = command("cluster", f"pair.{suffix}", "--hosts", "2", "--nic", "25", "--json")
        assert said.document["name"] == "2 x pair, full"


def test_without_a_file_the_pod_is_printed(command: Command, host: Path, tmp_path: Path) -> None:
    said = command("cluster", str(host), str(host), "mi300x", "--nic", "25", "--fabric", "fat-tree:2:1")
    file = tmp_path / "printed.yaml"
    file.write_text(said.out)
    topology = load(str(file))
    assert topology.name == "2 x pair + 1 x mi300x, fat-tree:2:1"
    assert (topology.ranks, [switch.name for switch in topology.switches]) == (
        12,
        ["leaf0", "leaf1", "leaf2", "core"],
    )
    as_json = command(
        *["cluster", str(host), str(host), "mi300x"], *["--nic", "25", "--fabric", "fat-tree:2:1", "--json"]
    )
    file.with_suffix(".json").write_text(as_json.out)
    assert load(str(file.with_suffix(".json"))) == topology


def test_the_gpu_of_a_pod_stays_known(command: Command, tmp_path: Path) -> None:
    pod = tmp_path / "pod.yaml"
    assert command("cluster", "hgx-h800", "--hosts", "2", "-o", str(pod)).status == 0
    assert load_machine(str(pod)).gpu == "h800"
    assert command("cluster", "hgx-h800", "mi300x", "-o", str(pod)).status == 0
    assert load_machine(str(pod)).gpus == ("h800",) * 8 + ("mi300x",) * 8


def test_a_file_of_two_hosts_is_a_cluster_of_them(command: Command, tmp_path: Path) -> None:
    addresses = (busid(0), busid(1))
    gpus = [gpu(dev, [(addresses[1 - dev], 6, "0x030200")]) for dev in range(2)]
    mlx = [nic(f"mlx5_{index}", 100000, address=f"0000:e{index}:00.0") for index in range(2)]
    file = tmp_path / "hosts.xml"
    file.write_text(system([*gpus, *mlx], [*gpus, *mlx], hosts=["0x1", "0x2"]))
    pod = tmp_path / "pod.yaml"
    assert command("cluster", str(file), "--fabric", "rail", "-o", str(pod)).status == 0
    topology = load(str(pod))
    # Both NICs of a host are as near to both of its GPUs: one vertex, from which a cable goes to each rail.
    assert [switch.name for switch in topology.switches[-2:]] == ["fabric0", "fabric1"]
    degrees = [sum(link.dst == rail for link in topology.links) for rail in (6, 7)]
    assert (topology.ranks, topology.size, degrees) == (4, 8, [2, 2])
    assert command("bound", str(pod), "allgather", "--json").document["rate"] == "50"


def test_a_nic_above_the_slot_is_said(
    command: Command, host: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host.write_text(f"gpu: v100\n{PAIR}")
    pod = tmp_path / "pod.yaml"
    command("cluster", str(host), "--hosts", "2", "--nic", "25", "-o", str(pod))
    note = "pair: NICs of 25 GB/s count with the 15.7538 of the PCIe slot (v100)"
    assert caplog.messages == [note]
    assert f"# Assumed: {note}\n" in pod.read_text()
    command("show", "dgx-a100:boxes=2,nic=50")
    assert "NICs of 50 GB/s count with the 31.5077 of the PCIe slot (a100)" in caplog.messages[-1]


MIXED = """
fabric: {fabric}
hosts:
  - {{machine: pair.yaml, count: 2, nic: 25}}
  - {{machine: mi300x, nics: 4}}
  - {{machine: pair.yaml, nic: 12.5}}
"""


def test_a_cluster_file_names_unequal_hosts(command: Command, host: Path, tmp_path: Path) -> None:
    """What its lines say is what the same hosts are with options, host by host."""
    asked = tmp_path / "mixed.yaml"
    asked.write_text(MIXED.format(fabric="full"))
    said = command("cluster", str(asked), "--json")
    assert (said.status, said.err) == (0, "")
    assert said.document["name"] == "3 x pair + 1 x mi300x, full"
    shown = tmp_path / "shown.json"
    shown.write_text(said.out)
    topology = load(str(shown))
    fabric = topology.size - 1
    into = {link.src: link.bandwidth for link in topology.links if link.dst == fabric}
    assert into == {
        **dict.fromkeys(range(4), 25),
        **dict.fromkeys(range(4, 8), 50),
        12: Fraction("12.5"),
        13: Fraction("12.5"),
    }
    asked.write_text(MIXED.format(fabric="fat-tree:2:2"))
    assert command("cluster", str(asked), "-o", str(tmp_path / "out.yaml")).status == 0
    names = [switch.name for switch in load(str(tmp_path / "out.yaml")).switches]
    assert names == ["leaf0", "leaf1", "core"]


@refuses("text", "facts")
def test_wrong_cluster_files(command: Command, tmp_path: Path, text: str, facts: list[str]) -> None:
    asked = tmp_path / "mixed.yaml"
    asked.write_text(text)
    refused(command("cluster", str(asked)), *facts)
    asked.write_text("hosts: [{machine: mi300x, count: 2}]")
    refused(command("cluster", str(asked), "--hosts", "2"), "a cluster file says itself")


def test_wrong_input_is_one_line_and_writes_nothing(command: Command, host: Path, tmp_path: Path) -> None:
    pod = tmp_path / "pod.yaml"
    cases = {
        (str(host), "--hosts", "2"): ["pair: shows no NICs; --nic GB/s gives each of its ranks one"],
        (str(host), "--nic", "25"): ["1 x pair, full: must join at least 2 hosts, got 1"],
        (str(host), "--hosts", "0"): ["--hosts 0: must be at least 1"],
        (str(host), str(host), "--hosts", "2"): ["--hosts 2: goes with one HOST, got 2"],
        (str(host), "--hosts", "2", "--nic", "-1"): ["--nic: must be above 0 GB/s, got -1"],
        (str(host), "--hosts", "2", "--nic", "25", "--fabric", "bus"): ["fabric 'bus': must be rail, rail:N"],
        ("dgx-h100", "--hosts", "2", "--fabric", "rail:3"): ["rails must divide the 8 NICs of a host, got 3"],
        ("nowhere", "--hosts", "2"): ["is neither in the catalog nor a file"],
        ("l40s", "--hosts", "2"): ["l40s: does not say how fast nic0 is; --nic GB/s does"],
    }
    for words, facts in cases.items():
        refused(command("cluster", *words, "-o", str(pod)), *facts)
        assert not pod.exists()
    refused(
        command("cluster", "mi300x", "--hosts", "2", "-o", str(tmp_path)),
        "must be a file to write, got a folder",
    )
    refused(command("show", f"{host}:boxes=4,nic=25"), "a file takes no arguments; synth cluster")


@pytest.mark.parametrize(
    "spec", [["dgx1"], ["dgx1", "--ranks", "0,2,3"], ["dgx-h100"], ["star:4", "--without-rank", "3"]]
)
def test_what_show_prints_is_read_back(command: Command, tmp_path: Path, spec: list[str]) -> None:
    shown = command("show", *spec, "--json")
    file = tmp_path / "shown.json"
    file.write_text(shown.out)
    again = command("show", str(file), "--json").document
    for key in ("name", "ranks", "switches", "links"):
        assert again[key] == shown.document[key]
    for collective in ("allreduce", "allgather"):
        rates = [
            command("bound", *words, collective, "--json").document["rate"] for words in (spec, [str(file)])
        ]
        assert rates[0] == rates[1]


def test_a_fragment_with_relays_is_asked_of_what_show_printed(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "dgx1.json"
    file.write_text(command("show", "dgx1", "--json").out)
    asked = ["allreduce", "--ranks", "0,1,6", "--relays", "--json"]
    assert (
        command("bound", str(file), *asked).document["rate"]
        == command("bound", "dgx1", *asked).document["rate"]
    )


def test_a_file_that_only_looks_shown_is_still_checked(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "square.json"
    document = {"ranks": 2, "links": [{"between": [0, 1], "bandwidth": 1}], "picture": None}
    file.write_text(json.dumps(document))
    refused(command("show", str(file)), "picture")


@refuses("gpu", "message")
def test_wrong_gpus_of_a_file(command: Command, host: Path, gpu: str, message: str) -> None:
    host.write_text(f"gpu: {gpu}\n{PAIR}")
    refused(command("show", str(host)), "pair.yaml: ", message)


@refuses("more", "message")
def test_wrong_machines_in_a_file(host: Path, more: str, message: str) -> None:
    host.write_text(f"{more}\n{PAIR}")
    with pytest.raises(TopologyError, match=f"pair.yaml: {message}"):
        load(str(host))


odd = st.recursive(
    st.none() | st.integers(-2, 3) | st.sampled_from(["a100", "nic0", "x", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "rate", "near", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["gpu", "hosts", "devices", "nics", "notes"]), odd))
def test_any_machine_in_a_file_is_read_or_refused_in_a_line(more: dict[str, object]) -> None:
    document = {"ranks": 2, "links": [{"between": [0, 1], "bandwidth": 1}], **more}
    try:
        machine = parse_document(json.dumps(document), "f", "JSON")
    except InputError as error:
        assert str(error).startswith("f: ")
        assert len(str(error).splitlines()) == 1
    else:
        assert len(machine.gpus) == len(machine.hosts) == len(machine.devices) == 2


def test_nics_of_a_file_join_its_hosts(command: Command, host: Path, tmp_path: Path) -> None:
    host.write_text(f"nics: [{{name: nic0, rate: 12.5, near: [0, 1]}}]\nhosts: [0, 1]\n{PAIR}")
    machine = load_machine(str(host))
    assert (machine.hosts, machine.nics) == ((0, 1), (Nic("nic0", Fraction("12.5"), (0, 1)),))
    pod = tmp_path / "pod.yaml"
    assert command("cluster", str(host), "--hosts", "2", "-o", str(pod)).status == 0
    assert [switch.name for switch in load(str(pod)).switches] == ["host0.nic0", "host1.nic0", "fabric"]


def test_what_was_assumed_stays_said_through_files(command: Command, tmp_path: Path) -> None:
    xml, shown = tmp_path / "hgx.xml", tmp_path / "hgx.json"
    switched = [(f"0000:c{index}:00.0", 9, "0x068000") for index in range(2)]
    xml.write_text(system([*(gpu(dev, switched, 'sm="90"') for dev in range(2)), nic("mlx5_0", 400000)]))
    (note,) = load_machine(str(xml)).notes  # H100, or one of those like it
    shown.write_text(command("show", str(xml), "--json").out)
    assert load_machine(str(shown)).notes == (note,)
    for suffix, words in (("yaml", ()), ("json", ("--json",))):
        pod = tmp_path / f"pod.{suffix}"
        pod.write_text(command("cluster", str(shown), "--hosts", "2", *words).out)
        assert (load_machine(str(pod)).gpu, load_machine(str(pod)).notes) == ("h100", (note,))
    assert f"# Assumed: {note}\n" in (tmp_path / "pod.yaml").read_text()


def test_gpus_of_a_file(host: Path) -> None:
    host.write_text(f"gpu: [A100, null]\n{PAIR}")
    assert load_machine(str(host)).gpus == ("a100", None)


def test_gpus_known_of_some_ranks_are_read_back(command: Command, host: Path, tmp_path: Path) -> None:
    host.write_text(f"gpu: [a100, null]\n{PAIR}")
    shown, pod = tmp_path / "shown.json", tmp_path / "pod.yaml"
    shown.write_text(command("show", str(host), "--json").out)
    assert load_machine(str(shown)).gpus == ("a100", None)
    command("cluster", str(shown), "--hosts", "2", "--nic", "25", "-o", str(pod))
    assert load_machine(str(pod)).gpus == ("a100", None) * 2


def test_nics_of_unknown_rate_are_shown_and_read_back(command: Command, tmp_path: Path) -> None:
    assert "  nics     2 of unknown rate" in command("show", "l40s").out
    file = tmp_path / "l40s.json"
    file.write_text(command("show", "l40s", "--json").out)
    machine = load_machine("l40s")
    assert load_machine(str(file)) == machine
    assert [nic.rate for nic in machine.nics] == [None, None]
