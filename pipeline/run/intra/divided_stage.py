"""A stage on a mesh: parameters as `DTensor`s, operators on local parts, every tensor moved as planned.

    value of maker, as it made it  --path there-->  as a reader asks  --operator-->  its result, summands
                                   <--path back---  its gradient                     --path--> added up

A tensor that several operators read alike is brought there once in each pass, and its gradient back once.
Weights that are stored more finely than they are read are gathered for each pass and let go after it; of all
others gradients add up where they arise, until the last microbatch.
"""

from __future__ import annotations

import operator as python
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.meshes import Spec
from arborcast.pipeline.model.traced.capture import Captured
from arborcast.pipeline.model.traced.effects import is_random, named
from arborcast.pipeline.model.traced.model import Traced
from arborcast.pipeline.model.traced.operator_reader import arguments
from arborcast.pipeline.model.traced.segments import literal_path, register
from arborcast.pipeline.model.traced.tensor_sizes import Sizes
from arborcast.pipeline.operators import OperatorTrace
from arborcast.pipeline.run.intra.changes import changed_arguments
from arborcast.pipeline.run.intra.constants import Constants, ancestors, is_number
from arborcast.pipeline.run.intra.divided_operators import Division, run
from arborcast.pipeline.run.intra.divided_pass import Pass
from arborcast.pipeline.run.intra.mesh_collectives import MeshCollectives, moved
from arborcast.pipeline.run.intra.routes import PreparedRead, additions, readings
from arborcast.pipeline.run.prepared_layers import local, over
from arborcast.pipeline.sharding.graph import Graph, Member, MergedOperator
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.specs import spec_of
from arborcast.pipeline.sharding.strategies import Strategy, gathering

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class PreparedMember:
    """One operator of torch on this rank's parts, with all that is the same in every pass.

    Attributes:
        name: of what it makes.
        node: of the graph.
        division: how it is divided.
        sources: of each tensor that it reads the key, and where it is: with what the merged operator makes
            (its name), with what it reads (None), or with constants (the node, and how it lies).
        options: arguments by their keys that are the same in every pass.
        others: those that depend on it.
        keys: of each argument by name, of a list those of its entries.
        changed: keys of what it changes in place.
        is_random: whether it draws random numbers.
        partner: what stands for it in evaluation, if that is another graph's.
    """

    name: str
    node: fx.Node
    division: Division
    sources: tuple[tuple[str, str | tuple[fx.Node, Spec] | None], ...]
    options: Mapping[str, Any]
    others: Mapping[str, Any]
    keys: tuple[tuple[str, str | tuple[str, ...]], ...]
    changed: tuple[str, ...]
    is_random: bool
    partner: fx.Node | None


@dataclass
class HeldParameter:
    """A parameter on this rank.

    Attributes:
        operator: of the graph.
        stored: how passes find it.
        update: how its gradient and its update are divided.
        parameter: as the optimizer has it.
        views: of it as passes find it.
        update_views: of it as its update is divided.
        values: it and its views, by name, this rank's stored parts; until the next update.
        leaves: what passes read, where gradients add up.
        anchors: numbers that stand in passes for what is gathered for each of them, whose gradients go home.
        gradient: of this rank's part of the update, what has come home so far.
    """

    operator: MergedOperator
    stored: Spec
    update: Spec
    parameter: nn.Parameter
    views: tuple[PreparedMember, ...]
    update_views: tuple[PreparedMember, ...]
    values: dict[str, Tensor] = field(default_factory=dict)
    leaves: dict[PreparedRead, Tensor] = field(default_factory=dict)
    anchors: dict[PreparedRead, Tensor] = field(default_factory=dict)
    gradient: Tensor | None = None


class DividedStage:
    """The operators of a stage on this rank.

    Args:
        traced: the model, whose parameters and buffers are copied.
        trace: its operators, for the samples of a microbatch.
        graph: the same, merged; of some layers, with what crosses their ends (`sharding.slices`).
        chosen: a strategy for each; None for inputs.
        setting: whose prices choose the paths.
        collectives: of the mesh.
        values: of some parameters, by their first names, instead of the model's.
        rest: as `undivided` gives it, of which the stage takes possession.

    Attributes:
        module: its parameters and `rest`, by all names that they have in the model; once distributed.
        rest: all else that the model holds, by the first name of each: whole.
        is_last: whether it gives the loss.
        operators: of the graph.
        readings: what each of them reads.
        members: each one's operators of torch.
        ways: by name in how many ways a value is read.

    Raises:
        PlanError: an operator cannot be run as it is divided.
    """

    def __init__(
        self,
        traced: Traced,
        trace: OperatorTrace,
        graph: Graph,
        chosen: Sequence[Strategy | None],
        setting: Setting,
        collectives: MeshCollectives,
        *,
        values: Mapping[str, Tensor],
        rest: dict[str, Tensor],
    ) -> None:
        """Prepare every operator; `distribute` is to follow."""
        captured = traced.training.captured
        self._captured, self._holdings, names = captured, traced.holdings, traced.holdings.names
        self._graph, self._chosen, self._setting = graph, tuple(chosen), setting
        self._collectives = collectives
        self._nodes = {node.name: node for node in captured.module.graph.nodes}
        self._primitives = {it.name: it for it in trace.operators}
        self._varying = {*self._primitives, *(it.name for it in trace.given)}
        self._sizes = Sizes(captured.samples, trace.samples)
        self._totals: dict[str, Tensor] = {}
        self._partners: dict[str, fx.Node] = {}  # in evaluation
        if not isinstance(traced.evaluation, str):
            table, partners = traced.evaluation
            self._partners = {name: table.nodes[theirs] for name, theirs in partners.items()}
        self._counters = {names[path]: node for path, node in _counters(captured)}
        self.rest, self._values = rest, values
        self._constants = Constants(
            captured,
            self._sizes,
            {node: self.rest[names[path]] for node, path in captured.buffers.items()},
            collectives,
        )
        several = {it.name for it in self._nodes.values() if not isinstance(it.meta.get("val"), Tensor)}
        self.operators = graph.operators
        self.readings = readings(graph, chosen, setting, several)
        self.ways = Counter(it.value for it in {it for own in self.readings for it in own})
        self._additions = list(additions(graph, chosen, setting))
        self.members = [tuple(self._prepared(*pair)) for pair in zip(graph.operators, chosen, strict=True)]
        self._labels, self._losses = traced.labels, traced.losses
        self._weights = self._weights_of_losses()
        self._model = traced.model
        self.module = nn.Module()  # without names of ours, which might be in their way
        self._result = captured.outputs[0].name
        self.is_last = self._result in graph.maker

    def distribute(self, mesh: DeviceMesh | None) -> None:
        """Divide the parameters over the mesh as torch has it, None for one rank; all its ranks call it."""
        pairs = zip(self._graph.operators, self._chosen, strict=True)
        self._held = {
            number: self._hold(operator, way, mesh)
            for number, (operator, way) in enumerate(pairs)
            if way is not None and way.update is not None
        }
        known = {it: held.parameter for it, held in self.parameters.items()} | self.rest
        for name, _, is_saved in self._holdings.taken(known):
            register(self.module, name, known[self._holdings.names[name]], is_saved)
        self.spread_updates()

    # ------------------------------------------------------------------ passes

    def begin(self, inputs: Sequence[Tensor]) -> None:
        """Before the passes of a batch: what its targets weigh, where a loss is a mean over those that count.

        Args:
            inputs: of all microbatches.
        """
        if not self._weights:
            return
        code, labels = self._losses[0].whole, (inputs[it] for it in self._labels)
        with torch.no_grad():
            made = code.module(*labels, inputs[0].size(0), *map(self._undivided, code.tensors))
        self._totals.update({name: made[at] / self._setting.microbatches for name, at in self._weights})

    def _weights_of_losses(self) -> tuple[tuple[str, int], ...]:
        """Losses here that are means over targets that count, as `LossCode.weights`, of several microbatches.

        Raises:
            PlanError: there are several microbatches, and what targets weigh is known only in a pass.
        """
        count, members = self._setting.microbatches, {it.name for own in self.members for it in own}
        if count == 1 or not self._losses:
            return ()
        code = self._losses[0]
        values: Any = code.whole.module.graph.output_node().args[0]
        for name in sorted(members & code.weights.keys()):
            for it in filter(is_random, ancestors(values[code.weights[name]])):
                raise PlanError(
                    f"operator {name}: must have 1 microbatch, as its target depends on random numbers of "
                    f"{it}, got {count}"
                )
        return tuple((name, at) for name, at in code.weights.items() if name in members)

    def _undivided(self, path: str) -> Tensor | None:
        """A tensor of the model by its name in segments; None of a parameter."""
        literals = {literal_path(name): it for name, it in self._captured.literals.items()}
        return literals.get(path, self.rest.get(self._holdings.names.get(path, "")))

    def forward(
        self,
        inputs: Sequence[Tensor],
        received: Mapping[str, Tensor],
        *,
        turn: int = 0,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """What a microbatch gives to the next stage, and its loss on the last one.

        Args:
            inputs: whole ones, in the order of the model's.
            received: from the stage before, by name: this rank's parts.
            turn: of passes; random numbers differ by it.

        Returns:
            This rank's parts of what crosses, by name; and the loss, the same on every rank of the mesh.
        """
        if self.module.training:
            for name, node in self._counters.items():
                self.rest[name].copy_(self._constants.anew(node, turn))
        names = (node.name for node in self._captured.inputs)
        going = Pass(self, dict(zip(names, inputs, strict=True)), received, turn)
        for number, operator in enumerate(self.operators):
            if operator.given is None:
                going.run(number)
        return going.sent, going.values[self._result] if self.is_last else None

    def finish_gradients(self) -> None:
        """Bring home the gradients of all passes since the last update, as `grad` of the parameters."""
        for held in self._held.values():
            for reading, leaf in held.leaves.items():
                if leaf.grad is not None and reading.route is not None and reading.route.back is not None:
                    home = self._collectives.follow(leaf.grad, *reading.route.back)
                    self.take_home(held, reading.value, home)
            held.leaves = {}
            if held.gradient is not None and held.parameter.requires_grad:
                held.parameter.grad = over(held.gradient, held.parameter)
            held.gradient = None

    def spread_updates(self) -> None:
        """After the optimizer, or new values: bring every part that changed to where it is stored."""
        self._constants.forget()
        for held in self._held.values():
            held.leaves = {}
            part = local(held.parameter).detach()
            if held.update != held.stored:
                way = gathering(held.operator, held.stored, held.update, self._setting)
                assert way is not None, "links allowed it"
                part = self._collectives.follow(part, held.update, way.path)
            held.values = self._views(held.operator, held.views, part)

    def leaves(self) -> Iterator[Tensor]:
        """What stands for parameters in the graphs of passes."""
        for held in self._held.values():
            yield from held.leaves.values()
            yield from held.anchors.values()

    @property
    def parameters(self) -> dict[str, HeldParameter]:
        """Those of the stage, by the first of their names in the model."""
        names = self._holdings.names
        return {names[it.operator.given.path]: it for it in self._held.values() if it.operator.given}

    def take_home(self, held: HeldParameter, value: str, gradient: Tensor) -> None:
        """Add a gradient that came home, of a parameter or of a view of it."""
        if value != held.operator.name:
            with torch.enable_grad():
                own = local(held.parameter).detach().requires_grad_()
                view = self._views(held.operator, held.update_views, own)[value]
            (gradient,) = torch.autograd.grad(view, own, gradient)
        held.gradient = gradient if held.gradient is None else held.gradient + gradient

    # ------------------------------------------------------------------ what passes need

    @property
    def collectives(self) -> MeshCollectives:
        """Of the mesh."""
        return self._collectives

    def held(self, number: int) -> HeldParameter:
        """A parameter."""
        return self._held[number]

    def whole_views(self, number: int, whole: Tensor) -> dict[str, Tensor]:
        """An input and its views."""
        return self._views(self.operators[number], self.members[number], whole)

    def added_up(self, number: int, result: Any) -> Any:
        """The result of an operator from its summands."""
        there, back = self._additions[number]
        if not there[1].steps and not (back and back[1].steps):
            return result
        return moved(result, self._collectives, there, back)

    def run_member(
        self,
        it: PreparedMember,
        values: Mapping[str, Any],
        reads: Iterator[Tensor],
        turn: int,
        cast: Callable[[Tensor], Tensor] | None = None,
    ) -> Any:
        """One operator of torch within a merged one.

        Args:
            it: the operator.
            values: what is made within the merged one, by name.
            reads: what others made, as it is read, in the order of `MergedOperator.reads`.
            turn: of the pass, for random numbers.
            cast: what autocast does to a tensor that a product reads; None to leave it to autocast.
        """
        read: dict[str, Any] = dict(it.options)
        for key, source in it.sources:
            if source is None:
                read[key] = next(reads)
                if cast is not None and it.division.primitive.kind in _LOWERED:
                    read[key] = cast(read[key])
            elif isinstance(source, str):
                read[key] = values[source]
            else:
                node, spec = source
                read[key] = _parts(self._constants.value(node, turn), spec, self._collectives)
        if it.partner is not None and not self.module.training:
            if it.partner.target is not it.node.target:  # evaluation leaves it out
                return read[it.sources[0][0]]
            evaluated = arguments(it.partner)[1]  # such as whether to drop out
            read |= {key: value for key, value in evaluated.items() if not _nodes(value)}
        for key, value in it.others.items():
            read[key] = self._constants.plain(value, turn)
        for key in it.changed:
            read[key] = read[key].clone()
        given = {
            name: read[key] if isinstance(key, str) else [read[each] for each in key] for name, key in it.keys
        }
        if not it.is_random:
            return run(it.node.target, given, it.division)
        with self._constants.drawing(it.node, turn, it.division.assignment):
            return run(it.node.target, given, it.division)

    # ------------------------------------------------------------------ preparation

    def _hold(self, operator: MergedOperator, way: Strategy, mesh: DeviceMesh | None) -> HeldParameter:
        assert operator.given is not None and way.update is not None, "it is a parameter"
        path = operator.given.path
        whole = python.attrgetter(path)(self._model)
        value = self._values.get(self._holdings.names[path], whole)
        parameter = nn.Parameter(_distributed(value, mesh, way.update), whole.requires_grad)
        views, update_views = (tuple(self._viewing(operator, it)) for it in (way.before, way.update))
        return HeldParameter(operator, way.before, way.update, parameter, views, update_views)

    def _prepared(self, operator: MergedOperator, way: Strategy | None) -> Iterator[PreparedMember]:
        """What passes run of a merged operator; of what is given the views, of whole tensors."""
        if operator.is_end:
            return
        if way is None or operator.given is not None:
            yield from self._viewing(operator, (None,) * len(self._setting.sizes))
            return
        for member in operator.made:
            made = self._member(operator, member, way)
            made.division.check(arguments(made.node)[1], self._setting.microbatches)
            yield made

    def _viewing(self, operator: MergedOperator, spec: Spec) -> Iterator[PreparedMember]:
        """The views that follow a parameter or an input: labels are its dimensions."""
        for member in operator.made[1:]:
            yield self._member(operator, member, Strategy(spec, spec, (), ()))

    def _member(self, operator: MergedOperator, member: Member, way: Strategy) -> PreparedMember:
        name = member.value.value
        node, division = self._nodes[name], self._division(operator, member, way)
        tensors, options = arguments(node)
        constants = iter(member.constants)
        sources = tuple(
            (
                key,
                it.name
                if it.name in operator.members
                else None
                if it.name in self._varying
                else (it, spec_of(next(constants), division.assignment)),
            )
            for key, it in tensors.items()
        )
        given = named(node)
        keys = tuple(
            (
                key,
                key
                if key in tensors or key in options
                else tuple(f"{key}.{at}" for at in range(len(given[key]))),
            )
            for key in given
        )
        varying = {key: it for key, it in options.items() if not all(map(is_number, _nodes(it)))}
        return PreparedMember(
            name,
            node,
            division,
            sources,
            {key: self._constants.plain(it, 0) for key, it in options.items() if key not in varying},
            varying,
            keys,
            changed_arguments(node),
            is_random(node),
            self._partners.get(name),
        )

    def _division(self, operator: MergedOperator, member: Member, way: Strategy) -> Division:
        name, assignment = member.value.value, way.after
        primitive = self._primitives[name]
        numbers = {
            word: number
            for word, number in zip(primitive.output.dims, member.value.labels, strict=True)
            if word is not None and number is not None
        }
        if name == operator.name:
            numbers, assignment = {word: at for at, word in enumerate(primitive.parts)}, way.before
        shape = list(member.value.shape)
        for size, at in zip(self._setting.sizes, spec_of(member.value, assignment), strict=True):
            if at is not None:
                shape[at] //= size
        return Division(primitive, numbers, assignment, tuple(shape), self._collectives, self._totals)

    def _views(
        self, operator: MergedOperator, members: Sequence[PreparedMember], first: Tensor
    ) -> dict[str, Tensor]:
        """A parameter or an input, and the views that follow it."""
        values: dict[str, Tensor] = {operator.name: first}
        for member in members:
            values[member.name] = self.run_member(member, values, iter(()), 0)
        return values


_LOWERED = {
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "scaled_dot_product_attention"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
}
"""Operators whose tensors autocast casts on CPUs."""


def undivided(traced: Traced, trace: OperatorTrace) -> dict[str, Tensor]:
    """A copy of all that a model holds beside the parameters of divided stages, by first names."""
    names = traced.holdings.names
    divided = {names[it.path] for it in trace.given if it.is_parameter}
    others = [it for it in dict.fromkeys(names.values()) if it not in divided]
    return {it: python.attrgetter(it)(traced.model).detach().clone() for it in others}


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def _counters(captured: Captured) -> Iterator[tuple[str, fx.Node]]:
    """Buffers that nothing reads but what changes them for each pass, as batch norm counts batches."""
    for node in captured.operators:
        sources = node.all_input_nodes
        if changed_arguments(node) and len(sources) == 1 and not node.users:
            (buffer,) = sources
            if buffer.name in captured.buffers and set(buffer.users) == {node}:
                yield captured.buffers[buffer.name], node


def _parts(value: Any, spec: Spec, collectives: MeshCollectives) -> Any:
    return collectives.part(value, spec) if isinstance(value, Tensor) else value


def _distributed(whole: Tensor, mesh: DeviceMesh | None, spec: Spec) -> Tensor:
    """As torch divides it, in new memory; the values are those of the mesh's first rank."""
    copy = whole.detach().clone()
    if mesh is None:
        return copy
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    return distribute_tensor(copy, mesh, [Replicate() if at is None else Shard(at) for at in spec])
