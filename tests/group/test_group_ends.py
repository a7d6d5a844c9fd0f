"""How groups end: aborted, left without a farewell, with forked workers that live on. Real processes."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from arborcast.backends.tensors.torch_compat import break_gloo, new_gloo
from tests.support.faults import (
    LARGE,
    MIB,
    PATIENCE_S,
    SMALL,
    Ended,
    allreduce,
    begin,
    check_failed,
    check_right,
    ended,
    launch,
    pids,
    signal_self,
    strike_after,
)
from tests.support.ranks import run_ranks
from tests.support.waiting import any_inside, until, wait_for_end

HOME = Path(__file__).resolve().parents[2]


def _aborted(rank: int, size: int, is_of_torch: bool) -> list[Ended]:
    everyone = pids(rank, size)
    check_right(allreduce(rank, size, count=SMALL))
    if rank == size - 1:
        strike_after(2 * MIB, signal_self(signal.SIGSTOP))

    begun = threading.Event()

    def abort() -> None:
        begun.wait(PATIENCE_S)  # torch forgets the group at once: no call could begin any more
        until(lambda: any_inside("_advance"))  # of the engine
        status = Path(f"/proc/{everyone[size - 1]}/status")
        until(lambda: "State:\tT" in status.read_text())
        if is_of_torch:
            dist.distributed_c10d._abort_process_group()
        else:
            dist.group.WORLD.abort()  # type: ignore[union-attr]

    if rank == 0:
        threading.Thread(target=abort).start()
    works = [dist.all_reduce(torch.ones(LARGE // 4), async_op=True) for _ in range(3)]
    begun.set()
    found = [ended(work.wait) for work in works]
    if rank == 0:
        os.kill(everyone[size - 1], signal.SIGCONT)
    if dist.is_initialized():
        dist.destroy_process_group()
    begin(rank, size, "again", PATIENCE_S)
    return [*found[-1:], allreduce(rank, size, SMALL)]


@pytest.mark.parametrize(
    ("is_of_torch", "transport", "ranks"),
    [
        (False, "sockets", 2),
        pytest.param(False, "auto", 3, marks=pytest.mark.long),
        pytest.param(True, "auto", 2, marks=pytest.mark.long),
        pytest.param(True, "sockets", 3, marks=pytest.mark.long),
    ],
)
def test_abort_ends_calls_in_flight_on_all_ranks_though_one_is_stopped(
    is_of_torch: bool, transport: str, ranks: int
) -> None:
    results = launch(
        _aborted,
        is_of_torch,
        ranks=ranks,
        topology=f"full:{ranks}",
        transport=transport,
        group_timeout_s=PATIENCE_S,
    )
    for rank, result in enumerate(results):
        assert isinstance(result, list), result
        # Who was stopped finds its connection closed, perhaps without the reason: nobody waits for it.
        is_stopped = rank == ranks - 1
        check_failed(result[0], "rank 0" if is_stopped else "rank 0 aborted the group|the group was aborted")
        check_right(result[1])


def _leaves(rank: int, size: int) -> tuple[bool, int]:
    """What the end of the interpreter does before it stops threads where they are."""
    tensors = [torch.full((LARGE // 4,), float(rank)) for _ in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    atexit._run_exitfuncs()
    executors = [it for it in threading.enumerate() if it.name.startswith("synth")]
    return all(work.is_success() for work in works), len(executors)


def test_who_leaves_without_a_farewell_finishes_its_calls_and_leaves_no_thread() -> None:
    assert launch(_leaves, ranks=2, topology="full:2", group_timeout_s=PATIENCE_S) == [(True, 0)] * 2


@pytest.mark.long
@pytest.mark.parametrize("how", ["in flight", "alone", "aborted"])
def test_no_process_that_leaves_is_aborted(how: str, tmp_path: Path) -> None:
    """A thread that is inside of C++ when the interpreter ends makes C++ abort the process: 1 end of 50."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.leaving", how, "25", str(tmp_path)],
        cwd=HOME,
        env={**os.environ, "PYTHONPATH": str(HOME), "ARBORCAST_TOPOLOGY": "full:2", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["0"] * 50, done.stderr[-3000:]


def _dies_before_its_worker(rank: int, size: int) -> list[str]:
    """What a worker that rank 0 has forked, and that lives on, still holds of the group; rank 1 says."""
    store = dist.FileStore(f"{os.environ['TEST_STORE']}-said", size)
    if rank == 0:
        before = _held()
        begin(rank, size, "group", PATIENCE_S)
        check_right(allreduce(rank, size, SMALL))
        reception = dist.group.WORLD._communicator.member.network._reception  # type: ignore[union-attr]
        worker = os.fork()
        if not worker:
            store.set("held", "\n".join(sorted(_held() - before)) or "nothing")
            store.wait(["ended"])
            os._exit(0)
        store.set("where", f"{reception.doors[0][0]} {reception.doors[0][1]} {os.getpid()}")
        store.wait(["held"])
        os.kill(os.getpid(), signal.SIGKILL)
    begin(rank, size, "group", PATIENCE_S)
    check_right(allreduce(rank, size, SMALL))
    failed = allreduce(rank, size, SMALL)  # notices that rank 0 is dead
    host, port, dead = store.get("where").decode().split()
    wait_for_end(int(dead))
    try:
        socket.create_connection((host, int(port))).close()
        accepts = "accepts"
    except ConnectionRefusedError:
        accepts = "refuses"
    held = store.get("held").decode()
    store.set("ended", "")
    return [failed.message, accepts, held]


def _held() -> set[str]:
    """Sockets, memory without a name and eventfds that this process has open or mapped."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        target = str(entry.readlink()) if entry.is_symlink() else ""  # gone: of the listing itself
        if target.startswith(("socket:", "/memfd:", "anon_inode:")):
            found.add(f"{entry.name} {target}")
    maps = Path("/proc/self/maps").read_text().splitlines()
    return found | {line.split()[-2] for line in maps if "memfd:arborcast" in line}


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
def test_a_forked_worker_keeps_nothing_of_its_dead_parent_alive(transport: str) -> None:
    results = launch(
        _dies_before_its_worker, ranks=2, topology="full:2", transport=transport, has_group=False
    )
    message, accepts, held = results[1]
    assert "rank 0" in message
    assert (accepts, held) == ("refuses", "nothing")


def _breaks(rank: int, size: int) -> list[str]:
    """Rank 1 breaks its gloo, which ends what rank 0 waits for, while rank 2 never connects with anybody."""
    store = dist.FileStore(f"{os.environ['TEST_STORE']}-gloo", size)
    gloo = new_gloo(store, rank, size, timedelta(seconds=PATIENCE_S))
    if rank == 2:
        store.wait(["ended"])
        return []
    said = []
    (gloo.recv if rank else gloo.send)([torch.ones(1)], 1 - rank, 5).wait()
    if rank:
        break_gloo(gloo)
    try:
        gloo.recv([torch.empty(1)], 1 - rank, 6).wait()
    except RuntimeError as error:
        said.append(str(error))
    if not rank:
        store.set("ended", "")
    return said


def test_breaking_gloo_waits_for_no_rank_that_never_came() -> None:
    zero, one, two = run_ranks(3, _breaks, backend=None)
    assert (len(zero), len(one), two) == (1, 1, [])
