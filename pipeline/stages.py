"""A plan: which layers in which stage on which ranks, how many microbatches, in which order.

Planners make plans, people may write them by hand, and the simulator and the trainer carry them out. Every
microbatch is divided among the replicas of a stage, in the order of its ranks, as evenly as whole samples
allow; what crosses a boundary follows from that alone (`shares`, `overlaps`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.order.actions import Passes
from arborcast.pipeline.order.cap import capped
from arborcast.synth.topology import Topology


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers on some ranks, all of which hold the same weights (replicas).

    Attributes:
        start: the first layer.
        end: the layer behind the last one.
        ranks: of the topology and of the job, in the order in which samples are divided among them.
    """

    start: int
    end: int
    ranks: tuple[int, ...]

    @property
    def replicas(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True)
class Plan:
    """A pipeline over the layers of a model and the ranks of a topology.

    `stages` may be given as tuples `(start, end, ranks)`.

    Attributes:
        stages: together all layers, each once, in order.
        microbatches: that each batch is divided into.
        order: one of `pipeline.order.ORDERS`.
        recompute: whether the backward pass repeats the forward pass instead of keeping its results.
        max_in_flight: most microbatches whose results any rank keeps at once; None for what the order does.
        topology: the fabric whose ranks the stages name; None where it is said elsewhere.
        model: the name of the model's profile, "" where nothing is known of it.
        method: what made the plan, in words.

    Raises:
        PlanError: a gap between stages, a rank on two stages, or a value out of range.
    """

    stages: tuple[Stage, ...]
    microbatches: int
    order: str = "1f1b"
    recompute: bool = False
    max_in_flight: int | None = None
    topology: Topology | None = None
    model: str = ""
    method: str = "by hand"

    def __init__(
        self,
        stages: Iterable[Stage | tuple[int, int, Iterable[int]]],
        microbatches: int,
        order: str = "1f1b",
        recompute: bool = False,
        max_in_flight: int | None = None,
        topology: Topology | None = None,
        model: str = "",
        method: str = "by hand",
    ) -> None:
        """Make and check a plan."""
        made = tuple(
            stage if isinstance(stage, Stage) else Stage(stage[0], stage[1], tuple(stage[2]))
            for stage in stages
        )
        given = {
            "stages": made,
            "microbatches": microbatches,
            "order": order,
            "recompute": recompute,
            "max_in_flight": max_in_flight,
            "topology": topology,
            "model": model,
            "method": method,
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        if not self.stages:
            raise PlanError("plan: must have at least one stage, got none")
        for index, stage in enumerate(self.stages):
            start = self.stages[index - 1].end if index else 0
            if stage.start != start:
                raise PlanError(
                    f"plan: stage {index} must start at layer {start}, where the one before it ends, "
                    f"got {stage.start}"
                )
            if stage.end <= stage.start:
                raise PlanError(f"plan: stage {index} must hold a layer, got [{stage.start}, {stage.end})")
            if not stage.ranks:
                raise PlanError(f"plan: stage {index} must have a rank, got none")
        seen: dict[int, int] = {}
        for index, stage in enumerate(self.stages):
            for rank in stage.ranks:
                if rank < 0 or (self.topology is not None and rank >= self.topology.ranks):
                    most = "" if self.topology is None else f"..{self.topology.ranks - 1} of the topology"
                    raise PlanError(f"plan: stage {index}: rank must be in 0{most}, got {rank}")
                if rank in seen:
                    raise PlanError(f"plan: rank {rank} must be on one stage, got {seen[rank]} and {index}")
                seen[rank] = index
        if self.microbatches < 1:
            raise PlanError(f"plan: microbatches must be at least 1, got {self.microbatches}")
        if self.order not in ORDERS:
            raise PlanError(f"plan: order must be one of {', '.join(ORDERS)}, got {self.order}")
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise PlanError(f"plan: max_in_flight must be at least 1, got {self.max_in_flight}")

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.stages[-1].end

    @property
    def cuts(self) -> tuple[int, ...]:
        """The layers at which a stage begins, without the first."""
        return tuple(stage.start for stage in self.stages[1:])

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks with work, stage by stage."""
        return tuple(rank for stage in self.stages for rank in stage.ranks)

    @property
    def passes(self) -> Passes:
        """What each stage does, with `max_in_flight` applied."""
        made = ORDERS[self.order].make(len(self.stages), self.microbatches)
        return made if self.max_in_flight is None else capped(made, self.max_in_flight)

    def stage_of(self, rank: int) -> int | None:
        """The index of the stage of a rank; None for one without work."""
        return next((index for index, stage in enumerate(self.stages) if rank in stage.ranks), None)

    def microbatch_sizes(self, batch: int) -> tuple[int, ...]:
        """Samples of each microbatch; the first ones have one more where the batch does not divide.

        Raises:
            BatchError: some replica would have no sample of some microbatch.
        """
        most = max(stage.replicas for stage in self.stages)
        if batch < self.microbatches * most:
            raise BatchError(
                f"batch of {batch} samples: must have at least {self.microbatches * most}, one for each of "
                f"{self.microbatches} microbatches on each of {most} replicas"
            )
        return divided(batch, self.microbatches)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Samples [start, stop) of a microbatch that one replica has and a replica of the next stage needs."""

    sender: int
    receiver: int
    start: int
    stop: int


def divided(total: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` parts of `total`, as even as whole numbers allow, the larger ones first."""
    size, more = divmod(total, parts)
    return tuple(size + (part < more) for part in range(parts))


def shares(samples: int, replicas: int) -> tuple[tuple[int, int], ...]:
    """The samples [start, stop) of a microbatch that each replica works on."""
    ends = [0]
    for size in divided(samples, replicas):
        ends.append(ends[-1] + size)
    return tuple(pairwise(ends))


def overlaps(samples: int, senders: int, receivers: int) -> tuple[Overlap, ...]:
    """What crosses the boundary between a stage with so many replicas and the next, by index of replica."""
    return tuple(
        Overlap(sender, receiver, max(a, c), min(b, d))
        for sender, (a, b) in enumerate(shares(samples, senders))
        for receiver, (c, d) in enumerate(shares(samples, receivers))
        if max(a, c) < min(b, d)
    )


def boundary_messages(
    senders: Sequence[int], receivers: Sequence[int], size_bytes: float
) -> dict[tuple[int, int], float]:
    """Bytes by (from, to) of what crosses a boundary for a microbatch that divides evenly on both sides."""
    samples = lcm(len(senders), len(receivers))
    return {
        (senders[it.sender], receivers[it.receiver]): (it.stop - it.start) / samples * size_bytes
        for it in overlaps(samples, len(senders), len(receivers))
    }
