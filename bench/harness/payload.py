"""What a rank gives to a collective and must get of it: values by rank and index, every element checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        expected: the output after.

    Args:
        kind: of the collective.
        elements: of the whole buffer.
        rank: this one.
        ranks: their number.
        root: of a broadcast.
    """

    def __init__(self, kind: Kind, elements: int, rank: int, ranks: int, root: int | None = 0) -> None:
        import torch

        whole = torch.arange(elements, dtype=torch.float32).remainder_(PERIOD)
        block = slice(rank * elements // ranks, (rank + 1) * elements // ranks)
        summed = whole * ranks + ranks * (ranks - 1) // 2
        self.given: Tensor = torch.empty(0)
        self.expected: Tensor = whole
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
            case _:
                raise NotImplementedError(f"benches have no data for {kind}")

    def check(self, output: Tensor, what: str) -> None:
        """Raise where any element is not what it must be.

        Raises:
            RuntimeError: begins with `what`, and names the first such element.
        """
        import torch

        if not torch.equal(output, self.expected):
            wrong = int((output != self.expected).nonzero()[0])
            due, got = self.expected[wrong].item(), output[wrong].item()
            raise RuntimeError(f"{what}: element {wrong} must be {due:g}, got {got:g}")
