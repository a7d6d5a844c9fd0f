from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest

from arborcast import topologies
from arborcast.synth.baselines.nccl_model import NOT_RUN
from arborcast.synth.certificate import Bound, Cut
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.pictures import draw_sweep, draw_timeline, draw_topology, draw_trees
from arborcast.synth.pictures.placement import Point, place
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.simulation.simulator import sweep
from arborcast.synth.simulation.timing import Timing
from arborcast.synth.topology import Link, Switch, Topology
from arborcast.synth.verification.verifier import verify
from tests.support.drawn_in_network import BOTH, NVLS, TURNS, drawn, star
from tests.support.picture_words import words

BOUND = Bound(Fraction(1), Cut(frozenset({0}), Fraction(1)))


def schedule_of(kind: str, shares: list[str], transfers: list[Transfer], ranks: int = 4) -> Schedule:
    topology = Topology.build(
        "mesh-with-a-switch",
        ranks,
        [Link(a, b, Fraction(1), Fraction(1)) for a in range(ranks + 1) for b in range(ranks + 1) if a != b],
        ["sw"],
    )
    chunks = [Chunk(Fraction(share), 0) for share in shares]
    return Schedule.build(topology, Collective.on(topology, kind), Method("drawn"), BOUND, chunks, transfers)


def two_trees() -> Schedule:
    """Chunk 0 along 0-1-2 and 0-3 both ways, chunk 1 up a chain and down a star through the switch."""
    return schedule_of(
        "allreduce",
        ["1/3", "2/3"],
        [
            *[Transfer(0, 2, 1, 0, True), Transfer(0, 1, 0, 1, True), Transfer(0, 3, 0, 1, True)],
            *[Transfer(0, 0, 1, 2), Transfer(0, 0, 3, 2), Transfer(0, 1, 2, 3)],
            *[Transfer(1, 3, 2, 0, True), Transfer(1, 2, 1, 1, True), Transfer(1, 1, 0, 2, True)],
            *[Transfer(1, 0, rank, 3, via=(4,)) for rank in (1, 2, 3)],
        ],
    )


DRAWINGS: dict[str, Callable[[Path], None]] = {
    "topology": lambda path: draw_topology(topologies.load("dgx1"), path),
    "trees": lambda path: draw_trees(two_trees(), path),
    "sweep": lambda path: draw_sweep({"drawn": sweep(two_trees(), [1 << 16, 1 << 20])}, path, bound=BOUND),
    "timeline": lambda path: draw_timeline(two_trees(), 1 << 20, path, pieces=4),
}


def test_importing_brings_no_matplotlib() -> None:
    heavy = "'matplotlib' in sys.modules or 'numba' in sys.modules"
    code = f"import arborcast.synth.pictures, sys; sys.exit({heavy})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_old_picture_survives_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    path = tmp_path / "picture.svg"
    path.write_text("old")

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(KeyboardInterrupt):
        draw_topology(topologies.load("ring:3"), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_topology_shows_its_ranks_switches_and_rates(tmp_path: Path) -> None:
    draw_topology(topologies.load("dgx-a100:boxes=2"), tmp_path / "picture.svg")
    said = words(tmp_path / "picture.svg")
    assert "dgx-a100:boxes=2: 16 ranks, 4 switches, 64 directed links" in said
    assert {str(rank) for rank in range(16)} <= set(said)
    assert {"300 GB/s each way", "25 GB/s each way", "switch", "rank"} <= set(said)


@pytest.mark.parametrize(
    ("switch", "steps"),
    [
        (TURNS, ["0>3:0+ 1>3:0+ 2>3:0+", "3>0:0 3>1:0 3>2:0"]),
        (BOTH, ["1>3:0+ 2>3:0+", "3>0:0+", "0>3:0", "3>1:0 3>2:0"]),
        (NVLS, ["0>3:0+ 1>3:0+ 2>3:0+", "3>0:0", "0>3:0", "3>0:0 3>1:0 3>2:0"]),
    ],
)
def test_trees_through_switches_show_their_names(switch: Switch, steps: list[str], tmp_path: Path) -> None:
    """One tree in which each rank and the switch stand once; of a switch that loops back, too."""
    schedule = drawn(star(3, switch), Kind.ALLREDUCE, [Chunk(Fraction(1), 0)], steps)
    assert verify(schedule).correct
    draw_trees(schedule, tmp_path / "picture.svg")
    said = words(tmp_path / "picture.svg")
    assert sorted(word for word in said if word in {"0", "1", "2", "3", "hub"}) == ["0", "1", "2", "hub"]
    assert "The root is dark. Arrows both ways: reduce up, then copy down." in said


def test_a_topology_shows_which_switches_reduce_or_multicast(tmp_path: Path) -> None:
    plain, able = "switch", "switch that reduces or multicasts"
    for spec, legend in (
        ("torus:2x2", []),
        ("fat-tree:2x2", [plain]),
        ("fat-tree:2x2,in-network=reduce", [able]),
        ("dgx-a100:boxes=2,fabric=sharp", [able, plain]),
    ):
        draw_topology(topologies.load(spec), tmp_path / "picture.svg")
        assert [word for word in words(tmp_path / "picture.svg") if word in {plain, able}] == legend


def test_trees_show_weights_and_directions(tmp_path: Path) -> None:
    draw_trees(two_trees(), tmp_path / "picture.svg")
    said = words(tmp_path / "picture.svg")
    # The fullest link is 0->sw: 2/3 of the buffer pass it three times, so the rate is half of its 1 GB/s.
    assert "allreduce on mesh-with-a-switch: 2 trees, 0.5 GB/s" in said
    assert [text for text in said if "of the buffer" in text] == [
        "2/3 of the buffer, 0.333 GB/s",
        "1/3 of the buffer, 0.167 GB/s",
    ]
    (note,) = (text for text in said if text.startswith("The root"))
    for part in ("Orange arrows up", "Blue arrows down", "Arrows both ways", "through switches"):
        assert part in note


def test_only_so_many_trees_are_drawn_and_the_others_counted(tmp_path: Path) -> None:
    transfers = [Transfer(chunk, 0, rank, 0) for chunk in range(5) for rank in (1, 2, 3)]
    schedule = schedule_of("broadcast", ["1/5"] * 5, transfers)
    draw_trees(schedule, tmp_path / "picture.svg", max_panels=2)
    said = words(tmp_path / "picture.svg")
    assert any("5 trees" in text and "the 2 with the largest shares" in text for text in said)
    assert sum("of the buffer" in text for text in said) == 2


@pytest.mark.parametrize(
    ("transfers", "why"),
    [
        (
            [Transfer(0, 0, 1, 0), Transfer(0, 0, 2, 0), Transfer(0, 2, 1, 1)],
            "sends or receives it more than once",
        ),
        ([Transfer(0, 0, 1, 0), Transfer(0, 2, 3, 0)], "it has 2 roots"),
        ([Transfer(0, 0, 1, 0), Transfer(0, 2, 3, 0), Transfer(0, 3, 2, 0)], "go round in a circle"),
    ],
)
def test_what_is_no_tree_is_refused(transfers: list[Transfer], why: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"chunk 0: cannot be drawn as a tree, .*{why}"):
        draw_trees(schedule_of("broadcast", ["1"], transfers), tmp_path / "picture.svg")


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no transfers to draw"):
        draw_trees(schedule_of("broadcast", ["1"], []), tmp_path / "picture.svg")
    with pytest.raises(InputError, match="no timings to draw"):
        draw_sweep({"empty": []}, tmp_path / "picture.svg")


def test_a_sweep_names_its_methods_sizes_and_the_bound(tmp_path: Path) -> None:
    rows = {
        "trees": sweep(two_trees(), [1 << 16, 1 << 20]),
        "nccl-ring-model": [Timing(1 << 16, 0, 100.0, 0.6, 0.9), Timing(1 << 20, 0, 900.0, 1.1, 1.7)],
    }
    draw_sweep(rows, tmp_path / "picture.svg", bound=BOUND)
    said = set(words(tmp_path / "picture.svg"))
    assert {"trees", "nccl-ring-model", "bound", "64 KiB", "1 MiB", "Time (us)", "busbw (GB/s)"} <= said
    assert f"nccl: {NOT_RUN}" in said
    draw_sweep({"trees": rows["trees"]}, tmp_path / "alone.svg")
    assert not any("NCCL" in word for word in words(tmp_path / "alone.svg"))


def test_a_timeline_has_a_row_per_used_link(tmp_path: Path) -> None:
    draw_timeline(two_trees(), 1 << 20, tmp_path / "all.svg", pieces=2)
    said = words(tmp_path / "all.svg")
    rows = [text for text in said if "\N{RIGHTWARDS ARROW}" in text]
    assert rows == [
        f"{a} \N{RIGHTWARDS ARROW} {b}"
        for a, b in ["01", "03", ("0", "sw"), "10", "12", "21", "30", "32", *(("sw", b) for b in "123")]
    ]
    assert any("9 links carry nothing" in text for text in said)
    draw_timeline(two_trees(), 1 << 20, tmp_path / "some.svg", pieces=2, max_links=3)
    assert sum("\N{RIGHTWARDS ARROW}" in text for text in words(tmp_path / "some.svg")) == 3


@pytest.mark.parametrize(
    "spec",
    [
        *["dgx1", "dgx2", "dgx-a100:boxes=2", "dgx-a100:boxes=8", "mi250:boxes=2", "torus:4x4", "mesh:3x5"],
        *["ring:2", "hypercube:5", "full:40", "star:2", "fat-tree:2x4x8", "dragonfly:4x2x2"],
    ],
)
def test_no_two_vertices_come_close(spec: str) -> None:
    topology = topologies.load(spec)
    placement = place(topology)
    assert sorted(placement.points) == list(range(topology.size))
    nearest = min(math.dist(*pair) for pair in combinations(placement.points.values(), 2))
    assert nearest > 0.75  # a disc is about 0.5 wide


def test_switches_over_switches_stand_in_rows_over_what_hangs_below_them() -> None:
    topology = topologies.load("fat-tree:2x2x4")
    rows: dict[float, list[tuple[float, str]]] = {}
    for vertex, (x, y) in place(topology).points.items():
        rows.setdefault(round(y, 6), []).append((round(x, 6), str(topology.label(vertex))))
    drawn = [" ".join(name for _, name in sorted(rows[y])) for y in sorted(rows, reverse=True)]
    assert drawn == [
        "core",
        "pod0 pod1",
        "leaf0 leaf1 leaf2 leaf3",
        "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15",
    ]
    # 16 ranks 1 apart around 0: leaves over the middles of 4, pods over those of 8.
    across = {name: x for row in rows.values() for x, name in row}
    assert [across[f"leaf{index}"] for index in range(4)] == [-6, -2, 2, 6]
    assert [across["pod0"], across["core"], across["pod1"]] == [-4, 0, 4]


def two_spines() -> Topology:
    """Ranks 0 to 5 in turn under 3 leaves, each of them under both spines."""
    under = [
        *((rank, 6 + rank % 3) for rank in range(6)),
        *((6 + leaf, spine) for leaf in range(3) for spine in (9, 10)),
    ]
    links = [Link(*ends, Fraction(1)) for pair in under for ends in (pair, pair[::-1])]
    return Topology.build("clos", 6, links, ["leaf0", "leaf1", "leaf2", "spine0", "spine1"])


@pytest.mark.parametrize(
    "topology",
    [
        two_spines(),
        *map(topologies.load, ["fat-tree:2x2x4", "fat-tree:2x4x8", "fat-tree:3x40", "fat-tree:1x1x3"]),
    ],
    ids=lambda topology: topology.name,
)
def test_no_line_of_a_hierarchy_passes_behind_a_vertex(topology: Topology) -> None:
    points = place(topology).points
    nearest = min(
        distance_to_segment(points[vertex], points[link.src], points[link.dst])
        for link in topology.links
        for vertex in points
        if vertex not in {link.src, link.dst}
    )
    assert nearest > 0.35  # a disc reaches about 0.25, the corner of a square 0.35


def distance_to_segment(point: Point, start: Point, end: Point) -> float:
    (x, y), (from_x, from_y), (to_x, to_y) = point, start, end
    along_x, along_y = to_x - from_x, to_y - from_y
    part = ((x - from_x) * along_x + (y - from_y) * along_y) / (along_x**2 + along_y**2)
    part = min(1.0, max(0.0, part))
    return math.dist(point, (from_x + part * along_x, from_y + part * along_y))


def test_boxes_are_groups_around_what_joins_them() -> None:
    placement = place(topologies.load("dgx-a100:boxes=2"))
    groups = sorted(sorted(vertex for vertex in group if vertex < 16) for group in placement.groups)
    assert groups == [list(range(8)), list(range(8, 16))]


def test_grids_are_found_without_their_name() -> None:
    torus = topologies.load("torus:4x4")
    anonymous = Topology.build("anonymous", torus.ranks, torus.links)
    points = place(anonymous).points
    # Row 0 is ranks 0 to 3, column 0 is ranks 0, 4, 8, 12.
    assert len({round(points[rank][1], 6) for rank in range(4)}) == 1
    assert len({round(points[rank][0], 6) for rank in (0, 4, 8, 12)}) == 1
    assert place(torus).is_grid
    assert not place(topologies.load("full:16")).is_grid


def test_a_large_topology_is_drawn(tmp_path: Path) -> None:
    draw_topology(topologies.load("dgx-a100:boxes=16"), tmp_path / "picture.svg")
    assert "dgx-a100:boxes=16: 128 ranks" in " ".join(words(tmp_path / "picture.svg"))


def test_one_way_links_are_drawn_with_arrows(tmp_path: Path) -> None:
    links = [Link(0, 1, Fraction(2)), Link(1, 0, Fraction(1)), Link(1, 2, Fraction(1))]
    draw_topology(Topology.build("one-way", 3, links), tmp_path / "picture.svg")
    assert {"2 GB/s", "1 GB/s"} <= set(words(tmp_path / "picture.svg"))
