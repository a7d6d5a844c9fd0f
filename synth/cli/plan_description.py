"""A plan in words and as one JSON object: what `synth plan` prints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborcast.synth.cli.console import table
from arborcast.synth.formats.documents import picked
from arborcast.synth.formats.words import counted

if TYPE_CHECKING:
    from arborcast.pipeline.planning.plan_comparison import Comparison, PlanCandidate
    from arborcast.pipeline.planning.plan_prediction import Prediction
    from arborcast.pipeline.stages import Plan


def plan_document(found: Comparison, seconds: float, output: Path | None) -> dict[str, Any]:
    """The keys that `--json` prints."""
    from arborcast.pipeline.planning.formats import segments_to_document

    plan, profile, predicted = found.plan, found.profile, found.prediction
    return {
        "model": profile.model,
        "costs": profile.source,
        "device": None if found.costed.device is None else found.costed.device.name,
        "device_from": found.costed.said_by,
        "chosen": found.best.method,
        "batch": found.batch,
        **picked(plan, "method", "order", "microbatches", "recompute", "offload_gbps"),
        "stages": [
            {
                **picked(stage, "start", "end", "ranks"),
                "layers": [profile.layers[stage.start].name, profile.layers[stage.end - 1].name],
                "memory_bytes": memory.total,
                "in_flight": in_flight,
                **({"segments": segments_to_document(stage.segments)} if stage.segments else {}),
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
            other.method: _alternative(other, predicted)
            for other in found.alternatives
            if other is not found.best
        },
    }


def figures(predicted: Prediction) -> dict[str, Any]:
    """What is expected of a plan, in the keys of `--json`."""
    times = picked(predicted, "time_us", "bound_us", "least_us", "bound_condition")
    return {**times, **picked(predicted, "bubble", "samples_per_s")}


def _alternative(other: PlanCandidate, chosen: Prediction) -> dict[str, Any]:
    if other.plan is None or other.prediction is None:
        return {"why": other.why_not}
    return {
        "stages": [[stage.start, stage.end, list(stage.ranks)] for stage in other.plan.stages],
        **picked(other.plan, "microbatches", "order", "recompute"),
        **picked(other, "remark", "memory_bytes"),
        "slower": other.prediction.time_us / chosen.time_us,
        **figures(other.prediction),
    }


def comparison_document(found: Comparison, seconds: float) -> dict[str, Any]:
    """The keys that `synth plan --compare --json` prints; ways without a plan come last."""
    every = (*found.alternatives, *found.divided)
    ways = sorted(every, key=lambda it: (it.plan is None, float("inf") if it.time_us is None else it.time_us))
    return {
        "model": found.profile.model,
        "topology": found.topology.name,
        "device": None if found.costed.device is None else found.costed.device.name,
        "batch": found.batch,
        "memory_limit_bytes": found.memory_bytes,
        "ways": [
            {
                **picked(it, "method", "time_us", "memory_bytes", "remark"),
                "divides_operators": it in found.divided,
                "bubble": None if it.prediction is None else it.prediction.bubble,
                "collectives_at_least_us": it.collectives_us,
                "plan": None if it.plan is None else _shape(it.plan),
                "why": it.why_not,
            }
            for it in ways
        ],
        "seconds": seconds,
    }


def describe_comparison(document: Mapping[str, Any]) -> list[str]:
    """The same as a table for people."""
    from arborcast.pipeline.planning.memory_need import readable

    def cells(way: Mapping[str, Any]) -> tuple[str, ...]:
        least, idle, need = (way[key] for key in ("collectives_at_least_us", "bubble", "memory_bytes"))
        words = [way["plan"], way["why"], way["remark"]]
        return (
            way["method"],
            "-" if way["time_us"] is None else _time(way["time_us"]),
            "-" if idle is None else f"{idle:.0%}",
            "-" if need is None else readable(need),
            "-" if least is None else _time(least),
            "; ".join(word for word in words if word),
        )

    rows = [cells(way) for way in document["ways"]]
    wide = max(len(row[-1]) for row in rows)
    limit = document["memory_limit_bytes"]
    return [
        f"{document['model']} on {document['topology']}, every rank a {document['device']}: "
        f"{document['batch']} samples a step"
        + ("" if limit is None else f", at most {readable(limit)} on a rank"),
        *table(
            ("way", "step", "idle", "fullest rank", "collectives at least", "plan".ljust(wide)),
            [(*row[:-1], row[-1].ljust(wide)) for row in rows],
            left=1,
        ),
        "collectives at least: proved of any schedules, one after another, on the ranks where they take most",
    ]


def describe_plan(found: Comparison, document: Mapping[str, Any]) -> list[str]:
    """The plan, what is expected of it, and the others, for people."""
    from arborcast.pipeline.costs.saved_bytes import described
    from arborcast.pipeline.order import ORDERS
    from arborcast.pipeline.planning.memory_need import readable

    plan, profile, topology = found.plan, found.profile, found.topology
    divided = counted(plan.microbatches, "microbatch")
    limit, most = document["memory_limit_bytes"], document["bound_us"]
    proved = ORDERS[plan.order].is_bounded and plan.max_in_flight is None
    by_layer = any(stage.segments for stage in plan.stages)
    stages = table(
        ("stage", "layers", "ranks", "memory", "in flight", *(["results of layers"] if by_layer else [])),
        [
            (
                index,
                f"{row['start']}..{row['end'] - 1}  {row['layers'][0]} to {row['layers'][1]}",
                ",".join(map(str, row["ranks"])),
                readable(row["memory_bytes"]),
                row["in_flight"],
                *([described(plan.segments(index))] if by_layer else []),
            )
            for index, row in enumerate(document["stages"])
        ],
        left=3,
    )
    rows = [
        _compared(it, found.prediction.time_us)
        for it in sorted(found.alternatives, key=lambda it: it is not found.best)
    ]
    wide = max(len(row[-1]) for row in rows)  # words to the left
    remarks = [f"{it.method}: {it.remark}" for it in found.alternatives if it.remark]
    return [
        f"{profile.model} on {topology.name}: {profile.depth} layers, {topology.ranks} ranks; costs: "
        f"{profile.source or 'from a file'}",
        *_describe_device(document["device"], document["device_from"]),
        *stages,
        f"{document['batch']} samples a step in {divided}, order {plan.order}"
        + (", recomputing forward passes" if plan.recompute else "")
        + (f", offload at {plan.offload_gbps:g} GB/s" if plan.offload_gbps is not None else "")
        + ("" if limit is None else f", at most {readable(limit)} on a rank"),
        f"one step: {_time(document['time_us'])} ({document['samples_per_s']:.4g} samples/s), "
        f"ranks idle {document['bubble']:.0%}",
        f"proved: at least {_time(document['least_us'])} on these ranks in any order"
        + (f", at most {_time(most)}" if most is not None and proved else "")
        + (f"; in order pe at most {_time(most)}" if most is not None and not proved else ""),
        "",
        *table(
            ("method", "step", "times", "idle", "fullest rank", "stages".ljust(wide)),
            [(*row[:-1], row[-1].ljust(wide)) for row in rows],
            left=1,
        ),
        *remarks,
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


def _compared(it: PlanCandidate, best_us: float) -> tuple[str, ...]:
    """A line of the comparison."""
    from arborcast.pipeline.planning.memory_need import readable

    if it.plan is None or it.prediction is None or it.memory_bytes is None:
        return it.method, "-", "-", "-", "-", it.why_not
    times, idle = f"{it.prediction.time_us / best_us:.2f}", f"{it.prediction.bubble:.0%}"
    time = _time(it.prediction.time_us)
    return it.method, time, times, idle, readable(it.memory_bytes), _shape(it.plan)


def _shape(plan: Plan) -> str:
    """Replicas of each stage: `1+2+1` for three stages, the second on two ranks; several on a rank once."""
    counts = "+".join(str(len(worker.ranks)) for worker in plan.workers)
    each = len(plan.stages) // len(plan.workers)
    shape = f"{counts} ranks" if len(plan.workers) > 1 else f"all on {counts} ranks"
    if plan.is_divided:
        shape += f" as {'+'.join('x'.join(map(str, it.mesh.shape)) or '1' for it in plan.stages)}"
    several = "" if each == 1 else f", {each} stages each"
    return f"{shape}{several}, {counted(plan.microbatches, 'microbatch')}, {plan.order}{_repeated(plan)}"


def _repeated(plan: Plan) -> str:
    """What becomes of results, of all or of some layers."""
    from arborcast.pipeline.costs.saved_bytes import Treatment

    named = {Treatment.RECOMPUTE: "recomputing", Treatment.OFFLOAD: "offloading"}
    some = "" if plan.recompute else " some"
    return "".join(f", {name}{some}" for it, name in named.items() if it in plan.treatments)


def _time(us: float) -> str:
    if us < 1e3:
        return f"{us:.3g} us"
    return f"{us / 1e3:.4g} ms" if us < 1e6 else f"{us / 1e6:.4g} s"
