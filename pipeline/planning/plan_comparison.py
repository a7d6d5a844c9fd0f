"""One call from a model and a fabric to every way of training it there, each a plan to save and to run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import PlanError, ProfileError
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.planning.alternatives import METHODS, alternatives
from arborcast.pipeline.planning.costing import Costed, costed
from arborcast.pipeline.planning.least_collectives import LeastTimes
from arborcast.pipeline.planning.memory_need import Limit
from arborcast.pipeline.planning.plan_prediction import Prediction, predict
from arborcast.pipeline.planning.planner import PlanWishes, plan
from arborcast.pipeline.planning.planning_problem import PlanningProblem
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.stages import Plan
from arborcast.synth.topology import Topology
from arborcast.topologies import load_machine
from arborcast.topologies.machine import Machine

if TYPE_CHECKING:
    from torch import nn

    from arborcast.pipeline.costs.layer_pass import Example, LossFunction, OptimizerFactory
    from arborcast.pipeline.model.layered import Layered

OURS = "arborcast"
"""The method that is `pipeline.plan`."""

EVERY = (OURS, *METHODS)
"""All methods, in the order of a comparison."""


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """What one method gives.

    Attributes:
        method: one of `EVERY`.
        plan: what it would do; None where nothing of it can be run.
        prediction: of a step of the plan, its allreduces by the schedules that will run.
        why_not: in words why there is no plan; "" where there is one.
        remark: how the plan differs from what was published; "" where it does not.
        collectives_us: that the collectives of a step take at least, by proof (`least_collectives`); None
            where that was not asked for.
    """

    method: str
    plan: Plan | None
    prediction: Prediction | None
    why_not: str = ""
    remark: str = ""
    collectives_us: float | None = None

    @property
    def time_us(self) -> float | None:
        """Of a batch; None where nothing is known of it."""
        return None if self.prediction is None else self.prediction.time_us

    @property
    def memory_bytes(self) -> int | None:
        """That the fullest rank needs."""
        return None if self.prediction is None else self.prediction.memory_bytes

    def runnable(self) -> tuple[Plan, Prediction]:
        """The plan and what is predicted of it.

        Raises:
            PlanError: there is none (why).
        """
        if self.plan is None or self.prediction is None:
            raise PlanError(f"method {self.method}: {self.why_not}")
        return self.plan, self.prediction


@dataclass(frozen=True)
class Comparison:
    """The ways to train a model on a fabric, from the same costs, links and memory.

    Attributes:
        costed: the model's profile, and for what it was costed.
        topology: the fabric.
        batch: samples of a step.
        memory_bytes: the limit that all plans keep to; None for none.
        alternatives: what each method gives, ours first.
        divided: where that was asked for, plans whose operators are divided as well: both levels, one stage,
            and fixed layouts of one stage.
        best: the fastest plan that keeps to all that was asked for; of equally fast ones the first.
    """

    costed: Costed
    topology: Topology
    batch: int
    memory_bytes: Limit | None
    alternatives: tuple[PlanCandidate, ...]
    best: PlanCandidate
    divided: tuple[PlanCandidate, ...] = ()

    @property
    def profile(self) -> Profile:
        """Of the model."""
        return self.costed.profile

    @property
    def plan(self) -> Plan:
        """The best one."""
        return self.best.runnable()[0]

    @property
    def prediction(self) -> Prediction:
        """Of its step."""
        return self.best.runnable()[1]

    def __getitem__(self, method: str) -> PlanCandidate:
        """What a method gives.

        Raises:
            PlanError: it was not compared.
        """
        for it in self.alternatives:
            if it.method == method:
                return it
        names = ", ".join(it.method for it in self.alternatives)
        raise PlanError(f"method: must be one of {names}, got {method}")


def compare(
    model: Profile | str | nn.Module | Layered,
    fabric: Topology | Machine | str,
    example: Example | None = None,
    loss_fn: LossFunction | None = None,
    *,
    device: str | None = None,
    optimizer: OptimizerFactory | None = None,
    name: str | None = None,
    methods: Iterable[str] = EVERY,
    divided: bool = False,
    **wishes: Unpack[PlanWishes],
) -> Comparison:
    """Plan a model on a fabric by every method, with the same costs, links and memory.

        found = pipeline.compare("bert-large", "dgx1")
        pipeline.write_plan(found["pipedream"].plan, "pipedream.json")

    The last arguments are those of `plan`; batch, microbatches and memory hold for all methods, the others
    for ours. Unless `microbatches` is given, the other methods may choose between those of our plan, one,
    one for each rank, four for each rank, and those of one sample on each rank. Plans are compared by
    `predict`, so with the schedules that will run.

    Args:
        model: a profile or its file, a network of `pipeline.zoo` by name, or a module.
        fabric: a topology, or what `topologies.load` takes.
        example: of a module: its inputs, or (inputs, targets) with `loss_fn`.
        loss_fn: of the model's output and the targets.
        device: that a model is costed for, of `costs.devices`; "here" measures a module on this machine. By
            default what the ranks of the fabric are; where that is unknown a named network is costed for a
            V100, and a module is measured.
        optimizer: makes the optimizer of a list of parameters, for the bytes of its state.
        name: of the profile of a module.
        methods: of `EVERY`.
        divided: compare plans whose operators are divided, too (`shard_in_stages`), with as many microbatches
            as the best plan, and say of all plans what their collectives take at least.
        **wishes: as in `plan`. Memory that is not given is the device's, where the model is costed for one.

    Raises:
        PlanError: as `plan`, where ours is asked for; no method has a plan (why the first has none), or
            there is no such method.
        ProfileError: the model cannot be costed, or is a profile, which has no operators to divide.
        BatchError: the batch does not split.

    Examples:
        >>> profile = pipeline.profile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(8, 8))
        >>> found = pipeline.compare(profile, "full:2", methods=["data-parallel", "gpipe"])
        >>> [way.method for way in found.alternatives]
        ['data-parallel', 'gpipe']
    """
    names = _named(methods)
    machine = _machine(fabric)
    costs = costed(model, machine, example, loss_fn, device=device, optimizer=optimizer, name=name)
    asked = wishes.get("batch")
    batch = wishes["batch"] = costs.batch if asked is None else asked
    network = wishes["network"] = wishes.get("network") or LinkCosts(machine.topology)
    if costs.device is not None:
        wishes.setdefault("memory_bytes", costs.device.memory_bytes)
    problem = PlanningProblem(costs.profile, network, batch, 1, wishes.get("memory_bytes"))
    found = _candidates(names, problem, wishes)
    best = _best(found, costs.profile, wishes)
    if best.plan is None:
        raise PlanError(f"method {best.method}: {best.why_not}")
    comparison = Comparison(costs, machine.topology, batch, problem.memory_bytes, found, best)
    if not divided:
        return comparison
    return _with_divided(comparison, model, example, loss_fn, optimizer, wishes.get("stages"))


def _named(methods: Iterable[str]) -> tuple[str, ...]:
    """Each method once.

    Raises:
        PlanError: there is none, or one that is not known.
    """
    names = tuple(dict.fromkeys(methods))
    if not names:
        raise PlanError(f"methods: must be some of {', '.join(EVERY)}, got none")
    for it in names:
        if it not in EVERY:
            raise PlanError(f"method: must be one of {', '.join(EVERY)}, got {it}")
    return names


def _candidates(
    names: Iterable[str], problem: PlanningProblem, wishes: PlanWishes
) -> tuple[PlanCandidate, ...]:
    """What each of these methods gives, ours first."""
    batch, ranks, microbatches = problem.batch, len(problem.ranks), wishes.get("microbatches")
    counts = {1, min(batch, ranks), min(batch, 4 * ranks), max(1, batch // ranks)}
    made: dict[str, Plan | PlanError] = {}
    if OURS in names:
        made[OURS] = ours = plan(problem.profile, problem.network.topology, **wishes)
        counts.add(ours.microbatches)
    asked = sorted(counts) if microbatches is None else [microbatches]
    problems = [replace(problem, microbatches=it) for it in asked]
    made |= alternatives(problems, [it for it in METHODS if it in names])
    found = []
    for method, given in made.items():
        remark = METHODS[method].remark if method in METHODS else ""
        if isinstance(given, Plan):
            predicted = predict(given, problem.profile, problem.network, batch=batch)
            found.append(PlanCandidate(method, given, predicted, remark=remark))
        else:
            found.append(PlanCandidate(method, None, None, str(given)))
    return tuple(found)


def _best(found: Sequence[PlanCandidate], profile: Profile, wishes: PlanWishes) -> PlanCandidate:
    """The fastest that keeps to all that was asked for, or of those that do not; the first of no plans."""
    there = [it for it in found if it.plan]
    keep = [it for it in there if it.plan and (it.method == OURS or _keeps(it.plan, profile, wishes))]
    return min(keep or there or found[:1], key=lambda it: it.time_us or 0.0)


def _with_divided(
    comparison: Comparison,
    model: Profile | str | nn.Module | Layered,
    example: Example | None,
    loss_fn: LossFunction | None,
    optimizer: OptimizerFactory | None,
    stages: int | None,
) -> Comparison:
    """With what both levels, one stage and fixed layouts give, and what collectives take at least.

    Ways whose stages are replicas are left out.
    """
    costs, topology, memory_bytes = comparison.costed, comparison.topology, comparison.memory_bytes
    if costs.device is None:
        what = "a profile" if costs.said_by == "profile" else "a model that is measured"
        raise ProfileError(f"model: must be one whose operators are costed for a device, got {what}")
    from arborcast.pipeline import zoo
    from arborcast.pipeline.model.traced import trace
    from arborcast.pipeline.planning.sharded_planning import shard_in_stages
    from arborcast.pipeline.sharding.layouts import LAYOUTS

    if isinstance(model, str):
        from arborcast.pipeline.zoo.catalog import CATALOG

        optimizer = optimizer or CATALOG[model].optimizer
        model, example, loss_fn = zoo.build(model)
    assert not isinstance(model, Profile), "it has no device"
    found = shard_in_stages(
        trace(model, example, loss_fn, evaluation=False),  # type: ignore[arg-type]
        topology,
        costs.device,
        batch=comparison.batch,
        microbatches=comparison.plan.microbatches,
        memory_bytes=memory_bytes if isinstance(memory_bytes, int) else None,
        stages=stages,
        optimizer=optimizer,
        name=costs.profile.model,
    )
    least, ways = LeastTimes(topology), []
    for name, way in found.ways.items():
        if way.scheduled is None:
            ways.append(PlanCandidate(name, None, None, way.why_not))
        elif way.is_divided:
            least_us = least.of_divided(way.scheduled, found.sliced)
            plan, remark = found.plan_by(name), "one stage of a fixed layout" if name in LAYOUTS else ""
            ways.append(PlanCandidate(name, plan, way.prediction, remark=remark, collectives_us=least_us))

    def timed(it: PlanCandidate) -> PlanCandidate:
        if it.plan is None:
            return it
        return replace(it, collectives_us=least.of_replicas(it.plan, costs.profile))

    alternatives, best = tuple(map(timed, comparison.alternatives)), timed(comparison.best)
    return replace(comparison, alternatives=alternatives, best=best, divided=tuple(ways))


def _machine(fabric: Topology | Machine | str) -> Machine:
    if isinstance(fabric, str):
        return load_machine(fabric)
    return Machine.of(fabric) if isinstance(fabric, Topology) else fabric


def _keeps(plan: Plan, profile: Profile, wishes: PlanWishes) -> bool:
    """Whether the plan of another method is as was asked of ours."""
    order, recompute = wishes.get("order"), wishes.get("recompute")
    stages, most = wishes.get("stages"), wishes.get("max_in_flight")
    if most is not None and plan.max_in_flight is None:
        in_flight = ORDERS[plan.order].in_flight
        assert in_flight is not None, "so are all orders of other methods"
        if in_flight(len(plan.stages) - 1, plan.microbatches) > most:
            return False
    return (
        order in (None, plan.order)
        and recompute in (None, plan.recompute)
        and stages in (None, len(plan.workers))
        and not (wishes.get("keep_ties_together") and profile.ties_across(plan.cuts))
    )
