"""Where torch is not installed the suite runs what needs none, and says how much it leaves out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parent.parent.parent
NEED_TORCH = ("tests/transport/test_silence.py", "tests/docs/test_snippets.py")  # imports it; asks for it
NEEDS_NONE = "tests/values/test_transfers.py"


@pytest.mark.parametrize("workers", ["-n0", pytest.param("-n2", marks=pytest.mark.long)])
def test_without_torch_the_suite_says_what_it_leaves_out(workers: str) -> None:
    options = ["-p", "no:cacheprovider", "-p", "tests.support.without_torch", workers]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *NEED_TORCH, NEEDS_NONE],
        cwd=HOME,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    functions = [
        re.findall(r"^ *def test_", (HOME / file).read_text(encoding="utf-8"), re.M) for file in NEED_TORCH
    ]
    assert all(functions)
    left_out = sum(map(len, functions))
    assert f"{left_out} test functions in 2 files left out: torch is not installed\n" in found.stdout
