"""The cheapest schedule of one chunk through able switches, over all orders of transfers (Dijkstra).

Nothing here knows of trees. A state is what every rank and switch holds, what was asked of each switch since,
and one message that has left but not arrived, so that ranks may exchange what they hold. The rules are those
of `synth.topology.Switch`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.topology import Switch, Topology, Vertex


class Content(NamedTuple):
    """What a switch holds of the chunk: whose contributions, from whom, to how many (2: or more)."""

    mask: int
    inputs: tuple[Vertex, ...]
    outputs: int = 0
    came_back: bool = False  # whether its first sender got it


class Message(NamedTuple):
    """On its way."""

    src: Vertex
    dst: Vertex
    mask: int
    reduce: bool


State = tuple[tuple[int, ...], tuple[Content | None, ...], Message | None]


@dataclass(frozen=True)
class Search:
    """All schedules of a collective under whole lengths.

    Attributes:
        ways: what a transfer costs, between any two of the ranks and able switches that reach each other.
        adders: what a sum costs, by switch.
        exchanges: whether a message may be on its way while others are sent.
    """

    topology: Topology
    collective: Collective
    ways: dict[tuple[Vertex, Vertex], int]
    adders: dict[Vertex, int]
    exchanges: bool

    @classmethod
    def of(
        cls,
        topology: Topology,
        collective: Collective,
        lengths: list[int],
        adders: dict[Vertex, int],
        *,
        exchanges: bool = True,
    ) -> Search:
        """Transfers take the shortest way over switches."""
        links = zip(topology.bandwidth, lengths, strict=True)
        ways = {**dict(links)}
        for through in range(topology.ranks, topology.size):
            for src in range(topology.size):
                for dst in range(topology.size):
                    if src != dst and (src, through) in ways and (through, dst) in ways:
                        cost = ways[src, through] + ways[through, dst]
                        ways[src, dst] = min(cost, ways.get((src, dst), cost))
        holders = {hop: cost for hop, cost in ways.items() if max(hop) < topology.holders}
        return cls(topology, collective, holders, adders, exchanges)

    def cheapest(self, below: int, most: int) -> int | None:
        """The least cost of a schedule, if it is less than `below`, else that; None after `most` states."""
        kind, root = self.collective.kind, self.collective.root
        start = [0] * self.topology.ranks
        for rank in self.collective.ranks:
            start[rank] = 1 << rank if kind.reduces else int(rank == root)
        switches = (None,) * (self.topology.holders - self.topology.ranks)
        order = count()
        queue: list[tuple[int, int, State]] = [(0, next(order), (tuple(start), switches, None))]
        done: set[State] = set()
        while queue and len(done) < most:
            cost, _, state = heappop(queue)
            if state in done:
                continue
            done.add(state)
            if self._is_done(state):
                return cost
            for more, after in self._steps(state):
                if cost + more < below and after not in done:
                    heappush(queue, (cost + more, next(order), after))
        return None if queue else below

    def _is_done(self, state: State) -> bool:
        ranks, switches, message = state
        members = self.collective.ranks
        full = sum(1 << rank for rank in members) if self.collective.kind.reduces else 1
        ends = (self.collective.root,) if self.collective.kind is Kind.REDUCE else members
        if message is not None or any(ranks[rank] != full for rank in ends if rank is not None):
            return False
        return all(map(self._is_settled, range(len(switches)), switches))

    def _switch(self, place: int) -> Switch:
        return self.topology.switches[place]

    def _is_settled(self, place: int, content: Content | None) -> bool:
        """Whether a rank whose data were multicast got them back, where it must."""
        return (
            content is None
            or not self._switch(place).loopback
            or len(content.inputs) > 1
            or content.outputs < 2
            or content.inputs[0] >= self.topology.ranks
            or content.came_back
        )

    def _steps(self, state: State) -> Iterator[tuple[int, State]]:
        ranks, switches, message = state
        if message is not None:
            yield from self._arrived((ranks, switches, None), message)
        for (src, dst), cost in self.ways.items():
            sent = self._sent(src, dst, ranks, switches)
            if sent is None:
                continue
            mask, left = sent
            for reduce in (False, True) if self.collective.kind.reduces else (False,):
                on_its_way = Message(src, dst, mask, reduce)
                if message is None and self.exchanges:
                    yield cost, (ranks, left, on_its_way)
                for more, after in self._arrived((ranks, left, message), on_its_way):
                    yield cost + more, after

    def _sent(
        self, src: Vertex, dst: Vertex, ranks: tuple[int, ...], switches: tuple[Content | None, ...]
    ) -> tuple[int, tuple[Content | None, ...]] | None:
        """What leaves a vertex, and the switches after that; None where it may not."""
        if src < self.topology.ranks:
            return (ranks[src], switches) if ranks[src] else None
        place = src - self.topology.ranks
        content, switch = switches[place], self._switch(place)
        if content is None:
            return None
        adds, outputs = len(content.inputs) > 1, min(content.outputs + 1, 2)
        if outputs > 1 and not (switch.turns if adds else switch.multicasts):
            return None
        if switch.loopback and adds and dst < self.topology.ranks and dst not in content.inputs:
            return None
        back = content.came_back or (switch.loopback and dst == content.inputs[0])
        left = content._replace(outputs=outputs, came_back=back)
        return content.mask, (*switches[:place], left, *switches[place + 1 :])

    def _arrived(self, state: State, message: Message) -> Iterator[tuple[int, State]]:
        ranks, switches, waiting = state
        src, dst, mask, reduce = message
        if dst < self.topology.ranks:
            held = ranks[dst]
            if reduce and held & mask:
                return
            kept = held | mask if reduce else mask
            yield 0, ((*ranks[:dst], kept, *ranks[dst + 1 :]), switches, waiting)
            return
        place = dst - self.topology.ranks
        content, switch, cost = switches[place], self._switch(place), 0
        if content is None or not reduce:
            if not self._is_settled(place, content):
                return
            content = Content(mask, (src if switch.loopback else -1,))
        else:
            if content.mask & mask or not switch.reduces or (content.outputs > 1 and not switch.turns):
                return
            cost = self.adders.get(dst, 0) if len(content.inputs) == 1 else 0
            several = {*content.inputs[1:], src} if switch.loopback else (-1,)
            inputs = (content.inputs[0], *sorted(several))
            content = content._replace(mask=content.mask | mask, inputs=inputs)
        yield cost, (ranks, (*switches[:place], content, *switches[place + 1 :]), waiting)
