"""A plan in words and as one JSON object: what `synth plan` prints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborcast.synth.cli.console import table

if TYPE_CHECKING:
    from arborcast.pipeline.planning.alternatives import Comparison
    from arborcast.pipeline.planning.prediction import Prediction
    from arborcast.pipeline.stages import Plan
    from arborcast.synth.topology import Topology


def plan_document(found: Comparison, seconds: float, output: Path | None) -> dict[str, Any]:
    """The keys that `--json` prints."""
    plan, profile, predicted = found.plan, found.profile, found.prediction
    return {
        "model": profile.model,
        "costs": profile.source,
        "method": plan.method,
        "batch": found.batch,
        "order": plan.order,
        "microbatches": plan.microbatches,
        "recompute": plan.recompute,
        "stages": [
            {
                "start": stage.start,
                "end": stage.end,
                "layers": [profile.layers[stage.start].name, profile.layers[stage.end - 1].name],
                "ranks": list(stage.ranks),
                "memory_bytes": memory.total,
                "in_flight": in_flight,
            }
            for stage, memory, in_flight in zip(
                plan.stages, predicted.memory, predicted.peak_in_flight, strict=True
            )
        ],
        "memory_limit_bytes": found.memory_bytes,
        **figures(predicted),
        "file": None if output is None else str(output),
        "seconds": seconds,
        "alternatives": {
            name: {"why": str(other)} if isinstance(other, Exception) else _alternative(*other, predicted)
            for name, other in found.alternatives.items()
        },
    }


def figures(predicted: Prediction) -> dict[str, Any]:
    """What is expected of a plan, in the keys of `--json`."""
    return {
        "time_us": predicted.time_us,
        "bound_us": predicted.bound_us,
        "least_us": predicted.least_us,
        "bound_condition": predicted.bound_condition,
        "bubble": predicted.bubble,
        "samples_per_s": predicted.samples_per_s,
    }


def _alternative(plan: Plan, theirs: Prediction, ours: Prediction) -> dict[str, Any]:
    return {
        "stages": [[stage.start, stage.end, list(stage.ranks)] for stage in plan.stages],
        "microbatches": plan.microbatches,
        "order": plan.order,
        "memory_bytes": max(memory.total for memory in theirs.memory),
        **figures(theirs),
        "slower": theirs.time_us / ours.time_us,
    }


def describe_plan(found: Comparison, topology: Topology, document: Mapping[str, Any]) -> list[str]:
    """The plan, what is expected of it, and the others, for people."""
    from arborcast.pipeline.order import ORDERS
    from arborcast.pipeline.planning.memory import readable

    plan, profile = found.plan, found.profile
    limit, most = document["memory_limit_bytes"], document["bound_us"]
    proved = ORDERS[plan.order].is_bounded and plan.max_in_flight is None
    stages = table(
        ("stage", "layers", "ranks", "memory", "in flight"),
        [
            (
                index,
                f"{row['start']}..{row['end'] - 1}  {row['layers'][0]} to {row['layers'][1]}",
                ",".join(map(str, row["ranks"])),
                readable(row["memory_bytes"]),
                row["in_flight"],
            )
            for index, row in enumerate(document["stages"])
        ],
        left=3,
    )
    ours = ("this plan", _time(document["time_us"]), "1.00", f"{document['bubble']:.0%}", _shape(plan))
    others = [
        (name, "-", "-", "-", it["why"])
        if "why" in it
        else (
            name,
            _time(it["time_us"]),
            f"{it['slower']:.2f}",
            f"{it['bubble']:.0%}",
            f"{_shape_of(it['stages'])}, {_counted(it['microbatches'])}, {it['order']}",
        )
        for name, it in document["alternatives"].items()
    ]
    return [
        f"{profile.model} on {topology.name}: {profile.depth} layers, {topology.ranks} ranks; costs: "
        f"{profile.source or 'from a file'}",
        *_describe_device(document["device"], document["device_from"]),
        *stages,
        f"{document['batch']} samples a step in {_counted(plan.microbatches)}, order {plan.order}"
        + (", recomputing forward passes" if plan.recompute else "")
        + ("" if limit is None else f", at most {readable(limit)} on a rank"),
        f"one step: {_time(document['time_us'])} ({document['samples_per_s']:.4g} samples/s), "
        f"ranks idle {document['bubble']:.0%}",
        f"proved: at least {_time(document['least_us'])} on these ranks in any order"
        + (f", at most {_time(most)}" if most is not None and proved else "")
        + (f"; in order pe at most {_time(most)}" if most is not None and not proved else ""),
        "",
        *table(("way", "step", "times ours", "idle", "stages"), [ours, *others], left=1),
        *([f"written to {document['file']}"] if document["file"] else []),
    ]


def _describe_device(device: str | None, said_by: str) -> list[str]:
    what = "measured on this machine" if device is None else f"costed for {device}"
    match said_by:
        case "topology":
            return [f"{what}, which its ranks are (--device says otherwise)"]
        case "default":
            return [f"{what}: the topology does not say what its ranks are, --device does"]
        case _:
            return []


def _shape(plan: Plan) -> str:
    stages = [[stage.start, stage.end, list(stage.ranks)] for stage in plan.stages]
    return f"{_shape_of(stages)}, {_counted(plan.microbatches)}, {plan.order}"


def _shape_of(stages: list[list[Any]]) -> str:
    """Replicas of each stage: `1+2+1` for three stages, the second on two ranks; several on a rank once."""
    groups = list(dict.fromkeys(tuple(ranks) for _, _, ranks in stages))
    counts = "+".join(str(len(ranks)) for ranks in groups)
    each = len(stages) // len(groups)
    shape = f"{counts} ranks" if len(groups) > 1 else f"all on {counts} ranks"
    return shape if each == 1 else f"{shape}, {each} stages each"


def _time(us: float) -> str:
    if us < 1e3:
        return f"{us:.3g} us"
    return f"{us / 1e3:.4g} ms" if us < 1e6 else f"{us / 1e6:.4g} s"


def _counted(microbatches: int) -> str:
    return f"{microbatches} microbatch{'' if microbatches == 1 else 'es'}"
