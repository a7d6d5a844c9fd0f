"""What the site has beside the pages of this folder: parts that come from the code, and files of the root.

A page says where a part goes by a comment such as `<!-- generated: commands -->`, so that it also reads well
where only Markdown is shown. `mkdocs.yml` names this file.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

OF_THE_ROOT = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
}
"""Files of the root that are pages of the site, by their names there."""

END_OF_THE_FIRST_PAGE = "<!-- the first page of the site ends here -->"
"""What README has below is on the site's page of figures."""

ATLAS = ROOT / "docs" / "atlas"
"""Where `synth atlas --catalog` keeps what it found."""

PACKAGES = ("synth", "synth.groups", "topologies", "backends", "pipeline")
"""Whose public names stand in the reference of Python."""


def commands() -> str:
    """Every command with its options, as `synth COMMAND -h` tells them."""
    import typer.main

    from arborcast.synth.cli.app import app

    return "\n".join(_command(typer.main.get_command(app), "synth"))


def _command(command: Any, name: str) -> Iterator[str]:
    """The help of a command and of those below it."""
    below = getattr(command, "commands", {})
    if name != "synth":
        told = command.get_help(command.make_context(name, [], resilient_parsing=True, terminal_width=80))
        yield f"{'#' * (name.count(' ') + 1)} {name}\n\n```text\n{told.rstrip()}\n```\n"
    for each, sub in sorted(below.items()):
        if not sub.hidden:
            yield from _command(sub, f"{name} {each}")


def python() -> str:
    """Every public name, from its docstring."""
    parts = []
    for package in PACKAGES:
        module = importlib.import_module(f"arborcast.{package}")
        homes: dict[str, str] = getattr(module, "_HOMES", {})
        parts.append(f"## arborcast.{package}\n\n{_first_lines(module.__doc__ or '')}\n")
        for name in sorted(module.__all__, key=str.lower):
            home = homes.get(name) or _home(module, name)
            if home is not None:
                parts.append(f"::: {home}.{name}\n")
    return "\n".join(parts)


def _home(module: Any, name: str) -> str | None:
    """The module that a name is defined in; None for a value that says none."""
    return getattr(getattr(module, name), "__module__", None)


def _first_lines(docstring: str) -> str:
    return " ".join(docstring.partition("\n\n")[0].split())


def schemas() -> dict[str, tuple[str, dict[str, Any]]]:
    """JSON schemas of all files that are read, by their names: what each is, and its schema."""
    from pydantic import TypeAdapter

    from arborcast.pipeline.planning.plan_documents import PlanDocument, ProfileShape
    from arborcast.synth.formats.shapes import (
        CustomShape,
        DeviceResultShape,
        ImplicitShape,
        MachineShape,
        ScheduleShape,
        TopologyShape,
    )
    from arborcast.synth.groups.folder_shapes import GroupsShape

    topology = TypeAdapter(TopologyShape).json_schema()
    machine = TypeAdapter(MachineShape).json_schema()
    topology["properties"] |= machine["properties"]
    topology.setdefault("$defs", {}).update(machine.get("$defs", {}))
    topology["description"] = "A topology file: a graph, and what may be said of the machine beside it."
    shapes: dict[str, tuple[str, Any]] = {
        "schedule": ("a schedule, of `synth solve -o`", ScheduleShape),
        "implicit-schedule": ("a schedule of representatives, of `synth solve -o` too", ImplicitShape),
        "collective": ("a collective of your own, in YAML or JSON", CustomShape),
        "groups": ("`groups.json` in a folder of `synth groups`", GroupsShape),
        "device-results": ("what `synth bench device -o` found on GPUs", DeviceResultShape),
        "profile": ("a profile of a model", ProfileShape),
        "plan": ("a plan, of `synth plan -o`", PlanDocument),
    }
    found = {"topology": ("a topology, in YAML or JSON", topology)}
    return found | {name: (told, TypeAdapter(shape).json_schema()) for name, (told, shape) in shapes.items()}


def files() -> str:
    """A table of the kinds of files with their schemas."""
    rows = [f"| {told} | [{name}.json](schemas/{name}.json) |" for name, (told, _) in schemas().items()]
    return "\n".join(["| file | schema |", "|---|---|", *rows])


def atlas() -> str:
    """The table of all machines of the atlas, and those that the last run did not reach."""
    from arborcast.synth.atlas.page import index_of, read_atlas
    from arborcast.topologies.owned import owned

    machines = read_atlas(ATLAS)
    made = {it.spec for it in machines}
    asked = [row.spec if row.ranks is None else f"{row.spec} --ranks {row.ranks}" for row in owned()]
    left = [f"`{spec}`" for spec in asked if spec not in made]
    told = f"\n\nNot worked out yet, which `synth atlas NAME` does: {', '.join(left)}.\n" if left else ""
    return index_of(machines) + told


def pages_of_machines() -> Iterator[tuple[str, str | bytes]]:
    """The pages of the atlas with their pictures, made of what lies there: where each goes, and what."""
    from arborcast.synth.atlas.page import page_of, picture_of, read_atlas

    for machine in read_atlas(ATLAS):
        head = f"---\ntitle: {json.dumps(machine.name)}\nsearch: {{exclude: true}}\nhide: [toc]\n---\n\n"
        yield f"atlas/{machine.folder}/index.md", head + page_of(machine)
        yield f"atlas/{machine.folder}/fabric.svg", picture_of(machine, ATLAS / machine.folder)


GENERATED: dict[str, Callable[[], str]] = {
    "commands": commands,
    "python": python,
    "files": files,
    "atlas": atlas,
}
"""What a comment in a page stands for."""


# ------------------------------------------------------------------------------------ called by mkdocs


def on_files(files: Any, config: Any) -> Any:
    """Add files of the root, the schemas, and the pages of the atlas with their style."""
    from mkdocs.structure.files import File, InclusionLevel

    from arborcast.synth.atlas.page import STYLE

    for name, page in OF_THE_ROOT.items():
        text = (ROOT / name).read_text(encoding="utf-8").partition(END_OF_THE_FIRST_PAGE)[0]
        files.append(File.generated(config, page, content=text))
    for name, (_, schema) in schemas().items():
        text = json.dumps(schema, indent=2) + "\n"
        files.append(File.generated(config, f"reference/schemas/{name}.json", content=text))
    for name, text in pages_of_machines():
        files.append(File.generated(config, name, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    files.append(File.generated(config, "assets/atlas.css", content=STYLE.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put in what is generated; links into and out of this folder lead to pages."""
    depth = page.file.src_uri.count("/")
    if page.file.src_uri in OF_THE_ROOT.values():
        markdown = markdown.replace("](docs/", "](")
    for name, target in OF_THE_ROOT.items():
        markdown = markdown.replace(f"]({'../' * (depth + 1)}{name})", f"]({'../' * depth}{target})")
        if depth == 0:
            markdown = markdown.replace(f"]({name})", f"]({target})")

    def part(found: re.Match[str]) -> str:
        return GENERATED[found[1]]()

    return re.sub(r"<!-- generated: ([a-z]+) -->", part, markdown)
