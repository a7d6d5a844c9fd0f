"""Pipeline-parallel training over any topology: profile a model, plan its stages, train it.

    profile = pipeline.profile(model, example, loss_fn)
    plan = pipeline.plan(profile, topologies.load("dgx1"), microbatches=8)
    trainer = pipeline.Trainer(model, plan, loss_fn, optimizer)

Values and planning never import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arborcast.lazy import loader

if TYPE_CHECKING:
    from arborcast.pipeline.costs.link_costs import LinkCosts as LinkCosts
    from arborcast.pipeline.costs.measured import profile as profile
    from arborcast.pipeline.costs.saved_bytes import Segment as Segment
    from arborcast.pipeline.model.deferred_init import initialise as initialise
    from arborcast.pipeline.model.deferred_init import on_meta as on_meta
    from arborcast.pipeline.model.divisible import Divisible as Divisible
    from arborcast.pipeline.model.traced import trace as trace
    from arborcast.pipeline.order.actions import Action as Action
    from arborcast.pipeline.planning.formats import read_plan as read_plan
    from arborcast.pipeline.planning.formats import read_profile as read_profile
    from arborcast.pipeline.planning.formats import read_sharded_plan as read_sharded_plan
    from arborcast.pipeline.planning.formats import write_plan as write_plan
    from arborcast.pipeline.planning.formats import write_profile as write_profile
    from arborcast.pipeline.planning.formats import write_sharded_plan as write_sharded_plan
    from arborcast.pipeline.planning.plan_comparison import Comparison as Comparison
    from arborcast.pipeline.planning.plan_comparison import compare as compare
    from arborcast.pipeline.planning.plan_prediction import Prediction as Prediction
    from arborcast.pipeline.planning.plan_prediction import predict as predict
    from arborcast.pipeline.planning.planner import plan as plan
    from arborcast.pipeline.planning.sharded_planning import shard_in_stages as shard_in_stages
    from arborcast.pipeline.profiles import Layer as Layer
    from arborcast.pipeline.profiles import Profile as Profile
    from arborcast.pipeline.profiles import Tie as Tie
    from arborcast.pipeline.run.measured_links import measure_links as measure_links
    from arborcast.pipeline.sharding.mesh_choice import shard_model as shard_model
    from arborcast.pipeline.simulation.pass_simulator import simulate as simulate
    from arborcast.pipeline.simulation.timeline import Timeline as Timeline
    from arborcast.pipeline.stages import Plan as Plan
    from arborcast.pipeline.stages import Stage as Stage
    from arborcast.pipeline.trainer import Trainer as Trainer

_HOMES = {
    "Action": "arborcast.pipeline.order.actions",
    "Comparison": "arborcast.pipeline.planning.plan_comparison",
    "Divisible": "arborcast.pipeline.model.divisible",
    "Layer": "arborcast.pipeline.profiles",
    "LinkCosts": "arborcast.pipeline.costs.link_costs",
    "Plan": "arborcast.pipeline.stages",
    "Prediction": "arborcast.pipeline.planning.plan_prediction",
    "Profile": "arborcast.pipeline.profiles",
    "Segment": "arborcast.pipeline.costs.saved_bytes",
    "Stage": "arborcast.pipeline.stages",
    "Tie": "arborcast.pipeline.profiles",
    "Timeline": "arborcast.pipeline.simulation.timeline",
    "Trainer": "arborcast.pipeline.trainer",
    "compare": "arborcast.pipeline.planning.plan_comparison",
    "initialise": "arborcast.pipeline.model.deferred_init",
    "measure_links": "arborcast.pipeline.run.measured_links",
    "on_meta": "arborcast.pipeline.model.deferred_init",
    "plan": "arborcast.pipeline.planning.planner",
    "predict": "arborcast.pipeline.planning.plan_prediction",
    "profile": "arborcast.pipeline.costs.measured",
    "read_plan": "arborcast.pipeline.planning.formats",
    "read_profile": "arborcast.pipeline.planning.formats",
    "read_sharded_plan": "arborcast.pipeline.planning.formats",
    "shard_in_stages": "arborcast.pipeline.planning.sharded_planning",
    "shard_model": "arborcast.pipeline.sharding.mesh_choice",
    "simulate": "arborcast.pipeline.simulation.pass_simulator",
    "trace": "arborcast.pipeline.model.traced",
    "write_plan": "arborcast.pipeline.planning.formats",
    "write_profile": "arborcast.pipeline.planning.formats",
    "write_sharded_plan": "arborcast.pipeline.planning.formats",
}

__all__ = list(_HOMES)

__getattr__ = loader(__name__, _HOMES)
