"""The shape of implicit schedule files: what differs from explicit ones (see `synth.formats.shapes`)."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypeAlias

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict  # pydantic refuses typing's own before Python 3.12

from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.shapes import (
    MAPPING,
    MAX_RANKS,
    Amount,
    BoundShape,
    ChunkShape,
    LinkShape,
    MethodShape,
    Name,
    SwitchShape,
    TransferShape,
)

MAX_GENERATORS = 64
MAX_IMPLICIT_LINKS = 1 << 21


def _entry(value: object) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        text = f'must be a whole number or a run such as "8..15", got {shorten(value)}'
        raise PydanticCustomError("rule", "{text}", {"text": text})
    return value


Runs: TypeAlias = Annotated[
    list[Annotated[int | str, PlainValidator(_entry)]], Field(max_length=2 * MAX_RANKS)
]


@MAPPING
class PartTopologyShape(TypedDict):
    """A topology with one link of each orbit; `symmetries` as runs of vertices."""

    name: Name
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    switches: NotRequired[Annotated[list[Name | SwitchShape], Field(max_length=MAX_RANKS)]]
    links: Annotated[list[LinkShape], Field(max_length=MAX_IMPLICIT_LINKS)]
    symmetries: NotRequired[Annotated[list[Runs], Field(max_length=MAX_GENERATORS)]]


@MAPPING
class TranslationShape(TypedDict):
    """A generator: images of the ranks and, after them, of the switches, all by number."""

    order: Annotated[int, Field(ge=2, le=MAX_RANKS)]
    images: Runs


@MAPPING
class RootlessShape(TypedDict):
    """A collective without a root."""

    kind: str
    ranks: Runs


@MAPPING
class ImplicitShape(TypedDict):
    """An implicit schedule file."""

    format: str
    topology: PartTopologyShape
    translations: Annotated[list[TranslationShape], Field(max_length=MAX_GENERATORS)]
    collective: RootlessShape
    method: MethodShape
    rate: Amount
    bound: BoundShape
    chunks: list[ChunkShape]
    transfers: list[TransferShape]
