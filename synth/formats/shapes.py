"""The shapes of files: which keys there are and what kind of value each takes, checked by pydantic.

Only the form is checked here; `synth.formats` turns what passed into values and checks what it means.
Every error becomes one line: `FILE: links[2].bandwidth: must be positive, got -1`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import (
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    with_config,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from typing_extensions import TypedDict  # pydantic refuses typing's own before Python 3.12

from arborcast.synth.errors import InputError
from arborcast.synth.formats.numerals import parse_number, shorten
from arborcast.synth.formats.sizes import LARGEST_SIZE

# Limits of what a fabric or a schedule can sensibly hold. They keep a typing error (ranks: 10e9) from
# filling the memory, and whole numbers within what compiled kernels can count.
MAX_RANKS = 1 << 16
MAX_INT = (1 << 31) - 1
MAX_STEP = 1 << 20
MAX_DEMANDS = 1 << 20
MAX_SEED = (1 << 63) - 1
MIN_RATE, MAX_RATE = Fraction(1, 10**9), Fraction(10**9)
MAX_LATENCY_US = Fraction(10**9)
MAX_DENOMINATOR = 10**18

MAPPING = with_config(ConfigDict(extra="forbid", strict=True))


# What pydantic's JSON schemas say of values that validators of ours check.
NUMBER = WithJsonSchema(
    {"type": ["number", "string"], "description": 'whole, decimal, or a fraction as text ("25/2")'}
)
TEXT = WithJsonSchema({"type": "string"})
LABEL = WithJsonSchema({"type": ["integer", "string"]})


def _broken(rule: str) -> PydanticCustomError:
    return PydanticCustomError("rule", "{text}", {"text": rule})


def number_with(check: Callable[[Fraction], str | None]) -> PlainValidator:
    """A validator of exact numbers; `check` gives the broken rule, or None."""

    def validate(value: object) -> Fraction:
        try:
            number = parse_number(value)
        except ValueError as error:
            raise _broken(str(error)) from error
        rule = check(number)
        if rule is not None:
            raise _broken(f"{rule}, got {shorten(number)}")
        return number

    return PlainValidator(validate)


def _bandwidth_rule(number: Fraction) -> str | None:
    if number <= 0:
        return "must be positive"
    if not MIN_RATE <= number <= MAX_RATE:
        return "must be between 1e-9 and 1e9 GB/s"
    if number.denominator > MAX_DENOMINATOR:
        return "must have a denominator of at most 1e18"
    return None


def _latency_rule(number: Fraction) -> str | None:
    if number < 0:
        return "must not be negative"
    if number > MAX_LATENCY_US:
        return "must be at most 1e9 us"
    return None


def _amount_rule(number: Fraction) -> str | None:
    return "must not be negative" if number < 0 else None


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise _broken(f"must be text, got {shorten(value)}")
    if not value.isprintable() or not 0 < len(value) <= 1000:
        raise _broken(f"must be 1 to 1000 printable characters, got {shorten(value)}")
    return value


def _line(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise _broken(f"must be a line of printable text, got {shorten(value)}")
    return value


def _streams(value: object) -> int | list[int | None]:
    counts = value if isinstance(value, list) else [value]
    for count in counts:
        if count is None and isinstance(value, list):
            continue
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_INT:
            raise _broken(
                "must be a whole number of at least 1, or a list of one for each rank (null for any number), "
                f"got {shorten(count)}"
            )
    return value  # type: ignore[return-value]


def _number_or(text: str) -> PlainValidator:
    """A validator of whole numbers or text, which it names."""

    def validate(value: object) -> int | str:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise _broken(f"must be {text}, got {shorten(value)}")
        return value

    return PlainValidator(validate)


Bandwidth: TypeAlias = Annotated[Fraction, number_with(_bandwidth_rule), NUMBER]
Latency: TypeAlias = Annotated[Fraction, number_with(_latency_rule), NUMBER]
Amount: TypeAlias = Annotated[Fraction, number_with(_amount_rule), NUMBER]
AnyNumber: TypeAlias = Annotated[Fraction, number_with(lambda number: None), NUMBER]
Name: TypeAlias = Annotated[str, PlainValidator(_name), TEXT]
Line: TypeAlias = Annotated[str, PlainValidator(_line), TEXT]
VertexLabel: TypeAlias = Annotated[
    int | str, _number_or("the number of a rank or the name of a switch"), LABEL
]
Index: TypeAlias = Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)]
HolderLabel: TypeAlias = Index | str  # a rank, or since version 2 the name of a switch
Streams: TypeAlias = Annotated[
    int | list[int | None], PlainValidator(_streams), WithJsonSchema({"type": ["integer", "array"]})
]


@MAPPING
class SwitchShape(TypedDict):
    """A switch that does more than forward: `synth.topology.Switch`."""

    name: Name
    reduces: NotRequired[bool]
    multicasts: NotRequired[bool]
    turns: NotRequired[bool]
    loopback: NotRequired[bool]
    adder: NotRequired[Bandwidth]
    trees: NotRequired[Annotated[int, Field(ge=1, le=MAX_INT)]]
    latency_us: NotRequired[Latency]
    stores: NotRequired[bool]


LinkShape = TypedDict(
    "LinkShape",
    {
        "between": NotRequired[Annotated[list[VertexLabel], Field(min_length=2, max_length=2)]],
        "from": NotRequired[VertexLabel],
        "to": NotRequired[VertexLabel],
        "bandwidth": Bandwidth,
        "latency_us": NotRequired[Latency],
        "rate_assumed": NotRequired[Line],
        "latency_assumed": NotRequired[Line],
        "addresses": NotRequired[Annotated[list[Line], Field(min_length=2, max_length=2)]],
    },
)
MAPPING(LinkShape)


@MAPPING
class TopologyShape(TypedDict):
    """A topology file, or the topology inside a schedule file."""

    name: NotRequired[Name]
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    switches: NotRequired[Annotated[list[Name | SwitchShape], Field(max_length=MAX_RANKS)]]
    links: list[LinkShape]
    symmetries: NotRequired[list[list[VertexLabel]]]
    message_us: NotRequired[Latency]
    streams: NotRequired[Streams]


@MAPPING
class NicShape(TypedDict):
    """A port to a network; no rate where it is unknown."""

    name: Name
    rate: NotRequired[Bandwidth | None]
    near: list[VertexLabel]


@MAPPING
class MachineShape(TypedDict):
    """What a topology file may say beside its graph."""

    gpu: NotRequired[Name | list[Name | None]]
    hosts: NotRequired[list[Annotated[int, Field(ge=0, le=MAX_RANKS)]]]
    devices: NotRequired[list[str]]
    nics: NotRequired[list[NicShape]]
    notes: NotRequired[list[Line]]


@MAPPING
class DemandShape(TypedDict):
    """One block of a custom collective: who holds it before, who must hold it after."""

    at: Annotated[list[Index], Field(min_length=1, max_length=MAX_RANKS)]
    to: Annotated[list[Index], Field(min_length=1, max_length=MAX_RANKS)]


@MAPPING
class CustomShape(TypedDict):
    """A file of a custom collective."""

    name: NotRequired[Name]
    blocks: Annotated[list[DemandShape], Field(min_length=1, max_length=MAX_DEMANDS)]


@MAPPING
class CollectiveShape(TypedDict):
    """The collective of a schedule; demands where it is a custom one, sizes where blocks differ."""

    kind: str
    root: NotRequired[Index | None]
    ranks: list[Index]
    demands: NotRequired[Annotated[list[DemandShape], Field(max_length=MAX_DEMANDS)]]
    sizes: NotRequired[list[list[Index]]]


@MAPPING
class CutShape(TypedDict):
    """A cut."""

    kind: Literal["cut"]
    side: list[VertexLabel]
    capacity: Amount


@MAPPING
class PartitionShape(TypedDict):
    """A partition of the ranks."""

    kind: Literal["partition"]
    blocks: list[list[VertexLabel]]
    capacity: Amount


LengthShape = TypedDict("LengthShape", {"from": VertexLabel, "to": VertexLabel, "length": AnyNumber})
MAPPING(LengthShape)


@MAPPING
class AdderShape(TypedDict):
    """The price of a sum in one switch."""

    switch: VertexLabel
    price: AnyNumber


@MAPPING
class DualShape(TypedDict):
    """Link lengths and, where they are not all zero, prices of limited adders."""

    kind: Literal["dual"]
    lengths: list[LengthShape]
    capacity: AnyNumber
    distance: AnyNumber
    adders: NotRequired[list[AdderShape]]


CertificateShape: TypeAlias = Annotated[CutShape | PartitionShape | DualShape, Field(discriminator="kind")]


TolledLinkShape = TypedDict(
    "TolledLinkShape",
    {"from": VertexLabel, "to": VertexLabel, "intervals": list[Index], "tolls": list[Index]},
)
MAPPING(TolledLinkShape)


@MAPPING
class TollFlowShape(TypedDict):
    """Tolls on what goes from others to a rank, or from it to others."""

    terminal: Index
    direction: Literal["in", "out"]
    others: list[Index]
    links: list[TolledLinkShape]


@MAPPING
class TollsShape(TypedDict):
    """What proves a time: no schedule delivers more bytes in so many intervals."""

    kind: Literal["tolls"]
    step_us: AnyNumber
    intervals: Index
    bytes: AnyNumber
    weight: AnyNumber
    symmetries: list[list[VertexLabel]]
    flows: list[TollFlowShape]


@MAPPING
class BoundShape(TypedDict):
    """A bound."""

    rate: Amount
    certificate: CertificateShape
    scope: NotRequired[str]
    times: NotRequired[list[TollsShape]]


@MAPPING
class ChunkShape(TypedDict):
    """A chunk."""

    share: AnyNumber
    owner: Index
    target: NotRequired[Index | None]
    demand: NotRequired[Index | None]


TransferShape = TypedDict(
    "TransferShape",
    {
        "chunk": Index,
        "from": HolderLabel,
        "to": HolderLabel,
        "via": NotRequired[list[str]],
        "step": Annotated[int, Field(ge=0, le=MAX_STEP)],
        "reduce": NotRequired[bool],
    },
)
MAPPING(TransferShape)


@with_config(ConfigDict(extra="allow", strict=True))
class MethodShape(TypedDict):
    """The method: further keys are its settings."""

    name: Name
    seed: NotRequired[Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)]]


@MAPPING
class ScheduleShape(TypedDict):
    """A schedule file."""

    format: str
    topology: TopologyShape
    collective: CollectiveShape
    method: MethodShape
    rate: Amount
    bound: BoundShape
    rounds: NotRequired[list[Index] | None]
    unit: NotRequired[Bandwidth]
    chunks: list[ChunkShape]
    transfers: list[TransferShape]


@MAPPING
class TableEntryShape(TypedDict):
    """A schedule of a table, without what stands in the table once."""

    from_bytes: Annotated[int, Field(ge=0, le=LARGEST_SIZE)]
    schedule: dict[str, Any]


@MAPPING
class TableShape(TypedDict):
    """The schedules of a collective by size, as the ranks of a group hand them on."""

    format: str
    topology: dict[str, Any]
    collective: dict[str, Any]
    cut_short: bool
    entries: Annotated[list[TableEntryShape], Field(min_length=1)]


@MAPPING
class DeviceCheckShape(TypedDict):
    """How many elements were wrong; lengths are of a block, in elements."""

    collective: Name
    dtype: Name
    lengths: list[Index]
    wrong: Index


@MAPPING
class DeviceRowShape(TypedDict):
    """The time of a call of one size, made in one way."""

    topology: Name
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    collective: Name
    root: Index | None
    method: Name
    by: Literal["kernel", "NCCL", "RCCL", "gloo"]
    graph: bool
    dtype: Name
    bytes: Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
    time_us: Amount
    spread: Amount
    algbw: Amount
    busbw: Amount


@MAPPING
class DeviceResultShape(TypedDict):
    """A results file of `synth bench device`."""

    format: str
    question: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, Any]
    date: str
    code: dict[str, Any]
    keys: list[str]
    measures: dict[str, Any]
    units: dict[str, Any]
    device: dict[str, Index | str | None]
    asked: dict[str, Any]
    schedules: list[dict[str, str]]
    checks: list[DeviceCheckShape]
    rows: list[DeviceRowShape]


_ADAPTERS: dict[object, TypeAdapter[Any]] = {}


def check_shape(shape: Any, document: object, place: str) -> Any:
    """The document with its numbers read, when it has the shape (one of this module's).

    Raises:
        InputError: it has not; the message names the first wrong entry, its rule and its value.
    """
    if shape not in _ADAPTERS:
        _ADAPTERS[shape] = TypeAdapter(shape)
    try:
        return _ADAPTERS[shape].validate_python(document)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=True)
        raise InputError(f"{place}: {_describe(_most_telling(details), document)}") from None
    except RecursionError as error:
        raise InputError(f"{place}: must not be nested this deep") from error


def _most_telling(details: list[ErrorDetails]) -> ErrorDetails:
    """The first error; of several in one entry the deepest (of its other shapes), or a misspelt key."""
    entry = details[0]["loc"][:2]
    same = [detail for detail in details if detail["loc"][:2] == entry]
    return max(same, key=lambda detail: (len(detail["loc"]), detail["type"] == "extra_forbidden"))


def _describe(detail: ErrorDetails, document: object) -> str:
    missing = detail["type"] == "missing"
    path = _path(detail["loc"], document, missing)
    rule = _rule(detail)
    return f"{path}: {rule}" if path else rule


def _path(location: tuple[int | str, ...], document: object, missing: bool) -> str:
    """The keys that lead to an entry; pydantic's names of union members are left out."""
    text, here = "", document
    for position, key in enumerate(location):
        if isinstance(here, list) and isinstance(key, int) and key < len(here):
            text, here = f"{text}[{key}]", here[key]
        elif isinstance(here, Mapping) and isinstance(key, str) and key in here:
            text, here = f"{text}.{key if key.isidentifier() else shorten(key)}", here[key]
        elif missing and position == len(location) - 1:
            text = f"{text}.{key}"
    return text.lstrip(".")


def _rule(detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    value = shorten(detail["input"])
    length = f"got {context.get('actual_length')}"
    rules = {
        "missing": "is missing",
        "extra_forbidden": "is no key known here",
        "invalid_key": "keys must be text",
        "int_type": f"must be a whole number, got {value}",
        "string_type": f"must be text, got {value}",
        "bool_type": f"must be true or false, got {value}",
        "list_type": f"must be a list, got {value}",
        "dict_type": f"must be a mapping, got {value}",
        "model_attributes_type": f"must be a mapping, got {value}",
        "greater_than_equal": f"must be at least {context.get('ge')}, got {value}",
        "less_than_equal": f"must be at most {context.get('le')}, got {value}",
        "too_short": f"must have at least {context.get('min_length')} entries, {length}",
        "too_long": f"must have at most {context.get('max_length')} entries, {length}",
        "union_tag_invalid": f"kind must be one of {context.get('expected_tags')}",
        "union_tag_not_found": "needs a kind",
        "rule": detail["msg"],
    }
    return rules.get(detail["type"], f"{detail['msg'][:1].lower()}{detail['msg'][1:]}, got {value}")


MAX_GENERATORS = 64
MAX_IMPLICIT_LINKS = 1 << 21


_Run: TypeAlias = Annotated[int | str, _number_or('a whole number or a run such as "8..15"'), LABEL]
Runs: TypeAlias = Annotated[list[_Run], Field(max_length=2 * MAX_RANKS)]


@MAPPING
class PartTopologyShape(TypedDict):
    """A topology with one link of each orbit; `symmetries` as runs of vertices."""

    name: Name
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    switches: NotRequired[Annotated[list[Name | SwitchShape], Field(max_length=MAX_RANKS)]]
    links: Annotated[list[LinkShape], Field(max_length=MAX_IMPLICIT_LINKS)]
    symmetries: NotRequired[Annotated[list[Runs], Field(max_length=MAX_GENERATORS)]]
    message_us: NotRequired[Latency]


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
