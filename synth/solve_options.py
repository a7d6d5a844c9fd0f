"""What a question is told beyond the topology and the collective; every method reads its own part."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TypedDict

from arborcast.synth.deadline import Limit

MIN_PIECE_BYTES = 32 << 10
"""Smaller pieces gain nothing on real links, where each one costs a message."""


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """What a method may be told beyond the topology and the collective.

    Attributes:
        max_trees: at most so many trees (per root for allgather and reduce-scatter); None for any number.
        tolerance: the part of the optimum that may be given up for fewer trees; None where nothing is asked.
        epsilon: the part of the optimum that the multiplicative weights may miss; None for the default of
            `synth.packing.mwu`.
        seed: breaks ties; the same seed gives the same schedule on any machine.
        deadline_s: seconds after which `TimedOutError` is raised; None for no limit. A method that is asked
            by another is given the deadline of the whole question, which runs already.
        size_bytes: with the method "auto", the message size for which the schedule should be fastest, with
            anything asked of trees the fastest along trees that keep to it; None for the best rate, which is
            what counts for large messages.
        chunks: C of a chunk schedule (see `synth.chunks.fixed_size.Size`, like the next two).
        steps: S of a chunk schedule.
        rounds: R of a chunk schedule.
        rate_tolerance: the part of its rate that each link may lose so that chunk schedules count in a
            coarser unit (see `synth.chunks.quantized_rates.Grid.of`); None where only odd rates may.
        cache: whether answers of solvers are kept and used on disk.
        max_height: with trees, the most edges between a root and a rank; None for any number.
        proof: where there is no chunk schedule, the file for CaDiCaL's proof of it; None for none.
        min_piece_bytes: what no piece of a chunk of average size falls below in the runs that the choice by
            size rests on; 1 where messages cost nothing, as by flags in memory.
    """

    max_trees: int | None = None
    tolerance: Fraction | None = None
    epsilon: Fraction | None = None
    seed: int = 0
    deadline_s: Limit = None
    size_bytes: int | None = None
    chunks: int | None = None
    steps: int | None = None
    rounds: int | None = None
    rate_tolerance: Fraction | None = None
    cache: bool = True
    max_height: int | None = None
    proof: Path | None = None
    min_piece_bytes: int = MIN_PIECE_BYTES

    @property
    def is_about_trees(self) -> bool:
        """Whether something is asked of trees, so that nothing else answers it."""
        return (self.max_trees, self.max_height, self.tolerance) != (None, None, None)


DEFAULTS = SolveOptions()
"""Of every method."""


class SolveKeywords(TypedDict, total=False):
    """A `SolveOptions` as keyword arguments, as `synth.solve` takes them."""

    max_trees: int | None
    tolerance: Fraction | None
    epsilon: Fraction | None
    seed: int
    deadline_s: Limit
    size_bytes: int | None
    chunks: int | None
    steps: int | None
    rounds: int | None
    rate_tolerance: Fraction | None
    cache: bool
    max_height: int | None
    proof: Path | None
    min_piece_bytes: int
