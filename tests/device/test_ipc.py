"""Memory by IPC: who opens whose, what is refused, which memory ranks make, with torch's calls drawn."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from arborcast import synth, topologies
from arborcast.backends.device import paths
from arborcast.backends.device.memory import IpcMemory, PeerRanks
from arborcast.backends.device.paths import RankGpu, choose, make_memory
from arborcast.backends.device.plan import DevicePlan
from arborcast.backends.device.tables import FIRST_STAGING, SIGNALS, SOURCES, TARGETS
from arborcast.backends.errors import ExecutionError
from arborcast.synth.errors import InputError
from arborcast.synth.implicit_schedule import AnySchedule
from tests.device.drawn_ipc import DrawnIpc, ranks_by_files
from tests.support.drawn_schedules import ring_allreduce

FABRICS = {
    "DGX-1": ("dgx1", None),
    "six of it": ("dgx1", (0, 1, 2, 3, 4, 5)),
    "three of it": ("dgx1", (0, 1, 4)),
    "two PCIe islands of four": ("a100-pcie", None),
}


def solved(name: str, kind: str = "allreduce") -> AnySchedule:
    fabric, ranks = FABRICS[name]
    return synth.solve(topologies.load(fabric, ranks=ranks), kind)


def named_by(plan: DevicePlan, rank: int) -> set[int]:
    """Other ranks whose slots or flags the tables of a rank name."""
    tables = plan.tables(rank, 64 * plan.ranks)
    items, named = tables.items.tolist(), set()
    for row in tables.rows.tolist():
        for column in (SOURCES, TARGETS):
            named |= {buffer - FIRST_STAGING for buffer, _, _ in items[row[column] : row[column + 1]]}
        named |= {peer for peer, _, _ in items[row[SIGNALS] : row[SIGNALS + 1]]}
    return {it for it in named if it >= 0} - {rank}


def made(
    drawn: DrawnIpc, plan: DevicePlan, folder: Path, neighbours: Sequence[Sequence[int]]
) -> list[IpcMemory]:
    """The memory of all ranks, each a thread."""

    def of_rank(rank: int) -> IpcMemory:
        drawn.act_as(rank)
        ranks = ranks_by_files(rank, plan.ranks, folder)
        return IpcMemory(plan.shape, 4, ranks, neighbours[rank], torch.device("cpu"))

    with ThreadPoolExecutor(plan.ranks) as threads:
        return list(threads.map(of_rank, range(plan.ranks)))


@pytest.mark.parametrize("push", [True, False])
@pytest.mark.parametrize("name", FABRICS)
def test_only_neighbours_are_opened_and_no_table_names_another(
    name: str, push: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = DevicePlan(solved(name), push=push)
    neighbours = [plan.neighbours(rank) for rank in range(plan.ranks)]
    drawn = DrawnIpc(lambda rank, peer: peer in neighbours[rank])
    drawn.install(monkeypatch.setattr)
    memory = made(drawn, plan, tmp_path, neighbours)
    pairs = [(rank, peer) for rank, peers in enumerate(neighbours) for peer in peers]
    assert Counter(drawn.opened) == Counter(pairs)
    assert plan.ranks == 3 or len(pairs) < plan.ranks * (plan.ranks - 1)
    for rank, of_rank in enumerate(memory):
        addresses = of_rank.addresses()
        reached = {it for it in range(plan.ranks) if addresses[it]}
        assert reached == {it for it in range(plan.ranks) if addresses[plan.ranks + it]}
        assert reached == {rank, *neighbours[rank]}
        assert named_by(plan, rank) == set(neighbours[rank])
        assert all(start % 16 == 0 for start in addresses[: plan.ranks])
    for number in (0, 1):  # of each rank's first flag, by addresses that are another's
        for rank, peer in pairs:
            flags = memory[rank].addresses()[plan.ranks + peer]
            assert flags != memory[peer].addresses()[plan.ranks + peer]
            assert ctypes.c_int32.from_address(flags).value == number
        for rank, of_rank in enumerate(memory):
            of_rank.abort(rank)


@pytest.mark.parametrize("kind", ["allgather", "reduce-scatter", "broadcast", "alltoall", "gather"])
def test_neighbours_are_whom_tables_name(kind: str) -> None:
    for name in FABRICS:
        plan = DevicePlan(solved(name, kind), groups=2, push=kind != "gather")
        for rank in range(plan.ranks):
            assert set(plan.neighbours(rank)) == named_by(plan, rank)


def test_memory_is_kept_until_all_have_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = DevicePlan(ring_allreduce(3))
    drawn = DrawnIpc(lambda rank, peer: True)
    drawn.install(monkeypatch.setattr)
    memory: list[IpcMemory | None] = [*made(drawn, plan, tmp_path, [plan.neighbours(it) for it in range(3)])]
    assert drawn.counts == {0: 2, 1: 2, 2: 2}
    memory[1] = None
    gc.collect()
    assert drawn.counts == {0: 1, 1: 2, 2: 1}


@pytest.mark.parametrize(
    ("neighbours", "why"),
    [
        ([[1, 2], [0], [0]], "open .* by IPC: CUDA error: peer access is not supported between these two"),
        ([[0, 1], [0], []], "open .* by IPC: CUDA error: invalid device context"),
        ([[1, 1], [0], []], "open .* by IPC: a handle is counted for one that opens it, once"),
    ],
    ids=["no path", "its own", "twice"],
)
def test_what_cuda_refuses_ends_it_on_all_ranks(
    neighbours: list[list[int]], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = DevicePlan(ring_allreduce(3))
    drawn = DrawnIpc(lambda rank, peer: {rank, peer} != {0, 2})
    drawn.install(monkeypatch.setattr)
    said = []

    def fails(rank: int) -> None:
        drawn.act_as(rank)
        with pytest.raises(ExecutionError, match=f"^device: rank 0 cannot {why}") as refused:
            ranks = ranks_by_files(rank, 3, tmp_path)
            IpcMemory(plan.shape, 4, ranks, neighbours[rank], torch.device("cpu"))
        said.append(str(refused.value))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(fails, range(3)))
    assert len(said) == 3 and len(set(said)) == 1


def box(size: int, reaches: Callable[[int, int], bool] = lambda rank, peer: True) -> list[RankGpu]:
    """GPUs of one host, of each rank one, which all ranks see."""
    return [
        RankGpu(
            "here",
            f"GPU-{it}",
            it,
            {f"GPU-{peer}": it == peer or reaches(it, peer) for peer in range(size)},
            False,
        )
        for it in range(size)
    ]


def ring(size: int) -> list[list[int]]:
    return [sorted({(it - 1) % size, (it + 1) % size}) for it in range(size)]


def test_symmetric_memory_where_all_pairs_reach_each_other() -> None:
    assert choose(box(4), ring(4)) == ("symmetric memory", "all GPUs reach each other")


def test_ipc_where_only_neighbours_do() -> None:
    """Of DGX-1, across whose two halves a GPU reaches one other."""
    plan = DevicePlan(solved("DGX-1"))
    gpus = box(8, lambda rank, peer: rank // 4 == peer // 4 or abs(rank - peer) == 4)
    which, why = choose(gpus, [plan.neighbours(it) for it in range(8)])
    assert (which, why) == ("IPC of neighbours", "the GPU of rank 0 does not reach that of rank 5")


def test_a_neighbour_without_a_path_is_refused_by_name() -> None:
    plan = DevicePlan(solved("two PCIe islands of four"))
    with pytest.raises(InputError) as refused:
        choose(box(8, lambda a, b: a // 4 == b // 4), [plan.neighbours(it) for it in range(8)])
    peer = next(it for it in plan.neighbours(0) if it >= 4)
    assert str(refused.value) == (
        f"device: rank 0 and its neighbour in the schedule, rank {peer}, must have a path between their "
        "GPUs, torch.cuda.can_device_access_peer finds none"
    )


def test_a_hidden_gpu_of_a_neighbour_is_refused_by_name() -> None:
    hidden = [replace(it, index=0, accesses={it.uuid: True}) for it in box(3)]
    with pytest.raises(InputError) as refused:
        choose(hidden, [[], [2], [1]])
    assert str(refused.value) == (
        "device: rank 1 and its neighbour in the schedule, rank 2, must both see both GPUs, in "
        "CUDA_VISIBLE_DEVICES; rank 1 does not see that of rank 2"
    )
    # Whom it has no messages with it need not see.
    assert choose(hidden, [[], [], []])[0] == "IPC of neighbours"


def test_of_several_hosts_torch_judges() -> None:
    hosts = [replace(it, host=f"host {it.index // 2}", accesses={it.uuid: True}) for it in box(4)]
    assert choose(hosts, ring(4)) == ("symmetric memory", "ranks are on several hosts")


def test_ranks_that_share_a_gpu_need_not_be_let_by_torch() -> None:
    shared = [replace(it, uuid="GPU-0", index=0, accesses={"GPU-0": True}) for it in box(2)]
    why = "ranks 0 and 1 have cuda:0, and TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is not 1 on all"
    assert choose(shared, ring(2)) == ("IPC of neighbours", why)
    assert choose([replace(shared[0], overlaps=True), shared[1]], ring(2))[0] == "IPC of neighbours"
    assert choose([replace(it, overlaps=True) for it in shared], ring(2))[0] == "symmetric memory"


def test_what_a_rank_says_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = SimpleNamespace(
        current_device=lambda: 1,
        device_count=lambda: 3,
        get_device_properties=lambda index: SimpleNamespace(uuid=f"GPU-{index}"),
        can_device_access_peer=lambda own, peer: (own, peer) == (1, 0),
    )
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    for name, call in vars(drawn).items():
        monkeypatch.setattr(torch.cuda, name, call)
    accesses = {"GPU-0": True, "GPU-1": True, "GPU-2": False}
    assert RankGpu.here() == RankGpu("here", "GPU-1", 1, accesses, False)
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert RankGpu.here() == RankGpu("here", "GPU-1", 1, accesses, True)


def test_ipc_with_hip_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = box(3, lambda rank, peer: {rank, peer} != {1, 2})
    said = [json.dumps([asdict(it), None]) for it in gpus]
    monkeypatch.setattr(RankGpu, "here", lambda: gpus[0])
    monkeypatch.setattr(torch.version, "hip", "7.2")
    ranks = PeerRanks(0, lambda _: said, lambda own: None)
    with pytest.raises(InputError, match=r"^device: IPC of neighbours, as the GPU of rank 1 .* needs CUDA: "):
        make_memory(DevicePlan(solved("three of it")), 4, ranks, "cuda")


def test_what_ranks_make_and_that_they_say_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(paths, "IpcMemory", lambda shape, itemsize, ranks, neighbours: neighbours)
    monkeypatch.setattr(paths, "SymmetricMemory", lambda shape, itemsize, ranks: "symmetric")
    plan = DevicePlan(solved("three of it"))
    for gpus, makes in (
        (box(3, lambda rank, peer: {rank, peer} != {1, 2}), plan.neighbours(0)),
        (box(3), "symmetric"),
    ):

        def exchange(said: str, gpus: list[RankGpu] = gpus) -> list[str]:
            return [said, *(json.dumps([asdict(it), None]) for it in gpus[1:])]

        monkeypatch.setattr(RankGpu, "here", lambda gpus=gpus: gpus[0])
        with caplog.at_level(logging.INFO, paths.__name__):
            assert make_memory(plan, 4, PeerRanks(0, exchange, lambda own: None), "cuda") == makes
    assert caplog.messages == [
        "device: IPC of neighbours, as the GPU of rank 1 does not reach that of rank 2",
        "device: symmetric memory, as all GPUs reach each other",
    ]
