"""`synth probe --cables`: which ranks a cable joins, by which addresses, and how fast each is.

Nothing but the store is needed beforehand, which may lie in a slow network of its own. Every rank says there
which interfaces it has; two of them in one subnet are the ends of a cable if one answers the other.

    interfaces -> subnets with two ends -> those that answer -> alone, and all of a rank at once -> topology
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from arborcast.backends.errors import ExecutionError
from arborcast.backends.probe.inference import ALIKE, LEAST_US
from arborcast.backends.probe.interfaces import Interface, interfaces
from arborcast.backends.probe.measurements import Flow, Measurements
from arborcast.backends.probe.measuring import Effort, Here, Meeting, joined, measure_cables
from arborcast.backends.probe.shape import clustered, rounded
from arborcast.backends.schedules.rendezvous import location
from arborcast.backends.tensors.torch_compat import Store
from arborcast.backends.transport.addresses import Ends, listening_addresses, listening_socket
from arborcast.synth.topology import Link, Topology

ANSWER_S = 3.0
"""How long the other end of a cable may take to answer."""

SHARES = 0.2
"""Part by which the cables of a rank must be slower together than alone to be said to share something."""


@dataclass(frozen=True, slots=True)
class Cable:
    """Two interfaces in a subnet of their own.

    Attributes:
        ranks: the lower first.
        ends: of each of them.
    """

    ranks: tuple[int, int]
    ends: tuple[Interface, Interface]

    @property
    def addresses(self) -> Ends:
        """Of the ends."""
        return self.ends[0].address, self.ends[1].address

    def of(self, rank: int) -> Ends:
        """The same with a rank's own first."""
        own, other = self.addresses
        return (own, other) if rank == self.ranks[0] else (other, own)

    def __str__(self) -> str:
        """As messages name it."""
        return " to ".join(f"{end} of rank {rank}" for rank, end in zip(self.ranks, self.ends, strict=True))


@dataclass(frozen=True)
class FoundCables:
    """What `probe_cables` found.

    Attributes:
        cables: those that answer.
        measured: over them; other pairs have no rates. Further cables of two ranks are flows of their own
            (`lanes_of`).
        notes: what was left out and why, and what shares something, a line each.
    """

    cables: tuple[Cable, ...]
    measured: Measurements
    notes: tuple[str, ...]

    @cached_property
    def links(self) -> dict[Flow, Link]:
        """Of each flow its cable with the measured rate, in round numbers, and the addresses of both ends."""
        flows, ranks = sorted(self.measured.solo), self.measured.ranks
        rates = clustered([self.measured.solo[flow] for flow in flows], alike=ALIKE)
        times = clustered([self.measured.latency_us[flow] for flow in flows], alike=ALIKE)
        of = dict(zip(lanes_of(self.cables, ranks), self.cables, strict=True))
        found = {}
        for (src, dst), rate, time in zip(flows, rates, times, strict=True):
            addresses = of[min(src, dst), max(src, dst)].of(src % ranks)
            found[src, dst] = Link(src % ranks, dst % ranks, rate, time, addresses=addresses)
        return found

    def topology(self, name: str) -> Topology:
        """The topology of these links."""
        message_us = self.measured.message_us
        cost = Fraction(0) if message_us is None else rounded(max(message_us.median, LEAST_US))
        return Topology.build(name, self.measured.ranks, self.links.values(), message_us=cost)


def lanes_of(cables: Sequence[Cable], ranks: int) -> list[Flow]:
    """The flow along each cable, whose ends have the numbers of the lane there (`transport.lanes`)."""
    found, known = [], Counter[Flow]()
    for cable in cables:
        further = known[cable.ranks] * ranks
        known[cable.ranks] += 1
        found.append((cable.ranks[0] + further, cable.ranks[1] + further))
    return found


def matched(of_ranks: Sequence[Sequence[Interface]], meeting: str) -> tuple[list[Cable], list[str]]:
    """The cables that there seem to be, and a line for each subnet that looks like one and is none.

    Args:
        of_ranks: the interfaces of each rank.
        meeting: the subnet in which ranks meet.
    """
    ends: dict[str, list[tuple[int, Interface]]] = defaultdict(list)
    for rank, own in enumerate(of_ranks):
        for each in own:
            ends[each.subnet].append((rank, each))
    cables: list[Cable] = []
    notes = []
    for subnet, found in ends.items():
        addresses = {each.address for _, each in found}
        if subnet == meeting or len(found) < 2 or len(addresses) < len(found):  # or inside of every host
            continue
        where = ", ".join(f"{each.name} of rank {rank}" for rank, each in found)
        if len(found) > 2 or found[0][0] == found[1][0]:
            notes.append(
                f"subnet {subnet} is left out, as a cable must have one of its own with an end at two ranks, "
                f"got {where}"
            )
            continue
        (low, first), (high, second) = found
        cables.append(Cable((low, high), (first, second)))
    return cables, notes


def shared(measured: Measurements) -> Iterator[str]:
    """A line for each rank whose cables are slower together than each alone."""
    for load in measured.loads:
        for end, way in ((0, "out of"), (1, "into")):
            ranks = {flow[end] % measured.ranks for flow in load.flows}
            if len(ranks) > 1:
                continue
            alone = sum(measured.solo[flow].median for flow in load.flows)
            together = sum(load.rates[flow].median for flow in load.flows)
            if together * (1 + SHARES) < alone:
                yield (
                    f"cables {way} rank {ranks.pop()} share something: {together:.3g} GB/s together, "
                    f"{alone:.3g} in sum of each alone; the topology does not say so"
                )


def probe_cables(
    *, prepare: Callable[[int], int], conclude: Callable[[FoundCables], int], effort: Effort
) -> int:
    """Find and measure the cables between all processes that torchrun started, one on each host.

    Args:
        prepare: see `measuring.joined`.
        conclude: likewise, with the cables.
        effort: how long to measure.

    Returns:
        the exit status, the same on all ranks.

    Raises:
        ExecutionError: a rank is gone, does not come or has no cable that answers, or two are on one host.
    """
    address = ""

    def word(store: Store) -> object:
        nonlocal address
        address = listening_addresses(store)[0]
        return {"where": location(), "at": address, "interfaces": [asdict(each) for each in interfaces()]}

    def explored(here: Here) -> FoundCables:
        cables, notes = here.conclusion
        answering, silent = _answering([_cable(each) for each in cables], here.rank, here.meeting)
        notes += silent
        _check_joined(answering, here.size, notes)
        lanes = lanes_of(answering, here.size)
        ends: dict[int, Ends | None] = {
            lane[here.rank == cable.ranks[0]]: cable.of(here.rank)
            for lane, cable in zip(lanes, answering, strict=True)
            if here.rank in cable.ranks
        }
        with here.network(address=address, cables=ends) as network:
            measured = measure_cables(network, here.meeting, effort, lanes)
        return FoundCables(tuple(answering), measured, (*notes, *shared(measured)))

    return joined(prepare, explored, conclude, effort.timeout_s, word, _concluded)


def _concluded(words: list[Any]) -> tuple[list[Any], list[str]]:
    """On rank 0: cables as plain lists, and notes."""
    where: dict[str, int] = {}
    for rank, word in enumerate(words):
        other = where.setdefault(word["where"], rank)
        if other != rank:
            raise ExecutionError(f"probe --cables: must run once on each host, got ranks {other} and {rank}")
    of_ranks = [[Interface(**each) for each in word["interfaces"]] for word in words]
    meeting = next((each.subnet for each in of_ranks[0] if each.address == words[0]["at"]), "")
    cables, notes = matched(of_ranks, meeting)
    return [[cable.ranks, [asdict(end) for end in cable.ends]] for cable in cables], notes


def _cable(said: Any) -> Cable:
    (low, high), (first, second) = said
    return Cable((low, high), (Interface(**first), Interface(**second)))


def _answering(cables: Sequence[Cable], rank: int, meeting: Meeting) -> tuple[list[Cable], list[str]]:
    """The cables whose lower end answers the higher one, and a line for each that does not."""
    doors = {
        cable.of(rank)[0]: listening_socket(cable.of(rank)[0]) for cable in cables if rank in cable.ranks
    }
    try:
        ports = {}
        for part in meeting.gathered({address: door.getsockname()[1] for address, door in doors.items()}):
            ports.update(part)
        mine = {}
        for number, cable in enumerate(cables):
            if rank == cable.ranks[1]:
                own, other = cable.of(rank)
                try:
                    socket.create_connection((other, ports[other]), ANSWER_S, (own, 0)).close()
                except OSError as error:
                    mine[number] = f"cable does not answer and is left out: {cable}: {error}"
        silent = {number: line for part in meeting.gathered(mine) for number, line in part.items()}
    finally:
        for door in doors.values():
            door.close()
    return [cable for number, cable in enumerate(cables) if number not in silent], list(silent.values())


def _check_joined(cables: Sequence[Cable], size: int, notes: Sequence[str]) -> None:
    """Raise ExecutionError where cables do not join all ranks."""
    reached = {0}
    for _ in range(size):
        reached |= {rank for cable in cables if reached & {*cable.ranks} for rank in cable.ranks}
    if missing := sorted(set(range(size)) - reached):
        why = "".join(f"; {note}" for note in notes)
        raise ExecutionError(f"probe --cables: no cables lead from rank 0 to rank {missing[0]}{why}")
