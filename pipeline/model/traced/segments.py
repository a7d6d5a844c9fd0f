"""Consecutive layers of a trace as a module: their operators, what is copied to them, and their parameters.

A segment stands alone: it holds no reference to the model or to other segments, except that its parameters
are the model's own, under the model's names.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from arborcast.pipeline.errors import PartitionError
from arborcast.pipeline.model.traced.table import Table


@dataclass(frozen=True)
class Code:
    """What a segment runs in one mode.

    Attributes:
        module: a function without parameters of its own.
        tensors: names in the segment of what it is given behind the inputs.
    """

    module: fx.GraphModule
    tensors: tuple[str, ...]


class Segment(nn.Module):
    """Consecutive layers of a traced model; made by `Traced.divide`.

    Args:
        name: what errors call it.
        held: parameters and buffers by their names in the model, buffers with whether they are saved.
        training: what it runs in training.
        evaluation: what it runs otherwise, or in words why it cannot.
    """

    def __init__(
        self,
        name: str,
        held: Iterable[tuple[str, Tensor, bool]],
        training: Code,
        evaluation: Code | str,
    ) -> None:
        """Register the tensors under their names."""
        super().__init__()
        self._name = name
        self._missing = evaluation if isinstance(evaluation, str) else ""
        self._paths: dict[bool, tuple[str, ...]] = {True: training.tensors}
        for path, tensor, is_saved in held:
            _register(self, path, tensor, is_saved)
        # As submodules, so that whoever changes operators (batch norm over replicas) finds the graphs.
        self._run_training = training.module
        if isinstance(evaluation, Code):
            self._paths[False] = evaluation.tensors
            self._run_evaluation = evaluation.module

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """From what crosses the boundary before these layers to what crosses the one behind them.

        Raises:
            PartitionError: evaluation was asked of a model that runs other operators then.
        """
        if self._missing and not self.training:
            raise PartitionError(f"{self._name}: cannot be evaluated in stages: {self._missing}")
        run = self._run_training if self.training else self._run_evaluation
        tensors = (operator.attrgetter(path)(self) for path in self._paths[self.training])
        result: Tensor | tuple[Tensor, ...] = run(*inputs, *tensors)
        return result

    def extra_repr(self) -> str:
        """The name."""
        return self._name


def build(
    table: Table, names: Iterable[str], inputs: tuple[str, ...], outputs: tuple[str, ...], *, is_tuple: bool
) -> Code:
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
    held = captured.tensors | {name: literal_path(name) for name in captured.literals}
    for name, path in held.items():
        if name in needed:
            made[name] = graph.placeholder(name)
            paths[name] = path
    sizes = [name for name in table.sizes if name in needed]
    if sizes:
        dim = table.by_name[inputs[0]].sample_dim
        samples = graph.call_function(torch.ops.aten.sym_size.int, (made[inputs[0]], dim))
        made |= {name: _size(graph, samples, *table.sizes[name]) for name in sizes}
    for name, node in table.nodes.items():
        if name in needed and name not in made:
            copy = graph.node_copy(node, lambda source: made[source.name])
            copy.meta = {}  # tensors without data, which cannot be pickled
            made[name] = copy
    results = tuple(made[name] for name in outputs)
    graph.output(results if is_tuple or len(results) != 1 else results[0])
    return Code(fx.GraphModule(captured.module, graph), tuple(paths.values()))


def literal_path(name: str) -> str:
    """The name in a segment of a tensor that the model's code made."""
    return f"_literal_{name}"


def _size(graph: fx.Graph, samples: fx.Node, slope: int, rest: int) -> Any:
    if not slope:
        return rest
    size = samples if slope == 1 else graph.call_function(operator.mul, (samples, slope))
    return graph.call_function(operator.add, (size, rest)) if rest else size


def _register(root: nn.Module, path: str, tensor: Tensor, is_saved: bool) -> None:
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
