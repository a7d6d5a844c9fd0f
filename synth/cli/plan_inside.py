"""`synth plan --intra`: how the operators of one stage, the whole model, are divided over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from arborcast.synth.cli.console import table
from arborcast.synth.errors import InputError

if TYPE_CHECKING:
    from arborcast.pipeline.costs.devices import Device
    from arborcast.pipeline.sharding.choice import Choice, OnMesh
    from arborcast.topologies.machine import Machine

MS = 1e9
"""Picoseconds."""


def choose_inside(
    name: str,
    model: tuple[Any, Any, Any],
    machine: Machine,
    *,
    device: Device,
    batch: int | None,
    microbatches: int,
    memory_bytes: int | None,
) -> Choice:
    """Trace a model and shard its operators over all ranks of a machine.

    Args:
        name: of the model.
        model: a module, its example and its loss or None.
        machine: the fabric.
        device: that its ranks are taken for.
        batch: samples of a step; None for those of the example.
        microbatches: that they are divided into.
        memory_bytes: of each rank; None for the device's.

    Raises:
        InputError: the batch does not split into microbatches, the model cannot be traced, nothing fits.
    """
    from arborcast.pipeline import trace
    from arborcast.pipeline.model.traced.operators import operator_trace
    from arborcast.pipeline.sharding.choice import choose
    from arborcast.pipeline.sharding.graph import merged

    made, example, loss = model
    traced = trace(made, example, loss, evaluation=False)
    samples = traced.training.captured.example if batch is None else batch
    if samples % microbatches:
        raise InputError(f"batch of {samples} samples: must split into {microbatches} equal microbatches")
    graph = replace(merged(operator_trace(traced, samples // microbatches)), name=name)
    limit = device.memory_bytes if memory_bytes is None else memory_bytes
    return choose(graph, machine.topology, device, microbatches=microbatches, memory_bytes=limit)


def choice_document(found: Choice, device: Device, seconds: float) -> dict[str, Any]:
    """The keys that `--json` prints."""
    from arborcast.pipeline.sharding.evaluation import calls

    sharding, best = found.sharding, found.best
    assert best.at_rates is not None
    microbatches = best.setting.microbatches
    return {
        "model": found.graph.name,
        "topology": found.topology.name,
        "device": device.name,
        "batch": found.graph.samples * microbatches,
        "microbatches": microbatches,
        "mesh": list(best.mesh.shape),
        "ranks": list(best.mesh.ranks),
        "time_us": sharding.total_ps / 1e6,
        "bound_us": sharding.bound_ps / 1e6,
        "time_at_rates_us": best.at_rates.total_ps / 1e6,
        "scope": sharding.scope,
        "memory_bytes": sharding.cost.memory_bytes,
        "whole_operators": list(found.graph.unknown),
        "meshes": {str(it.mesh): _mesh(it, microbatches) for it in found.tried},
        "operators": _operators(found),
        "collectives": [
            {
                "kind": str(it.kind),
                "axes": list(it.axes),
                "size_bytes": it.size_bytes,
                "per_microbatch": it.per_microbatch,
                "per_step": it.per_step,
            }
            for it in calls(found.graph, sharding.chosen, best.setting)
        ],
        "seconds": seconds,
    }


def _mesh(tried: OnMesh, microbatches: int) -> dict[str, Any]:
    known: dict[str, Any] = {"why": dict(tried.why_not)}
    if tried.sharding is not None and tried.scheduled is not None and tried.at_rates is not None:
        known |= {
            "time_us": tried.scheduled.total_ps(microbatches) / 1e6,
            "time_at_rates_us": tried.at_rates.total_ps / 1e6,
            "memory_bytes": tried.sharding.cost.memory_bytes,
            "chosen_by": "rates" if tried.sharding is tried.at_rates else "schedules",
        }
    known["layouts"] = {
        name: {"time_us": it.total_ps / 1e6, "memory_bytes": it.cost.memory_bytes}
        for name, it in tried.layouts.items()
    }
    return known


def _operators(found: Choice) -> list[dict[str, Any]]:
    """A row for every operator and parameter; those that repeat, once."""
    from arborcast.pipeline.sharding.specs import shown

    grouping = found.graph.classes
    count = Counter(grouping)
    rows = []
    for number, (operator, way) in enumerate(zip(found.graph.operators, found.sharding.chosen, strict=True)):
        if way is None or grouping[number] != number:
            continue
        is_parameter = operator.given is not None
        rows.append(
            {
                "operator": operator.kind,
                "name": operator.module if is_parameter else operator.name,
                "times": count[number],
                "reads": [shown(it.spec) for it in way.demands],
                "makes": [shown(it) for it in way.outputs],
                "updated": None if way.update is None else shown(way.update),
            }
        )
    return rows


def describe_choice(document: Mapping[str, Any]) -> list[str]:
    """The meshes beside the fixed layouts, then how everything is divided on the best one, for people."""
    from arborcast.pipeline.planning.memory import readable
    from arborcast.pipeline.sharding.layouts import LAYOUTS

    best = "x".join(map(str, document["mesh"])) or "1"
    whole = document["whole_operators"]
    marks = {row.get("chosen_by", "")[:1] for row in document["meshes"].values()}
    meshes = []
    for name, row in document["meshes"].items():
        fixed = row["layouts"]
        meshes.append(
            (
                f"{name} *" if name == best else f"{name} r" if row.get("chosen_by") == "rates" else name,
                _ms(row.get("time_us")),
                _ms(row.get("time_at_rates_us")),
                readable(row["memory_bytes"]) if "memory_bytes" in row else "-",
                *(_ms(fixed[it]["time_us"]) if it in fixed else "-" for it in LAYOUTS),
            )
        )
    proof = (
        "proved optimal"
        if document["bound_us"] >= document["time_us"]
        else f"no choice takes less than {_ms(document['bound_us'])}"
    )
    return [
        f"{document['model']} on {document['topology']}, every rank a {document['device']}: "
        f"{document['batch']} samples a step, microbatches: {document['microbatches']}",
        *table(("mesh", "step", "at rates", "a rank holds", *LAYOUTS), meshes),
        f"*: {proof} over {document['scope']}, collectives as their schedules take",
        *(["r: too slow already at exact rates, as its layouts are given"] if "r" in marks else []),
        *([f"whole on every rank, for want of a rule: {', '.join(whole)}"] if whole else []),
        "",
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
                for row in document["operators"]
            ],
            left=2,
        ),
        "",
        *table(
            ("collective", "axes", "size", "each microbatch", "each step"),
            [
                (
                    row["kind"],
                    ",".join(map(str, row["axes"])),
                    readable(row["size_bytes"]),
                    row["per_microbatch"],
                    row["per_step"],
                )
                for row in document["collectives"]
            ],
            left=2,
        ),
    ]


def _ms(time_us: float | None) -> str:
    return "-" if time_us is None else f"{time_us / 1000:.4g} ms"
