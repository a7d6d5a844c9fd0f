"""`synth tune`: a tuning file for stock NCCL, from measurements or from its own model, and its plugin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from arborcast.synth.cli.console import Columns, answer, table_of
from arborcast.synth.cli.inputs import load_fabric, planned_by_nccl, text_of
from arborcast.synth.cli.options import AsJson, FabricOptions, Seed, option, target
from arborcast.synth.errors import CollectiveError, InputError
from arborcast.synth.formats.documents import picked
from arborcast.synth.formats.sizes import format_size

if TYPE_CHECKING:
    from arborcast.synth.baselines.nccl_tuning import TuningRow

To: TypeAlias = Literal["nccl", "ncclx"]
MAX_LOG_BYTES = 16 << 20
OWN = "default"
"""How a table is named in which NCCL chose for itself."""


def tune(
    fabric: Annotated[
        str | None,
        typer.Argument(
            help="catalog name or file, for NCCL's own planning model; none with --from-log",
            metavar="[FABRIC]",
        ),
    ] = None,
    from_log: Annotated[
        list[str] | None,
        option(
            "--from-log",
            "what nccl-tests printed when NCCL was held to an algorithm and a protocol (NCCL_ALGO, "
            "NCCL_PROTO), such as ring/ll128=FILE, or to channels, too: ring/ll128/8=FILE; "
            f"{OWN}=FILE: when it chose for itself. May be repeated",
            metavar="SETTING=FILE",
        ),
    ] = None,
    output: Annotated[Path | None, target("-o", "--output", "write the tuning file here")] = None,
    to: Annotated[To, option("--to", "nccl: plugins of NCCL and RCCL; ncclx: the tuner in NCCLX")] = "nccl",
    plugin: Annotated[
        Path | None,
        target(
            "--plugin", "build our tuner plugin here, such as libnccl-tuner-arborcast.so (needs a C compiler)"
        ),
    ] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Write a tuning file for stock NCCL.

    It says which algorithm, protocol and channels serve which sizes. What no row is about is left to NCCL.
    NCCL itself is not run.
    """
    from arborcast.synth.baselines.nccl_tuning import written

    if (fabric is None) == (not from_log):
        raise InputError("tune: needs a fabric or --from-log, and not both")
    if fabric is not None:
        source, rows = (
            "by NCCL's planning model, re-implemented; NCCL itself was not run",
            _of_model(fabric, seed),
        )
    else:
        source, rows = "by measurements with nccl-tests", _of_logs(from_log or ())
    text = written(rows, source, to)
    if output is not None:
        from arborcast.synth.formats.atomic import write_atomically

        write_atomically(output, text)
    if plugin is not None:
        from arborcast.backends.programs.nccl_tuner import build

        build(plugin)
    answer(
        as_json,
        {
            "source": source,
            "rows": [
                {
                    "collective": row.kind.value,
                    **picked(row, "least_bytes", "most_bytes", "hosts", "ranks"),
                    "algorithm": row.setting.algorithm,
                    "protocol": row.setting.protocol.value,
                    "channels": row.setting.channels or None,
                }
                for row in rows
            ],
            "file": text_of(output),
            "plugin": text_of(plugin),
        },
        lambda: _lines(rows, source, text, output, plugin, to),
    )


def _of_model(fabric: str, seed: int) -> list[TuningRow]:
    from arborcast.synth.baselines.nccl_tuning import rows_of_model

    try:
        return rows_of_model(planned_by_nccl(load_fabric(FabricOptions(fabric))), seed=seed)
    except CollectiveError as error:
        raise InputError(f"{fabric}: {error}") from error


def _of_logs(from_log: Sequence[str]) -> list[TuningRow]:
    from arborcast.synth.baselines.nccl_tuning import NcclSetting, read_table, rows_of_tables
    from arborcast.synth.formats.reading import read_text

    tables = []
    for said in from_log:
        name, equals, file = said.partition("=")
        if not equals or not file:
            raise InputError(
                f"--from-log {said}: must be SETTING=FILE, such as ring/ll128=ring.txt or {OWN}=own.txt"
            )
        try:
            setting = None if name == OWN else NcclSetting.of(name)
        except InputError as error:
            raise InputError(f"--from-log {said}: {error}") from error
        tables.append(read_table(read_text(Path(file), max_bytes=MAX_LOG_BYTES), file, setting))
    return rows_of_tables(tables)


def _lines(
    rows: Sequence[TuningRow], source: str, text: str, output: Path | None, plugin: Path | None, to: To
) -> Iterator[str]:
    from arborcast.synth.baselines.nccl_tuning import MOST_BYTES

    columns: Columns = {
        "collective": lambda row: row.kind.value,
        "from": lambda row: format_size(row.least_bytes),
        "to": lambda row: "any" if row.most_bytes == MOST_BYTES else format_size(row.most_bytes),
        "algorithm": lambda row: row.setting.algorithm,
        "protocol": lambda row: row.setting.protocol.value,
        "channels": lambda row: row.setting.channels or "NCCL's",
        "hosts": lambda row: row.hosts,
        "ranks": lambda row: row.ranks,
    }
    yield from table_of(rows, columns)
    if not rows:
        yield "no row: NCCL's own choice was never slower by more than 2 %"
    yield ""
    yield source
    if plugin is not None:
        yield f"built     {plugin}"
    if output is None:
        yield ""
        yield from text.splitlines()
        return
    yield f"written   {output}"
    where = plugin or "libnccl-tuner-arborcast.so"
    used = {
        "nccl": f"NCCL_TUNER_PLUGIN={where} NCCL_TUNER_CONFIG_FILE={output}",
        "ncclx": f"NCCLX_TUNER_CONFIG_FILE={output}",
    }[to]
    yield f"use       {used}"
