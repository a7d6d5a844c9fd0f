"""Groups on fabrics of cables: whom ranks connect with, by which addresses, and that all calls work."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from arborcast.backends import Options
from arborcast.backends.schedules.group_fabric import fabric_for
from arborcast.bench.emulation.machine import why_not
from arborcast.bench.emulation.network import emulate
from arborcast.bench.emulation.plan import plan_emulation
from arborcast.bench.emulation.processes import run_inside
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Topology
from arborcast.synth.viewer import scene_of_traces
from arborcast.topologies import load
from arborcast.topologies.files import load_file
from tests.support.cabled import (
    FABRICS,
    UNEQUAL,
    all_collectives,
    by_gloo,
    cut,
    expected_ends,
    goes_on_training,
    in_own_namespace,
    loses_a_cable,
    numbers,
    on_loopback,
    over_several_cables,
    pipelined,
    refusals,
    trained,
)
from tests.support.chrome_trace import events_of
from tests.support.ranks import run_ranks, store_path

WHY_NOT = why_not()
needs_root = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    """The file of a ring of four."""
    file = tmp_path / "ring.yaml"
    file.write_text(on_loopback("ring of 4"), encoding="utf-8")
    return file


def on_a_ring(rank: int, size: int) -> tuple[Any, list[str]]:
    return all_collectives(rank, size), refusals(rank, size)


def test_ranks_connect_along_cables_alone(ring: Path) -> None:
    """Also where other ways would be there, as on one host; what cannot be is said, and the group goes on."""
    environ = {"ARBORCAST_TOPOLOGY": str(ring), "ARBORCAST_START": "at once"}
    got = run_ranks(4, on_a_ring, backend="synth", environ=environ)
    assert [ends for ends, _ in got] == expected_ends(load_file(ring).topology)
    for rank, (_, said) in enumerate(got):
        send, apart, avoided = said
        assert send.endswith(f"joins with rank {rank}, as links have addresses, got rank {(rank + 2) % 4}")
        assert "rank 1 of the group must be joined with rank 0 along links" in apart, rank
        assert "rank 1 of the group must be joined with rank 0 along links" in avoided


FURTHER = [f", cable {number}" for number in (2, 3, 4)]


def all_collectives_and_a_trace(rank: int, size: int, folder: str) -> Any:
    group: Any = dist.group.WORLD
    found = all_collectives(rank, size, 3001)
    with group.trace(f"{folder}/{rank}.json"):
        dist.all_reduce(numbers(rank, 8000))
    return found


def test_several_cables_are_lanes_and_messages_are_split_over_them(tmp_path: Path) -> None:
    file = tmp_path / "pair.yaml"
    file.write_text(on_loopback("pair by 4 cables"), encoding="utf-8")
    environ = {"ARBORCAST_TOPOLOGY": str(file), "ARBORCAST_START": "at once"}
    got = run_ranks(2, all_collectives_and_a_trace, str(tmp_path), backend="synth", environ=environ)
    assert got == expected_ends(load_file(file).topology)
    for rank in range(2):
        events = events_of(tmp_path / f"{rank}.json")
        names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        sent: Counter[str] = Counter()
        for event in events:
            if event["ph"] == "X":
                sent[names[event["tid"]]] += event["args"]["bytes"]
        # Of two ranks each sends 4,000 of 8,000 floats as a sum's part, and 4,000 as the sum.
        for way in ("to", "from"):
            lines = [f"{way} rank {1 - rank}{further}" for further in ("", *FURTHER)]
            found = np.array([sent[it] for it in lines]) / 32000
            np.testing.assert_allclose(found, np.array([50, 25, 10, 10]) / 95, atol=0.001)
    shown = scene_of_traces([tmp_path / f"{rank}.json" for rank in range(2)])
    assert {(link["src"], link["dst"]) for link in shown["links"]} == {(0, 1), (1, 0)}


def test_lanes_are_in_the_order_of_rates_and_share_messages_by_them(tmp_path: Path) -> None:
    file = tmp_path / "pair.yaml"
    file.write_text(on_loopback("pair by 4 cables"), encoding="utf-8")
    fabric = fabric_for(Options(topology=file), range(2), 2)
    assert fabric.topology.bandwidth == dict.fromkeys([(0, 1), (1, 0)], 95)
    first, second = (fabric.cabling(rank) for rank in range(2))
    assert first is not None and second is not None
    assert first.ends == {
        1 + 2 * lane: (f"127.1.{cable}.1", f"127.1.{cable}.2") for lane, cable in enumerate((3, 2, 0, 1))
    }
    assert second.ends == {lane - 1: ends[::-1] for lane, ends in first.ends.items() if ends}
    assert (first.lanes.out, second.lanes.into) == ({1: [50, 25, 10, 10]}, {0: [50, 25, 10, 10]})
    lost = fabric_for(Options(topology=file), range(2), 2, lost=[("127.1.3.2", "127.1.3.1")])
    assert lost.topology.bandwidth[0, 1] == 45
    left = lost.cabling(1)
    assert left is not None and list(left.ends.values()) == [
        (f"127.1.{cable}.2", f"127.1.{cable}.1") for cable in (2, 0, 1)
    ]


def wrong_address(rank: int, size: int) -> str:
    import arborcast.torch_backend  # noqa: F401

    try:
        store = dist.FileStore(str(store_path()), size)
        dist.init_process_group(
            "synth", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20)
        )
    except Exception as error:
        return str(error)
    return ""


def test_an_address_that_is_not_of_this_host_is_named(ring: Path) -> None:
    ring.write_text(ring.read_text().replace("127.1.0.1", "192.0.2.1"), encoding="utf-8")
    environ = {"ARBORCAST_TOPOLOGY": str(ring)}
    said = run_ranks(4, wrong_address, backend=None, environ=environ)
    assert all("address 192.0.2.1, of the link with rank 1, must be of this host" in it for it in said)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"gloo_below": 1}, "p2p and gloo_below: must be left out"), ({"p2p": "cpu"}, "got cpu and None")],
)
def test_what_connects_otherwise_is_refused(ring: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fabric_for(Options(topology=ring, **change), range(4), 4)


def test_parts_of_a_ring_and_their_trees(ring: Path) -> None:
    options = Options(topology=ring)
    whole = fabric_for(options, range(4), 4)
    assert whole.topology.links == load("ring:4").links  # plans are those of any ring
    assert [sorted(whole.cabling(rank).beside) for rank in range(4)] == [[1, 3], [0, 2], [1], [0]]  # type: ignore[union-attr]
    part = fabric_for(options, [3, 0, 1], 4)
    assert part.apart == ((0, 2), (2, 0))
    cabling = part.cabling(2)
    assert cabling is not None and cabling.ends == {1: ("127.1.0.2", "127.1.0.1")}
    assert fabric_for(options, [2], 4).cabling(0).ends == {}  # type: ignore[union-attr]
    with pytest.raises(InputError, match="rank 1 of the group must be joined with rank 0"):
        fabric_for(options, [1, 3], 4).cabling(0)
    assert fabric_for(Options(topology="ring:4"), [1, 3], 4).cabling(0) is None


def test_one_cable_has_one_pair_of_addresses(ring: Path) -> None:
    ring.write_text(
        "ranks: 2\nlinks:\n  - {from: 0, to: 1, bandwidth: 1, addresses: [127.1.0.1, 127.1.0.2]}\n"
        "  - {from: 1, to: 0, bandwidth: 1, addresses: [127.1.0.4, 127.1.0.3]}\n"
    )
    with pytest.raises(InputError, match="both directions of 0-1 must have the same addresses"):
        fabric_for(Options(topology=ring), range(2), 2)


long = pytest.mark.long


def without_2_3(topology: Topology) -> list[dict[int, tuple[str, str]]]:
    """The ends of a ring of four from which one cable is gone."""
    whole = expected_ends(topology)
    del whole[2][3], whole[3][2]
    return whole


def emulated(
    work: Any, fabric: str = "ring of 4", *, mbit: int = 200, timeout_s: float = 120, is_cut: bool = False
) -> tuple[Topology, list[Any]]:
    """What ranks in namespaces of their own return; the cable of 2 and 3 may be cut before they start."""
    plan = plan_emulation(FABRICS[fabric](), mbit)
    with emulate(plan, has_cables=True) as emulation:
        if is_cut:
            cut(emulation, 2, 3)
        got = run_inside(emulation, in_own_namespace, plan.cabled, work, timeout_s=timeout_s)
    return plan.cabled, got


@needs_root
@long
@pytest.mark.parametrize("name", FABRICS)
def test_all_collectives_where_nobody_forwards(name: str) -> None:
    fabric, got = emulated(all_collectives, name)
    assert got == expected_ends(fabric)


@needs_root
def test_after_a_cable_is_lost_the_group_goes_on_without_it() -> None:
    fabric, got = emulated(loses_a_cable)
    assert [found for *_, found in got] == without_2_3(fabric)
    assert all("has acknowledged nothing for 1 s" in said for said, *_ in got), got


@needs_root
def test_each_of_several_cables_carries_its_share() -> None:
    fabric, got = emulated(over_several_cables, "pair by 4 cables", mbit=20)
    assert [found for found, _ in got] == expected_ends(fabric)
    for _, shares in got:
        np.testing.assert_allclose(list(shares.values()), np.array(UNEQUAL) / sum(UNEQUAL), atol=0.03)


@needs_root
def test_after_one_of_several_cables_is_lost_the_others_go_on() -> None:
    fabric, got = emulated(loses_a_cable, "pair by 4 cables", mbit=20)
    left = [cable for cable in fabric.cables if "10.1.3.1" not in (cable.addresses or ())]
    assert [found for *_, found in got] == expected_ends(Topology.build("left", 2, left))
    assert all("has acknowledged nothing for 1 s" in said for said, _, _ in got), got
    name = "pair:2, 4 cables of unequal rates"
    bounds = "allreduce 45 GB/s at most, proven, instead of 95"
    what = "cable 10.1.3.1 to 10.1.3.2 of link 0-1"
    assert [line for _, lines, _ in got for line in lines] == [
        f"{name}: no answer along {what}; the group does without it: {bounds}"
    ]


@long
@needs_root
def test_ddp_goes_on_after_a_cable_is_pulled() -> None:
    """From what all ranks still have, with the parameters of an undisturbed run; the new limit is said."""
    _, got = emulated(goes_on_training)
    for found in got:
        assert any("has acknowledged nothing" in line for line in found["lines"])
        for value, wanted in zip(found["disturbed"], found["whole"], strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-6)
    # Along a line each link must carry the whole buffer both ways; in a ring of 4, 3/4 of it.
    said = "allreduce 1 GB/s at most, proven, instead of 1.333"
    lines = [line for found in got for line in found["lines"] if "no answer" in line]
    assert lines == [f"ring:4: no answer along link 2-3; the group does without it: {said}"]


@long
@needs_root
def test_a_cable_that_does_not_answer_is_left_out_on_all_ranks() -> None:
    fabric, got = emulated(all_collectives, is_cut=True)
    assert got == without_2_3(fabric)


@needs_root
@long
def test_ddp_and_fsdp_give_what_gloo_gives() -> None:
    _, got = emulated(trained, timeout_s=300)
    expected = run_ranks(4, trained, backend="gloo", timeout_s=300)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name, values in mine.items():
            for value, wanted in zip(values, theirs[name], strict=True):
                np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


@needs_root
@long
def test_pipelines_along_cables_have_the_losses_of_serial_training() -> None:
    for serial, *along_cables in emulated(pipelined)[1]:
        np.testing.assert_allclose(along_cables, [serial] * 2, rtol=1e-6)


def gloo_for_a_trainer(rank: int, size: int) -> str:
    from arborcast.pipeline.run.stage_groups import Groups

    try:
        Groups(None, "gloo", None, 20, 20)
    except InputError as error:
        return str(error)
    return ""


def test_a_trainer_refuses_collectives_that_need_all_connections(ring: Path) -> None:
    environ = {"ARBORCAST_TOPOLOGY": str(ring), "ARBORCAST_START": "at once"}
    said = run_ranks(4, gloo_for_a_trainer, backend="synth", environ=environ)
    assert said == ["collectives: must be synth where links have addresses, got gloo"] * 4


@needs_root
@long
def test_gloo_cannot_connect_there() -> None:
    plan = plan_emulation(FABRICS["ring of 4"](), 200)
    with emulate(plan, has_cables=True) as emulation:
        said = run_inside(emulation, by_gloo, 4, timeout_s=120)
    assert all("connect" in line.lower() for line in said), said
