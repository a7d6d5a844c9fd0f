"""A plan: which layers in which stage on which ranks, how many microbatches, in which order.

Planners make plans, people may write them by hand, and the simulator and the trainer carry them out. Every
microbatch is divided among the replicas of a stage, in the order of its ranks, as evenly as whole samples
allow; what crosses a boundary follows from that alone (`shares`, `overlaps`). Several stages may lie on the
same ranks, where the order says so; ranks with the same stages are a worker. Instead of replicas, the ranks
of every stage may be a mesh over which its operators are divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from math import inf, lcm

from arborcast.pipeline.costs.saved_bytes import (
    Segment,
    Segments,
    Treatment,
    check_segments,
    described,
    extra_us,
)
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.meshes import Mesh, row_of
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.order.actions import Passes
from arborcast.pipeline.order.cap import capped
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.stage_sharding import StageSharding
from arborcast.synth.topology import Topology

BUCKET_BYTES = 25 << 20
"""Of gradients that replicas sum at once, as far as parameters allow: buckets begin within the last pass."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers on some ranks, all of which hold the same weights (replicas) or divide operators.

    Attributes:
        start: the first layer.
        end: the layer behind the last one.
        ranks: of the topology and of the job, in the order in which samples are divided among them.
        segments: what becomes of the results of its layers; empty for what the plan says of all.
        sharding: how operators and parameters lie on a mesh of these ranks; None where they are replicas.
    """

    start: int
    end: int
    ranks: tuple[int, ...]
    segments: Segments = ()
    sharding: StageSharding | None = None

    @classmethod
    def divided(cls, start: int, end: int, sharding: StageSharding) -> Stage:
        """The layers [start, end), their operators divided over the ranks of a mesh."""
        return cls(start, end, sharding.mesh.ranks, sharding=sharding)

    @property
    def mesh(self) -> Mesh:
        """Of its ranks; replicas are a row."""
        return row_of(self.ranks) if self.sharding is None else self.sharding.mesh

    @property
    def replicas(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class StageWorker:
    """Ranks that hold the same stages and do the same passes.

    Attributes:
        stages: their indices, ascending.
        ranks: as of each of these stages.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A pipeline over the layers of a model and the ranks of a topology.

    `stages` may be given as tuples `(start, end, ranks)`.

    Attributes:
        stages: together all layers, each once, in order.
        microbatches: that each batch is divided into.
        order: one of `pipeline.order.ORDERS`.
        recompute: whether the backward pass of each stage repeats the whole forward pass instead of keeping
            its results. Stages that have `segments` say it by layer instead.
        max_in_flight: most microbatches whose results any rank keeps at once; None for what the order does.
            Only for orders of one stage on each rank whose backward passes are whole.
        topology: the fabric whose ranks the stages name; None where it is said elsewhere.
        model: the name of the model's profile, "" where nothing is known of it.
        method: what made the plan, in words.
        offload_gbps: GB/s between each rank and host memory, each way; None where nothing is offloaded.
        batch: samples of a step; None for any number that divides.
        whole: operators without a rule, which every rank of a divided stage runs on whole tensors.

    Raises:
        PlanError: a gap between stages, stages that share some of their ranks only, stages on other workers
            than the order lays them on, a value out of range, or what stages whose operators are divided
            cannot do.

    Examples:
        >>> plan = pipeline.Plan([(0, 3, [0]), (3, 6, [1, 2]), (6, 8, [3])], microbatches=8, order="1f1b")
        >>> [stage.ranks for stage in plan.stages]
        [(0,), (1, 2), (3,)]
    """

    stages: tuple[Stage, ...]
    microbatches: int
    order: str = "1f1b"
    recompute: bool = False
    max_in_flight: int | None = None
    topology: Topology | None = None
    model: str = ""
    method: str = "by hand"
    offload_gbps: float | None = None
    batch: int | None = None
    whole: tuple[str, ...] = ()

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
        offload_gbps: float | None = None,
        batch: int | None = None,
        whole: tuple[str, ...] = (),
    ) -> None:
        """Make and check a plan."""
        made = tuple(
            stage if isinstance(stage, Stage) else Stage(stage[0], stage[1], tuple(stage[2]))
            for stage in stages
        )
        if not recompute:  # one form of keeping all
            made = tuple(
                replace(it, segments=()) if {own.treatment for own in it.segments} == {Treatment.KEEP} else it
                for it in made
            )
        given = locals() | {"stages": made}
        for field in fields(self):
            object.__setattr__(self, field.name, given[field.name])
        self._check_stages()
        self._check_ranks()
        if self.microbatches < 1:
            raise PlanError(f"plan: microbatches must be at least 1, got {self.microbatches}")
        if self.order not in ORDERS:
            raise PlanError(f"plan: order must be one of {', '.join(ORDERS)}, got {self.order}")
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise PlanError(f"plan: max_in_flight must be at least 1, got {self.max_in_flight}")
        self._check_order()
        self._check_segments()
        if any(it.sharding is not None for it in self.stages):
            self._check_divided()

    def _check_stages(self) -> None:
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

    def _check_ranks(self) -> None:
        seen: dict[int, int] = {}
        for index, stage in enumerate(self.stages):
            for rank in stage.ranks:
                if rank < 0 or (self.topology is not None and rank >= self.topology.ranks):
                    most = "" if self.topology is None else f"..{self.topology.ranks - 1} of the topology"
                    raise PlanError(f"plan: stage {index}: rank must be in 0{most}, got {rank}")
                first = seen.setdefault(rank, index)
                if first != index and self.stages[first].ranks != stage.ranks:
                    raise PlanError(
                        f"plan: rank {rank} must be on one stage, or on several with the same ranks, got "
                        f"stages {first} and {index}"
                    )
            if len(set(stage.ranks)) < len(stage.ranks):
                raise PlanError(f"plan: stage {index} must name each rank once, got {list(stage.ranks)}")

    def _check_order(self) -> None:
        """Whether the order can be carried out on these stages."""
        order, workers = ORDERS[self.order], self.workers
        held = tuple(worker.stages for worker in workers)
        if order.layout(len(self.stages), len(workers)) != held:
            raise PlanError(
                f"plan: order {self.order} {order.rule}, got {len(self.stages)} stages on "
                f"{len(workers)} groups of ranks, {' '.join('+'.join(map(str, it)) for it in held)}"
            )
        if order.in_flight is None and self.max_in_flight is not None:
            raise PlanError(
                f"plan: max_in_flight must be None for order {self.order}, got {self.max_in_flight}"
            )
        if order.splits and self.recompute:
            raise PlanError(
                f"plan: order {self.order} must keep the results of forward passes, which both halves of a "
                "backward pass need, got recompute"
            )

    def _check_segments(self) -> None:
        """Whether what becomes of results can be carried out."""
        for index, stage in enumerate(self.stages):
            if not stage.segments:
                continue
            if self.recompute:
                raise PlanError(f"plan: stage {index}: must have no segments where all recompute, got some")
            fault = check_segments(stage.segments, stage.start, stage.end)
            if fault:
                raise PlanError(f"plan: stage {index}: segments {fault}")
            treated = {it.treatment for it in stage.segments} - {Treatment.KEEP}
            if ORDERS[self.order].splits and treated:
                raise PlanError(
                    f"plan: order {self.order} must keep the results of forward passes, which both halves of "
                    f"a backward pass need, got {min(treated)} on stage {index}"
                )
            if Treatment.OFFLOAD in treated and self.offload_gbps is None:
                raise PlanError(f"plan: offload_gbps must be given where stage {index} offloads, got none")
        if self.offload_gbps is not None and not 0 < self.offload_gbps < inf:
            raise PlanError(f"plan: offload_gbps must be finite and positive, got {self.offload_gbps}")

    def _check_divided(self) -> None:
        """Whether stages whose operators are divided can be carried out so."""
        for index, stage in enumerate(self.stages):
            if stage.sharding is None or stage.sharding.mesh.ranks != stage.ranks:
                got = "none" if stage.sharding is None else f"ranks {list(stage.sharding.mesh.ranks)}"
                raise PlanError(
                    f"plan: stage {index} must have a mesh of its ranks {list(stage.ranks)}, as operators of "
                    f"some stage are divided, got {got}"
                )
            if len(self.segments(index)) > 1:
                raise PlanError(
                    f"plan: stage {index} must treat the results of all its layers alike, as its operators "
                    f"are divided, got {described(stage.segments)}"
                )
        if len(self.workers) < len(self.stages):
            raise PlanError(
                f"plan: must have every stage on ranks of its own where operators are divided, got "
                f"{len(self.stages)} stages on {len(self.workers)} groups of ranks in order {self.order}"
            )
        if self.topology is None or self.batch is None:
            what = "topology" if self.topology is None else "batch"
            raise PlanError(f"plan: {what} must be given where operators are divided, got none")
        if self.batch % self.microbatches:
            raise PlanError(
                f"plan: batch of {self.batch} samples must split into {self.microbatches} equal microbatches"
            )

    @property
    def is_divided(self) -> bool:
        """Whether operators are divided over meshes, in place of samples over replicas."""
        return self.stages[0].sharding is not None

    def undivided(self, depth: int) -> Plan:
        """Which layers lie on which ranks, of a model with so many layers; one stage holds all of them.

        A divided stage that is alone says of the whole model that it is one layer, where it was made so.
        """
        ends = [depth] if len(self.stages) == 1 else [it.end for it in self.stages]
        stages = []
        for it, end in zip(self.stages, ends, strict=True):
            segments = tuple(replace(own, end=end) for own in it.segments)  # one at most
            stages.append(Stage(it.start, end, it.ranks, segments))
        return replace(self, stages=tuple(stages), model="")

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.stages[-1].end

    def segments(self, stage: int) -> Segments:
        """What becomes of the results of a stage's layers."""
        own = self.stages[stage]
        treatment = Treatment.RECOMPUTE if self.recompute else Treatment.KEEP
        return own.segments or (Segment(own.start, own.end, treatment),)

    @cached_property
    def treatments(self) -> frozenset[Treatment]:
        """All that become of results anywhere."""
        return frozenset(it.treatment for stage in range(len(self.stages)) for it in self.segments(stage))

    def pass_us(self, profile: Profile, stage: int, samples: float) -> tuple[float, float]:
        """Time of a forward and a backward pass of a stage, recomputation and offload included."""
        own = self.stages[stage]
        again = extra_us(profile, self.segments(stage), samples, self.offload_gbps)
        forward = profile.forward_us(own.start, own.end, samples)
        return forward + again[0], profile.backward_us(own.start, own.end, samples) + again[1]

    @property
    def cuts(self) -> tuple[int, ...]:
        """The layers at which a stage begins, without the first."""
        return tuple(stage.start for stage in self.stages[1:])

    @cached_property
    def workers(self) -> tuple[StageWorker, ...]:
        """Who does the same, in the order of their first stages."""
        held: dict[tuple[int, ...], list[int]] = {}
        for index, stage in enumerate(self.stages):
            held.setdefault(stage.ranks, []).append(index)
        return tuple(StageWorker(tuple(stages), ranks) for ranks, stages in held.items())

    def layers_of(self, worker: StageWorker) -> list[tuple[int, int]]:
        """The layers [start, end) of each stage of a worker."""
        return [(self.stages[it].start, self.stages[it].end) for it in worker.stages]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks with work, worker by worker."""
        return tuple(rank for worker in self.workers for rank in worker.ranks)

    @cached_property
    def passes(self) -> Passes:
        """What each worker does, with `max_in_flight` applied."""
        made = ORDERS[self.order].make(len(self.stages), self.microbatches, len(self.workers))
        return made if self.max_in_flight is None else capped(made, self.max_in_flight)

    def worker_of(self, rank: int) -> int | None:
        """The index of the worker of a rank; None for one without work."""
        return next((index for index, worker in enumerate(self.workers) if rank in worker.ranks), None)

    def microbatch_sizes(self, batch: int) -> tuple[int, ...]:
        """Samples of each microbatch; the first ones have one more where the batch does not divide.

        Raises:
            BatchError: some replica would have no sample of some microbatch, or the plan is for another
                number of samples.
        """
        if self.batch not in (None, batch):
            raise BatchError(f"batch: must have {self.batch} samples, as the plan says, got {batch}")
        most = max(stage.replicas for stage in self.stages)
        if batch < self.microbatches * most:
            raise BatchError(
                f"batch of {batch} samples: must have at least {self.microbatches * most}, one for each of "
                f"{self.microbatches} microbatches on each of {most} replicas"
            )
        return divided(batch, self.microbatches)


def check_topology(plan: Plan, topology: Topology) -> None:
    """Whether a plan is for these ranks and links (which may be of other bandwidths).

    Raises:
        PlanError: it is not.
    """
    if max(plan.ranks) >= topology.ranks:
        raise PlanError(
            f"plan: rank must be in 0..{topology.ranks - 1} of topology {topology.name}, "
            f"got {max(plan.ranks)}"
        )
    if plan.topology is None or plan.topology is topology:
        return
    theirs, ours = (
        (it.ranks, [(link.src, link.dst) for link in it.links]) for it in (plan.topology, topology)
    )
    if theirs != ours:
        raise PlanError(
            f"plan: is for topology {plan.topology.name}, got {topology.name}, which has other links"
        )


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
