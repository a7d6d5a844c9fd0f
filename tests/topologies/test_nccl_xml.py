from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.synth.errors import InputError, TopologyError
from arborcast.synth.topology import Switch
from arborcast.topologies import Machine, load
from arborcast.topologies.processors import crossing
from arborcast.topologies.rates import Rates
from arborcast.topologies.readers.nccl_xml import parse_nccl_xml
from arborcast.topologies.readers.options import Reader
from tests.support.nccl_files import (
    EPYC,
    FABRIC,
    GRACE,
    INTEL,
    SAPPHIRE,
    busid,
    gpu,
    linked,
    nic,
    slot,
    system,
)
from tests.support.tool_texts import cables

NVSWITCH = "0x068000"

# NVLinks of each pair of a DGX-1 with V100
DGX1 = """
   0 1 2 3 4 5 6 7
0  . 1 1 2 2 . . .
1  . . 2 1 . 2 . .
2  . . . 2 . . 1 .
3  . . . . . . . 1
4  . . . . . 1 1 2
5  . . . . . . 2 1
6  . . . . . . . 2
7  . . . . . . . ."""

# xGMI links of each pair of dies of four MI250X (Frontier's node)
MI250X = """
   0 1 2 3 4 5 6 7
0  . 4 1 . . . 2 .
1  . . . 1 . 1 . .
2  . . . 4 2 . . .
3  . . . . . . . 1
4  . . . . . 4 1 .
5  . . . . . . . 1
6  . . . . . . . 4
7  . . . . . . . ."""


def drawn(matrix: str) -> dict[tuple[int, int], int]:
    """Counts of links by pairs."""
    rows = [line.split()[1:] for line in matrix.strip().splitlines()[1:]]
    return {
        (src, dst): int(cell) for src, row in enumerate(rows) for dst, cell in enumerate(row) if cell != "."
    }


def dgx1(ranks: Sequence[str | None] = (None,) * 8) -> str:
    gpus = linked(drawn(DGX1), 8, 'sm="70"')
    for dev, rank in enumerate(ranks):
        if rank is not None:
            gpus[dev] = gpus[dev].replace(' gdr="1">', f' rank="{rank}" gdr="1">')
    return system(gpus[:4], gpus[4:])


def hgx(count: int = 8, what: str = 'sm="90"') -> str:
    """H100s on four NVSwitches, with 5, 5, 4 and 4 links to each."""
    nvlinks = [(f"0000:{port:02x}:00.0", links, NVSWITCH) for port, links in enumerate((5, 5, 4, 4), 0xA0)]
    gpus = [gpu(dev, nvlinks, what, rank=str(dev)) for dev in range(count)]
    return system([*gpus, nic("mlx5_0", 400000)])


def parsed(text: str, **options: object) -> Machine:
    return parse_nccl_xml(text, "f", **options)  # type: ignore[arg-type]


def allreduce(machine: Machine) -> Fraction:
    return synth.bound(machine.topology, "allreduce").rate


# --- NVLinks ------------------------------------------------------------------------------------------


def test_dgx1_is_the_catalogs() -> None:
    topology = parsed(dgx1()).topology
    assert (topology.links, topology.symmetries) == (load("dgx1").links, load("dgx1").symmetries)
    assert parsed(dgx1(), rates=Rates.NCCL).topology.links == load("dgx1", rates="nccl").links


def test_nvswitches_are_one_switch_with_all_links() -> None:
    machine = parsed(hgx())
    assert machine.topology.links == load("dgx-h100").links
    assert machine.topology.symmetries == load("dgx-h100").symmetries
    assert parsed(hgx(), rates=Rates.NCCL).topology.links == load("dgx-h100", rates="nccl").links
    assert machine.notes == ("takes GPUs for h100 that may be h200, h20, h200-nvl, gh200: --gpu says which",)
    assert machine.topology.switches == load("dgx-h100").switches
    assert parsed(hgx(), gpu="h200").gpu == "h200"
    assert parsed(hgx(), gpu="h200").notes == ()


def test_nvswitches_add_and_multicast_since_hopper() -> None:
    """By what the file says of each GPU on them, or by what somebody says that all are."""
    for sm, able in ((["80"] * 4, False), (["90"] * 4, True), (["80", "80", "90", "90"], False)):
        gpus = [gpu(dev, [("0000:a0:00.0", 8, NVSWITCH)], f'sm="{sm[dev]}"') for dev in range(4)]
        (switch,) = parsed(system(gpus)).topology.switches
        assert switch == Switch("nvswitch", reduces=able, multicasts=able, loopback=able)
    assert parsed(system(gpus), gpu="h800").topology.switches[0].loopback
    assert not parsed(system(gpus), gpu="a800").topology.switches[0].is_able


def test_ranks_are_numbered_as_the_hosts_devices(tmp_path: Path) -> None:
    turned = [str((dev + 1) % 8) for dev in range(8)]
    machine = parsed(dgx1(turned))
    assert machine.topology.links == load("dgx1").links
    assert machine.devices == tuple(f"dev {dev} ({busid(dev)})" for dev in range(8))
    # Where processes see one GPU each, all are device 0: their ranks are left to tell them apart.
    alike = dgx1(turned)
    for dev in range(8):
        alike = alike.replace(f'<gpu dev="{dev}"', '<gpu dev="0"')
    machine = parsed(alike)
    assert machine.topology.bandwidth[1, 4] == 50  # GPUs 0 and 3: two links
    assert machine.notes == (
        "gpus of one host have the same dev: they are numbered by their rank in the file",
    )
    with pytest.raises(TopologyError, match="must differ in dev, or have the ranks 0, 1, 2"):
        parsed(alike.replace('rank="3"', 'rank="4"'))


def test_links_to_nothing_and_to_oneself_are_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = [
        gpu(0, [(busid(1), 1, ""), (busid(5), 2, "0x030200"), (busid(0), 3, "0x030200")]),
        gpu(1, [(busid(0), 1, "")]),
    ]
    (tmp_path / "pair.xml").write_text(system(pair))
    with caplog.at_level(logging.WARNING):
        assert cables(load(str(tmp_path / "pair.xml"))) == {(0, 1): "25"}
    assert f"pair.xml: links of gpu 0 ({busid(0)}) to itself are left out" in caplog.text
    assert f"not hold are left out: gpu 0 ({busid(0)}) to '{busid(5)}'" in caplog.text


def test_a_switch_with_fewer_links_to_one_gpu_is_said() -> None:
    text = hgx(4).replace('count="4"', 'count="3"', 1)
    machine = parsed(text, gpu="h100")
    assert cables(machine.topology)[0, "nvswitch"] == "425"
    fewer = "shows fewer NVLinks to a switch than others at gpu"
    assert machine.notes == (f"{fewer} 0 ({busid(0)}) (17, others 18)",)
    none = [gpu(dev, [(FABRIC, 18, NVSWITCH)] * (dev != 1), device="10de:31c2") for dev in range(4)]
    machine = parsed(system(none), pcie=False)
    assert machine.notes == (f"{fewer} 1 ({busid(1)}) (0, others 18)",)
    assert allreduce(machine) == 0


def test_addresses_are_the_same_in_every_spelling() -> None:
    text = system(
        [gpu(0, [("00000000:02:0.0", 2, "")]), gpu(1, [("0:1:00.0", 2, "")], address="0000:02:00.0")]
    )
    assert cables(parsed(text).topology) == {(0, 1): "50"}


def test_a_tray_of_grace_blackwell_and_its_domain() -> None:
    def tray(host: int, first: int) -> list[Sequence[str]]:
        gpus = [
            gpu(
                dev,
                [(FABRIC, 18, NVSWITCH)],
                'sm="103"',
                rank=str(first + dev),
                device="10de:31c2",
                more='<c2c bw="44712" count="5"/>',
            )
            for dev in range(4)
        ]
        return [gpus[:2], [*gpus[2:], nic(f"mlx5_{host}", 800000)]]

    both = parsed(system(*tray(0, 0), *tray(1, 4), cpu=GRACE, hosts=["0xa", "0xa", "0xb", "0xb"]))
    assert (both.gpu, both.hosts, both.notes) == ("gb300", (0, 0, 0, 0, 1, 1, 1, 1), ())
    assert cables(both.topology) == {(rank, "nvswitch"): "900" for rank in range(8)}
    assert allreduce(both) == 800  # n / (n + 1) of a port, through NVLink SHARP
    assert allreduce(both.reordered(range(4))) == 720
    assert [(port.name, port.near) for port in both.nics] == [("mlx5_0", (2, 3)), ("mlx5_1", (6, 7))]
    with_cpus = cables(
        parsed(system(*tray(0, 0), cpu=GRACE, hosts=["0xa", "0xa"]), pcie=True, rates=Rates.NCCL).topology
    )
    # PCIe and five C2C links of 44.712 GB/s to the CPU; ARM CPUs joined by 6 GB/s
    assert with_cpus[0, "cpu0"] == str(12 + Fraction(44712 * 5, 1000))
    assert with_cpus["cpu0", "cpu1"] == "6"


def test_hosts_without_a_common_fabric_stay_apart() -> None:
    nvlinks = [("0000:a0:00.0", 18, NVSWITCH)]
    host = [gpu(dev, nvlinks, 'sm="90"') for dev in range(2)]
    machine = parsed(system(host, host, hosts=["0x1", "0x2"]), pcie=True, gpu="h100")
    names = cables(machine.topology)
    assert {ends for ends in names if "nvswitch" in str(ends[1])} == {
        (0, "nvswitch0"),
        (1, "nvswitch0"),
        (2, "nvswitch1"),
        (3, "nvswitch1"),
    }
    assert {ends[1] for ends in names if "cpu" in str(ends[1])} == {"host0.cpu0", "host1.cpu0"}
    assert allreduce(machine) == 0


def test_nvlinks_to_a_power_cpu_join_its_gpus_where_pcie_does() -> None:
    power = 'arch="ppc64"'
    sockets = [[gpu(dev, [("0000:ff:00.0", 3, "0x068001")], 'sm="70"')] for dev in range(2)]
    machine = parsed(system(*sockets, cpu=power), rates=Rates.NCCL, gpu="v100")
    assert cables(machine.topology) == {(0, "cpu0"): "72", (1, "cpu1"): "72", ("cpu0", "cpu1"): "32"}


# --- AMD ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gcn", ["910", "gfx90a", "gfx90a:sramecc+:xnack-"])
def test_a_node_of_mi250x(gcn: str) -> None:
    # `sm` counts compute units: 104 is no compute capability
    text = system(linked(drawn(MI250X), 8, f'sm="104" gcn="{gcn}"', tag="xgmi"), cpu=EPYC)
    machine = parsed(text)
    assert machine.gpu == "mi250x"
    assert cables(machine.topology) == {pair: str(50 * count) for pair, count in drawn(MI250X).items()}
    planned = cables(parsed(text, rates=Rates.NCCL).topology)
    assert planned == {pair: str(36 * count) for pair, count in drawn(MI250X).items()}


@pytest.mark.parametrize(
    ("what", "device", "name", "rate"),
    [
        ('gcn="gfx942" sm="304"', "1002:74a1", "mi300x", 256),
        ('gcn="gfx942" sm="304"', "1002:74a5", "mi325x", 256),
        ('gcn="gfx950" sm="256"', "", "mi350x", Fraction(1536, 5)),
        ('sm="256"', "1002:75a3", "mi355x", Fraction(1536, 5)),
    ],
)
def test_a_mesh_of_mi300x(what: str, device: str, name: str, rate: Fraction) -> None:
    pairs = dict.fromkeys(combinations(range(8), 2), 1)
    machine = parsed(system(linked(pairs, 8, what, tag="xgmi", device=device), cpu=SAPPHIRE))
    assert (machine.gpu, allreduce(machine)) == (name, rate)


def test_more_xgmi_links_than_the_product_has_are_said() -> None:
    text = system(linked(dict.fromkeys(combinations(range(8), 2), 1), 8, 'gcn="908"', tag="xgmi"), cpu=EPYC)
    assert parsed(text).notes == (
        f"shows 7 xGMI links at gpu 0 ({busid(0)}), where a mi100 has 3; --gpu says what else it is",
    )


# --- PCIe ---------------------------------------------------------------------------------------------


def test_pcie_is_a_tree_of_what_is_shared() -> None:
    text = system(
        [slot("0000:f0:00.0", gpu(0), gpu(1), speed="16.0 GT/s PCIe", width="8"), gpu(2)],
        # a chain of bridges passes on the narrowest of its links, and what hides its speed does not narrow it
        [slot("0000:f1:00.0", slot("0000:f2:00.0", gpu(3), speed="8 GT/s", width="4"), speed="", width="0")],
    )
    machine = parsed(text, rates=Rates.NCCL)
    assert machine.notes == (
        "shows no NVLinks or xGMI, which v100 can have: its PCIe paths are the links; --pcie says so",
        "pci '0000:f1:00.0' hides its speed or width, as virtual machines do: 16 lanes of its GPU's "
        "generation, or what is below, are assumed; link_speed and link_width say otherwise",
        "between its CPUs 10 GB/s each way are assumed: NCCL's planning rates; --between-sockets says "
        "otherwise",
    )
    assert cables(machine.topology) == {
        (0, "pcie0"): "12",
        (1, "pcie0"): "12",
        ("cpu0", "pcie0"): "12",  # 16 GT/s x 8
        (2, "cpu0"): "12",
        (3, "cpu1"): "3",
        ("cpu0", "cpu1"): "10",
    }
    stated = parsed(text, pcie=True, between_sockets=Fraction(22)).topology
    assert cables(stated)[0, "pcie0"] == str(Fraction(16 * 128, 130))
    assert cables(stated)["cpu0", "cpu1"] == "22"


def test_elements_that_are_no_slots_hold_slots_all_the_same() -> None:
    gpus = [gpu(dev, (), 'sm="90"', more='<c2c bw="44712" count="5"/>') for dev in range(2)]
    plain, wrapped = system(gpus), system(["<group>", *gpus, "</group>"])
    assert parsed(wrapped, pcie=True) == parsed(plain, pcie=True)


def test_pcie_beside_nvlinks_only_when_asked() -> None:
    assert [switch.name for switch in parsed(hgx()).topology.switches] == ["nvswitch"]
    both = cables(parsed(hgx(), pcie=True).topology)
    assert parsed(hgx()).notes == parsed(hgx(), pcie=True, between_sockets=Fraction(22)).notes
    assert "--between-sockets changes nothing" in parsed(hgx(), between_sockets=Fraction(22)).notes[-1]
    assert both[0, "nvswitch"] == "450"
    assert both[0, "cpu0"] == str(Fraction(8 * 2 * 128, 130))


@pytest.mark.parametrize(
    ("cpu", "planned", "raw", "is_known"),
    [
        (EPYC, 16, 4 * 16 * 18 / 8, True),  # Zen 2; the family as NCCL's files had it
        (EPYC.replace("143", "23"), 16, 4 * 16 * 18 / 8, True),
        (EPYC.replace("143", "23").replace("49", "1"), 16, 4 * 16 * 10.7 / 8, True),  # Zen 1
        (EPYC.replace("143", "25").replace("49", "1"), 24, 4 * 16 * 18 / 8, True),  # Zen 3
        (EPYC.replace("143", "175").replace("49", "17"), 24, 4 * 16 * 32 / 8, True),  # Zen 4
        (EPYC.replace("143", "26").replace("49", "2"), 32, 4 * 16 * 32 / 8, True),  # Zen 5
        (EPYC.replace("143", "99"), 16, 256, False),  # the largest of AMD's
        (INTEL, 10, 3 * 20 * 10.4 / 8, True),
        (SAPPHIRE, 22, 4 * 24 * 16 / 8, True),
        (SAPPHIRE.replace("143", "106"), 10, 3 * 20 * 11.2 / 8, True),  # Ice Lake
        (SAPPHIRE.replace("143", "207"), 40, 4 * 24 * 20 / 8, True),  # Emerald Rapids
        (SAPPHIRE.replace("143", "173"), 22, 6 * 24 * 24 / 8, True),  # Granite Rapids
        (SAPPHIRE.replace("143", "79"), 6, 3 * 20 * 9.6 / 8, True),  # Broadwell
        ('arch="x86_64" vendor="CentaurHauls" familyid="7" modelid="91"', 9, 432, False),  # of all x86
        (GRACE, 6, 450, False),
        ('arch="ppc64"', 32, 64, False),
        ("", 10, 450, False),  # of all
        ('vendor="GenuineIntel" familyid="x" modelid="y"', 6, 432, False),
    ],
)
def test_two_sockets_by_their_model(cpu: str, planned: int, raw: float, is_known: bool) -> None:
    text = system([gpu(0)], [gpu(1)], cpu=cpu)
    assert cables(parsed(text, rates=Rates.NCCL).topology)["cpu0", "cpu1"] == str(planned)
    machine = parsed(text)
    (way,) = {link for link in machine.topology.links if {link.src, link.dst} == {2, 3} and link.src == 2}
    assert way.bandwidth == Fraction(str(raw))
    assert (way.rate_assumed == "") is is_known
    said = "GB/s each way count, the raw rate of" if is_known else "the largest of its kind as the processor"
    assert said in machine.notes[-1]
    stated = parsed(text, between_sockets=Fraction(50), pcie=True).topology
    assert all(not link.rate_assumed for link in stated.links)


def test_unlike_sockets_are_joined_as_the_slower_allows() -> None:
    text = system([gpu(0)], [gpu(1)], cpu=SAPPHIRE).replace('modelid="143"', 'modelid="79"', 1)
    assert cables(parsed(text).topology)["cpu0", "cpu1"] == "72"
    assert crossing("x86_64", "GenuineIntel", 6, 79, Rates.DATASHEET).rate == 72


def test_a_virtual_machine_hides_its_bridges() -> None:
    text = system(
        [
            slot(
                f"0000:f{dev}:00.0",
                gpu(dev, (), 'sm="90"', device="10de:2331", speed="32.0 GT/s PCIe", width="0"),
                speed="2.5 GT/s PCIe",
                width="1",
            )
            for dev in range(2)
        ]
    )
    machine = parsed(text)
    assert machine.gpu == "h100-pcie"
    assert cables(machine.topology) == {(dev, "cpu0"): str(Fraction(32 * 2 * 128, 130)) for dev in range(2)}
    assert "pci '0000:f0:00.0' and 3 more hides its speed or width" in machine.notes[1]


def test_hidden_slots_of_gpus_have_the_speed_of_their_generation() -> None:
    text = system([gpu(dev, (), "", device="10de:2b85", speed="", width="0") for dev in range(2)])
    assert set(cables(parsed(text).topology).values()) == {str(Fraction(32 * 2 * 128, 130))}
    assert set(cables(parsed(text, rates=Rates.NCCL).topology).values()) == {"12"}  # as in NCCL


@pytest.mark.parametrize(
    "what", ['sm="75"', 'sm="89"', 'sm="120"', 'sm="37"', "", 'sm="20"', 'gcn="gfx1100"']
)
def test_gpus_without_nvlinks_are_a_machine_of_pcie(what: str) -> None:
    machine = parsed(system([gpu(0, (), what), gpu(1, (), what)]))
    assert set(cables(machine.topology)) == {(0, "cpu0"), (1, "cpu0")}
    assert (machine.gpu is None) == (what in {"", 'sm="20"', 'gcn="gfx1100"'})


# --- clouds -------------------------------------------------------------------------------------------


def cloud(device: str, count: int = 8) -> str:
    """Two GPUs and a NIC behind each switch, none of them but by its PCI class."""
    kind = "0x030200" if device.startswith(("10de", "ffff")) or not device else "0x120000"
    switches = [
        slot(
            f"ffff:ff:{first:02x}.0",
            *(slot(busid(dev), kind=kind, device=device) for dev in (first, first + 1)),
            slot(f"0000:e{first}:00.0", kind="0x020000", device="1d0f:efa0"),
            device="ffff:ffff",
        )
        for first in range(0, count, 2)
    ]
    return system(switches[: count // 4], switches[count // 4 :])


def test_a_clouds_file_leaves_nvlinks_to_be_detected() -> None:
    machine = parsed(cloud("10de:20b0"))
    assert machine.topology.links == load("dgx-a100").links
    assert machine.gpu == "a100"
    assert machine.devices[0] == f"pci {busid(0)}"
    assert [(str(port.rate), port.near) for port in machine.nics] == [
        ("1024/65", (first, first + 1)) for first in range(0, 8, 2)
    ]
    assert machine.notes == (
        "leaves links to be detected: those of a100 are assumed, 12 from each to an NVSwitch; --gpu says "
        "otherwise",
        "does not say the speed of NIC '0000:e0:00.0' and 3 more: that of the slot; --nic of `synth cluster` "
        "says otherwise",
    )
    assert allreduce(parsed(cloud("1002:74a1"))) == 256


def test_a_clouds_file_without_devices_must_be_told_what_they_are() -> None:
    with pytest.raises(
        TopologyError, match=r"f: holds 8 slots of GPUs, neither which these are .* \(--gpu a100"
    ):
        parsed(cloud(""))
    assert parsed(cloud(""), gpu="a100").topology.links == load("dgx-a100").links
    bridged = parsed(cloud(""), gpu="a100-pcie")
    assert {switch.name for switch in bridged.topology.switches} == {
        "cpu0",
        "cpu1",
        *(f"pcie{n}" for n in range(4)),
    }
    assert bridged.nics[0].near == (bridged.topology.ranks + 1,)  # cpu0, pcie0, ...: the first PCIe switch
    with pytest.raises(
        TopologyError, match="f: does not show how the links of its v100 are wired, which differs"
    ):
        parsed(cloud(""), gpu="v100")
    assert parsed(cloud(""), gpu="v100", pcie=True).topology.links == bridged.topology.links
    alone = parsed(cloud(""), pcie=True)
    assert alone.topology.links == bridged.topology.links
    assert alone.gpu is None


def test_gpus_that_are_neither_told_nor_linked_are_no_machine_of_pcie() -> None:
    text = system([gpu(dev, (), 'sm="90"') for dev in range(8)])
    with pytest.raises(
        TopologyError, match=r"neither links of its GPUs nor which these are \(h100, h200, .*--gpu"
    ):
        parsed(text)
    assert parsed(text, gpu="h100").topology.links == load("dgx-h100").links
    assert parsed(text, pcie=True).topology.switches[0].name == "cpu0"
    told = system([gpu(dev, (), 'sm="90"', device="10de:2330") for dev in range(8)])
    assert "no NVLinks or xGMI, which h100 can have" in parsed(told).notes[0]
    new = system([gpu(dev, (), 'sm="90"', device="10de:23ff") for dev in range(8)])
    assert parsed(new).topology.links == parsed(told).topology.links
    card = system([gpu(dev, (), 'sm="256" gcn="gfx950"', device="1002:75a8") for dev in range(8)])
    assert parsed(card).gpu == "mi350p"


def test_a_stated_gpu_must_be_of_the_vendor_that_the_file_shows() -> None:
    ours, other = cloud("10de:20b0", 2), cloud("1002:74a1", 2)
    assert parsed(ours, gpu="h100").gpu == "h100"
    with pytest.raises(TopologyError, match=r"^f: gpu mi300x: must be NVIDIA's, as .* is, got AMD's"):
        parsed(ours, gpu="mi300x")
    with pytest.raises(TopologyError, match=r"^f: gpu h100: must be AMD's, as .* is, got NVIDIA's"):
        parsed(other, gpu="h100", pcie=True)


def test_displays_count_where_nothing_else_does() -> None:
    cards = [slot(busid(dev), kind="0x030000", device="10de:2684") for dev in range(2)]
    board = slot("0000:0f:00.0", kind="0x030000", device="1a03:2000")  # of the board's management
    assert parsed(system([*cards, board])).gpus == ("rtx4090", "rtx4090")
    both = [*cards, *(slot(busid(dev), kind="0x030200", device="10de:26b9") for dev in (2, 3))]
    assert parsed(system(both)).gpus == ("l40s", "l40s")


# --- NICs ---------------------------------------------------------------------------------------------


def test_nics_hang_where_the_tree_says() -> None:
    nvlinks = [(FABRIC, 18, NVSWITCH)]
    pairs = [
        slot(
            f"0000:f{first}:00.0",
            *(gpu(dev, nvlinks, 'sm="100"', device="10de:2901") for dev in (first, first + 1)),
            nic(f"mlx5_{first}", 400000),
        )
        for first in (0, 2)
    ]
    lonely = slot("0000:f9:00.0", nic("storage", 100000))
    eth = '<nic><net name="eth0" dev="9" speed="10000"/></nic>'
    text = system([pairs[0], eth], [pairs[1], lonely, eth], [nic("far", 25000)])
    machine = parsed(text)
    assert {port.name: (str(port.rate), port.near) for port in machine.nics} == {
        "mlx5_0": ("50", (0, 1)),
        "eth0": ("5/4", (0, 1, 2, 3)),  # named under both CPUs, and one port
        "mlx5_2": ("50", (2, 3)),
        "storage": ("25/2", (2, 3)),
        "far": ("25/8", (0, 1, 2, 3)),  # on a CPU without GPUs
    }
    machine = parsed(text, pcie=True, numa_per_socket=1)
    label = machine.topology.label
    assert {port.name: tuple(map(label, port.near)) for port in machine.nics} == {
        "mlx5_0": ("pcie0",),
        "eth0": ("cpu0", "cpu1"),
        "mlx5_2": ("pcie1",),
        "storage": ("cpu1",),
        "far": ("cpu0", "cpu1"),
    }


def test_ports_of_odd_speeds_are_said() -> None:
    ports = [nic("one", None), nic("two", -1), nic("cxi0", 200_000_000)]
    machine = parsed(system([gpu(0), gpu(1), *ports]))
    assert [str(port.rate) for port in machine.nics] == ["5/4", "5/4", "25"]
    assert machine.notes[-2:] == (
        "does not say the speed of NIC 'one' and 1 more: 10 Gbit/s, as in NCCL; --nic of `synth cluster` "
        "says otherwise",
        "must mean kbit/s in the speed of NIC 'cxi0'; --nic of `synth cluster` says otherwise",
    )
    assert [port.near for port in machine.nics] == [(2,)] * 3  # the CPU


def test_nics_of_a_host_without_gpus_are_left_out() -> None:
    text = system([gpu(0), gpu(1)], [nic("mlx5_0", 1000)], hosts=["0x1", "0x2"])
    assert parsed(text).nics == ()


# --- refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, column 1: must be XML: no element found$"),
        ("<system>", "must be XML: no element found"),
        ("<a/>", "must be NCCL's XML, whose root is system, got 'a'"),
        ("<graphs/>", r"must be a topology \(NCCL_TOPO_DUMP_FILE\), got the result of NCCL's search"),
        (
            "<system/>",
            "must hold at least 2 gpus, got neither gpu elements nor pci elements of a GPU's class",
        ),
        (system([gpu(0)]), "must hold at least 2 gpus, got 1"),
        ("<system><gpu dev='0' sm='70'/></system>", "gpu '0': must stand in a pci element with a busid"),
        (system([gpu(0, what='sm="x"'), gpu(1)]), "gpu 0 .*: sm must be a whole number, got 'x'"),
        (system([gpu(0).replace('dev="0"', 'dev="x"')]), "dev must be a whole number, got 'x'"),
        (system([gpu(0).replace('dev="0"', "")]), "gpu at 0000:01:00.0: dev is missing"),
        (
            system([gpu(0, [(busid(1), 1, "")], 'sm="20"'), gpu(1)]),
            "1 links, but nothing says which GPU it is; gpu=",
        ),
        (system([gpu(0, [(busid(1), 1, "")], 'sm="89"'), gpu(1)]), "1 links, but a l40s has none; gpu="),
        (
            system([gpu(0), gpu(0)]),
            r"gpus of one host must differ in busid, got '0000:01:00.0' 2 times on host 0",
        ),
        (
            system([gpu(0, [(busid(1), 2, "")]), gpu(1, [(busid(0), 1, "")])]),
            r"gpu 0 \(0000:01:00.0\): has 2 links to gpu 1 .*, must be alike back, got 1",
        ),
        (system([gpu(0, [(busid(1), 7, "")]), gpu(1)]), r"must have at most 6 NVLinks \(v100\), got 7"),
        (system([gpu(0, [(busid(1), 0, "")]), gpu(1)]), r"nvlink count must be in 1..64, got 0"),
        (
            system(linked({(0, 1): 999_999_999}, 2, 'gcn="gfx942"', tag="xgmi")),
            r"gpu 0 .*: xgmi count must be in 1..64, got 999999999",
        ),
        (
            system(linked(dict.fromkeys(combinations(range(3), 2), 33), 3, 'gcn="gfx942"', tag="xgmi")),
            r"gpu 0 .*: must have at most 64 xGMI links \(mi300a\), got 66",
        ),
        (
            system([gpu(0, more='<c2c bw="0" count="1"/>'), gpu(1)]),
            "c2c: bw and count must be at least 1, got 0",
        ),
        (
            system([nic("a", 1).replace('speed="1"', 'speed="fast"'), gpu(0), gpu(1)]),
            "net 'a': speed must be a whole",
        ),
        (
            system([slot("a", gpu(0).replace("</pci>", gpu(1) + "</pci>"))]),
            "must hold a gpu or further devices",
        ),
        (
            system(*([gpu(dev)] for dev in range(65)), cpu=GRACE),
            "must have at most 64 cpus with gpus on a host, got 65",
        ),
        ("<!DOCTYPE system [<!ENTITY a 'b'>]><system>&a;</system>", "must not hold a DTD or entities"),
        ("<!DOCTYPE system SYSTEM 'file:///etc/passwd'><system/>", "must not hold a DTD or entities"),
        (
            "<!DOCTYPE b [<!ENTITY a0 'lol'>"
            + "".join(f"<!ENTITY a{i} '{f'&a{i - 1};' * 10}'>" for i in range(1, 10))
            + "]><system>&a9;</system>",
            "must not hold a DTD or entities",
        ),
        ("<system>" * 5000, "must be XML"),
    ],
)
def test_refused_xml(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=f"^f: .*{message}") as caught:
        parsed(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("speed", "width", "message"),
    [
        ("fast", "16", "link_speed must be such as 16.0 GT/s, got 'fast'"),
        ("8", "7", "link_width must be 1 to 32"),
    ],
)
def test_odd_pcie_links(speed: str, width: str, message: str) -> None:
    text = system([slot("0000:f0:00.0", gpu(0), gpu(1), speed=speed, width=width)])
    with pytest.raises(TopologyError, match=f"pci '0000:f0:00.0': {message}"):
        parsed(text)


def test_deep_nesting_is_no_trouble() -> None:
    deep = "<pci busid='a'>" * 3000 + gpu(0) + nic("deep", 1000) + "</pci>" * 3000
    machine = parsed(system([deep, gpu(1)]), rates=Rates.NCCL)
    assert cables(machine.topology) == {(0, "cpu0"): "12", (1, "cpu0"): "12"}
    assert machine.nics[0].near == (0,)


# --- anything -----------------------------------------------------------------------------------------


def is_a_machine_or_one_line(text: str, read: Reader = parse_nccl_xml, **options: object) -> None:
    try:
        machine = read(text, "t.xml", **options)
    except InputError as error:
        assert str(error).isprintable() and len(str(error)) < 500
        return
    ranks = machine.topology.ranks
    assert len(machine.gpus) == len(machine.devices) == len(machine.hosts) == ranks
    assert all(port.near and max(port.near) < machine.topology.size for port in machine.nics)
    said = (*machine.notes, *machine.devices, *(port.name for port in machine.nics))
    assert all(text.isprintable() and len(text) < 500 for text in said)


options = st.fixed_dictionaries(
    {
        "pcie": st.booleans(),
        "gpu": st.sampled_from([None, "a100", "l4", "mi300x"]),
        "between_sockets": st.sampled_from([None, Fraction(5)]),
        "rates": st.sampled_from(Rates),
    }
)


DRAWN = [
    dgx1(),
    hgx(2),
    cloud("10de:20b0", 4),
    cloud("1002:74a1", 4),
    system(linked(drawn(MI250X), 8, 'gcn="910"', tag="xgmi")),
    system([gpu(0), nic("a", 1000)], [gpu(1, more='<c2c bw="44712" count="5"/>')], hosts=["0x1", "0x2"]),
]


@given(st.data(), options)
@settings(max_examples=300)
def test_mutilated_xml_is_a_machine_or_one_line(data: st.DataObject, options: dict[str, object]) -> None:
    text = data.draw(st.sampled_from(DRAWN))
    words = ["".join(part) for _, part in itertools.groupby(text, key=lambda char: char in '"<>')]
    odd = ["", "-1", "0", "99999999999", "x", "\n", "&#10;", "0x12", FABRIC]
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.integers(0, len(words) - 1))
        words[where] = data.draw(st.sampled_from(words) | st.sampled_from(odd))
    is_a_machine_or_one_line("".join(words), **options)


@st.composite
def trees(draw: st.DrawFn) -> tuple[str, int]:
    """A file with GPUs and NICs anywhere in a tree of switches, and how many GPUs there are."""
    count = draw(st.integers(2, 9))
    elements = [gpu(dev, (), 'sm="89"') for dev in draw(st.permutations(range(count)))]
    elements += [nic(f"n{index}", 1000 * index) for index in range(1, draw(st.integers(1, 4)))]
    for index in range(draw(st.integers(0, 6))):
        first = draw(st.integers(0, len(elements) - 1))
        last = draw(st.integers(first + 1, len(elements)))
        elements[first:last] = [slot(f"0000:f{index}:00.0", *elements[first:last])]
    cut = draw(st.integers(0, len(elements)))
    return system(elements[:cut], elements[cut:]), count


@given(trees())
def test_every_tree_joins_its_gpus(drawn_tree: tuple[str, int]) -> None:
    text, count = drawn_tree
    machine = parsed(text)
    assert machine.devices == tuple(f"dev {dev} ({busid(dev)})" for dev in range(count))
    topology = machine.topology
    # a tree over ranks and switches, or two of them and the way between their CPUs
    assert len(topology.links) == 2 * (topology.size - 1)
    assert allreduce(machine) > 0
    assert all(len(port.near) == 1 or text.count("<cpu") == 2 for port in machine.nics)


# --- counts and sockets -------------------------------------------------------------------------------


def test_counts_of_one_give_way_to_those_of_a_known_board() -> None:
    ones = linked(dict.fromkeys(combinations(range(4), 2), 1), 4, 'gcn="942"', device="1002:74a0", tag="xgmi")
    machine = parsed(system(ones))
    assert set(cables(machine.topology).values()) == {"128"}
    assert (
        "counts 1 xGMI link for every pair, where boards of mi300a have 2 links: the latter count"
        in machine.notes
    )
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7), (0, 6), (2, 4), (0, 2), (4, 6), (1, 3), (1, 5), (3, 7), (5, 7)]
    dies = linked(dict.fromkeys(pairs, 1), 8, 'gcn="910"', device="1002:7408", tag="xgmi")
    machine = parsed(system(dies))
    assert sorted(cables(machine.topology).values()) == ["100"] * 2 + ["200"] * 4 + ["50"] * 6
    assert any("boards of mi250x have up to 4 links" in note for note in machine.notes)
    # any other wiring is as counted
    ring = linked(
        dict.fromkeys([(0, 1), (1, 2), (2, 3), (0, 3)], 1), 4, 'gcn="910"', device="1002:7408", tag="xgmi"
    )
    assert set(cables(parsed(system(ring)).topology).values()) == {"50"}


@pytest.mark.parametrize(
    ("options", "cpus"),
    [({}, [0, 0, 1, 1]), ({"numa_per_socket": 1}, [0, 1, 2, 3]), ({"numa_per_socket": 4}, [0] * 4)],
)
def test_cpus_of_the_file_are_numa_nodes(options: dict[str, int], cpus: list[int]) -> None:
    text = system(*([gpu(dev)] for dev in range(4)))
    machine = parsed(text, between_sockets=Fraction(7), **options)
    assert {ends[1] for ends in cables(machine.topology) if ends[0] == 0} == {"cpu0"}
    near = [ends[1] for ends in sorted(cables(machine.topology), key=str) if isinstance(ends[0], int)]
    names = sorted(set(near))
    assert [names.index(name) for name in near] == (cpus if len(set(cpus)) > 1 else [0] * len(near))
    assert any("--numa-per-socket" in note for note in machine.notes) == (not options)


def test_parts_of_a_file_are_joined_by_pcie() -> None:
    pairs = linked(dict.fromkeys([(0, 1), (2, 3)], 4), 4, 'sm="86"', device="10de:2230")
    joined = parsed(system(pairs[:2], pairs[2:]), between_sockets=Fraction(9))
    assert joined.topology.bandwidth[0, 1] == Fraction(225, 4)
    assert cables(joined.topology)["cpu0", "cpu1"] == "9"
    assert any("do not join all GPUs" in note for note in joined.notes)
    apart = parsed(system(pairs[:2], pairs[2:]), pcie=False)
    assert cables(apart.topology) == {(0, 1): "225/4", (2, 3): "225/4"}
