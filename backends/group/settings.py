"""What all ranks of a group must be told alike, and what they find out together before they begin."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path

from backends.channels.addresses import boot_id
from backends.torch_names import Store
from synth.errors import InputError


def compare_settings(store: Store, rank: int, settings: Mapping[str, object]) -> None:
    """Refuse to begin with ranks that would decide otherwise.

    Args:
        store: of the group.
        rank: this one.
        settings: values that JSON can hold.

    Raises:
        InputError: this rank differs from rank 0; names the setting and both values.
    """
    if rank == 0:
        store.set("settings", json.dumps(settings))
        return
    of_first = json.loads(store.get("settings"))
    for name, value in json.loads(json.dumps(settings)).items():
        if value != of_first[name]:
            raise InputError(
                f"{name}: must be the same on all ranks, got {value} on rank {rank} "
                f"and {of_first[name]} on rank 0"
            )


def are_on_one_host(store: Store, rank: int, size: int) -> bool:
    """Whether all ranks run under one kernel and in one network; the same answer on all of them."""
    if rank:
        store.set(f"host/{rank}", _host())
        return bool(store.get("one host") == b"yes")
    here = _host().encode()
    answer = all(store.get(f"host/{other}") == here for other in range(1, size))
    store.set("one host", "yes" if answer else "no")
    return answer


def _host() -> str:
    network = Path("/proc/self/ns/net")
    inside = network.readlink() if network.is_symlink() else ""
    return f"{boot_id() or socket.gethostname()} {inside}"
