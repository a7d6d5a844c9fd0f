"""Where in a plan a rank is, and which parts of a microbatch it exchanges with whom."""

from __future__ import annotations

from dataclasses import dataclass, replace

from arborcast.pipeline.run.prepared_layers import column
from arborcast.pipeline.run.stage_messages import PeerSlice
from arborcast.pipeline.stages import Plan, overlaps, shares


@dataclass(frozen=True)
class Assignment:
    """The place of a rank in one of its stages.

    Attributes:
        plan: whose stages are meant.
        stage: index of the stage.
        replica: index of the rank in it.
    """

    plan: Plan
    stage: int
    replica: int

    @classmethod
    def all_of(cls, plan: Plan, rank: int) -> tuple[Assignment, ...]:
        """The places of a rank of the job, stage by stage; none of one without work."""
        return tuple(
            cls(plan, index, stage.ranks.index(rank))
            for index, stage in enumerate(plan.stages)
            if rank in stage.ranks
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that do the same as this one."""
        return self.plan.stages[self.stage].ranks

    @property
    def replicas(self) -> int:
        """How many they are."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether the stage takes the inputs of the model."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage computes losses."""
        return self.stage == len(self.plan.stages) - 1

    @property
    def before_is_here(self) -> bool:
        """Whether this rank has the stage before too."""
        return not self.is_first and self.plan.stages[self.stage - 1].ranks == self.ranks

    @property
    def behind_is_here(self) -> bool:
        """Likewise the stage behind."""
        return not self.is_last and self.plan.stages[self.stage + 1].ranks == self.ranks

    def share(self, samples: int) -> tuple[int, int]:
        """The samples [start, stop) of a microbatch that this rank works on."""
        return shares(samples, self.replicas)[self.replica]

    def count(self, samples: int) -> int:
        """How many these are."""
        start, stop = self.share(samples)
        return stop - start

    def slices(self, samples: int, *, behind: bool) -> tuple[PeerSlice, ...]:
        """What it exchanges with the stage behind, or before, for a microbatch; in the order of samples."""
        ranks = self.plan.stages[self.stage + (1 if behind else -1)].ranks
        origin = self.share(samples)[0]
        # Both sides of a boundary divide the samples; an overlap is the same whoever sends it.
        return tuple(
            PeerSlice(ranks[it.receiver], it.start - origin, it.stop - origin)
            for it in overlaps(samples, self.replicas, len(ranks))
            if it.sender == self.replica
        )


@dataclass(frozen=True)
class RankAssignment:
    """Where in a plan a rank of the job is.

    Attributes:
        rank: of the job.
        plan: with all ranks.
        column: with those alone that lie where this one does along "tensor".
        tensor_ranks: how many share each replica of a stage.
        assignments: its stages.
        is_divided: whether the ranks of a stage are a mesh, each of which is given all samples.
    """

    rank: int
    plan: Plan
    column: Plan
    tensor_ranks: int
    assignments: tuple[Assignment, ...]
    is_divided: bool = False

    @classmethod
    def of(cls, plan: Plan, rank: int, tensor_ranks: int = 1) -> RankAssignment:
        """That of a rank.

        Raises:
            PlanError: the ranks of a stage do not divide.
        """
        own = column(plan, tensor_ranks, rank)
        return cls(rank, plan, own, tensor_ranks, Assignment.all_of(own, rank))

    @classmethod
    def in_mesh(cls, plan: Plan, rank: int) -> RankAssignment:
        """That of a rank where the ranks of each stage are its mesh, and all share one replica."""
        own = replace(
            plan,
            stages=tuple(
                replace(it, ranks=(rank if rank in it.ranks else it.ranks[0],)) for it in plan.stages
            ),
        )
        shared = next((it.replicas for it in plan.stages if rank in it.ranks), 1)
        return cls(rank, plan, own, shared, Assignment.all_of(own, rank), is_divided=True)

    @property
    def name(self) -> str:
        """As errors call the rank."""
        held = " and ".join(str(it.stage) for it in self.assignments)
        return f"rank {self.rank}" + (f" (stage {held})" if held else "")

    @property
    def sharers(self) -> tuple[int, ...]:
        """The ranks that hold what this one holds, or share it; itself without work."""
        mine = self.plan.worker_of(self.rank)
        return (self.rank,) if mine is None else self.plan.workers[mine].ranks

    @property
    def is_counted(self) -> bool:
        """Whether losses of this rank count, and not those of another one with the same samples."""
        return self.sharers.index(self.rank) % self.tensor_ranks == 0

    @property
    def ends(self) -> tuple[int, ...]:
        """The ranks with the first stage or the last one; all with work where every stage takes inputs."""
        if self.is_divided:
            return tuple(sorted(self.plan.ranks))
        return tuple(sorted({*self.plan.stages[0].ranks, *self.plan.stages[-1].ranks}))

    def needs(self, returns_loss: bool) -> tuple[bool, bool]:
        """Whether this rank must be given the inputs of batches, and the targets; both for a model's loss."""
        if self.is_divided:
            return bool(self.assignments), bool(self.assignments)
        first, last = (any(getattr(it, end) for it in self.assignments) for end in ("is_first", "is_last"))
        return first or (last and returns_loss), last or (first and returns_loss)
