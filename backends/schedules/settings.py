"""What all ranks of a group must be told alike, and what they find out together before they begin."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from arborcast.backends.tensors.torch_compat import Store
from arborcast.backends.transport.addresses import boot_id
from arborcast.synth.errors import InputError


def compare_settings(store: Store, rank: int, size: int, settings: Mapping[str, object] | Exception) -> None:
    """Refuse to begin with ranks that would decide otherwise; one rank compares and tells all.

    So nobody goes on and waits for a rank that was refused.

    Args:
        store: of the group.
        rank: this one.
        size: ranks of the group.
        settings: values that JSON can hold; or why this rank has none, which it is to raise itself.

    Raises:
        InputError: a rank differs from rank 0, or has no settings; names the setting and both values, or says
            why it has none. The same on all ranks.
    """
    said = {"refused": str(settings)} if isinstance(settings, Exception) else dict(settings)
    store.set(f"settings/{rank}", json.dumps(said))
    if rank == 0:
        # All of them first: whoever leaves at once would break connections that others are still making.
        everybody = [json.loads(store.get(f"settings/{other}")) for other in range(size)]
        store.set("settings", _difference(everybody))
    difference = store.get("settings").decode()
    if difference:
        raise InputError(difference)


def _difference(everybody: Iterable[Mapping[str, object]]) -> str:
    """The first setting that is not as rank 0's; empty where all are alike."""
    first: Mapping[str, object] = {}
    for rank, settings in enumerate(everybody):
        if "refused" in settings:
            return f"rank {rank}: {settings['refused']}"
        first = first or settings
        for name, value in first.items():
            if settings[name] != value:
                return (
                    f"{name}: must be the same on all ranks, got {_shown(value)} on rank 0 "
                    f"and {_shown(settings[name])} on rank {rank}"
                )
    return ""


def _shown(value: object) -> object:
    return "nothing" if value is None else value


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
