"""The batches of an epoch on every rank, where some have a loader: they end together, and go on together.

    feed = trainer.feed(loader if trainer.needs_inputs or trainer.needs_targets else None)
    for inputs, targets in feed:              # None and None on ranks without a loader
        trainer.step(inputs, targets)

Before each batch all ranks hear whether there is one, in one small message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.pipeline.errors import BatchError, CheckpointError
from arborcast.pipeline.run.failures import FailureBroadcast
from arborcast.synth.errors import InputError

_ELSEWHERE, _END, _ANOTHER, _MISSING = range(4)
"""What a rank says before a batch: it has no loader, its loader has ended, or has one; it lacks a loader."""


class DistributedBatches:
    """Batches from a loader; made by `Trainer.feed` on every rank.

    A batch of two parts is inputs and targets; a dict, or a tensor, is inputs alone.

    Args:
        loader: the same on all ranks that have one (seeds too); None elsewhere.
        group: of all ranks of the job.
        faults: of the trainer.
        is_needed: whether this rank must have a loader.

    Attributes:
        epoch: how many epochs have ended.
        batches: how many batches of the present epoch were given out.
    """

    def __init__(
        self,
        loader: Iterable[Any] | None,
        group: dist.ProcessGroup,
        faults: FailureBroadcast,
        is_needed: bool,
    ) -> None:
        self._loader = loader
        self._group = group
        self._faults = faults
        self._is_needed = is_needed
        self.epoch = self.batches = 0
        self._random: Tensor | None = None  # as it was at the beginning of the epoch
        self._skips = 0
        self._goes_on = False  # from a loaded position, which random numbers are of

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """The batches of an epoch, or after `load_state_dict` the rest of one.

        Raises:
            BatchError: a loader ends before another one; on all ranks.
            InputError: a rank that needs a loader has none; on all ranks.
            TrainingError: a loader raises; on its own rank what it raised is the cause.
        """
        skips, self._skips, self.batches = self._skips, 0, 0
        with self._faults.all_or_nothing(lambda: "opening the loader"):
            iterator = self._opened()
        while True:
            with self._faults.all_or_nothing(self._doing):
                batch = next(iterator, None)
            with self._faults.all_or_nothing(self._doing, forgives=True):
                if not self._is_another(batch):
                    break
            self.batches += 1
            if self.batches > skips:
                yield _parts(batch)
        self.epoch, self.batches = self.epoch + 1, 0
        self._random = None if self._loader is None else self._generator().get_state()

    def state_dict(self) -> dict[str, Any]:
        """From where the loaders would go on, the same on every rank; every rank calls it.

        What has been given out counts as done.
        """
        self._faults.refuse()
        found: list[Any] = [None] * dist.get_world_size(self._group)
        with self._faults.all_or_nothing(lambda: "gathering the position of loaders"):
            dist.all_gather_object(found, self._random, group=self._group)
        random = next((it for it in found if it is not None), None)
        return {"epoch": self.epoch, "batches": self.batches, "random": random}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next epoch be the rest of that one, on any number of ranks.

        A loader that shuffles, by its `generator` or by torch's random numbers, does so as it did then;
        batches that were given out are read once more, and left out.

        Raises:
            CheckpointError: an entry is missing.
        """
        missing = {"epoch", "batches", "random"} - state.keys()
        if missing:
            raise CheckpointError(f"checkpoint: must hold {min(missing)} of a feed, got {sorted(state)}")
        self.epoch, self._skips, self._random = state["epoch"], state["batches"], state["random"]
        self._goes_on = True

    def _opened(self) -> Iterator[Any]:
        """The loader from its beginning, with the random numbers of the epoch."""
        if self._loader is None:
            return iter(())
        sampler: Any = getattr(self._loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)
        generator = self._generator()
        if self._goes_on and self._random is not None:
            generator.set_state(self._random)
        self._goes_on, self._random = False, generator.get_state()
        return iter(self._loader)

    def _generator(self) -> torch.Generator:
        return getattr(self._loader, "generator", None) or torch.default_generator

    def _is_another(self, batch: Any) -> bool:
        """Whether there is one more batch, as all ranks say."""
        mine = _ELSEWHERE if self._loader is None else _END if batch is None else _ANOTHER
        if self._loader is None and self._is_needed:
            mine = _MISSING
        size = dist.get_world_size(self._group)
        said = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(said, torch.tensor([mine]), group=self._group)
        codes = [int(it) for it in said]
        if _MISSING in codes:
            raise InputError(
                "feed: ranks of the first and the last stage must have a loader, got none on rank "
                f"{_ranks(codes, _MISSING)}"
            )
        if _END in codes and _ANOTHER in codes:
            raise BatchError(
                f"loader: must end on all ranks at once, got an end after {self.batches} batches on rank "
                f"{_ranks(codes, _END)} and another batch on rank {_ranks(codes, _ANOTHER)}"
            )
        return _ANOTHER in codes

    def _doing(self) -> str:
        return f"reading batch {self.batches} of epoch {self.epoch}"


def _parts(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Sequence) and len(batch) == 2:
        return batch[0], batch[1]
    return batch, None


def _ranks(codes: Sequence[int], code: int) -> str:
    return ", ".join(str(rank) for rank, it in enumerate(codes) if it == code)
