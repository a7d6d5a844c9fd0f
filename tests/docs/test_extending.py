"""The examples of docs/extending.md apply to the product as it is; commands then say what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import PAGES, ROOT

EXAMPLES = {
    title: dict(re.findall(r"```(diff|text)\n(.*?)```", body, re.S))
    for title, _, body in (
        part.partition("\n") for part in PAGES["docs/extending.md"].read_text("utf-8").split("\n## ")[1:]
    )
}
MOST_LINES = 60
PACKAGES = ("synth", "topologies", "backends")


def test_there_is_one_of_each_kind() -> None:
    assert list(EXAMPLES) == ["A machine", "A method", "A format to export to", "An attribute of links"]


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_does_what_it_says(title: str, tmp_path: Path) -> None:
    """Every line that is shown after a command is one that it prints, in this order."""
    pytest.importorskip("torch")  # programs of backends
    diff = EXAMPLES[title]["diff"]
    changed = re.findall(r"^[+-](?![+-]{2} )", diff, re.M)
    assert 0 < len(changed) <= MOST_LINES
    sources = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    for source in (*sources, *(ROOT / "arborcast").glob("*.py")):
        copy = tmp_path / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
    for name in PACKAGES:
        (tmp_path / "arborcast" / name).symlink_to(tmp_path / name)
    subprocess.run(["git", "apply", "-p0", "-"], cwd=tmp_path, input=diff, text=True, check=True)
    # Kernels as plain Python: machine code would be compiled anew for a copy.
    own = {"PYTHONPATH": str(tmp_path), "NUMBA_DISABLE_JIT": "1", "PYTHON": sys.executable}
    for part in EXAMPLES[title]["text"].split("$ ")[1:]:
        line, *shown = part.splitlines()
        ran = subprocess.run(
            ["sh", "-c", f'synth() {{ "$PYTHON" -m arborcast "$@"; }}\n{line}'],
            cwd=tmp_path, env={**os.environ, **own}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        printed = iter((ran.stdout + ran.stderr).splitlines())
        assert all(expected in printed for expected in shown), (line, shown, ran.stdout, ran.stderr)
