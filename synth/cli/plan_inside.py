"""`synth plan --intra`: stages, each divided over a mesh of its ranks, beside the other ways to train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborcast.synth.cli.console import table
from arborcast.synth.errors import InputError

if TYPE_CHECKING:
    from arborcast.pipeline.costs.devices import DeviceRates
    from arborcast.pipeline.planning.interop_search import JointPlan, JointStage
    from arborcast.pipeline.planning.sharded_planning import ShardedChoice, TrainingCandidate
    from arborcast.pipeline.sharding.graph import Graph
    from arborcast.pipeline.stages import Plan
    from arborcast.topologies.machine import Machine

US = 1e6
"""Picoseconds."""


def traced_operators(
    name: str, model: tuple[Any, Any, Any], *, batch: int | None, microbatches: int, by_layer: bool = True
) -> Graph:
    """The operators of a model, for the samples of a microbatch.

    Args:
        name: of the model.
        model: a module, its example and its loss or None.
        batch: samples of a step; None for those of the example.
        microbatches: that they are divided into.
        by_layer: whether they bear their layers; otherwise all are of one, as in plans of `shard_model`.

    Raises:
        InputError: the batch does not split into microbatches, or the model cannot be traced.
    """
    from arborcast.pipeline import trace
    from arborcast.pipeline.model.traced.operator_reader import operator_trace
    from arborcast.pipeline.sharding.graph import merged

    made, example, loss = model
    traced = trace(made, example, loss, evaluation=False)
    samples = traced.training.captured.example if batch is None else batch
    if samples % microbatches:
        raise InputError(f"batch of {samples} samples: must split into {microbatches} equal microbatches")
    return replace(merged(operator_trace(traced, samples // microbatches, by_layer=by_layer)), name=name)


def given_plan(file: Path, batch: int | None, microbatches: int | None, stages: int | None) -> Plan:
    """The plan of a file, where the options that were given beside it ask for nothing else.

    Args:
        file: of the plan.
        batch: samples of a step; here and below None where the option was not given.
        microbatches: that they are divided into.
        stages: at most.

    Raises:
        InputError: the file holds no plan, or an option differs from the plan: which one.
    """
    from arborcast.pipeline.planning.formats import read_plan

    plan = read_plan(file)
    options = {"--batch": (batch, plan.batch), "--microbatches": (microbatches, plan.microbatches)}
    for name, (asked, held) in options.items():
        if asked not in (None, held):
            raise InputError(f"{name}: must be {held} as in the plan {file}, got {asked}")
    if stages is not None and stages < len(plan.stages):
        raise InputError(f"--stages: must allow the {len(plan.stages)} of the plan {file}, got {stages}")
    return plan


def choose_inside(
    graph: Graph,
    machine: Machine,
    *,
    device: DeviceRates,
    microbatches: int,
    memory_bytes: int | None,
    stages: int | None,
    given: Plan | None,
) -> ShardedChoice:
    """The best plan of both levels, or what a given one takes.

    Args:
        graph: the operators with their layers.
        machine: the fabric.
        device: that its ranks are taken for.
        microbatches: of a step.
        memory_bytes: of each rank; None for the device's.
        stages: at most; None for no limit.
        given: a plan to price instead; None to find one.

    Raises:
        InputError: nothing fits, or the given plan is for another model, topology, batch or mesh.
    """
    from arborcast.pipeline.planning.sharded_planning import choose_both, given_choice

    limit = device.memory_bytes if memory_bytes is None else memory_bytes
    if given is not None:
        return given_choice(given, graph, machine.topology, device, memory_bytes=limit)
    return choose_both(
        graph,
        machine.topology,
        device,
        microbatches=microbatches,
        memory_bytes=limit,
        stages=stages,
    )


def choice_document(found: ShardedChoice, device: DeviceRates, seconds: float) -> dict[str, Any]:
    """The keys that `--json` prints."""
    plan = found.joint
    at_rates = found.ways[found.best].at_rates
    return {
        "model": found.sliced.graph.name,
        "topology": found.topology.name,
        "device": device.name,
        "batch": found.sliced.graph.samples * found.microbatches,
        "microbatches": found.microbatches,
        "best": found.best,
        "time_us": plan.step_ps() / US,
        "time_at_rates_us": None if at_rates is None else at_rates.step_ps() / US,
        "bound_at_rates_us": None if found.bound_ps is None else found.bound_ps / US,
        "memory_bytes": max(it.priced.memory_bytes for it in plan.stages),
        "whole_operators": list(found.sliced.graph.unknown),
        "ways": {name: _way(it) for name, it in found.ways.items()},
        "stages": [_stage(found, plan, number) for number in range(len(plan.stages))],
        "programs": found.programs,
        "seconds": seconds,
    }


def _way(way: TrainingCandidate) -> dict[str, Any]:
    if way.scheduled is None:
        return {"why": way.why_not}
    return {
        "time_us": way.scheduled.step_ps() / US,
        "time_at_rates_us": None if way.at_rates is None else way.at_rates.step_ps() / US,
        "memory_bytes": max(it.priced.memory_bytes for it in way.scheduled.stages),
        "stages": [
            {"layers": [it.start, it.end], "ranks": list(it.ranks), "mesh": list(it.priced.setting.sizes)}
            for it in way.scheduled.stages
        ],
    }


def _stage(found: ShardedChoice, plan: JointPlan, number: int) -> dict[str, Any]:
    from arborcast.pipeline.sharding.evaluation import calls

    stage = plan.stages[number]
    graph, setting = found.sliced.stage(stage.start, stage.end), stage.priced.setting
    return {
        "layers": [stage.start, stage.end],
        "ranks": list(stage.ranks),
        "mesh": list(setting.sizes),
        "time_us": stage.total_ps(plan.microbatches) / US,
        "crossing_us": stage.crossing_ps * plan.microbatches / US,
        "memory_bytes": stage.priced.memory_bytes,
        "operators": list(_operators(graph, stage)),
        "collectives": [
            {
                "kind": str(it.kind),
                "axes": list(it.axes),
                "size_bytes": it.size_bytes,
                "per_microbatch": it.per_microbatch,
                "per_step": it.per_step,
            }
            for it in calls(graph, stage.priced.sharding.chosen, setting)
        ],
    }


def _operators(graph: Graph, stage: JointStage) -> Iterator[dict[str, Any]]:
    """A row for every operator and parameter; those that repeat, once."""
    from arborcast.pipeline.meshes import shown

    count = Counter(graph.classes)
    chosen = stage.priced.sharding.chosen
    for number, (operator, way) in enumerate(zip(graph.operators, chosen, strict=True)):
        if way is None or graph.classes[number] != number:
            continue
        is_parameter = operator.given is not None
        yield {
            "operator": operator.kind,
            "name": operator.module if is_parameter else operator.name,
            "times": count[number],
            "reads": [shown(it.spec) for it in way.demands],
            "makes": [shown(it) for it in way.outputs],
            "updated": None if way.update is None else shown(way.update),
        }


def describe_choice(document: Mapping[str, Any]) -> list[str]:
    """The plan beside the other ways, then how everything is divided in each stage, for people."""
    from arborcast.pipeline.planning.memory_need import readable

    whole = document["whole_operators"]
    rows, missing = [], []
    for name, way in document["ways"].items():
        if "why" in way:
            missing.append(f"{name}: {way['why']}")
            continue
        stages = ", ".join(f"{_mesh(it['mesh'])} for {_range(it['layers'])}" for it in way["stages"])
        rows.append(
            (
                f"{name} *" if name == document["best"] else name,
                _ms(way["time_us"]),
                _ms(way["time_at_rates_us"]),
                readable(way["memory_bytes"]),
                stages,
            )
        )
    bound = document["bound_at_rates_us"]
    proof = (
        [] if bound is None else [f"at exact rates no plan in scope takes less than {_ms(bound)} (proved)"]
    )
    lines = [
        f"{document['model']} on {document['topology']}, every rank a {document['device']}: "
        f"{document['batch']} samples a step, microbatches: {document['microbatches']}",
        *table(("way", "step", "at rates", "a rank holds", "meshes and layers"), rows, left=1),
        *missing,
        *proof,
        *([f"whole on every rank, for want of a rule: {', '.join(whole)}"] if whole else []),
    ]
    for number, stage in enumerate(document["stages"]):
        ranks = ", ".join(map(str, stage["ranks"]))
        lines += [
            "",
            f"stage {number}: {_range(stage['layers'])} on ranks {ranks} as mesh {_mesh(stage['mesh'])}, "
            f"a rank holds {readable(stage['memory_bytes'])}",
            f"of a step {_ms(stage['time_us'])}, {_ms(stage['crossing_us'])} of it messages behind it",
            *table(
                ("operator", "name", "times", "reads", "makes", "updated"),
                [
                    (
                        row["operator"],
                        row["name"],
                        row["times"],
                        ", ".join(row["reads"]),
                        ", ".join(row["makes"]),
                        row["updated"] or "",
                    )
                    for row in stage["operators"]
                ],
                left=2,
            ),
        ]
        if stage["collectives"]:
            lines += table(
                ("collective", "axes", "size", "each microbatch", "each step"),
                [
                    (
                        row["kind"],
                        ",".join(map(str, row["axes"])),
                        readable(row["size_bytes"]),
                        row["per_microbatch"],
                        row["per_step"],
                    )
                    for row in stage["collectives"]
                ],
                left=2,
            )
    return lines


def _mesh(shape: list[int]) -> str:
    return "x".join(map(str, shape)) or "1"


def _range(layers: list[int]) -> str:
    start, end = layers
    return f"layer {start}" if end == start + 1 else f"layers {start}-{end - 1}"


def _ms(time_us: float | None) -> str:
    return "-" if time_us is None else f"{time_us / 1000:.4g} ms"
