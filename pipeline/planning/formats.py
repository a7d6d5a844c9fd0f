"""Profiles and plans to files and back: `arborcast.profile/1`, `arborcast.plan/4`, both JSON.

Version 2 of plans may put several stages on the same ranks, version 3 may say by layer what becomes of the
results of forward passes, version 4 how the operators of stages are divided over meshes. The older ones are
read as well, and `arborcast.sharded-plan/1`, which divided plans had as a format of their own.

A plan file holds its topology, so that a trainer on another machine knows the links it was made for.
Whatever is wrong with a file becomes one line that names the file, the place, the value and the rule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from arborcast.pipeline.costs.saved_bytes import Segment, Segments, Treatment
from arborcast.pipeline.errors import PlanError, ProfileError
from arborcast.pipeline.profiles import Layer, Profile, Tie
from arborcast.pipeline.stage_sharding import StageSharding
from arborcast.pipeline.stages import Plan, Stage
from arborcast.synth.errors import InputError
from arborcast.synth.formats.atomic import write_atomically
from arborcast.synth.formats.documents import prefixed, raising, topology_from_document, topology_to_document
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.reading import parse_json, read_text, shorten_path

if TYPE_CHECKING:
    from arborcast.pipeline.planning.plan_documents import StageShape

PROFILE_FORMAT = "arborcast.profile/1"
PLAN_FORMAT = "arborcast.plan/4"
DIVIDED_PLAN_FORMAT = "arborcast.sharded-plan/1"
OLD_PLAN_FORMATS = ("arborcast.plan/1", "arborcast.plan/2", "arborcast.plan/3", DIVIDED_PLAN_FORMAT)
MAX_BYTES = 1 << 28

Document: TypeAlias = dict[str, Any]

_TIMES = frozenset(field.name for field in fields(Layer) if field.name.endswith("_us"))


def profile_to_document(profile: Profile) -> Document:
    """The keys of a profile file."""
    return {
        "format": PROFILE_FORMAT,
        "model": profile.model,
        "samples": profile.samples,
        "source": profile.source,
        **({} if profile.crowding == 1 else {"crowding": profile.crowding}),
        "layers": [_known(asdict(layer)) for layer in profile.layers],
        "ties": [asdict(tie) for tie in profile.ties],
    }


def profile_from_document(document: object, place: str) -> Profile:
    """The profile that a document describes; `place` (a file name) begins every error.

    Raises:
        ProfileError: another format, another shape, or a rule of profiles is broken.
    """
    from arborcast.pipeline.planning.plan_documents import ProfileShape
    from arborcast.synth.formats.shapes import check_shape

    with raising(ProfileError):
        _check_format(document, PROFILE_FORMAT, "a profile", place)
        shape = check_shape(ProfileShape, document, place)
        with prefixed(place):
            return Profile(
                model=shape["model"],
                samples=shape["samples"],
                layers=tuple(Layer(**_floats(layer)) for layer in shape["layers"]),
                ties=tuple(
                    Tie(tie["name"], tie["size_bytes"], tuple(tie["layers"])) for tie in shape.get("ties", ())
                ),
                source=shape.get("source", ""),
                crowding=float(shape.get("crowding", 1)),
            )


def read_profile(path: Path | str, *, max_bytes: int = MAX_BYTES) -> Profile:
    """The profile in a file.

    Raises:
        InputError: the file cannot be read, is larger than `max_bytes`, or is no profile.

    Examples:
        >>> measured = pipeline.profile(nn.Linear(8, 8), torch.randn(16, 8), name="mine")
        >>> pipeline.write_profile(measured, "mine.json")
        >>> pipeline.read_profile("mine.json").model
        'mine'
    """
    place = shorten_path(path)
    return profile_from_document(parse_json(read_text(path, max_bytes=max_bytes), place), place)


def write_profile(profile: Profile, path: Path | str) -> None:
    """Write a profile file, whole or not at all, one layer a line.

    Raises:
        InputError: the file cannot be written.

    Examples:
        >>> profile = pipeline.profile(nn.Linear(8, 8), torch.randn(16, 8))
        >>> pipeline.write_profile(profile, "profile.json")
        >>> pipeline.read_profile("profile.json") == profile
        True
    """
    write_atomically(path, _lines(profile_to_document(profile), ("layers", "ties")))


def plan_to_document(plan: Plan, predicted: Mapping[str, Any] | None = None) -> Document:
    """The keys of a plan file; `predicted` says what its maker expects of it."""
    return {
        "format": PLAN_FORMAT,
        "model": plan.model,
        "method": plan.method,
        "stages": [
            {
                "start": stage.start,
                "end": stage.end,
                "ranks": list(stage.ranks),
                **({"segments": segments_to_document(stage.segments)} if stage.segments else {}),
                **({} if stage.sharding is None else {"sharding": asdict(stage.sharding)}),
            }
            for stage in plan.stages
        ],
        "microbatches": plan.microbatches,
        "order": plan.order,
        "recompute": plan.recompute,
        "max_in_flight": plan.max_in_flight,
        **({} if plan.offload_gbps is None else {"offload_gbps": plan.offload_gbps}),
        **({} if plan.batch is None else {"batch": plan.batch}),
        **({"whole": list(plan.whole)} if plan.whole else {}),
        "topology": None if plan.topology is None else topology_to_document(plan.topology),
        **({} if predicted is None else {"predicted": dict(predicted)}),
    }


def plan_from_document(document: object, place: str) -> Plan:
    """The plan that a document describes; `place` (a file name) begins every error.

    Raises:
        PlanError: another format, another shape, or a rule of plans is broken.
    """
    from arborcast.pipeline.planning.plan_documents import PlanDocument
    from arborcast.synth.formats.shapes import check_shape

    with raising(PlanError):
        _check_format(document, PLAN_FORMAT, "a plan", place, *OLD_PLAN_FORMATS)
        assert isinstance(document, dict), "its format was read"
        before = {"order": "1f1b"} if document["format"] == DIVIDED_PLAN_FORMAT else {}
        shape = check_shape(PlanDocument, before | document, place)
        topology = shape.get("topology")
        links = None if topology is None else topology_from_document(topology, f"{place}: topology")
        gbps = shape.get("offload_gbps")
        with prefixed(place):
            return Plan(
                stages=[_stage(it, number) for number, it in enumerate(shape["stages"])],
                microbatches=shape["microbatches"],
                order=shape["order"],
                recompute=shape.get("recompute", False),
                max_in_flight=shape.get("max_in_flight"),
                topology=links,
                model=shape.get("model", ""),
                method=shape.get("method", f"from {place}"),
                offload_gbps=None if gbps is None else float(gbps),
                batch=shape.get("batch"),
                whole=tuple(shape.get("whole", ())),
            )


def read_plan(path: Path | str, *, max_bytes: int = MAX_BYTES) -> Plan:
    """The plan in a file.

    Raises:
        InputError: the file cannot be read, is larger than `max_bytes`, or is no plan.

    Examples:
        >>> pipeline.write_plan(pipeline.Plan([(0, 2, [0]), (2, 4, [1])], microbatches=4), "plan.json")
        >>> pipeline.read_plan("plan.json").microbatches
        4
    """
    place = shorten_path(path)
    return plan_from_document(parse_json(read_text(path, max_bytes=max_bytes), place), place)


def write_plan(plan: Plan, path: Path | str, predicted: Mapping[str, Any] | None = None) -> None:
    """Write a plan file, whole or not at all, one stage a line.

    Raises:
        InputError: the file cannot be written.

    Examples:
        >>> plan = pipeline.Plan([(0, 2, [0]), (2, 4, [1])], microbatches=4, order="gpipe")
        >>> pipeline.write_plan(plan, "plan.json")
        >>> pipeline.read_plan("plan.json") == plan
        True
    """
    write_atomically(path, _lines(plan_to_document(plan, predicted), ("stages",)))


read_sharded_plan = read_plan
"""`read_plan`, by the name that it had for plans of both levels."""

write_sharded_plan = write_plan
"""`write_plan`, by the name that it had for plans of both levels."""


def segments_to_document(segments: Segments) -> list[Document]:
    """What becomes of the results of how many layers, one segment after another."""
    return [{"treatment": it.treatment.value, "layers": it.end - it.start} for it in segments]


def _stage(shape: StageShape, number: int) -> Stage:
    sharding = StageSharding.from_document(shape["sharding"]) if "sharding" in shape else None
    ranks = shape.get("ranks", None if sharding is None else sharding.mesh.ranks)
    if ranks is None:
        raise PlanError(f"stages[{number}].ranks: is missing")
    segments, start = [], shape["start"]
    for it in shape.get("segments", ()):
        segments.append(Segment(start, start + it["layers"], Treatment(it["treatment"])))
        start += it["layers"]
    return Stage(shape["start"], shape["end"], tuple(ranks), tuple(segments), sharding)


def _check_format(document: object, wanted: str, what: str, place: str, *old: str) -> None:
    found = document.get("format") if isinstance(document, dict) else None
    if found is None or found not in (wanted, *old):
        got = shorten(found) if isinstance(document, dict) else "no object"
        raise InputError(f"{place}: format: must be {what} in the format {wanted}, got {got}")


def _known(layer: Document) -> Document:
    """Without what nobody measured."""
    return {key: value for key, value in layer.items() if value is not None}


def _floats(layer: Mapping[str, Any]) -> dict[str, Any]:
    return {key: float(value) if key in _TIMES else value for key, value in layer.items()}


def _lines(document: Document, listed: tuple[str, ...]) -> str:
    """JSON with one entry of the listed keys a line, for people and for line-based comparison."""
    entries = [
        f"{json.dumps(key)}: [" + ",\n  ".join(json.dumps(row, allow_nan=False) for row in value) + "]"
        if key in listed
        else f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}"
        for key, value in document.items()
    ]
    return "{" + ",\n ".join(entries) + "}\n"
