from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import groupby
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.topology_text import topology_to_yaml
from arborcast.synth.topology import Link, Switch, Topology
from arborcast.topologies import GPUS, catalog, load, load_machine
from tests.support.refusals import refuses

# every entry once or more, with vertices (ranks, switches), cables, and the ranks' bandwidth out
SIZES = [
    ("dgx1", 8, 0, 16, {150}),
    ("dgx1-p100", 8, 0, 16, {80}),
    ("dgx2", 16, 1, 16, {150}),
    ("dgx-a100", 8, 1, 8, {300}),
    ("dgx-a100:boxes=2", 16, 2 + 2, 32, {325}),
    ("dgx-a100:boxes=3,rails=8", 24, 3 + 8, 48, {325}),
    ("dgx-h100:boxes=2", 16, 2 + 2, 32, {500}),
    ("mi250", 16, 0, 28, {350}),
    ("mi250:boxes=2", 32, 1, 2 * 28 + 32, {366}),
    ("dgx-h200:boxes=2", 16, 2 + 2, 32, {500}),
    ("dgx-b200", 8, 1, 8, {900}),
    ("dgx-b300:boxes=2", 16, 2 + 2, 32, {1000}),
    ("dgx-h100:boxes=2,nic=25", 16, 2 + 2, 32, {475}),
    ("hgx-a800", 8, 1, 8, {200}),
    ("hgx-h800:boxes=16,rails=8", 128, 16 + 8, 256, {250}),
    ("hgx-h20", 8, 1, 8, {450}),
    ("gb200-nvl72", 72, 1, 72, {900}),
    ("gb300-nvl72:gpus=8,boxes=2", 16, 2 + 1, 32, {1000}),
    ("mi300x", 8, 0, 28, {7 * 64}),
    ("mi300x:partition=cpx-nps1", 64, 8, 64 + 28, {Fraction(5300, 8)}),
    ("mi325x:boxes=2,partition=cpx-nps4", 128, 2 * (32 + 8) + 1, 2 * (64 + 32 + 28 + 8), {750}),
    ("mi325x:boxes=4", 32, 1, 4 * 28 + 32, {7 * 64 + 50}),
    ("mi350x", 8, 0, 28, {Fraction("537.6")}),
    ("mi355x:boxes=2", 16, 1, 2 * 28 + 16, {Fraction("587.6")}),
    ("mi300a", 4, 0, 6, {3 * 128}),
    ("leonardo:boxes=2", 8, 1, 12 + 8, {Fraction("312.5")}),
    ("juwels-booster", 4, 0, 6, {300}),
    ("jupiter:boxes=2", 8, 1, 12 + 8, {3 * 150 + 25}),
    ("rtx3090:gpus=4", 4, 2, 4 + 1 + 2, {Fraction(2048, 65) + Fraction("56.25")}),
    ("a6000:switch=2", 8, 4 + 2, 8 + 4 + 1 + 4, {Fraction(2048, 65) + Fraction("56.25")}),
    ("a100-pcie", 8, 2, 8 + 1 + 4, {Fraction(2048, 65) + 300}),
    ("h100-pcie:gpus=4,sockets=1", 4, 1, 4 + 2, {Fraction(4096, 65) + 300}),
    ("h100-nvl:gpus=2,sockets=1", 2, 1, 2 + 1, {Fraction(4096, 65) + 300}),
    ("gaudi2", 8, 0, 28, {Fraction("262.5")}),
    ("gaudi3:boxes=2", 16, 1, 2 * 28 + 16, {600}),
    ("tpu-v4:4x4x4", 64, 0, 3 * 64, {300}),
    ("tpu-v4:2x2x4", 16, 0, 8 + 8 + 3 * 4, {150, 200}),
    ("tpu-v4:4x8x8_twisted", 256, 0, 3 * 256, {300}),
    ("tpu-v5p:4x4x8_twisted", 128, 0, 3 * 128, {600}),
    ("tpu-v5e:4x8", 32, 0, 3 * 8 + 4 * 7, {100, 150, 200}),
    ("tpu-v6e:8x16", 128, 0, 7 * 16 + 8 * 16, {300, 400}),
    ("tpu-7x:4x4x8_twisted", 128, 0, 3 * 128, {600}),
    ("trn1", 16, 0, 32, {4 * 48}),
    ("trn1:boxes=2", 32, 2 * 8 + 1, 2 * (32 + 16 + 8), {4 * 48 + Fraction("12.5")}),
    ("trn1n:boxes=2", 32, 1, 2 * (32 + 16), {4 * 96 + Fraction("12.5")}),
    ("trn2:boxes=2", 32, 1, 2 * 32 + 32, {4 * 128 + 25}),
    ("trn2-ultra", 64, 0, 4 * 32 + 64, {4 * 128 + 2 * 64}),
    ("p4d:boxes=2", 16, 2 + 8 + 1, 16 + 16 + 8, {Fraction("312.5")}),
    ("p5:boxes=2", 16, 2 + 1, 32, {500}),
    ("p5en:boxes=2,rails=8", 16, 2 + 8, 16 + 32, {500}),
    ("p6-b200:boxes=2", 16, 2 + 1, 32, {950}),
    ("p6-b300:boxes=2", 16, 2 + 1, 32, {1000}),
    ("ndv2:boxes=2", 16, 2 + 1, 2 * 16 + 16 + 2, {Fraction("162.5")}),
    ("dgx1:boxes=2", 16, 8 + 1, 2 * 16 + 16 + 8, {Fraction("162.5")}),
    ("dgx1-p100:boxes=2,rails=2", 16, 8 + 2, 2 * 16 + 16 + 8, {4 * 20 + Fraction("12.5")}),
    ("dgx2:boxes=2", 32, 2 * (1 + 8) + 1, 2 * 16 + 32 + 16, {Fraction("162.5")}),
    ("ndv4:boxes=2", 16, 2 + 1, 32, {325}),
    ("ndv5", 8, 1, 8, {450}),
    ("ndv5-h200:boxes=2", 16, 2 + 1, 32, {500}),
    ("ndv5-mi300x:boxes=2", 16, 1, 2 * 28 + 16, {498}),
    ("ndv6-gb200:boxes=2", 8, 2 + 1, 16, {950}),
    ("a3-high:boxes=2", 16, 2 + 8 + 1, 16 + 16 + 8, {475}),
    ("a3-mega:boxes=2", 16, 2 + 1, 32, {475}),
    ("a3-ultra:boxes=2", 16, 2 + 1, 32, {500}),
    ("a4:boxes=2", 16, 2 + 1, 32, {950}),
    ("a4x:boxes=18", 72, 18 + 1, 144, {950}),
    ("oci-a100:boxes=2", 16, 2 + 1, 32, {325}),
    ("oci-h100:boxes=2", 16, 2 + 1, 32, {500}),
    ("oci-h200", 8, 1, 8, {450}),
    ("oci-b200:boxes=2", 16, 2 + 1, 32, {950}),
    ("oci-mi300x", 8, 0, 28, {448}),
    ("perlmutter", 4, 0, 6, {300}),
    ("perlmutter:nodes=2,groups=2", 16, 8, 4 * 6 + 16 + 2 * 6 + 1, {325}),
    ("frontier", 8, 0, 12, {350, 300}),
    ("frontier:nodes=32", 256, 8, 32 * 12 + 32 * 4 + 28, {350, 325}),
    ("rtx4090", 8, 2, 8 + 1, {Fraction(2048, 65)}),
    ("rtx5090:gpus=4,sockets=1", 4, 1, 4, {Fraction(4096, 65)}),
    ("rtx5090:gpus=4,cpu=zen-3", 4, 2, 4 + 1, {Fraction(2048, 65)}),
    ("l4", 8, 2, 8 + 1, {Fraction(2048, 65)}),
    ("l40s:switch=4", 8, 2 + 2, 8 + 2 + 1, {Fraction(2048, 65)}),
    ("pro6000:switch=2,between=16", 8, 4 + 2, 8 + 4 + 1, {Fraction(4096, 65)}),
    ("dgx-spark:2", 2, 0, 1, {25}),
    ("dgx-spark:2,cables=2", 2, 0, 1, {Fraction(2048, 65)}),
    ("dgx-spark:3", 3, 0, 3, {Fraction(2048, 65)}),
    ("dgx-spark:4,links=switch", 4, 1, 4, {25}),
    ("dgx-spark:4,cables=2,links=switch", 4, 1, 4, {Fraction(2048, 65)}),
    ("mac-studio:4", 4, 0, 6, {30}),
    ("boxes:4,gpus=8,inside=900,nic=50,rails=8", 32, 4 + 8, 64, {950}),
    ("boxes:3,gpus=1,inside=25,nic=25", 3, 1, 3, {25}),
    ("boxes:2,gpus=8,inside=150,nic=12.5,nics=1", 16, 2 + 2 + 1, 16 + 16 + 2, {Fraction("162.5")}),
    ("boxes:1,gpus=4,inside=300,links=mesh", 4, 0, 6, {300}),
    ("torus:4x4", 16, 0, 32, {4}),
    ("torus:2x3", 6, 0, 3 + 6, {3}),
    ("torus:2x2x2", 8, 0, 12, {3}),
    ("mesh:3x4", 12, 0, 2 * 4 + 3 * 3, {2, 3, 4}),
    ("mesh:5", 5, 0, 4, {1, 2}),
    ("ring:5", 5, 0, 5, {2}),
    ("ring:2", 2, 0, 1, {1}),
    ("hypercube:4", 16, 0, 32, {4}),
    ("full:6", 6, 0, 15, {5}),
    ("star:4", 4, 1, 4, {1}),
    ("star:4,in-network=loopback", 4, 1, 4, {1}),
    ("fat-tree:2x2,in-network=turn", 4, 3, 6, {1}),
    ("boxes:2,gpus=4,inside=9,nic=1,nics=1,in-network=loopback,fabric=sharp", 8, 5, 8 + 8 + 2, {10}),
    ("dgx-a100:boxes=2,fabric=sharp", 16, 2 + 2, 32, {325}),
    ("fat-tree:2x3x4", 24, 1 + 2 + 6, 24 + 6 + 2, {1}),
    ("dragonfly:5x2x3", 30, 10, 30 + 5 + 10, {1}),
    ("dragonfly:9x4x2", 72, 36, 72 + 9 * 6 + 36, {1}),
]
# how many kinds of ranks there are: orbits under the declared symmetries
ORBITS = {
    "dgx1": 2,
    "dgx1-p100": 1,
    "dgx2": 1,
    "dgx-a100:boxes=2": 1,
    "dgx-a100:boxes=3,rails=8": 1,
    "dgx-h100:boxes=2": 1,
    "mi250:boxes=2": 4,
    "hgx-h800:boxes=16,rails=8": 1,
    "gb300-nvl72:gpus=8,boxes=2": 1,
    "mi325x:boxes=4": 1,
    "mi325x:boxes=2,partition=cpx-nps4": 1,
    "mi300x:partition=cpx-nps1": 1,
    "tpu-v4:4x8x8_twisted": 1,
    "tpu-v5p:4x4x8_twisted": 1,
    "tpu-v4:2x2x4": 2,
    "tpu-v5e:4x8": 2 * 4,
    "tpu-v6e:8x16": 4,
    "trn2:boxes=2": 1,
    "trn2-ultra": 1,
    "p4d:boxes=2": 1,
    "p5en:boxes=2,rails=8": 1,
    "ndv2:boxes=2": 2,
    "a3-high:boxes=2": 1,
    "perlmutter:nodes=2,groups=2": 4,  # bundles between groups set the four switches apart
    "frontier:nodes=32": 2,
    "l40s:switch=4": 1,
    "boxes:4,gpus=8,inside=900,nic=50,rails=8": 1,
    "torus:4x4": 1,
    "torus:2x3": 1,
    "mesh:3x4": 4,
    "ring:5": 1,
    "hypercube:4": 1,
    "full:6": 1,
    "star:4": 1,
    "fat-tree:2x3x4": 1,
    "boxes:2,gpus=4,inside=9,nic=1,nics=1,in-network=loopback,fabric=sharp": 1,
    "dgx-a100:boxes=2,fabric=sharp": 1,
    "dragonfly:5x2x3": 2,
    "dragonfly:9x4x2": 4,
}


@pytest.mark.parametrize(("spec", "ranks", "switches", "cables", "outgoing"), SIZES)
def test_sizes_and_bandwidths(spec: str, ranks: int, switches: int, cables: int, outgoing: set[int]) -> None:
    topology = load(spec)
    assert (topology.ranks, len(topology.switches), len(topology.links)) == (ranks, switches, 2 * cables)
    assert {_outgoing(topology, rank) for rank in range(ranks)} == outgoing
    assert topology.is_symmetric
    assert topology.unbalanced(range(topology.size)) == ()
    assert nx.is_strongly_connected(_graph(topology))


# what is asked for, and the name: the spec with every argument that is not what counts anyway
NAMES = {
    "dgx1": "dgx1",
    "dgx1-p100": "dgx1-p100",
    "dgx2": "dgx2",
    "dgx-a100:boxes=1": "dgx-a100",
    "dgx-a100:boxes=1,rails=8": "dgx-a100",  # one box has no fabric
    "dgx-a100:3,rails=8": "dgx-a100:boxes=3,rails=8",
    "dgx-h100:rails=2,boxes=2": "dgx-h100:boxes=2",
    "dgx-h100:boxes=2,rails=8": "dgx-h100:boxes=2,rails=8",
    "mi250:2": "mi250:boxes=2",
    "gb200-nvl72:8": "gb200-nvl72:gpus=8",
    "gb200-nvl72:gpus=72,rails=4": "gb200-nvl72",
    "tpu-v4:4x4x8-Twisted": "tpu-v4:4x4x8_twisted",
    "boxes:gpus=8,inside=900,nic=50,boxes=4": "boxes:4,gpus=8,inside=900,nic=50",
    "perlmutter:16,global=50": "perlmutter:nodes=16",  # one group has no cables to others
    "torus:04x4,latency=0.70": "torus:4x4,latency=0.7",
    "mesh:3x4,bandwidth=25/2": "mesh:3x4,bandwidth=12.5",
    "ring:3,bandwidth=1/3": "ring:3,bandwidth=1/3",
    "ring:3,bandwidth=1,latency=0": "ring:3",
    "hypercube:3,latency=1e-9": "hypercube:3,latency=1e-09",
    "full:4,bandwidth=1e9": "full:4,bandwidth=1000000000",
    "star:4,latency=7,bandwidth=2": "star:4,bandwidth=2,latency=7",
    "star:4,in-network=none": "star:4",
    "star:4,latency=7,in-network=turn": "star:4,in-network=turn,latency=7",
    "dgx-a100:fabric=sharp": "dgx-a100",  # one box has no fabric
    "dgx-a100:2,fabric=plain": "dgx-a100:boxes=2",
    "dgx-a100:2,fabric=sharp": "dgx-a100:boxes=2,fabric=sharp",
    "fat-tree:2x4x8,oversubscription=2": "fat-tree:2x4x8,oversubscription=2",
    "dragonfly:5x2x1,global=3,local=2": "dragonfly:5x2x1,local=2,global=3",
}


@pytest.mark.parametrize(("spec", "name"), NAMES.items())
def test_the_name_is_the_spec_that_gives_the_same_again(spec: str, name: str) -> None:
    topology = load(spec)
    assert topology.name == name
    assert load(name) == topology


SHARP = Switch("", reduces=True, multicasts=True, turns=True)
NVLS = Switch("", reduces=True, multicasts=True, loopback=True)


@pytest.mark.parametrize(
    ("spec", "switches"),
    [
        ("star:4", {"switch": Switch("")}),
        ("star:4,in-network=reduce", {"switch": Switch("", reduces=True)}),
        ("star:4,in-network=multicast", {"switch": Switch("", multicasts=True)}),
        ("star:4,in-network=both", {"switch": Switch("", reduces=True, multicasts=True)}),
        ("star:4,in-network=turn", {"switch": SHARP}),
        ("star:4,in-network=loopback", {"switch": NVLS}),
        ("fat-tree:2x2,in-network=turn", {"core": SHARP, "leaf0": SHARP, "leaf1": SHARP}),
        (
            "boxes:2,gpus=4,inside=9,nic=1,nics=1,in-network=loopback,fabric=sharp",
            {
                **{"box0.nvswitch": NVLS, "box1.nvswitch": NVLS, "fabric": SHARP},
                **{"box0.nic0": Switch(""), "box1.nic0": Switch("")},
            },
        ),
        (
            "dgx-a100:boxes=2,fabric=sharp",
            {
                **{"fabric0": SHARP, "fabric1": SHARP},
                **{"box0.nvswitch": Switch(""), "box1.nvswitch": Switch("")},
            },
        ),
    ],
)
def test_what_switches_can_do(spec: str, switches: dict[str, Switch]) -> None:
    """In their order: those that are able come first."""
    found = load(spec).switches
    assert list(found) == [replace(switch, name=name) for name, switch in switches.items()]


def test_the_hosts_keep_their_links_where_switches_change_places() -> None:
    """Whatever the fabric can do, each rank has the same neighbours by name, at the same rates."""

    def by_name(spec: str) -> dict[tuple[int | str, int | str], Fraction]:
        topology = load(spec)
        return {(topology.label(a), topology.label(b)): rate for (a, b), rate in topology.bandwidth.items()}

    spec = "boxes:4,gpus=4,inside=9,nic=1,nics=2,rails=2"
    assert by_name(spec) == by_name(f"{spec},fabric=sharp") == by_name(f"{spec},in-network=loopback")
    assert len(load(spec).symmetries) == len(load(f"{spec},fabric=sharp").symmetries)


def test_every_entry_is_in_the_table() -> None:
    assert {entry.name for entry in catalog()} == {spec.split(":")[0] for spec, *_ in SIZES}


@pytest.mark.parametrize("spec", [spec for spec, *_ in SIZES])
def test_its_name_and_its_file_give_the_same_again(spec: str, tmp_path: Path) -> None:
    machine = load_machine(spec)
    topology = machine.topology
    assert topology.name == spec
    file = tmp_path / "machine.yaml"
    file.write_text(topology_to_yaml(topology, head=["as in the catalog"], gpu=machine.gpus))
    assert load(str(file)) == topology
    assert load_machine(str(file)).gpus == machine.gpus


def test_every_product_has_a_source_and_its_gpu_is_known() -> None:
    for entry in catalog():
        assert bool(entry.vendor) == bool(entry.source) == bool(entry.sources)
        assert entry.gpu is None or entry.gpu in GPUS


def test_vendors_stand_together() -> None:
    vendors = [vendor for vendor, _ in groupby(catalog(), key=lambda entry: entry.vendor)]
    assert len(vendors) == len(set(vendors))


# Rates by hand: n ranks around a switch or alike in a torus, b GB/s out of each: allgather n / (n - 1) * b,
# allreduce half of that, or n / (n + 1) * b with NVLink SHARP; otherwise see the remark.
BOUNDS = [
    ("dgx-a100", "allreduce", Fraction(8 * 300, 2 * 7)),
    ("dgx-b200", "allreduce", Fraction(8 * 900, 9)),
    ("dgx-b200", "allgather", Fraction(8 * 900, 7)),
    ("hgx-h800", "allreduce", Fraction(8 * 200, 9)),
    ("gb200-nvl72:gpus=4", "allreduce", Fraction(4 * 900, 5)),
    ("gb300-nvl72:gpus=4", "allreduce", Fraction(720)),
    ("gb300-nvl72:gpus=8,links=9", "allgather", Fraction(8 * 450, 7)),
    ("mi300x:partition=cpx-nps4", "allgather", Fraction(8 * 7 * 64, 7)),  # a package must get the other seven
    (
        "mi300x:partition=cpx-nps1",
        "alltoall",
        Fraction(8 * 7 * 64, 7 * 8),
    ),  # 7/8 of 8 buffers leave a package
    ("pro6000:gpus=16,cpu=skylake,between=20", "alltoall", Fraction(16 * 20, 8 * 8)),
    ("mi300x", "allreduce", Fraction(8 * 7 * 64, 2 * 7)),
    ("mi300x:boxes=2", "allreduce", Fraction(16 * (7 * 64 + 50), 2 * 15)),
    ("gaudi3", "allreduce", Fraction(8 * 7 * 75, 2 * 7)),
    ("mi300a", "allreduce", Fraction(256)),
    ("jupiter", "allgather", Fraction(4 * 450, 3)),
    ("h100-nvl:gpus=2,sockets=1", "allgather", 2 * (Fraction(4096, 65) + 300)),
    ("dgx-a100:boxes=2", "allgather", Fraction(16 * 325, 15)),  # 347, as ForestColl's
    ("ndv2:boxes=2", "allgather", 2 * Fraction("12.5")),  # half of it through one NIC
    ("dgx1:boxes=2", "allgather", 2 * 4 * Fraction("12.5")),  # half of it through four
    ("dgx1:boxes=2", "allreduce", 4 * Fraction("12.5")),
    ("dgx2:boxes=2", "allgather", Fraction(32, 31) * (150 + Fraction("12.5"))),  # all that a GPU takes in
    ("p4d:boxes=2", "allreduce", Fraction(4 * 25, 2)),  # half of twice the buffer through 4 NICs of 12.5
    ("hgx-h800:boxes=16,rails=8", "allgather", Fraction(128 * 250, 127)),
    ("tpu-v4:4x4x4", "allreduce", Fraction(64 * 6 * 50, 2 * 63)),
    ("tpu-v4:4x4x8", "allreduce", Fraction(128 * 6 * 50, 2 * 127)),
    ("tpu-v4:4x4x8_twisted", "allgather", Fraction(128 * 6 * 50, 127)),
    ("tpu-v5p:4x4x4", "allgather", Fraction(64 * 6 * 100, 63)),
    ("tpu-v6e:16x16", "allgather", Fraction(256 * 4 * 100, 255)),
    ("tpu-v5e:2x2", "allgather", Fraction(4 * 2 * 50, 3)),
    ("trn1", "allreduce", Fraction(16 * 4 * 48, 2 * 15)),
    ("dgx-spark:3", "allreduce", Fraction(3 * 2048, 65 * 2 * 2)),  # both slots full: 23.6
    ("dgx-spark:2", "allgather", Fraction(2 * 25)),
    ("mac-studio:4", "allreduce", Fraction(4 * 30, 2 * 3)),
    ("trn2", "allreduce", Fraction(16 * 4 * 128, 2 * 15)),
    ("trn2-ultra", "allgather", Fraction(64 * (4 * 128 + 2 * 64), 63)),
    ("rtx4090:between=16", "allreduce", Fraction(16)),  # each socket's half both in and out at 16
    ("rtx4090", "allreduce", Fraction(8 * 2048, 65 * 2 * 7)),  # its slots alone
    ("boxes:1,gpus=8,inside=900", "allreduce", Fraction(8 * 900, 2 * 7)),
]


@pytest.mark.parametrize(("spec", "collective", "rate"), BOUNDS)
def test_bounds_by_hand(spec: str, collective: str, rate: Fraction) -> None:
    assert synth.bound(load(spec), collective).rate == rate


@pytest.mark.parametrize(("cpu", "rate"), [("zen-2", 144), ("sapphire-rapids", 192), ("xeon-6", 432)])
def test_sockets_of_pcie_boxes_are_joined_as_their_processors_are(cpu: str, rate: int) -> None:
    def way(spec: str, rates: str = "datasheet") -> Link:
        return next(link for link in load(spec, rates=rates).links if min(link.src, link.dst) >= 8)

    ways = [way(f"l40s:cpu={cpu}"), way("l40s")]
    assert (ways[0].bandwidth, ways[0].rate_assumed) == (rate, "")
    assert "6 UPI links of 24 GT/s (Xeon 6), the largest of its kind" in ways[1].rate_assumed
    planned = way(f"l40s:cpu={cpu}", "nccl").bandwidth
    assert planned == {"zen-2": 16, "sapphire-rapids": 22, "xeon-6": 22}[cpu]


@pytest.mark.parametrize(("shape", "extents"), [("4x4x8", (4, 4, 8)), ("4x8x8", (4, 8, 8))])
def test_twisted_tori_are_the_cubic_lattices_of_the_paper(shape: str, extents: tuple[int, ...]) -> None:
    # Face- and body-centred lattice graphs of side 4 have diameter 3/2 * 4 (Camarero et al.), tori half the
    # sum of their extents.
    straight, twisted = (nx.Graph(_graph(load(f"tpu-v4:{shape}{end}"))) for end in ("", "_twisted"))
    assert (nx.diameter(straight), nx.diameter(twisted)) == (sum(extents) // 2, 6)
    # The first is a cube and its neighbour, each within itself wired as ever.
    inside = {(a, b) for a, b in twisted.edges if abs(a - b) in {1, extents[2], extents[1] * extents[2]}}
    assert inside <= set(straight.edges)


@pytest.mark.parametrize(
    ("spec", "outgoing"),
    [
        ("tpu-v4:4x8x12", {300}),
        ("tpu-v4:1x2x4", {100, 150}),  # of a cube: a grid, two or three neighbours
        ("tpu-v5e:16x16", {200}),
        ("tpu-v5e:4x4", {100, 150, 200}),
    ],
)
def test_a_slice_wraps_round_where_google_says(spec: str, outgoing: set[int]) -> None:
    topology = load(spec)
    assert {_outgoing(topology, rank) for rank in range(topology.ranks)} == outgoing
    assert (0, 15) in load("tpu-v5e:8x16").bandwidth


def test_racks_are_hosts_of_four_in_one_domain() -> None:
    machine = load_machine("gb200-nvl72:gpus=12,boxes=2")
    assert machine.hosts == tuple(rank // 4 for rank in range(24))
    assert machine.gpus == ("gb200",) * 24
    assert [switch.name for switch in machine.topology.switches] == [
        "box0.nvswitch",
        "box1.nvswitch",
        "fabric",
    ]


@pytest.mark.parametrize(("spec", "orbits"), ORBITS.items())
def test_declared_symmetries_leave_so_many_kinds_of_ranks(spec: str, orbits: int) -> None:
    topology = load(spec)
    alike = nx.Graph()
    alike.add_nodes_from(range(topology.ranks))
    alike.add_edges_from((r, images[r]) for images in topology.symmetries for r in range(topology.ranks))
    assert nx.number_connected_components(alike) == orbits


@pytest.mark.parametrize("spec", ["dgx1", "mi250"])
def test_all_symmetries_of_the_irregular_boxes_are_declared(spec: str) -> None:
    topology = load(spec)
    graph = _graph(topology)
    same = nx.isomorphism.DiGraphMatcher(graph, graph, edge_match=lambda a, b: a["rate"] == b["rate"])
    found = {tuple(images[v] for v in range(topology.size)) for images in same.isomorphisms_iter()}
    assert _group(topology) == found


def test_mi250_pairs() -> None:
    links = {(0, 1): 4, (0, 4): 2, (0, 8): 1, (7, 3): 2, (15, 14): 4, (13, 15): 1, (5, 7): 1}
    rates = load("mi250:boxes=2").bandwidth
    for (src, dst), count in links.items():
        assert rates[src, dst] == rates[src + 16, dst + 16] == 50 * count
    assert rates[20, 32] == 16


def test_a100_nics_alternate_between_two_fabric_switches() -> None:
    topology = load("dgx-a100:boxes=2")
    names = [switch.name for switch in topology.switches]
    assert names == ["box0.nvswitch", "box1.nvswitch", "fabric0", "fabric1"]
    for rank in range(16):
        assert topology.bandwidth[rank, 16 + rank // 8] == 300
        assert topology.bandwidth[rank, 18 + rank % 2] == 25
    assert [switch.name for switch in load("dgx-a100").switches] == ["nvswitch"]


@pytest.mark.parametrize(
    ("spec", "rate"),
    [
        ("dgx1-p100", "18"),
        ("dgx2", "120"),
        ("dgx-a100", "240"),
        ("dgx-h100", "1854/5"),
        ("hgx-h800", "164.8"),
        ("gb200-nvl72", "721.8"),
        ("mi250", "144"),
        ("mi300x", "48"),
        ("frontier", "144"),
        ("rtx4090", "24"),
    ],
)
def test_nccl_rates(spec: str, rate: str) -> None:
    assert load(spec, rates="nccl").links[0].bandwidth == Fraction(rate)


@pytest.mark.parametrize("spec", ["gaudi3", "tpu-v4:4x4x4", "torus:4x4", "star:3"])
def test_nccl_rates_where_there_are_none(spec: str) -> None:
    with pytest.raises(TopologyError, match=r"has no nccl rates, .*datasheet"):
        load(spec, rates="nccl")


def test_generic_shapes_take_bandwidth_and_latency() -> None:
    link = load("torus:4x4,bandwidth=25/2,latency=0.7").links[0]
    assert (link.bandwidth, link.latency_us) == (Fraction(25, 2), Fraction(7, 10))
    assert load("ring:3").links[0].bandwidth == 1


def test_fat_tree_thins_out_upwards() -> None:
    topology = load("fat-tree:2x3x4,bandwidth=10,oversubscription=2")
    by_name = {topology.label(v): v for v in range(24, topology.size)}
    assert topology.bandwidth[0, by_name["leaf0"]] == 10
    assert topology.bandwidth[by_name["leaf0"], by_name["pod0"]] == 10 * 4 / 2
    assert topology.bandwidth[by_name["pod0"], by_name["core"]] == 10 * 4 / 2 * 3 / 2


def test_dragonfly_has_one_cable_between_groups() -> None:
    topology = load("dragonfly:5x2x1,global=3,local=2")
    group = {vertex: (vertex - 10) // 2 for vertex in range(10, 20)}
    between = [
        (group[link.src], group[link.dst])
        for link in topology.links
        if link.src >= 10 and link.dst >= 10 and group[link.src] != group[link.dst]
    ]
    assert sorted(between) == [(a, b) for a in range(5) for b in range(5) if a != b]
    assert topology.bandwidth[10, 11] == 2
    assert {topology.bandwidth[link.src, link.dst] for link in topology.links} == {1, 2, 3}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(max_examples=40)
def test_grids_are_networkx_grids(extents: list[int]) -> None:
    spec = "x".join(map(str, extents))
    # networkx leaves a self-loop or a second way round where an extent is 1 or 2
    torus = nx.grid_graph(extents[::-1], periodic=[extent > 2 for extent in extents[::-1]])  # type: ignore[call-overload]
    for topology, grid in (
        (load(f"torus:{spec}"), torus),
        (load(f"mesh:{spec}"), nx.grid_graph(extents[::-1])),
    ):
        places = sorted(grid.nodes)
        number = {place: index for index, place in enumerate(places)}
        expected = {(number[a], number[b]) for a, b in grid.edges} | {
            (number[b], number[a]) for a, b in grid.edges
        }
        assert set(topology.bandwidth) == expected
        assert topology.ranks == math.prod(extents)


@refuses("spec", "message")
def test_wrong_arguments(spec: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        load(spec)


def _outgoing(topology: Topology, rank: int) -> Fraction:
    return sum((link.bandwidth for link in topology.links if link.src == rank), Fraction(0))


def _graph(topology: Topology) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(topology.size))
    graph.add_edges_from((link.src, link.dst, {"rate": link.bandwidth}) for link in topology.links)
    return graph


def _group(topology: Topology) -> set[tuple[int, ...]]:
    """All products of the declared symmetries."""
    group = {tuple(range(topology.size))}
    todo = list(group)
    while todo:
        images = todo.pop()
        for generator in topology.symmetries:
            product = tuple(generator[image] for image in images)
            if product not in group:
                group.add(product)
                todo.append(product)
    return group


def test_streams_are_there_where_they_are_asked_for() -> None:
    box = load("rtx4090:gpus=6,between=20,streams=1")
    assert box.streams == (1,) * 6
    assert box.name == "rtx4090:gpus=6,between=20,streams=1"
    assert replace(box, name="rtx4090:gpus=6,between=20", streams=()) == load("rtx4090:gpus=6,between=20")
    assert not any(load(entry.name).streams for entry in catalog() if entry.vendor == "PCIe")
