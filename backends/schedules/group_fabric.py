"""From options to the links among the ranks of one group, and where that knowledge comes from.

A scheduler hands out some ranks of a machine, a group is some ranks of a job, and links may be down: what
remains is the fragment on which the schedules of the group are found. Nothing of it is guessed, except that
a group of which nobody says anything is a full mesh of sockets, and that is said.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import permutations
from typing import TYPE_CHECKING

from arborcast import topologies
from arborcast.backends.options import Options
from arborcast.backends.programs.traffic import straight_ways
from arborcast.backends.schedules.spare import fitting_spares
from arborcast.backends.transport.lanes import CableLanes
from arborcast.synth.errors import InputError
from arborcast.synth.faults.faulty import Faulty, without
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.topology import Hop, Link, Topology
from arborcast.topologies.files import load_file

if TYPE_CHECKING:
    from arborcast.backends.transport.addresses import Ends  # which imports torch
    from arborcast.synth.faults.backup_schedules import BackupSchedules
    from arborcast.synth.groups.result import GroupSchedules

ASSUMED_BANDWIDTH = 1
"""GB/s of each link of a full mesh that is only assumed."""

ASSUMED_LATENCY_US = 20
"""Latency of such a link: about what a message through a socket costs."""


@dataclass(frozen=True, slots=True)
class Cabling:
    """What one rank must know to connect along cables.

    Attributes:
        ends: with whom it may connect, by number of the lane (`transport.lanes`); the addresses of their
            cable, its own first, None within a host.
        beside: the ranks next to it in a tree of links that spans the group.
        lanes: how its messages are split where several cables lead to a rank.
    """

    ends: Mapping[int, Ends | None]
    beside: frozenset[int]
    lanes: CableLanes


@dataclass(frozen=True)
class GroupFabric:
    """The links among the ranks of a group.

    Attributes:
        topology: its rank i is rank i of the group; its switches only forward, whatever they can do.
        source: what it was made from, in words.
        is_assumed: whether nobody described it.
        healthy: the same ranks before links failed; None where none did, or where the group is a fragment.
        places: the rank of the whole fabric that each rank of the group is; empty where that is not known.
        joint: what groups of the job run at once on the whole fabric; nothing where nobody says.
        gone: links between ranks of the group that have failed, as its ranks.
        spares: schedules for the failure of links of the group, made beforehand.
        cables: by two ranks of the group, in both orders, the cables that join them: each as a link that way,
            the fastest one first. None where no link of the whole fabric has addresses, so that ranks may
            connect with whom they like.
    """

    topology: Topology
    source: str
    is_assumed: bool
    healthy: Topology | None = None
    places: tuple[int, ...] = ()
    joint: tuple[GroupSchedules, ...] = ()
    gone: tuple[Hop, ...] = ()
    spares: tuple[BackupSchedules, ...] = ()
    cables: Mapping[Hop, tuple[Link, ...]] | None = None

    @property
    def asked(self) -> Topology | Faulty:
        """What schedules are asked for: with faults, where it is known what they were faults of."""
        if self.healthy is None:
            return self.topology
        return Faulty(self.healthy, self.topology, tuple(range(self.topology.size)))

    @property
    def apart(self) -> tuple[Hop, ...]:
        """Pairs of ranks that send each other nothing straight: by a failure, or for want of a cable."""
        if self.cables is None:
            return self.gone
        joined = straight_ways(self.topology).keys()
        return tuple(pair for pair in permutations(range(self.topology.ranks), 2) if pair not in joined)

    def cabling(self, rank: int) -> Cabling | None:
        """How a rank of the group connects; None where it may connect with whom it likes.

        Raises:
            InputError: a rank of the group cannot be reached along links among its ranks.
        """
        if self.cables is None:
            return None
        beside: dict[int, set[int]] = {rank: set() for rank in range(self.topology.ranks)}
        for src, dst in straight_ways(self.topology):
            beside[src].add(dst)
            beside[dst].add(src)
        before, reached = {0: 0}, [0]
        for one in reached:  # grows meanwhile
            new = sorted(beside[one] - before.keys())
            before |= dict.fromkeys(new, one)
            reached += new
        if far := sorted(beside.keys() - before.keys()):
            raise InputError(
                f"{self.topology.name}: rank {far[0]} of the group must be joined with rank 0 along links "
                "among its ranks, as no process forwards for a group that it is not in"
            )
        ends: dict[int, Ends | None] = dict.fromkeys(sorted(beside[rank]))
        out, into = {}, {}
        for peer in sorted(beside[rank]):
            found = self.cables.get((rank, peer), ())
            ends |= {peer + lane * self.topology.ranks: it.addresses for lane, it in enumerate(found)}
            if len(found) > 1:
                out[peer] = [cable.bandwidth for cable in found]
                into[peer] = [cable.bandwidth for cable in self.cables[peer, rank]]
        tree = {one for one in before if one != rank and (before[one] == rank or before[rank] == one)}
        return Cabling(ends, frozenset(tree), CableLanes(self.topology.ranks, out, into))

    def __str__(self) -> str:
        """One line for a log."""
        links = len(self.topology.links)
        loose = "; messages are not held back for its streams" if self.topology.streams else ""
        return (
            f"{self.topology.name}: {self.topology.ranks} ranks, {links} directed links, {self.source}{loose}"
        )


def fabric_for(
    options: Options, global_ranks: Sequence[int], world_size: int, *, lost: Collection[Ends] = ()
) -> GroupFabric:
    """The fragment of the fabric that a group is.

    Links to ranks outside the group are left out: their processes do not forward for it. The fragment may
    therefore have ranks that cannot reach each other.

    Args:
        options: `topology`, `ranks`, `without` and `spares` count here.
        global_ranks: of the group's ranks, in the group's order.
        world_size: ranks of the default group.
        lost: cables that have failed beside others that join the same ranks, by the addresses of their ends.

    Raises:
        InputError: the fabric cannot be read, it does not say which of its ranks the processes are, or there
            is no such rank or link.
    """
    assert all(0 <= rank < world_size for rank in global_ranks), "the caller knows the world"
    joint = _joint(options)
    described = options.topology if not joint or options.topology is not None else joint[0].topology
    if described is None:
        return _assumed(options, global_ranks, world_size)
    whole, source = _described(described)
    for it in joint:
        _check_joint(it, whole, options)
    whole = _without_cables(whole.forwarding, lost)  # no process of the job adds in a switch
    places = _places(options.ranks, whole, world_size)
    topology = without_links(whole, options.without)
    chosen = [places[rank] for rank in global_ranks]
    is_whole = chosen == list(range(whole.ranks))
    topology = topology if is_whole else topology.subset(chosen)
    cables = None
    if whole is not whole.without_addresses:
        _check_cabled(options)
        cables = _cables(topology)
        whole, topology = whole.without_addresses, topology.without_addresses
    place = {rank: own for own, rank in enumerate(chosen)}
    inside = [hop for hop in options.without if place.keys() >= set(hop)]
    healthy = whole if is_whole or not options.spares else whole.subset(chosen)
    return GroupFabric(
        topology,
        source + _words_of(options.without, lost),
        is_assumed=False,
        healthy=whole if is_whole and options.without else None,
        places=tuple(chosen),
        joint=() if lost else joint,  # made for other rates, as spares are
        gone=tuple((place[first], place[second]) for first, second in inside),
        spares=() if lost else fitting_spares(options.spares, healthy, is_whole=is_whole),
        cables=cables,
    )


def has_cables(options: Options) -> bool:
    """Whether groups with these options connect along cables alone.

    Args:
        options: of which what is not said is taken from the environment.

    Raises:
        InputError: the fabric cannot be read.
    """
    described = options.merged().topology
    if described is None:
        return False
    whole, _ = _described(described)
    return whole is not whole.without_addresses


def _check_cabled(options: Options) -> None:
    if options.p2p != "off" or options.gloo_below:
        raise InputError(
            "p2p and gloo_below: must be left out on a fabric whose links have addresses, as gloo and NCCL "
            f"connect ranks without a link, got {options.p2p} and {options.gloo_below}"
        )


def _cables(topology: Topology) -> dict[Hop, tuple[Link, ...]]:
    """What `GroupFabric.cables` says of a topology.

    Raises:
        InputError: the two directions have other addresses.
    """
    found: dict[Hop, tuple[Link, ...]] = {}
    links = {(link.src, link.dst): link for link in topology.links if link.is_reached}
    for ends, link in links.items():
        if ends in found:
            continue
        there = back = {cable.addresses: cable for cable in link.cables}
        if (other := links.get(ends[::-1])) is not None:
            back = {cable.addresses: cable for cable in other.reversed.cables}
        if there.keys() != back.keys():
            raise InputError(
                f"fabric {topology.name}: both directions of {link.src}-{link.dst} must have the same "
                f"addresses, got {_shown(there)} and {_shown(back)}"
            )
        rates = {place: there[place].bandwidth + back[place].bandwidth for place in there}
        order = sorted(there, key=lambda place: -rates[place])  # of equal ones that of addresses stays
        found[ends] = tuple(there[place] for place in order)
        found[ends[::-1]] = tuple(back[place].reversed for place in order)
    return found


def _shown(cables: Iterable[Ends | None]) -> str:
    return ", ".join(map(str, cables))


def _without_cables(topology: Topology, lost: Collection[Ends]) -> Topology:
    """A topology whose links have lost some of their cables, but not all of any."""
    gone = {*lost, *((second, first) for first, second in lost)}
    links = [
        Link.bundle(left)
        for link in topology.links
        if (left := [cable for cable in link.cables if cable.addresses not in gone])
    ]
    return replace(topology, links=tuple(links)) if lost else topology


def _joint(options: Options) -> tuple[GroupSchedules, ...]:
    """What groups run at once, read once in a process."""
    given = options.groups
    if isinstance(given, (str, os.PathLike)):
        return (_read_once(os.fspath(given)),)
    if isinstance(given, tuple | list):
        return tuple(given)
    return () if given is None else (given,)


@cache
def _read_once(folder: str) -> GroupSchedules:
    from arborcast.synth.groups.group_folder import read_groups

    return read_groups(folder)


def _check_joint(joint: GroupSchedules, whole: Topology, options: Options) -> None:
    theirs, whole = joint.topology.without_addresses, whole.without_addresses
    if (theirs.ranks, theirs.links, len(theirs.switches)) != (whole.ranks, whole.links, len(whole.switches)):
        raise InputError(f"groups: must be on topology {whole.name}, got those of {theirs.name}")
    if joint.certificate.relays:
        raise InputError(
            "groups: must not forward for each other, as their processes do not (synth groups --no-relays), "
            f"got {len(joint.groups)} groups with relays"
        )
    if options.without:
        raise InputError("groups: must be left out with without, for which they were not made, got both")


def without_links(topology: Topology, pairs: Iterable[Hop]) -> Topology:
    """A topology of the same name without the links between some pairs of its ranks, in both directions.

    Parallel links count as one and are all gone.

    Raises:
        InputError: there is no link between the ranks of a pair.
    """
    pairs = dict.fromkeys((first, second) if first < second else (second, first) for first, second in pairs)
    for first, second in pairs:
        both = {(first, second), (second, first)}
        if second >= topology.ranks or not both & topology.bandwidth.keys():
            raise InputError(
                f"without {first}-{second}: must be a link between two ranks of {topology.name}, which has "
                "no such link"
            )
    return replace(without(topology, links=pairs).topology, name=topology.name) if pairs else topology


def _described(topology: str | os.PathLike[str] | Topology) -> tuple[Topology, str]:
    match topology:
        case Topology():
            return topology, "given in code"
        case str():
            return topologies.load(topology), f"from {topology}"
        case path:  # a file even where the catalog has something of that name
            return load_file(os.fspath(path)).topology, f"from {os.fspath(path)}"


def _places(ranks: Sequence[int] | None, whole: Topology, world_size: int) -> Sequence[int]:
    """The rank of the fabric that each global rank is."""
    if ranks is None:
        if whole.ranks > world_size:  # which of them the scheduler handed out must not be guessed
            raise InputError(
                f"fabric {whole.name}: has {whole.ranks} ranks and the job has {world_size}; ARBORCAST_RANKS "
                "(or the option ranks) must name the rank of the fabric that each rank of the job is"
            )
        if whole.ranks < world_size:
            raise InputError(
                f"fabric {whole.name}: must have a rank for each of the {world_size} of the job, "
                f"got {whole.ranks}"
            )
        return range(world_size)
    if len(ranks) != world_size:
        raise InputError(
            f"ranks: must name a rank of fabric {whole.name} for each of the {world_size} ranks of the job, "
            f"got {len(ranks)}"
        )
    for rank in ranks:
        if rank >= whole.ranks:
            raise InputError(f"ranks: fabric {whole.name} has ranks 0..{whole.ranks - 1}, got {rank}")
    return ranks


def _assumed(options: Options, global_ranks: Sequence[int], world_size: int) -> GroupFabric:
    """A full mesh; links are left out by global rank, since there is no other."""
    if options.spares:
        raise InputError(
            "spares: must be for a fabric, and none is given (ARBORCAST_TOPOLOGY or option topology), "
            f"got {len(options.spares)}"
        )
    if options.ranks is not None:
        raise InputError(
            "ranks: must be those of a fabric, and none is given (ARBORCAST_TOPOLOGY or option topology), "
            f"got {shorten(list(options.ranks))}"
        )
    for first, second in options.without:
        if max(first, second) >= world_size:
            raise InputError(f"without {first}-{second}: ranks of the job are 0..{world_size - 1}")
    position = {rank: index for index, rank in enumerate(global_ranks)}
    inside = [
        (position[first], position[second])
        for first, second in options.without
        if first in position and second in position
    ]
    mesh = without_links(_full_mesh(len(global_ranks)), inside)
    source = (
        f"assumed, since nobody described the fabric (ARBORCAST_TOPOLOGY): {ASSUMED_BANDWIDTH} GB/s and "
        f"{ASSUMED_LATENCY_US} us between any two ranks"
    )
    return GroupFabric(mesh, source + _words_of(options.without), is_assumed=True, gone=tuple(inside))


@lru_cache(maxsize=16)  # of groups of few sizes
def _full_mesh(ranks: int) -> Topology:
    return topologies.load(f"full:{ranks},bandwidth={ASSUMED_BANDWIDTH},latency={ASSUMED_LATENCY_US}")


def _words_of(without: Sequence[Hop], lost: Collection[Ends] = ()) -> str:
    words = [*(f"{first}-{second}" for first, second in without), *(" to ".join(ends) for ends in lost)]
    return f", without {', '.join(words)}" if words else ""
