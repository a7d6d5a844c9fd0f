"""Schedules for every single failure, made before one happens: how each differs from the whole fabric's.

A difference names, for each chunk, the chunk of the whole fabric's schedule that it is most like, what of
that one's transfers it leaves out, and which it has besides. What failed goes without saying:

    whole     chunk 2: 0 -> 3, 0 -> 1, 1 -> 2        link 0-3 fails
    spare     like 2: leaves out nothing, adds 1 -> 3     = 0 -> 1, 1 -> 2, 1 -> 3

So a job that runs has the schedule for what is left in milliseconds, without a solver or another process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from operator import attrgetter

from arborcast.synth.certificate import Bound
from arborcast.synth.errors import CollectiveError, InfeasibleError, InputError, ScheduleError
from arborcast.synth.faults.faulty import Faulty, without
from arborcast.synth.faults.repair import collective_left, repaired
from arborcast.synth.progress import report
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.solve_options import DEFAULTS, SolveOptions
from arborcast.synth.topology import Hop, Topology
from arborcast.synth.verification.verifier import verify

_ORDER = attrgetter("step", "src", "dst", "reduce", "via")


@dataclass(frozen=True, order=True)
class Failure:
    """What is gone at once, in the numbers of the whole fabric.

    Attributes:
        links: between two vertices, both directions, the lesser vertex first; in ascending order.
        ranks: with all their links; in ascending order.
    """

    links: tuple[Hop, ...] = ()
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, links: Sequence[Hop] = (), ranks: Sequence[int] = ()) -> Failure:
        """The same failure however it is written."""
        both = {(min(hop), max(hop)) for hop in links}
        return cls(tuple(sorted(both)), tuple(sorted(set(ranks))))

    def left_of(self, topology: Topology) -> Faulty:
        """What is left of the whole fabric; TopologyError as `without` raises it."""
        return without(topology, links=self.links, ranks=self.ranks)

    def words(self, topology: Topology) -> str:
        """For people: `link 0-3`, `rank 5`."""
        label = topology.label
        links = [f"link {label(first)}-{label(second)}" for first, second in self.links]
        return ", ".join([*links, *(f"rank {rank}" for rank in self.ranks)])


@dataclass(frozen=True)
class Part:
    """One chunk of a schedule after a failure.

    Attributes:
        chunk: its share and whose it is, in the numbers of what is left.
        like: the chunk of the whole fabric's schedule whose transfers it has, where these use nothing that
            failed; None for none of them.
        left_out: of those, in their order by step and vertices, the ones that it does not have.
        added: the ones that it has besides, in the numbers of what is left; `chunk` is its own number.
    """

    chunk: Chunk
    like: int | None
    left_out: tuple[int, ...]
    added: tuple[Transfer, ...]


@dataclass(frozen=True)
class Difference:
    """What a failure changes of a schedule.

    Attributes:
        failure: after which it serves.
        method: what made the schedule.
        bound: of what is left.
        rate: of the schedule.
        parts: its chunks.
        rounds: as the schedule has them.
        unit: likewise.
    """

    failure: Failure
    method: Method
    bound: Bound
    rate: Fraction
    parts: tuple[Part, ...]
    rounds: tuple[int, ...] | None = None
    unit: Fraction | None = None

    @classmethod
    def between(cls, whole: Schedule, after: Schedule, failure: Failure) -> Difference:
        """How a schedule for what is left differs from that of the whole fabric."""
        known = _standing(whole, failure.left_of(whole.topology))
        homes: dict[Transfer, list[int]] = {}
        for number, transfers in enumerate(known):
            for transfer in transfers:
                homes.setdefault(transfer, []).append(number)
        mine: list[list[Transfer]] = [[] for _ in after.chunks]
        for transfer in after.transfers:
            mine[transfer.chunk].append(replace(transfer, chunk=0))
        parts = []
        for number, chunk in enumerate(after.chunks):
            wanted = set(mine[number])
            common = Counter(home for transfer in wanted for home in homes.get(transfer, ()))
            # As much as possible in common, with as little as possible to leave out.
            like = max(common, key=lambda home: (2 * common[home] - len(known[home]), -home), default=None)
            old = [] if like is None else known[like]
            left_out = tuple(place for place, transfer in enumerate(old) if transfer not in wanted)
            added = sorted(wanted.difference(old), key=_ORDER)
            if len(left_out) + len(added) > len(wanted):
                like, left_out, added = None, (), sorted(wanted, key=_ORDER)
            parts.append(
                Part(chunk, like, left_out, tuple(replace(transfer, chunk=number) for transfer in added))
            )
        return cls(failure, after.method, after.bound, after.rate, tuple(parts), after.rounds, after.unit)

    def applied(self, whole: Schedule) -> Schedule:
        """The schedule for what is left; whether it does what it should is for the verifier to say.

        Raises:
            ScheduleError: the difference is not one to this schedule.
            TopologyError: there is no such link or rank.
            CollectiveError: what is left has no such collective.
        """
        faulty = self.failure.left_of(whole.topology)
        known = _standing(whole, faulty)
        transfers: list[Transfer] = []
        for number, part in enumerate(self.parts):
            if part.like is not None and part.like >= len(known):
                raise ScheduleError(
                    f"chunk {number}: like must be below {len(known)}, the chunks of the whole fabric's "
                    f"schedule, got {part.like}"
                )
            old = [] if part.like is None else known[part.like]
            gone = set(part.left_out)
            if max(gone, default=-1) >= len(old):
                raise ScheduleError(
                    f"chunk {number}: left_out must be below {len(old)}, the transfers that still stand, "
                    f"got {max(gone)}"
                )
            stay = (transfer for place, transfer in enumerate(old) if place not in gone)
            transfers += (replace(transfer, chunk=number) for transfer in stay)
            transfers += part.added
        transfers.sort(key=attrgetter("step", "chunk", "src", "dst"))
        return Schedule(
            faulty.topology,
            collective_left(whole.collective, faulty),
            self.method,
            self.bound,
            tuple(part.chunk for part in self.parts),
            tuple(transfers),
            self.rate,
            self.rounds,
            self.unit,
        )


@dataclass(frozen=True)
class BackupSchedules:
    """A schedule and what replaces it after failures.

    Attributes:
        whole: of the fabric without failures, written out.
        differences: one for each failure after which there is a schedule.
        without: why there is none, for the others.
    """

    whole: Schedule
    differences: tuple[Difference, ...]
    without: tuple[tuple[Failure, str], ...] = ()

    def after(self, failure: Failure) -> Schedule:
        """The schedule after a failure.

        Raises:
            InputError: it is none of those that were foreseen, or there is no schedule after it.
        """
        found = self._by_failure.get(failure)
        if found is not None:
            return found.applied(self.whole)
        name, words = self.whole.topology.name, failure.words(self.whole.topology) or "nothing"
        for foreseen, why in self.without:
            if foreseen == failure:
                raise InputError(f"{name} without {words}: {why}")
        count = len(self.differences) + len(self.without)
        raise InputError(f"{name} without {words}: is none of the {count} failures with a spare schedule")

    def has(self, failure: Failure) -> bool:
        """Whether there is a schedule after this failure."""
        return failure in self._by_failure

    def flaws(self) -> Iterator[str]:
        """What the verifier says against any of its schedules, that of the whole fabric included."""
        names = ["the whole fabric", *(it.failure.words(self.whole.topology) for it in self.differences)]
        schedules = (self.whole, *(it.applied(self.whole) for it in self.differences))
        for name, schedule in zip(names, schedules, strict=True):
            for error in verify(schedule).errors:
                yield f"{name}: {error}"

    @cached_property
    def _by_failure(self) -> dict[Failure, Difference]:
        return {difference.failure: difference for difference in self.differences}


def single_failures(topology: Topology, *, links: bool = True, ranks: bool = False) -> list[Failure]:
    """Each pair of vertices that a link joins, in ascending order, and then each rank."""
    cables = sorted({(min(link.src, link.dst), max(link.src, link.dst)) for link in topology.links})
    return [Failure((cable,)) for cable in (cables if links else ())] + [
        Failure(ranks=(rank,)) for rank in (range(topology.ranks) if ranks else ())
    ]


def make_spares(
    whole: Schedule, failures: Sequence[Failure], options: SolveOptions = DEFAULTS
) -> BackupSchedules:
    """Repair a schedule for each of some failures; each result is replayed by the verifier.

    Args:
        whole: of the fabric without failures.
        failures: after which there shall be a schedule.
        options: its seed; its deadline is for each of them.

    Raises:
        TimedOutError: the deadline of one passed.
        ScheduleError: the verifier objects to one.
    """
    found, none = [], []
    for done, failure in enumerate(failures):
        report(failure.words(whole.topology), done, len(failures))
        try:
            after = repaired(whole, failure.left_of(whole.topology), options)
        except (InfeasibleError, CollectiveError) as error:
            none.append((failure, str(error)))
            continue
        difference = Difference.between(whole, after, failure)
        verdict = verify(difference.applied(whole))
        if not verdict.correct:
            raise ScheduleError(f"{failure.words(whole.topology)}: {verdict.errors[0]}")
        found.append(difference)
    return BackupSchedules(whole, tuple(found), tuple(none))


def _standing(whole: Schedule, faulty: Faulty) -> list[list[Transfer]]:
    """For each chunk its transfers over what is left, in the numbers of that, all as of chunk 0."""
    number, links = faulty.number, faulty.topology.bandwidth.keys()
    known: list[list[Transfer]] = [[] for _ in whole.chunks]
    for transfer in whole.transfers:
        path = [number.get(vertex, -1) for vertex in (transfer.src, *transfer.via, transfer.dst)]
        if all(hop in links for hop in pairwise(path)):
            moved = Transfer(0, path[0], path[-1], transfer.step, transfer.reduce, tuple(path[1:-1]))
            known[transfer.chunk].append(moved)
    for transfers in known:
        transfers.sort(key=_ORDER)
    return known
