"""The shape of `groups.json`, beside those of `synth.formats.shapes`."""

from __future__ import annotations

from typing import Annotated, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic refuses typing's own before Python 3.12

from arborcast.synth.formats.shapes import MAPPING, AnyNumber, LengthShape

_Index = Annotated[int, Field(ge=0, le=1 << 20)]


@MAPPING
class GroupShape(TypedDict):
    """One group; its collective stands in its schedule file too, which counts where there are no images."""

    kind: str
    root: _Index | None
    ranks: list[_Index]
    weight: AnyNumber
    rate: AnyNumber
    alone: AnyNumber
    file: str
    images: NotRequired[list[_Index]]


@MAPPING
class LevelShape(TypedDict):
    """A level of the certificate; links that are not named have length 0."""

    rate: AnyNumber
    bound: AnyNumber
    groups: list[_Index]
    lengths: list[LengthShape]


@MAPPING
class JointShape(TypedDict):
    """The certificate."""

    relays: bool
    levels: list[LevelShape]


@MAPPING
class GroupsShape(TypedDict):
    """The whole file."""

    format: str
    topology: str
    groups: Annotated[list[GroupShape], Field(min_length=1)]
    certificate: JointShape
