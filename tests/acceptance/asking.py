"""How the suite asks: the command `synth` as installed, and the files beside this one."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

SAMPLES = Path(__file__).parent / "samples"


class Answer(NamedTuple):
    """Exit status, the one object that `--json` prints (empty where none is), standard error."""

    status: int
    json: dict[str, Any]
    err: str


def synth(words: str, *more: object) -> Answer:
    """Run `synth WORDS MORE --json` in this process; `custom` is the fabric among the samples."""
    arguments = [str(SAMPLES / "custom.yaml") if word == "custom" else word for word in words.split()]
    (command,) = entry_points(group="console_scripts", name="synth")
    out, err, status = io.StringIO(), io.StringIO(), None
    spoken = mock.patch.object(sys, "argv", ["synth", *arguments, *map(str, more), "--json"])
    with spoken, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = command.load()()
        except SystemExit as end:
            status = end.code
    return Answer(int(status or 0), json.loads(out.getvalue() or "{}"), err.getvalue())


def lines(name: str) -> list[list[str]]:
    """The cells of a table among the samples."""
    rows = (SAMPLES / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in row.split("|")] for row in rows if not row.startswith("#")]


def read(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def solved(words: str, file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `synth solve` says, and the schedule that it writes."""
    said = synth(f"solve {words} -o", file)
    assert said.status == 0, said.err
    return said.json, read(file)
