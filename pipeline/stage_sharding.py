"""How one stage is divided, as a small value: what plan files hold, tables show and a runtime carries out.

    {"mesh": {"shape": [2, 2], "ranks": [4, 5, 6, 7]},
     "parameters": [{"path": "1.weight", "stored": "R S(0)", "update": "S(1) S(0)"}],
     "operators": [{"name": "linear", "kind": "linear", "members": ["linear", "gelu"],
                    "reads": [["x", "S(0) R", "S(0) P"]], "made": "S(0) S(1)", "result": "S(0) S(1)",
                    "outputs": [["gelu", "S(0) S(1)"]]}]}

Specs are text, as DTensor writes placements: one word for each axis of the mesh (`meshes.shown`). Values bear
the names that they have in the traced graph, parameters the paths that they have in the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.meshes import Mesh

_WORD = re.compile(r"R|P|S\(\d{1,2}\)")


class ReadSharding(NamedTuple):
    """A tensor that an operator reads.

    Attributes:
        value: its name.
        spec: how the operator reads it.
        gradient: how the operator's backward pass gives its gradient; None where it has none.
    """

    value: str
    spec: str
    gradient: str | None


@dataclass(frozen=True, slots=True)
class OperatorSharding:
    """An operator with those that follow it.

    Attributes:
        name: of the value that the first of them makes.
        kind: of the first.
        members: names of all values made, in order.
        reads: what others make, in the order of `MergedOperator.reads`.
        made: how the first result lies; summands along axes that divide what is summed.
        result: the same once it is added up, which holds for all that follow.
        outputs: values that others read, or that the stage gives away, and how they lie.
    """

    name: str
    kind: str
    members: tuple[str, ...]
    reads: tuple[ReadSharding, ...]
    made: str
    result: str
    outputs: tuple[tuple[str, str], ...]

    @property
    def specs(self) -> Iterator[str | None]:
        """All that it says of how tensors lie."""
        yield from (self.made, self.result, *(spec for _, spec in self.outputs))
        for read in self.reads:
            yield from read[1:]


@dataclass(frozen=True, slots=True)
class ParameterSharding:
    """A parameter.

    Attributes:
        path: in the model.
        stored: how it is held between passes.
        update: how its gradient, optimizer state and update are divided (as `stored` or more finely).
    """

    path: str
    stored: str
    update: str

    @property
    def specs(self) -> Iterator[str | None]:
        """All that it says of how it lies."""
        yield from (self.stored, self.update)


@dataclass(frozen=True, slots=True)
class StageSharding:
    """The mesh of a stage, and how everything lies on it.

    Attributes:
        mesh: of the stage's ranks.
        parameters: that the stage uses.
        operators: each behind what it reads.

    Raises:
        PlanError: a spec is none of this mesh.
    """

    mesh: Mesh
    parameters: tuple[ParameterSharding, ...]
    operators: tuple[OperatorSharding, ...]

    def __post_init__(self) -> None:
        """Check every spec."""
        said = chain(*(it.specs for it in self.parameters), *(it.specs for it in self.operators))
        for spec in {it for it in said if it is not None}:
            check_spec(spec, len(self.mesh.shape))

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> StageSharding:
        """The value that a document of the right shape (`planning.plan_documents.ShardingShape`) describes.

        Raises:
            PlanError: the mesh does not hold its ranks, or a spec is none of this mesh.
        """
        mesh = Mesh(tuple(document["mesh"]["shape"]), tuple(document["mesh"]["ranks"]))
        operators = [
            OperatorSharding(
                it["name"],
                it["kind"],
                tuple(it["members"]),
                tuple(ReadSharding(*read) for read in it["reads"]),
                it["made"],
                it["result"],
                tuple((value, spec) for value, spec in it["outputs"]),
            )
            for it in document["operators"]
        ]
        return cls(mesh, tuple(ParameterSharding(**it) for it in document["parameters"]), tuple(operators))


def check_spec(text: str, axes: int) -> None:
    """Refuse what `meshes.shown` would not write of a mesh with so many axes.

    Raises:
        PlanError: another number of words, or one that is not R, P or S(dimension).
    """
    words = text.split() if text != "-" else []
    if len(words) != axes or not all(map(_WORD.fullmatch, words)):
        raise PlanError(f"sharding: a spec must be {axes} of R, P and S(dimension), got {text!r}")
