"""Builds the tuner plugin for NCCL and RCCL (`nccl_tuner.c`) with the C compiler of the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from arborcast.synth.errors import InputError

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden", "-fPIC", "-shared")


def build(library: Path) -> None:
    """Compile it to a library.

    Raises:
        InputError: there is no C compiler (`CC` names one), or it failed.
    """
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler.split()[0]) is None:
        raise InputError(f"--plugin {library}: needs a C compiler, and {compiler} is none (CC names another)")
    ran = subprocess.run(
        [*compiler.split(), *FLAGS, "-o", str(library), str(SOURCE)],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        first = next(iter(ran.stderr.splitlines()), f"status {ran.returncode}")
        raise InputError(f"--plugin {library}: {compiler} failed: {first}")
