"""Progress: heard by who listens, drawn on terminals only."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

from arborcast import synth, topologies
from arborcast.synth.progress import listening, report


def test_who_listens_hears_the_packing_advance_to_its_end() -> None:
    heard: list[tuple[str, int, int]] = []
    with listening(lambda what, done, total: heard.append((what, done, total))):
        synth.solve(topologies.load("torus:8x8"), "allgather", seed=3)
    steps = [step for step in heard if step[0] == "packing trees"]
    parts = [done / total for _, done, total in steps]
    assert parts[-1] == 1
    assert any(0 < part < 1 for part in parts)


def test_nobody_listens_after_the_block() -> None:
    heard: list[tuple[str, int, int]] = []
    with listening(lambda *step: heard.append(step)):
        report("inside", 1, 2)
    report("outside", 2, 2)
    assert heard == [("inside", 1, 2)]


WORDS = [
    sys.executable,
    "-m",
    "arborcast.synth.cli.app",
    "solve",
    "torus:12x12",
    "allgather",
    "--form",
    "explicit",
]


def test_a_terminal_sees_a_bar() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(WORDS, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while block := os.read(ours, 4096):
            seen += block
    except OSError:  # how Linux reports that the other end is closed
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert b"solving allgather on torus:12x12: packing trees" in seen


def test_a_pipe_sees_nothing() -> None:
    ran = subprocess.run(WORDS, capture_output=True, text=True, check=True, timeout=120)
    assert ran.stderr == ""
