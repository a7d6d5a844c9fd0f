"""What the commands share of their options: types with help, and the readers of their texts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from fractions import Fraction
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from arborcast.synth.cli.console import speaking
from arborcast.synth.deadline import Deadline as RunningDeadline
from arborcast.synth.deadline import run_until, running
from arborcast.synth.errors import InputError
from arborcast.synth.formats.sizes import parse_size

MOST_RANKS = 1 << 16
"""As many as a topology file may have."""


def whole(text: str) -> int:
    """An option's whole number; the message names the value, which typer's own leaves out."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"must be a whole number, got {text!r}") from None


def seconds(text: str) -> float:
    """An option's positive number of seconds."""
    return _positive(text, "a positive number of seconds")


def gigabytes_a_second(text: str) -> float:
    """An option's positive rate."""
    return _positive(text, "a positive rate in GB/s")


def _positive(text: str, rule: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise typer.BadParameter(f"must be {rule}, got {text!r}")
    return value


def at_least_one(text: str) -> int:
    """An option's whole number of at least 1."""
    if whole(text) < 1:
        raise typer.BadParameter(f"must be at least 1, got {text}")
    return whole(text)


def writable(output: str | Path) -> Path:
    """The path of a file that can be written, seen before any time is spent on what it shall hold.

    Raises:
        InputError: it is a folder, or its folder does not exist or admits no file.
    """
    output = Path(output)
    if output.is_dir():
        raise InputError(f"{output}: must be a file to write, got a folder")
    if not output.parent.is_dir():
        raise InputError(f"{output}: its folder {output.parent} does not exist")
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise InputError(f"{output}: must be writable, and is not")
    return output


def option(*names_and_help: str, **details: Any) -> Any:
    """An option of a command: its names, then its help; `details` are typer's."""
    *names, told = names_and_help
    return typer.Option(*names, help=told, **details)


def number(*names_and_help: str, metavar: str = "N") -> Any:
    """An option whose value is a whole number."""
    return option(*names_and_help, parser=whole, metavar=metavar)


def count(*names_and_help: str, metavar: str = "N") -> Any:
    """An option whose value is a whole number of at least 1."""
    return option(*names_and_help, parser=at_least_one, metavar=metavar)


def target(*names_and_help: str, metavar: str = "PATH", **details: Any) -> Any:
    """An option that names a file to write; before anything else it is seen that it can be written."""
    return option(*names_and_help, parser=_checked(writable), metavar=metavar, **details)


def in_bytes(*names_and_help: str, metavar: str = "TEXT") -> Any:
    """An option whose value is a size in bytes, such as 64KiB."""
    return option(*names_and_help, parser=_checked(parse_size), metavar=metavar)


def _checked(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader whose errors name the option, too."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except InputError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


def _least_piece(text: object) -> int:
    """The bytes of a `MinPiece`, of its default, too; 0 stands for 1."""
    try:
        return 1 if text == "0" else parse_size(str(text))
    except InputError as error:
        raise InputError(f"{error}, or 0") from None


def duration(*names_and_help: str) -> Any:
    """An option whose value is a positive number of seconds."""
    return option(*names_and_help, parser=seconds, metavar="SECONDS")


Spec = Annotated[str, typer.Argument(help="catalog name with arguments (see `synth topologies`) or a file")]
File = Annotated[Path, typer.Argument(help="a schedule file, as `synth solve -o` writes it")]


def collective_name(text: str) -> str:
    """The kind of collective, under its own name, however it is spelled; everything else as it is."""
    from arborcast.synth.collective import Kind

    kind = Kind.named(text)
    return text if kind is None else kind.value


CollectiveName = Annotated[
    str,
    typer.Argument(
        parser=collective_name,
        metavar="COLLECTIVE",
        help="broadcast, reduce, allgather, reduce-scatter, allreduce, gather, scatter, alltoall, "
        "or a YAML file of who holds and who must get each block",
    ),
]
Ranks = Annotated[str | None, option("--ranks", "the fragment, such as 0,1,3 or 0-5")]
Relays = Annotated[bool, option("--relays", "ranks outside --ranks may forward, copy and reduce")]
Root = Annotated[
    int | None, number("--root", "root rank, numbered after --ranks (default 0)", metavar="RANK")
]
Gpu = Annotated[
    str | None, option("--gpu", "what the GPUs of a tool's text or NCCL XML are: v100, h200, mi300x, ...")
]
Pcie = Annotated[
    bool | None,
    option(
        "--pcie/--no-pcie",
        "take PCIe paths of a tool's text or NCCL XML as links; by default where others join not all",
    ),
]
BetweenSockets = Annotated[
    str | None,
    option(
        "--between-sockets",
        "GB/s each way between two CPU sockets; by default of all links that they can have",
        metavar="GB/S",
    ),
]
NumaPerSocket = Annotated[
    int | None,
    number("--numa-per-socket", "NUMA nodes of a CPU socket (NPS, SNC), where a file leaves it open"),
]
NoInNetwork = Annotated[bool, option("--no-in-network", "switches only forward, whatever else they can do")]
RatesName = Literal["datasheet", "nccl"]
Rates = Annotated[RatesName, option("--rates", "of links; nccl: NCCL's planning constants")]
WithoutLink = Annotated[
    list[str] | None,
    option("--without-link", "a link that failed, both ways; may be repeated", metavar="A-B"),
]
WithoutRank = Annotated[
    list[int] | None,
    number(
        "--without-rank",
        "a rank that failed; may be repeated. Those left are numbered 0, 1, 2... again, in their order",
        metavar="R",
    ),
]
DataTypeName = Literal["float32", "float64", "bfloat16", "int64"]
DataType = Annotated[DataTypeName, option("--dtype", "of the elements")]
Jobs = Annotated[int, number("--jobs", "questions at once; -1 for all cores")]
Dask = Annotated[str | None, option("--dask", "run the jobs on this Dask scheduler", metavar="ADDRESS")]
AsJson = Annotated[bool, option("--json", "print one JSON object")]
Verbose = Annotated[bool, option("-v", "--verbose", "say on standard error how far work has come")]
Quiet = Annotated[bool, option("-q", "--quiet", "no progress and no warnings, errors only")]
Picture = Annotated[Path | None, target("--picture", "draw it: .svg or .png")]
OldPicture = Annotated[Path | None, target("-o", "--output", "", hidden=True)]
"""How `--picture` was called before; scripts may say so."""
Seed = Annotated[int, number("--seed", "breaks ties; the same seed gives the same schedule")]
NoCache = Annotated[bool, option("--no-cache", "neither use nor keep answers of solvers on disk")]
MinPiece = Annotated[
    int,
    option(
        "--min-piece",
        "with simulated times: no chunk of average size is cut into smaller pieces; 0: as many as gain",
        parser=_checked(_least_piece),
        metavar="SIZE",
        show_default="32KiB",
    ),
]
RateTolerance = Annotated[
    str | None,
    option(
        "--rate-tolerance",
        "chunk schedules: part of its rate that a link may lose to count in a coarser unit, 0 for none; by "
        "default 1/20 where rates are odd",
    ),
]
Deadline = Annotated[
    RunningDeadline | None,
    option(
        "--deadline",
        "stop after so many seconds; no limit by default",
        parser=lambda text: RunningDeadline.after(seconds(text)),
        metavar="SECONDS",
    ),
]


@dataclass(frozen=True, slots=True)
class FabricOptions:
    """The options of every command about a topology; `synth.cli.inputs.load_fabric` reads them."""

    spec: Spec
    ranks: Ranks = None
    relays: Relays = False
    without_link: WithoutLink = None
    without_rank: WithoutRank = None
    gpu: Gpu = None
    pcie: Pcie = None
    between_sockets: BetweenSockets = None
    numa_per_socket: NumaPerSocket = None
    rates: Rates = "datasheet"
    no_in_network: NoInNetwork = False


OF_MACHINES = ("gpu", "pcie", "between_sockets", "numa_per_socket", "rates", "no_in_network")
"""The options that say what a machine is; the others say which part of it is meant, and what is gone."""


def about_a_fabric(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the spec and the named `FabricOptions` (all, where none is named), as one value.

    The command has a parameter `fabric`, in whose place the spec stands; the others stand before `--json`.
    Where `fabric` has a default, the spec may be left out, and is empty then.
    """
    hints = get_type_hints(FabricOptions, include_extras=True)
    spec, *options = (
        Parameter(
            field.name,
            Parameter.POSITIONAL_OR_KEYWORD,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(FabricOptions)
        if field.name == "spec" or not names or field.name in names
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        one = spec if own["fabric"].default is Parameter.empty else spec.replace(default="")
        parts = {"fabric": [one], "as_json": [*options, own["as_json"]]}
        parameters = [each for name, parameter in own.items() for each in parts.get(name, [parameter])]

        @wraps(command)
        def with_one_value(**given: Any) -> None:
            fabric = FabricOptions(**{each.name: given.pop(each.name) for each in (spec, *options)})
            until = given.get("deadline")
            with run_until(until if isinstance(until, RunningDeadline) else running()):
                command(fabric=fabric, **given)

        return _as_typer_reads(with_one_value, parameters)

    return decorate


def with_voice(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command `-v` and `-q`, in which it takes no part."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    voice = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=False, annotation=kind)
        for name, kind in (("verbose", Verbose), ("quiet", Quiet))
    ]

    @wraps(command)
    def with_its_voice(*, verbose: bool, quiet: bool, **given: Any) -> None:
        if verbose and quiet:
            raise InputError("-v and -q: only one of them can be meant")
        with speaking(verbose=verbose, quiet=quiet):
            command(**given)

    return _as_typer_reads(with_its_voice, [*own, *voice])


def _as_typer_reads(command: Callable[..., None], parameters: Sequence[Parameter]) -> Callable[..., None]:
    """A command with other parameters: typer reads the signature, and annotations by name."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def rank_list(text: str, option: str = "--ranks") -> tuple[int, ...]:
    """The numbers that an option names, those of ranks unless it says otherwise.

    Raises:
        InputError: not numbers or ascending ranges, or more than a topology may have.
    """
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise InputError(f"{option} {text}: must be numbers or ranges such as 0,1,3 or 0-5, got {part!r}")
        if int(last or first) < int(first):
            raise InputError(f"{option} {text}: ranges must go up, got {part!r}")
        if len(ranks) + int(last or first) - int(first) >= MOST_RANKS:
            raise InputError(f"{option} {part}: must name at most {MOST_RANKS} ranks in all")
        ranks.extend(range(int(first), int(last or first) + 1))
    return tuple(ranks)


def number_of(option: str, text: str, keeps: Callable[[Fraction], bool], rule: str) -> Fraction:
    """An option's exact number.

    Raises:
        InputError: it is none, or does not keep the rule.
    """
    from arborcast.synth.formats.numerals import parse_number

    try:
        value = parse_number(text)
    except ValueError as error:
        raise InputError(f"{option}: {error}") from error
    if not keeps(value):
        raise InputError(f"{option}: {rule}, got {text}")
    return value


def part_of_one(option: str, text: str | None) -> Fraction | None:
    """An option's exact number, at least 0 and below 1; None where the option was not given."""
    if text is None:
        return None
    return number_of(option, text, lambda part: 0 <= part < 1, "must be at least 0 and below 1")


def refuse(rule: str, **given: object) -> None:
    """Refuse options that were given, those neither None nor False, for a reason that they share.

    Raises:
        InputError: names the first of them.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            told = "" if value is True else f" {value}"
            raise InputError(f"--{name.replace('_', '-')}{told}: {rule}")
