"""How ranks make memory together, with torch's symmetric memory drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from arborcast.backends.device.memory import PeerRanks


def test_symmetric_memory_without_a_group_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses a name that it knows, and one that it does not."""
    names: dict[str, tuple[int, int, Any]] = {}

    class Drawn:
        @staticmethod
        def set_group_info(name: str, rank: int, size: int, store: Any) -> None:
            assert name not in names
            names[name] = rank, size, store

        @staticmethod
        def rendezvous(own: torch.Tensor, name: str) -> tuple[int, str]:
            assert name in names
            return own.data_ptr(), name

    monkeypatch.setattr(torch._C._distributed_c10d, "_SymmetricMemory", Drawn)
    store, own = HashStore(), torch.zeros(3)
    ranks = PeerRanks.by_store(store, "job 7", 1, 4, lambda said: [said])
    assert names == {}
    for _ in range(2):
        assert ranks.rendezvous(own) == (own.data_ptr(), "job 7")
    assert names == {"job 7": (1, 4, store)}
