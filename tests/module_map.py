"""`make map`: every room and module of the code with the first line of its docstring."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
PACKAGES = ("synth", "topologies", "backends", "pipeline", "bench")


def lines(folder: Path, depth: int = 0) -> list[str]:
    """One line a module, rooms before what is in them; an indentation of two a level."""
    found = [f"{'  ' * depth}{folder.relative_to(HOME)}/  {_first_line(folder / '__init__.py')}"]
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.suffix == ".py" and path.stem != "__init__":
            found.append(f"{'  ' * (depth + 1)}{path.name}  {_first_line(path)}")
        elif (path / "__init__.py").exists():
            found += lines(path, depth + 1)
    return found


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    for package in sys.argv[1:] or PACKAGES:
        print("\n".join(lines(HOME / package)))
