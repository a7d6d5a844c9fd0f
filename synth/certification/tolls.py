"""How many bytes any schedule can deliver within a time, recomputed from tolls alone, in exact arithmetic.

Time is cut into `intervals` of `step_us`. Latencies are rounded down to whole intervals, and what arrives in
an interval may leave within it: both only help a schedule. Look at one byte of the buffer. What rank v ends
with depends on what u gave, so that messages lead from u in the first interval to v in the last one, each
sent no earlier than the one before arrived. Let one unit follow them, for each u of some others: it pays the
tolls of its way, at least those of the cheapest way. A message of that byte carries no more units than ranks
can have had a say in it by then, if it holds a sum, and one where it holds a block. The same goes the other
way round, from u to all that depend on it. Hence, over all bytes, with `bandwidth * step` for what a link
carries in an interval

    bytes * sum over u of (cheapest way from u to v)  <=  sum of toll * units * bandwidth * step.

What leaves a switch that cannot add is what one rank, or an able switch, sent there: it counts as that one.

    kind               others to terminal     terminal to others
    broadcast                                 as many as it can still reach
    reduce             as many as had a say
    allreduce          as many as had a say   as many as it can still reach
    allgather          one of any block       as many as it can still reach, of the terminal's block
    reduce-scatter     as many as had a say,  one of any block
                       of the terminal's block
    alltoall           one, of the terminal's blocks
    gather, scatter    one                    one

Blocks share links: where tolls are on the block of one rank each, a link is charged what the dearest block
pays. Symmetries carry flows to the other ranks; then a link is charged the mean over the links that they take
it to, and a block with as many as there are of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush

from arborcast.synth.certificate import Bound, Certificate, Dual, TollFlow, Tolls
from arborcast.synth.certification.windows import link_lengths, nearest, sources_and_targets
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.ports import ported
from arborcast.synth.topology import Topology, Vertex


@dataclass(frozen=True, slots=True)
class FlowRule:
    """What a flow of one direction says of a collective.

    Attributes:
        adds_up: whether a message carries a unit for each rank it depends on, or that depends on it.
        own: whether it is about the blocks of its terminal alone.
    """

    adds_up: bool
    own: bool


INWARD: dict[Kind, FlowRule] = {
    Kind.REDUCE: FlowRule(adds_up=True, own=False),
    Kind.ALLREDUCE: FlowRule(adds_up=True, own=False),
    Kind.ALLGATHER: FlowRule(adds_up=False, own=False),
    Kind.REDUCE_SCATTER: FlowRule(adds_up=True, own=True),
    Kind.ALLTOALL: FlowRule(adds_up=False, own=True),
    Kind.GATHER: FlowRule(adds_up=False, own=False),
}
OUTWARD: dict[Kind, FlowRule] = {
    Kind.BROADCAST: FlowRule(adds_up=True, own=False),
    Kind.ALLREDUCE: FlowRule(adds_up=True, own=False),
    Kind.ALLGATHER: FlowRule(adds_up=True, own=True),
    Kind.REDUCE_SCATTER: FlowRule(adds_up=False, own=False),
    Kind.SCATTER: FlowRule(adds_up=False, own=False),
}
WHOLE = frozenset({Kind.BROADCAST, Kind.REDUCE, Kind.ALLREDUCE})
"""Kinds in which each rank gets all of the buffer from each; in others a block of it."""


def check_tolls(topology: Topology, collective: Collective, bound: Bound, tolls: Tolls) -> None:
    """Recompute what tolls prove beside a bound whose certificate has been checked.

    Raises:
        InputError: they do not fit, prove nothing, or prove other than they say.
    """
    found = certified_bytes(topology, collective, bound.certificate, tolls)
    if found != tolls.bytes:
        raise InputError(f"tolls: prove {found} bytes, the certificate says {tolls.bytes}")


def certified_bytes(
    topology: Topology, collective: Collective, certificate: Certificate, tolls: Tolls
) -> Fraction:
    """The bytes of the largest buffer that a schedule can finish in the time of some tolls.

    Args:
        topology: the fabric.
        collective: on it.
        certificate: of the rate, which `certified_rate` accepts.
        tolls: what they say they prove is not looked at.

    Raises:
        InputError: they do not fit or prove nothing.
    """
    topology = ported(topology)
    _check_form(topology, collective, tolls)
    orbits = _Orbits.of(topology, collective, tolls.symmetries)
    part = Fraction(1) if collective.kind in WHOLE else Fraction(1, len(collective.ranks))
    paid = Fraction(0)
    charged: dict[tuple[int, int], Fraction] = {}  # by link and interval
    own: dict[tuple[Vertex, int, int], Fraction] = {}  # by the rank whose block pays, link and interval
    directions = {outward: _Layers(topology, tolls, outward) for outward in (False, True)}
    for flow in tolls.flows:
        layers = directions[flow.outward]
        rule = (OUTWARD if flow.outward else INWARD)[collective.kind]
        paid += part * layers.cheapest(flow)
        units = layers.units(flow, rule.adds_up)
        for link, interval, toll in flow.tolls:
            charge = Fraction(toll * units(link, interval))
            if rule.own:
                block = (flow.terminal, link, interval)
                own[block] = own.get(block, Fraction(0)) + charge
            else:
                charged[link, interval] = charged.get((link, interval), Fraction(0)) + charge
    paid += _charge_lengths(topology, collective, certificate, tolls, charged)
    offered = sum(
        (charge * topology.links[link].bandwidth for (link, _), charge in charged.items()), Fraction(0)
    )
    offered += orbits.share(topology, own)
    if isinstance(certificate, Dual):
        for switch, price in zip(topology.limited_adders, certificate.adders, strict=False):
            adder = topology.switches[switch - topology.ranks].adder or 0
            offered += tolls.weight * price * adder * tolls.intervals
    if paid <= 0:
        raise InputError("tolls: prove nothing, no byte has to pay any")
    return offered * tolls.step_us * 1000 / paid


def _charge_lengths(
    topology: Topology,
    collective: Collective,
    certificate: Certificate,
    tolls: Tolls,
    charged: dict[tuple[int, int], Fraction],
) -> Fraction:
    """Charge links their length in the rate's certificate while they are of use; what each byte pays."""
    if not tolls.weight:
        return Fraction(0)
    lengths, distance = link_lengths(topology, collective, certificate)
    sources, targets = sources_and_targets(collective, certificate)
    wait = [link.latency_us // tolls.step_us for link in topology.links]
    before = nearest(topology, wait, sources, turned=False)
    after = nearest(topology, wait, targets, turned=True)
    for index, (link, length) in enumerate(zip(topology.links, lengths, strict=True)):
        if length and link.src in before and link.dst in after:
            for interval in range(before[link.src], tolls.intervals - wait[index] - after[link.dst]):
                place = (index, interval)
                charged[place] = charged.get(place, Fraction(0)) + tolls.weight * length
    return tolls.weight * distance


def _check_form(topology: Topology, collective: Collective, tolls: Tolls) -> None:
    """What must hold of a well-formed certificate of a collective on a topology."""
    kind = collective.kind
    if kind is Kind.CUSTOM or collective.sizes:
        raise InputError("tolls: limit collectives of equal blocks, not custom ones or alltoallv")
    if tolls.step_us <= 0 or tolls.intervals < 1:
        raise InputError(f"tolls: need a positive step and number, got {tolls.step_us}, {tolls.intervals}")
    if tolls.weight < 0:
        raise InputError(f"tolls: weight must not be negative, got {tolls.weight}")
    members = frozenset(collective.ranks)
    for number, flow in enumerate(tolls.flows):
        name = f"tolls: flow {number}"
        if kind not in (OUTWARD if flow.outward else INWARD):
            way = "outward" if flow.outward else "inward"
            raise InputError(f"{name}: limits no {kind}, {way}")
        if flow.terminal not in members:
            raise InputError(f"{name}: terminal must take part, got {flow.terminal}")
        if collective.root is not None and flow.terminal != collective.root:
            raise InputError(f"{name}: terminal must be the root {collective.root}, got {flow.terminal}")
        others = frozenset(flow.others)
        if len(others) < len(flow.others) or not others <= members - {flow.terminal}:
            raise InputError(f"{name}: others must be other ranks that take part, each once")
        places = set()
        for link, interval, toll in flow.tolls:
            if not (0 <= link < len(topology.links) and 0 <= interval < tolls.intervals and toll > 0):
                rule = f"{len(topology.links)} links, {tolls.intervals} intervals and a positive toll"
                raise InputError(f"{name}: must keep to {rule}, got {(link, interval, toll)}")
            places.add((link, interval))
        if len(places) < len(flow.tolls):
            raise InputError(f"{name}: must have one toll for each link and interval")


class _Layers:
    """The topology in intervals, turned round for flows that go outward: from others to the terminal."""

    def __init__(self, topology: Topology, tolls: Tolls, outward: bool) -> None:
        self.topology = topology
        self.intervals = tolls.intervals
        self.outward = outward
        self.wait = [link.latency_us // tolls.step_us for link in topology.links]
        self.ends = [(link.dst, link.src) if outward else (link.src, link.dst) for link in topology.links]
        self.known_far: dict[Vertex, dict[Vertex, int]] = {}
        self.known_makers: dict[Vertex, list[tuple[Vertex, int]]] = {}
        self.into: list[list[int]] = [[] for _ in range(topology.size)]
        for link, (_, head) in enumerate(self.ends):
            self.into[head].append(link)

    def entered(self, link: int, interval: int) -> int:
        """The interval in which a link is entered, in the time of the flow."""
        return self.intervals - 1 - self.wait[link] - interval if self.outward else interval

    def cheapest(self, flow: TollFlow) -> int:
        """The sum over the others of the cheapest way to the terminal, backwards from it (Dijkstra)."""
        tolls = {(link, self.entered(link, interval)): toll for link, interval, toll in flow.tolls}
        found: dict[tuple[Vertex, int], int] = {}
        queue = [(0, flow.terminal, self.intervals - 1)]
        while queue:
            cost, vertex, interval = heappop(queue)
            if (vertex, interval) in found:
                continue
            found[vertex, interval] = cost
            if interval:
                heappush(queue, (cost, vertex, interval - 1))
            for link in self.into[vertex]:
                entered = interval - self.wait[link]
                if entered >= 0:
                    heappush(queue, (cost + tolls.get((link, entered), 0), self.ends[link][0], entered))
        for other in flow.others:
            if (other, 0) not in found:
                raise InputError(
                    f"tolls: {self.intervals} intervals are too few for ranks {other} and {flow.terminal}"
                )
        return sum(found[other, 0] for other in flow.others)

    def units(self, flow: TollFlow, adds_up: bool) -> Callable[[int, int], int]:
        """How many of the others a message may depend on that enters a link in an interval."""
        far = [self._far(other) for other in flow.others]
        soonest = [
            sorted(each[vertex] for each in far if vertex in each) for vertex in range(self.topology.size)
        ]

        def units(link: int, interval: int) -> int:
            entered = self.entered(link, interval)
            makers = self._makers(self.ends[link][0])
            count = max((bisect_right(soonest[one], entered - ago) for one, ago in makers), default=0)
            return count if adds_up else min(count, 1)

        return units

    def _far(self, rank: Vertex) -> dict[Vertex, int]:
        """Waits from a rank to all vertices."""
        if rank not in self.known_far:
            self.known_far[rank] = nearest(self.topology, self.wait, (rank,), turned=self.outward)
        return self.known_far[rank]

    def _makers(self, vertex: Vertex) -> list[tuple[Vertex, int]]:
        """Who can have made what leaves a vertex, and how long ago at least."""
        if self._merges(vertex):
            return [(vertex, 0)]
        if vertex not in self.known_makers:
            # Back from it, and from none beyond vertices that merge.
            behind = nearest(
                self.topology,
                self.wait,
                (vertex,),
                turned=not self.outward,
                passes=lambda one: not self._merges(one),
            )
            self.known_makers[vertex] = [(one, ago) for one, ago in behind.items() if self._merges(one)]
        return self.known_makers[vertex]

    def _merges(self, vertex: Vertex) -> bool:
        """Whether what leaves it may depend on several messages that entered, in the flow's direction."""
        if vertex < self.topology.ranks:
            return True
        switch = self.topology.switches[vertex - self.topology.ranks]
        return switch.multicasts if self.outward else switch.reduces


@dataclass(frozen=True, slots=True)
class _Orbits:
    """Which vertices and links symmetries take to each other, by the least of them."""

    of_vertex: Sequence[int]
    of_link: Sequence[int]
    alike: Counter[int]
    links_alike: Counter[int]

    @classmethod
    def of(
        cls, topology: Topology, collective: Collective, symmetries: Iterable[Sequence[Vertex]]
    ) -> _Orbits:
        """Check that permutations keep links, switches and the collective, and join what they move.

        Raises:
            InputError: one is no such symmetry.
        """
        place = {(link.src, link.dst): index for index, link in enumerate(topology.links)}
        vertices, links = list(range(topology.size)), list(range(len(topology.links)))
        members = frozenset(collective.ranks)
        for number, image in enumerate(symmetries):
            fits = (
                sorted(image) == list(range(topology.size))
                and {image[rank] for rank in members} == members
                and (collective.root is None or image[collective.root] == collective.root)
                and all(
                    topology.abilities(vertex) == topology.abilities(other)
                    for vertex, other in enumerate(image)
                )
                and all(
                    (other := place.get((image[link.src], image[link.dst]))) is not None
                    and topology.links[other].bandwidth == link.bandwidth
                    and topology.links[other].latency_us == link.latency_us
                    for link in topology.links
                )
            )
            if not fits:
                raise InputError(f"tolls: symmetry {number} does not keep links, switches and ranks")
            _join(vertices, enumerate(image))
            _join(links, ((i, place[image[one.src], image[one.dst]]) for i, one in enumerate(topology.links)))
        of_vertex = [_first(vertices, each) for each in vertices]
        of_link = [_first(links, each) for each in links]
        return cls(of_vertex, of_link, Counter(of_vertex), Counter(of_link))

    def share(self, topology: Topology, own: dict[tuple[Vertex, int, int], Fraction]) -> Fraction:
        """What links offer where blocks pay for themselves: to the dearest of them."""
        by_block: dict[tuple[Vertex, int, int], Fraction] = {}
        for (block, link, interval), charge in own.items():
            place = (block, self.of_link[link], interval)
            by_block[place] = max(charge, by_block.get(place, Fraction(0)))
        by_orbit: dict[tuple[int, int, int], Fraction] = {}
        for (block, link, interval), charge in by_block.items():
            place = (self.of_vertex[block], link, interval)
            by_orbit[place] = by_orbit.get(place, Fraction(0)) + charge / self.alike[self.of_vertex[block]]
        dearest: dict[tuple[int, int], Fraction] = {}
        for (_, link, interval), charge in by_orbit.items():
            dearest[link, interval] = max(charge, dearest.get((link, interval), Fraction(0)))
        return sum(
            (
                charge * topology.links[link].bandwidth * self.links_alike[link]
                for (link, _), charge in dearest.items()
            ),
            Fraction(0),
        )


def _join(parents: list[int], pairs: Iterable[tuple[int, int]]) -> None:
    for one, other in pairs:
        first, second = _first(parents, one), _first(parents, other)
        parents[max(first, second)] = min(first, second)


def _first(parents: list[int], each: int) -> int:
    while parents[each] != each:
        parents[each] = parents[parents[each]]
        each = parents[each]
    return each
