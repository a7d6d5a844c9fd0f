"""Strangers at the door while groups are made: many connections, garbage, half a handshake, old tokens."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from arborcast.backends.transport.handshake import Handshake
from tests.support.faults import PATIENCE_S, begin, launch
from tests.support.ranks import store_path
from tests.support.waiting import until

RANKS = 4
GROUPS = 2
MOST_BETWEEN = 500
"""Connections that strangers make before a group is made."""


def _attack(
    where: list[tuple[str, int, str]], seed: int, counted: Path, has_ended: Callable[[], bool]
) -> None:
    """Connect again and again, and keep as many connections as descriptors allow."""
    chance = random.Random(seed)
    kept: list[socket.socket] = []
    made = 0
    old = Handshake(bytes(range(16)), 1, 0, 1 << 20, 2, wants_memory=True).to_bytes()
    said = [b"", b"\0" * 5, old, old[:20], b"GET / HTTP/1.1\r\n" * 40, os.urandom(200)]
    while not has_ended():
        host, port, name = chance.choice(where)
        with contextlib.suppress(OSError):
            if name and chance.random() < 0.5:
                stranger = socket.socket(socket.AF_UNIX)
                stranger.settimeout(1)
                stranger.connect(f"\0{name}")
            else:
                stranger = socket.create_connection((host, port), timeout=1)
            kept.append(stranger)
            made += 1
            counted.write_text(str(made))
            stranger.sendall(chance.choice(said))
        if len(kept) > 500:
            for at in range(0, 250):
                kept[at].close()
            del kept[:250]
        # So that it is many connections and not all of a processor, though nobody may take them in at once.
        time.sleep(0.0005)


def _under_attack(rank: int, size: int, connections: int) -> float:
    """The sums of groups that are made while strangers come; every rank has a stranger of its own."""
    store = dist.FileStore(f"{store_path()}-where", size)
    begin(rank, size, "first", PATIENCE_S)
    reception = dist.group.WORLD._communicator.member.network._reception  # type: ignore[union-attr]
    store.set(f"{rank}", f"{reception.doors[0][0]} {reception.doors[0][1]} {reception.name}")
    found = [store.get(str(other)).decode().split() for other in range(size)]
    where = [(host, int(port), name) for host, port, name in found]
    counted = [store_path().with_name(f"counted-{other}") for other in range(size)]
    parent = os.getpid()
    stranger = os.fork()
    if not stranger:
        _attack(where, rank, counted[rank], lambda: os.getppid() != parent)
        os._exit(0)
    try:
        total = 0.0
        groups = max(GROUPS, connections // MOST_BETWEEN)
        for salt in range(groups):
            # How many groups there are says nobody's clock, and those that came before stay connected.
            until(lambda come=(salt + 1) * connections // groups: _made(counted) >= come)  # type: ignore[misc]
            group = dist.new_group(backend="synth")  # the listener stays where it is
            tensor = torch.full((1000,), float(rank + salt))
            dist.all_reduce(tensor, group=group)
            assert tensor.eq(sum(range(size)) + size * salt).all()
            total += tensor[0].item()
            dist.destroy_process_group(group)
        return total / groups
    finally:
        os.kill(stranger, signal.SIGKILL)
        os.waitpid(stranger, 0)


def _made(counted: list[Path]) -> int:
    """Connections of all strangers so far."""
    return sum(int(file.read_text() or 0) for file in counted if file.exists())


@pytest.mark.parametrize("connections", [100, pytest.param(5000, marks=pytest.mark.long)])
def test_groups_are_made_and_sums_are_right_while_strangers_come(connections: int) -> None:
    results = launch(
        _under_attack, connections, ranks=RANKS, transport="auto", has_group=False, group_timeout_s=PATIENCE_S
    )
    assert all(isinstance(result, float) and result >= 6.0 for result in results), results
