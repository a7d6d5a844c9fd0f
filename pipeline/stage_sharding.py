"""How one stage is divided, as a small value: what plan files hold, tables show and a runtime carries out.

    {"mesh": {"shape": [2, 2], "ranks": [4, 5, 6, 7]},
     "parameters": [{"path": "1.weight", "stored": "R S(0)", "update": "S(1) S(0)"}],
     "operators": [{"name": "linear", "kind": "linear", "members": ["linear", "gelu"],
                    "reads": [["x", "S(0) R", "S(0) P"]], "made": "S(0) S(1)", "result": "S(0) S(1)",
                    "outputs": [["gelu", "S(0) S(1)"]]}]}

Specs are written as DTensor writes placements, one word for each axis of the mesh. Values bear the names that
they have in the traced graph, parameters the paths that they have in the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.meshes import SUM, Mesh, Spec, shown

_WORD = re.compile(r"R|P|S\((\d{1,2})\)")


@dataclass(frozen=True, slots=True)
class ReadSharding:
    """A tensor that an operator reads.

    Attributes:
        value: its name.
        spec: how the operator reads it.
        gradient: how the operator's backward pass gives its gradient; None where it has none.
    """

    value: str
    spec: Spec
    gradient: Spec | None


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
    made: Spec
    result: Spec
    outputs: tuple[tuple[str, Spec], ...]


@dataclass(frozen=True, slots=True)
class ParameterSharding:
    """A parameter.

    Attributes:
        path: in the model.
        stored: how it is held between passes.
        update: how its gradient, optimizer state and update are divided (as `stored` or more finely).
    """

    path: str
    stored: Spec
    update: Spec


@dataclass(frozen=True, slots=True)
class StageSharding:
    """The mesh of a stage, and how everything lies on it.

    Attributes:
        mesh: of the stage's ranks.
        parameters: that the stage uses.
        operators: each behind what it reads.
    """

    mesh: Mesh
    parameters: tuple[ParameterSharding, ...]
    operators: tuple[OperatorSharding, ...]


def sharding_to_document(sharding: StageSharding) -> dict[str, Any]:
    """As JSON, drawn above."""
    return {
        "mesh": {"shape": list(sharding.mesh.shape), "ranks": list(sharding.mesh.ranks)},
        "parameters": [
            {"path": it.path, "stored": shown(it.stored), "update": shown(it.update)}
            for it in sharding.parameters
        ],
        "operators": [
            {
                "name": it.name,
                "kind": it.kind,
                "members": list(it.members),
                "reads": [
                    [read.value, shown(read.spec), None if read.gradient is None else shown(read.gradient)]
                    for read in it.reads
                ],
                "made": shown(it.made),
                "result": shown(it.result),
                "outputs": [[value, shown(spec)] for value, spec in it.outputs],
            }
            for it in sharding.operators
        ],
    }


def sharding_from_document(document: Mapping[str, Any]) -> StageSharding:
    """The value that a document of the right shape (`planning.plan_documents.ShardingShape`) describes.

    Raises:
        PlanError: the mesh does not hold its ranks, or a spec is none of this mesh.
    """
    mesh = Mesh(tuple(document["mesh"]["shape"]), tuple(document["mesh"]["ranks"]))
    axes = len(mesh.shape)
    return StageSharding(
        mesh,
        tuple(
            ParameterSharding(it["path"], parse_spec(it["stored"], axes), parse_spec(it["update"], axes))
            for it in document["parameters"]
        ),
        tuple(
            OperatorSharding(
                it["name"],
                it["kind"],
                tuple(it["members"]),
                tuple(
                    ReadSharding(
                        value, parse_spec(spec, axes), None if back is None else parse_spec(back, axes)
                    )
                    for value, spec, back in it["reads"]
                ),
                parse_spec(it["made"], axes),
                parse_spec(it["result"], axes),
                tuple((value, parse_spec(spec, axes)) for value, spec in it["outputs"]),
            )
            for it in document["operators"]
        ),
    )


def parse_spec(text: object, axes: int) -> Spec:
    """The spec that `specs.shown` wrote, of a mesh with so many axes.

    Raises:
        PlanError: another number of words, or one that is not R, P or S(dimension).
    """
    words = text.split() if isinstance(text, str) and text != "-" else []
    found = [_WORD.fullmatch(it) for it in words]
    if len(found) != axes or None in found or not isinstance(text, str):
        raise PlanError(f"sharding: a spec must be {axes} of R, P and S(dimension), got {text!r}")
    return tuple(_place(it) for it in words)


def _place(word: str) -> int | None:
    return None if word == "R" else SUM if word == "P" else int(word[2:-1])
