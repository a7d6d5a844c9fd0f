from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.errors import InputError, TopologyError
from arborcast.topologies import Rates, load_machine
from arborcast.topologies.readers.kinds import kind_of
from arborcast.topologies.readers.rocm_smi import parse_rocm_smi
from tests.support.refusals import refuses
from tests.support.tool_texts import cables, damaged

Cell = Callable[[int, int], object]
"""What a table says of an ordered pair of GPUs."""

TITLES = {"weight": "Weight", "hops": "Hops", "kind": "Link Type"}


def rocm_smi(count: int, numa: list[int] | None = None, **tables: Cell) -> str:
    """What `rocm-smi --showtopo` prints, and `--shownodesbw` where bandwidths are given."""
    lines = ["============================ ROCm System Management Interface ============================"]
    for name, cell in tables.items():
        title = f"{TITLES[name]} between two GPUs" if name in TITLES else "Bandwidth"
        lines.append(f" {title} ".center(90, "="))
        own = "N/A" if name == "bandwidth" else "0"
        lines += _grid([f"GPU{gpu}" for gpu in range(count)], own, cell)
        lines.append("")
    lines.append("======================================= Numa Nodes =======================================")
    lines += [f"GPU[{gpu}]\t\t: (Topology) Numa Node: {node}" for gpu, node in enumerate(numa or [])]
    return "\n".join([*lines, "End of ROCm SMI Log".center(90, "=")])


def amd_smi(addresses: list[str], **tables: Cell) -> str:
    """What `amd-smi topology` prints."""
    titles = {"kind": "LINK TYPE", "bandwidth": "NUMA BW"}
    own = {"access": "ENABLED", "kind": "SELF", "bandwidth": "N/A"}
    lines = []
    for name, cell in tables.items():
        lines += [f"{titles.get(name, name.upper())} TABLE:", *_grid(addresses, own.get(name, "0"), cell)]
    return "\n".join([*lines, "", "Legend:", "  SELF = Current GPU"])


def _grid(names: list[str], own: str, cell: Cell) -> list[str]:
    numbers = range(len(names))
    rows = [[own if row == column else str(cell(row, column)) for column in numbers] for row in numbers]
    grid = [["", *names], *([name, *row] for name, row in zip(names, rows, strict=True))]
    return ["".join(word.ljust(13) for word in row) for row in grid]


def mesh(count: int) -> str:
    return rocm_smi(count, weight=lambda _a, _b: 15, hops=lambda _a, _b: 1, kind=lambda _a, _b: "XGMI")


ADDRESSES = [f"0000:{bus:02x}:00.0" for bus in (0x0C, 0x22, 0x38, 0x5C, 0x9F, 0xAF, 0xBF, 0xDF)]

# Links per pair of dies of a host with four MI250X, as ROCm's release notes show their bandwidths.
DIES = {
    **dict.fromkeys([(0, 1), (2, 3), (4, 5), (6, 7)], 4),
    **dict.fromkeys([(0, 6), (2, 4)], 2),
    **dict.fromkeys([(0, 2), (1, 3), (1, 5), (3, 7), (4, 6), (5, 7)], 1),
}


def die_links(one: int, other: int) -> int:
    return DIES.get((min(one, other), max(one, other)), 0)


def die_bandwidths(one: int, other: int) -> str:
    count = die_links(one, other)
    return f"50000-{50000 * count}" if count else "0-0"


def mi250x(**more: Cell) -> str:
    return rocm_smi(
        8,
        weight=lambda a, b: 15 if die_links(a, b) else 30,
        hops=lambda _a, _b: 1,
        kind=lambda _a, _b: "XGMI",
        **more,
    )


def test_a_mesh_of_mi300x() -> None:
    amd = amd_smi(
        ADDRESSES, access=lambda _a, _b: "ENABLED", weight=lambda _a, _b: 15, kind=lambda _a, _b: "XGMI"
    )
    for text, devices in ((mesh(8), tuple(f"GPU{gpu}" for gpu in range(8))), (amd, tuple(ADDRESSES))):
        machine = parse_rocm_smi(text, "f", gpu="MI300X")
        assert cables(machine.topology) == dict.fromkeys(combinations(range(8), 2), "64")
        assert (machine.gpu, machine.devices, machine.notes) == ("mi300x", devices, ())
    for gpu, rates, expected in (("mi355x", Rates.DATASHEET, Fraction("76.8")), ("mi300x", Rates.NCCL, 48)):
        topology = parse_rocm_smi(mesh(4), "f", gpu=gpu, rates=rates).topology
        assert {link.bandwidth for link in topology.links} == {expected}


@pytest.mark.parametrize(
    ("text", "place", "gpu", "why"),
    [
        (mesh(8), "f", "mi300x", r"its mesh \(the same as mi355x at 76.8\)"),
        (mesh(4), "f", "mi300x", r"its mesh \(the same as .*mi210 at 50"),
        (mesh(4), "dir/mi355x_node.txt", "mi355x", "the name of the file"),
        ("MARKET_NAME: AMD Instinct MI325X\n" + mesh(8), "f", "mi325x", "the name in line 1"),
        ("GFX Version: gfx90a\n" + mesh(4), "f", "mi210", "gfx90a"),
        ("GPU[0]\t\t: Card Series: \t\tAMD Instinct MI210\n" + mesh(4), "f", "mi210", None),
        (
            rocm_smi(8, kind=lambda a, b: "XGMI" if a // 4 == b // 4 else "PCIE"),
            "f",
            "mi210",
            r"its meshes \(the same as ",
        ),
    ],
)
def test_what_the_gpus_are(text: str, place: str, gpu: str, why: str | None) -> None:
    machine = parse_rocm_smi(text, place, pcie=False)
    assert machine.gpu == gpu
    assert len(machine.notes) == (why is not None)
    if why is not None:
        with pytest.raises(AssertionError, match=f"does not say which GPUs these are: {gpu} .*from {why}"):
            raise AssertionError(machine.notes[0])


def test_bandwidths_say_how_many_links_join_a_pair() -> None:
    expected = {pair: str(50 * count) for pair, count in sorted(DIES.items())}
    for text in (
        mi250x(bandwidth=die_bandwidths),
        rocm_smi(8, bandwidth=die_bandwidths),  # --shownodesbw alone
        amd_smi(ADDRESSES, hops=lambda _a, _b: 1, bandwidth=die_bandwidths),
    ):
        machine = parse_rocm_smi(text, "f")
        assert cables(machine.topology) == expected
        assert (machine.gpu, machine.notes) == (
            None,
            ("xGMI rates are those of its bandwidth table, 50 GB/s a link; --gpu says otherwise",),
        )
        stated = parse_rocm_smi(text, "f", gpu="mi250x", rates=Rates.NCCL)
        assert cables(stated.topology) == {pair: str(36 * count) for pair, count in sorted(DIES.items())}
        assert stated.notes == ()


def test_a_known_board_counts_links_whatever_its_dies_are_called() -> None:
    expected = {pair: str(50 * count) for pair, count in sorted(DIES.items())}
    for gpu in (None, "mi250", "mi250x"):
        assert cables(parse_rocm_smi(mi250x(), "f", gpu=gpu).topology) == expected
    assert (
        "mi250x (50 GB/s each way per xGMI link) assumed, from the pairs"
        in parse_rocm_smi(mi250x(), "f").notes[0]
    )


def test_links_that_nothing_counts_are_refused() -> None:
    ring = rocm_smi(4, kind=lambda _a, _b: "XGMI", weight=lambda a, b: 15 if (a + b) % 2 else 30)
    with pytest.raises(TopologyError, match=r"^f: GPU0 to GPU2 goes over other .* only the bandwidth table"):
        parse_rocm_smi(ring, "f")
    with pytest.raises(TopologyError, match=r"^f: GPU0 to GPU1: mi250 has 8 links, and how many"):
        parse_rocm_smi(ring, "f", gpu="mi250")
    # a table that the driver did not fill in
    with pytest.raises(TopologyError, match="GPU0 to GPU1: mi300a has 8 links"):
        parse_rocm_smi(
            rocm_smi(2, kind=lambda _a, _b: "XGMI", bandwidth=lambda _a, _b: "0-0"), "f", gpu="mi300a"
        )
    with pytest.raises(
        TopologyError, match="f: gpu h100: must be AMD's, whose tool printed this, got NVIDIA's"
    ):
        parse_rocm_smi(mesh(4), "f", gpu="h100")
    with pytest.raises(TopologyError, match=r"GPU0: must have at most 7 xGMI links \(mi300x\), got 8"):
        parse_rocm_smi(rocm_smi(2, bandwidth=lambda _a, _b: "50000-400000"), "f", gpu="mi300x")


@pytest.mark.parametrize("gpu", [None, "mi250x"])
@pytest.mark.parametrize("word", ["0-50000", "50000-0"])
def test_a_bandwidth_table_of_one_figure_is_refused(word: str, gpu: str | None) -> None:
    with pytest.raises(TopologyError, match=f"GPU0 to GPU1: bandwidths must be those of .*, got {word}"):
        parse_rocm_smi(rocm_smi(2, bandwidth=lambda _a, _b: word), "f", gpu=gpu)


def test_pcie_alone_is_a_tree_by_hops() -> None:
    text = rocm_smi(4, hops=lambda a, b: 2 if a // 2 == b // 2 else 3, kind=lambda _a, _b: "PCIE")
    machine = parse_rocm_smi(text, "f", between_sockets=Fraction(16))
    slot = str(Fraction(16 * 128, 130))
    assert cables(machine.topology) == {
        **{(gpu, f"cpu{gpu // 2}"): slot for gpu in range(4)},
        ("cpu0", "cpu1"): "16",
    }
    assert [note.partition(":")[0] for note in machine.notes] == [
        "shows no xGMI links",
        "does not say which GPUs these are",
    ]
    # xGMI hides the way over PCIe; NUMA nodes tell it
    hidden = rocm_smi(4, numa=[0, 0, 1, 1], kind=lambda _a, _b: "XGMI")
    topology = parse_rocm_smi(hidden, "f", gpu="mi210", pcie=True).topology
    assert {ends for ends in cables(topology) if "cpu" in str(ends)} == {
        *((gpu, f"cpu{gpu // 2}") for gpu in range(4)),
        ("cpu0", "cpu1"),
    }


def test_json_and_csv_say_the_same(tmp_path: Path) -> None:
    """Each as its tool writes it, recognised by content."""
    expected = parse_rocm_smi(mi250x(bandwidth=die_bandwidths), "f").topology.links
    links = [
        [
            {
                "gpu": other,
                "bdf": ADDRESSES[other],
                "weight": 0 if one == other else 15 if die_links(one, other) else 30,
                "link_status": "ENABLED",
                "link_type": "SELF" if one == other else "XGMI",
                "num_hops": int(one != other),
                "bandwidth": "N/A" if one == other else die_bandwidths(one, other),
            }
            for other in range(8)
        ]
        for one in range(8)
    ]
    listed = json.dumps([{"gpu": gpu, "bdf": ADDRESSES[gpu], "links": links[gpu]} for gpu in range(8)])
    keys = {
        "link_accessibility": "link_status",
        "weight": "weight",
        "hops": "num_hops",
        "link_type": "link_type",
    }
    keys["numa_bandwidth"] = "bandwidth"
    header = ["gpu", "bdf", *(f"{key}_gpu_{other}" for key in keys for other in range(8))]
    rows = [
        [
            str(one),
            ADDRESSES[one],
            *(str(links[one][other][key]) for key in keys.values() for other in range(8)),
        ]
        for one in range(8)
    ]
    table = "\n".join(",".join(row) for row in [header, *rows])
    for name, text in (("a.json", listed), ("a.txt", listed), ("b.txt", table), ("b.csv", table)):
        (tmp_path / name).write_text(text)
        machine = load_machine(str(tmp_path / name))
        assert machine.topology.links == expected
        assert machine.devices == tuple(ADDRESSES)
    pairs = {}
    for one, other in combinations(range(4), 2):
        between = f"between DRM devices {one} and {other}"
        pairs[f"(Topology) Weight {between}"] = "15"
        pairs[f"(Topology) Hops {between}"] = "1"
        pairs[f"(Topology) Link type {between}"] = "XGMI"
    cards = {f"card{gpu}": {"(Topology) Numa Node": "0", "(Topology) Numa Affinity": "0"} for gpu in range(4)}
    (tmp_path / "c.json").write_text(json.dumps({**cards, "system": pairs}))
    assert load_machine(str(tmp_path / "c.json"), gpu="mi300x").topology.links == (
        parse_rocm_smi(mesh(4), "f", gpu="mi300x").topology.links
    )


@refuses("old", "new", "message")
def test_broken_tables(old: str, new: str, message: str) -> None:
    hurt = mesh(3).replace(old, new)
    assert hurt != mesh(3)
    with pytest.raises(TopologyError, match=f"^f: .*{message}") as caught:
        parse_rocm_smi(hurt, "f", gpu="mi300x")
    assert "\n" not in str(caught.value)


@refuses("text", "message")
def test_broken_documents(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=f"^f: {message}") as caught:
        parse_rocm_smi(text, "f")
    assert "\n" not in str(caught.value)


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, str]:
    """A machine and what its GPUs are: a mesh of MI300X, or MI250X with any links."""
    count = draw(st.integers(2, 6))
    if draw(st.booleans()):
        return mesh(count), "mi300x"
    links = {pair: draw(st.integers(0, 1)) for pair in combinations(range(count), 2)}
    links[0, 1] = 2

    def bandwidth(one: int, other: int) -> str:
        own = links[min(one, other), max(one, other)]
        return f"50000-{50000 * own}" if own else "0-0"

    if draw(st.booleans()):
        return rocm_smi(count, kind=lambda _a, _b: "XGMI", bandwidth=bandwidth), "mi250x"
    return amd_smi(ADDRESSES[:count], kind=lambda _a, _b: "XGMI", bandwidth=bandwidth), "mi250x"


@given(st.data(), texts())
@settings(max_examples=200)
def test_damage_changes_nothing_or_is_refused(data: st.DataObject, drawn: tuple[str, str]) -> None:
    text, gpu = drawn
    whole = parse_rocm_smi(text, "f", gpu=gpu).topology
    try:
        read = parse_rocm_smi(data.draw(damaged(text)), "f", gpu=gpu).topology
    except InputError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert read.links == whole.links


def test_counts_of_a_known_board_stand_in_for_those_that_are_not_shown() -> None:
    machine = parse_rocm_smi(mi250x(), "f", gpu="mi250x")
    assert cables(machine.topology) == {pair: str(50 * count) for pair, count in sorted(DIES.items())}
    machine = parse_rocm_smi("AMD Instinct MI300A\n" + mesh(4), "f")
    assert cables(machine.topology) == dict.fromkeys(combinations(range(4), 2), "128")


def test_a_bandwidth_table_against_the_data_sheet_is_said_with_both_numbers() -> None:
    text = rocm_smi(8, kind=lambda _a, _b: "XGMI", bandwidth=lambda _a, _b: "50000-50000")
    unnamed = parse_rocm_smi(text, "f")
    assert set(cables(unnamed.topology).values()) == {"50"}
    machine = parse_rocm_smi("AMD Instinct MI325X\n" + text, "f")
    assert set(cables(machine.topology).values()) == {"64"}
    assert any("says 50 GB/s a link, where mi325x has 64: the latter counts" in n for n in machine.notes)


def test_tables_of_markdown_are_read() -> None:
    def table(title: str, cell: str) -> str:
        names = [f"GPU{gpu}" for gpu in range(3)]
        rows = [
            f"| **{one}** | " + " | ".join("0" if one == x else cell for x in names) + " |" for one in names
        ]
        return "\n".join(
            [f"**{title}**", "", "| | " + " | ".join(names) + " |", "|:--|:-:|:-:|:-:|", *rows, ""]
        )

    text = (
        "Two or three MI300X\n"
        + table("Weight Between Two GPUs", "15")
        + table("Link Type Between Two GPUs", "XGMI")
    )
    assert kind_of("", text) == "rocm-smi"
    assert set(cables(parse_rocm_smi(text, "f").topology).values()) == {"64"}
