"""The independent checker of implicit schedules: on the representatives, or on every chunk they stand for.

That a translation maps the fabric and the collective to themselves is the proof that what holds for a
representative holds for all of its images. The translations are checked anew
(`synth.verification.group_check`); with `translates` that proof is not relied on
(`synth.verification.every_translate`). The replay of a chunk is that of `synth.verification.replay`, the
check of the bound that of `synth.verification.verdict`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import numpy as np

from arborcast.synth.collective import Block, Kind
from arborcast.synth.features import check_features
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Chunk
from arborcast.synth.topology import Hop, Vertex
from arborcast.synth.verification.group_check import CheckedGroup, check_group
from arborcast.synth.verification.replay import Errors, check_replay
from arborcast.synth.verification.switch_use import SwitchUse, check_switch_limits, check_switch_use
from arborcast.synth.verification.verdict import Verdict, check_bound, describe, describe_overload


def verify_implicit(schedule: ImplicitSchedule, *, translates: bool = False, max_errors: int = 20) -> Verdict:
    """Check the translations, replay chunks, recount links, recompute the rate and the bound.

    Args:
        schedule: from any method or file.
        translates: replay every image of every chunk and count every link by itself. Objections then number
            chunks as `ImplicitSchedule.expand` does; otherwise as the representatives are.
        max_errors: how many objections to spell out.

    Returns:
        The verdict, as `synth.verify` gives it for the expanded schedule; without loads and rate where the
        translations are none, since nothing else can be said then.

    Time is linear in the hops of the representatives, or with `translates` in those of all chunks.
    """
    check_features(schedule.topology, "verifier")
    errors = Errors(max_errors)
    group = check_group(schedule, errors)
    if group is None:
        return Verdict(False, Fraction(0), Fraction(0), errors.all(), {})
    _check_owners(schedule, group, errors)
    if translates:
        from arborcast.synth.verification.every_translate import (
            check_every_translate,  # compiled kernels come with it
        )

        loads, sums, trees = check_every_translate(schedule, group, errors)
    else:
        _check_shares(schedule, group, errors)
        check_replay(schedule, errors)
        sums, trees = _sums_and_trees(schedule, group, check_switch_use(schedule, errors))
        loads = _link_loads(schedule, group)
    busiest = _check_links(schedule, group, loads, errors)
    slowest = max(busiest, check_switch_limits(schedule, sums, trees, errors))
    rate = 1 / slowest if slowest else Fraction(0)
    if rate > schedule.rate:
        errors.add(f"rate: {schedule.rate} GB/s declared, {rate} GB/s recomputed")
    check_bound(schedule, rate, errors)
    lines = errors.all()
    return Verdict(not lines, rate, busiest * schedule.rate, lines, loads)


def _check_owners(schedule: ImplicitSchedule, group: CheckedGroup, errors: Errors) -> None:
    """One representative per orbit, so that the number of a moved chunk says whose it is."""
    for index, chunk in enumerate(schedule.chunks):
        first = group.vertex_orbit[chunk.owner]
        if chunk.owner != first:
            errors.add(
                f"chunk {index}: owner must be {first}, the first rank of its orbit, got {chunk.owner}"
            )


def _check_shares(schedule: ImplicitSchedule, group: CheckedGroup, errors: Errors) -> None:
    """The images of the chunks are the whole of every block that must move, and nothing else.

    Of the images of a chunk exactly one belongs to each rank of its owner's orbit: the blocks of an orbit's
    first rank speak for those of all.
    """
    collective = schedule.collective
    required = dict(_required_blocks(schedule, group))
    copies = group.order if collective.kind is Kind.ALLREDUCE else 1  # they are all of one block
    scale = math.lcm(*(chunk.share.denominator for chunk in schedule.chunks))
    found = dict.fromkeys(required, 0)
    for index, chunk in enumerate(schedule.chunks):
        block = _block_of(schedule, chunk)
        if block not in found:
            errors.add(f"chunk {index}: {describe(collective)} moves no block with {block}")
            continue
        found[block] += chunk.share.numerator * (scale // chunk.share.denominator) * copies
    for block, share in required.items():
        if found[block] * share.denominator != share.numerator * scale:
            errors.add(
                f"block with {block}: shares must add up to {share}, got {Fraction(found[block], scale)}"
            )


def _block_of(schedule: ImplicitSchedule, chunk: Chunk) -> Block:
    owner = None if schedule.collective.kind is Kind.ALLREDUCE else chunk.owner
    return Block(owner, chunk.target, chunk.demand)


def _required_blocks(schedule: ImplicitSchedule, group: CheckedGroup) -> Iterator[tuple[Block, Fraction]]:
    """The blocks of the first rank of each orbit, with the share of the buffer that each is."""
    taking_part = schedule.collective.ranks
    share = Fraction(1, len(taking_part))
    if schedule.collective.kind is Kind.ALLREDUCE:
        yield Block(None), Fraction(1)
        return
    for owner in sorted(set(group.vertex_orbit[list(taking_part)].tolist())):
        if schedule.collective.kind is Kind.ALLTOALL:
            yield from ((Block(owner, target), share) for target in taking_part if target != owner)
        else:
            yield Block(owner), share


def _link_loads(schedule: ImplicitSchedule, group: CheckedGroup) -> dict[Hop, Fraction]:
    """The share of the buffer over each link: the images of a hop are spread evenly over its link's orbit."""
    links = schedule.topology.links
    first_of = {
        (link.src, link.dst): first for link, first in zip(links, group.link_orbit.tolist(), strict=True)
    }
    scale = math.lcm(*(chunk.share.denominator for chunk in schedule.chunks))
    weight = [chunk.share.numerator * (scale // chunk.share.denominator) for chunk in schedule.chunks]
    total: dict[int, int] = {}
    for transfer in schedule.transfers:
        for hop in transfer.hops:
            first = first_of[hop]
            total[first] = total.get(first, 0) + weight[transfer.chunk]
    sizes = np.bincount(group.link_orbit, minlength=len(links)).tolist()
    load = {
        first: Fraction(amount * group.order, scale * sizes[first])
        for first, amount in total.items()
        if amount
    }
    return {hop: load[first] for hop, first in first_of.items() if first in load}


def _sums_and_trees(
    schedule: ImplicitSchedule, group: CheckedGroup, uses: Sequence[SwitchUse]
) -> tuple[dict[Vertex, Fraction], dict[Vertex, int]]:
    """The share that each switch adds and its number of trees: images are spread evenly over an orbit."""
    sums: dict[int, Fraction] = {}
    for use in uses:
        if use.adds:
            first = int(group.vertex_orbit[use.switch])
            sums[first] = sums.get(first, Fraction(0)) + schedule.chunks[use.chunk].share
    trees: dict[int, int] = {}
    for switch in (switch for switch, _ in {(use.switch, use.chunk) for use in uses}):
        first = int(group.vertex_orbit[switch])
        trees[first] = trees.get(first, 0) + 1
    sizes = np.bincount(group.vertex_orbit).tolist()
    members = [(v, first) for v, first in enumerate(group.vertex_orbit.tolist()) if first in trees]
    return (
        {v: sums[first] * group.order / sizes[first] for v, first in members if first in sums},
        {v: trees[first] * group.order // sizes[first] for v, first in members},
    )


def _check_links(
    schedule: ImplicitSchedule, group: CheckedGroup, loads: Mapping[Hop, Fraction], errors: Errors
) -> Fraction:
    """Object to what carries too much at the declared rate, an orbit's links of one load in one line.

    Returns:
        The longest time that a link is busy, in seconds per GB of the buffer.
    """
    alike: dict[tuple[int, int, int], tuple[Hop, int]] = {}  # the first link of each kind, and how many
    for link, orbit in zip(schedule.topology.links, group.link_orbit.tolist(), strict=True):
        hop = (link.src, link.dst)
        if hop in loads:
            kind = orbit, *loads[hop].as_integer_ratio()
            first, count = alike.get(kind, (hop, 0))
            alike[kind] = first, count + 1
    busiest = Fraction(0)
    for hop, count in alike.values():
        load = loads[hop]
        bandwidth = schedule.topology.bandwidth[hop]
        busiest = max(busiest, load / bandwidth)
        if load * schedule.rate > bandwidth:
            others = f" (and {count - 1} more links)" if count > 1 else ""
            errors.add(describe_overload(schedule, hop, load, others))
    return busiest
