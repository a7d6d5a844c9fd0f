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
from arborcast.pipeline.run.intra.routes import Reading, ValueRoute
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

    def _exchange(self, operator: MergedOperator, readings: Sequence[Reading]) -> None:
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

    def _weight(self, reading: Reading, held: HeldParameter, route: ValueRoute) -> Tensor:
        stored = held.values[reading[0]]
        if route.is_gathered:
            again = _Again(self._module, held, reading)
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
        if not self._gathered:
            return nullcontext()

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

    def __init__(self, module: DividedStage, held: HeldParameter, reading: Reading) -> None:
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
