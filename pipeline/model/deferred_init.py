"""Models without values, on torch's device "meta", and the values that a rank gives to what it holds of them.

    with pipeline.on_meta():
        model = GPT2LMHeadModel(config)      # parameters take no memory; buffers are there, as computed
    pipeline.initialise(model, seed=1)       # in one process; of `Trainer` each rank does it for its stages

Random numbers follow from the seed and the name of the parameter that they are for, not from what else has
memory: the stages of any plan and the whole model begin with the same values.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import swap_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from arborcast.pipeline.errors import PartitionError, first_line
from arborcast.pipeline.model.module_structure import named_tensors, storage_key

Initialiser = Callable[[nn.Module], None]
"""Gives a module's own parameters and buffers their first values in place; called as by `nn.Module.apply`."""


@contextmanager
def on_meta() -> Iterator[None]:
    """Models made inside have their parameters on "meta"; buffers (tables, masks) are computed as ever.

    Under `torch.device("meta")` those would be lost, too.

    Examples:
        >>> with pipeline.on_meta():
        ...     model = nn.Linear(1 << 14, 1 << 14)
        >>> model.weight.device.type  # 1 GiB of weights that take no memory
        'meta'
    """
    known = WeakIdKeyDictionary()

    def move(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None  # as it is
        if parameter not in known:  # a tied one is registered more than once
            known[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        moved: nn.Parameter = known[parameter]
        return moved

    hook = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]  # as documented
    try:
        yield
    finally:
        hook.remove()


def initialise(model: nn.Module, seed: int = 0, how: Initialiser | None = None) -> None:
    """Give a model on "meta" its first values on the CPU, as all ranks of a `Trainer` with this seed would.

    What has values keeps them. Tensors stay the objects that they are: an optimizer may hold them already.

    Args:
        model: any module; its parts on "meta" get values.
        seed: of all random numbers; torch's generators stay as they are.
        how: None for each module's `reset_parameters`, then transformers' `_init_weights`.

    Raises:
        PartitionError: a tensor is given no value: it would be left over.

    Examples:
        >>> with pipeline.on_meta():
        ...     model = nn.Linear(2, 1)
        >>> pipeline.initialise(model, seed=0)
        >>> model.weight.device.type
        'cpu'
    """
    fill(model, allocate(model, tensors_on_meta(model)), seed, how)


def tensors_on_meta(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers without values, each under its first name."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in named if tensor.is_meta}


def root_of(model: Any) -> nn.Module:
    """The module that a `Layered` cuts."""
    inner = getattr(model, "model", None)
    found: nn.Module = inner if isinstance(inner, nn.Module) else model.divide(0, model.depth)
    return found


def allocate(model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Memory for tensors of a model on "meta"; they stay the objects that they are.

    Returns:
        Those with one of the names, each under the first name that it has in the model.

    Raises:
        PartitionError: something holds on to what such a tensor is.
    """
    wanted = {id(it): it for name, it in named_tensors(model) if name in names and it.is_meta}
    made = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in wanted:
            continue
        real = _empty(tensor)
        vars(real).update(vars(tensor))  # of the object, not of its values; swapped with these
        try:
            with _without_weak_references(model.get_submodule(name.rpartition(".")[0])):
                swap_tensors(tensor, real)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise PartitionError(
                f"model {type(model).__name__}: {name} on meta must be given memory, got {first_line(error)}"
            ) from error
        made[name] = tensor
    return made


@contextmanager
def _without_weak_references(module: nn.Module) -> Iterator[None]:
    """Recurrent modules keep some to their weights, which cannot be swapped meanwhile."""
    if not hasattr(module, "_flat_weight_refs"):
        yield
        return
    vars(module)["_flat_weight_refs"] = []
    try:
        yield
    finally:
        own = [None if it is None else weakref.ref(it) for it in module._flat_weights]  # type: ignore[union-attr]
        vars(module)["_flat_weight_refs"] = own


def fill(model: nn.Module, tensors: Mapping[str, Tensor], seed: int, how: Initialiser | None = None) -> None:
    """Give tensors of a model that have memory their first values; no other changes.

    Args:
        model: of which other tensors may be on "meta".
        tensors: by their names in it.
        seed: see `initialise`.
        how: see `initialise`.

    Raises:
        PartitionError: one of them is given no value.
    """
    mode = _Filling(model, list(tensors.values()), seed)
    if not mode.left:
        return
    with torch.random.fork_rng(devices=[]), torch.no_grad(), mode:
        for phase in (_reset, _as_transformers) if how is None else (_calling(how),):
            for name, module, owner in _from_the_leaves(model, "", None, set()):
                # Functions may do less on "meta": a module that is needed in part is there as a whole.
                with stand_ins([module] if mode.is_needed(module) else [], nullcontext(), deep=False):
                    mode.begin(phase.__name__, name, module)
                    phase(module, owner)
    for name, tensor in tensors.items():
        if storage_key(tensor) in mode.left:
            home, _, own = name.rpartition(".")
            raise PartitionError(
                f"model {type(model).__name__}: {name} is on meta and must be given a value, which no "
                f"reset_parameters does (of {type(model.get_submodule(home)).__name__}, {own}): "
                "build the model under pipeline.on_meta(), which keeps buffers, or say weights="
            )


@contextmanager
def stand_ins(
    models: Iterable[nn.Module | None], mode: AbstractContextManager[Any], *, deep: bool = True
) -> Iterator[None]:
    """Inside, models have tensors on the CPU, without values, in place of those on "meta".

    Args:
        models: which.
        mode: in which they are made, such as a fake mode, so that models can be traced.
        deep: whether those within them have some, too.
    """
    found: dict[int, Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in (
        it for model in models if model is not None for it in (model.modules() if deep else [model])
    ):
        own: Any
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None and tensor.is_meta:
                    replaced.append((own, name, tensor))
    for own, name, tensor in replaced:
        if id(tensor) not in found:
            with mode:
                found[id(tensor)] = _empty(tensor)
        own[name] = found[id(tensor)]
    try:
        yield
    finally:
        for own, name, tensor in replaced:
            own[name] = tensor


def _empty(tensor: Tensor) -> Tensor:
    """On the CPU; fake inside a fake mode."""
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made


def _from_the_leaves(
    module: nn.Module, name: str, owner: Any, seen: set[int]
) -> Iterator[tuple[str, nn.Module, Any]]:
    """All modules, children first, each with the transformers' model around it."""
    if id(module) in seen:
        return
    seen.add(id(module))
    pretrained = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    owner = module if isinstance(module, pretrained) else owner
    for key, child in module.named_children():
        yield from _from_the_leaves(child, f"{name}.{key}" if name else key, owner, seen)
    yield name, module, owner


def _reset(module: nn.Module, _: Any) -> None:
    """As torch's own modules begin."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()


def _as_transformers(module: nn.Module, owner: Any) -> None:
    """As the models of transformers go on from there."""
    if owner is not None:
        owner._init_weights(module)


def _calling(how: Initialiser) -> Callable[[nn.Module, Any], None]:
    def first(module: nn.Module, _: Any) -> None:
        how(module)

    return first


class _Filling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seeds every operator that draws, keeps the values that are there, and notes what gets some.

    What is drawn into a parameter follows from its name, anything else from the module and how much was drawn
    there. A tied parameter begins as the first module that has it says.

    Attributes:
        left: memory that nothing was written to so far.
    """

    def __init__(self, model: nn.Module, tensors: Iterable[Tensor], seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = {storage_key(tensor) for tensor in tensors if tensor.numel()}
        held = dict((*model.named_parameters(), *model.named_buffers()))
        self._needed = {id(tensor) for tensor in tensors}
        self._kept = {storage_key(it) for it in held.values() if not it.is_meta} - self.left
        self._names = {storage_key(it): name for name, it in held.items()}
        self._first = {id(it): name for name, it in held.items()}
        self._own: dict[int, str] = {}
        self._others: set[int] = set()
        self._seed, self._place = seed, ""
        self._drawn: Counter[str] = Counter()

    def is_needed(self, module: nn.Module) -> bool:
        """Whether it has a tensor itself that is to be given a value."""
        return any(id(it) in self._needed for _, it in _directly(module))

    def begin(self, phase: str, name: str, module: nn.Module) -> None:
        """What follows is of this module, which may have stand-ins."""
        self._place = f"{phase} {name}"
        own = {key: f"{name}.{key}" if name else key for key, _ in _directly(module)}
        self._own = {storage_key(it): own[key] for key, it in _directly(module)}
        homes = {key: self._first.get(id(it), own[key]) for key, it in _directly(module)}
        self._others = {
            storage_key(it)
            for key, it in _directly(module)
            if homes[key] not in own.values()  # its first module has said how it begins
        }

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator, unless it would change values that are there."""
        named = kwargs or {}
        written = {
            storage_key(given)
            for given, said in zip((*args, *named.values()), _arguments(func, args, named), strict=True)
            if said.is_write and isinstance(given, Tensor)
        }
        if written & (self._kept | self._others):
            return args[0]
        self.left -= written
        if torch.Tag.nondeterministic_seeded in func.tags:
            known = (self._names.get(it) or self._own.get(it) for it in written)
            target = next((it for it in known if it), self._place)
            key = repr((self._seed, target, self._drawn[target])).encode()
            seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
            torch.default_generator.manual_seed(seed)
            self._drawn[target] += 1
        return func(*args, **named)


def _directly(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors that a module has itself."""
    every = (*module._parameters.items(), *module._buffers.items())
    return [(name, it) for name, it in every if it is not None]


def _arguments(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """What the operator says of each argument that it is given."""
    said = func._schema.arguments
    by_name = {it.name: it for it in said}
    return [*said[: len(args)], *(by_name[name] for name in named)]
