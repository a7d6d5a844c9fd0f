"""What a search for a chunk schedule may answer, and what every encoding must offer.

An encoding turns an instance (a `ChunkOrbits` with S steps and R rounds) into a solver's own terms once and
then searches as far as it is told. Effort is counted in the solver's own steps and not in seconds, so that
the same search goes the same way on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from arborcast.synth.chunks.problem.orbits import ChunkOrbits, OrbitSend
from arborcast.synth.errors import Prover


@dataclass(frozen=True, slots=True)
class Feasible:
    """A model.

    Attributes:
        rounds: the rounds of each step, each at least 1, adding up to R.
        sends: what the representatives do; sends that nobody needs may be among them.
    """

    rounds: tuple[int, ...]
    sends: tuple[OrbitSend, ...]


@dataclass(frozen=True, slots=True)
class Infeasible:
    """There is no schedule that the group maps to itself, says a solver.

    Attributes:
        proved_by: which; only the word of an exact one is a proof.
    """

    proved_by: Prover

    @property
    def is_proof(self) -> bool:
        """Whether no rounding can have lost a schedule."""
        return self.proved_by.is_exact


@dataclass(frozen=True, slots=True)
class Unknown:
    """The effort allowed was spent without an answer."""


@dataclass(frozen=True, slots=True)
class Inconclusive(Unknown):
    """The search is over, and what it looked through is not all there is: more effort would not tell."""


Outcome: TypeAlias = Feasible | Infeasible | Unknown


@dataclass(frozen=True)
class Instance:
    """What a solver is asked.

    Attributes:
        orbits: the problem, C and the group.
        steps: S, at least the problem's latency.
        rounds: R, at least S.
    """

    orbits: ChunkOrbits
    steps: int
    rounds: int


class Search(Protocol):
    """One instance in one solver's terms; made as `Encoding(instance, seed=0)`."""

    def run(self, effort: int | None) -> Outcome:
        """Search.

        Args:
            effort: how far, in units that take about a millisecond; None until there is an answer.
        """
        ...
