"""One graph of a model for one mode: torch.export with the number of samples left open.

The graph is torch's training form: operators as the model calls them (dropout, batch norm and in-place
changes included), parameters as inputs. Whether it is training is baked into it, so each mode has its own.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, OutputKind

from arborcast.pipeline.errors import PartitionError
from arborcast.pipeline.model.layered import in_mode
from arborcast.pipeline.model.traced.failures import tracing_error

log = logging.getLogger(__name__)

_LOUD = ("torch.fx.experimental.symbolic_shapes", "torch._guards", "torch.export", "torch.export._trace")
DROPPED = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}
"""Checks that torch.export adds. They hold for the example only: under autocast types differ."""


@dataclass(frozen=True)
class Captured:
    """A graph with what its inputs and outputs are.

    Attributes:
        module: owns the graph and the subgraphs of its control-flow operators.
        inputs: the model's own inputs, in order.
        parameters: names in the model of its parameters, by input of the graph.
        buffers: likewise of its buffers.
        literals: tensors that the model's code made while it was traced, by input of the graph.
        outputs: what the model returns, in order.
        is_tuple: whether it returns a tuple (or a list) rather than one tensor.
        samples: torch's symbol for the number of samples.
        example: how many the example had.
    """

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    parameters: dict[str, str]
    buffers: dict[str, str]
    literals: dict[str, Tensor]
    outputs: tuple[fx.Node, ...]
    is_tuple: bool
    samples: Any
    example: int

    @property
    def tensors(self) -> dict[str, str]:
        """Names in the model of all that it holds, by input of the graph."""
        return self.parameters | self.buffers

    @property
    def operators(self) -> list[fx.Node]:
        """The graph's operators in order, without torch.export's own checks."""
        return [
            node
            for node in self.module.graph.nodes
            if node.op == "call_function" and node.target not in DROPPED
        ]


def capture(model: nn.Module, example: tuple[Tensor, ...], *, training: bool, strict: bool) -> Captured:
    """Trace a model in one mode; the model itself stays as it was.

    Args:
        model: any module whose inputs and outputs are tensors.
        example: its inputs; dimension 0 of each is the sample.
        training: the mode.
        strict: whether torch.export analyses the model's bytecode instead of running it.

    Raises:
        PartitionError: it cannot be traced, returns something else than tensors, or replaces a buffer.
    """
    given = tuple(value.detach().clone() for value in example)  # torch takes one tensor twice for one input
    with in_mode(model, training), torch.enable_grad(), _quiet() as said:
        try:
            program = torch.export.export(model, given, dynamic_shapes=_shapes(model, given), strict=strict)
        except Exception as error:  # torch raises dozens of classes, most of them private
            raise tracing_error(model, error) from error
    if strict and any("side effects" in str(warning.message) for warning in said):
        raise PartitionError(
            f"model {type(model).__name__}: forward replaces attributes of the model, which a strict trace "
            "would lose; use strict=False"
        )
    return _described(type(model).__name__, program)


def checked_example(model: nn.Module, example: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The example as a tuple.

    Raises:
        PartitionError: an input is no tensor, has no dimension, or has another number of samples.
    """
    name = type(model).__name__
    given = (example,) if isinstance(example, Tensor) else tuple(example)
    if not given:
        raise PartitionError(f"model {name}: example must have at least one input, got none")
    for index, value in enumerate(given):
        if not isinstance(value, Tensor):
            raise PartitionError(
                f"model {name}: input {index} of the example must be a tensor, got {type(value).__name__}"
            )
        if not value.dim():
            raise PartitionError(f"model {name}: input {index} of the example must have a sample dimension")
        if value.size(0) != given[0].size(0):
            raise PartitionError(
                f"model {name}: all inputs of the example must have as many samples as the first "
                f"({given[0].size(0)}), got {value.size(0)} for input {index}"
            )
    if given[0].size(0) < 2:
        # torch.export treats 1 as a constant, so that the graph would hold for one sample only.
        raise PartitionError(f"model {name}: example must have at least 2 samples, got {given[0].size(0)}")
    return given


def _shapes(model: nn.Module, example: tuple[Tensor, ...]) -> Any:
    """That dimension 0 of every input is the number of samples, in the structure of forward's signature."""
    samples = torch.export.Dim("samples")
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for value in example:
        shapes[value] = {0: samples}
    return shapes.dynamic_shapes(model, example)  # type: ignore[no-untyped-call]


@contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Without what torch prints and logs on the way to an error: the error says it in one line.

    Its warnings are given to the caller, its words to the debug log.
    """
    loggers = [logging.getLogger(name) for name in _LOUD]
    words = io.StringIO()

    def keep(record: logging.LogRecord) -> bool:
        words.write(f"{record.getMessage()}\n")
        return False

    for logger in loggers:
        logger.addFilter(keep)
    try:
        with redirect_stderr(words), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield said
    finally:
        for logger in loggers:
            logger.removeFilter(keep)
        log.debug("torch.export said: %s", words.getvalue())


def _described(name: str, program: torch.export.ExportedProgram) -> Captured:
    nodes = {node.name: node for node in program.graph.nodes}
    inputs: list[fx.Node] = []
    parameters: dict[str, str] = {}
    buffers: dict[str, str] = {}
    literals: dict[str, Tensor] = {}
    for spec in program.graph_signature.input_specs:
        match spec.kind:
            case InputKind.USER_INPUT:
                inputs.append(nodes[spec.arg.name])
            case InputKind.PARAMETER if spec.target is not None:
                parameters[spec.arg.name] = spec.target
            case InputKind.BUFFER if spec.target is not None:
                buffers[spec.arg.name] = spec.target
            case InputKind.CONSTANT_TENSOR if spec.target is not None:
                literals[spec.arg.name] = program.constants[spec.target]
            case _:
                raise PartitionError(f"model {name}: input {spec.arg.name} must be a tensor")
    for written in program.graph_signature.output_specs:
        if written.kind is not OutputKind.USER_OUTPUT:
            raise PartitionError(
                f"model {name}: buffer {written.target} is replaced in forward; change it in place (copy_)"
            )
    returned = next(node for node in program.graph.nodes if node.op == "output").args[0]
    outputs = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    spec_out = program.call_spec.out_spec
    is_tuple = not (spec_out is not None and spec_out.is_leaf())
    flat = not is_tuple or (spec_out is not None and _is_flat(spec_out))
    if not outputs or not flat or not all(isinstance(node, fx.Node) for node in outputs):
        raise PartitionError(
            f"model {name}: must return a tensor or a tuple of tensors, got "
            f"{_returned(spec_out)}; wrap it in a module that picks them out"
        )
    return Captured(
        program.graph_module,
        tuple(inputs),
        parameters,
        buffers,
        literals,
        outputs,
        is_tuple,
        inputs[0].meta["val"].shape[0].node.expr,
        inputs[0].meta["val"].shape[0].node.hint,
    )


def _returned(spec: object) -> str:
    """What a model returns, in words: a dict or a class of named values by their names."""
    kind, keys = getattr(spec, "type", None), getattr(spec, "context", None)
    if not (isinstance(kind, type) and isinstance(keys, list)):
        return " ".join(str(spec).split())
    names = ", ".join(map(str, keys))
    cache = " (pass use_cache=False)" if "past_key_values" in keys else ""
    return (f"a dict of {names}" if kind is dict else f"{kind.__name__}({names})") + cache


def _is_flat(spec: Any) -> bool:
    return spec.type in (tuple, list) and all(child.is_leaf() for child in spec.children())
