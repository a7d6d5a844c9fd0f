from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.errors import InputError, TopologyError
from arborcast.synth.topology import Switch
from arborcast.topologies import load
from arborcast.topologies.rates import Rates
from arborcast.topologies.readers.nvidia_smi import parse_nvidia_smi
from tests.support import tool_texts
from tests.support.refusals import refuses
from tests.support.tool_texts import cables, damaged, machines, shown_links, tree_links

DGX1 = """
\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tmlx5_0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV1\tNV1\tNV2\tNV2\tSYS\tSYS\tSYS\tPIX\t0-19\t0
GPU1\tNV1\t X \tNV2\tNV1\tSYS\tNV2\tSYS\tSYS\tPIX\t0-19\t0
GPU2\tNV1\tNV2\t X \tNV2\tSYS\tSYS\tNV1\tSYS\tPHB\t0-19\t0
GPU3\tNV2\tNV1\tNV2\t X \tSYS\tSYS\tSYS\tNV1\tPHB\t0-19\t0
GPU4\tNV2\tSYS\tSYS\tSYS\t X \tNV1\tNV1\tNV2\tSYS\t20-39\t1
GPU5\tSYS\tNV2\tSYS\tSYS\tNV1\t X \tNV2\tNV1\tSYS\t20-39\t1
GPU6\tSYS\tSYS\tNV1\tSYS\tNV1\tNV2\t X \tNV2\tSYS\t20-39\t1
GPU7\tSYS\tSYS\tSYS\tNV1\tNV2\tNV1\tNV2\t X \tSYS\t20-39\t1
mlx5_0\tPIX\tPIX\tPHB\tPHB\tSYS\tSYS\tSYS\tSYS\t X \t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""

PCIE_ONLY = """
        GPU0    GPU1    GPU2    GPU3    CPU Affinity
GPU0     X      PIX     SOC     SOC     0-7
GPU1    PIX      X      SOC     SOC     0-7
GPU2    SOC     SOC      X      PHB     8-15
GPU3    SOC     SOC     PHB      X      8-15
"""


def matrix(cells: Callable[[int, int], str], count: int) -> str:
    """The text for `count` GPUs with these cells."""
    lines = ["\t".join(["", *(f"GPU{i}" for i in range(count)), "CPU Affinity", "NUMA Affinity"])]
    for row in range(count):
        entries = ["X" if row == column else cells(row, column) for column in range(count)]
        lines.append("\t".join([f"GPU{row}", *entries, "0-63", "0"]))
    return "\n".join(lines)


def test_dgx1_is_the_catalogs(caplog: pytest.LogCaptureFixture) -> None:
    topology = parse_nvidia_smi(DGX1, "f", gpu="V100").topology
    known = load("dgx1")
    assert (topology.ranks, topology.links, topology.symmetries) == (8, known.links, known.symmetries)
    assert not caplog.records
    by_nccl = parse_nvidia_smi(DGX1, "f", gpu="v100", rates=Rates.NCCL).topology
    assert by_nccl.links == load("dgx1", rates="nccl").links


def test_what_was_assumed_is_noted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "box.txt").write_text(DGX1)
    with caplog.at_level(logging.WARNING):
        assert load(str(tmp_path / "box.txt")).links == load("dgx1").links
    assert (
        "box.txt: does not say which GPUs these are: v100 (25 GB/s each way per NVLink) assumed"
        in caplog.text
    )
    machine = parse_nvidia_smi(PCIE_ONLY, "f")
    assert machine.gpus == (None,) * 4
    assert machine.notes == (
        "shows no NVLinks: its PCIe paths are the links; --pcie says so",
        "does not say which GPUs these are: PCIe 3.0 with 16 lanes assumed (15.75 GB/s each way); "
        "--gpu says otherwise",
        "between its CPUs 450 GB/s each way are assumed: the raw rate of NVLink-C2C (Grace), the largest of "
        "its kind as the processor is unknown; --between-sockets says otherwise",
    )
    assert "shows no NVLinks, as topo -mp never" in parse_nvidia_smi("topo -mp" + PCIE_ONLY, "f").notes[0]
    assert parse_nvidia_smi(PCIE_ONLY, "f", pcie=True, gpu="t4", between_sockets=Fraction(9)).notes == ()


NV18 = matrix(lambda _a, _b: "NV18", 4)
GRACE = NV18.replace("0-63\t0", "0-71\t0", 2).replace("0-63\t0", "72-143\t1")


@pytest.mark.parametrize(
    ("text", "place", "gpus", "rate"),
    [
        (NV18, "f", "h100 h100 h100 h100", "450"),
        # what other commands say of each one
        (
            "".join(f"GPU {i}: NVIDIA B200 (UUID: GPU-{i})\n" for i in range(4)) + NV18,
            "f",
            "b200 " * 4,
            "900",
        ),
        ("GPU 0,1,2,3: NVIDIA H20\n" + NV18, "f", "h20 " * 4, "450"),
        ("GPU 0: NVIDIA H100 80GB HBM3\nGPU 1: NVIDIA H200\n" + NV18, "f", "h100 " * 4, "450"),
        # names that stand anywhere
        ("|   0  NVIDIA B200     On  | 00000000:1B:00.0 Off |\n" + NV18, "f", "b200 " * 4, "900"),
        ("root@node-b300-7:/# nvidia-smi topo -m\n" + NV18, "f", "b300 " * 4, "900"),
        ("several: H100, B200\n" + NV18, "b200.txt", "b200 " * 4, "900"),
        (NV18, "/home/b200/my-gb300x4.txt", "gb300 " * 4, "900"),
        # a name that cannot be, since these have no NVLinks
        ("scp l40s:topo.txt .\n" + NV18, "f", "h100 " * 4, "450"),
        # cores of Grace: two GPUs a CPU, or one
        (GRACE, "f", "gb200 " * 4, "900"),
        (
            GRACE.replace("0-71\t0", "144-215\t2", 1).replace("72-143\t1", "216-287\t3", 1),
            "f",
            "gh200 " * 4,
            "450",
        ),
    ],
)
def test_what_the_gpus_are(text: str, place: str, gpus: str, rate: str) -> None:
    machine = parse_nvidia_smi(text, place)
    assert machine.gpus == tuple(gpus.split())
    assert {str(link.bandwidth) for link in machine.topology.links} == {rate}
    stated = "GPU 3:" in text or "GPU 0,1,2,3:" in text
    assert [note.startswith("does not say which GPUs these are") for note in machine.notes] == [True] * (
        not stated
    )


def test_rates_of_nvlink_status_are_taken_as_stated() -> None:
    status = "".join(
        f"GPU {gpu}: NVIDIA H100 80GB HBM3 (UUID: GPU-{gpu})\n\t Link 0: {rate} GB/s\n\t Link 1: <inactive>\n"
        for gpu, rate in enumerate(["26.562", "26.562", "26.562", "25"])
    )
    machine = parse_nvidia_smi(status + NV18, "f")
    assert machine.notes == ("GB/s per NVLink are those of its nvlink status, 25, 26.562",)
    assert cables(machine.topology) == {
        **{(gpu, "nvswitch"): str(18 * Fraction("26.562")) for gpu in range(3)},
        (3, "nvswitch"): "450",
    }
    cut = status.partition("GPU 2")[0]  # a paste that ends early: nobody says what the others have
    assert parse_nvidia_smi(cut + NV18, "f", gpu="h100").notes == (
        "GB/s per NVLink are those of its nvlink status, 26.562, which has 2 of 4 GPUs",
    )
    by_nccl = parse_nvidia_smi(status + NV18, "f", rates=Rates.NCCL).topology
    assert {link.bandwidth for link in by_nccl.links} == {18 * Fraction("20.6")}
    # the rate tells the generation where nothing else does: 14 GB/s is no V100's
    pair = (
        matrix(lambda _a, _b: "NV2", 2) + "\nGPU 0: \n Link 0: 14.062 GB/s\nGPU 1: \n Link 0: 14.062 GB/s\n"
    )
    machine = parse_nvidia_smi(pair, "f")
    assert (machine.gpu, cables(machine.topology)) == ("a6000", {(0, 1): str(2 * Fraction("14.062"))})


@pytest.mark.parametrize(
    ("count", "nvlinks", "gpu", "switched", "rate"),
    [
        # machines with NVSwitch: every pair shows all links of a GPU
        (8, 12, None, True, "300"),
        (8, 18, None, True, "450"),
        (16, 6, None, True, "150"),
        (8, 18, "b200", True, "900"),
        (8, 8, None, True, "200"),
        (3, 12, "a100", True, "300"),
        (4, 6, "v100", True, "150"),
        # machines without: the links of a pair are its own
        (4, 4, None, False, "100"),
        (4, 6, "h100", False, "150"),
        (2, 12, None, False, "300"),
        (2, 4, "a6000", False, "225/4"),
        (4, 2, "v100", False, "50"),
    ],
)
def test_shared_nvlinks_become_a_switch(
    count: int, nvlinks: int, gpu: str | None, switched: bool, rate: str
) -> None:
    topology = parse_nvidia_smi(matrix(lambda _a, _b: f"NV{nvlinks}", count), "f", gpu=gpu).topology
    assert [switch.name for switch in topology.switches] == ["nvswitch"] * switched
    assert len(topology.links) == (2 * count if switched else count * (count - 1))
    assert {link.bandwidth for link in topology.links} == {Fraction(rate)}
    assert len(topology.symmetries) == 1


@pytest.mark.parametrize(
    ("nvlinks", "said", "gpu", "able"),
    [
        (18, "", None, True),  # all GPUs with so many on an NVSwitch are of Hopper or later
        (18, "GPU 0,1,2,3: NVIDIA H20\n", None, True),
        (18, "GPU 0,1: NVIDIA H100\nGPU 2,3: NVIDIA H200\n", None, True),
        (8, "", "h800", True),
        (8, "root@h800:/# nvidia-smi topo -m\n", None, True),
        (8, "GPU 0,1: NVIDIA A800\nGPU 2,3: NVIDIA H800\n", None, False),
        (8, "", "a800", False),
        (12, "", None, False),
    ],
)
def test_nvswitches_add_and_multicast_since_hopper(nvlinks: int, said: str, gpu: str, able: bool) -> None:
    machine = parse_nvidia_smi(said + matrix(lambda _a, _b: f"NV{nvlinks}", 4), "f", gpu=gpu)
    (switch,) = machine.topology.switches
    assert switch == Switch("nvswitch", reduces=able, multicasts=able, loopback=able)
    assert not any("NVSwitch only forwards" in note for note in machine.notes)


def test_an_nvswitch_of_unknown_generation_only_forwards() -> None:
    machine = parse_nvidia_smi(matrix(lambda _a, _b: "NV8", 8), "f")
    assert machine.topology.switches == (Switch("nvswitch"),)
    assert machine.notes[-1] == (
        "its NVSwitch only forwards here: that of h800, with as many NVLinks, adds and multicasts too "
        "(NVLink SHARP); --gpu says which it is"
    )


def test_a_gpu_with_broken_links_on_an_nvswitch() -> None:
    text = matrix(lambda a, b: "NV16" if 2 in (a, b) else "NV18", 4)
    assert cables(parse_nvidia_smi(text, "f", gpu="h100").topology) == {
        (0, "nvswitch"): "450",
        (1, "nvswitch"): "450",
        (2, "nvswitch"): "400",
        (3, "nvswitch"): "450",
    }


def test_pairs_with_bridges_and_two_nvswitch_domains() -> None:
    bridges = matrix(lambda a, b: "NV12" if a // 2 == b // 2 else "SYS", 4)
    apart = parse_nvidia_smi(bridges, "f", pcie=False)
    assert cables(apart.topology) == {(0, 1): "300", (2, 3): "300"}
    halves = matrix(lambda a, b: "NV12" if a // 4 == b // 4 else "SYS", 8)
    topology = parse_nvidia_smi(halves, "f", gpu="a100", pcie=False).topology
    assert [switch.name for switch in topology.switches] == ["nvswitch0", "nvswitch1"]
    assert topology.bandwidth[5, 9] == 300


def test_p100_box() -> None:
    text = DGX1.replace("NV2", "NV1")
    assert parse_nvidia_smi(text, "f").topology.links == load("dgx1-p100").links


def test_pcie_paths_are_a_tree() -> None:
    topology = parse_nvidia_smi(PCIE_ONLY, "f", gpu="v100-pcie", rates=Rates.NCCL).topology
    expected = {
        (0, "pcie0"): "12",
        (1, "pcie0"): "12",
        (2, "cpu1"): "12",
        (3, "cpu1"): "12",
        ("pcie0", "cpu0"): "12",
        ("cpu0", "cpu1"): "10",
    }
    assert cables(topology) == expected
    apart = parse_nvidia_smi(
        PCIE_ONLY, "f", gpu="t4", rates=Rates.NCCL, between_sockets=Fraction(22)
    ).topology
    assert cables(apart) == {**expected, ("cpu0", "cpu1"): "22"}


def test_nics_and_affinities_tell_which_gpus_are_near_each_other() -> None:
    topology = parse_nvidia_smi(DGX1, "f", gpu="v100", pcie=True).topology
    tree = {ends: rate for ends, rate in cables(topology).items() if isinstance(ends[1], str)}
    # 8 GT/s x 16 lanes / 8 bits, less 128b/130b
    slot = str(Fraction(16 * 128, 130))
    assert tree == {
        (0, "pcie0"): slot,
        (1, "pcie0"): slot,
        ("pcie0", "cpu0"): slot,
        (2, "cpu0"): slot,
        (3, "cpu0"): slot,
        **{(gpu, "cpu1"): slot for gpu in range(4, 8)},
        ("cpu0", "cpu1"): "450",
    }
    assert {ends: rate for ends, rate in cables(topology).items() if ends not in tree} == cables(load("dgx1"))
    # without affinities the NIC still tells 0 to 3 together, and no cell tells 4 to 7 apart
    bare = (
        DGX1.replace("\tCPU Affinity\tNUMA Affinity", "").replace("\t0-19\t0", "").replace("\t20-39\t1", "")
    )
    assert cables(parse_nvidia_smi(bare, "f", gpu="v100", pcie=True).topology) == cables(topology)
    # all NVLinks and no NIC: affinities alone
    halves = matrix(lambda _a, _b: "NV12", 4).replace("0-63\t0", "0-31\t0", 2).replace("0-63\t0", "32-63\t1")
    both = cables(parse_nvidia_smi(halves, "f", gpu="a100", pcie=True).topology)
    assert [ends for ends in both if "cpu" in str(ends)] == [
        *((gpu, f"cpu{gpu // 2}") for gpu in range(4)),
        ("cpu0", "cpu1"),
    ]


def test_affinities_that_leave_a_hidden_path_open_are_refused() -> None:
    halves = matrix(lambda _a, _b: "NV12", 4).replace("0-63\t0", "0-31\t0", 2).replace("0-63\t0", "32-63\t1")
    cut = halves.replace("32-63\t1", "32-\tN/A", 1)
    with pytest.raises(TopologyError, match="the affinity of GPU2, which tells its PCIe path, cannot be"):
        parse_nvidia_smi(cut, "f", gpu="a100", pcie=True)
    wrong = halves.replace("32-63\t1", "0-31\t1", 1)
    with pytest.raises(TopologyError, match="affinities must agree whether GPU0 and GPU2 are near"):
        parse_nvidia_smi(wrong, "f", gpu="a100", pcie=True)


def test_nics_are_ports_of_the_nearest() -> None:
    text = """
        GPU0    GPU1    GPU2    GPU3    NIC0    NIC1    NIC2    CPU Affinity    NUMA Affinity
GPU0     X      NODE    SYS     SYS     PIX     NODE    SYS     0-7             0
GPU1    NODE     X      SYS     SYS     NODE    NODE    SYS     0-7             0
GPU2    SYS     SYS      X      PIX     SYS     SYS     SYS     8-15            1
GPU3    SYS     SYS     PIX      X      SYS     SYS     SYS     8-15            1

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_bond_1
"""
    machine = parse_nvidia_smi(text, "f", gpu="l40s")
    label = machine.topology.label
    assert [(nic.name, nic.rate, [label(vertex) for vertex in nic.near]) for nic in machine.nics] == [
        ("mlx5_0", None, [0]),  # one GPU on its switch
        ("mlx5_bond_1", None, ["cpu0"]),
        ("NIC2", None, ["cpu0", "cpu1"]),
    ]
    linked = text.replace("NODE    SYS     SYS     PIX ", "NV4     SYS     SYS     PIX ", 1)
    linked = linked.replace("GPU1    NODE", "GPU1    NV4 ", 1)
    nics = parse_nvidia_smi(linked, "f", gpu="a40", pcie=False).nics
    assert [nic.near for nic in nics] == [(0,), (0, 1), (0, 1, 2, 3)]


@refuses("old", "new", "message")
def test_broken_matrices(old: str, new: str, message: str) -> None:
    text = DGX1.replace(old, new) if old in ("GPU", "NV1") else DGX1.replace(old, new, 1)
    with pytest.raises(TopologyError, match=f"^f: .*{message}") as caught:
        parse_nvidia_smi(text, "f", gpu="v100")
    assert "\n" not in str(caught.value)


def test_counts_that_no_gpu_has() -> None:
    text = matrix(lambda _a, _b: "NV12", 8)
    with pytest.raises(TopologyError, match="shows NV12, must be at most NV6 for v100"):
        parse_nvidia_smi(text, "f", gpu="v100")
    with pytest.raises(TopologyError, match="gpu 'gtx': must be one of a10, a100, a100-pcie, a2, a30"):
        parse_nvidia_smi(text, "f", gpu="gtx")
    with pytest.raises(
        TopologyError, match="f: gpu mi300x: must be NVIDIA's, whose tool printed this, got AMD's"
    ):
        parse_nvidia_smi(text, "f", gpu="mi300x")
    with pytest.raises(TopologyError, match="a GPU with 99 NVLinks, must be at most 18"):
        parse_nvidia_smi(matrix(lambda _a, _b: "NV99", 3), "f")


@given(st.integers(1, 6), st.data(), st.booleans())
@settings(max_examples=200)
def test_any_matrix_is_a_topology_or_one_line(count: int, data: st.DataObject, pcie: bool) -> None:
    cell = st.sampled_from(["NV1", "NV2", "NV6", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"])
    drawn = {(a, b): data.draw(cell) for b in range(count) for a in range(b)}
    text = matrix(lambda a, b: drawn[min(a, b), max(a, b)], count)
    try:
        topology = parse_nvidia_smi(text, "f", pcie=pcie).topology
    except InputError as error:
        assert len(str(error).splitlines()) == 1
        return
    assert topology.ranks == count
    assert topology.is_symmetric
    if pcie:  # the host joins all
        reached, todo = {0}, [0]
        while todo:
            here = todo.pop()
            new = {dst for src, dst in topology.bandwidth if src == here} - reached
            reached |= new
            todo += new
        assert reached == set(range(topology.size))


# --- damaged text -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda text: text.replace("PIX\tSYS\t0-19\t0\nGPU1", "PIXSYS\t0-19\t0\nGPU1"), ""),  # cells glued
        (lambda text: text.replace("\tNIC0\tNIC1\tCPU", "\tNIC0NIC1CPU"), ""),
        (lambda text: text.replace("\t", ""), ""),  # everything glued
        (lambda text: text.replace("\t", " | ").replace("\nGPU0", "\n-- | -- | --\nGPU0"), ""),
        (lambda text: "\n".join("// " + line for line in text.split("\n")), ""),
        (lambda text: " ".join(text.split()), ""),  # on one line
        (lambda text: "\n".join(textwrap.wrap(text.replace("\t", " "), 30)), ""),
        (
            lambda text: "\n".join(
                line[i : i + 47] for line in text.split("\n") for i in range(0, len(line), 47)
            ),
            "",
        ),
        (lambda text: text.replace("SYS", "SOC"), ""),
        (lambda text: "<details>\n```\nGPU0 and GPU1 are near.\n" + text + "GPU0 is the first.\n```", ""),
        (lambda text: text + text, ""),
        (
            lambda text: text.replace("NV2", "NVX") + text,
            "its first matrix is broken (line 2: GPU0 to GPU1: ",
        ),
        (
            lambda text: text + text.replace("NV2", "NV3"),
            "several matrices; the first one is taken, that of line 8",
        ),
        (
            lambda text: text.replace("\tPIX\tSYS\t0-19", "\tPI\tSYS\t0-19"),
            "columns of NICs are damaged (line 2: 3 ",
        ),
        (
            lambda text: text.replace("\tPIX\tSYS\t0-19", "\tSYS\tSYS\t0-19"),
            "GPU0 to NIC0 differs from NIC0 to GPU0",
        ),
        (
            lambda text: text.replace("GPU2\tSYS", "GPU\tSYS"),
            "row GPU2 is missing: its connections are those",
        ),
        (
            lambda text: text.replace("\tX\tPIX\tSYS\tPIX", "\tPIX\tX\tSYS\tPIX").replace(
                "GPU0\tGPU1", "GPU1\tGPU0", 1
            ),
            None,
        ),
    ],
)
def test_damaged_text_is_read_where_the_gpus_cells_are_whole(
    change: Callable[[str], str], note: str | None
) -> None:
    text = (
        "\tGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\n"
        "GPU0\tX\tNV2\tSYS\tPIX\tSYS\t0-19\t0\n"
        "GPU1\tNV2\tX\tSYS\tPIX\tSYS\t0-19\t0\n"
        "GPU2\tSYS\tSYS\tX\tSYS\tPIX\t20-39\t1\n"
        "NIC0\tPIX\tPIX\tSYS\tX\tSYS\n"
        "NIC1\tSYS\tSYS\tPIX\tSYS\tX\n\n"
    )
    hurt = change(text)
    assert hurt != text
    if note is None:  # columns in another order, which the rows do not follow
        with pytest.raises(TopologyError, match="GPU1 to GPU1: must be X"):
            parse_nvidia_smi(hurt, "f", gpu="v100")
        return
    machine = parse_nvidia_smi(hurt, "f", gpu="v100", pcie=False)
    assert cables(machine.topology) == {(0, 1): "50"}
    assert bool(machine.notes) == bool(note)
    assert note in "".join(machine.notes)
    assert len(machine.nics) == (0 if "NIC" in note or "row" in note else 2)


@given(machines(nvlinks=6))
@settings(max_examples=100)
def test_nvlinks_of_any_machine_are_read_back(machine: tool_texts.Machine) -> None:
    read = parse_nvidia_smi(tool_texts.nvidia_smi(machine), "f", gpu="v100", pcie=True)
    links = {ends: rate for ends, rate in cables(read.topology).items() if ends[1] in range(machine.gpus)}
    assert links == {ends: str(25 * count) for ends, count in machine.nvlinks.items()}
    assert [nic.name for nic in read.nics] == [f"mlx5_{nic}" for nic in range(len(machine.nics))]


@given(machines())
@settings(max_examples=100)
def test_pcie_trees_of_any_machine_are_read_back(machine: tool_texts.Machine) -> None:
    read = parse_nvidia_smi(tool_texts.nvidia_smi(machine), "f", gpu="t4", between_sockets=Fraction(9))
    assert shown_links(read.topology, machine.gpus) == tree_links(machine, slot="1024/65", between="9")


@given(st.data(), machines() | machines(nvlinks=6), st.booleans())
@settings(max_examples=200)
def test_damage_changes_nothing_or_is_refused(
    data: st.DataObject, machine: tool_texts.Machine, legend: bool
) -> None:
    text = tool_texts.nvidia_smi(machine, legend=legend)
    whole = parse_nvidia_smi(text, "f", gpu="v100").topology
    try:
        read = parse_nvidia_smi(data.draw(damaged(text)), "f", gpu="v100").topology
    except InputError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert read.links == whole.links


# --- sockets, words, parts ----------------------------------------------------------------------------


def placed(count: int, cells: Callable[[int, int], str], nodes: list[tuple[str, str]]) -> str:
    """The text for GPUs with these cells, and cores and NUMA node of each."""
    lines = ["\t".join(["", *(f"GPU{i}" for i in range(count)), "CPU Affinity\tNUMA Affinity\tGPU NUMA ID"])]
    for row, (cores, node) in enumerate(nodes):
        entries = ["X" if row == column else cells(row, column) for column in range(count)]
        lines.append("\t".join([f"GPU{row}", *entries, cores, node, "", "N/A"]))
    return "\n".join(lines) + "\n"


FOUR_NODES = placed(
    4,
    lambda _a, _b: "SYS",
    [("8-15,72-79", "1"), ("24-31,88-95", "3"), ("40-47,104-111", "5"), ("56-63,120-127", "7")],
)
"""Two processors of 32 cores with four NUMA nodes each, a GPU at every second."""


@pytest.mark.parametrize(
    ("before", "options", "cpus", "said"),
    [
        ("", {}, [0, 0, 1, 1], "its NUMA nodes count as 2 sockets with 4 nodes each"),
        ("", {"numa_per_socket": 2}, [0, 1, 2, 3], ""),
        ("", {"numa_per_socket": 8}, [0, 0, 0, 0], ""),
        ("Socket(s):  2\nNUMA node(s):  8\n", {}, [0, 0, 1, 1], ""),
        ("Socket(s):  1\nNUMA node(s):  8\n", {}, [0, 0, 0, 0], ""),
    ],
)
def test_numa_nodes_are_no_sockets(before: str, options: dict[str, int], cpus: list[int], said: str) -> None:
    machine = parse_nvidia_smi(before + FOUR_NODES, "f", gpu="l4", **options)
    expected = {(gpu, f"cpu{cpu}"): "2048/65" for gpu, cpu in enumerate(cpus)}
    own = {ends: rate for ends, rate in cables(machine.topology).items() if isinstance(ends[0], int)}
    assert own == expected
    assert len(cables(machine.topology)) - 4 == len(set(cpus)) * (len(set(cpus)) - 1) // 2
    assert said in " ".join(machine.notes)
    assert bool(said) == ("--numa-per-socket" in " ".join(machine.notes))


def test_a_virtual_machine_shows_sys_everywhere_and_affinities_tell() -> None:
    text = placed(4, lambda _a, _b: "SYS", [("0-9", "0"), ("0-9", "0"), ("10-19", "1"), ("10-19", "1")])
    machine = parse_nvidia_smi(text, "f", gpu="t4", between_sockets=Fraction(9))
    slots = {(gpu, f"cpu{gpu // 2}"): "1024/65" for gpu in range(4)}
    assert cables(machine.topology) == {**slots, ("cpu0", "cpu1"): "9"}
    assert any("shows SYS between all GPUs" in note for note in machine.notes)
    # where some pairs are nearer, SYS means what it says
    mixed = placed(4, lambda a, b: "PHB" if a // 2 == b // 2 else "SYS", [("0-9", "0")] * 4)
    assert ("cpu0", "cpu1") in cables(parse_nvidia_smi(mixed, "f", gpu="t4").topology)


PAIR = placed(2, lambda _a, _b: "PHB", [("0-15", "0")] * 2)


@pytest.mark.parametrize(
    ("words", "rate", "note"),
    [
        ("2x5090 on PCIe 5 x8", "2048/65", "slots count as PCIe 5.0 x8, as line 1 says"),
        ("two RTX 5090, PCIe Gen 4", "2048/65", "slots count as PCIe 4.0, as line 1 says"),
        ("RTX 5090\n| PCIe | Gen **4** / **8x** |", "1024/65", "PCIe 4.0 x8, as line 2"),
        ("RTX 5090\nLnkSta: Speed 16GT/s (ok), Width x16 (ok)", "2048/65", "PCIe 4.0 x16, as line 2"),
        ("RTX 5090: Gen5 x16, Host Max Gen3", "1024/65", "as line 1 says"),
        (
            "RTX 5090 in a Core i9-7900X",
            "1024/65",
            "PCIe 3.0, which is what its processor has (Core i9-7900X)",
        ),
        ("RTX 5090 with an EPYC 7543", "2048/65", "which is what its processor has (EPYC 7543)"),
        ("RTX 5090, EPYC 9354", "4096/65", ""),
        ("RTX 5090\nPCIe 4.0 x4 NVMe SSD", "4096/65", ""),
        ("RTX 5090, PCIe 4.0 or PCIe 5.0", "4096/65", "names several generations of PCIe"),
        ("RTX 5060 Ti", "2048/65", ""),
        ("A100 PCIe 80GB", "2048/65", ""),
        ("g6e.12xlarge", "2048/65", ""),
        ("a box of 2x4090", "2048/65", ""),
        ("GPU 0: NVIDIA RTX 7090 (UUID: x)", "1024/65", "names NVIDIA RTX 7090, of which nothing is known"),
    ],
)
def test_words_about_slots_count(words: str, rate: str, note: str) -> None:
    machine = parse_nvidia_smi(f"{words}\n{PAIR}", "f")
    assert cables(machine.topology) == {(0, "cpu0"): rate, (1, "cpu0"): rate}
    assert note in " ".join(machine.notes)


def test_parts_that_share_no_link_are_joined_unless_that_is_unwanted() -> None:
    bridges = placed(
        4, lambda a, b: "NV4" if a // 2 == b // 2 else "SYS", [("0-9", "0")] * 2 + [("10-19", "1")] * 2
    )
    joined = parse_nvidia_smi(bridges, "f", gpu="a6000", between_sockets=Fraction(20))
    nvlinks = {(0, 1): "225/4", (2, 3): "225/4"}
    slots = {(gpu, f"cpu{gpu // 2}"): "2048/65" for gpu in range(4)}
    assert cables(joined.topology) == {**nvlinks, **slots, ("cpu0", "cpu1"): "20"}
    assert [note for note in joined.notes if "do not join all GPUs" in note and "--no-pcie" in note]
    apart = parse_nvidia_smi(bridges, "f", gpu="a6000", pcie=False)
    assert (cables(apart.topology), apart.notes) == (nvlinks, ())


def test_a_bridge_of_workstation_cards_may_lack_a_link() -> None:
    pair = placed(2, lambda _a, _b: "NV3", [("0-15", "0")] * 2)
    assert parse_nvidia_smi(pair, "f").gpus == ("v100", "v100")
    machine = parse_nvidia_smi("with an NVLink bridge\n" + pair, "f")
    assert machine.gpus == ("a6000", "a6000")
    assert cables(machine.topology) == {(0, 1): "675/16"}


def test_a_full_row_ends_with_its_line() -> None:
    text = "GPU0 GPU1\nGPU0 X NV4\nGPU1 NV4 X\n```\n\n- `PIX` = one switch\n- `PHB` = one host bridge\n"
    assert parse_nvidia_smi(text, "f").topology.ranks == 2
    with pytest.raises(TopologyError, match="GPU1 must have 2 entries, got 3"):
        parse_nvidia_smi(text.replace("NV4 X\n", "NV4 X PIX\n"), "f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("GPU0\tX\tNODE\tNODE\t0-19\nNIC0\tNODE\tX\tPIX\n", "the rows of GPU0 without the header that names"),
        ("GPU0\tX\tNV4\nGPU1\tNV4\tX\n", "the rows of GPU0, GPU1 without the header"),
        (
            placed(1, lambda _a, _b: "X", [("0-19", "0")]),
            r"at least 2 GPUs, got 1; star:N,bandwidth=GB/s",
        ),
        ("GPU0 NIC0 NIC1 CPU Affinity\nGPU0 X NODE PIX 0-19\nNIC0 NODE X NODE\n", "at least 2 GPUs, got 1"),
    ],
)
def test_one_gpu_and_lost_headers_are_said(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        parse_nvidia_smi(text, "f")
