"""Hosts joined by their NICs: drawn clusters, random ones beside a graph made by hand, wrong input."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.topology_text import topology_to_yaml
from arborcast.synth.topology import Link, Switch, Topology
from arborcast.topologies import Machine, Nic, load, load_machine
from arborcast.topologies.cluster import even_nics, join, with_nics
from arborcast.topologies.fabrics import FatTree, Rails, fabric_named
from arborcast.topologies.rates import Rates
from tests.support.refusals import refuses


def cables(topology: Topology) -> dict[tuple[str, str], Fraction]:
    """GB/s of each cable by the names of its ends; both ways are alike."""
    label = topology.label
    assert topology.is_symmetric
    return {
        (str(label(link.src)), str(label(link.dst))): link.bandwidth
        for link in topology.links
        if link.src < link.dst
    }


def pair(rate: int = 100, *, gpu: str | None = None) -> Machine:
    """Two GPUs with a link."""
    links = [Link(0, 1, Fraction(rate)), Link(1, 0, Fraction(rate))]
    return Machine.of(Topology.build("pair", 2, links, symmetries=[(1, 0)]), gpu=gpu)


def test_rails_drawn() -> None:
    host = replace(pair(), nics=even_nics(2, Fraction(25), 2))
    found = join("two", [host, host], Rails())
    assert cables(found.machine.topology) == {
        ("0", "1"): 100,
        ("2", "3"): 100,
        ("0", "fabric0"): 25,
        ("1", "fabric1"): 25,
        ("2", "fabric0"): 25,
        ("3", "fabric1"): 25,
    }
    assert found.owners == (0, 0, 1, 1, None, None)
    assert found.machine.hosts == (0, 0, 1, 1)
    assert found.machine.nics == ()
    assert set(found.machine.topology.symmetries) == {(1, 0, 3, 2, 5, 4), (2, 3, 0, 1, 4, 5)}


def test_a_nic_that_gpus_share_is_a_vertex_behind_their_slots() -> None:
    # PCIe generation 3: 128 Gb/s less 2 in 130 bits, 1024/65 GB/s; the NIC has 50.
    host = replace(pair(gpu="v100"), nics=even_nics(2, Fraction(50), 1))
    topology = join("two", [host, host], Rails(1)).machine.topology
    slot = Fraction(1024, 65)
    assert cables(topology) == {
        ("0", "1"): 100,
        ("2", "3"): 100,
        ("0", "host0.nic0"): slot,
        ("1", "host0.nic0"): slot,
        ("2", "host1.nic0"): slot,
        ("3", "host1.nic0"): slot,
        ("host0.nic0", "fabric"): 50,
        ("host1.nic0", "fabric"): 50,
    }
    unknown = replace(pair(), nics=even_nics(2, Fraction(50), 1))
    assert cables(join("two", [unknown, unknown], Rails(1)).machine.topology)["0", "host0.nic0"] == 50


def test_two_nics_of_the_same_gpus_share_their_slots() -> None:
    nics = tuple(Nic(f"mlx5_{index}", Fraction(10), (0, 1)) for index in range(2))
    host = replace(pair(gpu="v100"), nics=nics)
    topology = join("two", [host, host], Rails()).machine.topology
    found = cables(topology)
    assert found["0", "host0.nic0"] == Fraction(1024, 65)  # less than both together
    assert found["host0.nic0", "fabric0"] == found["host0.nic0", "fabric1"] == 10


def test_a_nic_of_a_gpus_own_is_no_faster_than_its_slot() -> None:
    slot = Fraction(1024, 65)  # PCIe generation 3
    host = replace(pair(gpu="v100"), nics=even_nics(2, Fraction(25), 2))
    found = join("two", [host, host], Rails()).machine
    assert {rate for ends, rate in cables(found.topology).items() if "fabric" in ends[1]} == {slot}
    assert found.notes == ("pair: NICs of 25 GB/s count with the 15.7538 of the PCIe slot (v100)",)
    planned = join("two", [host, host], Rails(), rates=Rates.NCCL).machine.topology
    assert cables(planned) == cables(found.topology)
    # Below its slot, and where the GPU is unknown, a NIC is as fast as it says.
    for gpu in ("a100", None):
        fine = replace(pair(gpu=gpu), nics=even_nics(2, Fraction(25), 2))
        joined = join("two", [fine, fine], Rails(), rates=Rates.NCCL).machine
        assert (cables(joined.topology)["0", "fabric0"], joined.notes) == (25, ())


def test_nics_of_a_gpus_own_share_its_slot() -> None:
    # 10 + 10 GB/s through 15.75: a vertex behind the slot, each NIC at its own rate.
    host = replace(pair(gpu="v100"), nics=even_nics(2, Fraction(10), 4)[:3])
    found = join("two", [host, host], Rails()).machine
    outside = {ends: rate for ends, rate in cables(found.topology).items() if "host0.nic0" in ends}
    slot = Fraction(1024, 65)
    nic = "host0.nic0"
    assert outside == {("0", nic): slot, (nic, "fabric0"): 10, (nic, "fabric1"): 10}
    assert cables(found.topology)["1", "fabric2"] == 10
    assert found.notes == ("pair: NICs of 20 GB/s count with the 15.7538 of the PCIe slot (v100)",)


def test_nics_on_pcie_switches_are_reached_through_them() -> None:
    machine = with_nics(load_machine("l40s:gpus=4,switch=2"), Fraction(25))
    found = cables(join("two", [machine, machine], Rails()).machine.topology)
    assert {ends: rate for ends, rate in found.items() if "fabric" in ends[1]} == {
        (f"host{host}.pcie{index}", f"fabric{index}"): 25 for host in range(2) for index in range(2)
    }
    assert found["0", "host0.pcie0"] == found["host0.pcie0", "host0.cpu0"] == Fraction(2048, 65)
    assert found["host0.cpu0", "host0.cpu1"] == 432  # the largest of x86, as CPUs are unknown


def test_ranks_keep_their_streams() -> None:
    plain, limited = (
        with_nics(load_machine(f"l4:gpus=2{more}"), Fraction(25)) for more in ("", ",streams=1")
    )
    assert join("two", [limited, plain], Rails()).machine.topology.streams == (1, 1, None, None)
    assert join("two", [plain, plain], Rails()).machine.topology.streams == ()


def test_a_fat_tree_thins_out_above_its_leaves() -> None:
    host = replace(pair(), nics=even_nics(2, Fraction(25), 2))
    found = cables(join("six", [host] * 6, FatTree(Fraction(4))).machine.topology)
    assert {ends: rate for ends, rate in found.items() if ends[1] == "core"} == {
        (f"leaf{leaf}", "core"): Fraction(2 * 2 * 25, 4) for leaf in range(3)
    }
    assert found["8", "leaf2"] == found["11", "leaf2"] == 25
    uneven = cables(join("three", [host] * 3, fabric_named("fat-tree:1:2")).machine.topology)
    assert [uneven[f"leaf{leaf}", "core"] for leaf in range(2)] == [100, 50]


def test_three_tiers_thin_out_at_leaves_and_at_spines() -> None:
    host = replace(pair(), nics=even_nics(2, Fraction(24), 2))
    topology = join("ten", [host] * 10, fabric_named("fat-tree:2:2:3:2")).machine.topology
    found = cables(topology)
    # A leaf has 2 hosts of 48 GB/s: 48 up. Two leaves of a spine send it 96: 32 up; the last has one leaf.
    assert {ends: rate for ends, rate in found.items() if not ends[0].isdecimal()} == {
        **{(f"leaf{leaf}", f"spine{leaf // 2}"): Fraction(48) for leaf in range(5)},
        **{(f"spine{spine}", "core"): Fraction(32 if spine < 2 else 16) for spine in range(3)},
    }
    rails = cables(join("eight", [host] * 8, fabric_named("rail-tree:1:2:4:4")).machine.topology)
    assert {ends: rate for ends, rate in rails.items() if not ends[0].isdecimal()} == {
        **{(f"pod{at // 2}.rail{at % 2}", f"spine{at // 4}"): Fraction(48) for at in range(8)},
        **{(f"spine{spine}", "core"): Fraction(48) for spine in range(2)},
    }
    even = join("eight", [host] * 8, fabric_named("fat-tree:1:2:1:2")).machine.topology
    orbits = Counter(tuple(images[:16]) for images in even.symmetries)
    assert (*range(8, 16), *range(8)) in orbits  # halves of the cluster, a spine each, change places


def two_hosts(*rates: int) -> Machine:
    """Two pairs in one file, no link between them; NIC i of each host stands beside its rank i."""
    links = [Link(*ends, Fraction(100)) for ends in ((0, 1), (1, 0), (2, 3), (3, 2))]
    machine = Machine.of(Topology.build("hosts", 4, links))
    nics = tuple(Nic(f"mlx5_{rank % 2}", Fraction(rate), (rank,)) for rank, rate in enumerate(rates))
    return replace(machine, hosts=(0, 0, 1, 1), nics=nics)


def test_a_machine_of_two_hosts_is_cabled_host_by_host() -> None:
    inside = {("0", "1"): 100, ("2", "3"): 100}
    rails = {(str(rank), f"fabric{rank % 2}"): 25 for rank in range(4)}
    one = join("one", [two_hosts(25, 25, 25, 25)], Rails()).machine
    assert cables(one.topology) == {**inside, **rails}
    degrees = Counter(link.dst for link in one.topology.links)
    assert [degrees[rail] for rail in (4, 5)] == [2, 2]  # as many as hosts
    assert (2, 3, 0, 1, 4, 5) in one.topology.symmetries
    assert synth.bound(one.topology, "allgather").rate == Fraction(4 * 50, 2)
    tree = join("tree", [two_hosts(25, 25, 25, 25)], fabric_named("fat-tree:2:1")).machine.topology
    up = {(f"leaf{leaf}", "core"): 25 for leaf in range(2)}
    assert cables(tree) == {**inside, **{(str(rank), f"leaf{rank // 2}"): 25 for rank in range(4)}, **up}


def test_machines_of_several_hosts_turn_with_blocks_of_a_fat_tree() -> None:
    single = replace(pair(), nics=even_nics(2, Fraction(25), 2))
    several = join("four", [two_hosts(25, 25, 25, 25)] * 2, FatTree(Fraction(2), 2)).machine
    alone = join("four", [single] * 4, FatTree(Fraction(2), 2)).machine
    assert several.hosts == alone.hosts == (0, 0, 1, 1, 2, 2, 3, 3)
    assert several.topology.links == alone.topology.links
    assert (4, 5, 6, 7, 0, 1, 2, 3, 9, 8, 10) in several.topology.symmetries
    mixed = join("three", [single, two_hosts(25, 25, 25, 25)], Rails()).machine.topology
    assert mixed.links == join("three", [single] * 3, Rails()).machine.topology.links


def test_nics_on_switches_are_of_the_host_of_the_nearest_rank() -> None:
    # Each host: a GPU on a CPU, another CPU with the NIC; one NVSwitch joins the GPUs of both.
    ends = [(0, 2), (1, 2), (0, 3), (3, 4), (1, 5), (5, 6)]
    links = [Link(*way, Fraction(10)) for one, other in ends for way in ((one, other), (other, one))]
    names = ["nvswitch", "cpu0", "cpu1", "cpu2", "cpu3"]
    nics = tuple(Nic("mlx5_0", Fraction(5), (cpu,)) for cpu in (6, 4))
    machine = replace(Machine.of(Topology.build("rack", 2, links, names)), hosts=(7, 3), nics=nics)
    found = cables(join("rack", [machine], fabric_named("fat-tree:1:1")).machine.topology)
    assert found["host0.cpu3", "leaf0"] == found["host0.cpu1", "leaf1"] == 5  # host 3 goes first


def test_the_fastest_nics_are_those_of_each_host() -> None:
    machine = with_nics(two_hosts(50, 10, 25, 25))
    assert [(nic.rate, nic.near) for nic in machine.nics] == [(50, (0,)), (25, (2,)), (25, (3,))]
    assert machine.notes == ("hosts: NICs of less than 50 GB/s are left out: mlx5_1 (10)",)


def test_symmetries_of_a_fat_tree_turn_hosts_and_leaves() -> None:
    host = replace(pair(), nics=even_nics(2, Fraction(25), 2))
    topology = join("six", [host] * 6, FatTree(Fraction(4), 2)).machine.topology
    assert set(topology.symmetries) == {
        (1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 12, 13, 14, 15),
        (2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 12, 13, 14, 15),
        (4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 13, 14, 12, 15),
    }


def test_hosts_of_two_kinds_are_symmetric_among_their_own() -> None:
    one = replace(pair(100), nics=even_nics(2, Fraction(25), 2))
    other = replace(pair(60, gpu="l4"), nics=even_nics(2, Fraction(50), 2))
    found = join("mixed", [one, other, one], Rails(1)).machine
    assert found.gpus == (None, None, "l4", "l4", None, None)
    assert set(found.topology.symmetries) == {
        (1, 0, 2, 3, 5, 4, 6),
        (0, 1, 3, 2, 4, 5, 6),
        (4, 5, 2, 3, 0, 1, 6),
    }


def test_hosts_are_alike_whatever_their_files_call_them() -> None:
    nics = [tuple(Nic(f"{prefix}{index}", Fraction(25), (index,)) for index in range(2)) for prefix in "ab"]
    one, other = (replace(pair(), nics=each) for each in nics)
    other = replace(other, topology=replace(other.topology, name="another", symmetries=()))
    topology = join("two", [one, other], Rails()).machine.topology
    assert set(topology.symmetries) == {(1, 0, 3, 2, 5, 4), (2, 3, 0, 1, 4, 5)}


def test_the_catalog_joins_its_boxes_alike() -> None:
    for name, nic in (("dgx-a100", 25), ("ndv2", 12.5), ("p4d", 12.5), ("mi300x", 50)):
        box = load_machine(name)
        assert {port.rate for port in box.nics} == {Fraction(nic)}
        boxes = join("two", [with_nics(box)] * 2, Rails(1), word="box").machine.topology
        rails = ",rails=1" if name == "dgx-a100" else ""
        assert boxes.links == load(f"{name}:boxes=2{rails}").links


def test_sixteen_hosts_of_h800() -> None:
    host = load_machine("hgx-h800")
    topology = join("pod", [with_nics(host)] * 16, Rails()).machine.topology
    plain = topology.forwarding
    assert synth.bound(plain, "allreduce").rate == Fraction(128 * 250, 2 * 127)
    # NVLink SHARP allows more, but never more than the 200 + 50 GB/s of one GPU.
    assert Fraction(128 * 250, 2 * 127) < synth.bound(topology, "allreduce").rate < 250
    found = synth.solve(plain, "allreduce", form="implicit")
    assert found.rate == found.bound.rate


def test_two_ndv2_from_the_file_of_one(tmp_path: Path) -> None:
    # The links of a DGX-1, one NIC of 100 Gb/s beside two of the GPUs: all others reach it through NVLinks.
    file = tmp_path / "ndv2.yaml"
    nics = "nics: [{name: mlx5_0, rate: 12.5, near: [0, 1]}]\n"
    file.write_text(topology_to_yaml(load("dgx1"), gpu=["v100"] * 8) + nics)
    pod = join("pod", [with_nics(load_machine(str(file)))] * 2, Rails()).machine.topology
    assert synth.bound(pod, "allgather").rate == 25 == synth.bound(load("ndv2:boxes=2"), "allgather").rate


def test_only_the_fastest_nics_join() -> None:
    nics = (*even_nics(2, Fraction(50), 2), Nic("eth0", Fraction("1.25"), (0, 1)))
    machine = with_nics(replace(pair(), nics=nics))
    assert [nic.name for nic in machine.nics] == ["nic0", "nic1"]
    assert machine.notes == ("pair: NICs of less than 50 GB/s are left out: eth0 (1.25)",)
    stated = with_nics(replace(pair(), nics=nics), Fraction(10), chosen="all", option="--nic")
    assert [nic.rate for nic in stated.nics] == [10, 10, 10]
    assert stated.notes == ("pair: all 3 NICs count with the 10 GB/s of --nic, where it shows 1.25, 50",)
    assert with_nics(replace(pair(), nics=nics[:2]), Fraction(10)).notes == ()


def test_switches_that_reduce_come_first() -> None:
    """The second host's alone reduces: it and the fabric change places with the first one's."""
    links = [Link(*ends, Fraction(10)) for rank in range(2) for ends in ((rank, 2), (2, rank))]
    hosts = [Topology.build(name, 2, links, [Switch("hub", name == "able")]) for name in ("plain", "able")]
    members = [replace(Machine.of(host), nics=even_nics(2, Fraction(1), 2)) for host in hosts]
    found = join("two", members, fabric_named("full+sharp"))
    pod = found.machine.topology
    assert [switch.name for switch in pod.switches] == ["host1.hub", "fabric", "host0.hub"]
    assert found.owners == (0, 0, 1, 1, 1, None, 0)
    assert {(pod.label(a), pod.label(b)) for a, b in pod.bandwidth if a < b} == {
        *((rank, "host0.hub") for rank in (0, 1)),
        *((rank, "host1.hub") for rank in (2, 3)),
        *((rank, "fabric") for rank in range(4)),
    }


def test_hosts_without_nics_or_their_rates() -> None:
    with pytest.raises(TopologyError, match=r"^pair: shows no NICs; nic GB/s gives each of its ranks one"):
        with_nics(pair())
    assert with_nics(pair(), Fraction(5)).nics == even_nics(2, Fraction(5), 2)
    unknown = replace(pair(), nics=(Nic("NIC0", None, (0, 1)),))
    with pytest.raises(TopologyError, match=r"^pair: does not say how fast NIC0 is; --nic GB/s does"):
        with_nics(unknown, option="--nic")
    assert with_nics(unknown, Fraction(5)).nics == (Nic("NIC0", Fraction(5), (0, 1)),)


@pytest.mark.parametrize(
    ("text", "fabric"),
    [
        ("full", Rails(1)),
        ("rail", Rails()),
        ("RAIL:4", Rails(4)),
        ("fat-tree:2", FatTree(Fraction(2))),
        ("fat_tree:3/2:8", FatTree(Fraction(3, 2), 8)),
        ("full+SHARP", Rails(1, "turn")),
        ("rail+sharp", Rails(None, "turn")),
        ("rail:4+sharp", Rails(4, "turn")),
        ("fat-tree:2+sharp", FatTree(Fraction(2), None, "turn")),
        ("rail-tree:2:8:3/2:4", FatTree(Fraction(2), 8, by_rails=True, spines=(Fraction(3, 2), 4))),
    ],
)
def test_fabrics_by_name(text: str, fabric: object) -> None:
    assert fabric_named(text) == fabric


@refuses("text", "message")
def test_wrong_fabrics(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        fabric_named(text)


def test_what_does_not_fit() -> None:
    host = replace(pair(), nics=even_nics(2, Fraction(25), 2))
    with pytest.raises(TopologyError, match="one: must join at least 2 hosts, got 1"):
        join("one", [host], Rails())
    with pytest.raises(TopologyError, match="two: rails must divide the 2 NICs of a host, got 4"):
        join("two", [host] * 2, Rails(4))
    with pytest.raises(TopologyError, match="at least 2 leaves, got 2 hosts with 2 under a leaf"):
        join("two", [host] * 2, FatTree(Fraction(2), 2))
    with pytest.raises(TopologyError, match=r"two: a spine must have 2\.\.1 of the 2 leaves, got 2"):
        join("two", [host] * 2, FatTree(Fraction(2), 1, spines=(Fraction(1), 2)))
    with pytest.raises(TopologyError, match="must have at most 65536 vertices, got 70001"):
        join("many", [host] * 35_000, Rails(1))


rates = st.integers(1, 40).map(lambda value: Fraction(value, 2))


@st.composite
def hosts(draw: st.DrawFn) -> Machine:
    """A connected host of up to four ranks and a switch, with up to four NICs on any of its vertices."""
    ranks, switches = draw(st.integers(1, 4)), draw(st.integers(0, 1))
    size = ranks + switches
    links = []
    for vertex in range(1, size):
        other = draw(st.integers(0, vertex - 1))
        links += [Link(vertex, other, draw(rates)), Link(other, vertex, draw(rates))]
    topology = Topology.build("host", ranks, links, ["switch"] * switches)
    near = st.sets(st.integers(0, size - 1), min_size=1, max_size=3).map(sorted).map(tuple)
    nics = tuple(Nic(f"nic{index}", draw(rates), draw(near)) for index in range(draw(st.integers(1, 4))))
    return replace(Machine.of(topology), nics=nics)


@given(st.lists(hosts(), min_size=1, max_size=2), st.integers(1, 3), st.data())
@settings(max_examples=150, deadline=None)
def test_random_clusters_are_the_graph_made_by_hand(
    kinds: list[Machine], repeats: int, data: st.DataObject
) -> None:
    members = (kinds * repeats) if len(kinds) * repeats > 1 else kinds * 2
    most = max(len(host.nics) for host in members)
    rails = data.draw(st.sampled_from([count for count in range(1, most + 1) if most % count == 0]))
    found = join("cluster", members, Rails(rails)).machine.topology

    # By hand, with names: ("gpu", host, rank), ("switch", host), ("nic", host, where), ("fabric", rail).
    by_hand = nx.DiGraph()
    for number, host in enumerate(members):

        def end(vertex: int, number: int = number, host: Machine = host) -> tuple[object, ...]:
            ranks = host.topology.ranks
            return ("gpu", number, vertex) if vertex < ranks else ("switch", number)

        by_hand.add_nodes_from(end(vertex) for vertex in range(host.topology.size))
        for link in host.topology.links:
            by_hand.add_edge(end(link.src), end(link.dst), rate=link.bandwidth)
        together = Counter[tuple[int, ...]]()
        for nic in host.nics:
            together[nic.near] += nic.rate or 0  # type: ignore[assignment]
        for index, nic in enumerate(host.nics):
            port: tuple[object, ...] = end(nic.near[0])
            if len(nic.near) > 1:
                port = ("nic", number, nic.near)
                for vertex in nic.near:
                    by_hand.add_edge(end(vertex), port, rate=together[nic.near])
                    by_hand.add_edge(port, end(vertex), rate=together[nic.near])
            fabric = ("fabric", index % rails)
            before = by_hand.get_edge_data(port, fabric, {"rate": 0})["rate"]
            by_hand.add_edge(port, fabric, rate=before + nic.rate)
            by_hand.add_edge(fabric, port, rate=before + nic.rate)

    graph = nx.DiGraph()
    graph.add_nodes_from(range(found.size))
    graph.add_edges_from((link.src, link.dst, {"rate": link.bandwidth}) for link in found.links)
    sums = [
        sorted(sum(data["rate"] for *_, data in each.out_edges(vertex, data=True)) for vertex in each)
        for each in (graph, by_hand)
    ]
    assert sums[0] == sums[1]
    assert nx.is_isomorphic(graph, by_hand, edge_match=lambda one, other: one["rate"] == other["rate"])
    # ranks host by host keep their links
    first = 0
    for host in members:
        for link in host.topology.links:
            if max(link.src, link.dst) < host.topology.ranks:
                assert found.bandwidth[first + link.src, first + link.dst] == link.bandwidth
        first += host.topology.ranks
    assert nx.is_strongly_connected(graph)  # NIC 0 of every host is on switch 0
    if members[0] == members[-1] and len(kinds) == 1:
        assert len(found.symmetries) >= 1  # the rotation of the hosts, at least


@given(st.lists(hosts(), min_size=2, max_size=4), st.sampled_from(["full", "rail+sharp", "fat-tree:2:1"]))
@settings(max_examples=40, deadline=None)
def test_random_clusters_come_back_from_their_files(
    tmp_path_factory: pytest.TempPathFactory, members: list[Machine], fabric: str
) -> None:
    found = join("a cluster: of hosts", members, fabric_named(fabric))
    file: Path = tmp_path_factory.mktemp("cluster") / "pod.yaml"

    def group(link: Link) -> str:
        return f"of host {found.owners[link.src]}"

    file.write_text(topology_to_yaml(found.machine.topology, head=["made up", ""], foot=["end"], group=group))
    assert load(str(file)) == found.machine.topology


def beside_storage() -> Machine:
    """Two GPUs with a NIC each, and two NICs that are as near to both."""
    near = (("mlx5_0", (0,)), ("mlx5_1", (1,)), ("mlx5_2", (0, 1)), ("mlx5_3", (0, 1)))
    return replace(pair(), nics=tuple(Nic(name, None, ranks) for name, ranks in near))


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["mlx5_0", "mlx5_1"]),
        ("near", ["mlx5_0", "mlx5_1"]),
        ("all", ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]),
        ("1", ["mlx5_0"]),
        ("3", ["mlx5_0", "mlx5_1", "mlx5_2"]),
        ("mlx5_3, mlx5_0", ["mlx5_0", "mlx5_3"]),
    ],
)
def test_nics_are_chosen(chosen: str | None, names: list[str]) -> None:
    machine = with_nics(beside_storage(), Fraction(50), chosen=chosen, option="--nic")
    assert [nic.name for nic in machine.nics] == names
    left = "pair: NICs not nearest to a GPU are left out: mlx5_2, mlx5_3; --nics says which"
    assert machine.notes == ((left,) if chosen is None else ())


@refuses("chosen", "message")
def test_nics_that_are_not_there(chosen: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        with_nics(beside_storage(), Fraction(50), chosen=chosen)


def test_nics_on_switches_are_near_to_what_is_under_them() -> None:
    box = load_machine("l40s:gpus=4,switch=2")
    cpus = [vertex for vertex in range(4, box.topology.size) if "cpu" in str(box.topology.label(vertex))]
    far = (*box.nics, Nic("storage", None, (cpus[0],)))
    machine = with_nics(replace(box, nics=far), Fraction(25))
    assert [nic.name for nic in machine.nics] == ["nic0", "nic1"]


def test_nics_added_to_a_pcie_box_are_beyond_its_slots() -> None:
    box = replace(load_machine("l4:gpus=2,sockets=1"), nics=())
    assert [str(box.topology.label(nic.near[0])) for nic in with_nics(box, Fraction(50)).nics] == ["cpu0"] * 2
    # what a GPU sends to the fabric passes its slot, which others' traffic to it passes as well
    found = cables(join("two", [with_nics(box, Fraction(50))] * 2, Rails(1)).machine.topology)
    assert found["host0.cpu0", "fabric"] == 100
    assert not any(ends[0].isdecimal() and "fabric" in ends[1] for ends in found)
    linked = with_nics(pair(), Fraction(50))
    assert [nic.near for nic in linked.nics] == [(0,), (1,)]


def test_rails_under_a_core_drawn() -> None:
    host = replace(pair(), nics=even_nics(2, Fraction(40), 2))
    found = cables(join("four", [host] * 4, fabric_named("rail-tree:4:2")).machine.topology)
    outside = {ends: rate for ends, rate in found.items() if ends[0].isdecimal() and not ends[1].isdecimal()}
    assert outside == {
        (str(2 * each + rail), f"pod{each // 2}.rail{rail}"): 40 for each in range(4) for rail in range(2)
    }
    assert {ends: rate for ends, rate in found.items() if "core" in ends} == {
        (f"pod{pod}.rail{rail}", "core"): 20 for pod in range(2) for rail in range(2)
    }
    with pytest.raises(TopologyError, match="got 2 hosts with 2 under a leaf and 1 NIC each"):
        join("two", [replace(pair(), nics=even_nics(1, Fraction(1), 1))] * 2, fabric_named("rail-tree:2"))
