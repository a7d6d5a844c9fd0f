"""A stage on a mesh: parameters as `DTensor`s, operators on local parts, every tensor moved as planned.

    value of maker, as it made it  --path there-->  as a reader asks  --operator-->  its result, summands
                                   <--path back---  its gradient                     --path--> added up

A tensor that several operators read alike is brought there once in each pass, and its gradient back once.
Weights that are stored more finely than they are read are gathered for each pass and let go after it; of all
others gradients add up where they arise, until the last microbatch.
"""

from __future__ import annotations

import operator as python
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.model.traced.capture import Captured
from arborcast.pipeline.model.traced.effects import is_random
from arborcast.pipeline.model.traced.model import Traced
from arborcast.pipeline.model.traced.operators import arguments, kind_of, named
from arborcast.pipeline.model.traced.segments import register
from arborcast.pipeline.model.traced.sizes import Sizes
from arborcast.pipeline.operators import OperatorTrace
from arborcast.pipeline.run.intra.changes import changed_arguments, check_changes
from arborcast.pipeline.run.intra.collectives import MeshCollectives, moved
from arborcast.pipeline.run.intra.operators import AGREEING, MEAN, Division, called, run, weight_of
from arborcast.pipeline.run.sharded import local, over
from arborcast.pipeline.sharding.graph import Graph, Member, Operator
from arborcast.pipeline.sharding.resharding import Path
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.specs import Assignment, Spec, spec_of
from arborcast.pipeline.sharding.strategies import (
    Demand,
    Strategy,
    crossing_ways,
    gathering,
    inner_ways,
    summands_of,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Reading = tuple[str, Demand]
"""A value and how it is read."""


@dataclass(frozen=True)
class _Route:
    """How a value gets to readers that ask alike, and its gradient back.

    Attributes:
        there: how it lies, and its path.
        back: how its gradient lies, and its path; None where it has none.
        is_gathered: whether it is a parameter that is brought there anew for each pass.
    """

    there: tuple[Spec, Path]
    back: tuple[Spec, Path] | None
    is_gathered: bool


@dataclass
class _Held:
    """A parameter on this rank.

    Attributes:
        operator: of the graph.
        stored: how passes find it.
        update: how its gradient and its update are divided.
        parameter: as the optimizer has it.
        values: it and its views, by name, this rank's stored parts; until the next update.
        leaves: what passes read, where gradients add up.
        gradient: of this rank's part of the update, what has come home so far.
    """

    operator: Operator
    stored: Spec
    update: Spec
    parameter: nn.Parameter
    values: dict[str, Tensor] = field(default_factory=dict)
    leaves: dict[Reading, Tensor] = field(default_factory=dict)
    gradient: Tensor | None = None


class ShardedStage:
    """The operators of a stage on this rank.

    Args:
        traced: the model, whose parameters and buffers are copied.
        trace: its operators, for the samples of a microbatch.
        graph: the same, merged; of some layers, with what crosses their ends (`sharding.slices`).
        chosen: a strategy for each; None for inputs.
        setting: whose prices choose the paths.
        collectives: of the mesh.
        connect: connects them, and gives the mesh as torch has it, once all else is checked; None for a
            mesh of one rank.
        seed: of random numbers.

    Attributes:
        module: its parameters and `rest`, by all names that they have in the model.
        rest: all else that the model holds, by the first name of each: whole, of this rank until `fill_rest`.
        is_last: whether it gives the loss.

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
        connect: Callable[[], DeviceMesh | None] | None,
        *,
        seed: int = 0,
    ) -> None:
        """Divide the model's parameters and prepare every operator."""
        captured = traced.training.captured
        self._captured, self._holdings, names = captured, traced.holdings, traced.holdings.names
        self._graph, self._chosen, self._setting = graph, tuple(chosen), setting
        self._collectives, self._seed = collectives, seed
        self._nodes = {node.name: node for node in captured.module.graph.nodes}
        self._primitives = {it.name: it for it in trace.operators}
        self._varying = {*self._primitives, *(it.name for it in trace.given)}
        self._sizes = Sizes(captured.samples, trace.samples)
        self._constants: dict[str, Any] = {}
        self._totals: dict[str, Tensor] = {}
        self._drawn: set[str] = set()  # random numbers, and what is made of them
        for node in captured.operators:
            if is_random(node) or any(it.name in self._drawn for it in node.all_input_nodes):
                self._drawn.add(node.name)
        self._filled = check_changes(captured, self._sizes, self._drawn)
        self._partners: dict[str, fx.Node] = {}  # in evaluation
        if not isinstance(traced.evaluation, str):
            table, partners = traced.evaluation
            self._partners = {name: table.nodes[theirs] for name, theirs in partners.items()}
        self._counters = {names[path]: node for path, node in _counters(captured)}
        divided = {names[it.path] for it in trace.given if it.is_parameter}  # here or in other stages
        others = [it for it in dict.fromkeys(names.values()) if it not in divided]
        self.rest = {it: python.attrgetter(it)(traced.model).detach().clone() for it in others}
        self._routes = dict(self._all_routes())
        self._sums = [self._sum(number) for number in range(len(graph.operators))]
        for operator, way in zip(graph.operators, chosen, strict=True):
            if way is not None and operator.given is None and not operator.is_end:
                for member in operator.made:
                    options = arguments(self._nodes[member.value.value])[1]
                    self._division(operator, member, way).check(options, setting.microbatches)
        self._weighed = list(self._weighed_losses())
        self._mesh = None if connect is None else connect()
        self.module = nn.Module()  # without names of ours, which might be in their way
        self._held = {
            number: self._hold(traced, operator, way)
            for number, (operator, way) in enumerate(zip(graph.operators, chosen, strict=True))
            if way is not None and way.update is not None
        }
        known = {it: held.parameter for it, held in self.parameters.items()} | self.rest
        for name, _, is_saved in traced.holdings.taken(known):
            register(self.module, name, known[traced.holdings.names[name]], is_saved)
        self._result = captured.outputs[0].name
        self.is_last = self._result in graph.maker
        self.spread_updates()

    # ------------------------------------------------------------------ passes

    def begin(self, batch: Sequence[Sequence[Tensor]]) -> None:
        """Before the passes of a batch: what its targets weigh, where a loss is a mean over those that count.

        Args:
            batch: the inputs of each microbatch.
        """
        self._totals = {}
        if len(batch) == 1:  # it weighs its own
            return
        for node in self._weighed:
            tensors, options = arguments(node)
            target, weight = tensors["target"], tensors.get("weight")
            total = torch.zeros(())
            for part in batch:
                inputs = {it.name: whole for it, whole in zip(self._captured.inputs, part, strict=True)}
                known = self._of_inputs(target, inputs)
                weights = None if weight is None else self._of_inputs(weight, inputs)
                total = total + weight_of(known, weights, options.get("ignore_index", -100))
            self._totals[node.name] = total / len(batch)

    def _weighed_losses(self) -> Iterator[fx.Node]:
        """Those that are means over targets that count.

        Raises:
            PlanError: there are several microbatches, and what targets weigh is known only in a pass.
        """
        members = (it for operator in self._graph.operators if not operator.given for it in operator.made)
        for node in (self._nodes.get(it.value.value) for it in members):
            if node is None or kind_of(node) not in AGREEING:
                continue
            tensors, options = arguments(node)
            if options.get("reduction", MEAN) != MEAN or tensors["target"].meta["val"].is_floating_point():
                continue
            if self._setting.microbatches > 1:
                for key in ("target", "weight"):
                    why = self._why_unknown(tensors[key]) if key in tensors else ""
                    if why:
                        raise PlanError(
                            f"operator {node}: must have 1 microbatch, as its {key} depends on {why}, got "
                            f"{self._setting.microbatches}"
                        )
            yield node

    def _why_unknown(self, node: fx.Node) -> str:
        """What a value depends on that is known only in a pass; empty for inputs and constants alone."""
        waiting, seen = [node], set[fx.Node]()
        while waiting:
            it = waiting.pop()
            if it in seen:
                continue
            seen.add(it)
            if it.name in self._captured.parameters:
                return f"parameter {self._captured.parameters[it.name]}"
            if is_random(it):
                return f"random numbers of {it}"
            waiting += it.all_input_nodes
        return ""

    def _of_inputs(self, node: fx.Node, inputs: Mapping[str, Tensor]) -> Any:
        """A value that depends on inputs alone."""
        if node.name in inputs:
            return inputs[node.name]
        if node.name not in self._varying:
            return self._constant(node, (0, 0))
        values = {key: self._of_inputs(it, inputs) for key, it in arguments(node)[0].items()}
        for key in changed_arguments(node):
            values[key] = values[key].clone()
        options = {key: it for key, it in arguments(node)[1].items() if key in named(node)}
        return called(
            node.target, _given(node, values | {k: self._plain(it, (0, 0)) for k, it in options.items()})
        )

    def forward(
        self,
        inputs: Sequence[Tensor],
        received: Mapping[str, Tensor],
        *,
        step: int = 0,
        microbatch: int = 0,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """What a microbatch gives to the next stage, and its loss on the last one.

        Args:
            inputs: whole ones, in the order of the model's.
            received: from the stage before, by name: this rank's parts.
            step: of the training; random numbers differ by it.
            microbatch: likewise.

        Returns:
            This rank's parts of what crosses, by name; and the loss, the same on every rank of the mesh.
        """
        if self.module.training:
            for name, node in self._counters.items():
                self.rest[name].copy_(self._constant(node, (step, microbatch)))
                del self._constants[node.name]
        names = (node.name for node in self._captured.inputs)
        going = _Pass(self, dict(zip(names, inputs, strict=True)), received, (step, microbatch))
        for number, operator in enumerate(self._graph.operators):
            if operator.given is None:
                going.run(number)
        return going.sent, going.values[self._result] if self.is_last else None

    def finish_gradients(self) -> None:
        """Bring home the gradients of all passes since the last update, as `grad` of the parameters."""
        for held in self._held.values():
            for reading, leaf in held.leaves.items():
                route = self._routes[reading]
                if leaf.grad is not None and route.back is not None:
                    self.take_home(held, reading[0], self._collectives.follow(leaf.grad, *route.back))
            held.leaves = {}
            if held.gradient is not None and held.parameter.requires_grad:
                held.parameter.grad = over(held.gradient, held.parameter)
            held.gradient = None

    def spread_updates(self) -> None:
        """After the optimizer, or new values: bring every part that changed to where it is stored."""
        self._constants = {}  # made of buffers that may have changed
        for held in self._held.values():
            held.leaves = {}
            part = local(held.parameter).detach()
            if held.update != held.stored:
                way = gathering(held.operator, held.stored, held.update, self._setting)
                assert way is not None, "links allowed it"
                part = self._collectives.follow(part, held.update, way.path)
            held.values = self._views(held.operator, held.stored, part)

    def forget(self) -> None:
        """After passes whose gradients are not asked for."""
        for held in self._held.values():
            held.leaves = {}

    def whole(self) -> dict[str, Tensor]:
        """The values of its parameters, and of `rest`, by first names; every rank of the mesh calls it."""
        found = {key: it.clone() for key, it in self.rest.items()}
        for name, held in self.parameters.items():
            first, part = held.operator.outputs[0], local(held.parameter).detach()
            replicas = (None,) * len(self._setting.sizes)
            path = self._setting.resharder.path(first.shape, first.size_bytes, held.update, replicas)
            assert path is not None, "links allowed to store it"
            found[name] = self._collectives.follow(part, held.update, path).clone()
        return found

    @property
    def parameters(self) -> dict[str, _Held]:
        """Those of the stage, by the first of their names in the model."""
        names = self._holdings.names
        return {names[it.operator.given.path]: it for it in self._held.values() if it.operator.given}

    def take(self, name: str, whole: Tensor) -> None:
        """Give a parameter other values; `spread_updates` is to follow."""
        held = self.parameters[name]
        local(held.parameter.detach()).copy_(self._collectives.part(whole, held.update))

    def fill_rest(self, rest: Mapping[str, Tensor]) -> None:
        """Take the values of `rest` on another rank."""
        for name, value in rest.items():
            self.rest[name].copy_(value)
        self._constants = {}

    def take_home(self, held: _Held, value: str, gradient: Tensor) -> None:
        """Add a gradient that came home, of a parameter or of a view of it."""
        if value != held.operator.name:
            with torch.enable_grad():
                own = local(held.parameter).detach().requires_grad_()
                view = self._views(held.operator, held.update, own)[value]
            (gradient,) = torch.autograd.grad(view, own, gradient)
        held.gradient = gradient if held.gradient is None else held.gradient + gradient

    # ------------------------------------------------------------------ what passes need

    @property
    def collectives(self) -> MeshCollectives:
        """Of the mesh."""
        return self._collectives

    def operator(self, number: int) -> tuple[Operator, Strategy]:
        """One of the graph, and how it is divided."""
        way = self._chosen[number]
        assert way is not None, "inputs are not run"
        return self._graph.operators[number], way

    def source(self, value: str) -> tuple[int, Operator]:
        """Who makes a value."""
        number = self._graph.maker[value][0]
        return number, self._graph.operators[number]

    def route(self, reading: Reading) -> _Route:
        """Between who makes a value and who reads it so."""
        return self._routes[reading]

    def readers(self) -> tuple[Counter[Reading], Counter[str]]:
        """How many operators read a value alike, and in how many ways it is read."""
        readers = Counter(
            (tensor.value, demand)
            for operator, way in zip(self._graph.operators, self._chosen, strict=True)
            if way is not None
            for tensor, demand in zip(operator.reads, way.demands, strict=True)
        )
        return readers, Counter(value for value, _ in readers)

    def held(self, number: int) -> _Held:
        """A parameter."""
        return self._held[number]

    def whole_views(self, operator: Operator, whole: Tensor) -> dict[str, Tensor]:
        """An input and its views."""
        return self._views(operator, (None,) * len(self._setting.sizes), whole)

    def added_up(self, number: int, result: Any) -> Any:
        """The result of an operator from its summands."""
        there, back = self._sums[number]
        if not there[1].steps and not (back and back[1].steps):
            return result
        return moved(result, self._collectives, there, back)

    def run_member(
        self,
        operator: Operator,
        member: Member,
        way: Strategy,
        values: Mapping[str, Any],
        reads: Iterator[Tensor],
        turn: tuple[int, int],
        cast: Callable[[Tensor], Tensor] | None = None,
    ) -> Any:
        """One operator of torch within a merged one.

        Args:
            operator: the merged one.
            member: which of its operators.
            way: how it is divided.
            values: what is made within the merged one, by name.
            reads: what others made, as it is read, in the order of `Operator.reads`.
            turn: step and microbatch, for random numbers.
            cast: what autocast does to a tensor that a product reads; None to leave it to autocast.
        """
        name = member.value.value
        node, division = self._nodes[name], self._division(operator, member, way)
        other = None if self.module.training else self._partners.get(name)
        constants, read = iter(member.constants), dict[str, Any]()
        tensors, options = arguments(node)
        for key, source in tensors.items():
            if source.name in values:
                read[key] = values[source.name]
            elif source.name in self._varying:
                read[key] = next(reads)
                if cast is not None and kind_of(node) in _LOWERED:
                    read[key] = cast(read[key])
            else:
                spec = spec_of(next(constants), division.assignment)
                read[key] = _parts(self._constant(source, turn), spec, self._collectives)
        if other is not None and other.target is not node.target:  # evaluation leaves it out
            return next(iter(read.values()))
        for key in changed_arguments(node):
            read[key] = read[key].clone()
        if other is not None:  # such as whether to drop out
            options |= {key: it for key, it in arguments(other)[1].items() if not _has_nodes(it)}
        plain = {key: self._plain(it, turn) for key, it in options.items()}
        with self._drawing(node, turn, division.assignment):
            return run(node.target, _given(node, read | plain), division)

    # ------------------------------------------------------------------ preparation

    def _all_routes(self) -> Iterator[tuple[Reading, _Route]]:
        for operator, way in zip(self._graph.operators, self._chosen, strict=True):
            if way is None or operator.given is not None:
                continue
            for tensor, demand in zip(operator.reads, way.demands, strict=True):
                number, which = self._graph.maker[tensor.value]
                source, made = self._graph.operators[number], self._chosen[number]
                if made is None:
                    continue
                spec, update = made.outputs[which], made.update
                if update is not None:
                    update = spec_of(source.outputs[which], update)
                ways = crossing_ways(tensor, spec, update, demand, self._setting)
                if ways is None:
                    raise PlanError(
                        f"operator {operator.name}: no links lead to {tensor.value} as {demand.spec}"
                    )
                there, back = (it.path for it in ways)
                if there.steps and not isinstance(self._nodes[tensor.value].meta["val"], Tensor):
                    raise PlanError(
                        f"operator {operator.name}: cannot move {tensor.value}, which is several tensors"
                    )
                yield (
                    (tensor.value, demand),
                    _Route(
                        (spec, there),
                        None if demand.gradient is None else (demand.gradient, back),
                        update is not None and there.ps > 0,
                    ),
                )

    def _sum(self, number: int) -> tuple[tuple[Spec, Path], tuple[Spec, Path] | None]:
        """The path of an operator's result, and of its gradient, each behind where it begins."""
        operator, way = self._graph.operators[number], self._chosen[number]
        if way is None or operator.given is not None:
            return ((), Path(0)), None
        begins = summands_of(operator, way.before)
        ends = spec_of(operator.result, way.after)
        ways = inner_ways(self._graph, operator, way.before, way.after, self._setting)
        assert ways is not None, "links allowed it"
        is_trained = any(it.value in self._graph.trained for it in operator.reads)
        return (begins, ways[0].path), (ends, ways[1].path) if is_trained else None

    def _hold(self, traced: Traced, operator: Operator, way: Strategy) -> _Held:
        assert operator.given is not None and way.update is not None, "it is a parameter"
        path = operator.given.path
        full = python.attrgetter(path)(traced.model)
        parameter = nn.Parameter(_distributed(full, self._mesh, way.update), full.requires_grad)
        return _Held(operator, way.before, way.update, parameter)

    def _division(self, operator: Operator, member: Member, way: Strategy) -> Division:
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
        return Division(
            primitive, numbers, assignment, tuple(shape), self._collectives, self._totals.get(name)
        )

    def _views(self, operator: Operator, spec: Spec, first: Tensor) -> dict[str, Tensor]:
        """A parameter or an input, and the views that follow it: labels are its dimensions."""
        values: dict[str, Tensor] = {operator.name: first}
        way = Strategy(spec, spec, (), ())
        for member in operator.made[1:]:
            values[member.value.value] = self.run_member(operator, member, way, values, iter(()), (0, 0))
        return values

    def _constant(self, node: fx.Node, turn: tuple[int, int]) -> Any:
        """What depends on no sample and no parameter, whole; random numbers are drawn anew for each turn."""
        if node.name in self._constants:
            return self._constants[node.name]
        captured = self._captured
        if node.name in captured.buffers:
            made = self.rest[self._holdings.names[captured.buffers[node.name]]]
        elif node.name in captured.literals:
            made = captured.literals[node.name]
        elif node.op == "get_attr":
            made = getattr(captured.module, str(node.target))
        elif node.name in self._filled:
            for other in self._filled[node.name]:  # with the memory that they share
                plain = {key: self._plain(it, turn) for key, it in named(other).items()}
                self._constants[other.name] = called(other.target, plain)
            return self._constants[node.name]
        else:
            given = {key: self._plain(it, turn) for key, it in named(node).items()}
            for key in {it.split(".")[0] for it in changed_arguments(node)}:  # of lists all
                given[key] = tree_map_only(Tensor, torch.clone, given[key])
            with self._drawing(node, turn, (None,) * len(self._setting.sizes)):
                made = called(node.target, given)
        if node.name not in self._drawn:
            self._constants[node.name] = made
        return made

    def _plain(self, value: Any, turn: tuple[int, int]) -> Any:
        """An argument without nodes: sizes are those of whole tensors."""

        def known(node: fx.Node) -> Any:
            meta = node.meta.get("val")
            if isinstance(meta, torch.SymInt | torch.SymFloat | torch.SymBool):
                exact = meta.node.expr.subs(self._sizes.symbol, self._sizes.samples)
                kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(meta)]
                return kind(exact)
            return meta if isinstance(meta, int | float) else self._constant(node, turn)

        return fx.map_arg(value, known)

    @contextmanager
    def _drawing(self, node: fx.Node, turn: tuple[int, int], assignment: Assignment) -> Iterator[None]:
        """Random numbers of their own, the same for ranks that do the same work: what tells others apart."""
        if not is_random(node):
            yield
            return
        assert self._collectives.coordinates is not None
        places = tuple(
            (axis, self._collectives.coordinates[axis])
            for axis, label in enumerate(assignment)
            if label is not None
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(repr((self._seed, *turn, node.name, places)).encode()))
            yield


_LOWERED = {
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "scaled_dot_product_attention"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
}
"""Operators whose tensors autocast casts on CPUs."""


class _Pass:
    """One microbatch on its way."""

    def __init__(
        self,
        module: ShardedStage,
        inputs: Mapping[str, Tensor],
        received: Mapping[str, Tensor],
        turn: tuple[int, int],
    ) -> None:
        self.values: dict[str, Any] = {}
        self.sent: dict[str, Tensor] = {}
        self._module, self._inputs, self._received, self._turn = module, inputs, received, turn
        self._read: dict[Reading, Any] = {}
        self._left, self._ways = module.readers()
        self._gathered: dict[int, _Again] = {}  # by where their memory is
        self._casts: dict[int, tuple[_Again, torch.dtype]] = {}  # of these, for one operator

    def run(self, number: int) -> None:
        """One merged operator."""
        operator, way = self._module.operator(number)
        readings = [(it.value, demand) for it, demand in zip(operator.reads, way.demands, strict=True)]
        if operator.is_end:
            self._exchange(operator, readings)
            return
        reads = iter([self._brought(it) for it in readings])
        made: dict[str, Any] = {}
        with self._regathering():
            for member in operator.made:
                name = member.value.value
                made[name] = self._module.run_member(
                    operator, member, way, made, reads, self._turn, self._cast if self._gathered else None
                )
                if name == operator.name:
                    made[name] = self._module.added_up(number, made[name])
        self.values |= {it.value: made[it.value] for it in operator.outputs}
        for reading in readings:
            self._done(reading)

    def _exchange(self, operator: Operator, readings: Sequence[Reading]) -> None:
        """What came from the stage before, or goes to the one behind."""
        self.values |= {it.value: self._received[it.value] for it in operator.outputs}
        for reading in readings:
            self.sent[reading[0]] = self._brought(reading)
            self._done(reading)

    def _brought(self, reading: Reading) -> Any:
        if reading not in self._read:
            self._read[reading] = self._bring(reading)
        return self._read[reading]

    def _bring(self, reading: Reading) -> Any:
        value, demand = reading
        number, source = self._module.source(value)
        if source.given is None:
            route = self._module.route(reading)
            here = self.values[value]
            return (
                here
                if not isinstance(here, Tensor)
                else moved(here, self._module.collectives, route.there, route.back)
            )
        if not source.given.is_parameter:
            whole = self._module.whole_views(source, self._inputs[source.name])[value]
            return self._module.collectives.part(whole, demand.spec)
        return self._weight(reading, self._module.held(number), self._module.route(reading))

    def _weight(self, reading: Reading, held: _Held, route: _Route) -> Tensor:
        stored = held.values[reading[0]]
        if route.is_gathered:
            again = _Again(self._module, held, reading)
            anchor = torch.zeros((), requires_grad=route.back is not None)
            result: Tensor = _Gathered.apply(anchor, again)  # type: ignore[no-untyped-call]
            self._gathered[result.untyped_storage().data_ptr()] = again
            return result
        if reading not in held.leaves:
            leaf = self._module.collectives.follow(stored, *route.there).detach()
            held.leaves[reading] = leaf.requires_grad_(route.back is not None)
        return held.leaves[reading]

    def _cast(self, tensor: Tensor) -> Tensor:
        """As autocast would; of a gathered weight the backward pass keeps only how to come to it again."""
        again = self._gathered.get(tensor.untyped_storage().data_ptr())
        if again is None or not torch.is_autocast_enabled("cpu"):
            return tensor
        made = tensor.to(torch.get_autocast_dtype("cpu"))
        self._casts[made.untyped_storage().data_ptr()] = again, made.dtype
        return made

    def _regathering(self) -> AbstractContextManager[Any]:
        """For the backward pass keeps of gathered weights only how to gather them once more."""
        if not self._gathered:
            return nullcontext()

        casts = self._casts = dict[int, tuple[_Again, torch.dtype]]()

        def pack(tensor: Tensor) -> Any:
            place = tensor.untyped_storage().data_ptr()
            again, dtype = casts.get(place, (self._gathered.get(place), tensor.dtype))
            if again is None:
                return tensor
            return again, dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            again, dtype, *layout = kept
            return torch.as_strided(again.tensor().to(dtype), *layout)

        return saved_tensors_hooks(pack, unpack)

    def _done(self, reading: Reading) -> None:
        """Let go of what nobody reads any more."""
        self._left[reading] -= 1
        if self._left[reading]:
            return
        gone = self._read.pop(reading)
        if isinstance(gone, Tensor):
            self._gathered.pop(gone.untyped_storage().data_ptr(), None)
        self._ways[reading[0]] -= 1
        if not self._ways[reading[0]]:
            self.values.pop(reading[0], None)


class _Again:
    """A weight that is gathered for a pass, and once more for its backward pass."""

    def __init__(self, module: ShardedStage, held: _Held, reading: Reading) -> None:
        self._module, self._held, self._reading = module, held, reading
        self._tensor: Tensor | None = None

    def gather(self) -> Tensor:
        """Of the ranks that store it."""
        stored = self._held.values[self._reading[0]]
        return self._module.collectives.follow(stored, *self._module.route(self._reading).there)

    def tensor(self) -> Tensor:
        """The same while the backward pass needs it."""
        if self._tensor is None:
            self._tensor = self.gather()
        return self._tensor

    def take_home(self, gradient: Tensor) -> None:
        """The gradient of all that read it."""
        self._tensor = None
        back = self._module.route(self._reading).back
        assert back is not None
        home = self._module.collectives.follow(gradient, *back)
        self._module.take_home(self._held, self._reading[0], home)


class _Gathered(torch.autograd.Function):
    """A weight for one pass; its gradient goes home at once."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, again: _Again) -> Tensor:
        ctx.again = again
        return again.gather()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.again.take_home(gradient)
        return None, None


def _given(node: fx.Node, values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, lists put together again."""
    return {
        name: values[name] if name in values else [values[f"{name}.{at}"] for at in range(len(value))]
        for name, value in named(node).items()
    }


def _has_nodes(value: Any) -> bool:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return bool(found)


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
