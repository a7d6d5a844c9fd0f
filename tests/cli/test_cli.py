"""The command as a user runs it: answers, JSON keys, exit status, one-line errors."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from arborcast import topologies
from arborcast.synth.cli import app as cli
from tests.support.commands import Command, refused
from tests.support.nccl_files import FABRIC, gpu, nic, system

SQUARE = """
name: square-with-a-diagonal
ranks: 4
links:
  - {between: [0, 1], bandwidth: 25}
  - {between: [1, 2], bandwidth: 25}
  - {between: [2, 3], bandwidth: 25}
  - {between: [3, 0], bandwidth: 25}
  - {between: [0, 2], bandwidth: 25/2}
"""


def test_topologies_lists_the_catalog(command: Command) -> None:
    listed = {entry["name"] for entry in command("topologies", "--json").document["topologies"]}
    assert {"dgx1", "dgx1-p100", "dgx2", "dgx-a100", "dgx-h100", "mi250", "torus", "mesh"} <= listed
    assert {"ring", "hypercube", "full", "star", "fat-tree", "dragonfly"} <= listed
    assert "dgx-a100" in command("topologies").out


def test_show_prints_the_matrix_and_draws(command: Command, tmp_path: Path) -> None:
    picture = tmp_path / "dgx1.svg"
    ran = command("show", "dgx1", "--ranks", "0,3,4", "-o", str(picture))
    assert ran.status == 0
    assert "GB/s from row to column" in ran.out
    assert picture.read_text().startswith("<?xml")
    document = command("show", "dgx1", "--json").document
    assert (document["ranks"], len(document["links"])) == (8, 32)


def test_show_says_which_device_each_rank_is(command: Command, tmp_path: Path) -> None:
    nvlinks = [(FABRIC, 18, "0x068000")]
    host = [*(gpu(dev, nvlinks, device="10de:2901") for dev in range(4)), nic("mlx5_0", 400000)]
    file = tmp_path / "hosts.xml"
    file.write_text(system(host, host, hosts=["0x1", "0x2"]))
    chosen = ("show", str(file), "--ranks", "7,6,1,0", "--without-rank", "1")
    assert command(*chosen).out.splitlines()[-6:] == [
        "  rank  device                gpu",
        "  0     dev 3 (0000:04:00.0)  b200  host 1",
        "  1     dev 1 (0000:02:00.0)  b200  host 0",
        "  2     dev 0 (0000:01:00.0)  b200  host 0",
        "",
        "  nics     2 of 50 GB/s",
    ]
    document = command(*chosen, "--json").document
    assert document["devices"] == ["dev 3 (0000:04:00.0)", "dev 1 (0000:02:00.0)", "dev 0 (0000:01:00.0)"]
    assert (document["gpu"], document["hosts"], document["notes"]) == ("b200", [1, 0, 0], [])
    assert document["nics"] == [
        {"name": "mlx5_0", "rate": "50", "near": [2, 1]},
        {"name": "mlx5_0", "rate": "50", "near": [0]},
    ]


def test_show_says_where_a_file_is_silent_on_the_rates_of_nics(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "topo.txt"
    file.write_text("\tGPU0\tGPU1\tNIC0\nGPU0\tX\tNODE\tPIX\nGPU1\tNODE\tX\tNODE\n")
    assert command("show", str(file), "--gpu", "l4").out.endswith("\n  nics     1 of unknown rate\n")
    nics = command("show", str(file), "--gpu", "l4", "--json").document["nics"]
    assert nics == [{"name": "NIC0", "rate": None, "near": [0]}]


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        (("dgx1", "broadcast"), 150),
        (("dgx1", "allreduce", "--ranks", "0-5"), Fraction(5 * 25, 2)),
        (("dgx1", "broadcast", "--ranks", "0,3,4", "--root", "1"), 50),
    ],
)
def test_bound_gives_the_exact_rate_and_its_certificate(
    command: Command, words: tuple[str, ...], rate: Fraction
) -> None:
    document = command("bound", *words, "--json").document
    assert Fraction(document["rate"]) == rate
    assert document["certificate"]["kind"] in {"cut", "partition", "dual"}
    assert document["ranks"] >= 3


def test_bound_in_words(command: Command) -> None:
    out = command("bound", "dgx1", "broadcast").out
    assert "at most 150 GB/s" in out
    assert "cut: 150 GB/s leave {" in out


def test_bounds_name_the_model(command: Command) -> None:
    """Whether switches only forward, or reduce and multicast as those of a DGX H100."""
    for name in ("bound", "solve"):
        out = command(name, "star:3", "allreduce").out
        assert "scope    every schedule where switches only forward" in out
        assert "forward" not in command(name, "ring:3", "allreduce").out
        document = command(name, "star:3", "allgather", "--json").document
        assert document["model"] == "switches only forward"
        assert command(name, "ring:3", "allgather", "--json").document["model"] is None
    # A star of 8 ports of 450 GB/s: n / (n + 1) of a port by NVLink SHARP, n / (2 (n - 1)) without.
    inside = command("bound", "dgx-h100", "allreduce", "--json").document
    assert (inside["rate"], inside["rate_forwarding"]) == ("400", "1800/7")
    assert inside["model"] == "switches reduce and multicast as they can"
    assert "boxes of 8 H100 on NVSwitch with NVLink SHARP" in command("topologies").out


def test_what_switches_add_and_multicast_is_said_and_can_be_left_out(command: Command) -> None:
    star = "star:8,in-network=loopback"
    assert "  able     switch: reduces, multicasts, loops back\n" in command("show", star).out
    assert "able" not in command("show", star, "--no-in-network").out
    assert command("show", star, "--no-in-network", "--json").document["switches"] == ["switch"]
    limited = command("bound", star, "allreduce", "--json").document
    assert (limited["rate"], limited["rate_forwarding"]) == ("8/9", "4/7")
    assert limited["model"] == "switches reduce and multicast as they can"
    plain = command("bound", star, "allreduce", "--no-in-network", "--json").document
    assert (plain["rate"], plain["model"]) == ("4/7", "switches only forward")
    assert "rate_forwarding" not in plain
    out = command("bound", star, "allreduce").out
    assert "at most 8/9 GB/s" in out and "  forward  4/7 GB/s (0.5714) if switches only forward\n" in out
    solved = command("solve", star, "allreduce", "--no-in-network", "--json").document
    assert (solved["rate"], solved["optimal"]) == ("4/7", True)
    assert topologies.load(star).forwarding == replace(topologies.load("star:8"), name=star)


def test_all_that_switches_can_do_is_shown(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "able.yaml"
    file.write_text(
        "ranks: 1\nlinks: [{between: [0, a], bandwidth: 1}]\n"
        "switches: [plain, {name: a, reduces: true, multicasts: true, turns: true, adder: 5/2, trees: 1, "
        "latency_us: 1/2, stores: true}, {name: b, multicasts: true}, {name: c, multicasts: true}]\n"
    )
    able = [line.strip() for line in command("show", str(file)).out.splitlines() if "able  " in line]
    assert able == [
        "able     a: reduces, multicasts, turns, adds 5/2 GB/s (2.5), 1 tree, takes 0.5 us, stores first",
        "able     b, c: multicasts",
    ]


@pytest.mark.parametrize("collective", ["broadcast", "allgather", "allreduce", "alltoall", "gather"])
def test_without_any_link_all_are_cut_off(command: Command, tmp_path: Path, collective: str) -> None:
    file = tmp_path / "apart.yaml"
    file.write_text("name: apart\nranks: 3\nlinks: []\n")
    refused(command("solve", str(file), collective), f"{collective}: ranks 1, 2 cut off", status=1)
    bounded = command("bound", str(file), collective, "--json")
    assert (bounded.status, bounded.document["rate"], bounded.document["help"]) == (1, "0", [])
    joint = f"group 0: {collective}: ranks 1, 2 cut off"
    refused(command("groups", str(file), "--group", f"{collective}:0,1,2"), joint, status=1)


def test_bandwidths_of_too_many_digits_are_one_line(command: Command, tmp_path: Path) -> None:
    """17 of them, on links that differ by direction: the best shares have twice as many."""
    drawn = random.Random(10)
    ends = [(src, dst) for src in range(5) for dst in range(5) if src != dst]
    rate = {pair: drawn.randint(10**16, 10**17) for pair in ends if drawn.random() < 0.7}
    name = [0, 1, 2, "r", "s"]
    links = "".join(
        f"  - {{from: {name[src]}, to: {name[dst]}, bandwidth: {units}/{10**17}}}\n"
        for (src, dst), units in rate.items()
    )
    file = tmp_path / "fine.yaml"
    file.write_text(f"name: fine\nranks: 3\nswitches: [r, s]\nlinks:\n{links}")
    refused(command("solve", str(file), "allreduce"), "allreduce: the best bandwidths are not exact in int64")


def test_solve_verify_simulate(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "schedule.json"
    solved = command("solve", "dgx1", "allreduce", "--ranks", "0-5", "-o", str(file), "--json").document
    assert {"method", "rate", "bound", "optimal", "trees", "height", "steps"} <= solved.keys()
    assert {"rounds", "chunks", "seconds", "file"} <= solved.keys()
    assert (solved["method"], solved["rate"], solved["optimal"]) == ("trees", "125/2", True)
    assert solved["file"] == str(file)

    verified = command("verify", str(file), "--json").document
    facts = {"correct": True, "rate": "125/2", "max_link_load": "1"}
    assert verified == {**facts, "errors": [], "assumed": []}

    picture = tmp_path / "sweep.png"
    simulated = command("simulate", str(file), "--sizes", "1MiB:4MiB", "-o", str(picture), "--json").document
    assert {"bytes", "time_us", "algbw", "busbw"} <= simulated["rows"][0].keys()
    assert [row["bytes"] for row in simulated["rows"] if row["method"] == "trees"] == [
        1 << 20,
        2 << 20,
        4 << 20,
    ]
    assert {"ring", "multiring"} <= {row["method"] for row in simulated["rows"]}
    assert picture.stat().st_size > 0


def test_solve_without_o_writes_nothing(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("solve", "ring:4", "broadcast", "--json").document["file"] is None
    assert list(tmp_path.iterdir()) == []


def test_solve_in_words_says_what_is_proved(command: Command) -> None:
    assert "optimal: equal to the bound" in command("solve", "ring:4", "broadcast").out
    assert "% of the bound" in command("solve", "dgx1", "allreduce", "--method", "ring").out


def test_relays_may_only_help(command: Command) -> None:
    words = ("dgx1", "broadcast", "--ranks", "0,3,4", "--json")
    alone = command("solve", *words).document
    helped = command("solve", *words, "--relays").document
    assert (alone["rate"], helped["optimal"]) == ("50", True)
    assert Fraction(helped["rate"]) > Fraction(alone["rate"])


def test_a_file_is_a_spec_too(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "square.yaml"
    file.write_text(SQUARE)
    assert command("bound", str(file), "broadcast", "--json").document["rate"] == "50"


@pytest.mark.usefixtures("forked_workers")
def test_a_custom_collective_in_a_file(command: Command, tmp_path: Path) -> None:
    exchange = str(Path(__file__).parents[2] / "examples" / "collectives" / "neighbour-exchange.yaml")
    file = str(tmp_path / "exchange.json")
    # On the grid that it is for, every border goes over a link of its own: eight blocks in the time of one.
    assert command("bound", "torus:2x4", exchange, "--json").document["rate"] == "8"
    solved = command("solve", "torus:2x4", exchange, "--json", "-o", file).document
    assert (solved["rate"], solved["optimal"], solved["steps"], solved["rounds"]) == ("8", True, 1, 1)
    assert command("verify", file, "--json").document["correct"] is True
    rows = command("simulate", file, "--sizes", "1MiB:2MiB", "--json").document["rows"]
    assert [row["method"] for row in rows] == [solved["method"]] * 2  # no baseline does this
    ran = command("run", file, "--size", "64KiB", "--json").document
    assert ran["correct"] and ran["rows"][0]["wrong"] == 0


def test_what_is_cut_off_is_named(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "pairs.yaml"
    pairs = "[{between: [0, 1], bandwidth: 1}, {between: [2, 3], bandwidth: 1}]"
    file.write_text(f"name: two-pairs\nranks: 4\nlinks: {pairs}\n")
    bounded = command("bound", str(file), "broadcast", "--json")
    assert (bounded.status, bounded.document["rate"]) == (1, "0")
    assert sorted(bounded.document["certificate"]["side"]) == [0, 1]
    parts = "2 parts: ranks 0-1 | ranks 2-3; --ranks 0-1 takes the largest part\n"
    assert bounded.err == f"synth: broadcast: ranks 2, 3 cut off: nothing leads there from rank 0; {parts}"
    for answer in (
        bounded,
        command("show", str(file), "--json"),
        command("pareto", str(file), "gather", "--json"),
    ):
        assert (answer.document["parts"], answer.document["one_way"]) == ([[0, 1], [2, 3]], [])
        assert answer.document["help"] == ["--ranks 0-1 takes the largest part"]
    assert "  apart    2 parts: ranks 0-1 | ranks 2-3\n" in command("show", str(file)).out
    folder = str(tmp_path / "sweep")
    swept = command("sweep", str(file), "--collectives", "reduce", "-o", folder, "--json")
    assert swept.document["parts"] == [[0, 1], [2, 3]]
    for collective in ("broadcast", "allreduce", "allgather", "gather", "alltoall"):
        refused(command("solve", str(file), collective), "2, 3", status=1)
    answer = command("solve", str(file), "allgather", "--json")
    assert (answer.status, answer.document["infeasible"]) == (1, True)
    assert answer.document["proved"] and answer.document["certificate"]["certificate"]["kind"] == "cut"
    assert "2, 3" in answer.document["why"]


PAIRS = """
        GPU0  GPU1  GPU2  GPU3  GPU4
GPU0     X    NV2   SYS   SYS   SYS
GPU1    NV2    X    SYS   SYS   SYS
GPU2    SYS   SYS    X    NV2   SYS
GPU3    SYS   SYS   NV2    X    SYS
GPU4    SYS   SYS   SYS   SYS    X
"""


@pytest.mark.parametrize(
    ("words", "parts", "helps"),
    [
        ((), [[0, 1], [2, 3], [4]], ["--pcie joins them", "--ranks 0-1 takes the largest part"]),
        # Ranks as whoever asks must name them: 4, 2, 3 are 0, 1, 2 here.
        (
            ("--ranks", "4,2,3"),
            [[0], [1, 2]],
            ["--pcie joins them", "--ranks 2-3 takes the largest part", "--without-rank 0 leaves it out"],
        ),
        # Of the fragment, in which 1 and 2 are 0 and 1 once rank 0 is gone, 2 is cut off again.
        (
            ("--ranks", "4,2,3,0", "--without-rank", "0"),
            [[0, 1], [2]],
            ["--pcie joins them", "--without-rank 3 leaves it out"],
        ),
    ],
)
def test_what_would_join_the_parts_is_said(
    command: Command, tmp_path: Path, words: tuple[str, ...], parts: list[list[int]], helps: list[str]
) -> None:
    file = tmp_path / "pairs.txt"
    file.write_text(PAIRS)
    asked = (str(file), "--gpu", "a6000", *words)
    assert command("show", *asked, "--json").document["parts"] is None  # PCIe joins them unless told
    spec = (*asked, "--no-pcie")
    assert command("show", *spec, "--json").document["parts"] == parts
    for name in ("bound", "solve", "pareto"):
        ran = command(name, *spec, "allreduce", "--json")
        assert (ran.status, ran.document["parts"], ran.document["help"]) == (1, parts, helps)
        assert ran.err.endswith(f"{'; '.join(helps)}\n")
    taken = command("bound", *spec, "allreduce", "--pcie", "--json")
    assert (taken.status, command("show", *spec, "--pcie", "--json").document["parts"]) == (0, None)


def test_a_ring_that_does_not_exist_is_an_answer(command: Command) -> None:
    ran = command("solve", "dgx1", "allreduce", "--ranks", "0,3,4", "--method", "multiring", "--json")
    assert (ran.status, ran.document["infeasible"]) == (1, True)


def test_out_of_time(command: Command) -> None:
    ran = command("solve", "torus:8x8", "allgather", "--deadline", "0.001", "--json")
    assert (ran.status, ran.document["timed_out"]) == (3, True)


def test_out_of_time_says_and_saves_the_best_so_far(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "best.json"
    ran = command("solve", "torus:8x8", "allgather", "--deadline", "0.001", "-o", str(file))
    assert ran.status == 3
    assert "% of the bound" in ran.out
    assert f"written  {file}" in ran.out
    assert ran.err.count("\n") == 1
    assert command("verify", str(file)).status == 0


@pytest.fixture
def schedule_document(command: Command, tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "original.json"
    assert command("solve", "ring:3", "broadcast", "-o", str(file)).status == 0
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def test_a_wrong_schedule_is_an_answer_of_no(
    command: Command, schedule_document: dict[str, Any], tmp_path: Path
) -> None:
    del schedule_document["transfers"][0]
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(schedule_document))
    ran = command("verify", str(file), "--json")
    assert (ran.status, ran.document["correct"]) == (1, False)
    assert ran.document["errors"]
    refused(command("simulate", str(file)), "not correct", status=1)
    refused(command("run", str(file)), "not correct", status=1)


def test_show_sums_up_what_fits_no_screen(command: Command) -> None:
    assert command("show", "dgx-a100:boxes=4").out.splitlines() == [
        "dgx-a100:boxes=4: 32 ranks, 6 switches, 128 directed links",
        "  32 ranks with 325 GB/s out, 325 GB/s in",
        "  4 switches with 2400 GB/s out, 2400 GB/s in",
        "  2 switches with 400 GB/s out, 400 GB/s in",
    ]
    assert command("show", "dgx2").out.startswith("dgx2: 16 ranks, 1 switch, 32 directed links")


def test_without_words_it_says_what_it_can_do(command: Command) -> None:
    ran = command()
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == command("--help").out
    assert "verify" in ran.out


@pytest.mark.parametrize(
    ("redirected", "said"),
    [
        (">&-", "synth: standard output: must be open, got a closed one\n"),
        (">/dev/full", "synth: No space left on device\n"),
    ],
)
def test_an_answer_that_cannot_be_said_is_one_line(redirected: str, said: str) -> None:
    line = f"{sys.executable} -m arborcast.synth.cli.app topologies {redirected}"
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (2, said)


def test_the_version(command: Command) -> None:
    assert command("--version").out.startswith("arborcast 0.")


def test_simulate_with_another_order_of_service(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    command("solve", "ring:4", "allreduce", "-o", str(file))
    worst = command("simulate", str(file), "--sizes", "1MiB", "--service", "worst:3", "--json").document
    assert worst["service"] == "worst:3"
    services = {row["service"] for row in worst["rows"]}
    assert services <= {"random:0", "random:1", "random:2", None}
    assert "order of service: fifo" in command("simulate", str(file), "--service", "fifo").out


def test_simulate_prints_a_column_per_method(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "ring.json"
    command("solve", "dgx1", "allreduce", "--ranks", "0,3,4", "-o", str(file))
    out = command("simulate", str(file), "--sizes", "1MiB:2MiB").out
    header, first, second, *_ = out.splitlines()
    assert header.split()[:3] == ["time", "(us)", "trees"]
    assert (first.split()[:2], second.split()[:2]) == (["1", "MiB"], ["2", "MiB"])
    assert "busbw (GB/s)" in out
    assert "ring: " in out  # there is none, and the line says why
    assert "NCCL itself" not in out
    command("solve", "ring:3", "allreduce", "-o", str(file))
    out = command("simulate", str(file), "--sizes", "1MiB:2MiB").out
    assert "nccl-ring-model" in out
    assert "\nnccl: NCCL's planning model, re-implemented here; NCCL itself was not run\n" in out


# A small question of the same sort imports everything first: Python loses a Ctrl-C that meets an import.
INTERRUPTIBLE = """
import sys
import arborcast.synth.cli.app, arborcast.synth.cli.solve
from arborcast import synth, topologies
sys.argv[0] = "synth"
synth.solve(topologies.load("torus:4x4"), "allgather", method="trees")
print("ready", flush=True)
arborcast.synth.cli.app.main()
"""


def test_ctrl_c_leaves_no_file(tmp_path: Path) -> None:
    file = tmp_path / "never.json"
    # A shell that starts the tests in the background has them ignore Ctrl-C; the child must not.
    words = ("solve", "torus:32x32", "allgather", "--form", "explicit", "-v", "-o", str(file))
    process = subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-c", INTERRUPTIBLE, *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    begun = process.stderr.readline()  # it takes half a minute
    assert begun.startswith("synth: solving allgather on torus:32x32")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "synth: interrupted"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("cause", "status"), [(KeyboardInterrupt(), 130), (ValueError("7"), None)])
def test_ctrl_c_inside_a_compiled_kernel(
    cause: BaseException,
    status: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Python wraps what a C function leaves behind beside its result; a Ctrl-C in it is still one."""

    def interrupted(*_: object, **__: object) -> None:
        raise SystemError("returned a result with an exception set") from cause

    monkeypatch.setattr(cli, "app", interrupted)
    monkeypatch.setattr(sys, "argv", ["synth", "bound", "dgx1"])
    with pytest.raises(SystemExit if status else SystemError) as ended:
        cli.main()
    if status:
        assert getattr(ended.value, "code", None) == status
        assert capsys.readouterr().err == "synth: interrupted\n"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    line = f"{sys.executable} -m arborcast.synth.cli.app topologies | head -1"
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
