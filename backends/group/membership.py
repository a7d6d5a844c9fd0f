"""One rank's place in a group: it finds the others, agrees with them on a fabric, connects, may join again.

Where links have addresses, cables that do not answer are left out on all ranks alike, when the group is made
and when it goes on after one was lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from arborcast.backends.dataflow.engine import Engine
from arborcast.backends.errors import ExecutionError
from arborcast.backends.group.history import calls_to_keep
from arborcast.backends.options import MESSAGES, Options
from arborcast.backends.schedules.combined import digest_of
from arborcast.backends.schedules.group_fabric import Cabling, GroupFabric, fabric_for
from arborcast.backends.schedules.held import fabric_name
from arborcast.backends.schedules.rendezvous import location, meet, processors
from arborcast.backends.schedules.spare import digests_of
from arborcast.backends.tensors.shared_store import shared_store
from arborcast.backends.tensors.torch_compat import PrefixStore, Store, has_nccl
from arborcast.backends.transport.addresses import Ends, can_be_bound, listening_addresses
from arborcast.backends.transport.alarm import Alarm
from arborcast.backends.transport.lanes import CableLanes
from arborcast.backends.transport.network import Network
from arborcast.synth.bounds import bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.simulation.pieces import ONE_HOST, SEVERAL_HOSTS
from arborcast.synth.topology import Hop, Link

log = logging.getLogger(__name__)

ALIKE = (
    "gloo_below",
    "piece_bytes",
    "transport",
    "method",
    "start",
    "prepare",
    "p2p",
    "kernel_below",
    "bits",
)
"""Options that decide what serves a call."""

ANSWER_S = 1.2
"""How long the other end of a cable may take to answer before a group does without the cable: the kernel asks
twice within that."""

CABLE_LOST_S = 1.0
"""After how long without an answer along a cable it counts as lost; hosts that are alive answer at once."""


class Membership:
    """One rank of a group, connected with the others.

    Attributes:
        rank: this one in the group.
        size: ranks of the group.
        global_ranks: of the group's ranks in the default group.
        options: as given and by the environment; links that were left out since are among `without`.
        fabric: the links that schedules are made for.
        name: that no other group has had, in this job or an earlier one with its store.
        store: the part of the group's store that only its present processes know.
        own_store: the same over a connection that other threads than the caller's may wait at.
        cores: of the one host on which all ranks run; None where they run on several.
        cut: into how many pieces chunks are cut.
        cables: with whom alone this rank connects, by number of the lane (`transport.lanes`), and by which
            addresses; None where with everybody.
        lanes: where several cables lead to one rank; None where with everybody.
        life: how often ranks have joined again.
        network: the connections of this life.
        engine: what runs over them.

    Args:
        store: that all ranks of the group share, and nobody else.
        rank: this rank in the group.
        size: ranks of the group.
        options: where None, what the environment says.
        global_ranks: of the group's ranks in the default group; all of it where None.
        world_size: ranks of the default group; that of this group where None.
        timeout_s: after how many seconds without progress a call fails.
        world: of the default group, where this one is another; it knows where the processes of ranks are.

    Raises:
        InputError: options that do not fit, or that differ between ranks.
        ExecutionError: a rank did not come in time.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        options: Options | None = None,
        global_ranks: Sequence[int] | None = None,
        world_size: int | None = None,
        timeout_s: float = 1800.0,
        world: Membership | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.global_ranks = tuple(range(size)) if global_ranks is None else tuple(global_ranks)
        self._world_size = size if world_size is None else world_size
        self._lost_cables: tuple[Ends, ...] = ()  # beside others of the same ranks
        refusal: InputError | ExecutionError | None = None
        try:
            self.options = (options or Options()).merged()
            self.fabric = self._fabric_by(self.options)
            self._check_ends()
            self._check_device(self.options.p2p)
            address = ",".join(listening_addresses(store, self.options.address))
            calls_to_keep()
        except (InputError, ExecutionError) as error:
            refusal = error
        has_ended = self._seen_from(world)
        alarm = None if world is None else Alarm(PrefixStore(f"alarm/{world.name}", store), has_ended)
        try:
            name, cores = meet(
                store,
                rank,
                size,
                [location(), processors()],
                _shared_cores,
                alike=self._settings() if refusal is None else {"refused": str(refusal)},
                timeout_s=timeout_s,
                alarm=alarm,
            )
        except InputError as error:
            raise (refusal or error) from None  # nobody reads the same line twice
        self.name: str = name
        self.store = PrefixStore(name, store)
        self._connection = shared_store(store)
        self.own_store = PrefixStore(f"arborcast/{name}", self._connection)
        self.cores: int | None = cores
        rule = SEVERAL_HOSTS if cores is None else ONE_HOST
        asked = self.options.piece_bytes
        self.cut = rule if asked is None else replace(rule, piece_bytes=asked, work=Fraction(0))
        self._timeout_s = timeout_s
        self._address, self._had_ended = address, has_ended
        self.life = 0
        self.network, self.engine = self._joined(alarm)

    @property
    def timeout_s(self) -> float:
        """After how many seconds without progress calls fail; what is set holds from the next one on."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._timeout_s = self.engine.timeout_s = self.network.timeout_s = timeout_s

    @contextmanager
    def within(self, timeout_s: float) -> Iterator[None]:
        """The same for the call made inside of the context; nothing changes where it is not above 0."""
        if timeout_s > 0:
            self.engine.timeout_s = self.network.timeout_s = timeout_s
        try:
            yield
        finally:
            if timeout_s > 0:
                self.engine.timeout_s = self.network.timeout_s = self._timeout_s

    @property
    def failure(self) -> str | None:
        """Why every further call is refused; None while it is not."""
        return self.engine.failure

    def waits_for(self) -> str:
        """What the call under way waits for; see `Engine.waits_for`."""
        return self.engine.waits_for()

    def avoid(self, first: int, second: int) -> None:
        """Leave out the link between two ranks of the fabric from now on; all ranks make this call.

        Raises:
            InputError: there is no such link.
        """
        before = self.fabric
        options = replace(self.options, without=(*self.options.without, (first, second)))
        # Before anything changes: it may be refused.
        fabric = self._fabric_by(options)
        cabling = fabric.cabling(self.rank)
        self.fabric, self.options = fabric, options
        if cabling is not None:
            self.engine.compare_with(cabling.beside)
        if self.rank == 0 and before.topology.links == self.fabric.topology.links:
            log.warning(
                "avoid %d-%d: no link among the ranks of this group (%s); nothing changes",
                first,
                second,
                before.topology.name,
            )

    def join_again(self) -> None:
        """Connect anew along the cables that answer, after a call has failed; all ranks make this call.

        Raises:
            InputError: links have no addresses, or those that are left do not join all ranks.
            ExecutionError: a rank has ended, or did not come in time.
        """
        if self.cables is None:
            raise InputError("go_on: must be called where links have addresses, and a cable can be lost")
        network, engine = self.network, self.engine
        engine.give_up(f"rank {self.rank} goes on without what was lost")
        self.life += 1
        alarm = Alarm(PrefixStore(f"alarm/{self.life}", self.own_store), network.has_ended)
        self.network, self.engine = self._joined(alarm)
        self.engine.while_waiting, self.engine.when_begun = engine.while_waiting, engine.when_begun
        engine.close()

    def close(self) -> None:
        """End the connections; others that still work with what this rank sent are not disturbed."""
        self.engine.close()
        self.network.close()

    @property
    def lanes(self) -> CableLanes | None:
        """See the class."""
        cabling = self.fabric.cabling(self.rank)
        return None if cabling is None else cabling.lanes

    def _fabric_by(self, options: Options) -> GroupFabric:
        """The fabric that options describe, without the cables that this group has lost."""
        return fabric_for(options, self.global_ranks, self._world_size, lost=self._lost_cables)

    def _check_ends(self) -> None:
        cabling = self.fabric.cabling(self.rank)
        for lane, ends in ({} if cabling is None else cabling.ends).items():
            if ends is not None and not can_be_bound(ends[0]):
                peer = lane % self.size
                raise InputError(f"address {ends[0]}, of the link with rank {peer}, must be of this host")

    @staticmethod
    def _check_device(p2p: str) -> None:
        if MESSAGES[p2p] == "cuda" and not has_nccl():
            raise InputError(f"p2p: {p2p} needs a GPU and NCCL or RCCL, and torch finds none")
        if p2p.startswith("kernel") and find_spec("triton") is None:
            raise InputError(f"p2p: {p2p} needs Triton, and Python finds none: pip install arborcast[device]")
        if p2p == "kernel-cpu":
            from arborcast.backends.device.executor import refuse_compiled

            refuse_compiled(f"p2p: {p2p}")

    def _joined(self, alarm: Alarm | None) -> tuple[Network, Engine]:
        """Connections along the present fabric, by a name that nobody has used, and what runs over them."""
        cabling, lost_after_s = self.fabric.cabling(self.rank), self.options.lost_after_s
        if cabling is not None and lost_after_s:
            lost_after_s = min(lost_after_s, CABLE_LOST_S)
        network = Network(
            PrefixStore(f"channels/{self.life}", self.own_store),
            self.rank,
            self.size,
            timeout_s=self._timeout_s,
            transport=self.options.transport,
            address=self._address,
            lost_after_s=lost_after_s,
            has_ended=self._had_ended,
            cables=None if cabling is None else cabling.ends,
        )
        if cabling is not None:
            cabling = self._without_silent_cables(network, cabling, alarm)
        self.cables = None if cabling is None else cabling.ends
        circle = {(self.rank + 1) % self.size, (self.rank - 1) % self.size} - {self.rank}
        network.connect(circle if self.cables is None else self.cables)
        beside = None if cabling is None else cabling.beside
        return network, Engine(
            self.rank, network, timeout_s=self._timeout_s, lost_after_s=lost_after_s, beside=beside
        )

    def _without_silent_cables(self, network: Network, cabling: Cabling, alarm: Alarm | None) -> Cabling:
        """Leave out the cables that do not answer, on all ranks alike; as the fabric without these links.

        Raises:
            InputError: the others do not join all ranks.
        """
        lanes = [(lane % self.size, self.rank, lane // self.size) for lane in network.silent_cables(ANSWER_S)]
        store = PrefixStore(f"answers/{self.life}", self.own_store)
        _, gone = meet(store, self.rank, self.size, lanes, _together, timeout_s=self._timeout_s, alarm=alarm)
        if not gone:
            return cabling
        before = self.fabric
        assert before.cables is not None, "its links have addresses"
        silent = {
            pair: [before.cables[pair][lane] for *ends, lane in gone if tuple(ends) == pair]
            for pair in sorted({(low, high) for low, high, _ in gone})
        }
        links = [pair for pair, each in silent.items() if len(each) == len(before.cables[pair])]
        cables = [cable for pair, each in silent.items() if pair not in links for cable in each]
        lost = [(before.places[first], before.places[second]) for first, second in links]
        self.options = replace(self.options, without=(*self.options.without, *lost))
        self._lost_cables += tuple(cable.addresses for cable in cables if cable.addresses)
        try:
            self.fabric = self._fabric_by(self.options)
            left = self.fabric.cabling(self.rank)
        except InputError:
            network.close()
            raise
        assert left is not None, "its links have addresses"
        network.cables = left.ends
        if self.rank == 0:
            said = [f"link {', '.join(f'{first}-{second}' for first, second in lost)}"] if lost else []
            fabrics = self.fabric.topology, before.topology
            log.warning(
                "%s: no answer along %s; the group does without it: allreduce %.4g GB/s at most, "
                "proven, instead of %.4g",
                before.topology.name,
                " and ".join([*said, *map(self._named, cables)]),
                *(bound(it, Collective.on(it, Kind.ALLREDUCE)).rate for it in fabrics),
            )
        return left

    def _named(self, cable: Link) -> str:
        """One of the cables of a link, for messages."""
        first, second = (self.fabric.places[end] for end in (cable.src, cable.dst))
        return f"cable {' to '.join(cable.addresses or ())} of link {first}-{second}"

    def _seen_from(self, world: Membership | None) -> Callable[[int], bool]:
        """Whether the process of a rank is known to have ended, as the default group can tell."""
        if world is None:
            return lambda _: False
        network, places = world.network, self.global_ranks
        return lambda rank: network.has_ended(places[rank])

    def _settings(self) -> dict[str, object]:
        """What all ranks must have alike, since they decide by it."""
        return {
            "arborcast": _version(),
            "fabric": fabric_name(self.fabric.topology),
            "ranks": self.global_ranks,
            "cables": None if self.fabric.cables is None else _said_of(self.fabric.cables),
            "groups": [digest_of(it) for it in self.fabric.joint],
            "spares": digests_of(self.fabric.spares),
            **{name: getattr(self.options, name) for name in ALIKE},
        }


@cache
def _version() -> str:
    """Of this package; reading it takes as long as half of what else a group costs."""
    return version("arborcast")


def _shared_cores(words: list[tuple[str, list[int]]]) -> int | None:
    """Of the one host on which all ranks run; None where they run on several."""
    if len({where for where, _ in words}) > 1:
        return None
    return len({core for _, cores in words for core in cores})


def _said_of(cables: Mapping[Hop, Sequence[Link]]) -> list[Any]:
    """What all ranks must have alike of cables: addresses, and the rates by which messages are split."""
    every = [cable for _, each in sorted(cables.items()) for cable in each]
    return [(cable.src, cable.dst, cable.addresses, str(cable.bandwidth)) for cable in every]


def _together(words: list[list[list[int]]]) -> list[list[int]]:
    """What any rank has said."""
    return sorted(pair for word in words for pair in word)
