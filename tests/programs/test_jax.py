"""Schedules as modules for JAX: tables replayed by numpy, modules run by JAX beside what it has itself.

What JAX lowers is read back as the schedule; programs that others could have written are judged.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.backends.lowering.layout import blocks_in
from arborcast.backends.programs import stable_hlo
from arborcast.backends.programs.colouring import colours_of
from arborcast.backends.programs.jax_module import export
from arborcast.backends.programs.program import ProgramError, WrongProgramError
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.schedule import Schedule
from arborcast.topologies import load
from tests.support.commands import Command, refused
from tests.support.definition import define
from tests.support.drawn_schedules import schedules
from tests.support.refusals import refuses

Numbers = npt.NDArray[np.int64]
has_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
TAKE_BLOCKS = (Kind.REDUCE_SCATTER, Kind.SCATTER, Kind.ALLTOALL, Kind.CUSTOM)


@dataclass(frozen=True)
class Module:
    """What a module says in literals, and where its result lies."""

    said: dict[str, Any]
    output: slice

    @classmethod
    def of(cls, schedule: AnySchedule, **wishes: Any) -> Module:
        text = export(schedule, **wishes).contents[""]
        assert isinstance(text, str)
        said = {
            entry.targets[0].id: ast.literal_eval(entry.value)
            for entry in ast.parse(text).body
            if isinstance(entry, ast.Assign) and isinstance(entry.targets[0], ast.Name)
        }
        start, stop = map(int, re.findall(r"memory\[(\d+):(\d+)\]", text)[0])
        return cls(said, slice(start, stop))

    def run(self, given: Numbers) -> Numbers:
        """What ranks have at the end, who have these rows at the beginning."""
        ranks = range(self.said["RANKS"])
        memory = np.full((len(ranks), self.said["ROWS"] + self.said["SPARE"]), 0)
        memory[:, : given.shape[1]] = given
        for local, rounds in self.said["STEPS"]:
            for adds, source, target in local:
                for rank in ranks:
                    part = memory[rank, source[rank]]
                    memory[rank, target[rank]] = part + adds * memory[rank, target[rank]]
            before = memory.copy()
            for pairs, source, target in rounds:
                for column in zip(*pairs, strict=True):
                    assert len({*column}) == len(pairs)
                came = {dst: before[src, source[src]] for src, dst in pairs}
                for rank in ranks:
                    assert len({*source[rank]}) == len({*target[rank]}) == len(target[rank])
                    memory[rank, target[rank]] = came.get(rank, 0)
        return memory[:, self.output]


def numbers(module: Module, collective: Collective) -> Numbers:
    """What ranks are given: of a block that several hold, the same on all of them."""
    ranks, units = module.said["RANKS"], module.said["UNITS"]
    many = len(collective.demands or collective.ranks)
    rows = units * (many if collective.kind in TAKE_BLOCKS else 1)
    given = (np.arange(ranks * rows).reshape(ranks, rows) * 7919) % 1009 + 1
    for block, demand in enumerate(collective.demands):
        for source in demand.sources:
            given[source, block * units : (block + 1) * units] = block
    return given


@pytest.mark.few(25)
@settings(max_examples=150, deadline=None)
@given(schedules(), st.integers(1, 3), st.integers(6, 20))
def test_tables_do_what_the_collective_asks(schedule: Schedule, pieces: int, units: int) -> None:
    collective = schedule.collective
    module = Module.of(schedule, pieces=pieces, chunks=units * blocks_in(collective))
    given = numbers(module, collective)
    result = module.run(given)
    inputs = [given[rank] if rank in collective.members else None for rank in range(len(given))]
    for rank, output in enumerate(define(collective, inputs)):
        if rank in collective.members:
            assert (result[rank] == (0 if output is None else output)).all()
    for _, rounds in module.said["STEPS"]:
        ends = Counter(end for pairs, _, _ in rounds for pair in pairs for end in enumerate(pair))
        assert len(rounds) == max(ends.values(), default=0)  # no coloring has less


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), unique=True, max_size=40))
def test_colours_are_as_few_as_the_busiest_end_has_messages(pairs: list[tuple[int, int]]) -> None:
    colours = colours_of(pairs)
    ends = [(*end, colour) for pair, colour in zip(pairs, colours, strict=True) for end in enumerate(pair)]
    assert len({*ends}) == len(ends)
    degrees = Counter(end for pair in pairs for end in enumerate(pair))
    assert len({*colours}) == max(degrees.values(), default=0)


def test_both_forms_of_a_schedule_give_one_module() -> None:
    schedule = synth.solve(load("ring:6"), "allgather", form="implicit")
    assert isinstance(schedule, ImplicitSchedule)
    assert export(schedule) == export(schedule.expand())


def test_pieces_make_trees_overlap_and_relays_take_part() -> None:
    chain = synth.solve(load("dgx1"), "broadcast", ranks=(0, 1, 2, 3, 4, 5))
    assert chain.expand().collective.relays(chain.topology) == (6, 7)
    whole, cut = Module.of(chain), Module.of(chain, pieces=3)
    assert len(cut.said["STEPS"]) == len(whole.said["STEPS"]) + 2
    rows = numbers(cut, chain.collective)
    assert (cut.run(rows)[:6] == rows[0]).all()


def test_what_a_file_calls_a_fabric_stays_in_the_docstring() -> None:
    ring = load("ring:3")
    schedule = synth.solve(replace(ring, name='""" + open("x") + """\\'), "allreduce")
    assert Module.of(schedule).said["RANKS"] == 3  # literals, and nothing else


def test_switches_that_add_and_tables_that_are_too_large_are_refused(
    tmp_path: Path, command: Command
) -> None:
    schedule = synth.solve(load("star:4,in-network=both"), "allreduce")
    with pytest.raises(InputError, match=r"got one in which switch .* adds or copies"):
        export(schedule)
    with pytest.raises(ProgramError, match=r"6000000 rows for 3 ranks make tables .*--chunks"):
        export(synth.solve(load("ring:3"), "broadcast"), chunks=6_000_000)
    synth.write_schedule(schedule, tmp_path / "s.json")
    refused(
        command("export", str(tmp_path / "s.json"), "--to", "jax", "-o", str(tmp_path / "s.py")), "jax: must"
    )


# What JAX makes of them.

CASES: dict[str, tuple[str, Kind, int, dict[str, Any], dict[str, Any]]] = {
    "allreduce": ("dgx1", Kind.ALLREDUCE, 0, {}, {}),
    "allreduce-in-pieces": ("ring:4", Kind.ALLREDUCE, 0, {"method": "multiring"}, {"pieces": 2}),
    "allreduce-exchanged": ("full:8", Kind.ALLREDUCE, 0, {"method": "recursive-doubling"}, {}),
    "allgather": ("torus:2x4", Kind.ALLGATHER, 0, {"form": "implicit"}, {}),
    "reduce-scatter": ("dgx1", Kind.REDUCE_SCATTER, 0, {}, {}),
    "alltoall": ("full:8", Kind.ALLTOALL, 0, {}, {}),
    "broadcast": ("star:5", Kind.BROADCAST, 2, {}, {}),
    "reduce": ("ring:4", Kind.REDUCE, 1, {}, {"chunks": 4}),
    "gather": ("torus:2x3", Kind.GATHER, 4, {}, {}),
    "scatter": ("ring:5", Kind.SCATTER, 3, {}, {}),
}


def solved(name: str) -> AnySchedule:
    spec, kind, root, how, _ = CASES[name]
    return synth.solve(load(spec), kind, root=root, **how)


QUICK = ("allreduce-exchanged", "reduce")
EACH = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in CASES]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What JAX made of a case, in the folder of those that are run together with it."""

    @cache
    def run(is_quick: bool) -> Path:
        folder = tmp_path_factory.mktemp("jax")
        said = {}
        for name, (_, kind, root, _, wishes) in CASES.items():
            if (name in QUICK) is is_quick:
                schedule = solved(name)
                (folder / f"{name}.py").write_text(str(export(schedule, **wishes).contents[""]))
                lead = [schedule.topology.ranks] if kind in TAKE_BLOCKS else []
                said[name] = {"kind": kind.replace("-", "_"), "root": root, "lead": lead}
        (folder / "cases.json").write_text(json.dumps(said))
        child = [sys.executable, "-m", "tests.support.jax_child", str(folder)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(child, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return folder

    return lambda name: run(name in QUICK) / name


@has_jax
@pytest.mark.parametrize("name", EACH)
def test_modules_give_what_jax_gives_and_their_gradients_too(name: str, ran: Callable[[str], Path]) -> None:
    with np.load(ran(name).with_suffix(".npz")) as found:
        for what in ("float32", "bfloat16", "gradient"):
            assert found[what].any()
            assert np.array_equal(found[what], found[f"{what} own"]), what


@has_jax
@pytest.mark.parametrize("name", EACH)
def test_what_is_lowered_holds_our_pairs_and_reads_back_as_the_schedule(
    name: str, ran: Callable[[str], Path]
) -> None:
    _, kind, root, _, wishes = CASES[name]
    schedule = solved(name)
    steps = Module.of(schedule, **wishes).said["STEPS"]
    pairs = [[*map(list, each)] for _, rounds in steps for each, _, _ in rounds]
    lowered = re.findall(r"source_target_pairs = dense<(.*?)>", ran(name).with_suffix(".mlir").read_text())
    assert [json.loads(each) for each in lowered] == pairs
    compiled = re.findall(r"source_target_pairs=\{(.*?)\}\}?, ", ran(name).with_suffix(".hlo").read_text())
    made = Counter(str(re.findall(r"\d+", each)) for each in compiled)
    assert made == Counter(str(re.findall(r"\d+", str(each))) for each in pairs)
    transfers = {(it.src, it.dst) for it in schedule.expand().transfers}
    assert {tuple(pair) for each in pairs for pair in each} == transfers
    again = stable_hlo.read(
        ran(name).with_suffix(".mlir").read_text(),
        topology=schedule.topology,
        kind=kind,
        root=root if kind.has_root else None,
    )
    assert synth.verify(again).correct
    assert again.load == schedule.expand().load


# What others write.

RING = """\
module @jit_ring attributes {mhlo.num_partitions = 3 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["ranks"=3]>
  func.func public @main(%arg0: ALL) -> tensor<9x1xf32> {
    %0 = sdy.manual_computation(%arg0) manual_axes={"ranks"} (%arg1: ONE) {
      %1 = PERMUTE(%arg1) <{source_target_pairs = dense<[[0, 1], [1, 2], [2, 0]]>}> : (ONE) -> ONE
      %2 = PERMUTE(%1) <{source_target_pairs = dense<[[0, 1], [1, 2], [2, 0]]>}> : (ONE) -> ONE
      %3 = stablehlo.concatenate %arg1, %2, %1, dim = 0 : (ONE, ONE, ONE) -> ALL
      %4 = stablehlo.partition_id : INT
      %5 = func.call @mine(%3, %4) : (ALL, INT) -> ALL
      sdy.return %5 : ALL
    } : (ALL) -> tensor<9x1xf32>
    return %0 : tensor<9x1xf32>
  }
  func.func private @mine(%arg0: ALL, %arg1: INT) -> ALL {
    %c = stablehlo.constant dense<3> : INT
    %0 = stablehlo.subtract %c, %arg1 : INT
    %1 = stablehlo.concatenate %arg0, %arg0, dim = 0 : (ALL, ALL) -> tensor<6x1xf32>
    %c_0 = stablehlo.constant dense<0> : INT
    %2 = stablehlo.dynamic_slice %1, %0, %c_0, sizes = [3, 1] : (tensor<6x1xf32>, INT, INT) -> ALL
    return %2 : ALL
  }
}
"""
SHORT = {"ONE": "tensor<1x1xf32>", "ALL": "tensor<3x1xf32>", "INT": "tensor<ui32>"}
for short, plain in {**SHORT, "PERMUTE": '"stablehlo.collective_permute"'}.items():
    RING = RING.replace(short, plain)
"""An allgather: own, then what comes from two before and from one before, turned to the order of ranks."""


def test_a_ring_of_somebody_else_is_its_schedule(tmp_path: Path, command: Command) -> None:
    (tmp_path / "ring.mlir").write_text(RING)
    words = (str(tmp_path / "ring.mlir"), "--topology", "ring:3")
    told = command("verify", *words, "--collective", "allgather", "--json").document
    assert (told["correct"], told["rate"], told["bound"]) == (True, "3/2", "3")  # one way round
    refused(
        command("verify", words[0]), "ring.mlir: does not say where it runs", "--topology and --collective"
    )
    wrong = command("verify", *words, "--collective", "broadcast")
    assert wrong.status == 1
    assert "ring.mlir: rank 0: the result must have 1 elements, has 3" in wrong.err
    refused(command("run", words[0]), "holds a schedule, no program")


@refuses("old", "new", "message")
def test_what_is_wrong_or_not_understood_is_named(old: str, new: str, message: str) -> None:
    assert old in RING
    with pytest.raises(ProgramError, match=re.escape(message)) as raised:
        stable_hlo.read(RING.replace(old, new, 1), topology=load("ring:3"), kind=Kind.ALLGATHER)
    assert isinstance(raised.value, WrongProgramError) is ("of the result must be" in message)


def test_what_keeps_several_sums_is_no_schedule() -> None:
    """Whole buffers that go round while a sum is kept beside them: right, but no schedule says so."""
    adds = RING.replace("(tensor<9x1xf32>", "(tensor<3x1xf32>").replace("-> tensor<9x1", "-> tensor<3x1")
    before, _, after = adds.partition("      %3 = ")
    behind = after[after.index("    }") :]
    sums = ["%arg1, %1", "%3, %2"]
    lines = [f"      %{3 + at} = stablehlo.add {sums[at]} : tensor<1x1xf32>\n" for at in (0, 1)]
    text = before + "".join(lines) + "      sdy.return %4 : tensor<1x1xf32>\n" + behind
    with pytest.raises(ProgramError, match="rank 0 keeps several sums of one chunk"):
        stable_hlo.read(text, topology=load("ring:3"), kind=Kind.ALLREDUCE)


@pytest.mark.few(60)
@settings(max_examples=400, deadline=None)
@given(st.data())
def test_mangled_texts_are_refused_in_one_line(data: st.DataObject) -> None:
    lines = RING.splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        cut = data.draw(st.integers(0, len(lines[at])))
        lines[at : at + 1] = data.draw(
            st.sampled_from(
                [[], [lines[at]] * 2, [lines[at][:cut]], [lines[at][:cut] + lines[at][cut + 1 :]]]
            )
        )
        if not lines:
            return
    try:
        schedule = stable_hlo.read("\n".join(lines), topology=load("ring:3"), kind=Kind.ALLGATHER)
    except InputError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert synth.verify(schedule).correct
