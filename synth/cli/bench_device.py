"""`synth bench device`: the kernel for GPUs, checked and timed beside NCCL or RCCL on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from arborcast.synth.cli.console import Columns, answer, progress, table_of
from arborcast.synth.cli.inputs import NotCorrectError, check_found, collective_on, load_fabric
from arborcast.synth.cli.options import (
    OF_MACHINES,
    AsJson,
    FabricOptions,
    Root,
    about_a_fabric,
    collective_name,
    count,
    duration,
    option,
    rank_list,
    target,
)
from arborcast.synth.errors import InputError
from arborcast.synth.formats.sizes import format_size
from arborcast.synth.formats.words import counted

_OPTIONS = [name for name in OF_MACHINES if name != "no_in_network"]


@about_a_fabric("ranks", "without_link", "without_rank", *_OPTIONS)
def bench_device(
    fabric: FabricOptions,
    collectives: Annotated[
        list[str],
        typer.Argument(parser=collective_name, metavar="COLLECTIVE...", help="one or several, of any kind"),
    ],
    root: Root = None,
    dtypes: Annotated[
        str | None,
        option("--dtypes", "of elements, such as bfloat16,float32; the first is timed; by default all"),
    ] = None,
    lengths: Annotated[
        str | None,
        option("--lengths", "elements of a block to check, such as 1,37,4096; by default few to many"),
    ] = None,
    sizes: Annotated[str, option("--sizes", "one size to time or a range that doubles")] = "1KiB:256MiB",
    groups: Annotated[int, count("--groups", "parts of the chunks, each with programs of its own")] = 4,
    lanes: Annotated[int, count("--lanes", "programs that share each chunk")] = 4,
    piece: Annotated[int, count("--piece", "the most elements of a piece")] = 1 << 14,
    repeats: Annotated[int, count("--repeats", "measurements of each, in turns; the median counts")] = 9,
    iters: Annotated[int, count("-n", "--iters", "calls of each measurement, back to back")] = 20,
    on: Annotated[
        Literal["cuda", "cpu"], option("--on", "cpu: correctness alone, in Triton's interpreter")
    ] = "cuda",
    timeout: Annotated[float, duration("-T", "--timeout", "abort after so long")] = 1800,
    output: Annotated[Path | None, target("-o", "--output", "write the results here")] = None,
    topology: Annotated[
        Path | None,
        target("--topology", "write the fabric here with latencies and rates that give the kernel's times"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the kernel for GPUs; time it beside NCCL.

    It starts a process for each rank; switches only forward. Where there are fewer GPUs than ranks they are
    shared, and no times are compared.
    """
    from arborcast import synth
    from arborcast.backends.errors import ExecutionError
    from arborcast.backends.measure.device_bench import (
        LENGTHS,
        TYPES,
        DeviceJob,
        fitted,
        gpus_for,
        measure_device,
    )
    from arborcast.backends.measure.job import RunError
    from arborcast.synth.collective import Kind
    from arborcast.synth.formats.atomic import write_atomically
    from arborcast.synth.formats.sizes import size_range
    from arborcast.synth.formats.topology_text import topology_to_yaml

    timed = size_range(sizes)
    types = TYPES if dtypes is None else tuple(dict.fromkeys(dtypes.split(",")))
    if unknown := [name for name in types if name not in TYPES]:
        raise InputError(f"--dtypes {dtypes}: must be of {', '.join(TYPES)}, got {unknown[0]!r}")
    checked = LENGTHS[on] if lengths is None else rank_list(lengths, "--lengths")
    found_fabric = load_fabric(replace(fabric, no_in_network=True))
    asked = [collective_on(name, found_fabric, root) for name in dict.fromkeys(collectives)]
    if any(it.kind is Kind.CUSTOM for it in asked):
        raise InputError("bench device: COLLECTIVE must be of a kind that torch has, got blocks in a file")
    gpus = gpus_for(on)
    ranks = found_fabric.topology.ranks
    if topology is not None and (gpus < ranks or len(timed) < 2):
        raise InputError("--topology: needs times of two sizes, with a GPU for each rank")
    job = DeviceJob(
        device=on,
        dtypes=types,
        lengths=checked,
        times=gpus >= ranks,
        sizes=timed,
        groups=groups,
        lanes=lanes,
        piece=piece,
        repeats=repeats,
        iterations=iters,
        timeout_s=timeout,
    )
    schedules = []
    for collective in asked:
        with progress(f"solving {collective.kind}", quiet=as_json):
            schedules.append(synth.solve(found_fabric.topology, collective))
        check_found(schedules[-1])
    try:
        with progress("measuring", quiet=as_json):
            told = measure_device(schedules, job, gpus=gpus)
    except (RunError, ExecutionError) as error:
        raise NotCorrectError(str(error)) from error
    if output is not None:
        write_atomically(output, json.dumps(told, indent=1) + "\n")
    answer(as_json, told, lambda: result_lines(told, output))
    if topology is not None:
        first = schedules[0]
        times = {
            it["bytes"]: it["time_us"]
            for it in told["rows"]
            if (it["collective"], it["by"], it["graph"]) == (first.collective.kind, "kernel", False)
        }
        head = [f"Measured by `synth bench device`: {first.collective.kind} by the kernel."]
        found = fitted(first, times, f"measured-{topology.stem}")
        write_atomically(topology, topology_to_yaml(found, head=head))
    wrong = sum(it["wrong"] for it in told["checks"])
    if wrong:
        raise NotCorrectError(f"bench device: {wrong} wrong elements")


def result_lines(told: Mapping[str, Any], output: Path | None) -> Iterator[str]:
    """What the command prints."""
    device, versions = told["device"], told["versions"]
    library = f", NCCL {device['nccl']}" if device["nccl"] else ""
    where = f"{device['count']} x {device['name']}" if device["count"] else device["name"]
    yield f"{device['ranks']} ranks on {where}"
    yield f"torch {versions['torch']}, triton {versions['triton']}{library}"
    for schedule in told["schedules"]:
        wrong = [it["wrong"] for it in told["checks"] if it["collective"] == schedule["collective"]]
        yield (
            f"{schedule['collective']} by {schedule['method']}: {wrong.count(0)} of {len(wrong)} types "
            f"right, {counted(sum(wrong), 'wrong element')}"
        )
    if told["rows"]:
        yield from _times(told["rows"])
    elif device["count"]:
        yield f"no times: {device['ranks']} ranks share {counted(device['count'], 'GPU')}"
    else:
        yield "no times: an interpreter's say nothing"
    if output is not None:
        yield f"written   {output}"


def _times(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each size, alone and in a graph, of the kernel beside the library."""
    by = {(it["collective"], it["bytes"], it["graph"], it["by"] == "kernel"): it for it in rows}
    library = next(it["by"] for it in rows if it["by"] != "kernel")

    def told(row: Mapping[str, Any]) -> str:
        return f"{row['time_us']:.1f} +-{row['spread'] / 2:.1f}"

    pairs = [(it, by[*key[:3], False]) for key, it in by.items() if key[3]]
    columns: Columns = {
        "collective": lambda pair: pair[0]["collective"],
        "graph": lambda pair: "yes" if pair[0]["graph"] else "no",
        "size": lambda pair: format_size(pair[0]["bytes"]),
        "kernel us": lambda pair: told(pair[0]),
        f"{library} us": lambda pair: told(pair[1]),
        "kernel GB/s": lambda pair: f"{pair[0]['algbw']:.2f}",
        "times as fast": lambda pair: f"{pair[1]['time_us'] / pair[0]['time_us']:.2f}",
    }
    yield from table_of(pairs, columns, left=2)
    yield "us: median and half of the spread"
