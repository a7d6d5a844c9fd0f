"""One (C, S, R) of an allreduce, answered: partial sums under several groups in turns with the proof of none.

What comes out was pruned; that it is correct is still for `synth.verification.verifier` to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import TypeAlias, cast

from arborcast.synth.chunks.allreduce.partial_sums import ChunkSum, SumOrbits, SumPlan, pruned
from arborcast.synth.chunks.bounds.flow_bound import flow_bound
from arborcast.synth.chunks.bounds.step_certificate import StepBound
from arborcast.synth.chunks.encodings.registry import Encoding
from arborcast.synth.chunks.problem.orbits import Group
from arborcast.synth.chunks.problem.outcome import Feasible, Infeasible, Unknown
from arborcast.synth.chunks.problem.symmetry import small_subgroups, subgroups
from arborcast.synth.chunks.solvers.cache import kept_or_found
from arborcast.synth.chunks.solvers.portfolio import PortfolioMember
from arborcast.synth.chunks.solvers.search import ProblemSearcher
from arborcast.synth.errors import Prover
from arborcast.synth.symmetry.permutations import identity

SumAnswer: TypeAlias = SumPlan | Infeasible | Unknown

SEARCHES: Mapping[str, Encoding] = {
    "sums": Encoding("arborcast.synth.chunks.allreduce.sum_formulas:sum_search", "python-sat"),
    "spread": Encoding("arborcast.synth.chunks.allreduce.sum_formulas:spread_search", "python-sat"),
    "fewest": Encoding("arborcast.synth.chunks.allreduce.sum_formulas:fewest_search", "python-sat"),
    "fewest sums": Encoding("arborcast.synth.chunks.allreduce.sum_formulas:fewest_sum_search", "python-sat"),
}
"""Where the searches are found, as `module:class`."""


@dataclass(frozen=True, slots=True)
class SearchEffort:
    """How much a search does.

    Attributes:
        slices: effort (see `synth.chunks.solvers.portfolio`); None until there is an answer.
        groups: how many groups are tried that move every chunk, and how many of which some elements keep its
            transfers.
        most_sends: possible transfers (chunks, routes and steps multiplied, of representatives) up to which a
            group is tried, or the problem as it is; None for any.
    """

    slices: int | None = None
    groups: tuple[int, int] = 5, 4
    most_sends: int | None = None


_ALIKE = 2  # groups of one size
_LARGEST_KEPT = 8


@dataclass
class SumSearcher(ProblemSearcher):
    """Looks for allreduces; for the problem see `synth.chunks.allreduce.partial_sums.sum_problem`."""

    encodings = SEARCHES
    _flow_limits: dict[int, StepBound | None] = field(default_factory=dict)

    def flow_limit(self, steps: int) -> StepBound | None:
        """`flow_bound` of so many steps, worked out once.

        Raises:
            TimedOutError: the deadline passed.
        """
        if steps not in self._flow_limits:
            self._flow_limits[steps] = flow_bound(self.problem, steps, deadline=self.deadline, sums=True)
        return self._flow_limits[steps]

    def search(self, chunks: int, steps: int, rounds: int, trial: SearchEffort = SearchEffort()) -> SumAnswer:
        """A plan, the proof that there is no schedule, `Inconclusive`, or `Unknown`.

        Args:
            chunks: C.
            steps: S, at least the latency of the problem.
            rounds: R, at least S.
            trial: how much to do.

        Returns:
            `Inconclusive` where no schedule keeps one partial sum per rank and chunk, and whether several
            would do is not known.

        Raises:
            TimedOutError: the deadline passed.
        """
        return kept_or_found(
            self.cache,
            "allreduce",
            self.problem,
            lambda: self._found(chunks, steps, rounds, trial),
            (SumPlan, ChunkSum, Infeasible, Prover),
            is_final=lambda answer: not isinstance(answer, Unknown),
            size=[chunks, steps, rounds],
            seed=self.seed,
            trial=astuple(trial),
        )

    def _found(self, chunks: int, steps: int, rounds: int, trial: SearchEffort) -> SumAnswer:
        whole = SumOrbits.trivial(self.problem, chunks)
        symmetric = self._symmetric(chunks, trial.groups)
        first, *others = [*symmetric, whole]
        members = [PortfolioMember("sums", first), PortfolioMember("spread", whole)]
        members += [PortfolioMember("sums", orbits) for orbits in others]
        if trial.most_sends is not None:
            possible = chunks * len(self.problem.routes) * steps
            members = [each for each in members if possible <= trial.most_sends * len(each.orbits.group)]
            if not members:
                return Unknown()
        result = self._portfolio(members, steps, rounds, trial.slices)
        match result.outcome:
            case Feasible(found_rounds, sends):
                assert result.member is not None, "somebody found it"
                orbits = cast(SumOrbits, result.member.orbits)
                return pruned(self.problem, chunks, found_rounds, orbits.unfold(sends))
            case outcome:
                return outcome

    def fewest(self, steps: int, cost: int, *, slices: int, sums: bool = False) -> int:
        """A number of links that messages of one chunk pass in all at least, from `cost` on.

        Args:
            steps: S, at least the latency of the problem.
            cost: what is known to be needed.
            slices: effort of each search.
            sums: whether messages are transfers of partial sums, one per rank; otherwise of anything.
        """
        member = PortfolioMember("fewest sums" if sums else "fewest", SumOrbits.trivial(self.problem, 1))
        most = steps * sum(len(route.links) for route in self.problem.routes)
        while cost <= most and isinstance(self._portfolio([member], steps, cost, slices).outcome, Infeasible):
            cost += 1
        return cost

    def _symmetric(self, chunks: int, most: tuple[int, int]) -> list[SumOrbits]:
        """Groups that move every chunk, the largest first; then some that keep the transfers of each."""
        fitting = [pair for pair in self._pairs if chunks % (len(pair[0]) // len(pair[1])) == 0]
        moving = [pair for pair in fitting if len(pair[1]) == 1][: most[0]]
        # Of one chunk's images first, and of those one of each size, then another of each: which of them
        # has a schedule is not known.
        keeping = [pair for pair in fitting if len(pair[1]) > 1]
        sizes: Counter[tuple[int, int]] = Counter()
        turns = {}
        for group, kept in keeping:
            size = len(group), len(kept)
            turns[group, kept] = sizes[size]
            sizes[size] += 1
        keeping.sort(key=lambda pair: (len(pair[0]) < chunks * len(pair[1]), turns[pair]))
        return [SumOrbits(self.problem, chunks, *pair) for pair in (*moving, *keeping[: most[1]])]

    @cached_property
    def whole_orbits(self) -> tuple[int, ...]:
        """Numbers of chunks that are images of one under many groups, in ascending order."""
        numbers = Counter(len(group) // len(kept) for group, kept in self._pairs)
        most = max(numbers.values(), default=0)
        return tuple(sorted(number for number, groups in numbers.items() if 4 * groups >= most))

    @cached_property
    def _pairs(self) -> tuple[tuple[Group, Group], ...]:
        """Groups, at most so many of one size, each with subgroups to keep transfers; the largest first."""
        alone: Group = (identity(self.problem.topology.size),)
        sizes: Counter[int] = Counter()
        pairs: list[tuple[Group, Group]] = []
        for group in sorted(subgroups(self.problem), key=len, reverse=True):
            if sizes[len(group)] < _ALIKE:
                sizes[len(group)] += 1
                pairs += ((group, kept) for kept in (alone, *small_subgroups(group, _LARGEST_KEPT)))
        pairs.sort(key=lambda pair: (-len(pair[0]), len(pair[1])))
        return tuple(pairs)
