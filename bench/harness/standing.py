"""Whether the figures of a results file may be shown, and whether they are those of today's code.

Figures of a dirty tree, or of a commit that this history lacks, cannot be repeated: they are refused. For the
others, the code that was measured is compared with that of the working tree: the bench's script and every
module of this project that it imports, transitively, below the folders that the file names. What has no
effect is left out of the comparison: comments, docstrings, layout, and the names of modules that were moved.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

HOME = Path(__file__).resolve().parents[2]
COMMAND = "arborcast/__main__.py"
"""What is imported where no script of bench/ was run: the command `synth`."""

SHOWING = (
    "synth/formats/results.py",
    "bench/harness/standing.py",
    "bench/page/",
    "bench/report.py",
)
"""What records and shows figures, and measures nothing."""

Import: TypeAlias = tuple[str, str, str]
"""Module, name in it (empty for all of it), and the name that it is given (empty for its own)."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What speaks against a results file.

    Attributes:
        refused: why its figures are not shown; empty where they are.
        changed: a file of the measured code that is another today; empty where there is none.
        known: whether there is a history to ask; a tarball and a shallow clone have none.
    """

    refused: str = ""
    changed: str = ""
    known: bool = True


def standing(content: Mapping[str, Any], home: Path = HOME) -> Standing:
    """What speaks against the figures of a results file.

    Args:
        content: of the file, with its `code` and `command`.
        home: the root of the checkout that is today's code.
    """
    code = content.get("code")
    if not isinstance(code, Mapping) or not code.get("commit"):
        return Standing("measured at a commit that was not recorded")
    commit = str(code["commit"])
    if code.get("dirty") is not False:
        return Standing(f"measured with uncommitted changes on {commit[:9]}")
    commits = history(home)
    if commits is None:
        return Standing(known=False)
    if commit not in commits:
        return Standing(f"measured at {commit[:9]}, a commit that this history lacks")
    folders = tuple(sorted(str(folder) for folder in code.get("folders") or []))
    script = _script(home, str(content.get("command") or ""))
    return Standing(changed=_changed(home, commit, script, folders))


@cache
def history(home: Path = HOME) -> frozenset[str] | None:
    """The commits that today's is made of; None where no git, no checkout or not all of them is there."""
    if _git(home, "rev-parse", "--is-shallow-repository", "--show-prefix") != b"false\n\n":
        return None
    listed = _git(home, "rev-list", "HEAD")
    return None if listed is None else frozenset(listed.decode().split())


def _script(home: Path, command: str) -> str:
    """What a command line runs, relative to the root of a checkout; also where that has been moved."""
    named = next((word for word in shlex.split(command)[1:2] if word.endswith(".py")), COMMAND)
    name = named.rpartition("/")[2]
    moved = [path for path in _files(home) if path.startswith("bench/") and path.endswith(f"/{name}")]
    return moved[0] if named not in _files(home) and len(moved) == 1 else named


# ------------------------------------------------------------------------------------ what is imported


def measured_code(home: Path, script: str, folders: tuple[str, ...]) -> frozenset[str]:
    """The files of a checkout that figures depend on: what the script imports, and data and C beside that."""
    below = ("bench/", "arborcast/", *(f"{name}/" for name in folders))
    found: set[str] = set()
    waiting = [script] if script in _files(home) else []
    while waiting:
        path = waiting.pop()
        if path not in found and path.startswith(below) and not path.startswith(SHOWING):
            found.add(path)
            waiting += _reached(home, path)
    beside = {str(file.relative_to(home)) for path in found for file in _beside(home, (home / path).parent)}
    return frozenset({path for path in found if _LAZY not in _text(home, path)} | beside)


_LAZY = "loader(__name__"
"""In packages that only say where their names are (`arborcast.lazy`): what is used of them is measured."""


@cache
def _files(home: Path) -> frozenset[str]:
    """All Python files of this project but tests."""
    tops = [home / top for top in ("arborcast", "synth", "topologies", "backends", "pipeline", "bench")]
    walked = ((folder, name) for top in tops for folder, _, names in os.walk(top) for name in names)
    return frozenset(
        str((Path(folder) / name).relative_to(home)) for folder, name in walked if name.endswith(".py")
    )


@cache
def _beside(home: Path, folder: Path) -> tuple[Path, ...]:
    patterns = ("*.[ch]", "*.yaml", "examples/*.yaml") if folder != home / "arborcast" else ()
    return tuple(file for pattern in patterns for file in folder.glob(pattern))


@cache
def _reached(home: Path, path: str) -> frozenset[str]:
    """Files that a module names: in an import at its top or in a function, in a string, as a child's script.

    Of a package that loads its names when they are used, the homes of those that are used.
    """
    text = _running(_text(home, path))
    if _LAZY in text:
        return frozenset()
    for name, value in re.findall(r'^(\w+) = "(arborcast[\w.]*)"', text, flags=re.MULTILINE):
        text = text.replace(f"{{{name}}}", value)
    targets = set(re.findall(r"\barborcast(?:\.\w+)+", text))
    for module, name, given in _imports(text):
        targets |= {module, f"{module}.{name}", *_lazily(home, module, [name])}
        used = re.findall(rf"\b{given or name}\.(\w+)", text) if name else []
        targets |= set(_lazily(home, f"{module}.{name}", used))
    packages = {target.rsplit(".", up)[0] for target in targets for up in range(target.count(".") + 1)}
    places = {place for each in packages for place in _places(each)}
    if path.startswith("bench/"):
        children = re.findall(r"[\"'](?:bench/)?(\w+\.py)[\"']", text)
        places |= {f"{folder}/{name}" for folder in ("bench", path.rpartition("/")[0]) for name in children}
    return _files(home) & places


def _lazily(home: Path, package: str, names: list[str]) -> list[str]:
    """Modules that a package of `arborcast.lazy` loads for names of it."""
    homes = next((_homes(home, file) for file in _places(package) if file in _files(home)), {})
    return [homes[name] for name in names if name in homes]


@cache
def _homes(home: Path, path: str) -> Mapping[str, str]:
    text = _text(home, path)
    return dict(re.findall(r'"(\w+)": "(arborcast[\w.]+)"', text)) if _LAZY in text else {}


def _places(module: str) -> tuple[str, ...]:
    """Where a module may lie: folders of the top level are linked into arborcast/."""
    inner = module.removeprefix("arborcast").removeprefix(".").replace(".", "/")
    if not inner:
        return ("arborcast/__init__.py",)
    return f"{inner}.py" if "/" in inner else f"arborcast/{inner}.py", f"{inner}/__init__.py"


def _running(text: str) -> str:
    """Without docstrings and what only a type checker imports."""
    text = re.sub(r'^[ \t]*"""(?:.|\n)*?"""', "", text, flags=re.MULTILINE)
    return re.sub(r"^if TYPE_CHECKING:\n(?:[ \t]+.*\n|\n)+", "", text, flags=re.MULTILINE)


@cache
def _text(home: Path, path: str) -> str:
    return (home / path).read_text(encoding="utf-8")


def _imports(text: str) -> Iterator[Import]:
    """Of this project's modules."""
    pattern = r"^[ \t]*from (arborcast[\w.]*) import (?:\(([^)]*)\)|(.*))|^[ \t]*import (arborcast[\w.]*)"
    for module, inside, on_line, whole in re.findall(pattern, text, flags=re.MULTILINE):
        if whole:
            yield whole, "", ""
        for each in re.sub(r"#.*", "", inside or on_line).split(","):
            name, _, given = each.strip().partition(" as ")
            if name:
                yield module, name, given.strip()


# ------------------------------------------------------------------------------------- what has changed


@cache
def _changed(home: Path, commit: str, script: str, folders: tuple[str, ...]) -> str:
    """A file of the measured code that was another at a commit; empty where there is none."""
    then = _tree(home, commit)
    today = measured_code(home, script, folders)
    if script not in today:
        return script
    for path in sorted(path for path in today if path in then):
        data = (home / path).read_bytes()
        if _blob_id(data) != then[path] and not _same(home, then, path, path):
            return path
    gone = [path for path in then if path.endswith(".py") and not (home / path).exists()]
    for path in sorted(path for path in today if path not in then):
        if not any(_same(home, then, before, path) for before in gone):
            return path
    return ""


def _same(home: Path, then: Mapping[str, str], before: str, now: str) -> bool:
    """Whether a file does what another did at a commit: the same but for the modules' names."""
    was, imported_then = _form(before, (_git(home, "cat-file", "blob", then[before]) or b"").decode())
    today, imported_now = _form(now, _text(home, now))
    removed, added = imported_then - imported_now, imported_now - imported_then
    names = [Counter(name and (name, given) for _, name, given in one) for one in (removed, added)]
    return (
        was == today
        and names[0] == names[1]
        and not any((home / file).exists() for module, _, _ in removed for file in _places(module))
        and not any(file in then for module, _, _ in added for file in _places(module))
    )


@cache
def _form(path: str, text: str) -> tuple[str, frozenset[Import]]:
    """What a file does, as a hash, and what it imports of this project."""
    if path.endswith((".c", ".h")):
        literal = r'"(?:\\.|[^"\\])*"'
        bare = re.sub(
            rf"({literal})|//[^\n]*|/\*.*?\*/", lambda found: found[1] or " ", text, flags=re.DOTALL
        )
        return _hash(" ".join(bare.split())), frozenset()
    if not path.endswith(".py"):
        return _hash(text), frozenset()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for block in ("body", "orelse", "finalbody"):
            if isinstance(inside := getattr(node, block, None), list):
                setattr(node, block, [each for each in inside if not _is_without_effect(each)])
    return _hash(ast.dump(tree)), frozenset(_imports(_running(text)))


def _is_without_effect(node: ast.AST) -> bool:
    """A docstring, or an import that `_imports` tells."""
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
        case ast.ImportFrom(module=str(module)):
            return module.split(".")[0] == "arborcast"
        case ast.Import(names=names):
            return all(each.name.split(".")[0] == "arborcast" for each in names)
    return False


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _blob_id(data: bytes) -> str:
    """As git names a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@cache
def _tree(home: Path, commit: str) -> Mapping[str, str]:
    """The blob of each file of a commit."""
    listed = (_git(home, "ls-tree", "-r", "-z", commit) or b"").decode().split("\0")
    return {path: about.split()[2] for about, _, path in (line.partition("\t") for line in listed) if path}


def _git(home: Path, *arguments: str) -> bytes | None:
    """What git prints; None where there is no git, no checkout, or no such thing in it."""
    try:
        done = subprocess.run(["git", "-C", str(home), *arguments], capture_output=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
