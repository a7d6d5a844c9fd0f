"""What a stage computes from no sample and no parameter: buffers, literals, sizes, masks, random numbers."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from arborcast.pipeline.model.traced.capture import Captured
from arborcast.pipeline.model.traced.effects import is_random, named
from arborcast.pipeline.model.traced.tensor_sizes import Sizes
from arborcast.pipeline.run.devices import HOST, drawing_apart, seed
from arborcast.pipeline.run.intra.changes import changed_arguments, check_changes
from arborcast.pipeline.run.intra.divided_operators import called
from arborcast.pipeline.run.intra.mesh_collectives import MeshCollectives
from arborcast.pipeline.sharding.specs import Assignment


class Constants:
    """Values that no sample changes, whole; each is made once, random numbers once a turn.

    Args:
        captured: the model's graph.
        sizes: of the samples.
        buffers: of the model, by their nodes; they may change.
        collectives: of the mesh, which know where this rank is in it.

    Raises:
        PlanError: a tensor is changed in place as no divided stage can follow.
    """

    def __init__(
        self,
        captured: Captured,
        sizes: Sizes,
        buffers: Mapping[str, Tensor],
        collectives: MeshCollectives,
    ) -> None:
        """Nothing is computed yet."""
        self._captured, self._sizes, self._buffers = captured, sizes, buffers
        self._collectives = collectives
        self._drawn: set[str] = set()  # random numbers, and what is made of them
        for node in captured.operators:
            if is_random(node) or any(it.name in self._drawn for it in node.all_input_nodes):
                self._drawn.add(node.name)
        self._filled = check_changes(captured, sizes, self._drawn)
        self._known: dict[str, Any] = {}
        self._sizes_known: dict[str, float] = {}

    def forget(self) -> None:
        """Buffers may have changed: what was made of them is made anew."""
        self._known = {}

    def value(self, node: fx.Node, turn: int) -> Any:
        """What a node gives."""
        if node.name in self._known:
            return self._known[node.name]
        captured = self._captured
        if node.name in self._buffers:
            made = self._buffers[node.name]
        elif node.name in captured.literals:
            made = captured.literals[node.name]
        elif node.op == "get_attr":
            made = getattr(captured.module, str(node.target))
        elif node.name in self._filled:
            for other in self._filled[node.name]:  # with the memory that they share
                plain = {key: self.plain(it, turn) for key, it in named(other).items()}
                self._known[other.name] = called(other.target, plain)
            return self._known[node.name]
        else:
            made = self.anew(node, turn)
        if node.name not in self._drawn:
            self._known[node.name] = made
        return made

    def anew(self, node: fx.Node, turn: int) -> Any:
        """What an operator gives now, whatever it gave before."""
        given = {key: self.plain(it, turn) for key, it in named(node).items()}
        for key in {it.split(".")[0] for it in changed_arguments(node)}:  # of lists all
            given[key] = tree_map_only(Tensor, torch.clone, given[key])
        if not is_random(node):
            return called(node.target, given)
        with self.drawing(node, turn, (None,) * len(self._collectives.mesh.shape)):
            return called(node.target, given)

    def plain(self, value: Any, turn: int) -> Any:
        """An argument without nodes: sizes are those of whole tensors."""

        def known(node: fx.Node) -> Any:
            meta = node.meta.get("val")
            if not is_number(node):
                return self.value(node, turn)
            if isinstance(meta, torch.SymInt | torch.SymFloat | torch.SymBool):
                if node.name not in self._sizes_known:
                    exact = meta.node.expr.subs(self._sizes.symbol, self._sizes.samples)
                    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(meta)]
                    self._sizes_known[node.name] = kind(exact)
                return self._sizes_known[node.name]
            return meta

        return fx.map_arg(value, known)

    @contextmanager
    def drawing(self, node: fx.Node, turn: int, assignment: Assignment) -> Iterator[None]:
        """An operator's random numbers, the same for ranks that do the same work: what tells others apart."""
        here = self._collectives.coordinates
        assert here is not None, "only ranks of the mesh draw"
        places = tuple((axis, here[axis]) for axis, label in enumerate(assignment) if label is not None)
        with drawing_apart(HOST):
            # torch.manual_seed would keep the seed for GPUs, too, with the stack of each call.
            seed(HOST, zlib.crc32(repr((turn, node.name, places)).encode()))
            yield


def is_number(node: fx.Node) -> bool:
    """Whether a value is a number, which the samples of a microbatch alone say."""
    known = torch.SymInt | torch.SymFloat | torch.SymBool | int | float
    return isinstance(node.meta.get("val"), known)


def ancestors(node: fx.Node) -> set[fx.Node]:
    """All that a value of a graph is made of, itself included."""
    found, waiting = {node}, [node]
    while waiting:
        new = set(waiting.pop().all_input_nodes) - found
        found |= new
        waiting += new
    return found
