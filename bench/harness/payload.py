"""What a rank gives to a collective and must get of it: values by rank and index, every element checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from arborcast.synth.collective import Kind

if TYPE_CHECKING:
    from torch import Tensor

PERIOD = 1021
"""Of the values: their sums are exact in float32, whatever the order in which they are made."""


class Payload:
    """The data of one rank.

    Attributes:
        given: what it gives beside the output; empty where the output holds it.
        initial: the output before.
        expected: the output after; None where it may be anything, as beside the root of a reduce.
        blocks: elements for each rank, and from each, of an alltoall.

    Args:
        kind: of the collective.
        elements: of the whole buffer.
        rank: this one.
        ranks: their number.
        root: of kinds that have one.
    """

    def __init__(self, kind: Kind, elements: int, rank: int, ranks: int, root: int | None = 0) -> None:
        import torch

        whole = torch.arange(elements, dtype=torch.float32).remainder_(PERIOD)
        block = slice(rank * elements // ranks, (rank + 1) * elements // ranks)
        summed = whole * ranks + ranks * (ranks - 1) // 2
        self.given: Tensor = torch.empty(0)
        self.expected: Tensor | None = whole
        self.blocks = uneven_blocks(elements, rank, ranks)
        match kind:
            case Kind.ALLREDUCE:
                self.initial, self.expected = whole + rank, summed
            case Kind.BROADCAST:
                self.initial = whole if rank == root else whole + (rank + 1)
            case Kind.ALLGATHER:
                self.given, self.initial = whole[block].clone(), torch.full_like(whole, -1.0)
            case Kind.REDUCE_SCATTER:
                self.given, self.expected = whole + rank, summed[block].clone()
                self.initial = torch.full_like(self.expected, -1.0)
            case Kind.REDUCE:
                self.initial, self.expected = whole + rank, summed if rank == root else None
            case Kind.GATHER:
                self.given, self.expected = whole[block].clone(), whole if rank == root else torch.empty(0)
                self.initial = torch.full_like(self.expected, -1.0)
            case Kind.SCATTER:
                self.given, self.expected = whole if rank == root else torch.empty(0), whole[block].clone()
                self.initial = torch.full_like(self.expected, -1.0)
            case Kind.ALLTOALL:  # from rank s a block of consecutive numbers from s on
                self.given = torch.cat([whole[:count] + rank for count in self.blocks[0]])
                self.expected = torch.cat([whole[:count] + s for s, count in enumerate(self.blocks[1])])
                self.initial = torch.full_like(whole, -1.0)
            case _:
                raise NotImplementedError(f"benches have no data for {kind}")

    def check(self, output: Tensor, what: str) -> None:
        """Raise where any element is not what it must be.

        Raises:
            RuntimeError: begins with `what`, and names the first such element.
        """
        import torch

        if self.expected is not None and not torch.equal(output, self.expected):
            wrong = int((output != self.expected).nonzero()[0])
            due, got = self.expected[wrong].item(), output[wrong].item()
            raise RuntimeError(f"{what}: element {wrong} must be {due:g}, got {got:g}")


def torch_call(
    kind: Kind, elements: int, root: int | None = 0, group: Any = None, **how: Any
) -> Callable[[Tensor, Tensor], Any]:
    """As `backends.measure.torch_call`, of a buffer of so many elements; blocks of an alltoall differ."""
    import torch.distributed as dist

    from arborcast.backends.measure.torch_call import torch_call as call_of

    blocks = uneven_blocks(elements, dist.get_rank(group), dist.get_world_size(group))
    return call_of(kind, root, group=group, blocks=blocks, **how)


def uneven_blocks(elements: int, rank: int, ranks: int) -> tuple[list[int], list[int]]:
    """How many elements a rank sends to each, and gets from each: 1, 2, ... times as many as the least.

    Which is the longest differs from rank to rank; what is left over stays where it is.
    """
    unit = elements // (ranks * (ranks + 1) // 2)
    sent = [unit * (1 + (rank + other) % ranks) for other in range(ranks)]
    sent[rank] += elements - sum(sent)
    return sent, list(sent)  # as many to each rank as from it
