"""What proves that S steps need so many rounds per chunk, whatever the number of chunks.

These are the values. `synth.chunks.bounds.flow_bound` and `synth.chunks.trees.column_generation` find them
with linear programs; `synth.chunks.bounds.step_check` recomputes in exact arithmetic, from the certificate
alone, what each one proves.

The linear program behind all of them: let step t last r_t rounds per chunk of a demand (a real number), so
that link e carries at most capacity_e * r_t there, and let every demand be one unit, carried by trees in the
time-expanded graph (vertices (rank, t); a send over a route from (u, t) to (v, t+1); waiting costs
nothing). The least sum of the r_t is the least R/C over all C. Lengths y[t][e] >= 0 with
sum_e capacity_e * y[t][e] <= 1 in every step prove that it is at least the sum over the demands of the
cheapest tree under y (weak duality): that is `TreeDual`. A send costs what the links of its route do in
its step, and a tree what its sends do. It costs at least what the flows within it do when the lengths
are shared out among these: that is `FlowDual`, weaker and easy to check.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from arborcast.synth.certificate import Bound
from arborcast.synth.topology import Permutation

StepLengths: TypeAlias = tuple[tuple[Fraction, ...], ...]
"""A length for each step and each link of the topology, in its order."""


@dataclass(frozen=True, slots=True)
class StaticLimit:
    """The proven rate of any schedule, in however many steps."""

    bound: Bound


@dataclass(frozen=True, slots=True)
class TreeDual:
    """One set of lengths; the ratio proved is the sum over the demands of the cheapest tree.

    In each step the sum over links of capacity times length is at most 1. A tree reaches all targets of a
    demand from its sources within S steps; checking it takes time exponential in the number of targets.
    """

    lengths: StepLengths


RouteLengths: TypeAlias = tuple[tuple[int, int, Fraction], ...]
"""Step, route and length, of those routes that have one in that step."""

Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""Demands, no one twice, each with one of its targets."""


@dataclass(frozen=True, slots=True)
class FlowDual:
    """Lengths of routes for each of some flows; a flow takes several blocks to one target of each.

    The messages of a schedule have room for each flow by itself: in each step the lengths of a route, of all
    flows together, are at most those of its links, and the sum over links of capacity times length is at
    most 1. The ratio proved is the sum, over the flows and what they take, of the shortest way in S steps
    from the sources of the block to its target.

    With symmetries, a flow stands for all flows of its orbit, and its lengths, averaged over all symmetries,
    for theirs. Then it is enough that the rule holds on the mean of each orbit of routes: the mean of its
    routes' lengths, each flow times its orbit, is at most the mean of what their links have. A shortest way
    under averaged lengths is no shorter than the average of the shortest ways, and so each flow still proves
    the length of its own as often as its orbit has flows.

    Attributes:
        links: a length for each step and link.
        flows: what each takes, and the lengths of its routes.
        symmetries: automorphisms, in capacities too, that map the demands to each other.
    """

    links: StepLengths
    flows: tuple[tuple[Pairs, RouteLengths], ...]
    symmetries: tuple[Permutation, ...] = ()


@dataclass(frozen=True, slots=True)
class PairDual(FlowDual):
    """The same of an allreduce: a message may carry any number of contributions, so each flows alone."""


@dataclass(frozen=True, slots=True)
class MessageDual:
    """Of an allreduce: one set of lengths; the ratio proved is that of the cheapest messages of one chunk.

    In each step the sum over links of capacity times length is at most 1. The messages bring every
    contribution to every rank within S steps; a message brings all that its sender has met, and costs what
    the links of its route do in its step. Checking it takes a search by CaDiCaL.

    Attributes:
        lengths: see above.
        cost: no messages cost less.
    """

    lengths: StepLengths
    cost: Fraction


StepCertificate: TypeAlias = StaticLimit | FlowDual | TreeDual | MessageDual


@dataclass(frozen=True, slots=True)
class StepBound:
    """No schedule of so many steps has fewer rounds per chunk.

    Attributes:
        steps: S.
        ratio: the least R/C that the certificate allows.
        certificate: what proves it.
    """

    steps: int
    ratio: Fraction
    certificate: StepCertificate
