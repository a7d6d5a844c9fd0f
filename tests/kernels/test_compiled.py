"""The cache of machine code: kept, and compiled anew where a file of it is damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import logging
logging.basicConfig(format="%(message)s")
from arborcast.synth.kernels.compiled import kernel

@kernel
def doubled(x):
    return 2 * x

print(doubled(21))
"""


def run(script: Path, cache: Path) -> tuple[str, str]:
    home = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "ARBORCAST_CACHE": str(cache), "PYTHONPATH": str(home)}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip(), ran.stderr


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("damage", [b"", b'{"broken'])
def test_a_damaged_file_is_a_warning_and_a_compilation(tmp_path: Path, suffix: str, damage: bytes) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    cache = tmp_path / "cache"
    assert run(script, cache) == ("42", "")
    files = [path for path in cache.rglob("*") if path.suffix == suffix]
    assert files
    for path in files:
        path.write_bytes(damage)
    answer, said = run(script, cache)
    assert answer == "42"
    assert "kernel doubled is compiled anew" in said and len(said.splitlines()) == 1
    assert run(script, cache) == ("42", "")
