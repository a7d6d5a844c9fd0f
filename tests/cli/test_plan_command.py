"""`synth plan` as a user runs it: the plan, its file, the others beside it, and what it refuses."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from arborcast import pipeline, topologies
from arborcast.pipeline.planning.formats import write_sharded_plan
from arborcast.pipeline.planning.plan_comparison import EVERY
from arborcast.pipeline.profiles import Layer, Profile
from tests.support.commands import Command, refused

MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A profile file: eight equal layers, 100 MiB of weights each, 1 ms forward."""
    layers = tuple(
        Layer(f"block.{index}", 1000.0, 2000.0, MIB, 8 * MIB, 100 * MIB, 100 * MIB, 200 * MIB)
        for index in range(8)
    )
    pipeline.write_profile(Profile("eight", 64, layers, source="drawn"), tmp_path / "eight.json")
    return str(tmp_path / "eight.json")


def test_the_plan_is_told_written_drawn_and_traced(command: Command, model: str, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("plan.json", "plan.svg", "trace.json", "again.json")}
    ran = command(
        "plan",
        model,
        "dgx1",
        *("-o", str(files["plan.json"]), "--picture", str(files["plan.svg"])),
        *("--trace", str(files["trace.json"]), "--profile", str(files["again.json"]), "--json"),
    )
    assert (ran.status, ran.err) == (0, ""), ran.err
    found = ran.document
    plan = pipeline.read_plan(files["plan.json"])
    assert plan.depth == 8 and plan.model == "eight" and plan.topology is not None
    assert [row["ranks"] for row in found["stages"]] == [list(stage.ranks) for stage in plan.stages]
    assert found["time_us"] == pytest.approx(pipeline.predict(plan, pipeline.read_profile(model)).time_us), (
        "the file predicts what the command said"
    )
    assert {found["chosen"], *found["alternatives"]} == set(EVERY)
    for other in found["alternatives"].values():
        assert "why" in other or other["slower"] >= 1, "the plan is the fastest of all"
    assert b"<svg" in files["plan.svg"].read_bytes()
    assert json.loads(files["trace.json"].read_text())["traceEvents"]
    assert pipeline.read_profile(files["again.json"]) == pipeline.read_profile(model)


def test_people_see_stages_time_bound_and_the_others(command: Command, model: str) -> None:
    ran = command("plan", model, "ring:4", "--stages", "2", "--microbatches", "8", "--order", "1f1b")
    assert (ran.status, ran.err) == (0, ""), ran.err
    for fact in (
        "block.0",
        "64 samples a step in 8 microbatches, order 1f1b",
        "one step:",
        "proved: at least ",
        " on these ranks in any order; in order pe at most ",
        "pipedream",
    ):
        assert fact in ran.out
    assert sum(line.startswith(("0 ", "1 ")) for line in ran.out.splitlines()) == 2, "a line for each stage"


def test_the_plan_of_one_method_is_written(command: Command, model: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    ran = command("plan", model, "ring:4", "--method", "gpipe", "--microbatches", "8", "-o", str(file))
    assert (ran.status, ran.err) == (0, ""), ran.err
    plan = pipeline.read_plan(file)
    assert (plan.method, plan.order, plan.microbatches) == ("gpipe", "gpipe", 8)
    assert "order gpipe" in ran.out and "rannc" not in ran.out
    told = command("plan", model, "ring:4", "--microbatches", "8").out
    assert "pipedream: with a flush after every batch" in told and "rannc" in told


def test_every_order_is_planned_or_refused_in_a_line(command: Command, model: str, tmp_path: Path) -> None:
    """Zero-bubble orders and several stages on a rank are faster here, and their files come back."""
    asked = ("plan", model, "full:4", "--stages", "4", "--microbatches", "8")
    times = {}
    for order in ("1f1b", "pe", "gpipe", "interleaved", "zb-h1", "zb-v"):
        ran = command(*asked, "--order", order, "-o", str(tmp_path / "plan.json"), "--json")
        assert (ran.status, ran.err) == (0, ""), ran.err
        plan = pipeline.read_plan(tmp_path / "plan.json")
        assert plan.order == order and len(plan.workers) == 4
        assert ran.document["least_us"] <= ran.document["time_us"] + 1e-6
        times[order] = ran.document["time_us"]
    assert times["zb-v"] < times["zb-h1"] < times["1f1b"] and times["interleaved"] < times["1f1b"]
    assert command(*asked, "--json").document["time_us"] <= min(times.values())
    told = command(*asked, "--order", "zb-v").out
    assert "1+1+1+1 ranks, 2 stages each" in told and "order pe" not in told
    for options, fact in (
        (("--order", "zb-h1", "--recompute"), "recompute: must be off for order zb-h1"),
        (("--order", "zb-v", "--max-in-flight", "2"), "max_in_flight: must be None for order zb-v, got 2"),
        (("--order", "interleaved", "--memory", "1MiB"), "no plan fits into memory"),
    ):
        refused(command(*asked, *options), fact)


MODEL_FILE = """
import torch

def small():
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4))), torch.zeros(8, 16)

def wrong():
    return 3

def broken():
    raise KeyError("weights")

def wordy():
    raise ValueError("one line" + chr(10) + "and another")

def no_model():
    return "small", torch.rand(4, 3)
"""


def test_models_of_a_python_file_are_measured(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL_FILE)
    ran = command("plan", f"{tmp_path}/mine.py:small", "ring:2", "--json")
    assert (ran.status, ran.err) == (0, ""), ran.err
    assert "measured" in ran.document["costs"]
    assert (ran.document["device"], ran.document["device_from"]) == (None, "default")
    for function, fact in (
        ("wrong", "must return (model, inputs)"),
        ("broken", "KeyError"),
        ("wordy", "one line and another"),
        ("no_model", "no_model(): the model must be a torch.nn.Module, got str"),
        ("none", "must define a function none"),
    ):
        ran = command("plan", f"{tmp_path}/mine.py:{function}", "ring:2")
        refused(ran, fact)


BOX = """
        GPU0  GPU1
GPU0     X    NV4
GPU1    NV4    X
"""


@pytest.mark.parametrize(
    ("fabric", "device", "told"),
    [
        ("dgx-h100 --ranks 0,1", "h100", "costed for h100, which its ranks are"),
        pytest.param(
            "{box} --gpu a800", "a800", "costed for a800, which its ranks are", marks=pytest.mark.long
        ),
        pytest.param("dgx-h100 --ranks 0,1 --device MI300X", "mi300x", "", marks=pytest.mark.long),
        pytest.param("dgx-h100 --ranks 0,1 --device here", None, "", marks=pytest.mark.long),
        ("ring:2", None, "measured on this machine: the topology does not say what its ranks are"),
    ],
)
def test_models_are_costed_for_what_the_ranks_are(
    command: Command, tmp_path: Path, fabric: str, device: str | None, told: str
) -> None:
    (tmp_path / "mine.py").write_text(MODEL_FILE)
    (tmp_path / "box.txt").write_text(BOX)
    words = fabric.format(box=tmp_path / "box.txt").split()
    model = "vgg19" if device else f"{tmp_path}/mine.py:small"
    options = ("--batch", "8", "--microbatches", "2", "--stages", "1", "--method", "arborcast")
    assert told in command("plan", model, *words, *options).out
    ran = command("plan", model, *words, *options, "--json")
    assert (ran.status, ran.err) == (0, ""), ran.err
    found = ran.document
    assert found["device"] == device and found["costs"].startswith(device or "measured")


UNLIKE = """
<system version="1"><cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85">
<pci busid="0000:01:00.0" class="0x030200" link_speed="8 GT/s" link_width="16">
<gpu dev="0" sm="70" rank="0"><nvlink target="0000:02:00.0" count="2" tclass="0x030200"/></gpu></pci>
<pci busid="0000:02:00.0" class="0x030200" link_speed="8 GT/s" link_width="16">
<gpu dev="1" sm="80" rank="1"><nvlink target="0000:01:00.0" count="2" tclass="0x030200"/></gpu></pci>
</cpu></system>
"""


def test_ranks_that_differ_need_a_device(command: Command, tmp_path: Path) -> None:
    (tmp_path / "unlike.xml").write_text(UNLIKE)
    ran = command("plan", "bert-base", str(tmp_path / "unlike.xml"))
    assert (ran.status, ran.out) == (2, "")
    assert ": its ranks are " in ran.err and "name the device to cost for" in ran.err
    assert "v100" in ran.err and ran.err.splitlines()[-1].count(" and ") == 1
    ran = command("plan", "bert-base", "star:2", "--device", "here")
    refused(ran, "bert-base is only a name")


def test_planning_needs_no_torch(model: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; "  # importing it would raise
        f"sys.argv = ['synth', 'plan', {model!r}, 'ring:4', '--json']; "
        "from arborcast.synth.cli import app; raise SystemExit(app._status())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["stages"]


def test_layers_that_recompute_or_offload_are_printed_and_written(
    command: Command, model: str, tmp_path: Path
) -> None:
    """8 samples a microbatch: 1 MiB a layer, 4, 3, 2 and 1 in flight; messages take a quarter or a half.

    Of 887 MiB a tenth of the need stays free, and of the other 806 weights leave 6: the first two stages
    recompute a layer each. Copies of 1 MiB at 20 GB/s hide behind the passes of the other layer.
    """
    file = tmp_path / "plan.json"
    asked = ("plan", model, "ring:4", "--order", "1f1b", "--stages", "4", "--microbatches", "8")
    asked += ("--method", "arborcast", "--memory", "887MiB")
    found = command(*asked, "-o", str(file), "--json").document
    own = [[it.treatment for it in stage.segments] for stage in pipeline.read_plan(file).stages]
    assert [sorted(it) for it in own] == [["keep", "recompute"]] * 2 + [[]] * 2
    assert [bool(row.get("segments")) for row in found["stages"]] == [True, True, False, False]
    assert command(*asked, "--recompute", "--json").document["time_us"] > found["time_us"]
    refused(command(*asked, "--keep"), "no plan fits into memory", "stage 0", "MiB too many")
    told = command(*asked, "--offload", "20", "-o", str(file)).out
    assert "results of layers" in told and "offload 1, keep 1" in told and "offload at 20 GB/s" in told
    offloaded = pipeline.predict(pipeline.read_plan(file), pipeline.read_profile(model))
    assert offloaded.time_us < found["time_us"]


def test_both_levels_are_planned_told_drawn_and_read_again(command: Command, tmp_path: Path) -> None:
    (tmp_path / "four.py").write_text(
        "import torch\n"
        "def make(width=8192):\n"
        "    up, down = torch.nn.Linear(64, width), torch.nn.Linear(width, 64)\n"
        "    return torch.nn.Sequential(up, torch.nn.GELU(), down), torch.zeros(2, 64)\n"
        "def other():\n"
        "    return make(4096)\n"
    )
    file, drawn = tmp_path / "plan.json", tmp_path / "plan.svg"
    asked = "plan", f"{tmp_path}/four.py:make", "ring:2", "--intra", "--json"
    ran = command(*asked, "-o", str(file), "--picture", str(drawn))
    assert (ran.status, ran.err) == (0, ""), ran.err
    found = ran.document
    # two samples, 2 MiB of weights: columns, then rows, and each rank gets its half of the sum
    (stage,) = found["stages"]
    made = {row["name"]: (row["makes"], row["updated"]) for row in stage["operators"]}
    assert (made["0.weight"], made["2.weight"]) == ((["S(0)"], "S(0)"), (["S(1)"], "S(1)"))
    assert "reduce-scatter" in {row["kind"] for row in stage["collectives"]}
    assert found["time_us"] >= found["time_at_rates_us"] >= found["bound_at_rates_us"]
    assert set(found["ways"]) == {
        "both levels",
        "one stage",
        "data-parallel",
        "zero-3",
        "megatron",
        "pipelines",
    }
    for row in found["ways"].values():
        assert row["time_us"] >= found["time_us"]
        assert row["time_at_rates_us"] >= found["bound_at_rates_us"]
    assert "stages: layers by ranks" in drawn.read_text()
    plan = pipeline.read_sharded_plan(file)
    assert next((it.path, it.stored) for it in plan.stages[0].sharding.parameters) == ("0.weight", "S(0)")
    again = command(*asked, "--given", str(file)).document
    assert again["time_us"] == found["time_us"]
    assert again["stages"] == found["stages"]
    refused(
        command(*asked[:2], "ring:3", "--intra", "--given", str(file)), "is for topology ring:2", "ring:3"
    )
    refused(
        command(
            "plan", f"{tmp_path}/four.py:make", "ring:2", "--intra", "--given", str(file), "--batch", "4"
        ),
        "--batch: must be 2 as in the plan",
        "got 4",
    )
    other = "plan", f"{tmp_path}/four.py:other", "ring:2", "--intra", "--given", str(file)
    refused(command(*other), "is for model", "four.py:make", "four.py:other")
    text = file.read_text()
    (tmp_path / "bad.json").write_text(text.replace('"stored": "S(0)"', '"stored": "S(7)"', 1))
    refused(command(*asked, "--given", f"{tmp_path}/bad.json"), "0.weight cannot be divided over mesh 2")
    (tmp_path / "bad.json").write_text(text.replace('"shape": [2]', '"shape": [3]', 1))
    refused(command(*asked, "--given", f"{tmp_path}/bad.json"), "bad.json", "hold 2 ranks")
    refused(command(*asked, "--memory", "1MiB"), "every plan is at least", "memory: rank ", "of 1048576")
    refused(command(*asked, "--given", str(file), "--memory", "1MiB"), "plan: rank 0", "1048576", "short")
    refused(command(*asked, "--batch", "3", "--microbatches", "2"), "batch of 3 samples: must split into 2")


def test_all_ways_stand_in_one_table(command: Command, model: str, tmp_path: Path) -> None:
    """Each costs what it costs by itself, and its collectives take no less than what is proved of them."""
    width, mib = 8192, 2 * 64 * 8192 * 4 / MIB
    (tmp_path / "four.py").write_text(
        "import torch\n"
        "def make():\n"
        f"    up, down = torch.nn.Linear(64, {width}, bias=False), torch.nn.Linear({width}, 64, bias=False)\n"
        "    return torch.nn.Sequential(up, torch.nn.GELU(), down), torch.zeros(4, 64)\n"
    )
    asked = "plan", f"{tmp_path}/four.py:make", "ring:2", "--device", "v100", "--microbatches", "1", "--json"
    ran = command(*asked, "--compare")
    assert (ran.status, ran.err) == (0, ""), ran.err
    ways = {way["method"]: way for way in ran.document["ways"]}
    assert set(EVERY) | {"both levels", "one stage", "megatron", "zero-3"} == set(ways)
    times = [way["time_us"] for way in ran.document["ways"] if way["plan"] is not None]
    assert times == sorted(times)
    alone = command(*asked).document
    assert ways[alone["chosen"]]["time_us"] == alone["time_us"]
    inside = command(*asked, "--intra").document["ways"]
    for name in ("both levels", "one stage", "megatron", "zero-3"):
        assert ways[name]["time_us"] == pytest.approx(inside[name]["time_us"])
        assert ways[name]["memory_bytes"] == inside[name]["memory_bytes"]
    # 4 MiB of gradients between two ranks at 1 GB/s each way
    assert ways["data-parallel"]["collectives_at_least_us"] == pytest.approx(mib * MIB / 1000)
    assert 0 < ways["both levels"]["collectives_at_least_us"] < ways["both levels"]["time_us"]
    told = command(*asked[:-1], "--compare")
    assert (told.status, told.err) == (0, ""), told.err
    assert "all on 2 ranks as 2" in told.out and "collectives at least: proved" in told.out
    refused(command(*asked, "--compare", "--intra"), "--compare: must not be given with --intra")
    refused(
        command(*asked, "--compare", "-o", f"{tmp_path}/plan.json"),
        f"--output {tmp_path}/plan.json: goes with the plan of one way",
    )
    refused(command("plan", model, "ring:2", "--compare"), "whose operators are costed", "got a profile")


def test_a_plan_of_shard_model_is_given(command: Command, tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(
        "import torch\n"
        "class Whole(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.renorm(x, 2, 0, 1e6)\n"
        "def make():\n"
        "    layers = torch.nn.Linear(64, 2048), torch.nn.GELU(), Whole(), torch.nn.Linear(2048, 64)\n"
        "    return torch.nn.Sequential(*layers), (torch.zeros(4, 64),) * 2, torch.nn.functional.mse_loss\n"
    )
    made, file = runpy.run_path(str(tmp_path / "two.py"))["make"](), tmp_path / "plan.json"
    traced, name = pipeline.trace(*made, evaluation=False), "two.py:make"
    ring = topologies.load("ring:2")
    found = pipeline.shard_model(traced, ring, "v100", batch=4, microbatches=2, name=name)
    assert found.plan.whole == found.graph.unknown == ("renorm",)
    write_sharded_plan(found.plan, file)
    asked = "plan", f"{tmp_path}/{name}", "ring:2", "--device", "v100", "--intra", "--json"
    told = command(*asked, "--given", str(file)).document
    again = pipeline.shard_in_stages(
        traced, ring, "v100", batch=4, microbatches=2, given=found.plan, name=name
    )
    assert told["time_us"] == again.prediction.time_us
    assert again.joint.step_ps() == found.sharding.total_ps
    assert told["whole_operators"] == ["renorm"]


def test_a_given_plan_says_its_batch_and_microbatches(command: Command, tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(
        "import torch\n"
        "def make():\n"
        "    layers = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)\n"
        "    return torch.nn.Sequential(*layers), torch.zeros(2, 8)\n"
    )
    file = str(tmp_path / "plan.json")
    asked = "plan", f"{tmp_path}/two.py:make", "ring:2", "--intra", "--json"
    counts = "--batch", "8", "--microbatches", "2"
    found = command(*asked, *counts, "-o", file).document
    for more in ((), ("--batch", "8"), ("--microbatches", "2"), ("--stages", "2")):
        again = command(*asked, "--given", file, *more).document
        assert {key: again[key] for key in ("batch", "microbatches", "time_us", "stages")} == {
            key: found[key] for key in ("batch", "microbatches", "time_us", "stages")
        }
    refused(command(*asked, "--given", file, "--microbatches", "4"), "--microbatches: must be 2", "got 4")
    assert len(found["stages"]) == 2
    refused(command(*asked, "--given", file, "--stages", "1"), "--stages: must allow the 2", "got 1")
