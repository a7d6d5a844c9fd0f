"""What README and docs/ tell people to type, read from their Markdown, and run as they would.

A fenced block without a language holds commands, or what the commands before it print; one of "python" a
program; one of "text" or "diff" neither. A comment above a block says what cannot be seen, and one anywhere
what must be there first:

    <!-- given: synth solve dgx1 allreduce --ranks 0-5 -o fast.json -->
    <!-- test: long; status 1 -->

`long` is left to `make test-all`. `status N` is what the block ends with. `file NAME` saves a program for
commands further down. `with NAME` puts a program into `contexts/NAME.py` in place of its line `# snippet`;
`ranks N` runs it under torchrun, for which `make test` has `forked_ranks.py`. `skip: WHY` is for what needs
what no test has, such as another host.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTEXTS = Path(__file__).parent / "contexts"
PAGES = {
    "README.md": ROOT / "README.md",
    **{str(page.relative_to(ROOT)): page for page in sorted((ROOT / "docs").rglob("*.md"))},
}
TOOLS = {"synth": "-m arborcast", "python": ""}
TORCHRUN = {True: "-m torch.distributed.run", False: "-m tests.docs.forked_ranks"}
"""By whether it may take long."""
COMMANDS = frozenset(["synth", "cat", "torchrun", "make", "pip", "python", "sudo", "drat-trim"])
PATIENCE_S = 500

_BLOCK = re.compile(
    r"<!-- given: (?P<given>.*?) -->"
    r"|(?:<!-- test: (?P<note>.*?) -->\n+)?```(?P<language>\w*)\n(?P<text>.*?)\n```",
    re.S,
)


@dataclass(frozen=True)
class Snippet:
    """A block of a page.

    Attributes:
        kind: "commands", "output", "python" or "text".
        text: what it holds.
        note: what the comment above it says, by its words' first.
        line: where it stands.
    """

    kind: str
    text: str
    note: dict[str, str]
    line: int


def snippets(page: str) -> list[Snippet]:
    """Those of a page, in order."""
    text = PAGES[page].read_text(encoding="utf-8")
    found: list[Snippet] = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["given"]:
            found.append(Snippet("commands", match["given"], {}, line))
            continue
        note = dict(_said(part) for part in (match["note"] or "").split(";") if part.strip())
        kind = match["language"] or ("commands" if _is_command(match["text"]) else "output")
        kind = "text" if kind == "diff" else kind  # `tests.docs.test_extending` applies those
        found.append(Snippet(kind, match["text"], note, line))
    return found


def _said(part: str) -> tuple[str, str]:
    word, _, rest = part.strip().partition(" ")
    return word.rstrip(":"), rest


def _is_command(text: str) -> bool:
    first = text.lstrip("( .").split(maxsplit=1)[0]
    return first in COMMANDS or first.startswith(("ARBORCAST_", ".venv", "nvidia-smi"))


def parts(commands: str) -> Iterator[tuple[bool, str]]:
    """Commands of `synth` alone, one by one, and what stands between them; True for the former."""
    shell: list[str] = []
    end = ""
    for line in commands.split("\n"):
        inside = bool(end)
        here = re.search(r"<<'(\w+)'", line)
        end = here[1] if here else "" if line == end else end
        if line.startswith("synth ") and not inside and not re.search(r"[|<>]", line.partition("#")[0]):
            if shell:
                yield False, "\n".join(shell)
                shell = []
            yield True, line
        else:
            shell.append(line)
    if shell:
        yield False, "\n".join(shell)


def words(line: str) -> list[str]:
    """Of a command, without its name and the comment behind it."""
    return shlex.split(line, comments=True)[1:]


def lay_out(folder: Path, *, long: bool) -> None:
    """Where commands are typed: `synth`, `torchrun` and `python` of these tests, and what a checkout has."""
    tools = folder / ".tools"
    tools.mkdir()
    for name, module in (TOOLS | {"torchrun": TORCHRUN[long]}).items():
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (tools / name).chmod(0o755)
    for name in ("examples", "bench", "constraints.txt", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)


def run_shell(commands: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Commands as a person types them."""
    path = os.pathsep.join([str(folder / ".tools"), os.environ.get("PATH", "")])
    environ = os.environ | {
        "PATH": path,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip


def program(snippet: Snippet) -> str:
    """The program of a snippet, inside its context where it has one."""
    if "with" not in snippet.note:
        return snippet.text
    context = (CONTEXTS / f"{snippet.note['with']}.py").read_text(encoding="utf-8")
    before, marker, after = context.partition("# snippet\n")
    assert marker, f"{snippet.note['with']}.py has no line '# snippet'"
    return f"{before}{snippet.text}\n{after}"
