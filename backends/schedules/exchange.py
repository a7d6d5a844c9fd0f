"""An alltoall of blocks of any sizes, which may be others at each step: what serves it, made within the call.

Where nobody has said what the fabric is, blocks go pairwise, all at once, and each rank knows its own sizes
alone. Else all ranks have told each other all sizes when they come here, and decide and plan alike, each for
itself: pairwise, unless by the rates of the links ways through other ranks save more time than a plan costs:

    time of the busiest link, each block on a shortest way   minus   the limit   >   5 ms for 8 ranks

(20 ms for 16), which is what planning, writing the schedule out and lowering it take. Small calls are
therefore never planned, nor are any on one switch, where pairwise is at the limit. Where a block is for a
rank whose link has failed, or to which there is no cable, all go by a plan, while the fabric has other ways.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache

from arborcast.backends.dataflow.task_graph import TaskGraph, compile_graph
from arborcast.backends.lowering.layout import Buffer, BufferSlice
from arborcast.backends.lowering.lower import lower_rank
from arborcast.backends.lowering.program import Copy, Operation, Program, Receive, Send
from arborcast.backends.lowering.rank_view import digest_of
from arborcast.backends.transport.lanes import CableLanes
from arborcast.synth.alltoallv.block_planner import AlltoallvPlanner
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.simulation.pieces import PieceRule
from arborcast.synth.topology import Hop, Topology

Sizes = tuple[tuple[int, ...], ...]
"""Bytes from each rank (row) to each (column)."""

EXCHANGES_KEPT = 32

PLAN_US = 5000
"""What a plan of 8 ranks costs from sizes to a graph; it grows with the square of the ranks."""


PAIRWISE, PLANNED = "pairwise", "ways planned for its sizes"
"""What serves an exchange, in words."""


@dataclass(frozen=True, eq=False)
class Exchange:
    """One rank's part of an alltoall of certain sizes.

    Attributes:
        graph: of bytes.
        digest: the same on all ranks; zeros where each knows its own sizes alone.
        served: by what.
    """

    graph: TaskGraph
    digest: bytes
    served: str


@dataclass(eq=False)
class Exchanges:
    """Those of one group on one fabric.

    Args:
        topology: whose rank i is rank i of the group.
        rank: this one.
        cut: into how many pieces chunks are cut.
        is_known: whether somebody has said what the fabric is; where not, blocks go pairwise.
        gone: pairs of ranks that exchange no blocks straight: their link has failed, or they have no cable.
        lanes: where several cables lead to one rank; None where nowhere.

    Attributes:
        may_plan: whether blocks may go by a plan, for which all sizes must be known.
    """

    topology: Topology
    rank: int
    cut: PieceRule
    _: KW_ONLY
    is_known: bool
    gone: Collection[Hop] = ()
    lanes: CableLanes | None = None

    def __post_init__(self) -> None:
        """Keep what serves the last calls."""
        self.may_plan = self.is_known or bool(self.gone)
        self.of = lru_cache(EXCHANGES_KEPT)(self._of)
        self.straight = lru_cache(EXCHANGES_KEPT)(self._straight)

    @cached_property
    def _planner(self) -> AlltoallvPlanner:
        return AlltoallvPlanner(self.topology)

    def _of(self, sizes: Sizes) -> Exchange:
        """What serves an alltoall of these sizes; the last ones are kept, as `of`."""
        if self._must_go_round(sizes) or (self.is_known and self._pays(sizes)):
            schedule = self._planner.plan(sizes).schedule()
            count = schedule.collective.mean_bytes
            pieces = self.cut.pieces(schedule, count)
            program = lower_rank(schedule, self.rank, count, pieces=pieces)
            key = digest_of(schedule) + pieces.to_bytes(8, "little")
            graph = compile_graph(program, lanes=self.lanes)
            return Exchange(graph, hashlib.sha256(key).digest()[:8], PLANNED)
        exchange = self._straight(sizes[self.rank], tuple(row[self.rank] for row in sizes))
        return replace(exchange, digest=hashlib.sha256(repr(sizes).encode()).digest()[:8])

    def _straight(self, sent: tuple[int, ...], expected: tuple[int, ...]) -> Exchange:
        """Every block straight to its rank; the last ones are kept, as `straight`."""
        program = pairwise(sent, expected, self.rank)
        return Exchange(compile_graph(program, lanes=self.lanes), bytes(8), PAIRWISE)

    def _must_go_round(self, sizes: Sizes) -> bool:
        """Whether a block cannot go straight, and there are other ways."""
        if not any(sizes[a][b] or sizes[b][a] for a, b in self.gone):
            return False
        try:
            self._planner.outlook(sizes)
        except InfeasibleError:  # so all that is left is to try the link again
            return False
        return True

    def _pays(self, sizes: Sizes) -> bool:
        """Whether a plan saves more than it costs, by the links' rates."""
        ranks = len(sizes)
        cost_us = Fraction(PLAN_US * ranks * ranks, 64)
        slowest = min((link.bandwidth for link in self.topology.links), default=Fraction(0))
        if sum(map(sum, sizes)) <= cost_us * 1000 * slowest:
            return False  # even all on one link would not take so long
        try:
            least, shortest = self._planner.outlook(sizes)
        except InfeasibleError:
            return False  # the connections of the group are not the links of the fabric
        return shortest - least > cost_us


def pairwise(sent: Sequence[int], expected: Sequence[int], rank: int) -> Program:
    """Every block straight to its rank, the nearest in the circle of ranks first.

    Args:
        sent: bytes for each rank.
        expected: bytes from each rank.
        rank: this one.
    """
    return Program(
        rank,
        tuple(_operations(sent, expected, rank)),
        sum(sent),
        sum(expected),
        0,
        in_place=False,
        contributors=1,
    )


def _operations(sent: Sequence[int], expected: Sequence[int], rank: int) -> Iterator[Operation]:
    count = len(sent)

    def given(target: int) -> BufferSlice:
        first = sum(sent[:target])
        return BufferSlice(Buffer.INPUT, first, first + sent[target])

    def taken(source: int) -> BufferSlice:
        first = sum(expected[:source])
        return BufferSlice(Buffer.OUTPUT, first, first + expected[source])

    if sent[rank]:
        yield Copy(0, given(rank), taken(rank))
    for apart in range(1, count):
        # In one order of all messages: by distance, then by sender. Who sends to the left of whom it receives
        # from would otherwise stand in a circle of ranks that wait for each other, were sends to block.
        target, source = (rank + apart) % count, (rank - apart) % count
        send = Send(apart - 1, target, given(target), apart * count + rank) if sent[target] else None
        receive = (
            Receive(apart - 1, source, taken(source), apart * count + source) if expected[source] else None
        )
        for operation in (send, receive) if rank < source else (receive, send):
            if operation is not None:
                yield operation
