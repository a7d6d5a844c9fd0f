"""What an exact packing takes out before it searches: trees that are known, then those that must be grown."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.packing.packer import Packer, Taken
from arborcast.synth.packing.routed import reverse_links
from arborcast.synth.packing.warm_start import (
    Stump,
    cheapest_root,
    grown,
    largest_part,
    shares_of,
    started_at,
)

GROWING_BATCH = 32
"""Stumps that are grown before the cuts are asked."""
ROUNDS = 3
"""Times that a proposal of any root is tried, each time with what the cuts have said before."""


def take_first(packer: Packer, stumps: Sequence[Stump]) -> None:
    """Take out as much of the trees as every cut allows; notes the parts in `packer.first_parts`."""
    if not stumps:
        return
    reverse = reverse_links(packer.graph)
    waiting = [
        (largest_part(stump) if stump.free and not stump.is_whole else stump, units)
        for stump, units in zip(stumps, shares_of(stumps, packer.demand), strict=True)
        if units
    ]
    whole = [entry for entry in waiting if entry[0].is_whole]
    broken = [entry for entry in waiting if not entry[0].is_whole]
    for entries, size in ((whole, max(1, len(whole))), (broken, GROWING_BATCH)):
        group = entries
        # What a cut has limited is free to start elsewhere, once the cut is known.
        for _ in range(ROUNDS if any(stump.free for stump, _ in group) else 1):
            left = []
            for first in range(0, len(group), size):
                left += _take_batch(packer, group[first : first + size], reverse)
            if len(left) == len(group):
                break
            group = left
        packer.first_parts.append(Fraction(packer.total - int(packer.demand.sum()), packer.total))


def _take_batch(
    packer: Packer, entries: Sequence[tuple[Stump, int]], reverse: Ints
) -> list[tuple[Stump, int]]:
    """Take out as much of the stumps as fits; returns what of them is left to do."""
    remaining, demand = packer.remaining.copy(), packer.demand.copy()
    proposed: list[Taken] = []
    source: list[int] = []
    left = [units for _, units in entries]
    for place, (stump, _) in enumerate(entries):
        if packer.deadline.has_passed:
            break
        while left[place]:
            found = _placed(packer, stump, left[place], remaining, demand, reverse)
            if found is None:
                break
            remaining -= found.times * found.uses
            demand[found.root] -= found.times
            left[place] -= found.times
            proposed.append(found)
            source.append(place)
    if proposed:
        allowed = packer.cuts.allow(
            packer.remaining,
            packer.demand,
            [tree.uses for tree in proposed],
            [tree.root for tree in proposed],
            [tree.times for tree in proposed],
        )
        for tree, times, place in zip(proposed, allowed, source, strict=True):
            left[place] += tree.times - times
            if times:
                packer.take(tree, times)
    return [(stump, units) for (stump, _), units in zip(entries, left, strict=True) if units]


def _placed(
    packer: Packer, stump: Stump, units: int, remaining: Ints, demand: Ints, reverse: Ints
) -> Taken | None:
    """The stump as a tree that fits what is left, as often as it does; None where it does not."""
    lengths = packer.lengths(remaining) if stump.free or not stump.is_whole else remaining
    if stump.free:
        root = cheapest_root(stump, lengths, reverse, demand > 0)
        if root < 0:
            return None
        stump = started_at(stump, root, reverse)
        if (stump.routes.links < 0).any():
            return None  # a way that only leads in one direction
    routes = stump.routes
    if not stump.is_whole:
        parent_cost = packer.hop_price * packer.graph.hops(remaining > 0, stump.root)
        whole = grown(stump, lengths, parent_cost)
        if whole is None:
            return None
        routes = whole
    uses = routes.uses()
    used = uses > 0
    times = min(units, int(demand[stump.root]), int((remaining[used] // uses[used]).min()))
    return Taken(stump.root, times, routes, uses) if times > 0 else None
