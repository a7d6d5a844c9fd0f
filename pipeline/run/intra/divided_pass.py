"""One microbatch on its way through a stage: values are brought to their readers, and let go after the last.

Weights that are gathered for a pass are gathered once more for its backward pass, which keeps only how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from arborcast.backends.tensors.torch_compat import hooks_of_saved_tensors
from arborcast.pipeline.run.intra.mesh_collectives import moved
from arborcast.pipeline.run.intra.routes import PreparedRead, ValueRoute
from arborcast.pipeline.sharding.graph import MergedOperator

if TYPE_CHECKING:
    from arborcast.pipeline.run.intra.divided_stage import DividedStage, HeldParameter


class Pass:
    """One microbatch on its way."""

    def __init__(
        self,
        module: DividedStage,
        inputs: Mapping[str, Tensor],
        received: Mapping[str, Tensor],
        turn: int,
    ) -> None:
        self.values: dict[str, Any] = {}
        self.sent: dict[str, Tensor] = {}
        self._module, self._inputs, self._received, self._turn = module, inputs, received, turn
        self._read: dict[PreparedRead, Any] = {}
        self._left, self._ways = dict[PreparedRead, int](), dict(module.ways)
        self._gathered: dict[int, _Again] = {}  # by where their memory is
        self._casts: dict[int, tuple[_Again, torch.dtype]] = {}  # of these, for one operator

    def run(self, number: int) -> None:
        """One merged operator."""
        operator, readings = self._module.operators[number], self._module.readings[number]
        if operator.is_end:
            self._exchange(operator, readings)
            return
        reads = iter([self._brought(it) for it in readings])
        made: dict[str, Any] = {}
        with self._regathering() if self._gathered else nullcontext():
            cast = self._cast if self._gathered else None
            for member in self._module.members[number]:
                made[member.name] = self._module.run_member(member, made, reads, self._turn, cast)
                if member.name == operator.name:
                    made[member.name] = self._module.added_up(number, made[member.name])
        for it in operator.outputs:
            self.values[it.value] = made[it.value]
        for reading in readings:
            self._done(reading)

    def _exchange(self, operator: MergedOperator, readings: Sequence[PreparedRead]) -> None:
        """What came from the stage before, or goes to the one behind."""
        self.values |= {it.value: self._received[it.value] for it in operator.outputs}
        for reading in readings:
            self.sent[reading.value] = self._brought(reading)
            self._done(reading)

    def _brought(self, reading: PreparedRead) -> Any:
        if reading not in self._left:
            self._read[reading], self._left[reading] = self._bring(reading), reading.readers
        return self._read[reading]

    def _bring(self, reading: PreparedRead) -> Any:
        source, route = reading.source, reading.route
        if source.given is None:
            here = self.values[reading.value]
            if not isinstance(here, Tensor):
                return here
            assert route is not None, "an operator makes it"
            return moved(here, self._module.collectives, route.there, route.back)
        if not source.given.is_parameter:
            whole = self._module.whole_views(reading.maker, self._inputs[source.name])[reading.value]
            return self._module.collectives.part(whole, reading.spec)
        assert route is not None, "parameters have an update"
        return self._weight(reading, self._module.held(reading.maker), route)

    def _weight(self, reading: PreparedRead, held: HeldParameter, route: ValueRoute) -> Tensor:
        stored = held.values[reading.value]
        if route.is_gathered:
            again = _Again(self._module, held, reading, route)
            if reading not in held.anchors:
                held.anchors[reading] = torch.zeros((), requires_grad=route.back is not None)
            result: Tensor = _Gathered.apply(held.anchors[reading], again)  # type: ignore[no-untyped-call]
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
        casts = self._casts = dict[int, tuple[_Again, torch.dtype]]()

        keep, find = hooks_of_saved_tensors()  # of what is recomputed or offloaded

        def pack(tensor: Tensor) -> Any:
            place = tensor.untyped_storage().data_ptr()
            again, dtype = casts.get(place, (self._gathered.get(place), tensor.dtype))
            if again is None:
                return None, keep(tensor)
            return again, (dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

        def unpack(kept: tuple[_Again | None, Any]) -> Tensor:
            again, what = kept
            if again is None:
                return find(what)
            dtype, *layout = what
            return torch.as_strided(again.tensor().to(dtype), *layout)

        return saved_tensors_hooks(pack, unpack)

    def _done(self, reading: PreparedRead) -> None:
        """Let go of what nobody reads any more."""
        self._left[reading] -= 1
        if self._left[reading]:
            return
        gone = self._read.pop(reading)
        if isinstance(gone, Tensor):
            self._gathered.pop(gone.untyped_storage().data_ptr(), None)
        self._ways[reading.value] -= 1
        if not self._ways[reading.value]:
            self.values.pop(reading.value, None)


class _Again:
    """A weight that is gathered for a pass, and once more for its backward pass."""

    def __init__(
        self, module: DividedStage, held: HeldParameter, reading: PreparedRead, route: ValueRoute
    ) -> None:
        self._module, self._held, self._name, self._route = module, held, reading.value, route
        self._tensor: Tensor | None = None

    def gather(self) -> Tensor:
        """Of the ranks that store it."""
        return self._module.collectives.follow(self._held.values[self._name], *self._route.there)

    def tensor(self) -> Tensor:
        """The same while the backward pass needs it."""
        if self._tensor is None:
            self._tensor = self.gather()
        return self._tensor

    def take_home(self, gradient: Tensor) -> None:
        """The gradient of all that read it."""
        self._tensor = None
        assert self._route.back is not None, "it has a gradient"
        home = self._module.collectives.follow(gradient, *self._route.back)
        self._module.take_home(self._held, self._name, home)


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
