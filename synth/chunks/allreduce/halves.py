"""Collectives that are one problem of copies, and the two of which an allreduce can be composed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from arborcast.synth.certificate import Bound
from arborcast.synth.chunks.bounds.step_certificate import StaticLimit, StepBound
from arborcast.synth.chunks.curve import CopyOptimum, Curve, FrontierOptions, trace
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.prune import ChunkPlan
from arborcast.synth.chunks.problem.time_reversal import mirrored, schedule_of, share_of_demand
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.schedule import Method, Schedule
from arborcast.synth.topology import Topology


@dataclass(frozen=True)
class Half:
    """A collective of its own, or one of the two that an allreduce is composed of."""

    topology: Topology
    collective: Collective
    problem: ChunkProblem
    latency: int
    static: StepBound

    @classmethod
    def of(cls, topology: Topology, collective: Collective, limit: Bound) -> Half:
        problem = ChunkProblem.of(*mirrored(topology, collective))
        latency = problem.latency
        assert latency is not None, "a collective with a rate above zero reaches everybody"
        ratio = static_ratio(topology, collective, limit)
        return cls(topology, collective, problem, latency, StepBound(latency, ratio, StaticLimit(limit)))

    def trace(self, spare: int, options: FrontierOptions, deadline: Deadline) -> Curve[CopyOptimum]:
        return trace(self.problem, self.static, self.latency + spare, options, deadline)

    def schedule(self, chunks: int, plan: ChunkPlan, method: Method) -> Schedule:
        bound = self.static.certificate
        assert isinstance(bound, StaticLimit), "made with one"
        return schedule_of(
            self.topology, self.collective, self.problem, chunks, plan, method=method, bound=bound.bound
        )


def parts_of(collective: Collective) -> list[Collective]:
    """The collectives it is composed of: two for an allreduce, otherwise itself."""
    if collective.kind is not Kind.ALLREDUCE:
        return [collective]
    return [replace(collective, kind=kind) for kind in (Kind.REDUCE_SCATTER, Kind.ALLGATHER)]


def latency_of_parts(topology: Topology, collective: Collective) -> int | None:
    """The fewest steps of the parts one after the other; None where some rank cannot be reached."""
    steps = [ChunkProblem.of(*mirrored(topology, part)).latency for part in parts_of(collective)]
    return None if None in steps else sum(step for step in steps if step is not None)


def static_ratio(topology: Topology, collective: Collective, limit: Bound) -> Fraction:
    """The R/C below which the rate of a schedule would exceed its limit."""
    share = Fraction(1) if collective.kind is Kind.ALLREDUCE else share_of_demand(collective)
    return topology.bandwidth_unit / (limit.rate * share)
