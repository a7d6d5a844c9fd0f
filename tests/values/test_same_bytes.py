"""The same question gives the same bytes on machines with other vector units, BLAS kernels and libm.

Two things cannot be varied here: HiGHS, which comes as one machine code for all processors of a kind, and the
machine code that numba makes, which is that of the machine of the test (it never joins or reorders floating
operations).
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from numpy._core import _multiarray_umath as kernels  # type: ignore[attr-defined]

ROOT = Path(__file__).parents[2]

SHORT = """
solve mi250 allgather form=explicit
solve torus:3x4 alltoall form=explicit
solve dragonfly:4x3x2,local=2 allreduce max_height=4 form=implicit
tree_bound ring:4 allgather 2
"""
"""Questions of the corpus (`tests.corpus.answering`), and bounds with their duals."""

LONG = """
solve mi250 allreduce max_trees=2 form=explicit
solve torus:3x3 allreduce max_height=4 form=explicit method=trees
solve mi250:boxes=2 allgather form=implicit
solve mi250:boxes=2 allgather max_trees=2 form=explicit
solve mi250 alltoall form=explicit
solve dragonfly:4x2x2 alltoall form=explicit
solve dgx-a100:boxes=2 allreduce method=mwu form=explicit
solve torus:4x4 allgather max_height=4 form=explicit method=trees
solve dgx1 allgather tolerance=1/20 form=explicit
solve dragonfly:9x4x4 allgather form=implicit
solve dragonfly:4x2x2 alltoall form=implicit
solve mi250:boxes=2 allreduce tolerance=1/10 form=implicit
solve mi250:boxes=4 allgather max_height=8 form=implicit
tree_bound dgx1 allgather 2
flow_bound torus:4x4 broadcast 5
pareto ring:4 allgather
"""

SCRIPT = """
import sys
from hashlib import sha256
from arborcast import topologies
from arborcast.synth.chunks.bounds.flow_bound import flow_bound
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.trees.column_generation import tree_bound
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import Deadline
from tests.corpus.answering import answer

BOUNDS = {"tree_bound": tree_bound, "flow_bound": flow_bound}

def digest(line):
    verb, spec, kind, *rest = line.split()
    if verb not in BOUNDS:
        return answer(line).digest
    topology = topologies.load(spec)
    problem = ChunkProblem.of(topology, Collective.on(topology, kind))
    return sha256(repr(BOUNDS[verb](problem, int(rest[0]), deadline=Deadline())).encode()).hexdigest()

for line in sys.argv[1].split("\\n"):
    print(digest(line), line)
"""


def processors() -> list[dict[str, str]]:
    """Environments in which numpy, its BLAS and the C library take other ways."""
    has = kernels.__cpu_features__
    vectors = " ".join(name for name in kernels.__cpu_dispatch__ if has[name])
    return [
        {"OPENBLAS_CORETYPE": "Haswell"},
        {
            "OPENBLAS_CORETYPE": "Prescott",
            "NPY_DISABLE_CPU_FEATURES": vectors,
            "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-AVX,-FMA,-FMA4",
        },
    ]


def check(questions: str) -> None:
    lines = questions.strip()
    answers = []
    for processor in processors():
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT, lines],
            env={**os.environ, "PYTHONPATH": str(ROOT), **processor},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        answers.append(ran.stdout.splitlines())
    assert len(answers[0]) == len(lines.splitlines())
    assert answers[0] == answers[1]


def test_processors_do_differ() -> None:
    """Else this module shows nothing: one exponential or matrix product of numpy has other last digits."""
    script = (
        "import numpy as np; x = np.arange(4096.) / 97;"
        "print(np.exp(x / 50).sum().hex(), np.log(x + 1).sum().hex(), (x @ np.sin(x)).hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, **processor}, capture_output=True, check=True
        ).stdout
        for processor in processors()
    }
    if not any(kernels.__cpu_features__[name] for name in kernels.__cpu_dispatch__):
        pytest.skip("this processor has no vector units to leave unused")
    assert len(found) > 1


def test_the_same_bytes() -> None:
    check(SHORT)


@pytest.mark.long
def test_the_same_bytes_of_more() -> None:
    check(LONG)


FLOATING = {
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "power", "float_power", "sin", "cos", "tanh",
    "dot", "vdot", "inner", "matmul", "tensordot", "einsum", "linalg",
}  # fmt: skip
WHOLE = {
    "synth/alltoallv/block_cuts.py",
    "synth/bounds/routing_trees.py",
    "synth/chunks/allreduce/hierarchical.py",
    "synth/chunks/bounds/flow_bound.py",
    "synth/lp/exact_system.py",
    "synth/packing/mwu.py",
}
"""Where matrices of whole numbers are multiplied, which no BLAS does."""


def test_nothing_is_decided_by_numbers_that_machines_round_in_their_own_way() -> None:
    """numpy's sums have one order on all machines; its exponentials, logarithms and products have not."""
    found = []
    for path in sorted((ROOT / "synth").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id="np"), attr=attr) if attr in FLOATING:
                    found.append(f"{name}:{node.lineno}: np.{attr}")
                case ast.BinOp(op=ast.MatMult()) if name not in WHOLE:
                    found.append(f"{name}:{node.lineno}: a product of matrices")
    assert found == []
