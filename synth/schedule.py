"""What is sent where and when: the one value that every method produces and every later stage reads.

A schedule is complete in itself: it holds its topology, its collective and its bound. Building one checks
its form (indices, shares of the right type); whether it does what the collective asks is for
`synth.verification.verifier` to say, which shares no code with the builders.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain, pairwise, repeat
from operator import attrgetter
from typing import TypeAlias

from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import ScheduleError
from arborcast.synth.topology import Hop, Topology, Vertex

Settings: TypeAlias = tuple[tuple[str, str | int | None], ...]


@dataclass(frozen=True, slots=True)
class Method:
    """What made a schedule; `settings` are further facts such as MWU's epsilon and iteration count."""

    name: str
    seed: int = 0
    settings: Settings = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of the buffer that moves as one unit.

    Attributes:
        share: its part of the whole buffer (algbw's).
        owner: the rank whose data it is, or the root of the tree that carries it.
        target: the destination for gather, scatter and alltoall, else None.
        demand: the index of the block of a custom collective of which it is a part, else None. Its owner is
            then `Demand.owner`.
    """

    share: Fraction
    owner: int
    target: int | None = None
    demand: int | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """One chunk from one rank to another, through the switches of `via`, in one step.

    Either end may be a switch that reduces or multicasts: it holds what it is sent as a rank does, nothing at
    the start, and is asked for no more than `Switch` says that it can. With `reduce` the receiver adds the
    sender's contributions to its own, otherwise its copy becomes the sender's. All transfers of a step start
    from the state before it.
    """

    chunk: int
    src: int
    dst: int
    step: int
    reduce: bool = False
    via: tuple[Vertex, ...] = ()

    @classmethod
    def many(
        cls,
        chunk: Sequence[int],
        src: Sequence[int],
        dst: Sequence[int],
        step: Sequence[int],
        reduce: Sequence[bool],
        via: Sequence[tuple[Vertex, ...]],
    ) -> list[Transfer]:
        """Transfers from columns of equal length: a third of the time of making them one by one."""
        columns = {"chunk": chunk, "src": src, "dst": dst, "step": step, "reduce": reduce, "via": via}
        collects = gc.isenabled()
        gc.disable()  # it would walk all that is made again and again, and find nothing to free
        try:
            made = list(map(object.__new__, repeat(cls, len(chunk))))
            for name, values in columns.items():
                # Nobody has seen them yet, so that writing to the slots breaks no promise.
                deque(map(getattr(cls, name).__set__, made, values), maxlen=0)
        finally:
            if collects:
                gc.enable()
        return made

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The links it passes, as pairs of vertices."""
        path = (self.src, *self.via, self.dst)
        return tuple(pairwise(path))


@dataclass(frozen=True)
class Schedule:
    """A collective algorithm for one topology.

    Attributes:
        topology: the whole fabric, relays included.
        collective: what it does.
        method: what made it.
        bound: the proven limit of its rate.
        chunks: parts of the buffer; their shares of each block add up to the block.
        transfers: in order of step.
        rate: algbw in GB/s of the whole buffer, as declared by whoever made it; the verifier recomputes.
        rounds: rounds of each step where the schedule is step-synchronous; None where steps only order.
        unit: GB/s that one chunk per round stands for, of which links carry whole multiples; None for the
            greatest common divisor of all bandwidths, which leaves nothing of them over.

    Raises:
        ScheduleError: when an index or number is out of its range.
    """

    topology: Topology
    collective: Collective
    method: Method
    bound: Bound
    chunks: tuple[Chunk, ...]
    transfers: tuple[Transfer, ...]
    rate: Fraction
    rounds: tuple[int, ...] | None = None
    unit: Fraction | None = None

    @classmethod
    def build(
        cls,
        topology: Topology,
        collective: Collective,
        method: Method,
        bound: Bound,
        chunks: Iterable[Chunk],
        transfers: Iterable[Transfer],
        rounds: Iterable[int] | None = None,
    ) -> Schedule:
        """Make a schedule with its transfers in order and its rate worked out from its link loads."""
        chunks = tuple(chunks)
        transfers = tuple(sorted(transfers, key=attrgetter("step", "chunk", "src", "dst")))
        fixed_rounds = None if rounds is None else tuple(rounds)
        draft = cls(topology, collective, method, bound, chunks, transfers, Fraction(0), fixed_rounds)
        # Nobody else has seen the draft yet; making another would check everything a second time.
        object.__setattr__(draft, "rate", draft._rate_of_loads())
        return draft

    def __post_init__(self) -> None:
        """Check the form: indices in range, positive shares, links that exist."""
        self.collective.check(self.topology)
        for index, chunk in enumerate(self.chunks):
            self._check_chunk(index, chunk)
        if not self._all_in_range():
            for index, transfer in enumerate(self.transfers):
                self._check_transfer(index, transfer)
        if self.rate < 0:
            raise ScheduleError(f"rate must not be negative, got {self.rate} GB/s")
        if self.unit is not None and (self.rounds is None or self.unit <= 0):
            raise ScheduleError(f"unit must be positive and go with rounds, got {self.unit} GB/s")
        if self.rounds is not None:
            if any(rounds < 1 for rounds in self.rounds):
                raise ScheduleError(f"rounds of a step must be at least 1, got {list(self.rounds)}")
            if self.steps > len(self.rounds):
                raise ScheduleError(
                    f"rounds: {self.steps} steps need as many entries, got {len(self.rounds)}"
                )

    @cached_property
    def steps(self) -> int:
        """Number of steps."""
        return max((transfer.step + 1 for transfer in self.transfers), default=0)

    @cached_property
    def height(self) -> int:
        """The longest chain of transfers that one chunk takes in one direction: reducing, or copying.

        For trees it is the height of the tallest one.
        """
        reached: dict[tuple[int, int, bool], int] = {}
        arriving: dict[tuple[int, int, bool], int] = {}
        step = None
        for transfer in self.transfers:  # in order of step
            if transfer.step != step:  # all of a step start from the state before it
                reached |= arriving
                arriving, step = {}, transfer.step
            before = reached.get((transfer.chunk, transfer.src, transfer.reduce), 0)
            here = (transfer.chunk, transfer.dst, transfer.reduce)
            arriving[here] = max(reached.get(here, 0), arriving.get(here, 0), before + 1)
        return max((reached | arriving).values(), default=0)

    @cached_property
    def load(self) -> dict[Hop, Fraction]:
        """Share of the buffer that passes each link."""
        # Whole numbers of a common part: a million fractions would take as long as finding the schedule.
        parts = math.lcm(*(chunk.share.denominator for chunk in self.chunks))
        amounts = [int(chunk.share * parts) for chunk in self.chunks]
        of_way: dict[tuple[Vertex, tuple[Vertex, ...], Vertex], int] = {}
        for transfer in self.transfers:
            way = (transfer.src, transfer.via, transfer.dst)
            of_way[way] = of_way.get(way, 0) + amounts[transfer.chunk]
        load: dict[Hop, int] = {}
        for (src, via, dst), amount in of_way.items():
            for hop in pairwise((src, *via, dst)):
                load[hop] = load.get(hop, 0) + amount
        return {hop: Fraction(amount, parts) for hop, amount in load.items()}

    @cached_property
    def adding(self) -> dict[Vertex, Fraction]:
        """Seconds per GB of the buffer that the adder of each switch is busy, of those that have a limit."""
        adders = {
            self.topology.ranks + place: switch.adder
            for place, switch in enumerate(self.topology.switches)
            if switch.adder is not None
        }
        inputs: dict[tuple[int, Vertex], int] = {}
        busy = dict.fromkeys(adders, Fraction(0))
        for transfer in self.transfers if adders else ():  # in order of step
            if transfer.dst in adders:
                place = (transfer.chunk, transfer.dst)
                inputs[place] = inputs.get(place, 0) + 1 if transfer.reduce else 1
                if inputs[place] == 2:  # one sum, of however many
                    busy[transfer.dst] += self.chunks[transfer.chunk].share / adders[transfer.dst]
        return busy

    @cached_property
    def uses_switches(self) -> bool:
        """Whether transfers start or end at switches."""
        ranks = self.topology.ranks
        return any(transfer.src >= ranks or transfer.dst >= ranks for transfer in self.transfers)

    @property
    def chunk_count(self) -> int:
        """Number of chunks."""
        return len(self.chunks)

    @property
    def transfer_count(self) -> int:
        """Number of transfers."""
        return len(self.transfers)

    @property
    def is_optimal(self) -> bool:
        """Whether the rate equals the bound."""
        return self.rate == self.bound.rate

    def _rate_of_loads(self) -> Fraction:
        """1 / (longest time a link or adder is busy per GB of buffer); of steps: see DESIGN, `rounds`."""
        if self.rounds is not None:
            shares = {chunk.share for chunk in self.chunks}
            if len(shares) != 1:
                raise ScheduleError(f"rounds need chunks of one size, got shares {sorted(map(str, shares))}")
            rounds = sum(self.rounds)
            unit = self.unit or self.topology.bandwidth_unit
            return unit / (rounds * shares.pop()) if rounds else Fraction(0)
        busy = max(
            (share / self.topology.bandwidth[hop] for hop, share in self.load.items()), default=Fraction(0)
        )
        busy = max(busy, *self.adding.values(), Fraction(0))
        return 1 / busy if busy else Fraction(0)

    def _check_chunk(self, index: int, chunk: Chunk) -> None:
        if chunk.share <= 0:
            raise ScheduleError(f"chunk {index}: share must be positive, got {chunk.share}")
        for rank in (chunk.owner, chunk.target):
            if rank is not None and not 0 <= rank < self.topology.ranks:
                raise ScheduleError(
                    f"chunk {index}: rank must be in 0..{self.topology.ranks - 1}, got {rank}"
                )
        if self.collective.kind is not Kind.CUSTOM:
            if chunk.demand is not None:
                kind = self.collective.kind
                raise ScheduleError(f"chunk {index}: {kind} has no demands, got demand {chunk.demand}")
            return
        count = len(self.collective.demands)
        if chunk.demand is None or not 0 <= chunk.demand < count:
            raise ScheduleError(f"chunk {index}: demand must be in 0..{count - 1}, got {chunk.demand}")

    def _all_in_range(self) -> bool:
        """Whether no transfer breaks a rule: of a million, few differ in what has to be looked at."""
        if not self.transfers:
            return True
        chunks = set(map(attrgetter("chunk"), self.transfers))
        steps = set(map(attrgetter("step"), self.transfers))
        ways = set(map(attrgetter("src", "via", "dst"), self.transfers))
        vias = {via for _, via, _ in ways}
        switches = set(chain.from_iterable(vias))
        hops = {(src, via[0] if via else dst) for src, via, dst in ways}
        hops.update((via[-1], dst) for _, via, dst in ways if via)
        hops.update(chain.from_iterable(map(pairwise, vias)))
        return (
            min(chunks) >= 0
            and max(chunks) < len(self.chunks)
            and min(steps) >= 0
            and all(src < self.topology.holders and dst < self.topology.holders for src, _, dst in ways)
            and all(map(self.topology.is_switch, switches))
            and hops <= self.topology.bandwidth.keys()  # so that all vertices are in range
        )

    def _check_transfer(self, index: int, transfer: Transfer) -> None:
        if not 0 <= transfer.chunk < len(self.chunks):
            raise ScheduleError(
                f"transfer {index}: chunk must be in 0..{len(self.chunks) - 1}, got {transfer.chunk}"
            )
        if transfer.step < 0:
            raise ScheduleError(f"transfer {index}: step must not be negative, got {transfer.step}")
        for vertex in (transfer.src, transfer.dst):
            if self.topology.ranks <= vertex < self.topology.size and vertex >= self.topology.holders:
                raise ScheduleError(
                    f"transfer {index}: ends at switch {self.topology.label(vertex)}, which only forwards"
                )
            if not 0 <= vertex < self.topology.holders:
                raise ScheduleError(
                    f"transfer {index}: rank must be in 0..{self.topology.ranks - 1}, got {vertex}"
                )
        for vertex in transfer.via:
            if not self.topology.ranks <= vertex < self.topology.size:
                raise ScheduleError(f"transfer {index}: via must name switches, got {vertex}")
        for src, dst in transfer.hops:
            if (src, dst) not in self.topology.bandwidth:
                label = self.topology.label
                raise ScheduleError(f"transfer {index}: there is no link {label(src)}->{label(dst)}")
