"""Which plan is fastest: for every number of stages and microbatches a partition, the best ones simulated.

The dynamic program minimises the busiest resource, not the time of a step; so for each number of stages its
partition is estimated in closed form, and what looks best is predicted by the simulator.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, product

from pipeline.costs import Profile
from pipeline.errors import PlanError
from pipeline.network import Network
from pipeline.planning.device_order import device_order, transposed
from pipeline.planning.estimate import estimates_us
from pipeline.planning.memory import check_memory
from pipeline.planning.prm import Partition, Question, partitions, roomiest
from pipeline.planning.tables import DeviceTables, LayerTables
from pipeline.stages import Plan


@dataclass(frozen=True, slots=True)
class Choices:
    """What a search may choose from.

    Attributes:
        batch: samples.
        microbatches: numbers of them, ascending, at most the batch.
        orders: of `ORDERS`; of equally fast plans the earlier order wins.
        recompute: with, without, or both.
        stages: numbers of stages, ascending.
        max_in_flight: most microbatches in flight, or None.
        limits: bytes of memory of each rank; None for no limit.
        keep_ties_together: whether layers that share a parameter must be in one stage.
    """

    batch: int
    microbatches: tuple[int, ...]
    orders: tuple[str, ...]
    recompute: tuple[bool, ...]
    stages: tuple[int, ...]
    max_in_flight: int | None = None
    limits: tuple[int, ...] | None = None
    keep_ties_together: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """What the dynamic program is run for once: a device order, by number, and a question."""

    devices: int
    question: Question


def search(profile: Profile, network: Network, choices: Choices, *, simulated: int = 8) -> Plan:
    """The plan with the least predicted time among the most promising.

    The space: for each device order, number of microbatches, order and choice of recomputation, and each
    number of stages, the partition of the dynamic program. It is run for the fewest, the middle and the
    most microbatches; their partitions say by a closed form how promising the other numbers are, and groups
    are solved in that order until the best `simulated` different plans are known, which the simulator then
    compares. What the estimate ranks lower is not simulated.

    Raises:
        PlanError: nothing fits into memory (by how much and on which stage, in the closest plan), or no
            plan connects its ranks.
    """
    from pipeline.prediction import predict

    plans = list(_most_promising(profile, network, choices, simulated))
    if not plans:
        raise _refusal(profile, network, choices)
    times = {
        index: predict(plan, profile, network, batch=choices.batch).time_us
        for index, plan in enumerate(plans)
    }
    return plans[
        min(
            times,
            key=lambda it: (times[it], choices.orders.index(plans[it].order), plans[it].microbatches, it),
        )
    ]


def device_orders(network: Network) -> tuple[tuple[int, ...], ...]:
    """In which orders stages may lie on ranks: along the hosts, and across them at every level of hosts.

    The first lets pipelines cross hosts and replicas stay inside, the others the reverse.
    """
    along = device_order(network.topology)
    return tuple(dict.fromkeys((along, *transposed(along, network))))


def _most_promising(profile: Profile, network: Network, choices: Choices, wanted: int) -> Iterator[Plan]:
    """Different plans, by their estimates."""
    from pipeline.order import order_of

    space = _Space(profile, network, choices)
    seen = set()
    for plan in space.plans():
        if len(seen) == wanted:
            return
        # One stage is the same on every device order, and so is every order of one microbatch.
        ranks = tuple(sorted(plan.ranks)) if len(plan.stages) == 1 else plan.stages
        key = (ranks, plan.recompute, plan.microbatches, order_of(plan))
        if key not in seen:
            seen.add(key)
            yield plan


class _Space:
    """The groups of a search, of which those that look best are solved first."""

    def __init__(self, profile: Profile, network: Network, choices: Choices) -> None:
        self.choices = choices
        self.profile = profile
        self.network = network
        self.layers = LayerTables(profile, choices.keep_ties_together)
        self.devices = [DeviceTables(network, order) for order in device_orders(network)]
        self.known: dict[Group, dict[int, Partition]] = {}
        self.queue: list[tuple[float, int, Group, Partition | None]] = []
        self.number = count()

    def plans(self) -> Iterator[Plan]:
        """All plans, the least estimate first as far as it is known."""
        self._begin()
        opened: set[Group] = set()
        while self.queue:
            _, _, group, partition = heapq.heappop(self.queue)
            if partition is not None:
                yield self._plan(group.question, partition)
            elif group not in opened:
                opened.add(group)
                self._open(group)

    def _begin(self) -> None:
        """Queue every group with the least estimate of the partitions that are known without limits."""
        choices = self.choices
        counts = choices.microbatches
        anchors = sorted({counts[0], counts[len(counts) // 2], counts[-1]})
        for devices, recompute in product(range(len(self.devices)), choices.recompute):
            known = {
                (partition.cuts, partition.places): partition
                for anchor in anchors
                for partition in self._solved(
                    Group(devices, Question(choices.batch, anchor, choices.orders[0], recompute))
                )
            }
            for order in choices.orders:
                question = Question(
                    choices.batch, counts[0], order, recompute, choices.max_in_flight, choices.limits
                )
                least = [math.inf] * len(counts)
                for partition in known.values():
                    times = estimates_us(self.layers, partition, question, counts)
                    least = [min(pair) for pair in zip(least, times, strict=True)]
                for microbatches, time in zip(counts, least, strict=True):
                    self._push(time, Group(devices, _with(question, microbatches)), None)

    def _open(self, group: Group) -> None:
        """Queue the plans of a group."""
        for partition in self._solved(group):
            (time,) = estimates_us(self.layers, partition, group.question, [group.question.microbatches])
            self._push(time, group, partition)

    def _solved(self, group: Group) -> list[Partition]:
        question = group.question
        if question.limits is None:  # then the order and its cap do not matter
            group = Group(
                group.devices, Question(question.batch, question.microbatches, "", question.recompute)
            )
        if group not in self.known:
            stages = self.choices.stages
            self.known[group] = {
                number: partition
                for number, partition in partitions(
                    self.layers, self.devices[group.devices], group.question, stages[-1]
                ).items()
                if number in stages
            }
        return list(self.known[group].values())

    def _push(self, time: float, group: Group, partition: Partition | None) -> None:
        heapq.heappush(self.queue, (time, next(self.number), group, partition))

    def _plan(self, question: Question, partition: Partition) -> Plan:
        return plan_of(question, partition, self.network, self.profile)


def plan_of(question: Question, partition: Partition, network: Network, profile: Profile) -> Plan:
    """A partition as a plan."""
    return Plan(
        partition.stages,
        question.microbatches,
        order=question.order,
        recompute=question.recompute,
        max_in_flight=question.max_in_flight,
        topology=network.topology,
        model=profile.model,
        method="spp",
    )


def _with(question: Question, microbatches: int) -> Question:
    return replace(question, microbatches=microbatches)


def _refusal(profile: Profile, network: Network, choices: Choices) -> PlanError:
    """What is missing in the plan that comes closest to the memory that there is."""
    assert choices.limits is not None  # without limits, a pipeline without replicas is always possible
    layers = LayerTables(profile, choices.keep_ties_together)
    devices = DeviceTables(network, device_order(network.topology))
    closest: tuple[float, Plan] | None = None
    for microbatches, order, recompute in product(choices.microbatches, choices.orders, choices.recompute):
        question = Question(
            choices.batch, microbatches, order, recompute, choices.max_in_flight, choices.limits
        )
        partition = roomiest(layers, devices, question, choices.stages)
        if partition is not None and (closest is None or partition.value_us < closest[0]):
            closest = partition.value_us, plan_of(question, partition, network, profile)
    assert closest is not None
    plan = closest[1]
    try:
        check_memory(plan, profile, dict(enumerate(choices.limits)), batch=choices.batch)
    except PlanError as error:
        how = f"{len(plan.stages)} stages, {plan.microbatches} microbatches, order {plan.order}"
        return PlanError(f"no plan fits into memory; the closest one ({how}) does not: {error}")
    raise AssertionError(f"{plan} fits, but was not found")
