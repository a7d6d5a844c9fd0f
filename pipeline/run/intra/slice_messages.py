"""What a divided stage exchanges with the stages before and behind.

stage 0, mesh of 2          stage 1, mesh of 3
rank 0  entries [0, 6)  ->  rank 2  [0, 4)            every rank gets its own part of a tensor once,
rank 1  entries [6, 12) ->  rank 3  [4, 6) [6, 8)     from the ranks that have it; gradients go the
->  rank 4  [8, 12)           same way back (`sharding.slices.messages`)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from arborcast.pipeline.meshes import Mesh
from arborcast.pipeline.run.boundary import TensorSpec
from arborcast.pipeline.run.stage_messages import PeerSlice, SlicesOf
from arborcast.pipeline.sharding import graph, slices
from arborcast.pipeline.sharding.slices import parted_dim


@dataclass(frozen=True)
class CrossingTensor:
    """One tensor that crosses a boundary.

    Attributes:
        tensor: as the graph has it.
        dtype: as traced.
        needs_gradient: whether its gradient crosses in the other direction.
    """

    tensor: graph.Tensor
    dtype: torch.dtype
    needs_gradient: bool

    @property
    def spec(self) -> TensorSpec:
        """As messages have it, by entries along the dimension that is divided."""
        dim = parted_dim(self.tensor)
        shape = tuple(1 if at == dim else size for at, size in enumerate(self.tensor.shape))
        return TensorSpec(shape, self.dtype, dim, self.needs_gradient)

    def bytes_of(self, senders: Mesh, receivers: Mesh) -> int:
        """What crosses of it for a microbatch, as traced."""
        dim = parted_dim(self.tensor)
        each = self.tensor.size_bytes // (1 if dim is None else self.tensor.shape[dim])
        ways = [(senders, receivers), *([(receivers, senders)] if self.needs_gradient else [])]
        return sum(each * (it.stop - it.start) for way in ways for it in slices.messages(self.tensor, *way))


def slices_of(tensors: Sequence[graph.Tensor], senders: Mesh, receivers: Mesh, rank: int) -> SlicesOf:
    """What a rank of either mesh exchanges of tensors that cross, the same for all microbatches."""
    mesh = senders if rank in senders.ranks else receivers
    found: defaultdict[tuple[int, bool], list[PeerSlice]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        first, _ = slices.part_of(tensor, mesh, mesh.ranks.index(rank))
        for back, ends in ((False, (senders, receivers)), (True, (receivers, senders))):
            for it in slices.messages(tensor, *ends):
                if rank in (it.src, it.dst):
                    peer = it.dst if it.src == rank else it.src
                    found[number, back].append(PeerSlice(peer, it.start - first, it.stop - first))
    return lambda number, _, back: found[number, back]
