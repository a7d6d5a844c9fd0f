"""Packings of shallow trees: the best rate within a height, for messages too small to hide many steps.

The column generation of `synth.packing.symmetric`, with every link an orbit of its own. Few of the trees that
were met then carry the rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.errors import InfeasibleError, Prover
from arborcast.synth.lp.choice import TreeCandidates, Use
from arborcast.synth.lp.sparsify import few_as_asked
from arborcast.synth.lp.tree_program import CLOSE, TreeRows, Weighed
from arborcast.synth.packing.symmetric.generation import EFFORT, Generation
from arborcast.synth.packing.symmetric.orbit_problem import OrbitTree, least_height, problem_written_out
from arborcast.synth.packing.weighted_tree import Packing, WeightedTree, mirrored, pair
from arborcast.synth.schedule import Settings
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Topology

WORTH = Fraction(1, 4)
"""The part of the limit that lower trees may lose to be on the frontier."""

MOST_HEIGHTS = 5
"""How many heights the frontier looks at; of more, every second or third."""

_QUICK_EFFORT = 20_000_000  # additions for exact prices of each height of a frontier
_USED = 1e-7  # of the limit: a smaller weight is none


def pack_shallow(
    topology: Topology,
    roots: Sequence[int] | None,
    limit: Fraction,
    options: SolveOptions,
    deadline: Deadline = NO_DEADLINE,
) -> Packing:
    """Trees of at most a given height from each root, or the pairs of an allreduce, at their best rate.

    Args:
        topology: the graph, relays turned into switches.
        roots: one for a broadcast, all ranks for an allgather; None for an allreduce, whose roots are free.
        limit: of the rate without a height, GB/s: nothing beyond is looked for.
        options: `max_height`, the most edges between a root and a rank (edges pass switches), and how few
            trees (see `synth.lp.sparsify.few_as_asked`); a tolerance is a part of the rate within the height.
        deadline: when to be content with what there is; trees there are in any case.

    Raises:
        InfeasibleError: no tree is as low.
    """
    height = options.max_height
    assert height is not None, "who asks has a height"
    shallow = _Shallow.of(topology, roots, height, limit, deadline)
    if height < shallow.least:
        least = shallow.least
        found = f"the lowest have {least}" if least < topology.ranks else "there are none of any height"
        words = f"topology {topology.name}: no trees to all ranks have height {height}, {found}"
        raise InfeasibleError(words, proved_by=[Prover.LIMIT])
    return shallow.packing(shallow.generation.run(), options)


def shallow_frontier(
    topology: Topology,
    roots: Sequence[int] | None,
    below: int,
    *,
    limit: Fraction,
    seed: int = 0,
    deadline: Deadline = NO_DEADLINE,
) -> Iterator[Packing]:
    """The best rates of growing heights, from the first that is worth it to the first that has the limit.

    Args:
        topology: as in `pack_shallow`, like all others.
        roots: see there.
        below: the height that is not looked at any more.
        limit: see there.
        seed: breaks ties.
        deadline: when to stop.

    Yields:
        Packings that lose at most `WORTH` of the limit, each with a better rate than the ones before.
    """
    least = _Shallow.of(topology, roots, below, limit, deadline).least
    best = limit * (1 - WORTH) * (1 - Fraction(CLOSE))  # which itself is worth it
    stride = max(1, math.ceil((below - least) / MOST_HEIGHTS))
    known: list[OrbitTree] = []
    for height in sorted(range(below - 1, least - 1, -stride)):
        if deadline.has_passed:
            return
        shallow = _Shallow.of(topology, roots, height, limit, deadline, _QUICK_EFFORT)
        for column in known:
            shallow.generation.master.add(column)
        weighed = shallow.generation.run()
        known = shallow.carrying(weighed)
        if weighed.rate > float(best / limit) * (1 - CLOSE):
            found = shallow.packing(weighed, SolveOptions(seed=seed), quickly=True)
            rate = _rate(found.carriers)
            if rate > best:
                best = rate
                yield found
        if best == limit:
            return


def _rate(carriers: Sequence[WeightedTree]) -> Fraction:
    return sum((carrier.weight for carrier in carriers), Fraction(0))


@dataclass(frozen=True, eq=False)
class _Shallow:
    """Trees of one height, and the limit of any height."""

    generation: Generation
    limit: Fraction
    least: int

    @classmethod
    def of(
        cls,
        topology: Topology,
        roots: Sequence[int] | None,
        height: int,
        limit: Fraction,
        deadline: Deadline,
        effort: int = EFFORT,
    ) -> _Shallow:
        """Before any tree is met."""
        problem = problem_written_out(topology, roots, limit)
        generation = Generation(problem, None, deadline, height, effort=effort)
        return cls(generation, limit, least_height(problem))

    def carrying(self, weighed: Weighed) -> list[OrbitTree]:
        """The columns that carry something in an answer."""
        weights = weighed.weights.tolist()
        columns = self.generation.master.columns
        return [column for column, weight in zip(columns, weights, strict=False) if weight > _USED]

    def packing(self, weighed: Weighed, options: SolveOptions, *, quickly: bool = False) -> Packing:
        """Few of the carriers, with exact weights, and what is proved of their rate."""
        problem, used = self.generation.problem, self.carrying(weighed)
        # An allreduce whose trees differ both ways is done by pairs of those that carry something.
        in_pairs = any(group.turned for group in problem.groups)
        groups = 1 if in_pairs else len(problem.groups)
        columns = used if in_pairs else self.generation.master.columns
        trees = [
            (one, WeightedTree(one.root, Fraction(1), one.routes), problem.groups[one.group].turned)
            for one in columns
        ]
        if in_pairs:
            pairs = product((t for t in trees if not t[2]), (t for t in trees if t[2]))
            carriers = [
                (0, pair(out[1], into[1], Fraction(1))) for out, into in pairs if out[0].root == into[0].root
            ]
            known = list(range(len(carriers)))
        else:
            carriers = [(one.group, mirrored(its) if problem.mirrored else its) for one, its, _ in trees]
            carried = set(map(id, used))
            known = [place for place, one in enumerate(columns) if id(one) in carried]
        target = self.limit / groups
        rows = TreeRows.of((link.bandwidth for link in problem.topology.links), target, groups)
        choice = TreeCandidates(rows, tuple(Use.of(group, carrier) for group, carrier in carriers))
        weights, facts = few_as_asked(choice, known, options, self.generation.deadline, quickly=quickly)
        chosen = tuple(
            replace(carriers[place][1], weight=weight * target) for place, weight in weights.items()
        )
        shown = self._shown(_rate(chosen) / self.limit, choice.rate)
        height: Settings = (("max_height", self.generation.max_height), ("within_height", shown))
        return Packing(chosen, (*height, *facts))

    def _shown(self, rate: Fraction, before: Fraction) -> str:
        """What is proved of a rate, of few of the carriers, and of the one of all of them."""
        least = self.generation.limit
        if rate == 1:
            return "the limit of any height"
        if rate == least:
            return "best"
        close = least * (1 - Fraction(CLOSE))
        if rate >= close:
            return "best, to 1e-9"
        if before >= close:
            return "found: few of the best trees"
        return f"found: {'out of time' if self.generation.deadline.has_passed else 'no better tree was met'}"
