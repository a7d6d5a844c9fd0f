"""The encodings by name, and what a child does with them: search an instance with some effort."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from arborcast.synth.chunks.problem.outcome import Instance, Outcome, Search

EncodingName: TypeAlias = Literal["smt", "ilp", "sat"]

_HERE = "arborcast.synth.chunks.encodings"


@dataclass(frozen=True, slots=True)
class Encoding:
    """One way to put an instance to a solver.

    Attributes:
        place: of its `Search`, as `module:class`. What it answers must depend on its instance, seed and
            efforts alone, not on what its process did before.
        package: that the solver comes in; answers depend on its version.
    """

    place: str
    package: str


ENCODINGS: Mapping[str, Encoding] = {
    "smt": Encoding(f"{_HERE}.smt:SmtSearch", "z3-solver"),
    "ilp": Encoding(f"{_HERE}.ilp:IlpSearch", "highspy"),
    "sat": Encoding(f"{_HERE}.sat:sat_search", "python-sat"),
}


def search(place: str, instance: Instance, seed: int, effort: int) -> Outcome:
    """What a search of an instance answers within some effort; for the place see `Encoding`."""
    module, _, name = place.partition(":")
    found: Search = getattr(importlib.import_module(module), name)(instance, seed=seed)
    return found.run(effort)
