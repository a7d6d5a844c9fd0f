"""What is sent where and when: the one value that every method produces and every later stage reads.

A schedule is complete in itself: it holds its topology, its collective and its bound. Building one checks
its form (indices, shares of the right type); whether it does what the collective asks is for
`synth.verification.verifier` to say, which shares no code with the builders.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, TypeAlias, cast

from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import ScheduleError
from arborcast.synth.topology import Hop, Topology, Vertex
from arborcast.synth.transfers import Transfer, Transfers, Way, in_order

if TYPE_CHECKING:
    from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
    from arborcast.synth.transfers import Ints
    from arborcast.synth.viewer import View

__all__ = ["Chunk", "Method", "Playable", "Schedule", "Settings", "Transfer"]

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


class Playable:
    """A schedule in either form, which shows itself."""

    def view(self, *other: AnySchedule, sizes: str | Sequence[int] = "1MiB", height: int = 820) -> View:
        """Play this schedule, or it and another side by side: what `arborcast.view` shows in Jupyter.

        Args:
            other: one more, if any.
            sizes: of the whole buffer: bytes, or a size or range as `synth view --sizes` takes it.
            height: of the frame in Jupyter, pixels.

        Raises:
            ValueError: more than one other.
            InputError: a wrong size, or an installation without the viewer's script.
        """
        # What draws stands above this value, and is found by its public name when it is asked for.
        view = importlib.import_module("arborcast").view
        return cast("View", view(self, *other, sizes=sizes, height=height))


@dataclass(frozen=True)
class Schedule(Playable):
    """A collective algorithm for one topology.

    Attributes:
        topology: the whole fabric, relays included.
        collective: what it does.
        method: what made it.
        bound: the proven limit of its rate.
        chunks: parts of the buffer; their shares of each block add up to the block.
        transfers: in order of step; a tuple, or the columns of `Transfers`.
        rate: algbw in GB/s of the whole buffer, as declared by whoever made it; the verifier recomputes.
        rounds: rounds of each step where the schedule is step-synchronous; None where steps only order.
        unit: GB/s that one chunk per round stands for, of which links carry whole multiples; None for the
            greatest common divisor of all bandwidths, which leaves nothing of them over.
        expanded_from: the implicit form of which it was written out, until anything of it is replaced.

    Raises:
        ScheduleError: when an index or number is out of its range.
    """

    topology: Topology
    collective: Collective
    method: Method
    bound: Bound
    chunks: tuple[Chunk, ...]
    transfers: Sequence[Transfer]
    rate: Fraction
    rounds: tuple[int, ...] | None = None
    unit: Fraction | None = None
    expanded_from: ImplicitSchedule | None = field(default=None, init=False, compare=False, repr=False)

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
        ordered = in_order(transfers)
        fixed_rounds = None if rounds is None else tuple(rounds)
        draft = cls(topology, collective, method, bound, chunks, ordered, Fraction(0), fixed_rounds)
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
    def columns(self) -> Transfers:
        """The transfers as columns."""
        return Transfers.of(self.transfers)

    @cached_property
    def steps(self) -> int:
        """Number of steps."""
        return int(self.columns.step.max(initial=-1)) + 1

    @cached_property
    def height(self) -> int:
        """The longest chain of transfers that one chunk takes in one direction: reducing, or copying.

        For trees it is the height of the tallest one.
        """
        import numpy as np

        moves, holders = self.columns, self.topology.holders
        directions = 2 * moves.chunk + moves.reduce
        src, dst = directions * holders + moves.src, directions * holders + moves.dst
        places = 2 * len(self.chunks) * holders
        if places > 8 * len(moves):  # most holders never see most chunks
            known, of_ends = np.unique(np.concatenate((src, dst)), return_inverse=True)
            places, (src, dst) = len(known), np.split(of_ends, 2)
        reached = np.zeros(places, dtype=np.int64)
        edges = np.concatenate(([0], 1 + np.flatnonzero(np.diff(moves.step)), [len(moves)])).tolist()
        for first, last in pairwise(edges):  # all of a step start from the state before it
            np.maximum.at(reached, dst[first:last], reached[src[first:last]] + 1)
        return int(reached.max(initial=0))

    @cached_property
    def load(self) -> dict[Hop, Fraction]:
        """Share of the buffer that passes each link."""
        import numpy as np

        # Whole numbers of a common part: a million fractions would take as long as finding the schedule.
        parts = math.lcm(*(chunk.share.denominator for chunk in self.chunks))
        fits = parts * max(1, len(self.transfers)) < 1 << 62  # else Python's integers
        amounts = np.array([int(chunk.share * parts) for chunk in self.chunks], np.int64 if fits else object)
        ways, of_way = self._ways()
        passing = np.zeros(len(ways), dtype=amounts.dtype)
        if ways:
            np.add.at(passing, of_way, amounts[self.columns.chunk])
        load: dict[Hop, int] = {}
        for (src, via, dst), amount in zip(ways, passing.tolist(), strict=True):
            for hop in pairwise((src, *via, dst)):
                load[hop] = load.get(hop, 0) + amount
        return {hop: Fraction(amount, parts) for hop, amount in load.items()}

    def _ways(self) -> tuple[list[tuple[Vertex, Way, Vertex]], Ints]:
        """The different ways from end to end, as they first come up, and which one each transfer takes."""
        import numpy as np

        moves, size = self.columns, self.topology.size
        keys = (moves.way * size + moves.src) * size + moves.dst
        _, firsts, of_way = np.unique(keys, return_index=True, return_inverse=True)
        in_turn = np.argsort(firsts)
        place = np.empty_like(in_turn)
        place[in_turn] = np.arange(len(in_turn))
        columns = (column[firsts[in_turn]].tolist() for column in (moves.src, moves.way, moves.dst))
        return [(src, moves.ways[way], dst) for src, way, dst in zip(*columns, strict=True)], place[
            of_way.reshape(-1)
        ]

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
        return bool((self.columns.src >= ranks).any() or (self.columns.dst >= ranks).any())

    @property
    def chunk_count(self) -> int:
        """Number of chunks."""
        return len(self.chunks)

    @property
    def transfer_count(self) -> int:
        """Number of transfers."""
        return len(self.transfers)

    def expand(self) -> Schedule:
        """Itself: every chunk and transfer is written out, as those of an implicit schedule are by this."""
        return self

    @property
    def is_optimal(self) -> bool:
        """Whether the rate equals the bound."""
        return self.rate == self.bound.rate

    @property
    def gap(self) -> Fraction:
        """The part of the bound that the rate misses; 0 where the two are equal."""
        return 1 - self.rate / self.bound.rate if self.bound.rate else Fraction(0)

    def relabelled(self, topology: Topology, images: Sequence[Vertex], collective: Collective) -> Schedule:
        """The schedule with every vertex called by its image; transfers stay in their order.

        Args:
            topology: what this one's is by renumbering.
            images: the vertex of `topology` that each vertex of this one's becomes.
            collective: what the images of its ranks do then.

        Raises:
            ScheduleError: `images` takes a link that is used to where there is none.
        """
        return replace(
            self,
            topology=topology,
            collective=collective,
            bound=self.bound.relabelled(self.topology, topology, images),
            chunks=tuple(
                replace(
                    chunk,
                    owner=images[chunk.owner],
                    target=None if chunk.target is None else images[chunk.target],
                )
                for chunk in self.chunks
            ),
            transfers=tuple(
                replace(it, src=images[it.src], dst=images[it.dst], via=tuple(images[via] for via in it.via))
                for it in self.transfers
            ),
        )

    def held(self, transfers: Iterable[Transfer]) -> dict[tuple[Vertex, bool], Fraction]:
        """Seconds per GB of the buffer for which some transfers hold each stream of a rank that has a limit.

        A message holds one for as long as the slowest link on its way takes at least; keys say who, and
        whether to receive.
        """
        streams, bandwidth = self.topology.streams, self.topology.bandwidth
        held: dict[tuple[Vertex, bool], Fraction] = {}
        for move in transfers if streams else ():
            busy = self.chunks[move.chunk].share / min(bandwidth[hop] for hop in move.hops)
            for end in ((move.src, False), (move.dst, True)):
                count = streams[end[0]] if end[0] < self.topology.ranks else None
                if count is not None:
                    held[end] = held.get(end, Fraction(0)) + busy / count
        return held

    def rated(self) -> Schedule:
        """The same with the rate that its loads give."""
        return replace(self, rate=self._rate_of_loads())

    def _rate_of_loads(self) -> Fraction:
        """1 / (longest time a link, adder or stream is busy per GB); of steps: see DESIGN, `rounds`."""
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
        busy = max(busy, *self.adding.values(), *self.held(self.transfers).values(), Fraction(0))
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
        try:
            moves = self.columns
        except OverflowError:
            return False
        holders = self.topology.holders
        if any(column.min() < 0 for column in (moves.chunk, moves.step, moves.src, moves.dst)):
            return False
        if moves.chunk.max() >= len(self.chunks) or max(moves.src.max(), moves.dst.max()) >= holders:
            return False
        ways, _ = self._ways()
        vias = {via for _, via, _ in ways}
        switches = set(chain.from_iterable(vias))
        hops = {(src, via[0] if via else dst) for src, via, dst in ways}
        hops.update((via[-1], dst) for _, via, dst in ways if via)
        hops.update(chain.from_iterable(map(pairwise, vias)))
        return (
            all(map(self.topology.is_switch, switches))
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
