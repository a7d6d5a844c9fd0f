"""What of a model each stage of a divided plan holds, and what crosses between stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.model.traced.means import why_no_mean
from arborcast.pipeline.model.traced.model import Traced
from arborcast.pipeline.model.traced.operator_reader import kind_of, operator_trace
from arborcast.pipeline.operators import OperatorTrace
from arborcast.pipeline.run.divisibility import check_shared_statistics
from arborcast.pipeline.run.intra.divided_operators import AGREEING
from arborcast.pipeline.run.intra.slice_messages import CrossingTensor
from arborcast.pipeline.sharding.graph import Graph, merged
from arborcast.pipeline.sharding.slices import Sliced
from arborcast.pipeline.stages import Plan


@dataclass(frozen=True)
class StageContents:
    """What of a model each stage of a plan holds.

    Attributes:
        trace: the model's operators.
        graphs: of each stage.
        crossing: what crosses behind each stage but the last.
        users: by the first name of a parameter the stages that use it.
        homes: by the first name of anything else the stage that writes it.
        mine: number of this rank's stage; None of one without work.
    """

    trace: OperatorTrace
    graphs: tuple[Graph, ...]
    crossing: tuple[tuple[CrossingTensor, ...], ...]
    users: Mapping[str, tuple[int, ...]]
    homes: Mapping[str, int]
    mine: int | None

    @classmethod
    def of(cls, model: Traced, plan: Plan, rank: int) -> StageContents:
        """As all ranks see it.

        Raises:
            PlanError: the plan cuts what cannot be cut, or has microbatches of whose losses that of the batch
                is not the mean.
        """
        assert plan.batch is not None and plan.topology is not None, "the plan divides operators"
        if plan.microbatches > 1:
            why = why_no_mean(model.training.captured, lambda it: kind_of(it) in AGREEING)
            if why:
                raise PlanError(
                    f"plan: must have 1 microbatch, as the loss of {model.name} is not the mean of those of "
                    f"microbatches, got {plan.microbatches}: {why}"
                )
        trace = operator_trace(model, plan.batch // plan.microbatches, by_layer=plan.depth > 1)
        whole = merged(trace)
        graphs: tuple[Graph, ...] = (whole,)
        crossing: list[tuple[CrossingTensor, ...]] = []
        if len(plan.stages) > 1:
            check_shared_statistics(model, plan)
            sliced = Sliced(whole, plan.topology.ranks)
            graphs = tuple(sliced.stage(it.start, it.end) for it in plan.stages)
            crossing = [tuple(_crossing(model, sliced, it.end)) for it in plan.stages[:-1]]
        names = model.holdings.names
        users: dict[str, tuple[int, ...]] = {}
        for number, graph in enumerate(graphs):
            for operator in graph.operators:
                if operator.given is not None and operator.given.is_parameter:
                    name = names[operator.given.path]
                    users[name] = (*users.get(name, ()), number)
        divided = {names[it.path] for it in trace.given if it.is_parameter}
        ends = [it.end for it in plan.stages]
        homes = {
            name: bisect_right(ends, model.home(name)) if len(ends) > 1 else 0
            for name in names.values()
            if name not in divided
        }
        mine = next((number for number, it in enumerate(plan.stages) if rank in it.ranks), None)
        return cls(trace, graphs, tuple(crossing), users, homes, mine)

    def ties(self, plan: Plan) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Parameters of several stages: the name, and a layer of each of those."""
        for name, stages in self.users.items():
            if len(stages) > 1:
                yield name, tuple(plan.stages[it].start for it in stages)

    def is_written(self, name: str) -> bool:
        """Whether this rank's stage is the one that gives a tensor to checkpoints, by its first name."""
        return self.mine == (self.users[name][0] if name in self.users else self.homes[name])


def _crossing(model: Traced, sliced: Sliced, cut: int) -> Iterator[CrossingTensor]:
    for tensor in sliced.crossing(cut):
        value = model.training.nodes[tensor.value].meta["val"]
        if not isinstance(value, Tensor):
            raise PlanError(f"plan: {tensor.value}, which is several tensors, cannot cross to layer {cut}")
        is_real = value.is_floating_point() or value.is_complex()
        yield CrossingTensor(tensor, value.dtype, is_real and tensor.value in sliced.graph.trained)
