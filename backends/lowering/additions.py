"""The order in which ranks add: whether a sum has the same bits on all of them.

Adding floating-point numbers in another order gives other bits, and replicas of a model that add in different
orders drift apart. Two sums are alike where the same pairs were added all the way down, in either order of a
pair. The order is that of `backends.lowering.lower`, stated again here: what a rank has, then what a step
brings in the order of its transfers. What comes before the rank's last send of the step is added together,
in the order of ranks if any of it is from a rank that is sent a summand; what comes later one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter, itemgetter

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.schedule import Transfer


def adds_alike(schedule: AnySchedule) -> bool:
    """Whether all ranks that get a sum add in the same order, so that all get the same bits.

    Of an implicit schedule the representatives are looked at. The images of three ranks that exchange stand
    in an order of their own, so that such sums count as different there.
    """
    if schedule.collective.kind is not Kind.ALLREDUCE:
        return True  # of all other sums only one rank gets each
    of_chunk: list[list[Transfer]] = [[] for _ in schedule.chunks]
    for transfer in schedule.transfers:
        of_chunk[transfer.chunk].append(transfer)
    is_implicit = isinstance(schedule, ImplicitSchedule)
    return all(_is_alike(schedule.collective, transfers, is_implicit) for transfers in of_chunk)


def _is_alike(collective: Collective, transfers: Sequence[Transfer], is_implicit: bool) -> bool:
    """Whether all ranks end with one expression of one chunk; expressions are known by numbers."""
    held = {rank: rank for rank in collective.ranks}
    sums: dict[tuple[int, int], int] = {}
    for _, step in groupby(transfers, key=attrgetter("step")):
        together = list(step)
        before = dict(held)
        last_send = {transfer.src: number for number, transfer in enumerate(together)}
        given = {(transfer.src, transfer.dst) for transfer in together if transfer.reduce}
        batches: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        for number, transfer in enumerate(together):
            # One batch for all that the last send waits for, one for each that comes later.
            batches[transfer.dst, max(number, last_send.get(transfer.dst, number))].append(transfer)
        for (rank, _), arrivals in batches.items():
            if not arrivals[0].reduce:
                held[rank] = before[arrivals[0].src]
                continue
            summands = [(rank, held[rank])] if rank in held else []
            summands += [(transfer.src, before[transfer.src]) for transfer in arrivals]
            if len(summands) > 2 and any((rank, transfer.src) in given for transfer in arrivals):
                if is_implicit:
                    return False
                summands.sort(key=itemgetter(0))
            total, *rest = (expression for _, expression in summands)
            for other in rest:
                total = sums.setdefault((min(total, other), max(total, other)), -1 - len(sums))
            held[rank] = total
    return len({held[rank] for rank in collective.ranks}) == 1
