"""Streams of frames, most of them wrong, are refused or read as a second parser reads them, under sanitizers.

`frames.c` is the peer, the reader and that parser; it is linked with the sources of the channel, so that
nothing of Python stands between. Any length, order and content of frames, over a socket and through a ring,
any place of a shelf, and any counters of a ring are among what it draws from a seed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NATIVE = HERE.parent.parent / "backends" / "native"
FLAGS = ["-std=c11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
FLAGS += ["-fno-sanitize-recover=all", "-fno-omit-frame-pointer", f"-I{NATIVE}"]


def compiled(into: Path, *sources: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["cc", *FLAGS, *map(str, sources), "-o", str(into)], check=False, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program `frames.c`, for a seed and a number of streams."""
    room = tmp_path_factory.mktemp("frames")
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (cc)")
    nothing, program = room / "nothing.c", room / "frames"
    nothing.write_text("int main(void) { return 0; }\n")
    found = compiled(program, nothing)
    if found.returncode or subprocess.run([program], check=False, capture_output=True).returncode:
        pytest.skip("cc has no address and undefined behaviour sanitizers that run here")
    found = compiled(program, HERE / "frames.c", NATIVE / "channel.c", NATIVE / "shelf.c")
    assert found.returncode == 0, found.stderr
    return program


def ends(peer: Path, seed: int, streams: int) -> dict[str, int]:
    """How many frames were fed, and how many streams came to which end."""
    found = subprocess.run([peer, str(seed), str(streams)], check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-4000:]
    return {what: int(count) for count, what in re.findall(r"(\d+) (\w+)", found.stdout)}


def test_frames_are_read_or_refused(peer: Path) -> None:
    found = ends(peer, 1, 2000)
    assert found["frames"] > 20_000
    assert min(found[each] for each in ("complete", "closed", "disagree", "strange")) > 100


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_frames_are_read_or_refused(peer: Path, seed: int) -> None:
    """A million of them, in all."""
    assert ends(peer, seed, 10_000)["frames"] > 100_000
