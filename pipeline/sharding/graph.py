"""The operators that are divided: those of a trace, cheap ones merged into who makes what they read.

    linear  view  transpose  mul | matmul  masked_fill | softmax  dropout | matmul ...

What goes element by element, and what only describes memory anew, is divided like what it reads: it follows,
unless that would forbid a division of the operator that it follows (a view that joins samples and positions).
Of several inputs it follows the last one made, so that no circle arises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from arborcast.pipeline.operators import Given, Operand, OperatorTrace, Primitive
from arborcast.pipeline.sharding.repeats import classes

Labels = tuple[int | None, ...]
"""For each dimension the number of its label; None where it must be whole."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as an operator sees it.

    Attributes:
        value: its name.
        labels: of its dimensions.
        shape: of the whole tensor.
        size_bytes: of the whole tensor.
        kept: whether the backward pass needs it as the operator read it.
    """

    value: str
    labels: Labels
    shape: tuple[int, ...]
    size_bytes: int
    kept: bool = False


@dataclass(frozen=True, slots=True)
class MemberOperator:
    """One operator of torch within a merged one.

    Attributes:
        flops: forward.
        backward_flops: backward.
        dtype: of its arithmetic.
        touched: labels and bytes of each tensor that it reads or writes; backward, twice of that.
        is_first: whether it comes before the sum over labels that are summed.
        is_trained: whether there is a backward pass.
    """

    flops: int
    backward_flops: int
    dtype: str
    touched: tuple[tuple[tuple[int, ...], int], ...]
    is_first: bool
    is_trained: bool


@dataclass(frozen=True, slots=True)
class Sum:
    """What must be added up where certain labels are divided, besides the result.

    Attributes:
        labels: any of them.
        over: labels of what is added up.
        size_bytes: of that, whole.
    """

    labels: frozenset[int]
    over: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Member:
    """One operator of torch within a merged one, to run it on parts.

    Attributes:
        value: what it makes.
        constants: what it reads that every rank has, in the order of its arguments.
    """

    value: Tensor
    constants: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class MergedOperator:
    """An operator with those that follow it.

    Attributes:
        name: of the value that the first of them makes.
        kind: of the first.
        result: what the first one makes.
        made: all values made, in order.
        module: where in the model it is.
        place: the layer of the model; -1 of what is given.
        parts: for each label, into at most how many parts it may be divided.
        summed: labels whose parts give results to be added up.
        inputs: what the first one reads.
        joined: what followers read besides, divided like the result.
        outputs: values that others read, or that the model returns.
        kept: values made here that the backward pass needs; divided like the result.
        kernels: all that run.
        sums: others inside.
        sample: the label that counts samples.
        given: of an input of the model or a parameter; else None.
        is_known: whether there was a rule for each operator in it.
        is_end: whether it gives to another stage or takes from one, in equal parts of all ranks.
    """

    name: str
    kind: str
    result: Tensor
    made: tuple[Member, ...]
    module: str = ""
    place: int = -1
    parts: tuple[int, ...] = ()
    summed: frozenset[int] = frozenset()
    inputs: tuple[Tensor, ...] = ()
    joined: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    kept: tuple[Tensor, ...] = ()
    kernels: tuple[MemberOperator, ...] = ()
    sums: tuple[Sum, ...] = ()
    sample: int | None = None
    given: Given | None = None
    is_known: bool = True
    is_end: bool = False

    @property
    def members(self) -> tuple[str, ...]:
        """Names of all values made."""
        return tuple(it.value.value for it in self.made)

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """All that others make and this reads."""
        return (*self.inputs, *self.joined)


@dataclass(frozen=True)
class Graph:
    """Operators in an order in which each stands behind what it reads.

    Attributes:
        name: of the model.
        samples: of a microbatch.
        operators: parameters and inputs of the model first.
        trained: names of values that get gradients.
        memory: for each value the one whose memory it shares, itself mostly.
    """

    name: str
    samples: int
    operators: tuple[MergedOperator, ...]
    trained: frozenset[str]
    memory: dict[str, str]

    @cached_property
    def maker(self) -> dict[str, tuple[int, int]]:
        """Of each value that crosses between operators: by number, operator and its output."""
        return {
            tensor.value: (number, which)
            for number, operator in enumerate(self.operators)
            for which, tensor in enumerate(operator.outputs)
        }

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """For each operator the first one that is the same in an equal block."""
        return classes(self)

    @cached_property
    def unknown(self) -> tuple[str, ...]:
        """Operators without a rule, which stay whole on every rank."""
        return tuple(it.name for it in self.operators if not it.is_known)


def merged(trace: OperatorTrace) -> Graph:
    """The operators of a trace with cheap ones merged."""
    merger = _Merger()
    for given in trace.given:
        merger.add_given(given)
    for primitive in trace.operators:
        merger.add(primitive)
    read = {operand.value for it in trace.operators for operand in it.inputs}
    returned = {it.name for it in trace.operators} - read
    outside = merger.crossing | returned
    return Graph(
        trace.name,
        trace.samples,
        tuple(group.finished(outside) for group in merger.groups),
        frozenset(merger.trained),
        merger.memory,
    )


@dataclass
class _OperatorBuilder:
    """An operator in the making."""

    name: str
    kind: str
    module: str
    place: int
    given: Given | None = None
    is_known: bool = True
    sample: int | None = None
    parts: list[int] = field(default_factory=list)
    summed: frozenset[int] = frozenset()
    inputs: list[Tensor] = field(default_factory=list)
    joined: list[Tensor] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    constants: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)
    kernels: list[MemberOperator] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)

    def finished(self, outside: set[str]) -> MergedOperator:
        return MergedOperator(
            result=self.values[self.name],
            made=tuple(Member(it, self.constants.get(name, ())) for name, it in self.values.items()),
            parts=tuple(self.parts),
            inputs=tuple(self.inputs),
            joined=tuple(self.joined),
            outputs=tuple(it for value, it in self.values.items() if value in outside or self.given),
            kept=tuple(self.kept.values()),
            kernels=tuple(self.kernels),
            sums=tuple(self.sums),
            **{name: getattr(self, name) for name in _AS_BUILT},
        )


_AS_BUILT = ("name", "kind", "module", "place", "summed", "sample", "given", "is_known")
"""What an operator in the making has as the finished one does."""


class _Merger:
    def __init__(self) -> None:
        self.groups: list[_OperatorBuilder] = []
        self.home: dict[str, int] = {}
        self.trained: set[str] = set()
        self.memory: dict[str, str] = {}
        self.crossing: set[str] = set()

    def add_given(self, given: Given) -> None:
        """A parameter or an input: every dimension may be divided."""
        group = _OperatorBuilder(
            given.name, "parameter" if given.is_parameter else "input", given.path, -1, given
        )
        group.parts = list(given.shape)
        labels = tuple(range(len(given.shape)))
        if given.is_trained:
            self.trained.add(given.name)
        if not given.is_parameter and given.shape:
            group.sample = 0
        self.memory[given.name] = given.name
        self.groups.append(group)
        self._made(group, len(self.groups) - 1, Tensor(given.name, labels, given.shape, given.size_bytes))

    def add(self, primitive: Primitive) -> None:
        """One operator: to the group of what it reads, or as one of its own."""
        if primitive.has_gradient and any(operand.value in self.trained for operand in primitive.inputs):
            self.trained.add(primitive.name)
        home = self._home(primitive)
        numbers = None if home is None else self._numbers(primitive, self.groups[home])
        if home is None or numbers is None:
            home = len(self.groups)
            self.groups.append(self._new(primitive))
            numbers = {label: at for at, label in enumerate(primitive.parts)}
            is_first = True
        else:
            group = self.groups[home]
            for label, number in numbers.items():
                group.parts[number] = math.gcd(group.parts[number], primitive.parts[label])
            is_first = False
        self._enter(primitive, home, numbers, is_first=is_first)

    def _home(self, primitive: Primitive) -> int | None:
        """The group that a cheap operator may follow."""
        homes = [self.home[operand.value] for operand in primitive.inputs]
        if not (primitive.is_cheap and primitive.is_known and homes):
            return None
        group = self.groups[max(homes)]
        if group.given is None:
            return max(homes) if group.is_known and group.place == primitive.place else None
        # A view of a parameter or of an input; whatever computes stands for itself.
        return max(homes) if not primitive.moves and len(homes) == 1 else None

    def _numbers(self, primitive: Primitive, group: _OperatorBuilder) -> dict[str, int] | None:
        """The label of the group for each of the operator's; None where it would forbid a division.

        Labels that the group's own values do not have are whole here.
        """
        numbers: dict[str, int] = {}
        dropped: set[str] = set()
        for operand in primitive.inputs:
            tensor = group.values.get(operand.value)
            if tensor is None:
                continue
            for label, number in zip(operand.dims, tensor.labels, strict=True):
                free = number is not None and group.parts[number] > 1
                if number is None or not free:
                    dropped |= {label} if label is not None else set()
                elif label is None or numbers.setdefault(label, number) != number:
                    return None
        if dropped & set(numbers) or len(set(numbers.values())) < len(numbers):
            return None
        if any(
            math.gcd(group.parts[number], primitive.parts[label]) == 1 for label, number in numbers.items()
        ):
            return None
        made = {label for label in primitive.output.dims if label is not None}
        if any(primitive.parts[label] > 1 for label in made - set(numbers) - dropped):
            return None  # a dimension that the group's own values are repeated along
        lost = {number for tensor in self._read_here(primitive, group) for number in tensor.labels}
        lost -= {number for label, number in numbers.items() if label in made}
        return None if any(it is not None and group.parts[it] > 1 for it in lost) else numbers

    def _read_here(self, primitive: Primitive, group: _OperatorBuilder) -> list[Tensor]:
        return [group.values[it.value] for it in primitive.inputs if it.value in group.values]

    def _new(self, primitive: Primitive) -> _OperatorBuilder:
        group = _OperatorBuilder(primitive.name, primitive.kind, primitive.module, primitive.place)
        group.is_known = primitive.is_known
        group.parts = list(primitive.parts.values())
        numbers = {label: at for at, label in enumerate(primitive.parts)}
        group.summed = frozenset(numbers[label] for label in primitive.summed)
        group.sums = [
            Sum(
                frozenset(numbers[label] for label in it.labels),
                tuple(numbers[label] for label in it.dims if label is not None),
                it.size_bytes,
            )
            for it in primitive.statistics
        ]
        return group

    def _enter(self, primitive: Primitive, home: int, numbers: dict[str, int], *, is_first: bool) -> None:
        group = self.groups[home]
        is_trained = primitive.name in self.trained
        if group.sample is None and primitive.sample is not None:
            group.sample = numbers.get(primitive.sample)
        output = _numbered(primitive.output, numbers)
        touched = [(_present(output), output.size_bytes)]
        for operand in primitive.inputs:
            tensor = _numbered(operand, numbers, kept=operand.kept and is_trained)
            touched.append((_present(tensor), tensor.size_bytes))
            if self.home[operand.value] != home:
                (group.inputs if is_first else group.joined).append(tensor)
                self.crossing.add(operand.value)
            elif tensor.kept:
                self._keep(group, group.values[operand.value])
        source = primitive.inputs[0].value if primitive.inputs else primitive.name
        is_view = not primitive.moves and source in self.memory
        self.memory[primitive.name] = self.memory[source] if is_view else primitive.name
        self._made(group, home, output)
        group.constants[primitive.name] = tuple(_numbered(it, numbers) for it in primitive.constants)
        if primitive.output.kept:
            self._keep(group, output)
        if primitive.extra_bytes and is_trained:
            mask = f"{primitive.name} mask"
            group.kept[mask] = Tensor(mask, output.labels, output.shape, primitive.extra_bytes)
        if primitive.moves:
            group.kernels.append(
                MemberOperator(
                    primitive.flops,
                    primitive.backward_flops,
                    primitive.dtype,
                    tuple(touched),
                    is_first,
                    is_trained,
                )
            )

    def _keep(self, group: _OperatorBuilder, tensor: Tensor) -> None:
        """Memory that several values share is kept once."""
        group.kept.setdefault(self.memory[tensor.value], tensor)

    def _made(self, group: _OperatorBuilder, number: int, tensor: Tensor) -> None:
        group.values[tensor.value] = tensor
        self.home[tensor.value] = number


def _numbered(operand: Operand, numbers: dict[str, int], *, kept: bool = False) -> Tensor:
    labels = tuple(None if it is None else numbers.get(it) for it in operand.dims)
    return Tensor(operand.value, labels, operand.shape, operand.size_bytes, kept)


def _present(tensor: Tensor) -> tuple[int, ...]:
    return tuple(it for it in tensor.labels if it is not None)
