"""An allreduce searched as it is: partial sums that are sent, copied and added, chunk by chunk.

Each rank holds one partial sum of each chunk, at first its own contribution; a transfer adds the sender's to
the receiver's, which must have no contribution in common, or takes its place. That is what a schedule can
say (`synth.schedule.Transfer`), and everything of a step starts from the state before it, so that ranks may
exchange what they have. The problem is that of an allgather among the same ranks, whose demands say whose
contribution must reach whom.

A group of symmetries makes it smaller: chunks come in classes that the group maps to each other, and of each
class one is searched; a subgroup may keep every chunk's own transfers, so that one of each of their orbits is
left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from arborcast.synth.certificate import Bound
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkOrbits, ChunkSend, Group, LinkLimit, OrbitSend
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.symmetry.permutations import compose, identity
from arborcast.synth.topology import Permutation, Topology


@dataclass(frozen=True, slots=True)
class SumSend(OrbitSend):
    """A send of a representative chunk; `copies` where it takes the place of the receiver's partial sum."""

    copies: bool


@dataclass(frozen=True, slots=True)
class ChunkSum(ChunkSend):
    """One chunk's transfer, of the one block that there is; `copies`: see `SumSend`."""

    copies: bool


@dataclass(frozen=True, slots=True)
class SumPlan:
    """An allreduce: the rounds of each step and the transfers of every chunk, in order of step."""

    rounds: tuple[int, ...]
    sends: tuple[ChunkSum, ...]


def sum_problem(topology: Topology, collective: Collective) -> ChunkProblem:
    """Whose contribution must reach whom, over which routes.

    Raises:
        TooManyRoutesError: the switches allow too many.
    """
    return ChunkProblem.of(topology, replace(collective, kind=Kind.ALLGATHER))


@dataclass(frozen=True)
class SumOrbits(ChunkOrbits):
    """The chunks of an allreduce under a group: of the one block that there is.

    Attributes:
        problem: see `sum_problem`.
        chunks: C.
        group: automorphisms that map ranks of the collective to each other, the identity first.
        kept: the subgroup that maps the transfers of each representative to themselves; chunks come in
            classes of as many as `group` has times the elements of `kept`.

    Raises:
        ValueError: the chunks are not a multiple of that.
    """

    kept: Group

    def __post_init__(self) -> None:
        """Check that the chunks come in whole classes."""
        alike = len(self.group) // len(self.kept)
        if self.chunks % alike:
            raise ValueError(f"{self.chunks} chunks: must be a multiple of {alike}, which are alike")

    @classmethod
    def trivial(cls, problem: ChunkProblem, chunks: int) -> SumOrbits:
        """The problem as it is."""
        alone: Group = (identity(problem.topology.size),)
        return cls(problem, chunks, alone, alone)

    @cached_property
    def movers(self) -> Group:
        """One element of each coset of `kept`."""
        found: list[Permutation] = []
        seen: set[Permutation] = set()
        for element in self.group:
            if element not in seen:
                found.append(element)
                seen.update(compose(element, other) for other in self.kept)
        return tuple(found)

    @cached_property
    def same_route(self) -> tuple[int, ...]:
        """Of each route the least one to which `kept` maps it."""
        return tuple(map(min, zip(*self._kept_routes, strict=True)))

    def same_pair(self, rank: int, contributor: int) -> tuple[int, int]:
        """Of a rank and a contributor the least ones to which `kept` maps both."""
        return min((element[rank], element[contributor]) for element in self.kept)

    def same_carried(self, route: int, contributor: int) -> tuple[int, int]:
        """Of a route and a contributor the least ones to which `kept` maps both."""
        return min(
            (images[route], element[contributor])
            for element, images in zip(self.kept, self._kept_routes, strict=True)
        )

    @cached_property
    def limits(self) -> tuple[LinkLimit, ...]:
        """One limit for each orbit of links; a user is a route of the representative, see `same_route`."""
        return tuple(
            LinkLimit(limit.capacity, tuple(sorted((0, self.same_route[route]) for _, route in limit.users)))
            for limit in super().limits
        )

    def unfold(self, sends: Iterable[OrbitSend]) -> Iterator[ChunkSum]:
        """The transfers of all chunks, from those of the representatives (all of them, see `same_route`)."""
        for send in sends:
            assert isinstance(send, SumSend), "of a search for partial sums"
            for image in super().unfold([send]):
                yield ChunkSum(image.demand, image.chunk, image.route, image.step, send.copies)

    @cached_property
    def _demand_images(self) -> tuple[tuple[int, ...], ...]:
        """There is one block, which every element keeps."""
        return ((0,),) * len(self.movers)

    @cached_property
    def _kept_routes(self) -> tuple[tuple[int, ...], ...]:
        return self._images_of_routes(self.kept)


def pruned(problem: ChunkProblem, chunks: int, rounds: Sequence[int], sends: Iterable[ChunkSum]) -> SumPlan:
    """The plan without the transfers that it can do without, the last ones first.

    Raises:
        ValueError: the transfers of some chunk are no allreduce, which only a bug of ours can bring about.
    """
    of_chunk: dict[int, list[ChunkSum]] = defaultdict(list)
    for send in sends:
        of_chunk[send.chunk].append(send)
    kept: list[ChunkSum] = []
    for chunk in range(chunks):
        needed = sorted(of_chunk[chunk], key=lambda send: (send.step, send.route))
        if not is_allreduce(problem, needed):
            raise ValueError(f"chunk {chunk}: is not reduced to every rank")
        for send in needed[::-1]:
            without = [other for other in needed if other is not send]
            if is_allreduce(problem, without):
                needed = without
        kept += needed
    kept.sort(key=lambda send: (send.step, send.chunk, send.route))
    idle = len(rounds) - 1 - max(send.step for send in kept)  # a schedule ends with a send
    late = tuple(replace(send, step=send.step + idle) for send in kept)
    return SumPlan((*rounds[len(rounds) - idle :], *rounds[: len(rounds) - idle]), late)


def is_allreduce(problem: ChunkProblem, sends: Sequence[ChunkSum]) -> bool:
    """Whether the transfers of one chunk, in order of step, bring every contribution to every rank once."""
    everyone = sum(1 << demand.owner for demand in problem.demands)
    held = [everyone & 1 << rank for rank in range(problem.ranks)]
    for step in sorted({send.step for send in sends}):
        after = list(held)
        copied, reached = set[int](), set[int]()
        for send in sends:
            if send.step == step:
                route = problem.routes[send.route]
                sent = held[route.src]
                if not sent or route.dst in copied or (send.copies and route.dst in reached):
                    return False
                if not send.copies and after[route.dst] & sent:
                    return False
                after[route.dst] = sent if send.copies else after[route.dst] | sent
                reached.add(route.dst)
                copied |= {route.dst} if send.copies else set()
        held = after
    return all(held[demand.owner] == everyone for demand in problem.demands)


def sum_schedule(
    topology: Topology,
    collective: Collective,
    problem: ChunkProblem,
    chunks: int,
    plan: SumPlan,
    *,
    method: Method,
    bound: Bound,
) -> Schedule:
    """The schedule that a plan is, with the bound of the collective's rate."""
    transfers = (
        Transfer(send.chunk, route.src, route.dst, send.step, reduce=not send.copies, via=route.via)
        for send in plan.sends
        for route in [problem.routes[send.route]]
    )
    parts = [Chunk(Fraction(1, chunks), collective.ranks[0])] * chunks
    return Schedule.build(topology, collective, method, bound, parts, transfers, plan.rounds)
