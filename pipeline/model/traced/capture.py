"""One graph of a model for one mode: torch.export with the number of samples left open.

The graph is torch's training form: operators as the model calls them (dropout, batch norm and in-place
changes included), parameters as inputs. Whether it is training is baked into it, so each mode has its own.
"""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from arborcast.pipeline.errors import PartitionError
from arborcast.pipeline.model.deferred_init import stand_ins
from arborcast.pipeline.model.layered import in_mode
from arborcast.pipeline.model.module_structure import Structure, flatten
from arborcast.pipeline.model.traced.trace_failures import tracing_error

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
        outputs: the tensors that the model returns, in order; of a model that returns its loss, that alone.
        structure: how it returns them.
        is_loss: whether what it returns is its loss.
        prefix: of the names of its modules in the graph.
        samples: torch's symbol for the number of samples.
        example: how many the example had.
    """

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    parameters: dict[str, str]
    buffers: dict[str, str]
    literals: dict[str, Tensor]
    outputs: tuple[fx.Node, ...]
    structure: Structure
    is_loss: bool
    prefix: str
    samples: Any
    example: int

    @property
    def tensors(self) -> dict[str, str]:
        """Names in the model of all that it holds, by input of the graph."""
        return self.parameters | self.buffers

    def module_of(self, node: fx.Node) -> str:
        """The innermost module of the model that called an operator; "" for the model itself."""
        path = next((str(path) for path, _ in reversed(node.meta.get("nn_module_stack", {}).values())), "")
        path = f"{path.split('@')[0]}."  # torch marks repeated calls of a module
        return path.removeprefix(self.prefix).removesuffix(".")

    @property
    def operators(self) -> list[fx.Node]:
        """The graph's operators in order, without torch.export's own checks."""
        return [
            node
            for node in self.module.graph.nodes
            if node.op == "call_function" and node.target not in DROPPED
        ]


@dataclass(frozen=True)
class Arguments:
    """What a model is called with.

    Attributes:
        tensors: in order, those of targets last; dimension 0 of each is the sample.
        structure: a tuple for positional arguments, a dict for named ones.
        targets: of the loss that is traced with the model; None without.
    """

    tensors: tuple[Tensor, ...]
    structure: Structure
    targets: Structure | None = None

    @classmethod
    def of(cls, given: Any, targets: Any = None) -> Arguments:
        """One tensor, several, or a dict of named arguments; words and numbers may be among them."""
        tensors, structure = flatten((given,) if isinstance(given, Tensor) else _plain(given))
        if targets is None:
            return cls(tuple(tensors), structure)
        wanted, behind = flatten(targets if isinstance(targets, Tensor) else _plain(targets))
        return cls((*tensors, *wanted), structure, behind)

    def alike(self, given: Any, targets: Any = None) -> Arguments:
        """Others, with named ones in the same order as here."""
        return Arguments.of(_in_order(self.structure, given), _in_order(self.targets, targets))

    def __str__(self) -> str:
        """In words, behind the inputs the targets."""
        return (
            str(self.structure) if self.targets is None else f"{self.structure} with targets {self.targets}"
        )

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and named arguments, with copies of the tensors: torch takes one twice for one input."""
        given = self._copies(self.structure, 0)
        return ((), given) if isinstance(given, dict) else (given, {})

    def call_with_loss(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Likewise of a `_WithLoss`."""
        assert self.targets is not None, "there is a loss"
        count = len(self.structure.paths)
        return (self._copies(self.structure, 0), self._copies(self.targets, count)), {}

    def _copies(self, structure: Structure, start: int) -> Any:
        # Parameters on "meta" are stood in for by tensors on the CPU, so an example there must be, too.
        return structure.rebuild(
            torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().clone()
            for tensor in self.tensors[start:]
        )


def _plain(given: Any) -> Any:
    return dict(given) if isinstance(given, Mapping) else tuple(given)


def _in_order(structure: Structure | None, given: Any) -> Any:
    if structure is None or not isinstance(given, Mapping) or set(structure.names) != set(given):
        return given
    return {name: given[name] for name in structure.names}


class _WithLoss(nn.Module):
    """A model and its loss as one."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self._loss = (loss_fn,)  # not as a module, whose buffers would be the model's

    def forward(self, given: Any, targets: Any) -> Any:
        """The loss; of a pair, the sum over the weight."""
        output = self.model(**given) if isinstance(given, dict) else self.model(*given)
        loss = self._loss[0](output, targets)
        return loss[0] / loss[1] if isinstance(loss, tuple) and len(loss) == 2 else loss


def capture(
    model: nn.Module,
    example: Arguments,
    *,
    training: bool,
    loss_fn: Callable[[Any, Any], Any] | None = None,
) -> Captured:
    """Trace a model in one mode; the model itself stays as it was.

    Args:
        model: any module that takes and returns tensors, however they are put together.
        example: its inputs, with targets where there is a loss.
        training: the mode.
        loss_fn: of output and targets; traced behind the model.

    Raises:
        PartitionError: it cannot be traced, returns something else than tensors, or replaces a buffer.
    """
    root = model if loss_fn is None else _WithLoss(model, loss_fn)
    args, kwargs = example.call() if loss_fn is None else example.call_with_loss()
    made: list[Structure] = []

    def simplify(_: nn.Module, __: Any, output: Any) -> tuple[Tensor, ...]:
        tensors, structure = flatten(output)
        made.append(structure)
        return tuple(tensors)

    simplifying = root.register_forward_hook(simplify)
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        # opt_einsum, where it is installed, chooses an order for one number of samples.
        any_number = cast(Any, torch.backends).opt_einsum.flags(enabled=False)
        with stand_ins([model], fake), in_mode(root, training), torch.enable_grad(), _quiet(), any_number:
            shapes = _shapes(root, args, kwargs)
            program = torch.export.export(root, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch raises dozens of classes, most of them private
        raise tracing_error(model, error) from error
    finally:
        simplifying.remove()
    return _described(type(model).__name__, program, made[-1], "" if loss_fn is None else "model.")


def checked_example(
    model: nn.Module, example: Any, loss_fn: Callable[[Any, Any], Any] | None = None
) -> Arguments:
    """The example as arguments; with a loss, a pair of inputs and targets.

    Raises:
        PartitionError: an input is none that a model takes, has no dimension, or has another number of
            samples.
    """
    name = type(model).__name__
    if loss_fn is None:
        given = Arguments.of(example)
    elif isinstance(example, tuple | list) and len(example) == 2:
        given = Arguments.of(*example)
    else:
        raise PartitionError(f"model {name}: with a loss, example must be (inputs, targets)")
    if isinstance(loss_fn, nn.Module) and any(it.requires_grad for it in loss_fn.parameters()):
        raise PartitionError(
            f"model {name}: loss_fn must have no parameters to be trained; let the model hold it"
        )
    for path, kind in given.structure.left_out.items():
        raise PartitionError(f"model {name}: input {path} of the example must be a tensor, got {kind}")
    if not given.tensors:
        raise PartitionError(f"model {name}: example must have at least one input, got none")
    samples = 0
    paths = (
        *given.structure.paths,
        *(f"targets {it}" for it in (given.targets.paths if given.targets else ())),
    )
    for path, value in zip(paths, given.tensors, strict=True):
        if not value.dim():
            raise PartitionError(f"model {name}: input {path} of the example must have a sample dimension")
        samples = samples or value.size(0)
        if value.size(0) != samples:
            raise PartitionError(
                f"model {name}: all inputs of the example must have as many samples as the first "
                f"({samples}), got {value.size(0)} for input {path}"
            )
    if samples < 2:
        # torch.export treats 1 as a constant, so that the graph would hold for one sample only.
        raise PartitionError(f"model {name}: example must have at least 2 samples, got {samples}")
    args, kwargs = given.call()
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise PartitionError(
            f"model {name}: forward does not take the example, {given.structure}: {error}"
        ) from error
    return given


def _shapes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """That dimension 0 of every input is the number of samples, in the structure of forward's signature."""
    samples = torch.export.Dim("samples")
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for value in flatten((args, kwargs))[0]:
        shapes[value] = {0: samples}
    return shapes.dynamic_shapes(model, args, kwargs)  # type: ignore[no-untyped-call]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch prints on the way to an error, which says it in one line; the debug log has it."""
    loggers = [logging.getLogger(name) for name in _LOUD]
    words = io.StringIO()

    def keep(record: logging.LogRecord) -> bool:
        words.write(f"{record.getMessage()}\n")
        return False

    for logger in loggers:
        logger.addFilter(keep)
    try:
        with redirect_stderr(words), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)
        log.debug("torch.export said: %s", words.getvalue())


def _described(
    name: str, program: torch.export.ExportedProgram, structure: Structure, prefix: str
) -> Captured:
    nodes = {node.name: node for node in program.graph.nodes}
    inputs: list[fx.Node] = []
    parameters: dict[str, str] = {}
    buffers: dict[str, str] = {}
    literals: dict[str, Tensor] = {}
    for spec in program.graph_signature.input_specs:
        match spec.kind:
            case InputKind.USER_INPUT if isinstance(spec.arg, ConstantArgument):
                pass
            case InputKind.USER_INPUT:
                inputs.append(nodes[spec.arg.name])
            case InputKind.PARAMETER if spec.target is not None:
                parameters[spec.arg.name] = spec.target.removeprefix(prefix)
            case InputKind.BUFFER if spec.target is not None:
                buffers[spec.arg.name] = spec.target.removeprefix(prefix)
            case InputKind.CONSTANT_TENSOR if spec.target is not None:
                literals[spec.arg.name] = program.constants[spec.target]
            case _:
                raise PartitionError(f"model {name}: input {spec.arg.name} must be a tensor")
    for written in program.graph_signature.output_specs:
        if written.kind is not OutputKind.USER_OUTPUT:
            raise PartitionError(
                f"model {name}: buffer {written.target} is replaced in forward; change it in place (copy_)"
            )
    returned = tuple(next(node for node in program.graph.nodes if node.op == "output").args[0])
    loss = _loss_of(name, structure, returned)
    if loss is None and structure.left_out:
        caches = " (pass use_cache=False)" if any("Cache" in it for it in structure.left_out.values()) else ""
        raise PartitionError(f"model {name}: must return tensors, got {structure}{caches}")
    return Captured(
        program.graph_module,
        tuple(inputs),
        parameters,
        buffers,
        literals,
        returned if loss is None else (loss,),
        structure,
        loss is not None,
        prefix,
        inputs[0].meta["val"].shape[0].node.expr,
        inputs[0].meta["val"].shape[0].node.hint,
    )


def _loss_of(name: str, structure: Structure, returned: tuple[fx.Node, ...]) -> fx.Node | None:
    """The loss among what a model returns: the one number there, or of several that called loss.

    Raises:
        PartitionError: it returns no tensor, or numbers of which none is called loss.
    """
    if not returned:
        raise PartitionError(f"model {name}: must return tensors, got {structure}")
    numbers = {
        path: node
        for path, node in zip(structure.paths, returned, strict=True)
        if not node.meta["val"].dim() and node.meta["val"].is_floating_point()
    }
    if len(numbers) > 1 and "loss" not in numbers:
        raise PartitionError(
            f"model {name}: must call the loss among the numbers that it returns `loss`, got {structure}"
        )
    return numbers.get("loss", next(iter(numbers.values()), None))
