"""Pipeline-parallel training over any topology: profile a model, plan its stages, train it.

    profile = pipeline.profile(model, example, loss_fn)
    plan = pipeline.plan(profile, topologies.load("dgx1"), microbatches=8)
    trainer = pipeline.Trainer(model, plan, loss_fn, optimizer)

Names are loaded on first use: values and planning never import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.actions import Action as Action
    from pipeline.costs import Layer as Layer
    from pipeline.costs import Profile as Profile
    from pipeline.costs import Tie as Tie
    from pipeline.divisible import Divisible as Divisible
    from pipeline.formats import read_plan as read_plan
    from pipeline.formats import read_profile as read_profile
    from pipeline.formats import write_plan as write_plan
    from pipeline.formats import write_profile as write_profile
    from pipeline.network import Network as Network
    from pipeline.planner import plan as plan
    from pipeline.prediction import Prediction as Prediction
    from pipeline.prediction import predict as predict
    from pipeline.profiler import profile as profile
    from pipeline.simulator import simulate as simulate
    from pipeline.stages import Plan as Plan
    from pipeline.stages import Stage as Stage
    from pipeline.timeline import Timeline as Timeline
    from pipeline.tracing import trace as trace
    from pipeline.trainer import Trainer as Trainer

_HOME = {
    "Action": "actions",
    "Divisible": "divisible",
    "Layer": "costs",
    "Network": "network",
    "Plan": "stages",
    "Prediction": "prediction",
    "Profile": "costs",
    "Stage": "stages",
    "Tie": "costs",
    "Timeline": "timeline",
    "Trainer": "trainer",
    "plan": "planner",
    "predict": "prediction",
    "profile": "profiler",
    "read_plan": "formats",
    "read_profile": "formats",
    "simulate": "simulator",
    "trace": "tracing",
    "write_plan": "formats",
    "write_profile": "formats",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pipeline.{_HOME[name]}"), name)
    globals()[name] = value
    return value
