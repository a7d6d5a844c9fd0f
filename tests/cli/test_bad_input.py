"""Whatever is wrong with what a user says: one line that names it, status 2, nothing on standard output."""

from __future__ import annotations

import importlib
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from arborcast import pipeline, synth
from arborcast.pipeline.profiles import Layer, Profile
from arborcast.synth.chunks.solvers import jobs
from arborcast.topologies import load
from tests.support.commands import Command, refused

EXCHANGE = Path(__file__).parents[2] / "examples" / "collectives" / "neighbour-exchange.yaml"

WRONG: list[tuple[str, ...]] = [
    # Words of the command itself.
    ("frobnicate", "frobnicate"),
    ("verify", "file"),
    ("bound ring:4 magic -q", "magic"),
    ("bound ring:4 allgather -q -v", "-v and -q: only one of them"),
    ("cache destroy", "'where', 'clear'", "destroy"),
    # Topologies, fragments and roots.
    ("bound dgx7 broadcast", "dgx7", "dgx1"),
    ("show dgx1 --ranks 0,5-2", "--ranks 0,5-2", "must go up", "'5-2'"),
    ("show dgx1 --rates guessed", "--rates", "'datasheet', 'nccl'", "'guessed'"),
    ("bound dgx1 broadcast --ranks 0,9", "0..7", "9"),
    ("bound dgx1 broadcast --ranks 0,0", "once", "0"),
    ("bound dgx1 broadcast --ranks 0,x", "--ranks", "'x'"),
    ("bound dgx1 broadcast --ranks 0", "at least 2 ranks", "1"),
    ("bound dgx1 broadcast --ranks 0-99999999999", "--ranks", "65536"),
    ("bound dgx1 broadcast --root 8", "root", "0..7", "8"),
    ("bound dgx1 broadcast --root one", "one"),
    ("bound ring:4 All_Reduce --root 1", "--root 1: allreduce has no root"),
    # Collectives.
    ("bound dgx1 brodcast", "brodcast", "broadcast, reduce"),
    ("solve ring:4 allgathr", "did you mean allgather?"),
    ("pareto dgx1 sendrecv", "sendrecv", "must be one of"),
    ("alltoallv ring:4 missing.csv", "missing.csv: cannot be read"),
    ("alltoallv ring:4 {wrong}", "wrong.json: must be rows of sizes"),
    ("bound dgx1 custom", "custom: needs its blocks"),
    ("bound dgx1 {folder}/absent.yaml", "absent.yaml: cannot be read"),
    ("bound ring:4 {exchange}", "neighbour-exchange.yaml: blocks[0].to: rank must be in 0..3"),
    ("bound torus:4x4 {exchange} --ranks 0-3 --relays", "must be in 0..3, got 4"),
    ("bound dgx1 {exchange} --root 1", "--root 1:", "has no root"),
    ("solve dgx1 {exchange} --method trees", "custom: trees serve broadcast"),
    ("view {folder}/absent.json", "absent.json: cannot be read"),
    ("view {exchange} --sizes 1KiB:1GiB", "--sizes 1KiB:1GiB: at most 16 sizes are shown, got 21"),
    ("view {exchange} {exchange} {exchange}", "at most 2 schedules are shown side by side, got 3"),
    # What a method may be told.
    ("solve dgx1 broadcast --method magic", "--method", "'trees'", "got 'magic'"),
    ("solve dgx1 allreduce --root 3", "--root 3", "allreduce has no root"),
    ("solve dgx1 alltoall --method trees", "alltoall"),
    ("solve dgx1 alltoall --max-trees 1", "alltoall: takes no maximum number of trees"),
    ("solve dgx1 broadcast --max-trees 0", "0"),
    ("solve dgx1 broadcast --method ring --max-trees 1", "ring", "number of trees"),
    ("solve dgx1 broadcast --method ring --size 1MiB", "ring", "takes no size", "auto"),
    ("solve ring:4 allgather --method trees --size 1KiB", "method trees: takes no size, which is for auto"),
    ("solve ring:66 allgather --method trees --size 1KiB", "method trees: takes no size, which is for auto"),
    ("solve dgx1 broadcast --size 12Q", "12Q"),
    ("solve dgx1 broadcast --epsilon 1/9", "auto", "epsilon", "mwu"),
    ("solve dgx1 broadcast --tolerance 2", "--tolerance", "2"),
    (
        "solve ring:3 broadcast --tolerance 1e-999999999",
        "--tolerance",
        "at most 60",
    ),  # minutes, as a Fraction
    ("solve dgx1 broadcast --deadline soon", "--deadline", "soon"),
    ("solve dgx1 broadcast --deadline 0", "--deadline", "positive", "'0'"),
    ("solve dgx1 broadcast --form round", "--form", "'explicit'", "'round'"),
    ("solve ring:4 alltoall --form implicit --method trees", "method trees", "made by routes"),
    ("solve ring:4 allgather --form implicit --method routes", "method routes", "made by trees"),
    ("solve ring:4 allgather --form implicit --method ring", "method ring", "made by trees"),
    ("solve ring:4 allgather --form implicit --method trees --size 1KiB", "takes no size, which is for auto"),
    ("solve dgx1 allgather --method smt", "chunks, steps, rounds", "synth pareto"),
    ("solve dgx1 allgather --chunks 2", "auto", "chunks", "smt"),
    ("solve dgx1 allgather --method sat --chunks 0 --steps 2 --rounds 3", "chunks", "at least 1", "0"),
    (
        "solve ring:3 broadcast --method ilp --proof {folder}/x --chunks 2 --steps 2 --rounds 2",
        "takes no proof",
    ),
    ("pareto dgx1 allgather --jobs 0", "jobs", "0"),
    ("pareto dgx1 allgather --deadline 0", "--deadline", "positive", "'0'"),
    ("pareto dgx1 allgather --max-steps 0", "max-steps", "at least 1", "0"),
    ("pareto dgx1 allgather --tolerance 2", "--tolerance", "below 1", "2"),
    ("pareto dgx1 allgather --dask tcp://127.0.0.1:1", "--dask", "127.0.0.1:1"),
    ("groups dgx1 --ranks 0-3 --group allreduce:0,4", "rank must be in 0..3, got 4"),
    ("sweep ring:4 -o {folder}/t --collectives allsum", "allsum"),
    ("sweep ring:4 -o {folder}/t --collectives all-reduce,broadcst", "did you mean broadcast?"),
    ("sweep ring:4 -o {folder}/t --jobs 0", "--jobs 0"),
    ("sweep ring:4 -o {folder}/t --fragments 5", "2 to 4 ranks, got 5"),
    ("sweep ring:4 -o {folder}/t --fragments x", "--fragments x: must be numbers"),
    # Files that are read and written; where an answer goes is seen before the work (1,024 ranks take long).
    ("verify no-such-file.json", "no-such-file.json"),
    ("verify {future}", "{future}", "arborcast.schedule/99", "arborcast.schedule/1"),
    ("verify {damaged}", "must be JSON"),
    ("verify {file} --collective allreduce", "--collective allreduce: is for programs of other runtimes"),
    ("verify {exchange} --picture {folder}/x.svg", "--picture", "is for programs of other runtimes"),
    ("export {file} -o {folder}/x.xml --protocol TCP", "--protocol", "'LL128'", "'TCP'"),
    ("export {file} -o {folder}/x.xml --chunks 0", "--chunks 0: must be at least 1"),
    ("export {file} -o {folder}/x.xml --root 1", "--root 1: the schedule has its own"),
    ("export {file} -o {folder}/x.xml --no-in-network", "--no-in-network: is for tables"),
    ("export {file} -o missing/x.xml", "missing", "does not exist"),
    ("export ring:4 allreduce -o {folder}/t --chunks 8", "--chunks", "are chosen"),
    ("export no-such.json -o {folder}/x.xml", "no-such.json"),
    ("export {file} --to mscclpp -o {folder}/x.json --ranks-per-host 0", "--ranks-per-host 0: must be at"),
    ("export {file} --to goal -o {folder}/x.goal --sizes 1KiB:2KiB", "simulates one size"),
    ("export {file} --to nccl-graph -o {folder}/x.xml --chunks 8", "--chunks: is nothing that nccl-graph"),
    ("export ring:4 allreduce --to sccl -o {folder}/t", "--to sccl", "tables are exported for msccl"),
    ("import {file} --topology ring:4 -o {folder}/x.json", "of another runtime, got one of ours"),
    ("verify {exchange}", "must be a schedule", "got a collective"),
    ("simulate no.json -o /no/such/folder/x.svg", "/no/such/folder"),
    ("simulate {file} --service lifo", "service 'lifo'", "worst:N"),
    ("simulate {file} --frame 4KX", "4KX"),
    ("simulate {file} --frame 0", "size '0'", "from 1 to 1 EiB"),
    ("solve ring:3 broadcast -o /no/such/folder/x.json", "/no/such/folder"),
    ("solve dgx-a100:boxes=128 allgather -o /no/such/folder/x.json", "does not exist"),
    ("solve ring:3 broadcast --proof {folder}", "must be a file", "folder"),
    ("pareto dgx1 allgather -o /nowhere/at/all", "/nowhere/at"),
    ("run {file} --dtype half", "--dtype", "'bfloat16'", "'half'"),
    ("run {file} --op xor", "--op", "'avg'", "'xor'"),
    ("run {file} --size 1KiB:1", "the last must not be below the first"),
    ("run {file} --sizes 1KiB:1", "the last must not be below the first"),
    ("program {file} --dtype half", "--dtype", "'bfloat16'", "'half'"),
    # Plans.
    ("plan {model} ring:4 --stages 9", "9", "8"),
    ("plan {model} ring:4 --memory 100MiB", "stage", "100.00 MiB", "too many"),
    ("plan {model} ring:4 --memory 1GiB --offload 0", "--offload", "positive rate in GB/s", "got '0'"),
    ("plan {model} ring:4 --memory 1GiB --offload 12 --order zb-v", "offload", "zb-v", "got 12 GB/s"),
    ("plan {model} ring:4 --memory 1GiB --offload fast", "--offload", "positive rate in GB/s", "got 'fast'"),
    ("plan {model} ring:4 --offload 12", "offload", "without a limit of memory", "got 12 GB/s"),
    ("plan {model} ring:4 --method hetpipe", "--method", "'pipedream', 'rannc'", "'hetpipe'"),
    ("plan {model} ring:4 --order zigzag", "--order", "'1f1b', 'pe', 'gpipe'", "'zigzag'"),
    ("plan bert-base ring:4 --device abacus", "abacus", "must be one of"),
    ("plan {model} ring:4 --device v100", "device v100", "costs already"),
    ("plan {model} ring:4 --microbatches 1000", "1000", "64"),
    ("plan {model} ring:4 -o missing/plan.json", "missing", "does not exist"),
    ("plan {model} ring:4 --intra", "{model}", "with --intra must be one of vgg19"),
    ("plan bert-base ring:4 --intra --order pe", "--order", "must not be given with --intra"),
    ("plan bert-base ring:4 --intra --batch 0", "--batch: must be at least 1, got 0"),
    ("plan bert-base ring:4 --intra --microbatches -2", "--microbatches: must be at least 1, got -2"),
    ("plan bert-base ring:4 --intra --microbatches 0", "--microbatches: must be at least 1, got 0"),
    ("plan bert-base ring:4 --intra --stages 0", "--stages: must be at least 1, got 0"),
    ("plan bert-base ring:4 --given plan.json", "--given", "must be given with --intra only"),
    ("plan nothing ring:4", "must be a profile file, one of vgg19"),
    ("plan missing.json ring:4", "missing.json: cannot be read"),
    ("plan missing.py:model ring:4", "missing.py: there is no such file"),
    # Benches.
    ("bench run {file} -b 16 -e 8", "maxbytes 8: must not be below minbytes, got 16"),
    ("bench run {file} -f 1", "stepfactor 1: must be at least 2"),
    ("bench run {file} -f 2 -i 8", "-i 8 and -f 2: only one of them says how sizes grow"),
    ("bench run {file} -d half", "--datatype", "'float'", "'half'"),
    ("bench run {file} -o xor", "--op", "'prod'", "'xor'"),
    ("bench run {file} -a 4", "--average", "'3'", "'4'"),
    ("bench run {file} -c 2", "-c", "'0', '1'", "'2'"),
    ("bench run {file} --via air", "--via", "'messages'", "'air'"),
    ("bench run {wrong} -b 8 -e 8", "wrong.json: not correct: "),
    ("bench run {folder}/none.json -b 8", "none.json: cannot be read"),
    ("probe --transport pigeon", "--transport", "'sockets'", "'pigeon'"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the lines name in braces: files as the command finds them, and an empty place for others."""
    folder = tmp_path_factory.mktemp("bad")
    for name in ("old", "new"):
        (folder / name).mkdir()
    schedule = synth.solve(load("full:3"), "broadcast", form="explicit")
    files = {name: folder / f"{name}.json" for name in ("file", "wrong", "damaged", "future", "model")}
    synth.write_schedule(schedule, files["file"])
    synth.write_schedule(replace(schedule, transfers=schedule.transfers[1:]), files["wrong"])
    text = files["file"].read_text()
    files["damaged"].write_text(text[:-20])
    files["future"].write_text(json.dumps(json.loads(text) | {"format": "arborcast.schedule/99"}))
    mib = 1 << 20
    layers = [
        Layer(f"block.{index}", 1000.0, 2000.0, mib, 8 * mib, 100 * mib, 100 * mib, 200 * mib)
        for index in range(8)
    ]
    pipeline.write_profile(Profile("eight", 64, tuple(layers), source="drawn"), files["model"])
    return {name: str(path) for name, path in (files | {"folder": folder, "exchange": EXCHANGE}).items()}


@pytest.mark.parametrize(("line", "facts"), [(line, facts) for line, *facts in WRONG])
def test_wrong_input_is_one_line_and_status_2(
    command: Command, places: dict[str, str], line: str, facts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "CONNECT_S", 0.5)  # Dask asks again and again meanwhile
    ran = command(*(word.format(**places) for word in shlex.split(line)))
    refused(ran, *(fact.format(**places) for fact in facts))
    assert "_" not in ran.err.replace(places["folder"], ""), "an argument of Python"


@pytest.mark.parametrize(
    ("option", "table"),
    [
        ("plan.OrderName", "arborcast.pipeline.order.ORDERS"),
        ("plan.MethodName", "arborcast.pipeline.planning.plan_comparison.EVERY"),
        ("options.RatesName", "arborcast.topologies.rates.Rates"),
        ("options.DataTypeName", "arborcast.backends.measure.job.ITEM_BYTES"),
        ("schedule_files.ReductionName", "arborcast.backends.measure.job.Reduction"),
    ],
)
def test_a_fixed_set_is_the_table_that_it_stands_for(option: str, table: str) -> None:
    """The command names them itself, so that --help loads nothing."""

    def named(path: str) -> Any:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    assert set(get_args(named(f"arborcast.synth.cli.{option}"))) - {"auto", "all"} == set(named(table))
