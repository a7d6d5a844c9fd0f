"""What the certificate of a step bound proves, recomputed from the certificate alone in exact arithmetic.

`certified_ratio` is how every limit of `synth.chunks.bounds.flow_bound` and
`synth.chunks.trees.column_generation` is checked, and it knows nothing of how they are found: lengths become
integers, rules are checked, and cheapest trees in the time-expanded graph say what they prove (the theory is
in `synth.chunks.bounds.step_certificate`); of flows and messages `synth.chunks.bounds.flow_check` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.certificate import Bound
from arborcast.synth.certification import certified_rate
from arborcast.synth.certification.exact_paths import FAR, Matrix, ways_between
from arborcast.synth.chunks.bounds.flow_check import check_links, ratio_of_flows, ratio_of_messages
from arborcast.synth.chunks.bounds.spanning_check import MOST_SPANNED, spanning_costs
from arborcast.synth.chunks.bounds.step_certificate import (
    FlowDual,
    MessageDual,
    StaticLimit,
    StepCertificate,
    StepLengths,
    TreeDual,
)
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Topology

MOST_TREE_TARGETS = 12
"""Targets of one demand up to which cheapest trees are recomputed: the time triples with each one more.

Where one rank sends to all others, there may be as many as `MOST_SPANNED` ranks allow.
"""

MOST_SETS = 1 << 15
"""Sets of targets, those of all demands together, up to which cheapest trees are recomputed."""

_LARGEST = 1 << 61
_MOST_TOGETHER = 1 << 20  # numbers in memory at once

Whole = Matrix  # int64 where every sum fits, Python integers (an array of objects) where one might not


def certified_ratio(problem: ChunkProblem, steps: int, certificate: StepCertificate) -> Fraction:
    """The R/C that a certificate proves to be the least, for every number of chunks C.

    Args:
        problem: what is limited: the collective itself, the mirror image of a reduction, or that of an
            allreduce (`synth.chunks.allreduce.partial_sums.sum_problem`).
        steps: S.
        certificate: lengths of flows or of trees; of an allreduce, of pairs or messages. Those of flows and
            pairs take a shortest-way search per target; those of trees time exponential in the targets of a
            demand, those of messages a search by CaDiCaL.

    Raises:
        InputError: the certificate does not fit the problem, breaks its rule, or belongs to a demand that
            no schedule of so many steps serves; a `StaticLimit`, which speaks of a collective
            (`static_ratio`); too many targets for cheapest trees.
    """
    if steps < 1:
        raise InputError(f"certificate: steps must be at least 1, got {steps}")
    match certificate:
        case FlowDual():
            return ratio_of_flows(problem, steps, certificate)
        case TreeDual():
            return _ratio_of_trees(problem, steps, certificate)
        case MessageDual():
            return ratio_of_messages(problem, steps, certificate)
        case StaticLimit():
            raise InputError("static limit: limits a collective, not a problem of copies; use static_ratio")


def can_check_trees(problem: ChunkProblem) -> bool:
    """Whether certificates of trees can be recomputed: one rank's to all others, or few targets."""
    if problem.is_spanning and problem.ranks <= MOST_SPANNED:
        return True
    return max(len(demand.targets) for demand in problem.demands) <= MOST_TREE_TARGETS


def static_ratio(topology: Topology, collective: Collective, bound: Bound) -> Fraction:
    """The R/C that a limit of the rate proves to be the least, in however many steps.

    In R rounds a chunk schedule moves, at `bandwidth_unit` GB/s, buffers of C chunks per block.

    Args:
        topology: the fabric, not its mirror image.
        collective: what is limited, reductions as they are.
        bound: of its rate, which is recomputed from the certificate.

    Raises:
        InputError: the certificate proves something else than the bound says, or that nothing can be done;
            an allreduce, whose chunks are those of the two halves that it is composed of.
    """
    if collective.kind is Kind.ALLREDUCE:
        raise InputError("static limit: an allreduce is composed of two halves, each with a limit of its own")
    rate = certified_rate(topology, collective, bound.certificate)
    if rate != bound.rate:
        raise InputError(
            f"static limit: its certificate proves {rate} GB/s, the bound says {bound.rate} GB/s"
        )
    if rate == 0:
        raise InputError(
            f"static limit: there is no schedule of this {collective.kind} at all, its rate is 0"
        )
    share = next(iter(collective.blocks().values()))  # blocks are of one size
    return topology.bandwidth_unit / (rate * share)


def _ratio_of_trees(problem: ChunkProblem, steps: int, certificate: TreeDual) -> Fraction:
    fan_out = max(len(demand.targets) for demand in problem.demands)
    check_links(problem, steps, certificate.lengths)
    lengths, scale = _whole(problem, certificate.lengths, fan_out)
    sends = _Sends.under(problem.topology, lengths)
    never = sends.never(fan_out)
    if fan_out > MOST_TREE_TARGETS and can_check_trees(problem):
        return _ratio_of_spanning_trees(problem, steps, sends, never, scale)
    sets = _TargetSets.of(problem)
    table = sets.costs(sends, never)
    total = 0
    for index, demand in enumerate(problem.demands):
        sources = sorted(demand.sources)
        served = table[:, sources].min(axis=1, keepdims=True)
        if len(sources) > 1:
            sets.divide(served)
        cost = int(served[sets.position[sets.mask(demand.targets)], 0])
        if cost >= never:
            raise InputError(f"demand {index}: its targets cannot all be reached in {steps} steps")
        total += cost
    return Fraction(total, scale)


def _ratio_of_spanning_trees(
    problem: ChunkProblem, steps: int, sends: _Sends, never: int, scale: int
) -> Fraction:
    """The same where every block goes from one rank to all others."""
    # Costs that no word holds are rounded down, which proves a little less.
    shift = max(0, (never * problem.ranks).bit_length() - _LARGEST.bit_length() + 1)
    never = (never >> shift) + 1
    costs = np.full((steps, problem.ranks, problem.ranks), never, dtype=np.int64)
    src = np.repeat(sends.senders, np.diff([*sends.firsts, len(sends.dst)]))
    costs[:, src, sends.dst] = (sends.costs >> shift).astype(np.int64)
    cheapest = spanning_costs(costs, never)
    total = 0
    for index, demand in enumerate(problem.demands):
        cost = cheapest[min(demand.sources)]
        if cost >= never:
            raise InputError(f"demand {index}: its targets cannot all be reached in {steps} steps")
        total += cost
    return Fraction(total << shift, scale)


def _whole(problem: ChunkProblem, table: StepLengths, fan_out: int) -> tuple[Whole, int]:
    """The lengths in whole units (step, link), and how many units are 1."""
    scale = math.lcm(*{length.denominator for row in table for length in row})
    exact = np.array([[int(length * scale) for length in row] for row in table], dtype=object)
    # The largest numbers that come up: twice what no tree costs, where no send passes a link twice.
    fits = (int(exact.max(initial=0)) + 1) * fan_out * 4 * exact.size <= _LARGEST
    return exact.astype(np.int64) if fits else exact, scale


@dataclass(frozen=True)
class _Sends:
    """What may be sent within a step, from rank to rank, in the order of the senders.

    Whatever its way through switches, a send costs at least the shortest one.

    Attributes:
        ranks: number of ranks.
        costs: of each send (column) in each step (row).
        dst: the rank that it reaches.
        senders: the ranks that can send at all.
        firsts: the first send of each sender.
    """

    ranks: int
    costs: Whole
    dst: NDArray[np.int64]
    senders: NDArray[np.int64]
    firsts: NDArray[np.int64]

    @classmethod
    def under(cls, topology: Topology, lengths: Whole) -> _Sends:
        """Those of a topology, with lengths for each step and link."""
        ranks, switches = range(topology.ranks), range(topology.ranks, topology.size)
        far = FAR if lengths.dtype == np.int64 else 1 + sum(int(length) for length in lengths.ravel())
        ways = [ways_between(topology, of_step, ranks, switches, far) for of_step in lengths]
        src, dst = np.nonzero((ways[0] < far) & ~np.eye(topology.ranks, dtype=np.bool_))
        senders, firsts = np.unique(src, return_index=True)
        return cls(topology.ranks, np.array([way[src, dst] for way in ways]), dst, senders, firsts)

    def never(self, fan_out: int) -> int:
        """More than any tree with so many targets costs, where a tree is no more than a way to each."""
        return 1 + fan_out * sum(int(row.max(initial=0)) for row in self.costs)

    def one_step_earlier(self, later: Whole, costs: Whole) -> Whole:
        """What each rank (column) pays, who may wait for nothing or send once."""
        earlier = later.copy()
        together = max(1, _MOST_TOGETHER // max(1, len(self.dst)))
        for first in range(0, len(later), together):
            rows = later[first : first + together]
            sent = np.minimum.reduceat(rows[:, self.dst] + costs, self.firsts, axis=1)
            earlier[first : first + together, self.senders] = np.minimum(rows[:, self.senders], sent)
        return earlier


@dataclass(frozen=True)
class _TargetSets:
    """All sets of targets that a tree of some demand may have to serve, the smaller before the larger.

    A set is a number whose bits stand for `terminals`.

    Attributes:
        terminals: the targets of all demands, ascending.
        position: the row of each set; the empty set is row 0.
        divisions: for each row the rows of the two parts of every division in two; the first part holds
            the first target.
    """

    terminals: tuple[int, ...]
    position: dict[int, int]
    divisions: tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]

    @classmethod
    def of(cls, problem: ChunkProblem) -> _TargetSets:
        for index, demand in enumerate(problem.demands):
            if len(demand.targets) > MOST_TREE_TARGETS:
                raise InputError(
                    f"demand {index}: cheapest trees can be recomputed for at most {MOST_TREE_TARGETS} "
                    f"targets, got {len(demand.targets)}"
                )
        terminals = tuple(sorted(frozenset[int]().union(*(demand.targets for demand in problem.demands))))
        found = {0}
        for targets in dict.fromkeys(demand.targets for demand in problem.demands):
            found.update(_parts(_mask(terminals, targets)))
            if len(found) > MOST_SETS:
                raise InputError(
                    f"problem: cheapest trees can be recomputed for at most {MOST_SETS} sets of targets "
                    f"among its {len(problem.demands)} demands, got more"
                )
        position = {mask: row for row, mask in enumerate(sorted(found))}
        return cls(terminals, position, tuple(_divisions(mask, position) for mask in position))

    def mask(self, targets: Iterable[int]) -> int:
        """The number of a set of targets."""
        return _mask(self.terminals, targets)

    def costs(self, sends: _Sends, never: int) -> Whole:
        """The cheapest tree to each set (row) from each rank (column) at the start.

        Dreyfus and Wagner 1971, backwards in time: a tree waits or sends, unless it forks into two.
        """
        table = np.full((len(self.position), sends.ranks), never, dtype=sends.costs.dtype)
        table[0] = 0
        self._serve_own(table)
        for costs in sends.costs[::-1]:
            table = sends.one_step_earlier(table, costs)
            self.divide(table)
            self._serve_own(table)
        return table

    def divide(self, table: Whole) -> None:
        """Let trees fork: a set costs at most what its parts do."""
        for row, (first, rest) in enumerate(self.divisions):
            if len(first):
                np.minimum(table[row], (table[first] + table[rest]).min(axis=0), out=table[row])

    def _serve_own(self, table: Whole) -> None:
        """A target need not be brought what it has."""
        for mask, row in self.position.items():  # ascending, so that the rest of a set comes before it
            for bit, terminal in enumerate(self.terminals):
                if mask >> bit & 1:
                    table[row, terminal] = table[self.position[mask ^ 1 << bit], terminal]


def _mask(terminals: Sequence[int], targets: Iterable[int]) -> int:
    wanted = set(targets)
    return sum(1 << bit for bit, terminal in enumerate(terminals) if terminal in wanted)


def _parts(mask: int) -> Iterator[int]:
    """Every subset of a set but the empty one."""
    part = mask
    while part:
        yield part
        part = (part - 1) & mask


def _divisions(mask: int, position: dict[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    others = mask & (mask - 1)
    rests = list(_parts(others))
    first = [position[mask ^ rest] for rest in rests]
    return np.array(first, dtype=np.int64), np.array([position[rest] for rest in rests], dtype=np.int64)
