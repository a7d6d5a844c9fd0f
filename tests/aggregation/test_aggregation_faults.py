"""What goes wrong around a switch that executes programs: dead and silent ranks, strangers, its own end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from fractions import Fraction
from itertools import count
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from arborcast.backends.aggregation.aggregator import Aggregator  # noqa: E402
from arborcast.backends.aggregation.job import Abilities  # noqa: E402
from arborcast.backends.options import Options  # noqa: E402
from arborcast.backends.schedules.enlistment import Switches  # noqa: E402
from arborcast.backends.schedules.fabric import addresses_of  # noqa: E402
from arborcast.backends.schedules.table import Table  # noqa: E402
from arborcast.backends.transport import listener  # noqa: E402
from arborcast.backends.transport.handshake import Handshake  # noqa: E402
from arborcast.backends.transport.network import Network  # noqa: E402
from arborcast.synth.schedule import Schedule  # noqa: E402
from arborcast.synth.selection import Choice  # noqa: E402
from arborcast.synth.simulation.pieces import ONE_HOST  # noqa: E402
from tests.aggregation.test_aggregation import runner  # noqa: E402
from tests.support.in_network import aggregators, star, turning, two_levels  # noqa: E402
from tests.support.ranks import run_ranks, store_path  # noqa: E402

COUNT = 100_000


def sums(rank: int, size: int, schedule: Schedule, options: Options, calls: int = 2) -> float:
    made = runner(schedule, rank, options)
    for _ in range(calls):
        data = torch.full((COUNT,), float(rank))
        made.run(COUNT, data.dtype, output=data)
    made.close()
    return data[-1].item()


def fails(rank: int, size: int, schedule: Schedule, options: Options, how: str, timeout_s: float) -> None:
    """One good call, then one in which rank 1 does something else."""
    made = runner(schedule, rank, options, 90.0)
    data = torch.zeros(COUNT)
    made.run(COUNT, data.dtype, output=data)
    made._engine.timeout_s = timeout_s  # what was before may take as long as it likes
    pid = store_path().with_name("pid")
    if rank == 1 and how in ("SIGKILL", "SIGSTOP"):
        pid.write_text(str(os.getpid()))
        os.kill(os.getpid(), getattr(signal, how))
    other = torch.zeros(COUNT // 2 if how == "length" and rank == 1 else COUNT)
    if how == "type" and rank == 1:
        other = other.to(torch.float64)
    try:
        made.run(len(other), other.dtype, output=other)
    finally:
        if rank == 0 and how == "SIGSTOP":  # it has been waited for long enough
            os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("SIGKILL", "rank 1 closed its connection: it died or was ended|rank 1 died"),
        ("SIGSTOP", "nothing happened for 1 s"),
        ("length", "allreduce of 50000 elements .float32 sum.* but|but allreduce of 50000 elements"),
        pytest.param("type", "float64 sum", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(turning(star(4)), id="star"),
        pytest.param(turning(two_levels(2, 2)), id="levels", marks=pytest.mark.long),
    ],
)
def test_all_ranks_raise_and_the_next_group_is_served(schedule: Schedule, how: str, cause: str) -> None:
    count = len(schedule.topology.switches)
    with aggregators(count) as (made, options):
        timeout_s = 1.0 if how == "SIGSTOP" else 30.0
        found = run_ranks(4, fails, schedule, options, how, timeout_s, backend=None, may_fail=True)
        others = [one for rank, one in enumerate(found) if rank != 1 or how not in ("SIGKILL", "SIGSTOP")]
        assert {one.error for one in others} <= {"ExecutionError", "DisagreementError"}, others
        assert any(re.search(cause, one.message) for one in others), others
        assert run_ranks(4, sums, schedule, options, backend=None) == [6.0] * 4
    assert [one.served for one in made] == [2] * count


def test_strangers_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.1)
    schedule = turning(star(3))
    with aggregators(1) as (made, options):
        where = (made[0].host, made[0].port)
        silent = [socket.create_connection(where) for _ in range(3 * listener.MOST_SILENT)]
        half = socket.create_connection(where)
        half.sendall(Handshake(made[0].token, 0, 3, 0, 0, wants_memory=False).to_bytes()[:20])
        loud = socket.create_connection(where)
        loud.sendall(b"GET / HTTP/1.1\r\n" * 10)
        guess = socket.create_connection(where)
        guess.sendall(Handshake(bytes(16), 0, 3, 0, 0, wants_memory=False).to_bytes())
        nonsense = socket.create_connection(where)
        nonsense.sendall(Handshake(made[0].token, 0, 3, 0, 0, wants_memory=False).to_bytes())
        nonsense.sendall((3).to_bytes(8, "little") + b"???")
        assert run_ranks(3, sums, schedule, options, backend=None) == [3.0] * 3
        assert b"must be JSON" in nonsense.recv(1000)
        for sock in (*silent, half, loud, guess):  # ended, whether in good order or not
            sock.settimeout(90)
            with suppress(ConnectionResetError):
                assert sock.recv(1) == b""
            sock.close()
        nonsense.close()
        assert made[0].served == 1


def enlisted(options: Options) -> list[Network]:
    """Two ranks that have not connected with the switch, which knows their schedule."""
    schedule, store = turning(star(2)), dist.HashStore()
    switches = Switches(schedule.topology, addresses_of(options, schedule.topology), options)
    ranks = [Network(store, rank, 2, timeout_s=90, transport="sockets") for rank in range(2)]
    switches.enlist(ranks[0], Table.of([Choice(0, schedule)]), [bytes(8)], ONE_HOST, 10)
    return ranks


def job_of(switch: Aggregator) -> Any:
    return next(iter(switch._jobs.values()))


def test_a_rank_that_leaves_early_ends_nothing_for_those_still_to_come() -> None:
    with aggregators(1) as (made, options):
        early, late = enlisted(options)
        job = job_of(made[0])
        early.connect([2])
        early.close()
        while not job._left and not made[0].served:
            time.sleep(0.01)
        late.connect([2])
        late.close()
        while not made[0].served:
            time.sleep(0.01)
        assert job.failure is None


def test_a_rank_that_dies_before_its_answer_is_named() -> None:
    with aggregators(1) as (made, options):
        ranks = enlisted(options)
        job = job_of(made[0])
        here, there = socket.socketpair()
        there.close()
        dying = listener.PendingConnection(here)
        dying.handshake = Handshake(job.token, 1, 2, 0, 0, wants_memory=False)
        job.admit(dying)
        while not made[0].served:
            time.sleep(0.01)
        for rank in ranks:
            rank.close()
    assert job.failure == "rank 1 ended while switch s was connecting with it"


class Late:
    """A lock that others than the job get only when the job has once more looked what is there."""

    def __init__(self, job: Any) -> None:
        self.job, self.lock, self.looked = job, job._lock, threading.Semaphore(0)

    def __enter__(self) -> None:
        if threading.current_thread() is not self.job._thread:
            os.eventfd_write(self.job._wakeup, 1)
            assert self.looked.acquire(timeout=90)
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        self.looked.release()


def test_who_comes_while_the_job_takes_in_others_is_answered() -> None:
    with aggregators(1) as (made, options):
        ranks = enlisted(options)
        job = job_of(made[0])
        job._lock = Late(job)
        for rank in ranks:
            rank.connect([2])
        for rank in ranks:
            rank.close()
        while not made[0].served:
            time.sleep(0.01)
        assert job.failure is None


@contextmanager
def process(*options: str) -> Iterator[tuple[subprocess.Popen[bytes], Options]]:
    """`synth aggregate`, and the options of a group that uses it."""
    command = [sys.executable, "-m", "arborcast", "aggregate", "--listen", "127.0.0.1:0", "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        try:
            assert running.stdout is not None
            said = json.loads(running.stdout.readline())
            yield (
                running,
                Options(aggregators=((None, (said["host"], said["port"])),), aggregator_token=said["token"]),
            )
        finally:
            running.kill()


def outlives(
    rank: int, size: int, schedule: Schedule, options: Options, pid: int, how: signal.Signals
) -> str:
    """The error of the calls after the switch's process was told to end."""
    made = runner(schedule, rank, options)
    data = torch.zeros(COUNT)
    try:
        for call in count():
            made.run(COUNT, data.dtype, output=data)
            if call == 1 and rank == 0:
                os.kill(pid, how)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (signal.SIGKILL, "closed its connection"),
        pytest.param(signal.SIGTERM, "switch s: its process was told to end", marks=pytest.mark.long),
    ],
)
def test_the_end_of_a_switch_is_noticed_by_all(how: signal.Signals, why: str) -> None:
    schedule = turning(star(3))
    with process() as (running, options):
        said = run_ranks(3, outlives, schedule, options, running.pid, how, backend=None)
        assert running.wait(90) == (-how if how is signal.SIGKILL else 0)
    assert all(line.startswith("ExecutionError: rank ") for line in said), said
    assert any("switch s (127.0.0.1:" in line and why in line for line in said), said


def refused(rank: int, size: int, schedule: Schedule, options: Options, dtype: torch.dtype) -> str:
    try:
        made = runner(schedule, rank, options, 60.0)
        data = torch.zeros(COUNT, dtype=dtype)
        made.run(COUNT, dtype, output=data)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_wrong_token_is_told() -> None:
    with aggregators(1) as (made, options):
        wrong = replace(options, aggregator_token="0" * 32)
        said = run_ranks(2, refused, turning(star(2)), wrong, torch.float32, backend=None)
    assert all("hung up: ARBORCAST_AGGREGATOR_TOKEN must be the token of its process" in one for one in said)
    assert made[0].served == 0


@pytest.mark.parametrize(
    ("abilities", "dtype", "why"),
    [
        (
            Abilities(adder=Fraction(1, 2)),
            torch.float32,
            "adds 1 GB/s here, the adder makes at most 0.5",
        ),
        (Abilities(types=("int32", "float32")), torch.bfloat16, "does not add that; it adds int32, float32"),
        (Abilities(memory_bytes=1000), torch.float32, "for what is under way, and there are"),
        (Abilities(jobs=0), torch.float32, "at most 0 groups are served at a time"),
    ],
)
def test_what_is_more_than_it_can_is_refused(abilities: Abilities, dtype: Any, why: str) -> None:
    with aggregators(1, abilities=abilities) as (_, options):
        said = run_ranks(2, refused, turning(star(2)), options, dtype, backend=None)
    assert why in said[0], said
    assert said[1].startswith("ExecutionError: ")
