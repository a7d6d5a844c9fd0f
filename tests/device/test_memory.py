"""How ranks make memory together, with torch's symmetric memory drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from arborcast.backends.device.memory import PeerRanks


def test_symmetric_memory_finds_its_ranks_by_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own names of groups: it knows the ranks of one as long as somebody keeps the group."""
    c10d: Any = torch._C._distributed_c10d

    class Drawn:
        @staticmethod
        def rendezvous(own: torch.Tensor, name: str) -> tuple[int, int, int]:
            group = c10d._resolve_process_group(name)
            return own.data_ptr(), group.rank(), group.size()

    monkeypatch.setattr(c10d, "_SymmetricMemory", Drawn)
    own = torch.zeros(3)
    ranks = PeerRanks.by_store(HashStore(), "job 7", 1, 4, lambda said: [said])
    with pytest.raises(RuntimeError, match="job 7"):
        c10d._resolve_process_group("job 7")  # nothing is made before it is needed
    for _ in range(2):
        assert ranks.rendezvous(own) == (own.data_ptr(), 1, 4)
