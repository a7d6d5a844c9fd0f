from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.errors import InputError, TopologyError
from arborcast.synth.topology import Topology
from arborcast.topologies import load
from arborcast.topologies.boxes import DGX1_NVLINKS
from arborcast.topologies.readers.nccl_xml import parse_nccl_xml
from arborcast.topologies.rates import Rates


def gpu(dev: int, nvlinks: Sequence[tuple[str, int, str]], sm: int = 70, rank: str | None = None) -> str:
    """A pci element with a GPU in it; NVLinks are (target, count, class)."""
    inner = "".join(f'<nvlink target="{t}" count="{c}" tclass="{k}"/>' for t, c, k in nvlinks)
    ranked = "" if rank is None else f' rank="{rank}"'
    return (
        f'<pci busid="{busid(dev)}" class="0x030200" link_speed="8.0 GT/s PCIe" link_width="16">'
        f'<gpu dev="{dev}" sm="{sm}"{ranked} gdr="1">{inner}</gpu></pci>'
    )


def busid(dev: int) -> str:
    return f"0000:{dev + 1:02x}:00.0"


def system(*cpus: Sequence[str]) -> str:
    """The XML of a host with these elements on its CPUs."""
    inner = "".join(
        f'<cpu numaid="{numa}" arch="x86_64" vendor="GenuineIntel">{"".join(elements)}</cpu>'
        for numa, elements in enumerate(cpus)
    )
    return f'<system version="1">{inner}</system>'


def bridge(speed: str, width: str, *elements: str) -> str:
    return (
        f'<pci busid="0000:f0:00.0" class="0x060400" link_speed="{speed}" link_width="{width}">'
        f"{''.join(elements)}</pci>"
    )


def dgx1(ranks: Sequence[str | None] = (None,) * 8) -> str:
    gpus = [
        gpu(
            dev,
            [(busid(other), count, "0x030200") for other, count in enumerate(row) if count],
            70,
            ranks[dev],
        )
        for dev, row in enumerate(DGX1_NVLINKS)
    ]
    return system(gpus[:4], gpus[4:])


def hgx(count: int = 8, sm: int = 90) -> str:
    """H100s on four NVSwitches, with 5, 5, 4 and 4 links to each."""
    nvlinks = [(f"0000:{port:02x}:00.0", links, "0x068000") for port, links in enumerate((5, 5, 4, 4), 0xA0)]
    nic = '<pci busid="0000:e0:00.0"><nic><net name="mlx5_0" dev="0" speed="400000" gdr="1"/></nic></pci>'
    return system([*(gpu(dev, nvlinks, sm, str(dev)) for dev in range(count)), nic])


def cables(topology: Topology) -> dict[tuple[int | str, int | str], str]:
    assert topology.is_symmetric
    return {
        (topology.label(link.src), topology.label(link.dst)): str(link.bandwidth)
        for link in topology.links
        if link.src < link.dst
    }


def test_dgx1_is_the_catalogs() -> None:
    topology = parse_nccl_xml(dgx1(), "f").topology
    assert (topology.links, topology.symmetries) == (load("dgx1").links, load("dgx1").symmetries)
    assert parse_nccl_xml(dgx1(), "f", rates=Rates.NCCL).topology.links == load("dgx1", rates="nccl").links


def test_nvswitches_are_one_switch_with_all_links() -> None:
    topology = parse_nccl_xml(hgx(), "f").topology
    assert topology.links == load("dgx-h100").links
    assert topology.symmetries == load("dgx-h100").symmetries
    assert parse_nccl_xml(hgx(), "f", rates=Rates.NCCL).topology.links == load("dgx-h100", rates="nccl").links


def test_ranks_count_before_devices() -> None:
    turned = [str((dev + 1) % 8) for dev in range(8)]
    topology = parse_nccl_xml(dgx1(turned), "f").topology
    # device 0 is rank 1, device 3 rank 4: two links
    assert topology.bandwidth[1, 4] == 50
    assert topology.bandwidth == load("dgx1", ranks=[7, 0, 1, 2, 3, 4, 5, 6]).bandwidth
    assert parse_nccl_xml(dgx1(["-1"] * 8), "f").topology.links == load("dgx1").links


def test_the_kind_of_file_is_recognised(tmp_path: Path) -> None:
    for name in ("topo.xml", "topo.txt", "topo"):
        (tmp_path / name).write_text("\n<?xml version='1.0' encoding='UTF-8'?>\n" + dgx1())
        assert load(str(tmp_path / name)).links == load("dgx1").links


def test_targets_that_are_not_there_are_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    pair = [gpu(0, [(busid(1), 1, ""), (busid(5), 2, "0x030200")]), gpu(1, [(busid(0), 1, "")])]
    with caplog.at_level(logging.WARNING):
        assert cables(parse_nccl_xml(system(pair), "f").topology) == {(0, 1): "25"}
    assert f"gpu 0 ({busid(0)}): its NVLinks to {busid(5)}" in caplog.text


def test_pcie_is_a_tree_of_what_is_shared() -> None:
    text = system(
        [bridge("16.0 GT/s PCIe", "8", gpu(0, []), gpu(1, [])), gpu(2, [])],
        # a chain of bridges passes on the narrowest of its links, and hidden widths count as 8 GT/s x 16
        [bridge("", "0", bridge("8 GT/s", "4", gpu(3, [])))],
    )
    with pytest.raises(TopologyError, match="shows no NVLinks; pcie=True"):
        parse_nccl_xml(text, "f").topology
    topology = parse_nccl_xml(text, "f", pcie=True, rates=Rates.NCCL).topology
    names = [switch.name for switch in topology.switches]
    by_ends = cables(topology)
    lower, upper = [name for name in names if name.startswith("cpu")], [n for n in names if n[0] == "p"]
    assert (len(lower), len(upper)) == (2, 1)
    of_gpu = {src: dst for src, dst in by_ends if isinstance(src, int)}
    assert of_gpu[0] == of_gpu[1] == upper[0]
    assert of_gpu[2] != of_gpu[3]
    assert {of_gpu[2], of_gpu[3]} == set(lower)
    rates = {ends: by_ends.get(ends) or by_ends[ends[::-1]] for ends in [*of_gpu.items(), tuple(lower)]}
    assert rates == {
        (0, upper[0]): "12",
        (1, upper[0]): "12",
        (2, of_gpu[2]): "12",
        (3, of_gpu[3]): "3",
        tuple(lower): "10",
    }
    climb = next(rate for ends, rate in by_ends.items() if set(ends) == {upper[0], of_gpu[2]})
    assert climb == "12"  # 16 GT/s x 8
    datasheet = parse_nccl_xml(text, "f", pcie=True).topology
    assert datasheet.bandwidth[0, 4 + names.index(upper[0])] == Fraction(16 * 128, 130)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, column 1: must be XML: no element found$"),
        ("<system>", "must be XML: no element found"),
        ("<a/>", "must be NCCL's XML, whose root is system, got 'a'"),
        ("<system/>", "must hold at least 2 gpus, got 0"),
        ("<system><gpu dev='0' sm='70'/></system>", "gpu 0: must stand in a pci element with a busid"),
        (system([gpu(0, []).replace(' sm="70"', "")]), "gpu at 0000:01:00.0: sm is missing"),
        (system([gpu(0, []).replace('dev="0"', 'dev="x"')]), "dev must be a whole number, got 'x'"),
        (system([gpu(0, [], sm=35)]), "sm 35: must be a compute capability with NVLinks known here"),
        (system([gpu(0, [], sm=89)]), "sm 89: must be a compute capability"),
        (system([gpu(0, []), gpu(0, [])]), "gpus of one host must differ in busid, got '0000:01:00.0' twice"),
        (
            system([gpu(0, [(busid(1), 2, "")]), gpu(1, [(busid(0), 1, "")])]),
            r"gpu 0 \(0000:01:00.0\): has 2 NVLinks to gpu 1 .*, must be alike back, got 1",
        ),
        (system([gpu(0, [(busid(1), 7, "")]), gpu(1, [])]), r"must have at most 6 NVLinks \(v100\), got 7"),
        (system([gpu(0, [(busid(1), 0, "")]), gpu(1, [])]), "nvlink count must be at least 1, got 0"),
        (system([gpu(0, [(busid(0), 1, "")]), gpu(1, [])]), r"gpu 0 \(.*\): nvlink must lead elsewhere, got"),
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
        parse_nccl_xml(text, "f").topology
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("speed", "width", "message"),
    [
        ("fast", "16", "link_speed must be such as 16.0 GT/s, got 'fast'"),
        ("8", "7", "link_width must be 1 to 32"),
    ],
)
def test_odd_pcie_links(speed: str, width: str, message: str) -> None:
    text = system([bridge(speed, width, gpu(0, []), gpu(1, []))])
    with pytest.raises(TopologyError, match=f"pci 0000:f0:00.0: {message}"):
        parse_nccl_xml(text, "f", pcie=True).topology


def test_deep_nesting_is_no_trouble() -> None:
    deep = "<pci busid='a'>" * 3000 + gpu(0, []) + "</pci>" * 3000
    topology = parse_nccl_xml(system([deep, gpu(1, [])]), "f", pcie=True, rates=Rates.NCCL).topology
    assert cables(topology) == {(0, "cpu0"): "12", (1, "cpu0"): "12"}


pieces = st.sampled_from(
    [
        *("<system>", "</system>", "<cpu>", "</cpu>", "<pci busid='a'>", "<pci busid='b'>", "</pci>", "<!--"),
        *(
            "<gpu dev='0' sm='70'>",
            "<gpu dev='1' sm='90' rank='0'>",
            "</gpu>",
            "<nvlink target='a' count='1'/>",
        ),
        *("<nvlink target='b' count='1' tclass='0x068000'/>", "&amp;", "&x;", "<![CDATA[", "<?xml?>", "\x01"),
    ]
)


@given(st.lists(pieces | st.text(max_size=3), max_size=20).map("".join), st.booleans())
@settings(max_examples=300)
def test_any_text_is_a_topology_or_one_line(text: str, pcie: bool) -> None:
    for whole in (text, f"<system>{text}</system>"):
        try:
            parse_nccl_xml(whole, "f", pcie=pcie).topology
        except InputError as error:
            assert len(str(error).splitlines()) == 1


@given(st.data(), st.booleans())
@settings(max_examples=200)
def test_mutilated_xml_is_a_topology_or_one_line(data: st.DataObject, pcie: bool) -> None:
    text = data.draw(st.sampled_from([dgx1(), hgx(2)]))
    words = ["".join(part) for _, part in itertools.groupby(text, key=lambda char: char in '"<>')]
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.integers(0, len(words) - 1))
        words[where] = data.draw(st.sampled_from(words) | st.sampled_from(["", "-1", "99999999999", "x"]))
    try:
        parse_nccl_xml("".join(words), "f", pcie=pcie).topology
    except InputError as error:
        assert len(str(error).splitlines()) == 1
