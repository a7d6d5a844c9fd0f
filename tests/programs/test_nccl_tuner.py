"""The tuner plugin, called as NCCL calls it, under sanitizers; and `synth tune`, which writes its files."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
from collections.abc import Sequence
from fractions import Fraction
from math import isqrt
from pathlib import Path

import pytest

from arborcast.backends.programs import nccl_tuner
from arborcast.synth.baselines.nccl_model import nccl_times
from arborcast.synth.baselines.nccl_tuning import ALGORITHMS, rows_of_model
from arborcast.synth.collective import Collective
from arborcast.topologies import load
from tests.support.commands import Command, refused

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
COLLECTIVES = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
PROTOCOLS = ("ll", "ll128", "simple")
STUB = Path(__file__).parents[1] / "support" / "tuner_stub.c"
ROW = "{:>12d} {:>12d}     float     sum      -1 " + 2 * "  {:>8.2f}    1.00    1.75      0 " + "\n"


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin and what calls it, in one program that looks after its memory."""
    program = tmp_path_factory.mktemp("tuner") / "stub"
    checks = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    sources = (str(STUB), str(nccl_tuner.SOURCE))
    subprocess.run(
        ["cc", "-std=c11", *checks, "-Wall", "-Wextra", "-Werror", "-o", program, *sources], check=True
    )
    return program


def called(
    stub: Path,
    file: Path | None,
    calls: Sequence[tuple[int, ...]],
    *,
    version: int = 6,
    ranks: int = 8,
    hosts: int = 1,
) -> tuple[int, list[tuple[int, ...]], str]:
    """Status, answers, and what was logged."""
    environ = {name: value for name, value in os.environ.items() if name != "NCCL_TUNER_CONFIG_FILE"}
    if file is not None:
        environ["NCCL_TUNER_CONFIG_FILE"] = str(file)
    said = "".join(" ".join(map(str, call)) + "\n" for call in calls)
    command = [str(stub), str(version), str(ranks), str(hosts)]
    ran = subprocess.run(command, input=said, capture_output=True, text=True, env=environ, check=False)
    return ran.returncode, [tuple(map(int, line.split())) for line in ran.stdout.splitlines()], ran.stderr


@pytest.mark.parametrize("version", [3, 4, 5, 6])
def test_the_first_row_that_fits_is_taken(stub: Path, tmp_path: Path, version: int) -> None:
    """Drawn rows and calls, at the ends of each row and beside them, against the same rule in Python."""
    draw = random.Random(version)
    rows = []
    for _ in range(300):
        least = draw.randrange(1 << 20)
        most = least + draw.randrange(1 << draw.randrange(1, 20))
        others = [-1, 0, 1, 24, 64], [-1, 1, 2], [-1, 8, 16], [-1, 1, 4], [-1, 0, 1]
        said = draw.randrange(5), least, most, draw.randrange(7), draw.randrange(3)
        rows.append((*said, *map(draw.choice, others)))
    file = tmp_path / "tuner.csv"
    lines = [
        f" {COLLECTIVES[r[0]]} ,{r[1]},{r[2]}, {ALGORITHMS[r[3]]},{PROTOCOLS[r[4]]},"
        + ",".join(map(str, r[5:]))
        for r in rows
    ]
    file.write_text("# of nobody\n\n" + "\r\n".join(lines))
    ends = [size for row in rows for size in (row[1], row[2], row[2] + 1)]
    calls = [
        (
            draw.randrange(5),
            draw.choice(ends),
            draw.choice([1, 4]),
            draw.randrange(2),
            draw.getrandbits(21) & ~4,
        )
        for _ in range(3000)
    ]
    status, answers, _ = called(stub, file, calls, version=version, ranks=8, hosts=1)
    assert status == 0
    taken = 0
    for (kind, size, operations, registered, impossible), answer in zip(calls, answers, strict=True):
        costs = {(a, p): 10 + a + p for a in range(7) for p in range(3) if not impossible >> (3 * a + p) & 1}
        channels = 0
        for row in rows:
            fits = row[0] == kind and row[1] <= size <= row[2] and row[6] in (-1, 1) and row[7] in (-1, 8)
            fits = fits and row[8] in (-1, operations) and (version == 3 or row[9] in (-1, registered))
            if fits and (row[3], row[4]) in costs:
                costs[row[3], row[4]] = 0
                channels = max(row[5], 0)
                taken += 1
                break
        chosen = min(costs, key=lambda it: (costs[it], it))
        assert answer == (*chosen, channels)
    assert 100 < taken < len(calls) - 100


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("allreduce,0,1,ring,ll", "must have 8 to 10 fields"),
        ("allreduce,0,1,ring,ll,0,1,8,1,1,1", "must have 8 to 10 fields"),
        ("allreduc,0,1,ring,ll,0,1,8", "field 1 must be broadcast"),
        ("allreduce,-1,1,ring,ll,0,1,8", "field 2"),
        ("allreduce,0,1x,ring,ll,0,1,8", "field 3"),
        ("allreduce,5,4,ring,ll,0,1,8", "not below the least"),
        ("allreduce,0,99999999999999999999,ring,ll,0,1,8", "field 3"),
        ("allreduce,0,1,rings,ll,0,1,8", "field 4"),
        ("allreduce,0,1,ring,,0,1,8", "field 5"),
        ("allreduce,0,1,ring,ll,65,1,8", "field 6"),
        ("allreduce,0,1,ring,ll,0,one,8", "field 7"),
        ("allreduce,0,1,ring,ll,0,1,", "field 8"),
        ("allreduce,0,1,ring,ll,0,1,8,x", "field 9"),
        ("allreduce,0,1,ring,ll,0,1,8,1,2", "field 10"),
        ("allreduce" + " " * 600 + ",0,1,ring,ll,0,1,8", "shorter than 511"),
    ],
)
def test_a_row_that_says_nothing_is_told_with_its_place(
    stub: Path, tmp_path: Path, line: str, rule: str
) -> None:
    file = tmp_path / "tuner.csv"
    file.write_text(f"allreduce,0,10,ring,ll,0,-1,-1\n{line}\n")
    status, answers, said = called(stub, file, [(4, 1, 1, 0, 0)])
    assert (status, answers) == (5, [])
    assert said.count("\n") == 1 and f"{file}:2: " in said and rule in said


def test_without_a_file_it_says_so(stub: Path, tmp_path: Path) -> None:
    assert called(stub, None, [])[::2] == (5, "2 TUNER/arborcast: NCCL_TUNER_CONFIG_FILE: must name a file\n")
    status, _, said = called(stub, tmp_path / "absent", [])
    assert status == 2 and "No such file" in said


def test_mangled_files_are_read_or_refused(stub: Path, tmp_path: Path) -> None:
    draw, good = (
        random.Random(5),
        b"allreduce,0,1000,ring,ll128,8,1,8,-1,-1\nallgather,5,9,pat,simple,0,-1,-1\n",
    )
    for number in range(60):
        text = bytearray(good * 3)
        for _ in range(draw.randrange(1, 6)):
            at = draw.randrange(len(text))
            text[at : at + draw.randrange(3)] = bytes(draw.choices(b"\0,\n\xff 9-#", k=draw.randrange(4)))
        file = tmp_path / f"{number}.csv"
        file.write_bytes(text)
        status, _, said = called(stub, file, [(4, 500, 1, 0, 0)])
        assert status in (0, 5), said


# ----------------------------------------------------------------------------------------- synth tune


def test_the_file_of_the_model_chooses_as_the_model(stub: Path, command: Command, tmp_path: Path) -> None:
    """At every size between, the plugin takes what the model's formulas say is the fastest."""
    file = tmp_path / "tuner.csv"
    library = tmp_path / "libnccl-tuner-arborcast.so"
    told = command("tune", "dgx1", "-o", str(file), "--plugin", str(library))
    assert told.status == 0, told.err
    assert "NCCL itself was not run" in told.out and f"NCCL_TUNER_PLUGIN={library}" in told.out
    assert ctypes.CDLL(str(library)).ncclTunerPlugin_v6 is not None
    topology = load("dgx1", rates="nccl")
    rows = rows_of_model(topology)
    draw = random.Random(0)
    sizes = {int(2 ** draw.uniform(0, 34)) for _ in range(200)}
    sizes |= {size for row in rows for size in (row.least_bytes, row.most_bytes) if 0 < size < 1 << 60}
    for kind in ("allreduce", "allgather", "reduce-scatter"):
        number = COLLECTIVES.index(kind.replace("-", ""))
        listed = sorted(sizes)
        _, answers, _ = called(stub, file, [(number, size, 1, 0, 0) for size in listed])
        times = nccl_times(topology, Collective.on(topology, kind), listed)
        best = {size: min(row.time_us for row in times if row.bytes == size) for size in listed}
        by_protocol = {
            (row.method, row.protocol.value.lower(), row.bytes): row.time_us
            for protocol in {row.protocol for row in times} | {row.setting.protocol for row in rows}
            for row in nccl_times(topology, Collective.on(topology, kind), listed, protocol=protocol)
        }
        for size, (algorithm, protocol, channels) in zip(listed, answers, strict=True):
            method = f"nccl-{ALGORITHMS[algorithm]}-model"
            assert by_protocol[method, PROTOCOLS[protocol], size] == pytest.approx(best[size], rel=1e-9)
            assert channels == 0
    _, others, _ = called(stub, file, [(4, 1000, 1, 0, 0)], ranks=4)
    assert others == [(0, 0, 0)]  # of other communicators nothing is said


def log(times: dict[int, float], *, ranks: int = 4, hosts: int = 2, program: str = "all_reduce_perf") -> str:
    """As nccl-tests prints it."""
    listed = "".join(
        f"#  Rank {rank:2d} Group  0 Pid {100 + rank} on host{rank * hosts // ranks} device  0 [0x07] A GPU\n"
        for rank in range(ranks)
    )
    return f"# Collective test starting: {program}\n# Using devices\n{listed}#\n" + "".join(
        ROW.format(size, size // 4, time, time + 0.5) for size, time in times.items()
    )


def test_of_measurements_the_fastest_is_written_where_it_is_worth_it(
    stub: Path, command: Command, tmp_path: Path
) -> None:
    sizes = [1 << place for place in range(10, 20)]
    tables = {
        "tree/ll": {size: 5 + size / 1000 for size in sizes},
        "ring/simple/8": {size: 20 + size / 20000 for size in sizes},
        # NCCL's own choice is as good up to 8 KiB, and no better than the tree behind.
        "default": {size: 5 + size / 1000 if size <= 8192 else 9 + size / 1000 for size in sizes},
    }
    words = []
    for number, (name, times) in enumerate(tables.items()):
        (tmp_path / f"{number}.txt").write_text(log(times))
        words += ["--from-log", f"{name}={tmp_path}/{number}.txt"]
    file = tmp_path / "tuner.csv"
    ran = command("tune", *words, "-o", str(file), "--json")
    assert ran.status == 0, ran.err
    (row,) = ran.document["rows"]  # behind 15.8 KB the ring is the faster one, at 16 KiB it is measured
    assert (row["algorithm"], row["protocol"], row["channels"]) == ("ring", "Simple", 8)
    assert (row["hosts"], row["ranks"], row["most_bytes"]) == (2, 4, 1 << 19)
    assert row["least_bytes"] == isqrt(8192 * 16384) + 1
    calls = [
        (4, size, 1, 0, 0)
        for size in (8192, row["least_bytes"] - 1, row["least_bytes"], 1 << 19, (1 << 19) + 1)
    ]
    _, answers, _ = called(stub, file, calls, ranks=4, hosts=2)
    assert answers == [(0, 0, 0), (0, 0, 0), (1, 2, 8), (1, 2, 8), (0, 0, 0)]
    beside = command("tune", *words, "--to", "ncclx")
    assert f"allreduce,[{-(-row['least_bytes'] // 4)},{(1 << 19) // 4}],ring,simple,8,2,2" in beside.out


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ((), ("needs a fabric or --from-log",)),
        (("dgx1", "--from-log", "ring/ll={log}"), ("not both",)),
        (("--from-log", "ring/ll"), ("SETTING=FILE",)),
        (("--from-log", "rings/ll={log}"), ("algorithm", "'rings'")),
        (("--from-log", "ring/llm={log}"), ("protocol", "'llm'")),
        (("--from-log", "ring/ll/0={log}"), ("channels", "1 to 64", "'0'")),
        (("--from-log", "ring/ll={empty}"), ("empty.txt", "no row of nccl-tests")),
        (("--from-log", "ring/ll={nameless}"), ("nameless.txt", "which collective")),
        (("--from-log", "ring/ll={alone}"), ("alone.txt", "must list its ranks")),
        (("--from-log", "ring/ll={log}", "--from-log", "ring/ll={log}"), ("two tables of ring/ll",)),
        (("--from-log", "default={log}"), ("no table of a setting",)),
        (("dgx1", "--plugin", "{folder}/absent/lib.so"), ("absent", "does not exist")),
    ],
)
def test_wrong_words_are_one_line(
    command: Command, tmp_path: Path, words: tuple[str, ...], facts: tuple[str, ...]
) -> None:
    texts = {"log": log({1024: 3.0}), "empty": "# nothing\n", "alone": log({1024: 3.0}, ranks=1, hosts=1)}
    texts["nameless"] = texts["log"].replace("all_reduce_perf", "something")
    places = {"folder": str(tmp_path)}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
        places[name] = f"{tmp_path}/{name}.txt"
    refused(command("tune", *(word.format(**places) for word in words)), *facts)


def test_a_plugin_alone_is_told(command: Command, tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    assert f"built     {library}" in command("tune", "dgx1", "--plugin", str(library)).out.splitlines()
    assert library.exists()


def test_a_compiler_that_fails_is_told(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    refused(command("tune", "dgx1", "--plugin", str(tmp_path / "lib.so")), "no-such-compiler", "CC")
    assert Fraction(rows_of_model(load("dgx1", rates="nccl"))[0].least_bytes) == 0
