"""`synth probe` on the ranks: join, measure the fabric between them (`plan`, `traffic`), let rank 0 conclude.

Ranks that take no part in an experiment wait at the barrier, asleep. Repeats go round the whole list again
and again, so that a disturbance spoils one value of many measurements and not all values of one. Rank 0 alone
reads files, concludes and speaks; it tells the others what it decides before the measurement (the input is
wrong) and after it (a file is contradicted), so that all end with the same status.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from arborcast.backends.measure.torchrun import job_group
from arborcast.backends.probe.measurements import Flow, Load, Measurements, Spread
from arborcast.backends.probe.plan import broad_loads, cable_loads, matchings, solo_rounds, targeted_loads
from arborcast.backends.probe.traffic import PIECE_BYTES, PING_BYTES, Period, flood, ping_pong
from arborcast.backends.transport.network import Network
from arborcast.synth import progress

Part = TypeVar("Part")

FEWER = 4
"""Part of the round trips that are made with messages as long as pieces."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure.

    Attributes:
        pings: round trips of each pair.
        repeats: of every rate of a flow alone.
        load_repeats: of every load.
        period: of one measurement of rates; of a load it is longer where the slowest pair would get less than
            `load_bytes` through, so that flows have the time to share, but at most ten times as long.
        load_bytes: see there.
        parallel: whether flows of disjoint pairs are measured at once instead of alone.
        slowed: part by which a load must slow a flow before it is asked who else shares its way.
        timeout_s: after which a rank that does nothing is given up.
    """

    pings: int = 200
    repeats: int = 5
    load_repeats: int = 3
    period: Period = field(default_factory=lambda: Period(window_s=0.04, warmup_s=0.01))
    load_bytes: int = 2 << 20
    parallel: bool = False
    slowed: float = 0.2
    timeout_s: float = 60


class Meeting(Protocol):
    """How all ranks meet between experiments."""

    def gathered(self, part: Part) -> list[Part]:
        """What each rank has, on every rank."""

    def meet(self) -> None:
        """All ranks begin at the same moment, as near as messages can tell."""


class _GroupMeeting:
    """Ranks that meet by a group of torch."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def gathered(self, part: Part) -> list[Part]:
        parts: list[Part] = [part] * self._group.size()
        dist.all_gather_object(parts, part, self._group)
        return parts

    def meet(self) -> None:
        dist.barrier(self._group)


def measure(network: Network, group: dist.ProcessGroup, effort: Effort) -> Measurements:
    """Measure everything; all ranks of the group call it and get the same answer.

    Args:
        network: of this rank; it is connected to all others here.
        group: of the ranks, for barriers and the exchange of results.
        effort: how long.

    Raises:
        ExecutionError: a rank is gone or does not answer.
    """
    ranks, parallel = network.size, effort.parallel
    network.connect(range(ranks))
    pairs = list(combinations(range(ranks), 2))
    plan = solo_rounds(ranks, parallel=parallel), broad_loads(ranks)
    rounds = matchings(ranks) if parallel else [(pair,) for pair in pairs]
    return _Session(network, _GroupMeeting(group), effort).run(rounds, *plan)


def measure_cables(
    network: Network, meeting: Meeting, effort: Effort, cables: Sequence[Flow]
) -> Measurements:
    """Measure cables, each alone and those of a rank together; all ranks call it and get the same answer.

    Args:
        network: of this rank; it is connected along its cables here.
        meeting: of all ranks.
        effort: how long.
        cables: the two ranks of each, with the numbers of the lane where two ranks have several.

    Raises:
        ExecutionError: a rank is gone or does not answer.
    """
    both = [(cable, cable[::-1]) for cable in cables]
    network.connect(far for way in both for near, far in way if near % network.size == network.rank)
    flows = sorted(flow for way in both for flow in way)
    rounds, loads = [(cable,) for cable in cables], cable_loads(flows, network.size)
    return _Session(network, meeting, effort).run(rounds, [(flow,) for flow in flows], loads)


class _Session:
    def __init__(self, network: Network, meeting: Meeting, effort: Effort) -> None:
        self.network = network
        self.meet, self.gathered = meeting.meet, meeting.gathered
        self.effort = effort
        self.rank, self.ranks = network.rank, network.size

    def run(
        self,
        pairs: Sequence[tuple[Flow, ...]],
        alone: Sequence[tuple[Flow, ...]],
        broad: Sequence[tuple[Flow, ...]],
    ) -> Measurements:
        """Measure latencies of pairs, rates alone, under broad loads and under those that these ask for."""
        effort = self.effort
        latency_us, message_us = self.pings("latency", pairs, effort.pings, PING_BYTES)
        _, piece_us = self.pings("pieces", pairs, max(1, effort.pings // FEWER), PIECE_BYTES)
        rounds = self.rates("alone", alone, effort.repeats, effort.period)
        solo = {flow: spread for load in rounds for flow, spread in load.rates.items()}
        needed_s = effort.load_bytes / min(spread.median for spread in solo.values()) / 1e9
        window_s = max(effort.period.window_s, min(needed_s, 10 * effort.period.window_s))
        period = replace(effort.period, window_s=window_s)
        loads = self.rates("loaded", broad, effort.load_repeats, period)
        asked = targeted_loads(solo, loads, slowed=effort.slowed)
        loads += self.rates("in pairs", asked, effort.load_repeats, period)
        hosts = self.gathered(socket.gethostname())
        transports = self.gathered(
            {(self.own(peer), peer): channel.transport for peer, channel in self.network.channels.items()}
        )
        return Measurements(
            ranks=self.ranks,
            latency_us=latency_us,
            solo=solo,
            loads=(*rounds, *loads) if effort.parallel else tuple(loads),
            hosts=tuple(hosts),
            transports={flow: name for part in transports for flow, name in part.items()},
            exact=not effort.parallel,
            message_us=message_us,
            piece_us=piece_us,
        )

    def own(self, number: int) -> int:
        """The number of this rank where that of the other one is given: of the same lane."""
        return number - number % self.ranks + self.rank

    def pings(
        self, what: str, rounds: Sequence[tuple[Flow, ...]], repeats: int, length: int
    ) -> tuple[dict[Flow, Spread], Spread]:
        """Half round trips of every pair, for both directions, and what a message costs an end."""
        mine: dict[Flow, list[float]] = {}
        worked_us: list[float] = []
        for done, round_ in enumerate(rounds):
            progress.report(what, done, len(rounds))
            self.meet()
            for pair in round_:
                for own, peer in (pair, pair[::-1]):
                    if own % self.ranks != self.rank:
                        continue
                    found = ping_pong(
                        self.network.channels[peer],
                        begins=own == pair[0],
                        repeats=repeats,
                        timeout_s=self.effort.timeout_s,
                        length=length,
                    )
                    worked_us.append(found.work_us)
                    if own == pair[0]:
                        mine[pair] = found.one_way_us
        spreads = {pair: Spread.of(times) for part in self.gathered(mine) for pair, times in part.items()}
        work_us = Spread.of(statistics.median(each) for each in self.gathered(worked_us))
        return spreads | {(second, first): spread for (first, second), spread in spreads.items()}, work_us

    def rates(self, what: str, loads: Sequence[tuple[Flow, ...]], repeats: int, period: Period) -> list[Load]:
        """The rates of all flows of each load, measured so many times."""
        mine: dict[tuple[int, Flow], list[float]] = {}
        for turn in range(repeats):
            for number, flows in enumerate(loads):
                progress.report(what, turn * len(loads) + number, repeats * len(loads))
                self.meet()
                to = [target for source, target in flows if source % self.ranks == self.rank]
                of = [source for source, target in flows if target % self.ranks == self.rank]
                if to or of:
                    got = flood(
                        self.network.channels,
                        to=to,
                        of=of,
                        period=period,
                        timeout_s=self.effort.timeout_s,
                    )
                    for source, rate in got.items():
                        mine.setdefault((number, (source, self.own(source))), []).append(rate)
        merged = {key: values for part in self.gathered(mine) for key, values in part.items()}
        return [
            Load({flow: Spread.of(merged[number, flow]) for flow in flows})
            for number, flows in enumerate(loads)
        ]


_PREFIX = "arborcast/probe"


def run(
    *,
    prepare: Callable[[int], int],
    conclude: Callable[[Measurements], int],
    effort: Effort,
    transport: str,
    address: str | None = None,
) -> int:
    """Measure between all processes that torchrun started; the exit status, the same on all ranks.

    Args:
        prepare: on rank 0 before the measurement, with the number of ranks; returns the status to end with,
            0 to go on. What it has to say it says before: torchrun ends all ranks soon after one.
        conclude: on rank 0 after it; returns the status, and the same holds.
        effort: how long to measure.
        transport: of `Network`.
        address: likewise.

    Raises:
        ExecutionError: a rank is gone, does not come or does not answer.
    """
    torch.set_num_threads(1)
    with job_group("probe", effort.timeout_s):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if status := _told(prepare(ranks) if rank == 0 else 0):
            return status
        store = dist.distributed_c10d.PrefixStore(_PREFIX, dist.distributed_c10d._get_default_store())
        network = Network(
            store, rank, ranks, timeout_s=effort.timeout_s, transport=transport, address=address
        )
        try:
            measured = measure(network, dist.distributed_c10d._get_default_group(), effort)
        except Exception as error:
            network.abort(f"gave up: {error}")
            raise
        network.close()
        return _told(conclude(measured) if rank == 0 else 0)


def _told(status: int) -> int:
    """The status that rank 0 says."""
    said = torch.tensor([status])
    dist.broadcast(said, src=0)
    return int(said)
