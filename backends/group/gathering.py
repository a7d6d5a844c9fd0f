"""What gloo does for calls that schedules do not serve, by allgathers: where gloo cannot connect all ranks.

Every rank gets what all have and takes what is its own, which moves as many times more as there are ranks.
Such calls are rare: sparse tensors, sums of complex numbers, parts of several sizes or types.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from arborcast.backends.tensors.torch_compat import split
from arborcast.backends.tensors.torch_reduction import combined
from arborcast.synth.errors import InputError


class Gathering:
    """The methods of gloo by which a group delegates, with gloo's arguments; each returns when all is done.

    Args:
        rank: this one.
        size: ranks of the group.
        gather: an allgather of flat bytes.
    """

    def __init__(self, rank: int, size: int, gather: Callable[[Tensor, Tensor], None]) -> None:
        self._rank, self._size, self._gather = rank, size, gather

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> None:
        """Of tensors in place; so are the others that have no outputs."""
        for mine, theirs in zip(tensors, zip(*self._all(list(tensors)), strict=True), strict=True):
            mine.copy_(combined(theirs, options.reduceOp))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], options: Any) -> None:
        """On the root alone."""
        everything = self._all(list(tensors))
        if self._rank == options.rootRank:
            for mine, theirs in zip(tensors, zip(*everything, strict=True), strict=True):
                mine.copy_(combined(theirs, options.reduceOp))

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> None:
        """From the root."""
        _copy(tensors, self._all(list(tensors) if self._rank == options.rootRank else [])[options.rootRank])

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any) -> None:
        """Of each input a list of outputs, by rank."""
        for into, theirs in zip(outputs, zip(*self._all(list(inputs)), strict=True), strict=True):
            _copy(into, theirs)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any
    ) -> None:
        """Of each rank a list of outputs, by input."""
        for into, theirs in zip(outputs, self._all(list(inputs)), strict=True):
            _copy(into, theirs)

    def _allgather_base(self, output: Tensor, given: Tensor, options: Any) -> None:
        _copy(output.view(-1).chunk(self._size), [theirs.view(-1) for (theirs,) in self._all([given])])

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any) -> None:
        """On the root alone, a list by rank."""
        everything = self._all(list(inputs))
        if self._rank == options.rootRank:
            if len(outputs) != 1:
                raise InputError(
                    f"gather: must be of one tensor where it goes by allgathers, got {len(outputs)}"
                )
            _copy(outputs[0], [theirs for (theirs,) in everything])

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], options: Any) -> None:
        """Of the root's list, by rank."""
        given = self._all(list(inputs[0]) if self._rank == options.rootRank else [])[options.rootRank]
        _copy(outputs, [given[self._rank]])

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], options: Any
    ) -> None:
        """Of lists by rank."""
        everything = self._all(list(inputs[0]))
        _copy(outputs, [combined([theirs[self._rank] for theirs in everything], options.reduceOp)])

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, options: Any) -> None:
        parts = [theirs.view(-1).chunk(self._size)[self._rank] for (theirs,) in self._all([given])]
        output.view(-1).copy_(combined(parts, options.reduceOp))

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any) -> None:
        """Of lists by rank to lists by rank."""
        _copy(outputs, [theirs[self._rank] for theirs in self._all(list(inputs))])

    def alltoall_base(
        self, output: Tensor, given: Tensor, expected: Sequence[int], sent: Sequence[int], options: Any
    ) -> None:
        """The same of rows of one tensor."""

        def parts(whole: Tensor, lengths: Sequence[int]) -> list[Tensor]:
            return list(split(whole, list(lengths)) if lengths else whole.chunk(self._size))

        self.alltoall(parts(output, expected), parts(given, sent), options)

    def _all(self, mine: list[Tensor]) -> list[list[Tensor]]:
        """The tensors of all ranks; as `torch.save` writes them, so that reading runs nothing of a peer's."""
        written = io.BytesIO()
        torch.save(mine, written)
        data = bytearray(written.getbuffer())
        lengths = torch.empty(self._size, dtype=torch.int64)
        self._gather(lengths.view(torch.uint8), torch.tensor([len(data)]).view(torch.uint8))
        longest = int(lengths.max())
        whole = torch.empty(self._size * longest, dtype=torch.uint8)
        self._gather(whole, torch.frombuffer(data.ljust(longest), dtype=torch.uint8))
        parts = zip(whole.view(self._size, longest), lengths.tolist(), strict=True)
        return [
            torch.load(io.BytesIO(part[:length].numpy().tobytes()), weights_only=True)
            for part, length in parts
        ]


def _copy(into: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    for output, tensor in zip(into, given, strict=True):
        output.copy_(tensor)
