"""Whatever is wrong with what a user says: one line that names it, status 2, nothing on standard output."""

from __future__ import annotations

import importlib
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from arborcast import pipeline, synth
from arborcast.pipeline.profiles import Layer, Profile
from arborcast.synth.chunks.solvers import jobs
from arborcast.topologies import load
from tests.support.commands import Command, refused

EXCHANGE = Path(__file__).parents[2] / "examples" / "collectives" / "neighbour-exchange.yaml"

WRONG: list[list[str]] = yaml.safe_load(Path(__file__).with_name("bad_input.yaml").read_text("utf-8"))


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
    said = ran.err.replace(places["folder"], "").replace("float8_", "float8")  # a type's name in torch
    assert "_" not in said, "an argument of Python"


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
