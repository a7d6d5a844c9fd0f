"""From the finish of a collective that was broken off to the program of a rank that holds what it holds.

What a rank begins with lies where it came to lie: in its input, in its output, or in what was scratch, which
is called `RING` here and stays as it is. It is first put together: sums that are used are added up, in the
output where the rank must have the result in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from arborcast.backends.lowering.layout import Buffer, Layout, Place, Slice
from arborcast.backends.lowering.lower import Joining, lower_laid_out
from arborcast.backends.lowering.program import Program
from arborcast.synth.collective import Kind
from arborcast.synth.unfinished import Finish, Mask, Part

Locate = Callable[[int, int, int, Mask], tuple[Slice, ...]]
"""Where this rank holds a sum of some elements of a chunk: chunk, start, stop, contributors."""


@dataclass(frozen=True)
class _PartLayout(Layout):
    """Where the parts of a finish lie on one rank, by their numbers.

    Attributes:
        homes: what the rank begins with, once it is put together.
        finals: where results must be.
    """

    homes: Mapping[int, Slice]
    finals: Mapping[int, Slice]

    def initial(self, rank: int, chunk: int) -> Slice | None:
        """Of a part."""
        return self.homes.get(chunk)

    def final(self, rank: int, chunk: int) -> Slice | None:
        """Of a part."""
        return self.finals.get(chunk)

    def kept(self, rank: int) -> tuple[Slice, Slice] | None:
        """An allgather's own block is among the parts."""
        return None if self.collective.kind is Kind.ALLGATHER else super().kept(rank)


def lower_finish(finish: Finish, layout: Layout, rank: int, locate: Locate) -> Program:
    """The program of one rank.

    Args:
        finish: a right one.
        layout: of the chunks of the schedule that was broken off, all of them.
        rank: this one.
        locate: at least one place for each sum that the rank begins with.
    """
    homes: dict[int, Slice] = {}
    finals: dict[int, Slice] = {}
    places: dict[int, Place] = {}
    joinings: list[Joining] = []
    for number, part in enumerate(finish.parts):
        chunk = finish.state.lots[part.lot].chunk
        place = layout.places[chunk]
        places[number] = Place(
            place.block, place.start + part.start, place.start + part.stop, place.owner, place.target
        )
        whole = layout.final(rank, chunk)
        final = None
        if whole is not None:
            final = finals[number] = Slice(whole.buffer, whole.start + part.start, whole.start + part.stop)
        if rank in part.used:
            homes[number] = _put_together(part, chunk, rank, final, locate, joinings)
    transfers = [
        (index, transfer)
        for index, transfer in enumerate(finish.transfers)
        if rank in (transfer.src, transfer.dst)
    ]
    laid_out = _PartLayout(layout.collective, layout.count, layout.block, places, homes, finals)
    return lower_laid_out(laid_out, rank, transfers, joinings)


def _put_together(
    part: Part, chunk: int, rank: int, final: Slice | None, locate: Locate, joinings: list[Joining]
) -> Slice:
    """Where what a rank begins with is, once what is noted here has been done."""
    places = [locate(chunk, part.start, part.stop, mask) for mask in part.used[rank]]
    if final is not None:
        at = next((index for index, those in enumerate(places) if final in those), None)
        into = final
        if at is None:
            joinings.append(Joining(places[0][0], into, adds=False))
            at = 0
    else:
        # Inputs stay as they are; of two sums one has been added up elsewhere.
        writable = [index for index, those in enumerate(places) if those[0].buffer is not Buffer.INPUT]
        at = writable[0] if writable else 0
        into = places[at][0]
    joinings += [Joining(those[0], into, adds=True) for index, those in enumerate(places) if index != at]
    return into
