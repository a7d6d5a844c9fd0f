"""`synth probe` on the ranks: join, measure the fabric between them (`plan`, `traffic`), let rank 0 conclude.

Ranks that take no part in an experiment wait at the barrier, asleep. Repeats go round the whole list again
and again, so that a disturbance spoils one value of many measurements and not all values of one. Rank 0 alone
reads files, concludes and speaks; it tells the others what it decides before the measurement (the input is
wrong) and after it (a file is contradicted), so that all end with the same status.
"""

from __future__ import annotations

import pickle
import socket
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import combinations
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from arborcast.backends.errors import ExecutionError
from arborcast.backends.measure.torchrun import one_line
from arborcast.backends.probe.measurements import Flow, Load, Measurements, Spread
from arborcast.backends.probe.plan import (
    broad_loads,
    cable_loads,
    concurrent_loads,
    matchings,
    solo_rounds,
    targeted_loads,
)
from arborcast.backends.probe.traffic import PIECE_BYTES, PING_BYTES, Period, flood, ping_pong
from arborcast.backends.schedules.rendezvous import meet
from arborcast.backends.tensors.torch_compat import PrefixStore, Store
from arborcast.backends.transport.network import Network
from arborcast.synth import progress

Part = TypeVar("Part")
Found = TypeVar("Found")

LEAVE_S = 5.0
"""How long rank 0 waits for the others at the end."""

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
        streams: whether to measure every number of flows of a rank at once.
        parallel: whether flows of disjoint pairs are measured at once instead of alone.
        slowed: part by which a load must slow a flow before it is asked who else shares its way.
        timeout_s: after which a rank that does nothing is given up.
    """

    pings: int = 200
    repeats: int = 5
    load_repeats: int = 3
    period: Period = field(default_factory=lambda: Period(window_s=0.04, warmup_s=0.01))
    load_bytes: int = 2 << 20
    streams: bool = False
    parallel: bool = False
    slowed: float = 0.2
    timeout_s: float = 60


class Meeting:
    """Barriers and exchanges of all ranks through a store, without connections among them.

    Args:
        store: for these alone.
        rank: this one.
        size: how many there are.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._turn = 0

    def gathered(self, part: Part) -> list[Part]:
        """What each rank has, on every rank."""
        data: Any = pickle.dumps(part)  # which torch takes, whatever its stubs say
        self._store.set(f"{self._turn + 1}/{self._rank}", data)
        self.meet()
        keys = [f"{self._turn}/{rank}" for rank in range(self._size)]
        return [pickle.loads(each) for each in self._store.multi_get(keys)]

    def meet(self) -> None:
        """All ranks begin at the same moment, as near as messages can tell."""
        self._turn += 1
        everybody = f"{self._turn}/all"
        if self._store.add(f"{self._turn}/count", 1) == self._size:
            self._store.set(everybody, "")
        self._store.get(everybody)

    def leave(self) -> None:
        """To be called last: the store may be one that goes with rank 0, which waits for the others."""
        if self._rank:
            self._store.set(f"left/{self._rank}", "")
        else:
            with suppress(RuntimeError):
                self._store.wait(
                    [f"left/{rank}" for rank in range(1, self._size)], timedelta(seconds=LEAVE_S)
                )


def measure(network: Network, meeting: Meeting, effort: Effort) -> Measurements:
    """Measure everything; all ranks call it and get the same answer.

    Args:
        network: of this rank; it is connected to all others here.
        meeting: of all ranks.
        effort: how long.

    Raises:
        ExecutionError: a rank is gone or does not answer.
    """
    ranks, parallel = network.size, effort.parallel
    network.connect(range(ranks))
    pairs = list(combinations(range(ranks), 2))
    loads = broad_loads(ranks)
    if effort.streams:
        loads = list(dict.fromkeys([*loads, *concurrent_loads(ranks)]))
    plan = solo_rounds(ranks, parallel=parallel), loads
    rounds = matchings(ranks) if parallel else [(pair,) for pair in pairs]
    return _Session(network, meeting, effort).run(rounds, *plan)


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


def run(
    *,
    prepare: Callable[[int], int],
    conclude: Callable[[Measurements], int],
    effort: Effort,
    transport: str,
) -> int:
    """Measure between all processes that torchrun started; the exit status, the same on all ranks.

    Args:
        prepare: see `joined`.
        conclude: likewise, with what was measured.
        effort: how long to measure.
        transport: of `Network`.

    Raises:
        ExecutionError: a rank is gone, does not come or does not answer.
    """

    def explored(here: Here) -> Measurements:
        with here.network(transport=transport) as network:
            return measure(network, here.meeting, effort)

    return joined(prepare, explored, conclude, effort.timeout_s)


@dataclass(frozen=True)
class Here:
    """One of the processes that torchrun started, among the others.

    Attributes:
        store: that they share, and nobody else, nor they when torchrun starts them again.
        rank: this one.
        size: how many there are.
        meeting: of all of them.
        timeout_s: after which a rank that does nothing is given up.
        conclusion: what followed from the words of all.
    """

    store: Store
    rank: int
    size: int
    meeting: Meeting
    timeout_s: float
    conclusion: Any

    @contextmanager
    def network(self, **settings: Any) -> Iterator[Network]:
        """Of this rank; where something fails, the others hear why. Settings as for `Network`."""
        store = PrefixStore("channels", self.store)
        network = Network(store, self.rank, self.size, timeout_s=self.timeout_s, **settings)
        try:
            yield network
        except Exception as error:
            network.abort(f"gave up: {error}")
            raise
        network.close()


def joined(
    prepare: Callable[[int], int],
    explore: Callable[[Here], Found],
    conclude: Callable[[Found], int],
    timeout_s: float,
    word: Callable[[Store], object] = lambda _: None,
    concluded: Callable[[list[Any]], object] = lambda _: None,
) -> int:
    """What `synth probe` does on all processes that torchrun started; the exit status, the same on all ranks.

    Args:
        prepare: on rank 0 before the rest, with the number of ranks; returns the status to end with, 0 to go
            on. What it has to say it says before: torchrun ends all ranks soon after one.
        explore: on all ranks.
        conclude: on rank 0 with what it found; returns the status, and the same holds.
        timeout_s: after which a rank that does nothing is given up.
        word: of the job's store, what this rank says first.
        concluded: on rank 0, what follows from the words of all.

    Raises:
        ExecutionError: a rank is gone, does not come or does not answer.
    """
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    try:
        job, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        job.set_timeout(timeout)
        store = PrefixStore("arborcast/probe", job)
        name, conclusion = meet(store, rank, size, word(store), concluded, timeout_s=timeout_s)
        own = PrefixStore(name, store)
        here = Here(own, rank, size, Meeting(PrefixStore("meeting", own), rank, size), timeout_s, conclusion)
        status = max(here.meeting.gathered(prepare(size) if rank == 0 else 0))
        if not status:
            found = explore(here)
            status = max(here.meeting.gathered(conclude(found) if rank == 0 else 0))
        here.meeting.leave()
        return status
    except ExecutionError:
        raise
    except RuntimeError as error:  # of the store
        raise one_line("probe", error) from error
