"""The loss that a model computes itself, for a share of the batch: what the shares give adds up to it.

    serial   cross_entropy(logits, labels)                       a mean over the tokens that count
    share    cross_entropy(logits, labels, "sum") / W            W: tokens that count in the whole batch

What depends on inputs alone and counts no samples (W) is computed from the whole batch. What depends on
parameters is summed where the model sums or takes means over samples; of such sums only linear functions can
be put together from shares.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves

from arborcast.pipeline.errors import PartitionError
from arborcast.pipeline.model.traced.effects import effects, is_tensor, with_defaults
from arborcast.pipeline.model.traced.operator_table import OperatorTable
from arborcast.pipeline.model.traced.segments import (
    LossCode,
    SegmentGraph,
    held_tensors,
    samples_node,
    size_node,
)
from arborcast.pipeline.model.traced.tensor_sizes import Sizes
from arborcast.pipeline.model.traced.trace_failures import line_of

_ATEN = torch.ops.aten
MEAN, SUM = 1, 2
"""The argument `reduction` of losses."""

WEIGHED = {_ATEN.cross_entropy_loss, _ATEN.nll_loss, _ATEN.nll_loss_nd, _ATEN.nll_loss2d}
"""Losses whose mean is over targets that count, by the weights of their classes."""

AVERAGED = {
    _ATEN.mse_loss,
    _ATEN.l1_loss,
    _ATEN.smooth_l1_loss,
    _ATEN.huber_loss,
    _ATEN.binary_cross_entropy,
    _ATEN.binary_cross_entropy_with_logits,
    _ATEN.kl_div,
    _ATEN.soft_margin_loss,
    _ATEN.hinge_embedding_loss,
    _ATEN.cosine_embedding_loss,
    _ATEN.margin_ranking_loss,
    _ATEN.triplet_margin_loss,
    _ATEN.poisson_nll_loss,
    _ATEN.multi_margin_loss,
    _ATEN.multilabel_margin_loss,
}
"""Losses whose mean is over all that they give without reduction."""

ADDITIVE = {_ATEN.add, _ATEN.sub, _ATEN.rsub, _ATEN.stack, _ATEN.cat, _ATEN.add_, _ATEN.sub_}
"""Linear in all that they read together, so that a constant counts by the size of the share."""

SCALING = {_ATEN.mul, _ATEN.div, _ATEN.mul_, _ATEN.div_, _ATEN.multiply, _ATEN.divide}
"""Linear in one of what they read."""

LINEAR = {
    _ATEN.neg,
    _ATEN.sum,
    _ATEN.mean,
    _ATEN.view,
    _ATEN.reshape,
    _ATEN.unsqueeze,
    _ATEN.squeeze,
    _ATEN.expand,
    _ATEN.select,
    _ATEN.slice,
    _ATEN.permute,
    _ATEN.to,
    _ATEN._to_copy,
    _ATEN.clone,
    _ATEN.contiguous,
    _ATEN.alias,
    _ATEN.detach,
    _ATEN.detach_,
}
"""Linear in the one tensor that they read."""

REMEDY = "leave the labels out of the inputs and give the trainer a loss_fn that returns a sum and its weight"


class State(Enum):
    """What a value of the loss is on a rank with a share of the samples."""

    CONSTANT = "the same whatever the batch"
    WHOLE = "of the inputs of the whole batch"
    SHARE = "of the samples of the share"
    SUM = "of the share, adding up over shares"


def loss_inputs(table: OperatorTable) -> tuple[str, ...]:
    """The model's inputs that its loss reads."""
    needed = table.needed([table.captured.outputs[0].name], table.outputs)
    return tuple(item.name for item in table.inputs if item.name in needed)


def loss_code(name: str, table: OperatorTable, labels: Sequence[str]) -> LossCode:
    """The loss of a trace.

    Args:
        name: of the model, for errors.
        table: of a model that returns its loss.
        labels: inputs of the model that it is given.

    Raises:
        PartitionError: the losses of shares do not add up to that of the batch: names the operator and line.
    """
    return _GraphWriter(name, table, labels).code()


class _GraphWriter:
    """Writes both graphs, operator by operator."""

    def __init__(self, name: str, table: OperatorTable, labels: Sequence[str]) -> None:
        self._name, self._table = name, table
        self._loss = table.captured.outputs[0].name
        self._samples = table.captured.samples
        needed = table.needed([self._loss], table.outputs)
        self._order = [name for name in table.nodes if name in needed]
        self._whole, self._share = fx.Graph(), fx.Graph()
        ends = {name: self._share.placeholder(name) for name in table.outputs}
        self._shares: dict[str, Any] = ends | {name: self._share.placeholder(name) for name in labels}
        self._wholes: dict[str, Any] = {name: self._whole.placeholder(name) for name in labels}
        self._samples_whole = self._whole.placeholder("samples")
        self._totals: dict[str, tuple[fx.Node, fx.Node]] = {}  # made in one graph, taken in the other
        self._weights: dict[str, str] = {}  # those of targets that count, by the name of their mean
        self._states = dict.fromkeys(ends, State.SHARE) | dict.fromkeys(labels, State.SHARE)
        self._trained = set(ends)
        self._ends = ends

    # ------------------------------------------------------------------ the graphs

    def code(self) -> LossCode:
        if not self._ends:
            raise PartitionError(f"model {self._name}: its loss must depend on its parameters and samples")
        # Placeholders come first: what is given of the whole batch, then constants, then operators.
        self._mark = self._share.placeholder("samples")
        held = held_tensors(self._table)
        paths: list[str] = []
        for name in self._order:
            if name in held:
                self._states[name] = State.CONSTANT
                if name in self._table.captured.parameters:
                    self._trained.add(name)
                self._wholes[name] = self._whole.placeholder(name)
                self._shares[name] = self._share.placeholder(name)
                paths.append(held[name])
        first, end = next(iter(self._ends.items()))
        self._count = samples_node(self._share, end, self._table.by_name[first])
        self._part = self._share.call_function(operator.truediv, (self._count, self._mark))
        for name in self._order:
            if name not in self._states and name not in self._table.sizes:
                node = self._table.nodes[name]
                if node.op == "get_attr":
                    raise self._refused(node, "is control flow inside the loss")
                self._add(node)
        if self._states[self._loss] is not State.SUM:
            raise PartitionError(
                f"model {self._name}: its loss must be a sum or a mean over samples, got one number that "
                f"depends on {self._states[self._loss].value}"
            )
        self._share.output(self._shares[self._loss])
        self._whole.output(tuple(made for made, _ in self._totals.values()))
        for graph in (self._share, self._whole):
            graph.eliminate_dead_code()
        owner = self._table.captured.module
        return LossCode(
            SegmentGraph(fx.GraphModule(owner, self._whole), tuple(paths)),
            SegmentGraph(fx.GraphModule(owner, self._share), tuple(paths)),
            {name: list(self._totals).index(total) for name, total in self._weights.items()},
        )

    def _add(self, node: fx.Node) -> None:
        sources = [it for it in node.all_input_nodes if it.name not in self._table.sizes]
        states = [self._states[it.name] for it in sources]
        changed = effects(node, Sizes(self._samples)).changes
        if any(self._is_given(it) for it in changed):
            raise self._refused(node, "changes in place what it is given")
        if self._counts(node) > 1:
            raise self._refused(node, "compares samples with each other")
        if self._trained.isdisjoint(it.name for it in sources):
            self._add_untrained(node, states)
            return
        self._trained.add(node.name)
        if State.SUM in states:
            if State.SHARE in states or self._counts(node):
                raise self._refused(node, "uses a sum over all samples for each of them")
            self._keep(node, State.SUM, self._linear(node))
        elif self._counts(node):
            self._keep(node, State.SHARE, self._copy(node, self._share, self._count))
        elif State.SHARE in states:
            self._keep(node, State.SUM, self._reduced(node))
        else:
            self._keep(node, State.CONSTANT, self._copy(node, self._share, self._mark))

    def _add_untrained(self, node: fx.Node, states: Sequence[State]) -> None:
        """What labels and constants make is there for the whole batch, and mostly for the share too."""
        given = with_defaults(node) if getattr(node.target, "overloadpacket", None) in WEIGHED else {}
        if given.get("reduction") == MEAN and not given["target"].meta["val"].is_floating_point():
            self._weight(node, given)
        self._wholes[node.name] = self._copy(node, self._whole, self._samples_whole)
        reads_sizes = any(it.name in self._table.sizes for it in node.all_input_nodes)
        if self._counts(node):
            self._keep(node, State.SHARE, self._copy(node, self._share, self._count))
        elif set(states) <= {State.CONSTANT} and not reads_sizes:
            self._keep(node, State.CONSTANT, self._copy(node, self._share, self._mark))
        else:
            self._states[node.name] = State.WHOLE

    def _keep(self, node: fx.Node, state: State, value: Any) -> None:
        self._states[node.name], self._shares[node.name] = state, value

    def _copy(self, node: fx.Node, graph: fx.Graph, samples: fx.Node) -> fx.Node:
        """The operator in one of the graphs, with sizes for so many samples."""
        value = self._value if graph is self._share else lambda it: self._wholes[it.name]

        def argument(source: fx.Node) -> Any:
            if source.name in self._table.sizes:
                return size_node(graph, samples, *self._table.sizes[source.name])
            return value(source)

        copy = graph.node_copy(node, argument)
        copy.meta = {}
        return copy

    def _value(self, source: fx.Node) -> Any:
        """What an operator of the share reads."""
        if self._states[source.name] is not State.WHOLE:
            return self._shares[source.name]
        return self._total(source.name, self._wholes[source.name])

    def _total(self, name: str, made: fx.Node) -> fx.Node:
        """A value of the whole batch, for the share."""
        if name not in self._totals:
            with self._share.inserting_before(self._mark):
                self._totals[name] = made, self._share.placeholder(name)
        return self._totals[name][1]

    # ------------------------------------------------------------------ sums and what is made of them

    def _reduced(self, node: fx.Node) -> fx.Node:
        """A sum over the share of what the model sums, or takes the mean of, over the batch."""
        packet = getattr(node.target, "overloadpacket", None)
        if packet in (_ATEN.sum, _ATEN.dot):
            return self._copy(node, self._share, self._count)
        if packet is _ATEN.mean:
            total = self._copy(node, self._share, self._count)
            total.target = _ATEN.sum.default if node.target is _ATEN.mean.default else _ATEN.sum.dim_IntList
            (source,) = (it for it in node.all_input_nodes if it.name not in self._table.sizes)
            count = self._linear_count(
                node, lambda sizes: _elements(sizes, source.meta["val"]) // _elements(sizes, node.meta["val"])
            )
            return self._share.call_function(_ATEN.div.Tensor, (total, count))
        if packet in WEIGHED | AVERAGED:
            given = with_defaults(node)
            if given["reduction"] == SUM:
                return self._copy(node, self._share, self._count)
            if given["reduction"] == MEAN:
                total = self._copy(node, self._share, self._count)
                _set_argument(total, "reduction", SUM)
                if packet in WEIGHED:
                    count = self._weight(node, given)
                else:
                    count = self._linear_count(node, lambda sizes: _elements(sizes, _unreduced(node, sizes)))
                return self._share.call_function(_ATEN.div.Tensor, (total, count))
        raise self._refused(node, "is neither a sum nor a mean over samples")

    def _weight(self, node: fx.Node, given: dict[str, Any]) -> fx.Node:
        """What the targets of the whole batch weigh, or their number where they are probabilities."""
        target, weight = given["target"], given["weight"]
        if target.meta["val"].is_floating_point():
            values = given["self"].meta["val"]
            return self._linear_count(
                node, lambda sizes: _elements(sizes, values) // sizes.of(values.shape[1])
            )
        if target.name in self._trained or (weight is not None and weight.name in self._trained):
            raise self._refused(node, "has targets or weights that depend on parameters")
        graph, whole = self._whole, self._wholes[target.name]
        counts = graph.call_function(_ATEN.ne.Scalar, (whole, given["ignore_index"]))
        if weight is not None:
            known = graph.call_function(_ATEN.mul.Tensor, (whole, counts))  # 0 for those that do not count
            weights = graph.call_function(_ATEN.index.Tensor, (self._wholes[weight.name], [known]))
            counts = graph.call_function(_ATEN.mul.Tensor, (weights, counts))
        self._weights[node.name] = f"{node.name}_weight"
        return self._total(self._weights[node.name], graph.call_function(_ATEN.sum.default, (counts,)))

    def _linear_count(self, node: fx.Node, count: Callable[[Sizes], int]) -> fx.Node:
        """A number of elements of the whole batch, which is in proportion to its samples."""
        few, more = (count(Sizes(self._samples, samples)) for samples in (2, 4))
        if few <= 0 or more != 2 * few or few % 2:
            # As many as what was picked of the labels in the same way.
            source = next(it for it in node.all_input_nodes if is_tensor(it))
            alike = next((it for it in self._wholes if self._has_as_many(it, source)), None)
            if alike is not None:
                made = self._whole.call_function(_ATEN.sym_numel.default, (self._wholes[alike],))
                return self._total(f"{node.name}_count", made)
            raise self._refused(node, "is a mean over a number of elements that depends on values")
        return self._share.call_function(operator.mul, (self._mark, few // 2))

    def _linear(self, node: fx.Node) -> fx.Node:
        """What is made of sums over the batch, if it can be made of sums over shares."""
        packet = getattr(node.target, "overloadpacket", None)
        tensors = [it for it in node.all_input_nodes if it.name not in self._table.sizes]
        sums = [it for it in tensors if self._states[it.name] is State.SUM]
        if packet in ADDITIVE:
            many = 1 if packet in (_ATEN.stack, _ATEN.cat) else 2
            args = (*map(self._part_of, node.args[:many]), *node.args[many:])
            return self._share.create_node("call_function", node.target, args, dict(node.kwargs))
        scales = packet in SCALING and len(sums) == 1
        if scales and packet not in (_ATEN.mul, _ATEN.mul_, _ATEN.multiply):
            scales = node.args[0] is sums[0] and not node.kwargs
        if scales or ((packet in LINEAR or node.target is operator.getitem) and tensors == sums[:1]):
            return self._copy(node, self._share, self._mark)
        raise self._refused(node, "is not linear in sums over samples")

    def _part_of(self, operand: Any) -> Any:
        """What is added: a sum over the share, or as much of anything else as the share is of the batch."""
        if isinstance(operand, list | tuple):
            return [self._part_of(it) for it in operand]
        if not isinstance(operand, fx.Node):
            return self._share.call_function(operator.mul, (operand, self._part))
        if operand.name in self._table.sizes:
            size = size_node(self._share, self._mark, *self._table.sizes[operand.name])
            return self._share.call_function(operator.mul, (size, self._part))
        if self._states[operand.name] is State.SUM:
            return self._shares[operand.name]
        return self._share.call_function(_ATEN.mul.Tensor, (self._value(operand), self._part))

    # ------------------------------------------------------------------ what operators are

    def _counts(self, node: fx.Node) -> int:
        """How many dimensions of a value depend on the batch."""
        leaves = (it for it in tree_leaves(node.meta.get("val")) if isinstance(it, Tensor))
        return max((sum(isinstance(size, torch.SymInt) for size in it.shape) for it in leaves), default=0)

    def _has_as_many(self, name: str, source: fx.Node) -> bool:
        """Whether a value has as many elements as another one, whatever the values."""
        node = self._table.nodes[name]
        return is_tensor(node) and statically_known_true(
            node.meta["val"].numel() == source.meta["val"].numel()
        )

    def _is_given(self, node: fx.Node) -> bool:
        """Whether a value shares memory with what the loss is given."""
        if node.op == "placeholder" or node.name in self._table.outputs:
            return True
        return any(self._is_given(it) for it in effects(node, Sizes(self._samples)).shares)

    def _refused(self, node: fx.Node, why: str) -> PartitionError:
        return PartitionError(
            f"model {self._name}: its loss cannot be summed over parts of a batch: {node.target}"
            f"{line_of(node)} {why}; {REMEDY}"
        )


def _elements(sizes: Sizes, value: Any) -> int:
    return math.prod(sizes.shape(value))


def _unreduced(node: fx.Node, sizes: Sizes) -> Any:
    """What an operator with an argument `reduction` gives without it, on the device that holds no data."""
    given = with_defaults(node) | {"reduction": 0}
    given = fx.map_arg(given, lambda it: sizes.stand_in(it.meta["val"]))
    with torch.no_grad():
        return node.target(**given)  # type: ignore[operator]


def _set_argument(node: fx.Node, name: str, value: Any) -> None:
    names = [it.name for it in node.target._schema.arguments]  # type: ignore[union-attr]
    at = names.index(name)
    if at < len(node.args):
        node.update_arg(at, value)
    else:
        node.update_kwarg(name, value)
