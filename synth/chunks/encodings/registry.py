"""The encodings by name, and what a child does with them: searches, kept from one slice to the next."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
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

_held: dict[int, Search] = {}
"""By number; they belong to whoever this process works for."""


def search_slice(
    number: int, place: str, instance: Instance | None, seed: int, effort: int, others: Collection[int]
) -> Outcome:
    """Spend some effort on a search.

    Args:
        number: which.
        place: see `Encoding`.
        instance: to begin with; None goes on with the search of that number.
        seed: of the solver, for the beginning.
        effort: how much.
        others: the numbers of searches that will go on later; all that are not among them are forgotten.
    """
    for other in _held.keys() - {*others, number}:
        del _held[other]
    if instance is not None:
        _held.pop(number, None)  # before the next one takes its memory
        module, _, name = place.partition(":")
        _held[number] = getattr(importlib.import_module(module), name)(instance, seed=seed)
    return _held[number].run(effort)
