"""The shapes of profile and plan files: which keys there are and what kind of value each takes.

Only the form is checked here, by pydantic; `pipeline.planning.formats` makes values of what passed.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import Field
from typing_extensions import TypedDict  # pydantic refuses typing's own before Python 3.12

from arborcast.pipeline.profiles import Layer
from arborcast.synth.formats.shapes import MAPPING, MAX_INT, MAX_RANKS, NUMBER, Bandwidth, Name, number_with

MAX_LAYERS = 1 << 16
MAX_BYTES = 1 << 60
MAX_TIME_US = Fraction(10**15)  # thirty years: what is above it is a typing error, not a time

Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Time = Annotated[
    Fraction, number_with(lambda time: "must be at most 1e15 us" if time > MAX_TIME_US else None), NUMBER
]
Count = Annotated[int, Field(ge=1, le=MAX_INT)]


if TYPE_CHECKING:
    LayerShape: TypeAlias = dict[str, Any]
else:
    LayerShape = MAPPING(
        TypedDict(
            "LayerShape",
            {
                it.name: kind if it.default is MISSING else NotRequired[kind]
                for it in fields(Layer)
                for kind in [Name if it.name == "name" else Time if it.name.endswith("_us") else Bytes]
            },
        )
    )
"""One layer of a profile: what `pipeline.profiles.Layer` has, times in `_us` and bytes."""


@MAPPING
class TieShape(TypedDict):
    """A parameter that several layers share."""

    name: Name
    size_bytes: Bytes
    layers: Annotated[list[int], Field(min_length=2, max_length=MAX_LAYERS)]


@MAPPING
class ProfileShape(TypedDict):
    """A profile file."""

    format: str
    model: Name
    samples: Count
    source: NotRequired[str]
    crowding: NotRequired[Time]
    layers: Annotated[list[LayerShape], Field(min_length=1, max_length=MAX_LAYERS)]
    ties: NotRequired[Annotated[list[TieShape], Field(max_length=MAX_LAYERS)]]


@MAPPING
class SegmentShape(TypedDict):
    """What becomes of the results of so many layers."""

    treatment: Literal["keep", "recompute", "offload"]
    layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]


Placement = Annotated[str, Field(max_length=64)]
"""A spec, as DTensor writes placements."""


@MAPPING
class MeshShape(TypedDict):
    """Ranks as a grid, row by row."""

    shape: Annotated[list[Annotated[int, Field(ge=2, le=MAX_RANKS)]], Field(max_length=4)]
    ranks: Annotated[list[int], Field(min_length=1, max_length=MAX_RANKS)]


@MAPPING
class ParameterShardingShape(TypedDict):
    """How a parameter lies on a mesh."""

    path: str
    stored: Placement
    update: Placement


@MAPPING
class OperatorShardingShape(TypedDict):
    """How an operator is divided; see `pipeline.sharding.stage_sharding`."""

    name: str
    kind: str
    members: list[str]
    reads: list[Annotated[list[str | None], Field(min_length=3, max_length=3)]]
    made: Placement
    result: Placement
    outputs: list[Annotated[list[str], Field(min_length=2, max_length=2)]]


@MAPPING
class ShardingShape(TypedDict):
    """How a stage lies on a mesh."""

    mesh: MeshShape
    parameters: list[ParameterShardingShape]
    operators: list[OperatorShardingShape]


@MAPPING
class StageShape(TypedDict):
    """The layers [start, end) on some ranks, which are those of the mesh where a sharding names one."""

    start: Annotated[int, Field(ge=0, le=MAX_LAYERS)]
    end: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    ranks: NotRequired[Annotated[list[int], Field(min_length=1, max_length=MAX_RANKS)]]
    segments: NotRequired[Annotated[list[SegmentShape], Field(max_length=MAX_LAYERS)]]
    sharding: NotRequired[ShardingShape]


@MAPPING
class PlanDocument(TypedDict):
    """A plan file; `predicted` is for people and other programs, and not read back."""

    format: str
    model: NotRequired[str]
    method: NotRequired[str]
    stages: Annotated[list[StageShape], Field(min_length=1, max_length=MAX_LAYERS)]
    microbatches: Count
    order: str
    recompute: NotRequired[bool]
    max_in_flight: NotRequired[Count | None]
    offload_gbps: NotRequired[Bandwidth]
    batch: NotRequired[Count]
    whole: NotRequired[list[str]]
    topology: NotRequired[dict[str, Any] | None]
    predicted: NotRequired[dict[str, Any] | None]
