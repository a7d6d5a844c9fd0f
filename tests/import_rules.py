"""A rule about imports for `make lint` (import-linter), see `[tool.importlinter]` in pyproject.toml."""

from __future__ import annotations

from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class ClosedContract(Contract):
    """Checkers import each other and values, values import values; nothing else of ours."""

    checkers: Any = fields.SetField(subfield=fields.ModuleField())
    values: Any = fields.SetField(subfield=fields.ModuleField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        named = {module.name for module in self.checkers}
        rooms = {inner for module in named & graph.modules for inner in graph.find_descendants(module)}
        checkers, values = named | rooms, {module.name for module in self.values}
        unknown = (named | values) - graph.modules
        wrong = [
            f"{module} imports {imported}"
            for modules, among in ((checkers - unknown, checkers | values), (values - unknown, values))
            for module in sorted(modules)
            for imported in sorted(graph.find_modules_directly_imported_by(module) - among)
        ]
        wrong += [f"{name} does not exist" for name in sorted(unknown)]
        return ContractCheck(kept=not wrong, metadata={"wrong": wrong})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["wrong"]:
            output.print_error(line)
