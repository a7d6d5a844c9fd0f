"""Groups of some of the ranks: their fragment of the fabric, what is said of it, links that are left out."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from arborcast import topologies
from arborcast.backends import Options
from arborcast.backends.group.communicator import SERVED
from arborcast.backends.schedules.group_fabric import fabric_for
from arborcast.backends.schedules.schedule_table import ScheduleTable
from arborcast.backends.schedules.spare import spare_table
from arborcast.synth import solve
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.faults.backup_documents import write_spares
from arborcast.synth.faults.backup_schedules import Failure, make_spares, single_failures
from tests.support.group_cases import OPS, check_same, counted, values
from tests.support.ranks import GROUP_TIMEOUT_S, StandingRanks, run_ranks, store_path

EVERYTHING = {"ARBORCAST_GLOO_BELOW": "0", "ARBORCAST_METHOD": "trees", "ARBORCAST_DEADLINE": "100"}
"""Schedules serve all sizes; they are quick to find."""


def on(fabric: str, **more: str) -> dict[str, str]:
    return EVERYTHING | {"ARBORCAST_TOPOLOGY": fabric} | more


ranks = StandingRanks(4, environ=on("full:4"))


def links_of(group: Any) -> set[tuple[Any, Any]]:
    return {(link.src, link.dst) for link in group._communicator.member.fabric.topology.links}


def used_links(group: Any) -> set[tuple[Any, Any]]:
    """The links that schedules of the group send over."""
    known = group._communicator._schedules.known
    tables = [known(kind, root) for kind in SERVED for root in range(-1, group.size())]
    return {
        (transfer.src, transfer.dst)
        for table in tables
        if isinstance(table, ScheduleTable)
        for entry in table.entries
        for transfer in entry.schedule.transfers
    }


def members_sum(ranks: list[int], count: int, salt: int = 0) -> Tensor:
    return torch.stack([values(rank, count, salt=salt) for rank in ranks]).sum(0)


# Who is in -----------------------------------------------------------------------------------------


def check_collectives(group: Any, members: list[int], salt: int) -> None:
    """Four collectives of a group with these global ranks, in this order."""
    rank, size = dist.get_rank(), len(members)
    place = members.index(rank)
    assert dist.get_process_group_ranks(group) == members
    tensor = values(rank, 100, salt=salt)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, members_sum(members, 100, salt))
    root = members[-1]
    tensor = values(rank, 50, salt=salt)
    dist.broadcast(tensor, root, group=group)
    assert torch.equal(tensor, values(root, 50, salt=salt)), f"from {root} in {members}"
    gathered = torch.empty(30 * size)
    dist.all_gather_into_tensor(gathered, values(rank, 30, salt=salt), group=group)
    assert torch.equal(gathered, torch.cat([values(other, 30, salt=salt) for other in members]))
    block = torch.empty(20)
    dist.reduce_scatter_tensor(block, values(rank, 20 * size, salt=salt), group=group)
    assert torch.equal(block, members_sum(members, 20 * size, salt)[20 * place :][:20])


@ranks.check
def test_groups_in_all_orders(rank: int, size: int) -> None:
    """torch sorts the ranks of a group."""
    orders = [[2, 0, 3], [3, 1], [0, 1, 2, 3], [1, 2], [3, 2, 1], [2, 3, 0, 1]]
    for salt, order in enumerate(orders):
        group = dist.new_group(order)
        if rank in order:
            check_collectives(group, sorted(order), salt)
            assert dist.get_backend(group) == "synth"
            assert counted(group) == 4
            assert links_of(group) == {
                (one, other) for one in range(len(order)) for other in range(len(order)) if one != other
            }
    check_collectives(dist.group.WORLD, [0, 1, 2, 3], 9)


@ranks.check
def test_a_group_of_one_rank(rank: int, size: int) -> None:
    group = dist.new_group([rank], use_local_synchronization=True)
    check_collectives(group, [rank], 0)
    for op in ("AVG", "MAX", "PRODUCT"):
        tensor = values(rank, 10)
        dist.all_reduce(tensor, OPS[op], group=group)
        assert torch.equal(tensor, values(rank, 10))
    tensor = values(rank, 10)
    dist.all_reduce(tensor, OPS["PREMUL_SUM"], group=group)
    assert torch.equal(tensor, values(rank, 10) / 2)
    dist.barrier(group)
    assert "one rank" in group.explain(1 << 20)
    assert counted(group) == 0


def whole_world_of_one(rank: int, size: int) -> None:
    check_collectives(dist.group.WORLD, [0], 0)


@pytest.mark.parametrize("environ", [EVERYTHING, on("full:2", ARBORCAST_RANKS="1")])
def test_a_job_of_one_rank(environ: dict[str, str]) -> None:
    run_ranks(1, whole_world_of_one, backend="synth", environ=environ)


@ranks.check
def test_groups_at_once(rank: int, size: int) -> None:
    whole, *pairs = [dist.new_group(some) for some in (None, [0, 1], [2, 3])]
    mine, members = pairs[rank // 2], [rank // 2 * 2, rank // 2 * 2 + 1]
    errors: list[BaseException] = []

    def within(group: Any, members: list[int], salt: int) -> None:
        try:
            for call in range(20):
                check_collectives(group, members, salt + call)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=within, args=(mine, members, 100 * members[0])),
        threading.Thread(target=within, args=(whole, [0, 1, 2, 3], 500)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert counted(mine) == counted(whole) == 20 * 4


@ranks.check
def test_groups_as_torch_makes_them(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    for name, members in (
        ("shard", [rank // 2 * 2, rank // 2 * 2 + 1]),
        ("replica", [rank % 2, rank % 2 + 2]),
    ):
        group = mesh.get_group(name)
        check_collectives(group, members, rank // 2 if name == "shard" else rank % 2)
        assert counted(group) == 4
    mine, _ = dist.new_subgroups(2)
    check_collectives(mine, [rank // 2 * 2, rank // 2 * 2 + 1], 7)
    with pytest.raises(RuntimeError, match="split"):
        dist.split_group(dist.group.WORLD, [[0, 1], [2, 3]])  # as on gloo
    for _ in range(3):
        group = dist.new_group([0, 3])
        if rank in {0, 3}:
            check_collectives(group, [0, 3], 8)
            dist.destroy_process_group(group)
    check_collectives(dist.group.WORLD, [0, 1, 2, 3], 9)


# Which fragment -----------------------------------------------------------------------------------


def allocated(rank: int, size: int) -> list[str]:
    given = [1, 4, 5, 6]
    whole, box = dist.group.WORLD, topologies.load("dgx1")
    assert whole._communicator.member.fabric.topology.links == box.subset(given).links
    check_collectives(whole, [0, 1, 2, 3], 0)
    some = dist.new_group([3, 1, 2])
    said = [whole.fabric]
    if rank in {1, 2, 3}:
        assert some._communicator.member.fabric.topology.links == box.subset([4, 5, 6]).links
        check_collectives(some, [1, 2, 3], 1)
        said.append(some.fabric)
    for group in (whole, some):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            assert used_links(group) <= links_of(group)
            assert used_links(group)
    return said


def test_ranks_that_a_scheduler_handed_out() -> None:
    environ = on("dgx1", ARBORCAST_RANKS="1,4,5,6")
    said = run_ranks(4, allocated, backend="synth", environ=environ)
    assert all("dgx1[1,4,5,6]: 4 ranks" in each[0] for each in said)
    assert all("from dgx1" in line for each in said for line in each)
    assert "dgx1[4,5,6]: 3 ranks" in said[1][1]


@ranks.check
def test_options_of_one_group(rank: int, size: int) -> None:
    options: Any = Options(topology=topologies.load("mesh:1x4"), ranks=[2, 0, 1, 3])
    group: Any = dist.new_group(pg_options=options)
    # Of the line, ranks 1 and 3 of the group are the ends, and 2 and 0 stand between them.
    assert links_of(group) == {hop for pair in ((1, 2), (2, 0), (0, 3)) for hop in (pair, pair[::-1])}
    check_collectives(group, [0, 1, 2, 3], 0)
    assert used_links(group) <= links_of(group)
    assert "given in code" in group.fabric


# What is said -------------------------------------------------------------------------------------


class Heard(logging.Handler):
    """Keeps what the package logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[tuple[str, str]] = []
        logger = logging.getLogger("arborcast.backends")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.levelname, record.getMessage()))

    def having(self, text: str, level: str | None = None) -> list[str]:
        return [said for name, said in self.records if text in said and level in {None, name}]


def join(rank: int, size: int) -> Heard:
    """Make the default group while somebody listens."""
    import arborcast.torch_backend  # noqa: F401

    heard = Heard()
    store = dist.FileStore(str(store_path()), size)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("synth", store=store, rank=rank, world_size=size, timeout=timeout)
    return heard


def assumed(rank: int, size: int) -> list[int]:
    heard = join(rank, size)
    dist.new_group()
    dist.new_group([0, 1])
    dist.new_group([1, 2])
    check_collectives(dist.group.WORLD, [0, 1, 2], 0)
    notices = [len(heard.having("assumed")), len(heard.having("assumed", "WARNING"))]
    assert "full:3" in dist.group.WORLD.fabric
    assert "assumed" in dist.group.WORLD.fabric
    dist.destroy_process_group()
    return notices


def test_an_assumed_fabric_is_said_once() -> None:
    said = run_ranks(3, assumed, backend=None, environ=EVERYTHING)
    assert said == [[1, 1], [0, 0], [0, 0]]


def not_connected(rank: int, size: int) -> list[str]:
    heard = join(rank, size)
    tested, reference = dist.new_group([0, 2]), dist.new_group([0, 2], backend="gloo")
    if rank in {0, 2}:
        for count in (1, 1000, 50_000):

            def summed(group: Any, count: int = count) -> list[Tensor]:
                dist.all_reduce(tensor := values(rank, count), group=group)
                return [tensor]

            assert check_same(f"{count} elements", summed, tested, reference).error is None
        assert counted(tested) == 0
        assert counted(tested, "gloo", "allreduce") == 3
        assert ": gloo, " in tested.explain(1 << 20)
    check_collectives(dist.group.WORLD, [0, 1, 2, 3], 1)
    assert counted(dist.group.WORLD) == 4
    dist.destroy_process_group()
    return heard.having("gloo serves it", "WARNING")


def test_a_fragment_that_is_not_connected_is_gloos() -> None:
    """The opposite corners of a square have no link: their processes' neighbours do not forward for them."""
    said = run_ranks(4, not_connected, backend=None, environ=on("ring:4"))
    assert [len(each) for each in said] == [1, 0, 0, 0]
    assert "allreduce on ring:4[0,2]" in said[0][0]


def explained(rank: int, size: int) -> list[str]:
    heard = join(rank, size)
    group = dist.group.WORLD
    lines = []
    for kind, factor in (("allreduce", 1), ("broadcast", 1), ("allgather", size), ("reduce-scatter", size)):
        for nbytes in (0, 64, 4096, 65_536, 1 << 20, 6 << 20):
            count = nbytes // 4 // factor
            # What is found at the first call is known afterwards.
            before = {path: counted(group, path, kind) for path in ("schedule", "gloo")}
            tensor = torch.ones(count)
            match kind:
                case "allreduce":
                    dist.all_reduce(tensor)
                case "broadcast":
                    dist.broadcast(tensor, 2)
                case "allgather":
                    dist.all_gather_into_tensor(torch.empty(count * size), tensor)
                case _:
                    dist.reduce_scatter_tensor(tensor, torch.ones(count * size))
            after = {path: counted(group, path, kind) for path in ("schedule", "gloo")}
            line = group.explain(count * 4 * factor, kind, root=2)
            served = "gloo" if ": gloo, " in line else "schedule"
            assert after[served] == before[served] + 1, line
            assert sum(after.values()) == sum(before.values()) + 1
            assert line.startswith(f"{kind} of "), line
            assert len(line) < 300, line
            if served == "schedule":
                root = 2 if kind == "broadcast" else -1
                entry = group._communicator._schedules.known(kind, root).at(count * 4 * factor)
                assert entry.schedule.method.name in line
                assert "full:3" in line
            lines.append(line)
    paths = {": gloo, " in line for line in lines}
    assert paths == {True, False}, "both sides of the limit were asked for"
    if rank == 0:
        for kind in ("allreduce", "broadcast", "allgather", "reduce-scatter"):
            assert heard.having(f"{kind} "), f"one line says what serves {kind}"
    dist.destroy_process_group()
    return lines


def test_explanations_say_what_is_counted() -> None:
    environ = on("full:3", ARBORCAST_GLOO_BELOW="16KiB", ARBORCAST_METHOD="auto")
    first, *others = run_ranks(3, explained, backend=None, environ=environ)
    assert all(lines == first for lines in others)


def prepared(rank: int, size: int) -> None:
    heard = join(rank, size)
    group = dist.group.WORLD
    assert "found at the first such call" in group.explain(1 << 20, "allgather")
    group.prepare("allgather")
    group.prepare("broadcast", 1)
    assert "found at" not in group.explain(1 << 20, "allgather")
    assert "found at" not in group.explain(1 << 20, "broadcast", 1)
    assert "found at" in group.explain(1 << 20, "broadcast", 2)
    assert counted(group) == 0
    if rank == 0:
        for line in ("allreduce on full:3", "broadcast from 0 on", "allgather on", "broadcast from 1 on"):
            assert len(heard.having(line)) == 1
    dist.destroy_process_group()


def test_schedules_found_beforehand() -> None:
    run_ranks(3, prepared, backend=None, environ=on("full:3"))


# Links that are left out --------------------------------------------------------------------------


@ranks.check
def test_avoided_links(rank: int, size: int) -> None:
    group: Any = dist.new_group()
    check_collectives(group, [0, 1, 2, 3], 0)
    assert {(0, 1), (1, 0)} <= used_links(group)
    before = group.explain(1 << 20)
    group.avoid(1, 0)
    assert not {(0, 1), (1, 0)} & links_of(group)
    check_collectives(group, [0, 1, 2, 3], 1)
    assert used_links(group)
    assert not {(0, 1), (1, 0)} & used_links(group)
    assert "without 1-0" in group.fabric
    assert group.explain(1 << 20) != before

    group.avoid(0, 1)  # once more changes nothing
    check_collectives(group, [0, 1, 2, 3], 4)
    with pytest.raises(InputError, match="no such link"):
        group.avoid(0, 9)
    group.avoid(0, 2)
    check_collectives(group, [0, 1, 2, 3], 2)
    served = counted(group)
    assert served == 4 * 4
    group.avoid(0, 3)  # now nothing reaches rank 0
    check_collectives(group, [0, 1, 2, 3], 3)
    assert counted(group) == served
    assert ": gloo, " in group.explain(1 << 20)


def going_over(rank: int, size: int) -> list[str]:
    group = dist.group.WORLD
    group.avoid(1, 0)
    tensor = values(rank, 100)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, members_sum([0, 1, 2, 3], 100))
    assert not {(0, 1), (1, 0)} & used_links(group)
    return [group.explain(1 << 20)]


def test_a_spare_schedule_serves_from_the_first_call(tmp_path: Path) -> None:
    """The best rate that is left at once, where else a simple schedule would serve."""
    mesh = topologies.load("full:4")
    spares = make_spares(solve(mesh, "allreduce", method="trees"), single_failures(mesh))
    write_spares(spares, tmp_path / "spares.json")
    after = spares.after(Failure(((0, 1),)))
    environ = {
        "ARBORCAST_TOPOLOGY": "full:4",
        "ARBORCAST_SPARES": str(tmp_path / "spares.json"),
        "ARBORCAST_START": "at once",
    }
    for (spare,) in run_ranks(4, going_over, backend="synth", environ=environ):
        assert f"trees ({len(after.chunks)} trees, height {after.height}, " in spare
        assert spare.endswith(f"{float(after.rate):.4g} GB/s, optimal) on full:4, until others are found")


def test_spares_that_do_not_fit(tmp_path: Path) -> None:
    mesh = topologies.load("full:4")
    spares = make_spares(solve(mesh, "allreduce", method="trees"), [Failure(((0, 1),))])
    with pytest.raises(InputError, match="spares: must be for fabric ring:4, got those of full:4"):
        fabric_for(Options(topology="ring:4", spares=[spares]), range(4), 4)
    with pytest.raises(InputError, match="spares: must be for a fabric, and none is given"):
        fabric_for(Options(spares=[spares]), range(4), 4)
    parts = spares.differences[0].parts
    wrong = replace(spares.differences[0], parts=(replace(parts[0], like=None, added=()), *parts[1:]))
    with pytest.raises(InputError, match="spares: link 0-1: a schedule that is not correct"):
        fabric_for(Options(topology=mesh, spares=[replace(spares, differences=(wrong,))]), range(4), 4)
    options = Options(topology="full:5", ranks=[0, 2, 3, 4], spares=[spares], without=[(2, 0)])
    of_some = fabric_for(options, range(4), 4)
    table = spare_table(of_some.spares, of_some.gone, of_some.topology, Kind.ALLREDUCE, None)
    assert table is not None
    assert table.entries[0].schedule.rate == spares.differences[0].rate
    for kind, root in ((Kind.ALLGATHER, None), (Kind.BROADCAST, 0)):
        assert spare_table(of_some.spares, of_some.gone, of_some.topology, kind, root) is None


def without(rank: int, size: int) -> None:
    group = dist.group.WORLD
    assert not {(0, 2), (2, 0), (1, 3), (3, 1)} & links_of(group)
    check_collectives(group, [0, 1, 2, 3], 0)
    assert used_links(group) <= links_of(group)
    some = dist.new_group([0, 1, 2])
    if rank < 3:
        assert not {(0, 2), (2, 0)} & links_of(some)
        check_collectives(some, [0, 1, 2], 0)


def test_links_that_are_down_from_the_start() -> None:
    run_ranks(4, without, backend="synth", environ=on("full:4", ARBORCAST_WITHOUT="0-2,3-1"))


@ranks.check
def test_a_larger_fabric_needs_ranks(rank: int, size: int) -> None:
    """Which of its ranks these are must not be guessed; all ranks refuse alike, at once."""
    options: Any = Options(topology="full:5")
    with pytest.raises(ValueError, match="has 5 ranks and the job has 4; ARBORCAST_RANKS"):
        dist.new_group(pg_options=options)


def told_in_code(rank: int, size: int) -> tuple[str, list[str]]:
    """Fabrics of the job and of a part of it; what is said of links that lie outside."""
    options = Options(topology="dgx1", ranks=[1, 4, 5, 6], method="trees")
    store = dist.FileStore(str(store_path()), size)
    dist.init_process_group("synth", store=store, rank=rank, world_size=size, pg_options=options)
    part = dist.new_group([1, 3])
    world: Any = dist.group.WORLD
    heard = Heard()
    world.avoid(0, 3)
    lines = heard.having("avoid")
    before = world.explain(1 << 20)
    world.avoid(4, 6)
    world.prepare("allreduce")
    assert world.explain(1 << 20) != before
    return part.fabric if rank in (1, 3) else "", lines


def test_parts_of_a_job_inherit_what_it_was_told() -> None:
    found = run_ranks(4, told_in_code, backend=None)
    assert all("dgx1[4,6]" in fabric for fabric, _ in (found[1], found[3]))
    assert [len(lines) for _, lines in found] == [1, 0, 0, 0]
    assert "avoid 0-3: no link among the ranks of this group" in found[0][1][0]


@ranks.check
def test_a_method_need_not_serve_every_collective(rank: int, size: int) -> None:
    options: Any = Options(method="halving-doubling")
    group: Any = dist.new_group(pg_options=options)
    tensor = torch.full((4096,), float(rank))
    dist.all_reduce(tensor, group=group)
    other = torch.full((4096,), float(rank))
    dist.broadcast(other, 1, group=group)
    assert (tensor[0], other[-1]) == (6.0, 1.0)
    assert group.counters()["allreduce"]["schedule"] == group.counters()["broadcast"]["gloo"] == 1
