from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.errors import InputError, TopologyError
from arborcast.topologies import Machine
from arborcast.topologies.readers.lstopo import parse_lstopo
from tests.support.nccl_files import busid
from tests.support.nccl_files import gpu as nccl_gpu
from tests.support.nccl_files import slot as nccl_slot
from tests.support.nccl_files import system as nccl_system
from tests.support.tool_texts import cables
from tests.topologies.test_nccl_xml import DGX1, NVSWITCH, drawn, is_a_machine_or_one_line, parsed
from tests.topologies.test_rocm_smi import DIES, die_bandwidths, mi250x

V100, A100, L4, SWITCH, EFA = "10de:1db1", "10de:20b0", "10de:27b8", "10de:1ac2", "1d0f:efa1"
GEN3, GEN4 = "15.753846", "31.507692"  # GB/s of 16 lanes, as hwloc writes them
XEON = {"CPUVendor": "GenuineIntel", "CPUFamilyNumber": "6", "CPUModelNumber": "85"}


def device(
    address: str, ids: str, kind: str = "0302", speed: str = GEN3, ports: Sequence[tuple[str, str]] = ()
) -> str:
    """A PCI device; its number (`gp_index`) is that of its bus; `ports` are names with `osdev_type`."""
    inner = "".join(
        f'<object type="OSDev" gp_index="9{address[5:7]}" name="{name}" osdev_type="{number}"/>'
        for name, number in ports
    )
    return (
        f'<object type="PCIDev" gp_index="{int(address[5:7], 16)}" pci_busid="{address}" '
        f'pci_type="{kind} [{ids}] [0000:0000] a1" pci_link_speed="{speed}">{inner}</object>'
    )


def gpus(count: int, ids: str, **more: str) -> list[str]:
    return [device(busid(dev), ids, **more) for dev in range(count)]  # type: ignore[arg-type]


def port(address: str, *inside: str, speed: str = GEN3) -> str:
    return (
        f'<object type="Bridge" bridge_type="1-1" pci_busid="{address}" pci_type="0604 [10b5:9781] [0:0] b0" '
        f'pci_link_speed="{speed}">{"".join(inside)}</object>'
    )


def hwloc(*packages: Sequence[str], more: str = "", cpu: dict[str, str] = XEON) -> str:
    """The file of a machine; what hangs on a package is behind one host bridge, after its NUMA node."""
    said = "".join(f'<info name="{name}" value="{value}"/>' for name, value in cpu.items())
    inner = "".join(
        f'<object type="Package" os_index="{index}" gp_index="80{index}">{said}<object type="NUMANode" '
        f'os_index="{index}"/><object type="Bridge" bridge_type="0-1">{"".join(inside)}</object></object>'
        for index, inside in enumerate(packages)
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n'
        f'<topology version="2.0"><object type="Machine"><info name="Architecture" value="x86_64"/>{inner}'
        f"</object>{more}</topology>\n"
    )


def rates(
    numbers: Sequence[int], megabytes: dict[tuple[int, int], int], name: str = "NVLinkBandwidth"
) -> str:
    """hwloc's matrix over the objects of these numbers."""
    cells = (str(megabytes.get(pair, 0)) for pair in itertools.product(numbers, numbers))
    return (
        f'<distances2hetero nbobjs="{len(numbers)}" kind="25" name="{name}"><indexes length="9">'
        f"{' '.join(f'PCIDev:{number}' for number in numbers)} </indexes><u64values length="
        f'"9">{" ".join(cells)} </u64values></distances2hetero>'
    )


def matrix(cell: dict[tuple[int, int], str], count: int) -> str:
    """What nvidia-smi topo -m prints of these pairs, SYS for all others."""
    names = [f"GPU{index}" for index in range(count)]
    rows = [
        "\t".join(
            [
                names[here],
                *(" X " if here == there else cell.get((here, there), "SYS") for there in range(count)),
            ]
        )
        for here in range(count)
    ]
    return "\n".join(["\t" + "\t".join(names), *rows, ""])


def read(text: str, **options: object) -> Machine:
    return parse_lstopo(text, "t.xml", **options)


def mesh() -> dict[tuple[int, int], int]:
    counts = drawn(DGX1)
    return {
        pair: counts[min(pair), max(pair)]
        for pair in permutations(range(8), 2)
        if tuple(sorted(pair)) in counts
    }


def test_nvlinks_by_hwlocs_own_matrix_and_by_nvidia_smis_are_the_same_machine() -> None:
    slots = gpus(8, V100)
    measured = rates(range(1, 9), {(a + 1, b + 1): 25000 * count for (a, b), count in mesh().items()})
    beside = matrix({pair: f"NV{count}" for pair, count in mesh().items()}, 8)
    machine = read(hwloc(slots[:4], slots[4:], more=measured))
    assert machine.topology == read(hwloc(slots[:4], slots[4:]) + beside).topology
    assert {pair: int(rate) for pair, rate in cables(machine.topology).items()} == {
        pair: 25 * count for pair, count in drawn(DGX1).items()
    }
    assert machine.gpus == ("v100",) * 8


def test_links_to_switches_are_those_of_one_switch() -> None:
    slots = gpus(3, V100)
    switches = [device(f"0000:{bus}:00.0", SWITCH, "0680", "1.0") for bus in (60, 61)]
    to_each = {(gpu, int(str(bus), 16)): 75000 for gpu in (1, 2, 3) for bus in (60, 61)}
    machine = read(hwloc(slots, switches, more=rates([1, 2, 3, 0x60, 0x61], to_each)))
    assert cables(machine.topology) == {(rank, "nvswitch"): "150" for rank in range(3)}
    beside = matrix(dict.fromkeys(permutations(range(3), 2), "NV6"), 3)
    assert read(hwloc(slots, switches) + beside).topology == machine.topology


def test_xgmi_of_amd() -> None:
    slots = gpus(3, "1002:74a1", kind="1200")
    machine = read(
        hwloc(slots, more=rates([1, 2, 3], dict.fromkeys(permutations((1, 2, 3), 2), 50000), "XGMIBandwidth"))
    )
    assert cables(machine.topology) == {(0, 1): "64", (0, 2): "64", (1, 2): "64"}


def test_xgmi_by_rocm_smis_table_behind_it() -> None:
    slots = gpus(8, "1002:7408", kind="0380")
    beside = mi250x(bandwidth=die_bandwidths)
    links = cables(read(hwloc(slots[:4], slots[4:]) + beside, pcie=False).topology)
    assert links == {pair: str(50 * count) for pair, count in sorted(DIES.items())}
    with pytest.raises(TopologyError, match="how the links of its mi250x are wired"):
        read(hwloc(slots))


def test_pcie_is_that_of_nccls_file_of_the_same_machine() -> None:
    ours = [port(f"0000:f{half}:00.0", *gpus(4, L4, speed=GEN4)[2 * half : 2 * half + 2]) for half in (0, 1)]
    theirs = [
        nccl_slot(
            f"0000:f{half}:00.0",
            *(nccl_gpu(dev, (), 'sm="89"', device=L4, speed="16.0 GT/s") for dev in (2 * half, 2 * half + 1)),
        )
        for half in (0, 1)
    ]
    cpu = 'arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85"'
    machine, other = (
        read(hwloc(*([each] for each in ours))),
        parsed(nccl_system(*([x] for x in theirs), cpu=cpu)),
    )
    assert machine.topology.links == other.topology.links
    assert machine.topology.switches == other.topology.switches


@pytest.mark.parametrize(
    ("of_gpu", "of_port", "rate"),
    [
        ("4.000000", "4.000000", GEN4),  # idle at generation 1 with 16 lanes, on both ends of the link
        ("2.000000", "15.753846", "15.753846"),  # 8 lanes
        ("0.000000", "0.000000", GEN4),  # hidden
        ("31.507692", "15.753846", "15.753846"),
        ("7.876923", "7.876923", "7.876923"),  # a slot of 4 lanes
    ],
)
def test_gpus_that_idle_count_with_their_lanes(of_gpu: str, of_port: str, rate: str) -> None:
    slots = [
        port(f"0000:f{dev}:00.0", each, speed=of_port) for dev, each in enumerate(gpus(2, L4, speed=of_gpu))
    ]
    links = read(hwloc(slots)).topology.links
    assert {round(float(link.bandwidth), 6) for link in links} == {float(rate)}


def test_a_package_is_a_socket_whatever_its_numa_nodes() -> None:
    machine = read(hwloc(*([each] for each in gpus(4, L4)), cpu={}))
    assert [switch.name for switch in machine.topology.switches] == ["cpu0", "cpu1", "cpu2", "cpu3"]


def test_ports_with_rdma_are_the_nics_where_there_are_some() -> None:
    slow = device("0000:50:00.0", "8086:1521", "0200", "2.0", [("eth0", "2")])
    fast = device("0000:51:00.0", EFA, "0200", GEN3, [("rdmap0", "3")])
    both, one = (read(hwloc([*gpus(2, L4), slow, *extra])) for extra in ([fast], []))
    assert [(nic.name, nic.near) for nic in both.nics] == [("rdmap0", (2,))]
    assert [(nic.name, nic.rate) for nic in one.nics] == [("eth0", Fraction(2))]
    assert "does not say the speed of NIC 'rdmap0'" in " ".join(both.notes)


def test_displays_of_the_board_are_no_gpus() -> None:
    board = device("0000:02:00.0", "1002:515e", "0300", "0.0")
    with pytest.raises(TopologyError, match=r"must show at least 2 GPUs, .* got 0; lstopo --whole-io"):
        read(hwloc([board]))
    assert read(hwloc([board, *gpus(2, "10de:2684", kind="0300")])).gpus == ("rtx4090",) * 2


def test_boards_are_assumed_as_in_nccls_files() -> None:
    machine = read(hwloc(gpus(4, A100)))
    assert cables(machine.topology) == {(rank, "nvswitch"): "300" for rank in range(4)}
    assert "leaves links to be detected" in machine.notes[0]
    with pytest.raises(TopologyError, match="how the links of its v100 are wired"):
        read(hwloc(gpus(4, V100)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (hwloc(gpus(1, L4)), "t.xml: must show at least 2 GPUs"),
        (hwloc(gpus(2, A100)) + matrix({}, 3), "t.xml: its table must show the 2 GPUs of its XML, got 3"),
        (
            hwloc(gpus(2, A100), more=rates([1, 2], {}).replace("0 0", "0 x", 1)),
            "number for each pair of its 2",
        ),
        (hwloc(gpus(2, A100), more=rates([1, 2], {(1, 2): 25000})), "must be alike back, got 0"),
        (
            hwloc(gpus(2, L4)).replace(
                "<!DOCTYPE topology", "<!DOCTYPE x [<!ENTITY a 'b'>]><!DOCTYPE topology"
            ),
            "DTD",
        ),
        ("<topology></topologie>", "t.xml: line 1, column 13: must be XML"),
        (f'<topology><x a="{NVSWITCH}"/></topology>', "must show at least 2 GPUs"),
    ],
)
def test_refused_files(text: str, message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        read(text)
    assert message in str(caught.value)


DRAWN = [
    hwloc(gpus(2, A100), gpus(4, A100)[2:], more=rates([1, 2, 3, 4], {(1, 2): 300000, (2, 1): 300000})),
    hwloc(
        [
            port("0000:f0:00.0", *gpus(3, L4, speed="2.0")),
            device("0000:51:00.0", EFA, "0200", GEN3, [("r", "3")]),
        ]
    ),
    hwloc(gpus(3, V100)) + matrix(dict.fromkeys(permutations(range(3), 2), "NV2"), 3),
]


@given(st.data(), st.fixed_dictionaries({"pcie": st.sampled_from([None, True, False])}))
@settings(max_examples=300)
def test_mutilated_files_are_a_machine_or_one_line(data: st.DataObject, options: dict[str, object]) -> None:
    text = data.draw(st.sampled_from(DRAWN))
    words = ["".join(part) for _, part in itertools.groupby(text, key=lambda char: char in '"<>\t ')]
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.integers(0, len(words) - 1))
        odd = ["", "-1", "0", "99999999999", "x", "\n", "0.3", "Package", "NV99", "</topology>"]
        words[where] = data.draw(st.sampled_from(words) | st.sampled_from(odd))
    is_a_machine_or_one_line("".join(words), read=parse_lstopo, **options)


@given(st.text(max_size=60), st.sampled_from(["", "<topology>", "<?xml version='1.0'?><topology>"]))
def test_any_text_is_a_machine_or_one_line(text: str, before: str) -> None:
    with pytest.raises(InputError) as caught:
        read(before + text)
    assert str(caught.value).isprintable()
