"""The entry to planning: the best pipeline for a profile on a fabric, by SPP's device order and program."""

from __future__ import annotations

from math import inf
from typing import TypedDict

from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.planning.activation_search import ActivationOptions
from arborcast.pipeline.planning.memory_need import Limit, rank_limits
from arborcast.pipeline.planning.stage_search import SearchSpace, search
from arborcast.pipeline.planning.tables import LayerTables
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.stages import Plan
from arborcast.synth.topology import Topology


class PlanWishes(TypedDict, total=False):
    """What `plan` may be told beyond the profile and the fabric, as keyword arguments."""

    batch: int | None
    microbatches: int | None
    order: str | None
    recompute: bool | None
    offload_gbps: float | None
    memory_bytes: Limit | None
    max_in_flight: int | None
    keep_ties_together: bool
    stages: int | None
    network: LinkCosts | None
    simulated: int


def plan(
    profile: Profile,
    fabric: Topology,
    *,
    batch: int | None = None,
    microbatches: int | None = None,
    order: str | None = None,
    recompute: bool | None = None,
    offload_gbps: float | None = None,
    memory_bytes: Limit | None = None,
    max_in_flight: int | None = None,
    keep_ties_together: bool = False,
    stages: int | None = None,
    network: LinkCosts | None = None,
    simulated: int = 16,
) -> Plan:
    """The plan with the least predicted time that fits into memory.

    It comes from SPP's dynamic program over layers, stages, replicas and two or more device orders (along
    hosts and across them), for every number of stages and microbatches: so pipelines without replicas, pure
    data parallelism (one stage) and everything between compete by their costs alone. A closed form
    ranks the plans, and the simulator compares the `simulated` most promising ones as `predict` does, with
    the schedules of their allreduces, what becomes of them with fewer replicas of one stage, and in orders
    that split backward passes or lay several stages on a rank.

    Args:
        profile: of the model.
        fabric: whose ranks the stages are put on; not all need be used.
        batch: samples of a step; None for those of the profile.
        microbatches: None for the best of the divisors of the batch and the powers of two up to it.
        order: one of `ORDERS`, or None for the best.
        recompute: whether each stage recomputes all its results, or none; None for those of the layers for
            which it takes least time under the limit. Without a limit of memory, none is fastest. In orders
            with several stages on a rank it is all or none; where passes are split, none.
        offload_gbps: GB/s between each rank and host memory, each way, by which results of layers may be
            offloaded where memory is limited and not all are recomputed; None for no offload.
        memory_bytes: of every rank, or by rank, of which the reserve (`devices.RESERVE`) stays free; None for
            no limit.
        max_in_flight: most microbatches in flight on any rank, or None.
        keep_ties_together: whether layers that share a parameter must be in one stage.
        stages: None for the best number; in orders that lay several on each rank, so many groups of ranks.
        network: with costs of messages beyond the links; None for a `LinkCosts` of `fabric` without.
        simulated: how many plans to compare by simulation at most, at least 1.

    Raises:
        PlanError: a value is out of range; there are fewer layers between which may be cut, or fewer ranks,
            than `stages`; a rank does not reach another; or nothing fits into memory (by how much and on
            which stage, in the plan that comes closest).
        BatchError: the batch does not split into so many microbatches.

    Source: SPP (arXiv 2204.10562).

    Examples:
        >>> profile = pipeline.profile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(8, 8))
        >>> plan = pipeline.plan(profile, topologies.load("full:2"), stages=2, microbatches=4, order="1f1b")
        >>> [(stage.start, stage.end) for stage in plan.stages]
        [(0, 1), (1, 2)]
    """
    samples = profile.samples if batch is None else batch
    if simulated < 1:
        raise PlanError(f"simulated: must be at least 1, got {simulated}")
    if order is not None and order not in ORDERS:
        raise PlanError(f"order: must be one of {', '.join(ORDERS)}, got {order}")
    if max_in_flight is not None and max_in_flight < 1:
        raise PlanError(f"max_in_flight: must be at least 1, got {max_in_flight}")
    _check_order(order, max_in_flight, recompute)
    _check_offload(order, recompute, offload_gbps, memory_bytes)
    if network is not None and network.topology != fabric:
        raise PlanError(
            f"network: must be of the fabric {fabric.name}, got one of topology {network.topology.name}"
        )
    ranks = tuple(range(fabric.ranks))
    limits = None if memory_bytes is None else tuple(rank_limits(memory_bytes, ranks).values())
    # Orders with several stages on a rank are made from plans that keep or recompute all, if from those only.
    by_layer = limits is not None and (order is None or ORDERS[order].in_flight is not None)
    menu: ActivationOptions | None = None
    if by_layer and (recompute is None or offload_gbps is not None):
        menu = ActivationOptions(recompute is None, offload_gbps)
    ways = (False, True) if limits is not None and menu is None else (False,)
    choices = SearchSpace(
        batch=samples,
        microbatches=_microbatches(samples, microbatches),
        orders=tuple(ORDERS) if order is None else (order,),
        recompute=(recompute,) if recompute is not None else ways,
        stages=_stages(profile, fabric, stages, keep_ties_together),
        max_in_flight=max_in_flight,
        limits=limits,
        keep_ties_together=keep_ties_together,
        menu=menu,
    )
    return search(profile, network or LinkCosts(fabric), choices, simulated=simulated)


def _microbatches(batch: int, wanted: int | None) -> tuple[int, ...]:
    if batch < 1:
        raise BatchError(f"batch: must have at least 1 sample, got {batch}")
    if wanted is None:
        return tuple(it for it in range(1, batch + 1) if batch % it == 0 or not it & (it - 1))
    if wanted < 1:
        raise PlanError(f"microbatches: must be at least 1, got {wanted}")
    if wanted > batch:
        raise BatchError(
            f"batch of {batch} samples: must have at least {wanted}, one for each of {wanted} microbatches"
        )
    return (wanted,)


def _check_order(order: str | None, max_in_flight: int | None, recompute: bool | None) -> None:
    """Refuse what an order cannot do; where none is named, others can."""
    if order is None or ORDERS[order].in_flight is not None:
        return
    if max_in_flight is not None:
        raise PlanError(f"max_in_flight: must be None for order {order}, got {max_in_flight}")
    if recompute and ORDERS[order].splits:
        raise PlanError(
            f"recompute: must be off for order {order}, which needs the results of forward passes"
        )


def _check_offload(
    order: str | None, recompute: bool | None, offload_gbps: float | None, memory_bytes: Limit | None
) -> None:
    """Refuse offload at no rate, or where it cannot be."""
    if offload_gbps is None:
        return
    if not 0 < offload_gbps < inf:
        raise PlanError(f"offload: must be at a finite, positive rate, got {offload_gbps:g} GB/s")
    if memory_bytes is None:
        raise PlanError(f"offload: must be off without a limit of memory, got {offload_gbps:g} GB/s")
    if recompute:
        raise PlanError(f"offload: must be off where all is recomputed, got {offload_gbps:g} GB/s")
    if order is not None and ORDERS[order].in_flight is None:
        raise PlanError(
            f"offload: must be off for order {order}, which splits backward passes or lays several stages on "
            f"a rank, got {offload_gbps:g} GB/s"
        )


def _stages(
    profile: Profile, fabric: Topology, wanted: int | None, keep_ties_together: bool
) -> tuple[int, ...]:
    cuts = len(LayerTables(profile, keep_ties_together).cuts)
    if wanted is None:
        return tuple(range(1, min(cuts + 1, fabric.ranks) + 1))
    if wanted < 1:
        raise PlanError(f"stages: must be at least 1, got {wanted}")
    if wanted > cuts + 1:
        ties = " that keep ties together" if keep_ties_together else ""
        raise PlanError(
            f"stages: profile {profile.model} has {cuts} cut points{ties}, so at most {cuts + 1} stages, "
            f"got {wanted}"
        )
    if wanted > fabric.ranks:
        raise PlanError(f"stages: must be at most the {fabric.ranks} ranks of {fabric.name}, got {wanted}")
    return (wanted,)
