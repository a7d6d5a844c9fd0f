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
    from arborcast.pipeline.costs.links import Network as Network
    from arborcast.pipeline.costs.measured import profile as profile
    from arborcast.pipeline.costs.profile import Layer as Layer
    from arborcast.pipeline.costs.profile import Profile as Profile
    from arborcast.pipeline.costs.profile import Tie as Tie
    from arborcast.pipeline.model.divisible import Divisible as Divisible
    from arborcast.pipeline.model.traced import trace as trace
    from arborcast.pipeline.order.actions import Action as Action
    from arborcast.pipeline.planning.formats import read_plan as read_plan
    from arborcast.pipeline.planning.formats import read_profile as read_profile
    from arborcast.pipeline.planning.formats import write_plan as write_plan
    from arborcast.pipeline.planning.formats import write_profile as write_profile
    from arborcast.pipeline.planning.plan import Plan as Plan
    from arborcast.pipeline.planning.plan import Stage as Stage
    from arborcast.pipeline.planning.planner import plan as plan
    from arborcast.pipeline.simulation.prediction import Prediction as Prediction
    from arborcast.pipeline.simulation.prediction import predict as predict
    from arborcast.pipeline.simulation.simulator import simulate as simulate
    from arborcast.pipeline.simulation.timeline import Timeline as Timeline
    from arborcast.pipeline.trainer import Trainer as Trainer

_HOMES = {
    "Action": "arborcast.pipeline.order.actions",
    "Divisible": "arborcast.pipeline.model.divisible",
    "Layer": "arborcast.pipeline.costs.profile",
    "Network": "arborcast.pipeline.costs.links",
    "Plan": "arborcast.pipeline.planning.plan",
    "Prediction": "arborcast.pipeline.simulation.prediction",
    "Profile": "arborcast.pipeline.costs.profile",
    "Stage": "arborcast.pipeline.planning.plan",
    "Tie": "arborcast.pipeline.costs.profile",
    "Timeline": "arborcast.pipeline.simulation.timeline",
    "Trainer": "arborcast.pipeline.trainer",
    "plan": "arborcast.pipeline.planning.planner",
    "predict": "arborcast.pipeline.simulation.prediction",
    "profile": "arborcast.pipeline.costs.measured",
    "read_plan": "arborcast.pipeline.planning.formats",
    "read_profile": "arborcast.pipeline.planning.formats",
    "simulate": "arborcast.pipeline.simulation.simulator",
    "trace": "arborcast.pipeline.model.traced",
    "write_plan": "arborcast.pipeline.planning.formats",
    "write_profile": "arborcast.pipeline.planning.formats",
}

__all__ = list(_HOMES)

__getattr__ = loader(__name__, _HOMES)
