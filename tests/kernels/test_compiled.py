"""Kernels: plain Python for small questions, machine code for others, kept and made anew where damaged."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from shutil import which

import numpy as np
import pytest

from arborcast.synth.kernels.compiled import SMALL, Ints, kernel, kernel_files

SCRIPT = """
import logging
logging.basicConfig(format="%(message)s")
from arborcast.synth.kernels.compiled import compile_all, kernel

@kernel
def doubled(x):
    return 2 * x

@kernel
def tripled(x):
    return 3 * x

@kernel
def halved(x):
    return x // 2

@kernel
def squared(x):
    return x * x

compile_all()
print(doubled(21), tripled(21), halved(21), squared(21))
"""
DAMAGES = {
    "doubled": (".nbi", b""),
    "tripled": (".nbi", b'{"broken'),
    "halved": (".nbc", b""),
    "squared": (".nbc", b"{"),
}

NESTED = """
import sys
import numpy as np
from arborcast.synth.kernels.compiled import SMALL, kernel

@kernel
def doubled(x):
    return 2 * x

@kernel
def summed(values):
    total = 0
    for value in values:
        total += doubled(value)
    return total

@kernel
def counted(values, found):
    for value in values:
        found.append(value)
    return len(found)

@kernel
def grown(pair):
    return counted(np.zeros(4 * pair[0].size), [1.0 for _ in range(0)])

for size in (SMALL, SMALL + 1, 3):
    print(summed(np.arange(size)), grown((np.arange(size), 0)), "numba" in sys.modules)
"""


def run(script: Path, cache: Path, *arguments: str, within: Sequence[str] = ()) -> tuple[str, str]:
    home = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "ARBORCAST_CACHE": str(cache), "PYTHONPATH": str(home)}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [*within, sys.executable, str(script), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip(), ran.stderr


@pytest.mark.long
def test_a_damaged_file_is_a_warning_and_a_compilation(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    cache = tmp_path / "cache"
    answer = "42 63 10 441"
    assert run(script, cache) == (answer, "")
    for name, (suffix, damage) in DAMAGES.items():
        files = [path for path in cache.rglob(f"script.{name}-*") if path.suffix == suffix]
        assert files
        for path in files:
            path.write_bytes(damage)
    again, said = run(script, cache)
    assert again == answer
    assert len(said.splitlines()) == len(DAMAGES)
    for name, line in zip(DAMAGES, said.splitlines(), strict=True):
        assert f"kernel {name} is compiled anew" in line
    assert run(script, cache) == (answer, "")


PART = """
import sys
from arborcast.synth.kernels.compiled import compile_all, kernel

@kernel
def doubled(x):
    return 2 * x

@kernel
def tripled(x):
    return 3 * x

compile_all()
kernels = [doubled, tripled][: int(sys.argv[1])]
print([(k(7), dict(k.compiled().stats.cache_hits) != {}) for k in kernels])
"""


READ_ONLY = """
mount --bind "$ARBORCAST_CACHE" "$ARBORCAST_CACHE" && mount -o remount,bind,ro "$ARBORCAST_CACHE" && exec "$@"
"""


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or which("unshare") is None, reason="needs root, to mount a folder")
def test_what_a_cache_that_cannot_be_written_has_is_used(tmp_path: Path) -> None:
    script, cache = tmp_path / "script.py", tmp_path / "cache"
    script.write_text(PART)
    assert run(script, cache, "1") == ("[(14, False)]", "")
    found = run(script, cache, "2", within=["unshare", "--mount", "sh", "-c", READ_ONLY, "sh"])
    assert found == ("[(14, True), (21, False)]", "")


def test_only_large_arrays_load_numba(tmp_path: Path) -> None:
    """A kernel that another calls is compiled with it; a plain one calls plain ones.

    Whatever they are given: an empty list has no type outside of compiled code. Arrays in tuples count.
    """
    script = tmp_path / "script.py"
    script.write_text(NESTED)
    answer, said = run(script, tmp_path / "cache")
    assert answer.splitlines() == [
        f"{size * (size - 1)} {4 * size} {loaded}"
        for size, loaded in ((SMALL, False), (SMALL + 1, True), (3, True))
    ]
    assert said == "kernels are being compiled, once on this machine; this may take a minute\n"
    assert run(script, tmp_path / "cache") == (answer, "")


HEAVY = (
    "numba",
    "torch",
    "scipy",
    "pandas",
    "z3",
    "highspy",
    "numpy.ma",
    "arborcast.synth.in_network.steiner_program",
)
"""Packages that take longer to load than small questions to answer."""


@pytest.mark.parametrize("words", ["solve dgx1 allgather", "solve dgx-a100:boxes=2 allgather"])
def test_a_small_question_loads_nothing_heavy(words: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from arborcast.synth.cli.app import main\n"
        "from arborcast.synth.kernels import compiled\n"
        "compiled.PLAIN_S = 1e9  # however slow this machine is\n"
        f"sys.argv = ['synth', *{words.split()!r}]\n"
        f"try:\n    main()\nfinally:\n    print(sorted(sys.modules.keys() & set({HEAVY!r})))\n"
    )
    answer, _ = run(script, tmp_path / "cache")
    assert words.split()[2] in answer
    assert answer.endswith("[]")


def test_kernels_use_nothing_of_files_whose_changes_do_not_compile_them_anew() -> None:
    home = Path(__file__).resolve().parents[2] / "synth"
    files = {path.relative_to(home.parent): ast.parse(text) for path, text in kernel_files(home).items()}
    assert len(files) > 20
    for path, tree in files.items():
        imported = {
            alias.asname or alias.name: Path(*node.module.split(".")[1:]).with_suffix(".py")
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("arborcast.")
            for alias in node.names
        }
        names = {
            name.id
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef)
            and any(isinstance(it, ast.Name) and it.id == "kernel" for it in function.decorator_list)
            for statement in function.body
            for name in ast.walk(statement)
            if isinstance(name, ast.Name)
        }
        others = {name for name in names & imported.keys() if imported[name] not in files}
        assert others <= {"Flags", "Ints"}, f"{path}: {others}"  # annotations


def test_words_wrap_without_a_warning() -> None:
    @kernel
    def mixed(values: Ints) -> int:
        total = np.uint64(1)
        for value in values:
            total = total * np.uint64(6364136223846793005) + np.uint64(value)
        return int(total >> np.uint64(33))

    values = np.arange(100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = mixed(values)
    assert plain == mixed.compiled()(values)
