"""Limits of R/C for a number of steps, whatever the number of chunks, from flows in the time-expanded graph.

Weaker and faster than the packing of trees (`synth.chunks.trees.column_generation`): what is copied on its
way to several targets is looked at as a flow to each. A limit is what `synth.chunks.bounds.step_check` makes
of the prices of a linear program in exact arithmetic, never the value that the program had in floating point.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import numpy as np

from arborcast.synth.chunks.bounds.cut_program import CutProgram
from arborcast.synth.chunks.bounds.flow_program import FlowPrices, Prices, StepFlowProgram, groups_of
from arborcast.synth.chunks.bounds.step_certificate import PathDual, StepBound, StepLengths
from arborcast.synth.chunks.bounds.step_check import certified_ratio
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.deadline import Deadline
from arborcast.synth.kernels.compiled import Ints

LARGEST_DENOMINATOR = 10**6
"""Prices that are multiples of one over at most this much, nearly, are taken to be just that."""

_FINE = 2**40  # what all other prices are rounded to
_TOLERANCE = 1e-9


def cut_bound(problem: ChunkProblem, steps: int, *, deadline: Deadline) -> StepBound:
    """The limit by cuts: all blocks for one target must flow to it at once, one target at a time.

    Exact for gather and scatter. Blocks from the same sources to one target each must flow at once too.
    Tenths of a second for 8 ranks in 8 steps, a second for 32 ranks.

    Raises:
        ValueError: there is no schedule of so few steps.
        TimedOutError: the deadline passed.
        ArithmeticError: HiGHS failed on the linear program.
    """
    _check_steps(problem, steps)
    return _certified(problem, steps, CutProgram(problem, steps).solve(deadline))


def flow_bound(problem: ChunkProblem, steps: int, *, deadline: Deadline) -> StepBound:
    """The limit by coupled flows: all blocks flow at once, each within a capacity of its own to all targets.

    At least `cut_bound`, and exact for gather, scatter and alltoall, which take tenths of a second up to 16
    ranks. Where data is copied, time grows with the number of targets of all demands together: half a second
    for 60 and seconds for 240 in few steps.

    Returns:
        The optimum of the linear program, unless its prices are no multiples of one over a number up to
        `LARGEST_DENOMINATOR`; rounded, they prove a little less, with a ratio that takes many digits.

    Raises:
        ValueError: there is no schedule of so few steps.
        TimedOutError: the deadline passed.
        ArithmeticError: HiGHS failed on the linear program.
    """
    _check_steps(problem, steps)
    groups = groups_of(problem)
    if len(groups) == 1 and len(groups[0].flows) == 1:  # the same question, with an exact answer
        return cut_bound(problem, steps, deadline=deadline)
    prices = StepFlowProgram(problem, groups, steps, deadline=deadline).solve(deadline)
    return _certified(problem, steps, _path_lengths(problem, prices))


def _certified(problem: ChunkProblem, steps: int, certificate: PathDual) -> StepBound:
    return StepBound(steps, certified_ratio(problem, steps, certificate), certificate)


def _check_steps(problem: ChunkProblem, steps: int) -> None:
    if problem.latency is None:
        raise ValueError(f"{steps} steps: some rank is out of reach in any number of them")
    if steps < problem.latency:
        raise ValueError(f"{steps} steps: fewer than the latency, {problem.latency}, of the problem")


def _path_lengths(problem: ChunkProblem, prices: FlowPrices) -> PathDual:
    """The prices as fractions that keep the rule of `PathDual` exactly."""
    tables = [prices.links] if problem.is_routing else list(_by_target(problem, prices))
    denominator = common_denominator(np.unique(tables).tolist()) or _FINE
    whole = [np.rint(table * denominator).astype(np.int64) for table in tables]
    assigned: list[tuple[int, ...]] = []
    if problem.is_routing:
        assigned = [(0,)] * len(problem.demands)
    else:
        ends = np.cumsum([len(demand.targets) for demand in problem.demands]).tolist()
        assigned = [
            tuple(range(end - len(demand.targets), end))
            for end, demand in zip(ends, problem.demands, strict=True)
        ]
    totals: list[Ints] = [np.sum([whole[share] for share in shares], axis=0) for shares in set(assigned)]
    used = (np.maximum.reduce(totals) * np.array(problem.capacities)).sum(axis=1)
    scale = max(denominator * prices.unit, int(used.max()))  # more than the former only by rounding
    return PathDual(tuple(_fractions(table, scale) for table in whole), tuple(assigned))


def _by_target(problem: ChunkProblem, prices: FlowPrices) -> Iterable[Prices]:
    """The prices of each demand's flow to each target: of its own rows, or of the links where it has none."""
    for demand, own in zip(problem.demands, prices.own, strict=True):
        yield from own if len(demand.targets) > 1 else [prices.links]


def _fractions(table: Ints, scale: int) -> StepLengths:
    return tuple(tuple(Fraction(length, scale) for length in row) for row in table.tolist())


def common_denominator(values: Iterable[float]) -> int | None:
    """The least number that makes all values whole, nearly; None if there is none small enough."""
    common = 1
    for value in values:
        excess = Fraction(value * common).limit_denominator(LARGEST_DENOMINATOR // common)
        if abs(value * common - excess) > _TOLERANCE * common:
            return None
        if abs(value * common - round(value * common)) > _TOLERANCE * common:
            common *= excess.denominator
    return common
