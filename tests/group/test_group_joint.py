"""Groups of a job that run what was made for all of them together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from arborcast import topologies
from arborcast.backends.options import Options
from arborcast.backends.schedules.combined import joint_part
from arborcast.backends.schedules.group_fabric import fabric_for
from arborcast.backends.schedules.schedule_table import describe
from arborcast.backends.schedules.synthesis import verified_tables
from arborcast.synth import verify
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.groups import GroupSchedules, along, solve_groups
from arborcast.synth.groups.group_folder import write_groups
from tests.support.ranks import run_ranks

KINDS = ("allreduce", "allgather", "reduce-scatter", "broadcast")
MESH = 2, 4
"""    0 1 2 3     Along axis 1 two groups of four, along axis 0 four groups of two; each pair of ranks
       4 5 6 7     shares the ports of a switch, each four of them some links of its own.
"""


@pytest.fixture(scope="module")
def joint() -> GroupSchedules:
    fabric = topologies.load("dgx1")
    groups = [it for axis in (0, 1) for kind in KINDS for it in along(fabric, MESH, axis, kind)]
    return solve_groups(fabric, groups, relays=False)


def test_each_group_has_its_part_whatever_the_order_of_its_ranks(joint: GroupSchedules) -> None:
    """Verified on the links among its ranks alone, at the rate that it has on the whole fabric."""
    other = solve_groups(joint.topology, [*along(joint.topology, MESH, 1, "alltoall")], relays=False)
    options = Options(groups=[other, joint])
    for number, group in enumerate(joint.groups):
        asked = group.collective
        for ranks in (asked.ranks, asked.ranks[::-1]):
            fabric = fabric_for(options, ranks, 8)
            root = None if asked.root is None else ranks.index(asked.root)
            part = joint_part(fabric, asked.kind, root)
            assert part is not None
            assert part.name.startswith(f"group {number} of ")
            ((entry,),) = (table.entries for table in verified_tables(part, "alike"))
            assert entry.schedule.topology == fabric.topology
            assert entry.schedule.rate == group.schedule.rate
            assert verify(entry.schedule).correct
            assert ", with 23 other groups, " in describe(entry.schedule)


def test_others_are_found_as_ever(joint: GroupSchedules) -> None:
    options = Options(groups=joint)
    assert joint_part(fabric_for(options, (0, 1), 8), Kind.ALLREDUCE, None) is None
    assert joint_part(fabric_for(options, (0, 4), 8), Kind.BROADCAST, 1) is None  # from 4, not from 0
    assert joint_part(fabric_for(options, range(8), 8), Kind.ALLREDUCE, None) is None
    assert joint_part(fabric_for(Options(topology="dgx1"), (0, 4), 8), Kind.ALLREDUCE, None) is None


def test_what_does_not_fit_the_fabric(joint: GroupSchedules, tmp_path: Path) -> None:
    certificate = replace(joint.certificate, relays=True)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"groups": joint, "topology": "ring:8"}, r"groups: must be on topology ring:8, got those of dgx1"),
        ({"groups": replace(joint, certificate=certificate)}, r"groups: must not forward for each other, .*"),
        ({"groups": joint, "without": ((0, 3),)}, "groups: must be left out with without, .*"),
        ({"groups": tmp_path / "none"}, r".*none/groups.json: .*"),
    ]
    for options, message in cases:
        with pytest.raises(InputError, match=message):
            fabric_for(Options(**options), range(8), 8)


def on_lines(rank: int, size: int) -> list[tuple[list[float], str]]:
    """An allreduce along both axes of a mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    found = []
    for axis in ("data", "tensor"):
        group: Any = mesh.get_group(axis)
        tensor = torch.full((1000,), float(rank))
        dist.all_reduce(tensor, group=group)
        found.append((tensor.unique().tolist(), group.explain(4000)))
    return found


@pytest.mark.long
def test_a_mesh_of_torch_runs_them(tmp_path: Path) -> None:
    fabric = topologies.load("star:4,bandwidth=6")
    lines = [it for axis in (0, 1) for it in along(fabric, (2, 2), axis, "allreduce")]
    write_groups(solve_groups(fabric, lines, relays=False), tmp_path)
    environ = {"ARBORCAST_GROUPS": str(tmp_path), "ARBORCAST_GLOO_BELOW": "0"}
    found = run_ranks(4, on_lines, backend="synth", environ=environ)
    for rank, (data, tensor) in enumerate(found):
        assert data[0] == [2 * (rank % 2) + 2]
        assert tensor[0] == [4 * (rank // 2) + 1]
        assert all("with 3 other groups" in words for _, words in (data, tensor))
