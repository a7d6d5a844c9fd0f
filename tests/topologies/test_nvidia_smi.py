from __future__ import annotations

import logging
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.errors import InputError, TopologyError
from arborcast.synth.topology import Topology
from arborcast.topologies import load
from arborcast.topologies.rates import Rates
from arborcast.topologies.readers.nvidia_smi import parse_nvidia_smi

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


def cables(topology: Topology) -> dict[tuple[int | str, int | str], str]:
    """GB/s by the names of the ends, the lower vertex first."""
    assert topology.is_symmetric
    return {
        (topology.label(link.src), topology.label(link.dst)): str(link.bandwidth)
        for link in topology.links
        if link.src < link.dst
    }


def test_dgx1_is_the_catalogs(caplog: pytest.LogCaptureFixture) -> None:
    topology = parse_nvidia_smi(DGX1, "f", gpu="V100").topology
    known = load("dgx1")
    assert (topology.ranks, topology.links, topology.symmetries) == (8, known.links, known.symmetries)
    assert not caplog.records
    by_nccl = parse_nvidia_smi(DGX1, "f", gpu="v100", rates=Rates.NCCL).topology
    assert by_nccl.links == load("dgx1", rates="nccl").links


def test_the_kind_of_file_is_recognised(tmp_path: Path) -> None:
    for name in ("topo.txt", "topo"):
        (tmp_path / name).write_text("$ nvidia-smi topo -m\n" + DGX1)
        assert load(str(tmp_path / name), gpu="v100").links == load("dgx1").links


def test_a_guessed_generation_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse_nvidia_smi(DGX1, "dgx.txt").topology.links == load("dgx1").links
        parse_nvidia_smi(PCIE_ONLY, "cards.txt", pcie=True).topology
    assert "dgx.txt: nvidia-smi does not say which GPUs these are; assuming v100 (25 GB/s" in caplog.text
    assert "cards.txt: nvidia-smi does not say which GPUs these are; assuming the PCIe of a" in caplog.text


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
    assert cables(parse_nvidia_smi(bridges, "f").topology) == {(0, 1): "300", (2, 3): "300"}
    halves = matrix(lambda a, b: "NV12" if a // 4 == b // 4 else "SYS", 8)
    topology = parse_nvidia_smi(halves, "f", gpu="a100").topology
    assert [switch.name for switch in topology.switches] == ["nvswitch0", "nvswitch1"]
    assert topology.bandwidth[5, 9] == 300


def test_p100_box() -> None:
    text = DGX1.replace("NV2", "NV1")
    assert parse_nvidia_smi(text, "f").topology.links == load("dgx1-p100").links


def test_pcie_paths_are_a_tree_when_asked() -> None:
    with pytest.raises(TopologyError, match=r"f: shows no NVLinks; pcie=True \(--pcie\)"):
        parse_nvidia_smi(PCIE_ONLY, "f", gpu="v100").topology
    topology = parse_nvidia_smi(PCIE_ONLY, "f", gpu="v100", pcie=True, rates=Rates.NCCL).topology
    assert cables(topology) == {
        (0, "pcie0"): "12",
        (1, "pcie0"): "12",
        (2, "hostbridge0"): "12",
        (3, "hostbridge0"): "12",
        ("pcie0", "host0"): "10",
        ("hostbridge0", "host0"): "10",
    }


def test_nics_tell_which_gpus_are_near_each_other() -> None:
    topology = parse_nvidia_smi(DGX1, "f", gpu="v100", pcie=True).topology
    tree = {ends: rate for ends, rate in cables(topology).items() if isinstance(ends[1], str)}
    # 8 GT/s x 16 lanes / 8 bits, less 128b/130b
    slot = str(Fraction(16 * 128, 130))
    assert tree == {
        (0, "pcie0"): slot,
        (1, "pcie0"): slot,
        (2, "hostbridge0"): slot,
        (3, "hostbridge0"): slot,
        ("pcie0", "hostbridge0"): slot,
        ("hostbridge0", "host0"): "10",
        # their NVLinks hide how near 4 to 7 are, so they count as far apart
        **{(gpu, "host0"): "10" for gpu in range(4, 8)},
    }
    assert {ends: rate for ends, rate in cables(topology).items() if ends not in tree} == cables(load("dgx1"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("NV1\tPHB\t0-19\t0\nGPU4", "NV1\nGPU4", "line 6: GPU3 must have 9 entries, got 8"),
        ("GPU7\tSYS", "GPU9\tSYS", "row GPU7 is missing"),
        ("GPU7\tSYS", "GPU6\tSYS", "line 10: GPU6 must have one row, got another"),
        ("GPU1\tNV1", "GPU1\tNV2", "GPU0 to GPU1 shows NV1, must be alike back, got NV2"),
        ("GPU1\tNV1", "GPU1\tNVX", "line 4: GPU1 to GPU0: must be NV# or one of PIX, .* got 'NVX'"),
        ("GPU0\t X ", "GPU0\tSYS", "line 3: GPU0 to GPU0: must be X, got 'SYS'"),
        ("GPU0\tGPU1\tGPU2", "GPU0\tGPU1\tGPU1", "columns must have different names"),
        ("GPU", "DEV", "must hold the matrix of nvidia-smi topo -m"),
        ("NV1", "NV9", "these NVLinks fit neither direct links .22 at one GPU; v100 has 6. nor an NVSwitch"),
    ],
)
def test_broken_matrices(old: str, new: str, message: str) -> None:
    text = DGX1.replace(old, new) if old in ("GPU", "NV1") else DGX1.replace(old, new, 1)
    with pytest.raises(TopologyError, match=f"^f: .*{message}") as caught:
        parse_nvidia_smi(text, "f", gpu="v100").topology
    assert "\n" not in str(caught.value)


def test_counts_that_no_gpu_has() -> None:
    text = matrix(lambda _a, _b: "NV12", 8)
    with pytest.raises(TopologyError, match="shows NV12, must be at most NV6 for v100"):
        parse_nvidia_smi(text, "f", gpu="v100").topology
    with pytest.raises(TopologyError, match="gpu 'gtx': must be one of a10, a100, a100-pcie, a30"):
        parse_nvidia_smi(text, "f", gpu="gtx").topology
    with pytest.raises(TopologyError, match="a GPU with 99 NVLinks, must be at most 18"):
        parse_nvidia_smi(matrix(lambda _a, _b: "NV99", 3), "f").topology


tokens = st.sampled_from(
    [
        *("GPU0", "GPU1", "GPU2", "mlx5_0", "X", "NV1", "NV2", "NV18", "NV999", "PIX", "SYS", "SOC", "PHB"),
        *("CPU", "\t", "\n", "\x1b[4m", "\x1b[", "NV", "N/A", "0-63"),
    ]
)


@given(st.lists(tokens, max_size=40).map(" ".join), st.booleans(), st.sampled_from([None, "v100", "h100"]))
@settings(max_examples=300)
def test_any_text_is_a_topology_or_one_line(text: str, pcie: bool, gpu: str | None) -> None:
    try:
        parse_nvidia_smi(text, "f", pcie=pcie, gpu=gpu).topology
    except InputError as error:
        assert len(str(error).splitlines()) == 1


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
    if pcie and count > 1:  # the host joins all
        reached, todo = {0}, [0]
        while todo:
            here = todo.pop()
            new = {dst for src, dst in topology.bandwidth if src == here} - reached
            reached |= new
            todo += new
        assert reached == set(range(topology.size))


def test_the_way_between_sockets_may_be_stated() -> None:
    text = matrix(lambda one, other: "NODE" if one // 2 == other // 2 else "SYS", 4)
    for stated, expected in ((None, "10"), (Fraction(22), "22"), (Fraction(99), "4096/65")):
        topology = parse_nvidia_smi(text, "f", gpu="h100", pcie=True, between_sockets=stated).topology
        host = next(index for index in range(4, topology.size) if topology.label(index) == "host0")
        assert {str(link.bandwidth) for link in topology.links if link.dst == host} == {expected}
