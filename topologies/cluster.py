"""Several hosts to one topology: `join` cables their NICs to a fabric.

What stands between a GPU and the fabric is modelled as far as it can hold traffic up: where a GPU has NICs of
its own, links at their rates, or at that of its PCIe slot; where GPUs share NICs, a vertex that each of them
reaches as fast as the NICs and its PCIe slot allow; where the host's PCIe switches are in its topology, links
from those.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.topology import Link, Permutation, Switch, Topology, Vertex
from arborcast.topologies.builders import assuming, cable, check_size, holding, with_obvious_symmetries
from arborcast.topologies.fabrics import SWITCH_HOP_US, Fabric, Wiring
from arborcast.topologies.gpus import GPUS, slot_rate
from arborcast.topologies.machine import Machine, Nic
from arborcast.topologies.rates import FABRIC_HOP_US, Rates, not_infiniband


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts that are joined.

    Attributes:
        machine: all of them as one, with no NIC left over.
        owners: the number of the host that each vertex belongs to; None for those of the fabric.
    """

    machine: Machine
    owners: tuple[int | None, ...]


def with_nics(
    machine: Machine, rate: Fraction | None = None, *, chosen: str | None = None, option: str = "nic"
) -> Machine:
    """The machine with the NICs that a fabric joins: the fastest of each host, as others serve storage etc.

    Where `rate` is given, that is those nearest to the GPUs, as a file without rates does not tell apart what
    serves storage. NICs that are made up for a host whose GPUs PCIe joins hang beyond the GPUs' slots.

    Args:
        machine: as read from a file or the catalog.
        rate: GB/s each way of every NIC, whatever the file says; one per rank where it shows none.
        chosen: which NICs: "all", "near" (of each rank those nearest to it), so many of each host, nearest
            first, or names, as "mlx5_0,mlx5_3".
        option: what errors call `rate`.

    Raises:
        TopologyError: the machine shows no NICs, or not how fast they are, and no rate is given; it has not
            those that are chosen.
    """
    name = machine.topology.name
    if not machine.nics:
        if rate is None:
            raise TopologyError(f"{name}: shows no NICs; {option} GB/s gives each of its ranks one")
        return replace(machine, nics=_beyond_slots(machine.topology, rate))
    everything = machine
    machine = chosen_nics(machine, chosen or ("all" if rate is None else "near"))
    if chosen is None and len(machine.nics) < len(everything.nics):
        far = [nic.name for nic in everything.nics if nic not in machine.nics]
        note = f"{name}: NICs not nearest to a GPU are left out: {', '.join(far)}; --nics says which"
        machine = replace(machine, notes=(*machine.notes, note))
    if rate is not None:
        shown = sorted({nic.rate for nic in machine.nics if nic.rate is not None})
        note = (
            f"{name}: all {len(machine.nics)} NICs count with the {float(rate):g} GB/s of {option}, where it "
            f"shows {', '.join(f'{float(speed):g}' for speed in shown)}"
        )
        return replace(
            machine,
            nics=tuple(replace(nic, rate=rate, assumed="") for nic in machine.nics),
            notes=(*machine.notes, note) if len(shown) > 1 else machine.notes,
        )
    known: list[Fraction] = []
    for nic in machine.nics:
        if nic.rate is None:
            raise TopologyError(f"{name}: does not say how fast {nic.name} is; {option} GB/s does")
        known.append(nic.rate)
    kept: set[int] = set()
    notes = list(machine.notes)
    slower: dict[Fraction, list[str]] = {}
    for own in nics_by_host(machine):
        speeds = {index: known[index] for index in own}
        most = max(speeds.values(), default=Fraction(0))
        kept |= {index for index, speed in speeds.items() if speed == most}
        left = [index for index in own if index not in kept]
        slower.setdefault(most, []).extend(
            f"{machine.nics[index].name} ({float(speeds[index]):g})" for index in left
        )
    for most, names in slower.items():
        if names:
            notes.append(
                f"{name}: NICs of less than {float(most):g} GB/s are left out: "
                f"{', '.join(dict.fromkeys(names))}"
            )
    nics = tuple(nic for index, nic in enumerate(machine.nics) if index in kept)
    return replace(machine, nics=nics, notes=tuple(notes))


def _beyond_slots(topology: Topology, rate: Fraction) -> tuple[Nic, ...]:
    """One NIC for each rank, on the PCIe switch or CPU that its slot leads to where there are such."""
    over = dict(enumerate(range(topology.ranks)))
    for link in topology.links:
        if link.src < topology.ranks <= link.dst and _PCIE.fullmatch(str(topology.label(link.dst))):
            over[link.src] = link.dst
    return tuple(Nic(f"nic{rank}", rate, (vertex,)) for rank, vertex in over.items())


_PCIE = re.compile(r"(?:host[0-9]+\.)?(?:pcie|bridges|cpu)[0-9]+")
"""Vertices of PCIe, as readers and catalog name them."""


def chosen_nics(machine: Machine, which: str) -> Machine:
    """The machine with some of its NICs; for `which` see `with_nics`.

    Raises:
        TopologyError: it has not so many, or none of a name.
    """
    name, nics = machine.topology.name, machine.nics
    if which == "all":
        return machine
    if which != "near" and not which.isdecimal():
        wanted = [word.strip() for word in which.split(",")]
        missing = [word for word in wanted if word not in {nic.name for nic in nics}]
        if missing:
            known = ", ".join(dict.fromkeys(nic.name for nic in nics))
            raise TopologyError(f"{name}: has no NIC {shorten(missing[0])}, only {known}")
        return replace(machine, nics=tuple(nic for nic in nics if nic.name in wanted))
    order: list[tuple[int, int]] = []
    best: dict[Vertex, tuple[int, int]] = {}
    reached = [_nearest_ranks(machine.topology, nic) for nic in nics]
    for distance, ranks in reached:
        order.append((distance, len(ranks)))
        best.update((rank, min(best.get(rank, order[-1]), order[-1])) for rank in ranks)
    kept: set[int] = set()
    for own in nics_by_host(machine):
        if which == "near":
            kept |= {at for at in own if order[at] in (best[rank] for rank in reached[at][1])}
        elif 1 <= int(which) <= len(own):
            kept |= set(sorted(own, key=order.__getitem__)[: int(which)])
        else:
            raise TopologyError(f"{name}: has {len(own)} NICs on a host, must be asked for 1..{len(own)}")
    return replace(machine, nics=tuple(nic for at, nic in enumerate(nics) if at in kept))


def _nearest_ranks(topology: Topology, nic: Nic) -> tuple[int, tuple[Vertex, ...]]:
    """How many links a NIC is away from the ranks nearest to it, and which these are."""
    here = set(nic.near)
    seen = set(here)
    for distance in range(topology.size + 1):
        ranks = tuple(sorted(vertex for vertex in here if vertex < topology.ranks))
        if ranks:
            return distance, ranks
        here = {link.dst for link in topology.links if link.src in here} - seen
        seen |= here
    return topology.size, ()


def even_nics(ranks: int, rate: Fraction, nics: int) -> tuple[Nic, ...]:
    """So many NICs for these ranks: each has one or more of its own, or neighbours share one."""
    per, each = max(1, ranks // nics), max(1, nics // ranks)
    groups = [tuple(range(index // each * per, (index // each + 1) * per)) for index in range(nics)]
    return tuple(Nic(f"nic{index}", rate, near) for index, near in enumerate(groups))


def nics_by_host(machine: Machine) -> tuple[tuple[int, ...], ...]:
    """Indices of the NICs of each host of a machine, hosts in the order of their numbers.

    A NIC is of the host of what it hangs on, and a switch of that of the nearest rank.
    """
    owner = dict(enumerate(machine.hosts))
    own: dict[int, list[int]] = {host: [] for host in sorted(set(machine.hosts))}
    reached = owner
    while reached and len(own) > 1:
        reached = {}
        for link in machine.topology.links:
            if link.src in owner and link.dst not in owner:
                reached.setdefault(link.dst, owner[link.src])
        owner |= reached
    first = min(own)
    for index, nic in enumerate(machine.nics):
        own[owner.get(min(nic.near, default=0), first)].append(index)
    return tuple(map(tuple, own.values()))


def speeds_by_host(machine: Machine) -> list[list[Fraction]]:
    """GB/s each way of the NICs of each host, as a fabric asks for them."""
    return [[machine.nics[nic].rate or Fraction(0) for nic in own] for own in nics_by_host(machine)]


@dataclass(frozen=True, slots=True)
class _Port:
    """NICs of a host that hang on the same vertices.

    Attributes:
        near: these vertices, numbered as in the host's own topology.
        nics: indices of the NICs.
        rate: GB/s each way of the NICs together.
        vertex: that of the NICs, which stands after the host's switches; None where `near` is one vertex, and
            not a GPU whose PCIe slot several NICs share.
    """

    near: tuple[Vertex, ...]
    nics: tuple[int, ...]
    rate: Fraction
    vertex: Vertex | None


def _ports(machine: Machine) -> tuple[_Port, ...]:
    groups: dict[tuple[Vertex, ...], list[int]] = {}
    everyone = tuple(range(machine.topology.ranks))
    for index, nic in enumerate(machine.nics):
        # What a file does not place is as near to all ranks.
        groups.setdefault(tuple(sorted(set(nic.near))) or everyone, []).append(index)
    ports: list[_Port] = []
    free = machine.topology.size
    for near, nics in groups.items():
        rate = sum((machine.nics[nic].rate or Fraction(0) for nic in nics), Fraction(0))
        stands = len(near) > 1 or (len(nics) > 1 and _through_slot(machine, near[0], rate) < rate)
        ports.append(_Port(near, tuple(nics), rate, free if stands else None))
        free += stands
    return tuple(ports)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A machine with its place among the vertices of the cluster.

    Attributes:
        machine: a host, or several.
        ports: of its NICs.
        by_host: see `nics_by_host`.
        places: of each NIC its host, counted from 0 in this machine, and its number in that host.
        first_host: where its hosts begin.
        first_rank: where its ranks begin.
        first_switch: where its switches begin, those that stand for shared NICs last.
    """

    machine: Machine
    ports: tuple[_Port, ...]
    by_host: tuple[tuple[int, ...], ...]
    places: Mapping[int, tuple[int, int]]
    first_host: int
    first_rank: int
    first_switch: int

    @property
    def size(self) -> int:
        """Its vertices: ranks, switches, shared NICs."""
        return self.machine.topology.size + sum(port.vertex is not None for port in self.ports)

    def vertex(self, own: Vertex) -> Vertex:
        """The vertex of the cluster that one of the host is."""
        ranks = self.machine.topology.ranks
        return self.first_rank + own if own < ranks else self.first_switch + own - ranks

    def fabric_switch(self, nic: int, wiring: Wiring) -> int:
        """The switch of the fabric that a NIC is cabled to."""
        host, number = self.places[nic]
        return wiring.port(self.first_host + host, number)

    def switches(self) -> Iterator[Switch]:
        """Its own, then those that stand for shared NICs."""
        yield from self.machine.topology.switches
        shared = [port for port in self.ports if port.vertex is not None]
        yield from (Switch(f"nic{index}") for index in range(len(shared)))


def join(
    name: str,
    hosts: Sequence[Machine],
    fabric: Fabric,
    *,
    word: str = "host",
    rates: Rates = Rates.DATASHEET,
    network: str = "an unknown network",
) -> Cluster:
    """Hosts cabled to a fabric by all of their NICs.

    Ranks are numbered host by host; then come the switches of each host, called `host3.nvswitch`, then those
    of the fabric; all that reduce or multicast before all others. Equal hosts are symmetric: the symmetries
    of one are declared for all at once, and so are the rotations of hosts that the fabric allows. A machine
    of several hosts is one in names and rotations; the fabric takes each of its hosts for one.

    Args:
        name: of the topology.
        hosts: machines with NICs of known rate (see `with_nics`); one is enough if it is several hosts.
        fabric: see `topologies.fabrics`.
        word: what the names of a host's switches begin with.
        rates: whose figure the PCIe slot of a GPU has that shares a NIC; one of its own counts up to the data
            sheet's figure of the slot, as its rate is a data sheet's.
        network: what the fabric is; latencies are those of InfiniBand, assumed for any other.

    Raises:
        TopologyError: too large, a fabric that does not fit, or fewer than 2 hosts.
    """
    placed = _placed(hosts)
    speeds = [
        [host.machine.nics[nic].rate or Fraction(0) for nic in own] for host in placed for own in host.by_host
    ]
    if len(speeds) < 2:
        raise TopologyError(f"{name}: must join at least 2 hosts, got {len(speeds)}")
    wiring = fabric.wire(name, speeds)
    first = placed[-1].first_switch + placed[-1].size - placed[-1].machine.topology.ranks
    ranks, size = placed[0].first_switch, first + len(wiring.switches)
    check_size(name, size, sum(len(host.topology.links) + 4 * len(host.nics) for host in hosts))
    why = not_infiniband(network)
    links = [link for host in placed for link in _links(host, wiring, first, rates, why)]
    for one, other, rate in wiring.cables:
        links += assuming(cable(first + one, first + other, rate, SWITCH_HOP_US), latency=why)
    switches = [
        replace(own, name=f"{word}{number}.{own.name}")
        for number, host in enumerate(placed)
        for own in host.switches()
    ]
    switches += [Switch(own) if isinstance(own, str) else own for own in wiring.switches]
    order = [*range(ranks), *(ranks + place for place in _able_first(switches))]
    moved = {before: after for after, before in enumerate(order)}
    owner = {host.vertex(own): number for number, host in enumerate(placed) for own in range(host.size)}
    owners = [owner.get(vertex) for vertex in order]
    topology = Topology.build(
        name,
        ranks,
        (replace(link, src=moved[link.src], dst=moved[link.dst]) for link in links),
        (switches[vertex - ranks] for vertex in order[ranks:]),
        streams=[count for host in hosts for count in host.topology.streams or [None] * host.topology.ranks],
    )
    kinds = {id(host.machine): host for host in placed}.values()
    joined = Machine(
        replace(topology, symmetries=tuple(_symmetries(topology, placed, wiring, first, order))),
        gpus=tuple(gpu for host in hosts for gpu in host.gpus),
        devices=tuple(device for host in hosts for device in host.devices),
        hosts=_numbered(hosts),
        notes=tuple(dict.fromkeys(note for host in kinds for note in (*host.machine.notes, *_held_up(host)))),
    )
    return Cluster(joined, tuple(owners))


def _able_first(switches: Sequence[Switch]) -> list[int]:
    """The order of a topology's switches: those that reduce or multicast, then the others."""
    return sorted(range(len(switches)), key=lambda place: not switches[place].is_able)


def _placed(hosts: Sequence[Machine]) -> list[_Placed]:
    number, rank, switch = 0, 0, sum(host.topology.ranks for host in hosts)
    placed: list[_Placed] = []
    known: dict[int, _Placed] = {}  # by identity: most hosts are the same object
    for host in hosts:
        if id(host) not in known:
            by_host = nics_by_host(host)
            places = {nic: (own, index) for own, nics in enumerate(by_host) for index, nic in enumerate(nics)}
            known[id(host)] = _Placed(host, _ports(host), by_host, places, 0, 0, 0)
        placed.append(replace(known[id(host)], first_host=number, first_rank=rank, first_switch=switch))
        number += len(placed[-1].by_host)
        rank += host.topology.ranks
        switch += placed[-1].size - host.topology.ranks
    return placed


def _numbered(hosts: Sequence[Machine]) -> tuple[int, ...]:
    """Hosts of all ranks: a machine may be several itself."""
    numbers: list[int] = []
    for host in hosts:
        start = max(numbers, default=-1) + 1
        numbers += [start + own for own in host.hosts]
    return tuple(numbers)


def _links(host: _Placed, wiring: Wiring, first: Vertex, rates: Rates, why: str) -> Iterator[Link]:
    """The links inside a host, and from it to the fabric, whose switches begin at `first`.

    `why` the latencies of the latter are assumed, where they are.
    """
    machine = host.machine
    for link in machine.topology.links:
        yield replace(link, src=host.vertex(link.src), dst=host.vertex(link.dst))
    for port in host.ports:
        end = host.vertex(port.near[0] if port.vertex is None else port.vertex)
        figures = rates if len(port.near) > 1 else Rates.DATASHEET
        slots = [_through_slot(machine, near, port.rate, figures) for near in port.near]
        if port.vertex is not None:
            whys = "; ".join(dict.fromkeys(filter(None, (machine.nics[nic].assumed for nic in port.nics))))
            for near, slot in zip(port.near, slots, strict=True):
                yield from assuming(cable(host.vertex(near), end, slot), rate=whys)
        for nic in port.nics:
            rate = machine.nics[nic].rate or Fraction(0)
            rate = min(rate, *slots) if port.vertex is None else rate
            both = cable(end, first + host.fabric_switch(nic, wiring), rate, FABRIC_HOP_US)
            yield from assuming(both, rate=machine.nics[nic].assumed, latency=why)


def _through_slot(machine: Machine, near: Vertex, rate: Fraction, rates: Rates = Rates.DATASHEET) -> Fraction:
    """How much of a rate, GB/s each way, the PCIe slot of a rank lets through: all where its GPU is unknown.

    All of it, too, for switches, whose links say what they carry.
    """
    gpu = machine.gpus[near] if near < machine.topology.ranks else None
    return rate if gpu is None else min(rate, slot_rate(GPUS[gpu], rates))


def _held_up(host: _Placed) -> Iterator[str]:
    """A line for each kind of GPU whose own NICs are faster than its PCIe slot."""
    machine = host.machine
    for port in host.ports:
        slot = _through_slot(machine, port.near[0], port.rate)
        if len(port.near) == 1 and slot < port.rate:
            yield (
                f"{machine.topology.name}: NICs of {float(port.rate):g} GB/s count with the "
                f"{float(slot):g} of the PCIe slot ({machine.gpus[port.near[0]]})"
            )


def _symmetries(
    topology: Topology, placed: Sequence[_Placed], wiring: Wiring, first: Vertex, order: Sequence[Vertex]
) -> Iterator[Permutation]:
    """Those of equal hosts, applied to all of them at once, and rotations of equal hosts.

    `order` is what each vertex was before switches that are able moved to the front. Each is tried on the
    topology: what NICs and fabric break is not declared.
    """
    moved = {before: after for after, before in enumerate(order)}
    classes: dict[tuple[object, ...], list[int]] = {}
    for number, host in enumerate(placed):
        classes.setdefault(_kind(host), []).append(number)
    moves: list[_Move] = []
    for numbers in classes.values():
        sample = placed[numbers[0]]
        graph = sample.machine.topology
        own = graph.symmetries or with_obvious_symmetries(graph).symmetries
        within = [_within(sample, images) for images in own]
        if None in within:
            within += [_within(sample, images) for images in _port_turns(sample)]
        moves += [_Move(dict(zip(numbers, numbers, strict=True)), inside) for inside in within if inside]
        each = len(sample.by_host)
        blocks = [block // each for block in wiring.blocks if len(classes) == 1 and block % each == 0]
        moves += [_Move(turn, _still(sample)) for turn in _turns(numbers, blocks)]
    for move in moves:
        images = _images(move, placed, wiring, first, topology.size)
        if images is None or images == tuple(range(topology.size)):
            continue
        yield from holding(topology, [tuple(moved[images[vertex]] for vertex in order)])


@dataclass(frozen=True, slots=True)
class _Within:
    """A permutation of a host's vertices, those of shared NICs included, and of its NICs."""

    vertices: Mapping[Vertex, Vertex]
    nics: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class _Move:
    """Hosts that take each other's places, all changed in the same way inside."""

    hosts: Mapping[int, int]
    within: _Within


def _still(host: _Placed) -> _Within:
    vertices, nics = range(host.size), range(len(host.machine.nics))
    return _Within(dict(zip(vertices, vertices, strict=True)), dict(zip(nics, nics, strict=True)))


def _within(host: _Placed, images: Permutation) -> _Within | None:
    """A symmetry of a host's topology with what it does to NICs; None where these do not follow."""
    by_near = {port.near: port for port in host.ports}
    vertices = dict(enumerate(images))
    nics: dict[int, int] = {}
    for port in host.ports:
        image = by_near.get(tuple(sorted(images[vertex] for vertex in port.near)))
        if image is None or len(image.nics) != len(port.nics):
            return None
        nics.update(zip(port.nics, image.nics, strict=True))
        if port.vertex is not None and image.vertex is not None:
            vertices[port.vertex] = image.vertex
    return _Within(vertices, nics)


def _kind(host: _Placed) -> tuple[object, ...]:
    """What hosts have in common that are alike, whatever their files call them and what is in them."""
    topology = host.machine.topology
    abilities = tuple(switch.abilities for switch in topology.switches)
    ports = tuple((nic.rate, nic.near) for nic in host.machine.nics)
    return topology.ranks, topology.links, topology.streams, abilities, ports, host.by_host


def _port_turns(host: _Placed) -> Iterator[Permutation]:
    """Rotations among ranks that share NICs, and of these groups, where they are symmetries of the host."""
    topology = host.machine.topology
    groups = [port.near for port in host.ports]
    if sorted(rank for group in groups for rank in group) != list(range(topology.ranks)):
        return
    if len(set(map(len, groups))) > 1:
        return
    within = {rank: group[(at + 1) % len(group)] for group in groups for at, rank in enumerate(group)}
    onward = zip(groups, (*groups[1:], groups[0]), strict=True)
    among = {rank: image for group, other in onward for rank, image in zip(group, other, strict=True)}
    for images in (within, among):
        yield from holding(topology, [tuple(images.get(vertex, vertex) for vertex in range(topology.size))])


def _turns(numbers: Sequence[int], blocks: Sequence[int]) -> Iterator[Mapping[int, int]]:
    """Rotations of hosts within blocks, of blocks within larger ones, of all."""
    sizes = [1, *blocks, len(numbers)]
    for small, large in pairwise(sizes):
        if small < large and large % small == 0 and len(numbers) % large == 0:
            yield {
                number: numbers[index // large * large + (index + small) % large]
                for index, number in enumerate(numbers)
            }


def _images(
    move: _Move, placed: Sequence[_Placed], wiring: Wiring, first: Vertex, size: int
) -> Permutation | None:
    """What a move does to all vertices; None where two NICs of one switch would go to different ones."""
    images = list(range(size))
    switches: dict[int, int] = {}
    for number, host in enumerate(placed):
        target = move.hosts.get(number)
        if target is not None:
            for own, image in move.within.vertices.items():
                images[host.vertex(own)] = placed[target].vertex(image)
        for nic in range(len(host.machine.nics)):
            here = host.fabric_switch(nic, wiring)
            there = here
            if target is not None:
                there = placed[target].fabric_switch(move.within.nics[nic], wiring)
            if switches.setdefault(here, there) != there:
                return None
    leaves = set(switches)
    above = {one: other for one, other, _ in wiring.cables if other not in leaves}
    for one, other in above.items():  # from the leaves up: spines follow their leaves
        switches.setdefault(other, above[switches[one]])
    for here, there in switches.items():
        images[first + here] = first + there
    return tuple(images)
