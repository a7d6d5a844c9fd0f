"""Consecutive layers of a trace as a module: their operators, what is copied to them, and their parameters.

A segment stands alone: it holds no reference to the model or to other segments, except that its parameters
are the model's own, under the model's names.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from arborcast.pipeline.errors import PartitionError
from arborcast.pipeline.model.module_structure import Structure, several
from arborcast.pipeline.model.traced.cut_points import Item
from arborcast.pipeline.model.traced.operator_table import OperatorTable


@dataclass(frozen=True)
class SegmentGraph:
    """What a segment runs in one mode.

    Attributes:
        module: a function without parameters of its own.
        tensors: names in the segment of what it is given behind the inputs.
    """

    module: fx.GraphModule
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class LossCode:
    """The loss that a model computes itself, in one mode; what shares of a batch give adds up to it.

    Attributes:
        whole: from labels and the number of samples, of the whole batch, to a tuple of values.
        share: from what the last stage gives, labels, those values and the number of samples of the whole
            batch to this share's part of the loss.
        weights: by the name of a mean over targets that count, which of those values says what they weigh.
    """

    whole: SegmentGraph
    share: SegmentGraph
    weights: Mapping[str, int]


class TracedSegment(nn.Module):
    """Consecutive layers of a traced model; made by `Traced.divide`.

    Args:
        name: what errors call it.
        held: parameters and buffers by their names in the model, buffers with whether they are saved.
        training: what it runs in training.
        evaluation: what it runs otherwise, or in words why it cannot.
        structure: of what it returns, behind the last layer; None for a tensor or a tuple of them.
        losses: in training and in evaluation, behind the last layer of a model that returns its loss.
    """

    def __init__(
        self,
        name: str,
        held: Iterable[tuple[str, Tensor, bool]],
        training: SegmentGraph,
        evaluation: SegmentGraph | str,
        structure: Structure | None = None,
        losses: tuple[LossCode, ...] = (),
    ) -> None:
        """Register the tensors under their names."""
        super().__init__()
        self._name = name
        self._missing = evaluation if isinstance(evaluation, str) else ""
        self._paths: dict[bool, tuple[str, ...]] = {True: training.tensors}
        for path, tensor, is_saved in held:
            register(self, path, tensor, is_saved)
        # As submodules, so that whoever changes operators (batch norm over replicas) finds the graphs.
        self._run_training = training.module
        if isinstance(evaluation, SegmentGraph):
            self._paths[False] = evaluation.tensors
            self._run_evaluation = evaluation.module
        self._structure = structure
        self._loss_paths = [(it.whole.tensors, it.share.tensors) for it in losses]
        self._losses = nn.ModuleList(nn.ModuleList((it.whole.module, it.share.module)) for it in losses)
        self._totals: tuple[Any, ...] = ()

    def forward(self, *inputs: Tensor) -> Any:
        """From what crosses the boundary before these layers to what crosses the one behind them.

        Behind the last layer: what the model returns, or what its loss is made of.

        Raises:
            PartitionError: evaluation was asked of a model that runs other operators then.
        """
        self._check_mode()
        run = self._run_training if self.training else self._run_evaluation
        result = run(*inputs, *self._tensors(self._paths[self.training]))
        return result if self._structure is None else self._structure.rebuild(result)

    def begin_loss(self, labels: Sequence[Tensor], samples: int) -> None:
        """Before the losses of the shares of a batch, given the labels of all of it."""
        whole, _ = self._loss
        paths, _ = self._loss_paths[not self.training]
        with torch.no_grad():
            self._totals = (*whole(*labels, samples, *self._tensors(paths)), samples)

    def loss(self, outputs: Any, labels: Sequence[Tensor]) -> Tensor:
        """The part of the batch's loss that a share has."""
        _, share = self._loss
        _, paths = self._loss_paths[not self.training]
        result: Tensor = share(*several(outputs), *labels, *self._totals, *self._tensors(paths))
        return result

    @property
    def _loss(self) -> Any:
        self._check_mode()
        return self._losses[not self.training]

    def _check_mode(self) -> None:
        if self._missing and not self.training:
            raise PartitionError(f"{self._name}: cannot be evaluated in stages: {self._missing}")

    def _tensors(self, paths: Iterable[str]) -> Iterator[Tensor]:
        return (operator.attrgetter(path)(self) for path in paths)

    def extra_repr(self) -> str:
        """The name."""
        return self._name


def build(
    table: OperatorTable,
    names: Iterable[str],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    *,
    is_tuple: bool,
) -> SegmentGraph:
    """The code of some operators.

    Args:
        table: the trace.
        names: of the operators with a position.
        inputs: of values that cross into them; the first one tells the number of samples.
        outputs: of values that cross out of them.
        is_tuple: whether one output is returned as a tuple.
    """
    captured = table.captured
    needed = table.needed((*names, *outputs), inputs)
    graph = fx.Graph()
    made: dict[str, Any] = {name: graph.placeholder(name) for name in inputs}
    paths: dict[str, str] = {}
    for name, path in held_tensors(table).items():
        if name in needed:
            made[name] = graph.placeholder(name)
            paths[name] = path
    sizes = [name for name in table.sizes if name in needed]
    if sizes:
        samples = samples_node(graph, made[inputs[0]], table.by_name[inputs[0]])
        made |= {name: size_node(graph, samples, *table.sizes[name]) for name in sizes}
    for name, node in table.nodes.items():
        if name in needed and name not in made:
            copy = graph.node_copy(node, lambda source: made[source.name])
            copy.meta = {}  # tensors without data, which cannot be pickled
            made[name] = copy
    results = tuple(made[name] for name in outputs)
    graph.output(results if is_tuple or len(results) != 1 else results[0])
    return SegmentGraph(fx.GraphModule(captured.module, graph), tuple(paths.values()))


def literal_path(name: str) -> str:
    """The name in a segment of a tensor that the model's code made."""
    return f"_literal_{name}"


def held_tensors(table: OperatorTable) -> dict[str, str]:
    """Names in a segment of parameters, buffers and literals, by input of the graph."""
    return table.captured.tensors | {name: literal_path(name) for name in table.captured.literals}


def samples_node(graph: fx.Graph, value: fx.Node, item: Item) -> fx.Node:
    """The number of samples of a value that has them, in a graph."""
    rows = graph.call_function(torch.ops.aten.sym_size.int, (value, item.sample_dim))
    return rows if item.rows == 1 else graph.call_function(operator.floordiv, (rows, item.rows))


def size_node(graph: fx.Graph, samples: fx.Node, slope: int, rest: int) -> Any:
    """The size slope * samples + rest in a graph."""
    if not slope:
        return rest
    size = samples if slope == 1 else graph.call_function(operator.mul, (samples, slope))
    return graph.call_function(operator.add, (size, rest)) if rest else size


def register(root: nn.Module, path: str, tensor: Tensor, is_saved: bool) -> None:
    """Give a module a parameter or buffer by a path, with modules on the way where there are none."""
    *modules, name = path.split(".")
    owner = root
    for module in modules:
        if module not in owner._modules:
            owner.add_module(module, nn.Module())
        owner = owner.get_submodule(module)
    if isinstance(tensor, nn.Parameter):
        owner.register_parameter(name, tensor)
    else:
        owner.register_buffer(name, tensor, persistent=is_saved)
