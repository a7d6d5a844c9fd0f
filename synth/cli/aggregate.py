"""`synth aggregate`: the process of a switch that adds and multicasts, until it is told to end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, TypeVar

from arborcast.synth.cli.console import print_json, print_lines
from arborcast.synth.cli.options import AsJson, number, number_of, option
from arborcast.synth.errors import InputError

TOKEN_VARIABLE = "ARBORCAST_AGGREGATOR_TOKEN"
_T = TypeVar("_T")


def aggregate(
    listen: Annotated[
        str, option("--listen", "where ranks reach it; port 0 for any free one", metavar="HOST:PORT")
    ],
    trees: Annotated[
        int | None, number("--trees", "chunks of one schedule that it adds or multicasts")
    ] = None,
    adder: Annotated[str | None, option("--adder", "sums that it makes at most", metavar="GB/S")] = None,
    types: Annotated[
        str | None, option("--types", "elements that it adds, such as float32,int32", metavar="TYPE,...")
    ] = None,
    memory: Annotated[str, option("--memory", "for what of one call is under way")] = "1GiB",
    jobs: Annotated[int, number("--jobs", "process groups that it serves at a time")] = 64,
    as_json: AsJson = False,
) -> None:
    """Be a switch that adds and multicasts for process groups.

    It prints where it listens, and the token that groups need: that of ARBORCAST_AGGREGATOR_TOKEN, else a new
    one. Groups find it by ARBORCAST_AGGREGATORS=HOST:PORT,..., one for each able switch of their fabric.
    """
    from arborcast.backends.options import Options, parse_address
    from arborcast.synth.formats.sizes import parse_size

    host, port = _read("--listen", listen, parse_address)
    for name, value in (("--trees", trees), ("--jobs", jobs)):
        if value is not None and value < 1:
            raise InputError(f"{name} {value}: must be at least 1")
    rate = None if adder is None else number_of("--adder", adder, lambda part: part > 0, "must be positive")
    token = Options.from_environment({TOKEN_VARIABLE: os.environ.get(TOKEN_VARIABLE, "")}).aggregator_token
    memory_bytes = parse_size(memory)

    import torch

    from arborcast.backends.aggregation.aggregator import Aggregator
    from arborcast.backends.aggregation.job import Abilities
    from arborcast.backends.errors import ExecutionError
    from arborcast.backends.tensors.torch_reduction import TYPE_NAMES

    torch.set_num_threads(1)
    known = () if types is None else tuple(types.replace(" ", "").split(","))
    if unknown := set(known) - set(TYPE_NAMES):
        raise InputError(f"--types: must be some of {', '.join(TYPE_NAMES)}, got {sorted(unknown)[0]!r:.60}")
    abilities = Abilities(trees, rate, known, memory_bytes, jobs)
    try:
        aggregator = Aggregator(
            host, port, token=None if token is None else bytes.fromhex(token), abilities=abilities
        )
    except ExecutionError as error:
        raise InputError(f"--listen {listen}: {error}") from error
    for number_of_signal in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number_of_signal, lambda *_: aggregator.close())
    shown = aggregator.token.hex()
    if as_json:
        print_json({"host": aggregator.host, "port": aggregator.port, "token": shown})
    else:
        said = f"token {shown}" if token is None else f"token of {TOKEN_VARIABLE}"
        print_lines([f"listening at {aggregator.host}:{aggregator.port}, {said}"])
    sys.stdout.flush()
    aggregator.serve()


def _read(name: str, text: str, parse: Callable[[str], _T]) -> _T:
    try:
        return parse(text)
    except ValueError as error:
        raise InputError(f"{name} {text}: {error}") from error
