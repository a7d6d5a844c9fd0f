"""The operators of a model with the dimensions by which each may be divided: what is sharded.

An operator is told as einsums are: every dimension of what it reads and makes has a label, or none where it
must be whole. What has one label is divided alike: `linear` is (b, s, k), (n, k) -> (b, s, n), k summed.
"""

from __future__ import annotations

from dataclasses import dataclass

Dims = tuple[str | None, ...]
"""The label of each dimension; None where it must be whole."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an operator reads or makes.

    Attributes:
        value: its name.
        dims: labels.
        shape: of the whole tensor.
        size_bytes: of the whole tensor.
        kept: whether the backward pass of this operator needs it.
    """

    value: str
    dims: Dims
    shape: tuple[int, ...]
    size_bytes: int
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Statistic:
    """What the ranks that divide a label must add up inside an operator, besides its result.

    Attributes:
        labels: dividing any of them needs it.
        dims: labels of the dimensions of what is added up.
        size_bytes: of that, whole; forward and backward together.
    """

    labels: frozenset[str]
    dims: Dims
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Primitive:
    """One operator of a traced graph.

    Attributes:
        name: of the value that it makes.
        kind: torch's name of the operator ("linear").
        inputs: what it reads of samples and parameters, in the order of its arguments.
        output: what it makes.
        parts: into at most how many equal parts each label may be divided; any divisor will do.
        summed: labels whose parts give results that must be added up.
        sample: the label of the dimension that counts samples; None where there is none.
        flops: of the forward pass.
        backward_flops: of the backward pass.
        dtype: of its arithmetic.
        is_cheap: whether it goes element by element, so that it may follow whoever makes what it reads.
        moves: whether it touches memory; views do not.
        is_known: whether there is a rule for it; without one it works on whole tensors.
        extra_bytes: that the backward pass needs besides, divided like the output (a dropout's mask).
        statistics: sums inside.
        place: the number of the model's layer.
        module: where in the model it is.
        constants: what else it reads, in that order; every rank has or makes them, and takes its parts.
        has_gradient: whether gradients come back through it to inputs that have any.
    """

    name: str
    kind: str
    inputs: tuple[Operand, ...]
    output: Operand
    parts: dict[str, int]
    summed: frozenset[str] = frozenset()
    sample: str | None = None
    flops: int = 0
    backward_flops: int = 0
    dtype: str = "float32"
    is_cheap: bool = False
    moves: bool = True
    is_known: bool = True
    extra_bytes: int = 0
    statistics: tuple[Statistic, ...] = ()
    place: int = 0
    module: str = ""
    constants: tuple[Operand, ...] = ()
    has_gradient: bool = True


@dataclass(frozen=True, slots=True)
class Given:
    """A value that no operator makes.

    Attributes:
        name: of the value.
        shape: of the whole tensor.
        size_bytes: of the whole tensor.
        is_parameter: else it is an input of the model, whose dimension 0 counts samples.
        is_trained: whether it gets a gradient.
        path: of a parameter in the model.
    """

    name: str
    shape: tuple[int, ...]
    size_bytes: int
    is_parameter: bool = False
    is_trained: bool = False
    path: str = ""


@dataclass(frozen=True, slots=True)
class OperatorTrace:
    """All operators of a model for a number of samples.

    Attributes:
        name: of the model.
        samples: for which sizes hold.
        given: inputs and parameters that are used.
        operators: each behind what it reads.
    """

    name: str
    samples: int
    given: tuple[Given, ...]
    operators: tuple[Primitive, ...]
