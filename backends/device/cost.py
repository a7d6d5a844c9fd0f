"""How long a plan takes on GPUs, by its own tables; and the same schedule by grouped messages.

The tables are gone through as the kernel would, with a clock for each program: an instruction begins when
its program is free and all flags that it waits for are raised, and ends when its bytes have passed its
program, its GPU's memory, and the links under way. No figure was measured with this kernel: it has run on one
GPU only.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from arborcast.backends.device.plan import DevicePlan
from arborcast.backends.device.tables import (
    FIRST_STAGING,
    LENGTH,
    SIGNALS,
    SOURCES,
    TARGETS,
    TIME,
    WAITS,
    Tables,
)
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.simulation.pieces import PieceRule
from arborcast.synth.simulation.prices import CALL_US, at_prices, effective
from arborcast.synth.simulation.simulator import simulate


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """What calls of the kernel are made of, and of messages beside it.

    Attributes:
        launch_us: until the first instruction, and from the last one to the end: `prices.CALL_US`, fitted to
            kernels by hand on 4 to 32 GPUs.
        row_us: of an instruction, whose numbers are read one after another: two loads from the second cache,
            0.25 us each (about 270 cycles on A100 and H100 by published microbenchmarks).
        flag_us: from the end of an instruction until another GPU sees its flag, beside the link's latency.
            With `row_us` a hop takes 1.9 us, as NCCL's table of latencies has a step of LL128 over NVLink;
            6.3 us for a call of 24 KiB on eight MI355 (vLLM, change 39080) leave 1.8 beside the launch.
        block_us: until a source's block is there: 0.6, the latency of a GPU's memory under load.
        block_bytes: what a program has under way meanwhile: 1,024 elements of 4 bytes, a program's block. Of
            both come 6.8 GB/s of one program with one source.
        memory_gbs: what all programs of a GPU read and write: 900, V100's data sheet; no later GPU has less.
        group_us: of a group of messages: 8.4, what NCCL's table has of a call by Simple, as its sends go.
    """

    launch_us: float = float(CALL_US)
    row_us: float = 0.5
    flag_us: float = 1.4
    block_us: float = 0.6
    block_bytes: int = 4096
    memory_gbs: float = 900.0
    group_us: float = 8.4


COSTS = DeviceCosts()

MOST_ROWS = 50_000
"""That are gone through for the first pieces; the others take as long each as the later half of these."""


class _Links:
    """The links of a fabric, and memories of ranks: when each is free again, in us."""

    def __init__(self, schedule: AnySchedule, memory_gbs: float) -> None:
        fabric = effective(schedule.topology)
        links = {(link.src, link.dst): link for link in fabric.links}
        self._free: dict[tuple[int, ...], float] = defaultdict(float)
        self._rates: dict[tuple[int, ...], float] = {
            hop: float(link.bandwidth) for hop, link in links.items()
        }
        self._memory_gbs = memory_gbs
        self._ways = {
            (it.src, it.dst): tuple(pairwise((it.src, *it.via, it.dst))) for it in schedule.expand().transfers
        }
        self._latencies = {
            pair: float(sum(links[hop].latency_us for hop in hops)) for pair, hops in self._ways.items()
        }

    def pass_by(self, hop: tuple[int, ...], nbytes: float, begin_us: float) -> float:
        """When bytes that were handed over at a time have passed a link, or a memory."""
        rate = self._rates.get(hop, self._memory_gbs)
        self._free[hop] = max(self._free[hop], begin_us) + nbytes / (1000 * rate)
        return self._free[hop]

    def arrive(self, src: int, dst: int, nbytes: float, begin_us: float) -> float:
        """The same of the way between two ranks, whose links all carry at once."""
        return max(self.pass_by(hop, nbytes, begin_us) for hop in self._ways[src, dst])

    def latency_us(self, src: int, dst: int) -> float:
        """Of the way that data take between two ranks in either direction."""
        return self._latencies.get((src, dst), self._latencies.get((dst, src), 0.0))


def predicted_us(plan: DevicePlan, size_bytes: int, costs: DeviceCosts = COSTS) -> float:
    """How long a call of the kernel takes, the critical path over the waits of all ranks.

    Lanes do the same at the same time, so that one of each group is gone through.

    Args:
        plan: on a fabric whose links bound it, as they are measured where that is known.
        size_bytes: of the whole buffer, rounded up to whole blocks.
        costs: of GPUs.
    """
    itemsize, ranks = 16 // plan.shape.vector, len(plan.schedule.collective.ranks)
    count = -(-size_bytes // (itemsize * ranks)) * ranks
    tables = [plan.tables(rank, count) for rank in range(plan.ranks)]
    pieces = tables[0].pieces
    few = min(pieces, max(2, MOST_ROWS // sum(len(it.rows) for it in tables)))
    long_us = _gone_through(plan, tables, few, costs)
    if few < pieces:
        half_us = _gone_through(plan, tables, few // 2, costs)
        long_us += (pieces - few) * (long_us - half_us) / (few - few // 2)
    return costs.launch_us + long_us


def _gone_through(plan: DevicePlan, tables: list[Tables], pieces: int, costs: DeviceCosts) -> float:
    """When the last program has done the first pieces, in us."""
    shape, links = plan.shape, _Links(plan.schedule, costs.memory_gbs)
    itemsize = 16 // shape.vector
    programs = [
        (rank, table, table.items.tolist(), table.rows[first:end].tolist())
        for rank, table in enumerate(tables)
        for first, end in pairwise(table.groups.tolist())
    ]
    clocks = [0.0] * len(programs)
    raised: dict[tuple[int, int], list[float]] = defaultdict(list)  # by rank and flag, of each piece
    for time in range(pieces + shape.depth):
        for at, (rank, table, items, rows) in enumerate(programs):
            for row in rows:
                piece = time - row[TIME]
                if not 0 <= piece < pieces:
                    continue
                waits, sources, targets, signals = (
                    items[row[column] : row[column + 1]] for column in (WAITS, SOURCES, TARGETS, SIGNALS)
                )
                seen = [raised[rank, flag][piece - lag] for flag, lag, _ in waits if piece >= lag]
                begin_us = max([clocks[at], *seen]) + costs.row_us
                nbytes = row[LENGTH] * itemsize / table.pieces  # of all lanes
                blocks = -(-nbytes / shape.lanes // costs.block_bytes)
                ends = [begin_us + len(sources) * blocks * costs.block_us]
                ends.append(links.pass_by((rank,), nbytes * (len(sources) + len(targets)), begin_us))
                ways = [(rank, buffer - FIRST_STAGING) for buffer, _, _ in targets]  # it pushes
                ways += [(buffer - FIRST_STAGING, rank) for buffer, _, _ in sources]  # it pulls
                remote = [way for way in ways if min(way) >= 0 and way[0] != way[1]]
                clocks[at] = max(ends + [links.arrive(*way, nbytes, begin_us) for way in remote])
                for peer, flag, _ in signals:
                    seen_us = clocks[at] + links.latency_us(rank, peer) + costs.flag_us
                    raised[peer, flag].append(seen_us)
    return max(clocks, default=0.0)


def messages_us(schedule: AnySchedule, size_bytes: int, cut: PieceRule, costs: DeviceCosts = COSTS) -> float:
    """How long grouped messages take: links as they are measured, and a price for each group.

    Args:
        schedule: in either form.
        size_bytes: of the whole buffer.
        cut: how chunks are cut.
        costs: of a group.
    """
    pieces = cut.pieces(schedule, size_bytes)
    priced, _ = at_prices(schedule)
    groups = schedule.steps + pieces - 1
    return simulate(priced, size_bytes, pieces=pieces).time_us + groups * costs.group_us
