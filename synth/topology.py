"""The graph there is to communicate over: ranks, switches, directed links.

Vertices are the ranks `0..n-1` followed by the switches `n..n+s-1`. A `Topology` is validated once, when
it is made, and every later stage (bounds, packings, schedules, lowering) trusts it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cache, cached_property, reduce
from ipaddress import ip_address
from itertools import pairwise
from numbers import Rational
from typing import Any, TypeAlias

from arborcast.synth.errors import TopologyError

Vertex: TypeAlias = int
Hop: TypeAlias = tuple[Vertex, Vertex]  # the ends of a link
Permutation: TypeAlias = tuple[Vertex, ...]
LinkKind: TypeAlias = tuple[tuple[int | str, ...], ...]

PLANNED = "NCCL's planning rates"
"""Why links are assumed that have NCCL's or RCCL's planning constants."""

_BESIDE = " of "


@dataclass(frozen=True, slots=True)
class Link:
    """A directed link; a full-duplex cable is two of them. Whole numbers become fractions.

    Attributes:
        src: where it begins.
        dst: where it ends.
        bandwidth: GB/s, 1 GB = 1e9 bytes.
        latency_us: how long the first byte takes.
        rate_assumed: why its bandwidth is assumed; empty where it is stated, measured or from a data sheet.
            Links of the same numbers are equal, wherever these come from.
        latency_assumed: the same of its latency.
        addresses: of a cable, the numeric addresses of `src` and of `dst` on it; None where nothing is said.
        lanes: of several cables with addresses between the same ranks each one, in the order of addresses
            (`Link.bundle`); they have the link's ends, and share its bandwidth in proportion to their own.

    Raises:
        TopologyError: a bandwidth or latency that is not exact, such as a float, what is no address, or lanes
            without addresses of their own.
    """

    src: Vertex
    dst: Vertex
    bandwidth: Fraction
    latency_us: Fraction = Fraction(0)
    rate_assumed: str = field(default="", compare=False)
    latency_assumed: str = field(default="", compare=False)
    addresses: tuple[str, str] | None = None
    lanes: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        """See that numbers are exact: all that follows takes their numerators."""
        for name in ("bandwidth", "latency_us"):
            value: object = getattr(self, name)
            if not isinstance(value, Fraction):
                object.__setattr__(self, name, _exact(f"link {self.src}->{self.dst}: {name}", value))
        if self.addresses is not None:
            object.__setattr__(self, "addresses", _ends(f"link {self.src}->{self.dst}", self.addresses))
        if self.lanes:
            object.__setattr__(self, "lanes", self._own_lanes())

    def _own_lanes(self) -> tuple[Link, ...]:
        """The lanes with the ends of this link, which may have been moved, and shares of its bandwidth."""
        what = f"link {self.src}->{self.dst}"
        said = [address for lane in self.lanes for address in lane.addresses or (None,)]
        if self.addresses is not None or len(self.lanes) < 2 or None in said or len({*said}) < len(said):
            raise TopologyError(f"{what}: several cables must have addresses of their own each, got {said}")
        factor = self.bandwidth / sum(lane.bandwidth for lane in self.lanes)
        is_as_long = self.latency_us == max(lane.latency_us for lane in self.lanes)
        return tuple(
            replace(
                lane,
                src=self.src,
                dst=self.dst,
                bandwidth=lane.bandwidth * factor,
                latency_us=lane.latency_us if is_as_long else self.latency_us,
            )
            for lane in self.lanes
        )

    @classmethod
    def bundle(cls, cables: Iterable[Link]) -> Link:
        """One or several cables with addresses between the same ranks as one link.

        It has the sum of their bandwidths and the largest of their latencies.
        """
        lanes = sorted((lane for each in cables for lane in each.cables), key=lambda lane: lane._place)
        if len(lanes) == 1:
            return lanes[0]
        return cls(
            lanes[0].src,
            lanes[0].dst,
            sum((lane.bandwidth for lane in lanes), Fraction(0)),
            max(lane.latency_us for lane in lanes),
            _all_said(lane.rate_assumed for lane in lanes),
            _all_said(lane.latency_assumed for lane in lanes),
            lanes=tuple(lanes),
        )

    @property
    def cables(self) -> tuple[Link, ...]:
        """What it consists of: its lanes, or itself."""
        return self.lanes or (self,)

    @property
    def is_reached(self) -> bool:
        """Whether it is said by which addresses its ends are reached."""
        return self.addresses is not None or bool(self.lanes)

    @property
    def _place(self) -> list[str]:
        """The same for a cable's two directions."""
        return sorted(self.addresses or ())

    @property
    def reversed(self) -> Link:
        """The same from its end to its begin."""
        addresses = None if self.addresses is None else (self.addresses[1], self.addresses[0])
        lanes = tuple(lane.reversed for lane in self.lanes)
        return replace(self, src=self.dst, dst=self.src, addresses=addresses, lanes=lanes)

    @property
    def _compared(self) -> tuple[str, ...]:
        own: Any = type(self)
        return _compared_of(own)

    @property
    def kind(self) -> LinkKind:
        """All that tells links apart but their ends, as whole numbers and text that can be ordered."""
        return tuple(_plain(getattr(self, name)) for name in self._compared)

    @property
    def kind_without_latency(self) -> LinkKind:
        """The same for who does not care how long the first byte takes."""
        return tuple(_plain(getattr(self, name)) for name in self._compared if name != "latency_us")


@cache
def _compared_of(kind: type[Any]) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind) if each.compare and each.name not in {"src", "dst"})


def _plain(value: object) -> tuple[int | str, ...]:
    """A value that can be ordered among those of its attribute: fractions are slow to compare."""
    if isinstance(value, Rational):
        return int(value.numerator), int(value.denominator)
    return () if value is None else (str(value),)


def _ends(what: str, addresses: Sequence[object]) -> tuple[str, str]:
    try:
        ends = tuple(str(ip_address(str(each))) for each in addresses)
    except ValueError as error:
        raise TopologyError(f"{what}: addresses must be numeric: {error}") from None
    if len(ends) != 2 or ends[0] == ends[1]:
        raise TopologyError(f"{what}: addresses must be those of its two ends, got {list(ends)}")
    return ends[0], ends[1]


def _exact(what: str, value: object) -> Fraction:
    if not isinstance(value, Rational):
        raise TopologyError(f"{what} must be a whole number or a Fraction, got {value!r}")
    return Fraction(int(value.numerator), int(value.denominator))


@dataclass(frozen=True, slots=True)
class Switch:
    """A vertex that is no rank. It forwards; an able one also adds or copies what passes.

    Attributes:
        name: what files call it.
        reduces: it may add the same chunk from several inputs and pass on the sum.
        multicasts: it may pass on one input to several outputs.
        turns: the sum that it makes may be multicast by it at once, as InfiniBand SHARP does. Otherwise a sum
            goes on to one output, and a rank (or a switch that turns) spreads it, as with NVLink SHARP.
        loopback: a rank to which it gives a sum has its own contribution read through it, too, and a rank
            whose data it multicasts gets them back (NVLink SHARP): both pass the links of that rank.
        adder: GB/s of sums that it can make; None where only its links limit them.
        trees: how many chunks of one schedule it can add or multicast; None for any number.
        latency_us: what adding or multicasting takes beside the latencies of links.
        stores: it adds or copies a message once it has all of it, not as it passes (cut-through).

    Raises:
        TopologyError: abilities that contradict each other, or a number out of its range or not exact.
    """

    name: str
    reduces: bool = False
    multicasts: bool = False
    turns: bool = False
    loopback: bool = False
    adder: Fraction | None = None
    trees: int | None = None
    latency_us: Fraction = Fraction(0)
    stores: bool = False

    def __post_init__(self) -> None:
        """See that numbers are exact and abilities go together."""
        object.__setattr__(self, "latency_us", _exact(f"switch {self.name}: latency_us", self.latency_us))
        if self.adder is not None:
            object.__setattr__(self, "adder", _exact(f"switch {self.name}: adder", self.adder))
        if self.turns and not (self.reduces and self.multicasts):
            raise TopologyError(f"switch {self.name}: one that turns must reduce and multicast")
        if self.turns and self.loopback:
            raise TopologyError(
                f"switch {self.name}: must not both turn and loop back: a sum that turns has no rank to go to"
            )
        if self.adder is not None and not (self.reduces and self.adder > 0):
            raise TopologyError(
                f"switch {self.name}: adder must be positive and of a switch that reduces, "
                f"got {self.adder} GB/s"
            )
        if self.trees is not None and self.trees < 1:
            raise TopologyError(f"switch {self.name}: trees must be at least 1, got {self.trees}")
        if self.latency_us < 0:
            raise TopologyError(f"switch {self.name}: latency must not be negative, got {self.latency_us} us")
        if not self.is_able and (self.loopback or self.stores or self.trees or self.latency_us):
            raise TopologyError(
                f"switch {self.name}: loopback, trees, latency and stores are for one that reduces or "
                "multicasts"
            )

    @property
    def is_able(self) -> bool:
        """Whether it does more than forward."""
        return self.reduces or self.multicasts

    @property
    def abilities(self) -> tuple[tuple[int | str, ...], ...]:
        """All but the name, as numbers and text that can be ordered: equal for switches that are alike."""
        return tuple(_plain(getattr(self, each.name)) for each in fields(self) if each.name != "name")


@dataclass(frozen=True)
class Topology:
    """Ranks, switches and the directed links between them.

    Attributes:
        name: what reports call it.
        ranks: number of ranks, at least 1.
        links: at most one per ordered pair of vertices, sorted by (src, dst); `Topology.build` sees to it.
        switches: the vertices after the ranks; those that reduce or multicast come before those that only
            forward.
        symmetries: generators of a group of automorphisms, each the images of all vertices in order.
        message_us: how long a short message keeps each of its ends at work, as `synth probe` measures it; the
            latencies of links include it. 0 where nothing is known, or links do all of the work.
        streams: of each rank, how many messages it sends at once at most, and how many it receives, at
            whatever others they end; None for any number. Empty where no rank has a limit.

    Raises:
        TopologyError: when any of this does not hold.

    Examples:
        >>> pair = [synth.Link(0, 1, 25), synth.Link(1, 0, 25)]
        >>> synth.bound(synth.Topology.build("pair", 2, pair), "allreduce").rate
        Fraction(25, 1)
    """

    name: str
    ranks: int
    links: tuple[Link, ...]
    switches: tuple[Switch, ...] = ()
    symmetries: tuple[Permutation, ...] = ()
    message_us: Fraction = Fraction(0)
    streams: tuple[int | None, ...] = ()

    @classmethod
    def build(
        cls,
        name: str,
        ranks: int,
        links: Iterable[Link],
        switches: Iterable[Switch | str] = (),
        symmetries: Iterable[Sequence[Vertex]] = (),
        message_us: Fraction = Fraction(0),
        streams: Iterable[int | None] = (),
    ) -> Topology:
        """Make a topology from links in any order.

        Parallel links of one latency are one link with the sum of their bandwidths, and so are several with
        addresses, whatever their latencies (`Link.bundle`). Of others that differ, the
        quickest is the link of its pair, and a slower one passes a switch that it shares with its reverse
        alone (`parallels`): the way in has its latency, and both halves have its bandwidth. So whatever is
        planned, proved or simulated uses each at its own rate and latency.

        Args:
            name: of the topology.
            ranks: their number.
            links: the ends of each are ranks and the given switches.
            switches: what stands after the ranks.
            symmetries: images of the ranks and the given switches.
            message_us: see the class.
            streams: see the class.
        """
        kept: dict[Hop, Link] = {}
        parallel: dict[Hop, dict[Fraction, Link]] = {}  # by their latencies
        for link in links:
            _check_link(link)
            pair = (link.src, link.dst)
            if pair not in kept:
                kept[pair] = link
                continue
            if link.is_reached != kept[pair].is_reached:
                raise TopologyError(
                    f"link {link.src}->{link.dst}: must have addresses as the other one of its ranks has"
                )
            if link.is_reached:
                kept[pair] = Link.bundle([kept[pair], link])
                continue
            alike = parallel.setdefault(pair, {kept[pair].latency_us: kept[pair]})
            twin = alike.get(link.latency_us)
            alike[link.latency_us] = link if twin is None else _merge(twin, link)
        kept |= {pair: alike[min(alike)] for pair, alike in parallel.items()}
        named = [Switch(switch) if isinstance(switch, str) else switch for switch in switches]
        slower = [alike[wait] for alike in parallel.values() for wait in sorted(alike)[1:]]
        moves = [tuple(images) for images in symmetries]
        if slower:
            places = sorted({_place(link.src, link.dst, link.latency_us) for link in slower})
            own = {place: vertex for vertex, place in enumerate(places, ranks + len(named))}
            moves = [_with_parallels(images, own) for images in moves]
            labels = [*range(ranks), *(switch.name for switch in named)]
            named += [Switch(_parallel_name(labels[one], labels[other], wait)) for one, other, wait in places]
            for link in slower:
                for half in _through(link, own[_place(link.src, link.dst, link.latency_us)]):
                    kept[half.src, half.dst] = half
        return cls(
            name=name,
            ranks=ranks,
            links=tuple(kept[pair] for pair in sorted(kept)),
            switches=tuple(named),
            symmetries=tuple(moves),
            message_us=message_us,
            streams=tuple(streams),
        )

    def __post_init__(self) -> None:
        """Check every rule of the class docstring."""
        if self.ranks < 1:
            raise TopologyError(f"topology {self.name}: ranks must be at least 1, got {self.ranks}")
        object.__setattr__(self, "message_us", self._checked_message_us())
        object.__setattr__(self, "streams", self._checked_streams())
        for name in (self.name, *(switch.name for switch in self.switches)):
            if not name or not name.isprintable():
                raise TopologyError(f"name {name!a}: must be printable text on one line")
        for name, count in Counter(switch.name for switch in self.switches).items():
            if count > 1:
                raise TopologyError(f"switch {name}: names must be unique, got it {count} times")
        for before, after in pairwise(self.switches):
            if after.is_able and not before.is_able:
                raise TopologyError(
                    f"switch {after.name}: those that reduce or multicast must come before those that only "
                    f"forward, got it after {before.name}"
                )
        owners: dict[str, Vertex] = {}
        for link in self.links:
            _check_link(link)
            self._check_addresses(link, owners)
            for vertex in (link.src, link.dst):
                if not 0 <= vertex < self.size:
                    raise TopologyError(
                        f"link {link.src}->{link.dst}: vertex must be in 0..{self.size - 1}, got {vertex}"
                    )
        pairs = [(link.src, link.dst) for link in self.links]
        if any(first >= second for first, second in pairwise(pairs)):
            raise TopologyError(f"topology {self.name}: links must be sorted and unique (use Topology.build)")
        for images in self.symmetries:
            self.check_symmetry(images)

    def _check_addresses(self, link: Link, owners: dict[str, Vertex]) -> None:
        if not link.is_reached:
            return
        where, ends = f"link {link.src}->{link.dst}", (link.src, link.dst)
        said = [one for each in link.cables for one in zip(each.addresses or (), ends, strict=True)]
        for address, vertex in said:
            if self.is_switch(vertex):
                raise TopologyError(f"{where}: must join two ranks where it has addresses")
            if (owner := owners.setdefault(address, vertex)) != vertex:
                raise TopologyError(
                    f"{where}: address {address} must be of one rank, got it of {owner} and {vertex}"
                )

    def _checked_message_us(self) -> Fraction:
        found = _exact(f"topology {self.name}: message_us", self.message_us)
        if found < 0:
            raise TopologyError(f"topology {self.name}: message_us must not be negative, got {found} us")
        return found

    def _checked_streams(self) -> tuple[int | None, ...]:
        """As they were given; none where no rank has a limit."""
        what, given = f"topology {self.name}: streams", len(self.streams)
        if given not in (0, self.ranks):
            raise TopologyError(f"{what} must be one for each of the {self.ranks} ranks, got {given}")
        for rank, count in enumerate(self.streams):
            if count is not None and (not isinstance(count, int) or count < 1):
                raise TopologyError(f"{what} of rank {rank} must be whole and at least 1, got {count!r}")
        return () if set(self.streams) <= {None} else self.streams

    @property
    def size(self) -> int:
        """Number of vertices, ranks and switches together."""
        return self.ranks + len(self.switches)

    @cached_property
    def holders(self) -> int:
        """Number of vertices that may hold a chunk: the ranks and, after them, the switches that are able."""
        return self.ranks + sum(switch.is_able for switch in self.switches)

    @cached_property
    def limited_adders(self) -> tuple[Vertex, ...]:
        """The switches that have a limit on what they add."""
        return tuple(
            vertex for vertex, switch in enumerate(self.switches, self.ranks) if switch.adder is not None
        )

    @property
    def without_addresses(self) -> Topology:
        """The same graph for who plans: addresses change no rate, but make links differ that are alike."""
        if not any(link.is_reached for link in self.links):
            return self
        return replace(self, links=tuple(replace(link, addresses=None, lanes=()) for link in self.links))

    @cached_property
    def forwarding(self) -> Topology:
        """The same graph with switches that only forward; itself where there are no others."""
        if self.holders == self.ranks:
            return self
        return replace(self, switches=tuple(Switch(switch.name) for switch in self.switches))

    @cached_property
    def bandwidth(self) -> dict[Hop, Fraction]:
        """GB/s of the link of each ordered pair of vertices that has one."""
        return {(link.src, link.dst): link.bandwidth for link in self.links}

    @cached_property
    def latency_us(self) -> dict[Hop, Fraction]:
        """Latency in microseconds of the link of each ordered pair of vertices that has one."""
        return {(link.src, link.dst): link.latency_us for link in self.links}

    @cached_property
    def link_kinds(self) -> dict[Hop, LinkKind]:
        """What links have in common that are alike (`Link.kind`)."""
        return {(link.src, link.dst): link.kind for link in self.links}

    @property
    def link_kinds_without_latency(self) -> dict[Hop, LinkKind]:
        """The same for who does not care how long the first byte takes."""
        return {(link.src, link.dst): link.kind_without_latency for link in self.links}

    @cached_property
    def features(self) -> dict[str, str]:
        """What it has beyond ranks, links and bandwidths, such as "link latency_us", each with one place.

        Every attribute that differs from its default is one, whoever added it, those aside that are not
        compared (where numbers come from). `synth.features` says who understands which.
        """
        found: dict[str, str] = {}
        whole = (("topology", (self,)), ("switch", self.switches), ("link", self.links))
        for what, things in whole:
            for each in fields(things[0]) if things else ():
                if each.compare and (what, each.name) not in _PLAIN:
                    values = ((thing, getattr(thing, each.name)) for thing in things)
                    first = next((thing for thing, value in values if value != each.default), None)
                    if first is not None:
                        found[f"{what} {each.name}"] = _place_of(first)
        return found

    @cached_property
    def bandwidth_unit(self) -> Fraction:
        """The greatest common divisor of all bandwidths, GB/s: what one chunk per round stands for."""
        return reduce(gcd_of_fractions, (link.bandwidth for link in self.links), Fraction(0)) or Fraction(1)

    @cached_property
    def capacities(self) -> tuple[int, ...]:
        """Bandwidths in whole multiples of `bandwidth_unit`, in the order of `links`."""
        return tuple(int(link.bandwidth / self.bandwidth_unit) for link in self.links)

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether each link has a reverse of the same bandwidth."""
        return all(self.bandwidth.get((dst, src)) == rate for (src, dst), rate in self.bandwidth.items())

    @cached_property
    def parallels(self) -> dict[Vertex, tuple[Link, ...]]:
        """The switches that stand for slower ones of parallel links (see `build`), each with these links."""
        likely = {vertex for vertex in range(self.ranks, self.size) if _BESIDE in str(self.label(vertex))}
        into: dict[Vertex, list[Link]] = {vertex: [] for vertex in likely}
        out: dict[Vertex, list[Link]] = {vertex: [] for vertex in likely}
        for link in self.links if likely else ():
            into.get(link.dst, []).append(link)
            out.get(link.src, []).append(link)
        found: dict[Vertex, tuple[Link, ...]] = {}
        for vertex in sorted(likely):
            ends = sorted({link.src for link in into[vertex]} | {link.dst for link in out[vertex]})
            if len(ends) != 2 or len({link.latency_us for link in into[vertex]}) != 1:
                continue
            links = tuple(replace(link, dst=sum(ends) - link.src) for link in into[vertex])
            halves = {half for link in links for half in _through(link, vertex)}
            name = _parallel_name(self.label(ends[0]), self.label(ends[1]), links[0].latency_us)
            if halves == {*into[vertex], *out[vertex]} and name == self.label(vertex):
                found[vertex] = links
        return found

    @cached_property
    def cables(self) -> tuple[Link, ...]:
        """The links as given to `build`, parallel ones side by side.

        Those of one latency are one, if they have no addresses.
        """
        if not self.parallels:
            return tuple(cable for link in self.links for cable in link.cables)
        whole = [
            cable
            for link in self.links
            if link.src not in self.parallels and link.dst not in self.parallels
            for cable in link.cables
        ]
        beside = (link for links in self.parallels.values() for link in links)
        return tuple(
            sorted([*whole, *beside], key=lambda link: (link.src, link.dst, link.latency_us, link._place))
        )

    @property
    def assumptions(self) -> dict[tuple[str, str], int]:
        """How many of `cables` have an assumed "rate" or "latency", by why."""
        return Counter(
            (what, why)
            for link in self.cables
            for what, why in (("rate", link.rate_assumed), ("latency", link.latency_assumed))
            if why
        )

    @property
    def is_planned(self) -> bool:
        """Whether its rates are NCCL's planning constants, which are no capacities."""
        return any(link.rate_assumed == PLANNED for link in self.links)

    def is_switch(self, vertex: Vertex) -> bool:
        """Whether the vertex is no rank."""
        return vertex >= self.ranks

    def label(self, vertex: Vertex) -> int | str:
        """How files name a vertex: the number of a rank, the name of a switch."""
        return self.switches[vertex - self.ranks].name if self.is_switch(vertex) else vertex

    def unbalanced(self, vertices: Iterable[Vertex]) -> tuple[Vertex, ...]:
        """Those of the vertices whose bandwidth in differs from their bandwidth out (non-Eulerian)."""
        surplus = dict.fromkeys(vertices, Fraction(0))
        for link in self.links:
            if link.dst in surplus:
                surplus[link.dst] += link.bandwidth
            if link.src in surplus:
                surplus[link.src] -= link.bandwidth
        return tuple(vertex for vertex, difference in surplus.items() if difference)

    def reversed(self) -> Topology:
        """The same vertices with every link turned round."""
        turned = (link.reversed for link in self.links)
        return replace(self, links=tuple(sorted(turned, key=lambda link: (link.src, link.dst))))

    def subset(self, ranks: Sequence[int]) -> Topology:
        """The fragment that an allocation gives: these ranks, renumbered 0, 1, 2... in this order.

        Links of the other ranks are gone; switches that lead nowhere any more are gone too, and so are
        declared symmetries that do not map the fragment to itself.

        Raises:
            TopologyError: a rank is unknown or named twice.
        """
        self.check_ranks(ranks)
        return self._restricted(ranks, f"{self.name}[{_listed(ranks)}]")

    def reordered(self, ranks: Sequence[int]) -> Topology:
        """The whole topology renumbered so that these ranks come first, in this order (for relays).

        Raises:
            TopologyError: a rank is unknown or named twice.
        """
        self.check_ranks(ranks)
        chosen = set(ranks)
        rest = [rank for rank in range(self.ranks) if rank not in chosen]
        return self._restricted([*ranks, *rest], f"{self.name}[{_listed(ranks)}+relays]")

    def check_ranks(self, ranks: Sequence[int]) -> None:
        """Raise TopologyError unless these are some of its ranks, each named once."""
        if not ranks:
            raise TopologyError(f"topology {self.name}: a fragment needs at least one rank, got none")
        for rank in ranks:
            if not 0 <= rank < self.ranks:
                raise TopologyError(f"topology {self.name}: rank must be in 0..{self.ranks - 1}, got {rank}")
        for rank, count in Counter(ranks).items():
            if count > 1:
                raise TopologyError(f"topology {self.name}: ranks must be named once, got {rank} twice")

    def _restricted(self, ranks: Sequence[int], name: str) -> Topology:
        vertices = set(ranks) | set(range(self.ranks, self.size)) - self.parallels.keys()
        kept = on_some_way(self.cables, vertices, set(ranks))
        order = [*ranks, *(vertex for vertex in range(self.ranks, self.size) if vertex in kept)]
        renumbered = {vertex: position for position, vertex in enumerate(order)}
        return Topology.build(
            name,
            len(ranks),
            (
                replace(link, src=renumbered[link.src], dst=renumbered[link.dst])
                for link in self.cables
                if link.src in kept and link.dst in kept
            ),
            (self.switches[vertex - self.ranks] for vertex in order[len(ranks) :]),
            (
                [renumbered[images[vertex]] for vertex in order]
                for images in self.symmetries
                if {images[vertex] for vertex in order} == set(order)
            ),
            self.message_us,
            (self.streams[rank] for rank in ranks if self.streams),
        )

    def check_symmetry(self, images: Permutation) -> None:
        """Raise TopologyError unless a permutation of the vertices maps every link to one like it."""
        shown = _shown(images)
        if sorted(images) != list(range(self.size)):
            raise TopologyError(f"symmetry {shown}: must name each of the {self.size} vertices exactly once")
        for vertex, image in enumerate(images):
            if self.is_switch(vertex) != self.is_switch(image):
                raise TopologyError(f"symmetry {shown}: must map ranks to ranks and switches to switches")
            if self.abilities(vertex) != self.abilities(image):
                what, alike = "rank", "have as many streams"
                if self.is_switch(vertex):
                    what, alike = "switch", "be able to do the same"
                raise TopologyError(
                    f"symmetry {shown}: maps {what} {self.label(vertex)} to {self.label(image)}; "
                    f"both must {alike}"
                )
        kinds = self.link_kinds
        if all(kinds.get((images[src], images[dst])) == kind for (src, dst), kind in kinds.items()):
            return
        for link in self.links:
            pair = (images[link.src], images[link.dst])
            found = self.bandwidth.get(pair, Fraction(0))
            if found != link.bandwidth or self.latency_us[pair] != link.latency_us:
                raise TopologyError(
                    f"symmetry {shown}: maps link {link.src}->{link.dst} of {link.bandwidth} GB/s to "
                    f"{pair[0]}->{pair[1]} of {found} GB/s; both must be alike in bandwidth and latency"
                )
            if kinds[pair] != link.kind:
                raise TopologyError(
                    f"symmetry {shown}: maps link {link.src}->{link.dst} to {pair[0]}->{pair[1]}; both must "
                    "be alike in all but their ends"
                )

    def abilities(self, vertex: Vertex) -> tuple[tuple[int | str, ...], ...]:
        """What a switch can do (`Switch.abilities`); of a rank its streams, if some rank has a limit."""
        if self.is_switch(vertex):
            return self.switches[vertex - self.ranks].abilities
        return (_plain(self.streams[vertex]),) if self.streams else ()


_PLAIN = {
    *(("topology", name) for name in ("name", "ranks", "links")),
    ("switch", "name"),
    *(("link", name) for name in ("src", "dst", "bandwidth")),
}
"""Attributes that whoever reads a topology understands."""


def on_some_way(
    links: Iterable[Link], vertices: AbstractSet[Vertex], ends: AbstractSet[Vertex]
) -> set[Vertex]:
    """The ends, and those of the other vertices that lie on some way between two different ones.

    Args:
        links: of which those between `vertices` count.
        vertices: what is left of a graph, the ends among them.
        ends: stay, whatever leads there.
    """
    senders: dict[Vertex, set[Vertex]] = {vertex: set() for vertex in vertices}
    receivers: dict[Vertex, set[Vertex]] = {vertex: set() for vertex in vertices}
    for link in links:
        if link.src in vertices and link.dst in vertices:
            senders[link.dst].add(link.src)
            receivers[link.src].add(link.dst)
    left, doubtful = set(vertices), sorted(vertices - ends)
    while doubtful:
        vertex = doubtful.pop()
        before, after = senders[vertex], receivers[vertex]
        if vertex not in left or (before and after and len(before | after) > 1):
            continue
        left.discard(vertex)
        for neighbour in before | after:
            senders[neighbour].discard(vertex)
            receivers[neighbour].discard(vertex)
            if neighbour not in ends:
                doubtful.append(neighbour)
    return left


def parts_of(vertices: Iterable[Vertex], pairs: Iterable[Hop]) -> Iterator[set[Vertex]]:
    """The parts into which vertices fall, the least vertex first; pairs that leave them are left out."""
    import networkx

    graph: networkx.Graph[Vertex] = networkx.Graph()
    graph.add_nodes_from(sorted(vertices))
    graph.add_edges_from((one, other) for one, other in pairs if one in graph and other in graph)
    return iter(networkx.connected_components(graph))


def _place_of(thing: Topology | Switch | Link) -> str:
    return f"{thing.src}->{thing.dst}" if isinstance(thing, Link) else thing.name


def gcd_of_fractions(first: Fraction, second: Fraction) -> Fraction:
    """The greatest fraction of which both are whole multiples; the other one where one is zero."""
    return Fraction(
        math.gcd(first.numerator * second.denominator, second.numerator * first.denominator),
        first.denominator * second.denominator,
    )


def _listed(ranks: Sequence[int]) -> str:
    """The ranks for a name, which stays short: 0,1,3 or 0,1,2,... of 874."""
    if len(ranks) <= 16:
        return ",".join(map(str, ranks))
    return f"{','.join(map(str, ranks[:3]))},... of {len(ranks)}"


def _all_said(whys: Iterable[str]) -> str:
    """Why several links are assumed, each reason once."""
    return "; ".join(dict.fromkeys(why for why in whys if why))


def _merge(first: Link, second: Link) -> Link:
    if replace(first, bandwidth=second.bandwidth).kind != second.kind:
        raise TopologyError(
            f"link {first.src}->{first.dst}: parallel links must be alike but for bandwidth and latency"
        )
    return replace(
        first,
        bandwidth=first.bandwidth + second.bandwidth,
        rate_assumed=_all_said([first.rate_assumed, second.rate_assumed]),
        latency_assumed=_all_said([first.latency_assumed, second.latency_assumed]),
    )


def _parallel_name(one: int | str, other: int | str, latency_us: Fraction) -> str:
    return f"{one}-{other}{_BESIDE}{latency_us} us"


def _place(src: Vertex, dst: Vertex, latency_us: Fraction) -> tuple[Vertex, Vertex, Fraction]:
    """What a link has in common with its reverse."""
    return min(src, dst), max(src, dst), latency_us


def _through(link: Link, vertex: Vertex) -> tuple[Link, Link]:
    """The two halves of a link that passes a vertex."""
    return replace(link, dst=vertex), replace(link, src=vertex, latency_us=Fraction(0), latency_assumed="")


def _with_parallels(
    images: tuple[Vertex, ...], own: Mapping[tuple[Vertex, Vertex, Fraction], Vertex]
) -> tuple[Vertex, ...]:
    """The images of the vertices that stand for parallel links after those of all others."""
    ends = [_place(images[one], images[other], wait) for one, other, wait in own if other < len(images)]
    if len(ends) < len(own) or not own.keys() >= set(ends):
        raise TopologyError(f"symmetry {_shown(images)}: must map parallel links to parallel links like them")
    return (*images, *(own[place] for place in ends))


def _shown(images: Sequence[Vertex]) -> str:
    return f"[{', '.join(map(str, images[:16]))}{', ...' if len(images) > 16 else ''}]"


def _check_link(link: Link) -> None:
    if link.src == link.dst:
        raise TopologyError(f"link {link.src}->{link.dst}: must join two different vertices")
    # A fraction has the sign of its numerator, which is ten times as fast to compare.
    if link.bandwidth.numerator <= 0:
        raise TopologyError(
            f"link {link.src}->{link.dst}: bandwidth must be positive, got {link.bandwidth} GB/s"
        )
    if link.latency_us.numerator < 0:
        raise TopologyError(
            f"link {link.src}->{link.dst}: latency must not be negative, got {link.latency_us} us"
        )
