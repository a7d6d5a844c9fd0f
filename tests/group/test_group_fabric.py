"""Fragments of fabrics: whose links remain, in which order, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast.backends import Options
from arborcast.backends.schedules.group_fabric import fabric_for, without_links
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Topology
from arborcast.topologies import load
from tests.support.in_network import two_levels
from tests.support.strategies import topologies

DGX1 = load("dgx1")


def test_equal_sizes_need_no_ranks() -> None:
    fabric = fabric_for(Options(topology="dgx1"), range(8), 8)
    assert fabric.topology == DGX1
    assert not fabric.is_assumed
    assert str(fabric) == "dgx1: 8 ranks, 32 directed links, from dgx1"
    box = fabric_for(Options(topology="rtx4090:streams=1,gpus=2"), range(2), 2)
    assert str(box).endswith("; messages are not held back for its streams")


def test_switches_of_the_fabric_only_forward() -> None:
    """No process of the job adds or copies in one."""
    given = two_levels(2, 2)
    assert fabric_for(Options(topology=given), range(4), 4).topology == given.forwarding != given
    part = fabric_for(Options(topology=given), [2, 3], 4).topology
    assert [(switch.name, switch.reduces, switch.multicasts) for switch in part.switches] == [
        ("leaf1", False, False)
    ]


@pytest.mark.parametrize("ranks", [(6, 1, 4), (1, 4, 5, 6), (7, 3)])
def test_a_fragment_keeps_the_order_of_the_ranks(ranks: tuple[int, ...]) -> None:
    fabric = fabric_for(Options(topology="dgx1", ranks=ranks), range(len(ranks)), len(ranks))
    assert fabric.topology.name == f"dgx1[{','.join(map(str, ranks))}]"
    assert_is_fragment(fabric.topology, DGX1, ranks)


def assert_is_fragment(fragment: Topology, whole: Topology, ranks: tuple[int, ...]) -> None:
    assert fragment.ranks == len(ranks)
    for first, its_rank in enumerate(ranks):
        for second, other_rank in enumerate(ranks):
            found = fragment.bandwidth.get((first, second))
            assert found == whole.bandwidth.get((its_rank, other_rank))


@given(st.data())
def test_a_group_of_a_job_on_a_fragment(data: st.DataObject) -> None:
    ranks = data.draw(st.permutations(range(8)))[: data.draw(st.integers(2, 8))]
    group = data.draw(st.permutations(range(len(ranks))))[: data.draw(st.integers(1, len(ranks)))]
    fabric = fabric_for(Options(topology=DGX1, ranks=ranks), group, len(ranks))
    assert_is_fragment(fabric.topology, DGX1, tuple(ranks[rank] for rank in group))


def test_a_group_may_be_cut_in_two() -> None:
    # Ranks 0 and 5 of a DGX-1 have no link, and nobody else forwards for this group.
    assert fabric_for(Options(topology="dgx1"), (0, 5), 8).topology.links == ()


def test_the_scheduler_is_not_second_guessed() -> None:
    with pytest.raises(InputError, match=r"fabric dgx1: has 8 ranks and the job has 4; ARBORCAST_RANKS .*"):
        fabric_for(Options(topology="dgx1"), range(4), 4)
    with pytest.raises(InputError, match=r"fabric dgx1: must have a rank for each of the 9 .*, got 8"):
        fabric_for(Options(topology="dgx1"), range(9), 9)
    with pytest.raises(InputError, match=r"ranks: must name a rank of fabric dgx1 for each of the 4 .*got 3"):
        fabric_for(Options(topology="dgx1", ranks=(0, 1, 2)), range(4), 4)
    with pytest.raises(InputError, match=r"ranks: fabric dgx1 has ranks 0\.\.7, got 8"):
        fabric_for(Options(topology="dgx1", ranks=(0, 8)), range(2), 2)


def test_no_fabric_is_a_full_mesh_and_says_so() -> None:
    fabric = fabric_for(Options(), (5, 2, 7), 9)
    assert fabric.is_assumed
    assert set(fabric.topology.bandwidth) == {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)}
    assert set(fabric.topology.bandwidth.values()) == {1}
    assert set(fabric.topology.latency_us.values()) == {20}
    assert "assumed, since nobody described the fabric (ARBORCAST_TOPOLOGY)" in str(fabric)
    assert fabric_for(Options(), (3,), 9).topology.ranks == 1
    with pytest.raises(InputError, match=r"ranks: must be those of a fabric, and none is given .*\[1, 0\]"):
        fabric_for(Options(ranks=(1, 0)), range(2), 2)


def test_links_that_are_down() -> None:
    # Rank i of the job is rank 7 - i of the machine; links are named by the machine's numbers.
    options = Options(topology="dgx1", ranks=tuple(reversed(range(8))), without=((0, 3), (7, 4)))
    fabric = fabric_for(options, range(8), 8)
    gone = {(7, 4), (4, 7), (0, 3), (3, 0)}
    whole = DGX1.subset(options.ranks or ())
    assert set(whole.bandwidth) - set(fabric.topology.bandwidth) == gone
    assert str(fabric).endswith("from dgx1, without 0-3, 7-4")
    assert set(fabric_for(Options(without=((0, 1), (0, 4))), (1, 0, 2), 5).topology.bandwidth) == {
        (0, 2),
        (2, 0),
        (1, 2),
        (2, 1),
    }
    for options in (Options(topology="dgx1", without=((0, 5),)), Options(topology="dgx1", without=((0, 9),))):
        with pytest.raises(InputError, match=r"without 0-[59]: must be a link between two ranks of dgx1"):
            fabric_for(options, range(8), 8)
    with pytest.raises(InputError, match=r"without 0-9: ranks of the job are 0\.\.7"):
        fabric_for(Options(without=((0, 9),)), range(8), 8)
    with pytest.raises(InputError, match="without 0-4: must be a link between two ranks of star:4"):
        fabric_for(Options(topology="star:4", without=((0, 4),)), range(4), 4)


@given(topologies(max_ranks=5), st.data())
def test_without_links_keeps_all_others(topology: Topology, data: st.DataObject) -> None:
    joined = sorted(hop for hop in topology.bandwidth if max(hop) < topology.ranks)
    pairs = data.draw(st.lists(st.sampled_from(joined), max_size=3)) if joined else []
    left = without_links(topology, pairs)  # its symmetries are checked when it is made
    gone = {hop for pair in pairs for hop in (pair, pair[::-1])}
    direct = {hop: rate for hop, rate in left.bandwidth.items() if max(hop) < left.ranks}
    assert direct == {hop: topology.bandwidth[hop] for hop in joined if hop not in gone}
    assert left.name == topology.name
    if left.switches == topology.switches:  # one that leads nowhere goes
        assert left.bandwidth == {hop: rate for hop, rate in topology.bandwidth.items() if hop not in gone}


def test_symmetries_survive_where_they_can() -> None:
    mesh = load("hypercube:2")
    assert mesh.symmetries
    assert without_links(mesh, ()) is mesh
    survivors = without_links(mesh, [(0, 1), (2, 3)]).symmetries
    assert survivors and set(survivors) <= set(mesh.symmetries)


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "dgx1"  # a name of the catalog, which a path is not looked up in
    file.write_text("ranks: 2\nlinks: [{between: [0, 1], bandwidth: 3}]\n")
    assert fabric_for(Options(topology=file), range(2), 2).topology.bandwidth == {(0, 1): 3, (1, 0): 3}
    monkeypatch.chdir(tmp_path)
    assert fabric_for(Options(topology="./dgx1"), range(2), 2).source == "from ./dgx1"
    with pytest.raises(InputError, match=r"nowhere\.yaml: cannot be read"):
        fabric_for(Options(topology="nowhere.yaml"), range(2), 2)
    with pytest.raises(InputError, match="topology 'nothing': is neither in the catalog nor a file"):
        fabric_for(Options(topology="nothing"), range(2), 2)
