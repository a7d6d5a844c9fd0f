"""A traced model as layers: what `trace` returns.

It keeps the graphs of both modes, the chosen cuts and the model, and makes a module of any range of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from arborcast.pipeline.errors import BatchError, PartitionError
from arborcast.pipeline.model.traced.capture import Arguments
from arborcast.pipeline.model.traced.cut_points import CutPoint
from arborcast.pipeline.model.traced.layers import layer_names
from arborcast.pipeline.model.traced.operator_table import OperatorTable
from arborcast.pipeline.model.traced.parameter_registry import ParameterRegistry
from arborcast.pipeline.model.traced.segments import (
    LossCode,
    SegmentGraph,
    TracedSegment,
    build,
    literal_path,
)
from arborcast.pipeline.model.traced.tensor_sizes import Sizes


@dataclass(frozen=True, slots=True)
class BoundaryTensor:
    """A tensor that crosses a boundary between layers.

    Attributes:
        name: of the operator that made it, or of the model's input.
        sample_dim: the dimension that counts samples.
        shape: with the example.
        dtype: in torch's words, where nothing casts automatically.
        size_bytes: with the example.
    """

    name: str
    sample_dim: int
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int


@dataclass(frozen=True, eq=False)
class Traced:
    """A model partitioned by its graph; it satisfies `pipeline.model.layered.Layered`.

    Attributes:
        model: whose parameters all segments share.
        training: its graph in training.
        evaluation: its graph in evaluation with the partners of the training graph's values, or in words why
            it cannot be evaluated in stages.
        cuts: between the layers.
        holdings: the model's parameters and buffers.
        arguments: how the model takes its inputs, and its loss the targets.
        losses: of a model that returns its loss, in training and, if it can be, in evaluation.
        labels: which of its inputs the loss reads, by number.
    """

    model: nn.Module
    training: OperatorTable
    evaluation: tuple[OperatorTable, dict[str, str]] | str
    cuts: tuple[CutPoint, ...]
    holdings: ParameterRegistry
    arguments: Arguments
    losses: tuple[LossCode, ...] = ()
    labels: tuple[int, ...] = ()

    def tensors_of(self, inputs: Any, targets: Any = None) -> tuple[Tensor, ...]:
        """The tensors of a batch, given as those of the example were.

        Raises:
            BatchError: others are given, or other words and numbers among them.
        """
        given = self.arguments.alike(inputs, targets)
        if (given.structure, given.targets) != (self.arguments.structure, self.arguments.targets):
            raise BatchError(
                f"batch: inputs must be {self.arguments}, as the model was traced with, got {given}"
            )
        return given.tensors

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self.model).__name__

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.cuts) + 1

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        """A unique name for each layer: the module whose operators take most of its time."""
        return layer_names(self.training, self._bounds)

    def divide(self, start: int, end: int) -> TracedSegment:
        """The layers [start, end) as a module that shares its parameters with the whole model.

        It takes and returns what `crossing` says for `start` and `end`; for `depth`, what the model returns.
        Its mode is the model's at this moment; in evaluation it runs the graph of that mode.

        Raises:
            PartitionError: the range is empty or not within 0..depth.
        """
        if not 0 <= start < end <= self.depth:
            raise PartitionError(
                f"model {self.name}: layers must be 0 <= start < end <= {self.depth}, got [{start}, {end})"
            )
        codes = self._codes(start, end)
        paths = {path for code in codes if isinstance(code, SegmentGraph) for path in code.tensors}
        homed = {name for name, home in self._homes.items() if start <= home < end}
        ends = end == self.depth
        losses = self.losses if ends else ()
        paths |= {path for loss in losses for code in (loss.whole, loss.share) for path in code.tensors}
        firsts = {self.holdings.names[path] for path in paths if path in self.holdings.names} | homed
        label = f"model {self.name}: layers [{start}, {end})"
        structure = self.training.captured.structure if ends and not losses else None
        segment = TracedSegment(label, self.holdings.taken(firsts), *codes, structure, losses)
        for path, literal in self._literals.items():
            if path in paths:
                segment.register_buffer(path, literal, persistent=False)
        return segment.train(self.model.training)

    def sample_dims(self, cut: int) -> tuple[int, ...]:
        """For each tensor that crosses the boundary before layer `cut`, which dimension counts samples."""
        return tuple(crossing.sample_dim for crossing in self.crossing(cut))

    def crossing(self, cut: int) -> tuple[BoundaryTensor, ...]:
        """What crosses the boundary before layer `cut`; the model's inputs for 0, its outputs for `depth`.

        Raises:
            PartitionError: there is no such boundary.
        """
        if not 0 <= cut <= self.depth:
            raise PartitionError(f"model {self.name}: cut must be in 0..{self.depth}, got {cut}")
        sizes = Sizes(self.training.captured.samples, self.training.captured.example)
        found = []
        for name in self._boundary(cut):
            item, value = self.training.by_name[name], self.training.nodes[name].meta["val"]
            assert item.sample_dim is not None
            shape, dtype = sizes.shape(value), str(value.dtype)
            found.append(BoundaryTensor(name, item.sample_dim, shape, dtype, sizes.bytes_of(value)))
        return tuple(found)

    @cached_property
    def ties(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Parameters that several layers use: the first name in the whole model, and the layers.

        Layers that compute something from a parameter for themselves use it too.
        """
        ours = {self.holdings.names[path] for path in self.training.captured.parameters.values()}
        return tuple(
            (name, layers) for name, layers in sorted(self._uses.items()) if name in ours and len(layers) > 1
        )

    def home(self, name: str) -> int:
        """The first layer that uses a parameter or buffer, by its first name; if none does, one near it."""
        uses = self._uses.get(name, ())
        return uses[0] if uses else self._homes[name]

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        """Positions of operators at which layers begin, and the end."""
        return (0, *(cut.position for cut in self.cuts), len(self.training.placed))

    @cached_property
    def _literals(self) -> dict[str, Tensor]:
        """Tensors that the model's code made while it was traced, by their names in segments."""
        tables = [self.training] if isinstance(self.evaluation, str) else [self.training, self.evaluation[0]]
        return {
            literal_path(name): literal
            for table in tables
            for name, literal in table.captured.literals.items()
        }

    @cached_property
    def _uses(self) -> dict[str, tuple[int, ...]]:
        """The layers that use each parameter and buffer, by its first name."""
        uses: dict[str, tuple[int, ...]] = {}
        for layer in range(self.depth):
            names, inputs, outputs = self._span(layer, layer + 1)
            needed = self.training.needed((*names, *outputs), inputs)
            if self.losses and layer == self.depth - 1:
                needed |= self.training.needed([self.training.captured.outputs[0].name], outputs)
            for name, path in self.training.captured.tensors.items():
                first = self.holdings.names[path]
                if name in needed and layer not in uses.get(first, ()):
                    uses[first] = (*uses.get(first, ()), layer)
        return uses

    @cached_property
    def _homes(self) -> dict[str, int]:
        return self.holdings.homes(self._uses)

    def _boundary(self, cut: int) -> tuple[str, ...]:
        if cut == 0:
            return tuple(item.name for item in self.training.inputs)
        if cut == self.depth:
            return self.training.outputs
        return self.cuts[cut - 1].values

    def _span(self, start: int, end: int) -> tuple[list[str], tuple[str, ...], tuple[str, ...]]:
        """Operators, inputs and outputs of some layers."""
        placed = self.training.placed[self._bounds[start] : self._bounds[end]]
        return [item.name for item in placed], self._boundary(start), self._boundary(end)

    def _codes(self, start: int, end: int) -> tuple[SegmentGraph, SegmentGraph | str]:
        """What these layers run in training and in evaluation."""
        names, inputs, outputs = self._span(start, end)
        is_tuple = len(outputs) > 1 or (end == self.depth and not self.losses)
        code = build(self.training, names, inputs, outputs, is_tuple=is_tuple)
        if isinstance(self.evaluation, str):
            return code, self.evaluation
        table, partner = self.evaluation
        theirs = build(
            table,
            [partner[name] for name in names if name in partner],
            tuple(partner[name] for name in inputs),
            tuple(partner[name] for name in outputs),
            is_tuple=is_tuple,
        )
        return code, theirs
