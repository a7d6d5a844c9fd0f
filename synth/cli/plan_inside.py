"""`synth plan --intra`: stages, each divided over a mesh of its ranks, beside the other ways to train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborcast.synth.cli.console import Columns, table, table_of
from arborcast.synth.cli.plan_description import figures
from arborcast.synth.errors import InputError
from arborcast.synth.formats.documents import picked

if TYPE_CHECKING:
    from arborcast.pipeline.costs.devices import DeviceRates
    from arborcast.pipeline.planning.interop_search import JointPlan, JointStage
    from arborcast.pipeline.planning.sharded_planning import ShardedChoice, TrainingCandidate
    from arborcast.pipeline.sharding.graph import Graph
    from arborcast.pipeline.stages import Plan

US = 1e6
"""Picoseconds."""


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
    options = {"--batch": (batch, plan.batch or batch), "--microbatches": (microbatches, plan.microbatches)}
    for name, (asked, held) in options.items():
        if asked not in (None, held):
            raise InputError(f"{name}: must be {held} as in the plan {file}, got {asked}")
    if stages is not None and stages < len(plan.stages):
        raise InputError(f"--stages: must allow the {len(plan.stages)} of the plan {file}, got {stages}")
    return plan


def choice_document(found: ShardedChoice, device: DeviceRates, seconds: float) -> dict[str, Any]:
    """The keys that `--json` prints."""
    plan, predicted = found.joint, found.prediction
    at_rates = found.ways[found.best].at_rates
    return {
        "model": found.sliced.graph.name,
        "topology": found.topology.name,
        "device": device.name,
        "batch": found.sliced.graph.samples * found.microbatches,
        "microbatches": found.microbatches,
        "best": found.best,
        **figures(predicted),
        "time_at_rates_us": None if at_rates is None else at_rates.step_ps() / US,
        "bound_at_rates_us": None if found.bound_ps is None else found.bound_ps / US,
        "memory_bytes": found.ways[found.best].memory_bytes,
        "whole_operators": list(found.sliced.graph.unknown),
        "ways": {name: _way(it) for name, it in found.ways.items()},
        "stages": [_stage(found, plan, number) for number in range(len(plan.stages))],
        "programs": found.programs,
        "seconds": seconds,
    }


def _way(way: TrainingCandidate) -> dict[str, Any]:
    if way.scheduled is None or way.prediction is None:
        return {"why": way.why_not}
    return {
        "time_us": way.prediction.time_us,
        "time_at_rates_us": None if way.at_rates is None else way.at_rates.step_ps() / US,
        "memory_bytes": way.memory_bytes,
        "bubble": way.prediction.bubble,
        "stages": [
            {"layers": [it.start, it.end], "ranks": list(it.ranks), "mesh": list(it.priced.setting.sizes)}
            for it in way.scheduled.stages
        ],
    }


def _stage(found: ShardedChoice, plan: JointPlan, number: int) -> dict[str, Any]:
    from arborcast.pipeline.sharding.evaluation import calls

    stage = plan.stages[number]
    graph, setting = found.sliced.stage(stage.start, stage.end), stage.priced.setting
    predicted = found.prediction
    waited_us = sum(
        it.end_us - it.start_us
        for it in predicted.timeline.intervals
        if it.kind == "waiting" and it.rank == stage.ranks[0]
    )
    return {
        "layers": [stage.start, stage.end],
        "ranks": list(stage.ranks),
        "mesh": list(setting.sizes),
        "time_us": predicted.time_us - waited_us,
        "crossing_us": stage.crossing_ps * plan.microbatches / US,
        "memory_bytes": predicted.memory[number].total,
        "operators": list(_operators(graph, stage)),
        "collectives": [
            {"kind": str(it.kind), **picked(it, "axes", "size_bytes", "per_microbatch", "per_step")}
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
            f"busy {_ms(stage['time_us'])} of a step; messages behind it take {_ms(stage['crossing_us'])}",
            *table_of(stage["operators"], OPERATORS, left=2),
        ]
        if stage["collectives"]:
            lines += table_of(
                stage["collectives"],
                {
                    "collective": lambda row: row["kind"],
                    "axes": lambda row: ",".join(map(str, row["axes"])),
                    "size": lambda row: readable(row["size_bytes"]),
                    "each microbatch": lambda row: row["per_microbatch"],
                    "each step": lambda row: row["per_step"],
                },
                left=2,
            )
    return lines


OPERATORS: Columns = {
    "operator": lambda row: row["operator"],
    "name": lambda row: row["name"],
    "times": lambda row: row["times"],
    "reads": lambda row: ", ".join(row["reads"]),
    "makes": lambda row: ", ".join(row["makes"]),
    "updated": lambda row: row["updated"] or "",
}
"""How each operator of a stage is divided."""


def _mesh(shape: list[int]) -> str:
    return "x".join(map(str, shape)) or "1"


def _range(layers: list[int]) -> str:
    start, end = layers
    return f"layer {start}" if end == start + 1 else f"layers {start}-{end - 1}"


def _ms(time_us: float | None) -> str:
    return "-" if time_us is None else f"{time_us / 1000:.4g} ms"
