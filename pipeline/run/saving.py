"""Checkpoints of a trainer that every rank writes and reads its part of, and its end; see `checkpoints`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from arborcast.pipeline.run import checkpoints
from arborcast.pipeline.run.failures import FailureBroadcast
from arborcast.pipeline.run.precision import Precision
from arborcast.pipeline.run.stage_groups import Groups


class Saving(ABC):
    """What trainers have in common that save and load."""

    _faults: FailureBroadcast
    _groups: Groups
    _precision: Precision
    _steps: int

    @abstractmethod
    def close(self) -> None:
        """End the connections to the other ranks."""

    @abstractmethod
    def _check_complete(self, what: str) -> None:
        """Refuse what cannot be done between the batches of an update."""

    @abstractmethod
    def _entries(self) -> dict[str, Any]:
        """What this rank writes: `model` and `optimizer`."""

    @abstractmethod
    def _loading(self, folder: Path | str) -> checkpoints.Loading:
        """What this rank reads."""

    def _loaded(self) -> None:
        """After values were read."""
        return

    def save(self, folder: Path | str) -> None:
        """Write a checkpoint of all that a training goes on from; every rank calls it and writes its part.

        It is one of torch.distributed.checkpoint: `model` by the model's own names, `optimizer` as
        `get_optimizer_state_dict` flattens it, `trainer` with the number of steps and float16's scale. It
        loads into a trainer with any plan, and by torch's own functions into serial training. It is whole
        before it has its name.

        Args:
            folder: new, or a checkpoint, which is replaced; on a file system that all ranks share.

        Raises:
            CheckpointError: it cannot be written; on all ranks, which may go on.
            InputError: some batches of an update are still to come.
        """
        self._faults.refuse()
        self._check_complete("a checkpoint must be written")

        def entries() -> dict[str, Any]:
            going = {"steps": self._steps, "scaler": self._precision.state_dict()}
            return {**self._entries(), "trainer": going}

        with self._faults.all_or_nothing(lambda: f"saving {folder}", forgives=True), self._groups.patient():
            checkpoints.write(folder, entries, self._groups.job)

    def load(self, folder: Path | str) -> None:
        """Go on from a checkpoint of a trainer with any plan, or of serial training; every rank calls it.

        Without `trainer` in it (of serial training), the number of steps and the scale stay.

        Raises:
            CheckpointError: it cannot be read, is of another model, or options of the optimizer do not fit;
                on all ranks. Nothing is changed, unless a file breaks while it is read: then the trainer is
                of no more use.
        """
        self._faults.refuse()
        self._check_complete("a checkpoint must be loaded")
        job = self._groups.job
        with self._faults.all_or_nothing(lambda: f"reading {folder}", forgives=True), self._groups.patient():
            loading = checkpoints.together(job, lambda: self._loading(folder))
        with self._faults.all_or_nothing(lambda: f"loading {folder}"), self._groups.patient():
            going = checkpoints.together(job, loading.load)
            self._loaded()
            self._steps = going.get("steps", self._steps)
            if going.get("scale") is not None:
                self._precision.load_state_dict(going)

    def _load_state(self, whole: nn.Module, module: nn.Module | None, state: Mapping[str, Tensor]) -> None:
        """Take weights that every rank has.

        Args:
            whole: all layers of the model.
            module: of this rank, into which its own go; None for none.
            state: of the whole model.

        Raises:
            CheckpointError: on any rank an entry is missing or has another shape; on all, nothing is changed.
        """
        shapes = {name: tuple(it.shape) for name, it in whole.state_dict().items() if isinstance(it, Tensor)}
        with self._faults.all_or_nothing(lambda: "comparing weights", forgives=True), self._groups.patient():
            checkpoints.together(self._groups.job, lambda: checkpoints.check_state(shapes, state))
        with self._faults.all_or_nothing(lambda: "loading weights"), self._groups.patient():
            if module is not None:
                checkpoints.load_state(module, state)
            self._loaded()

    def __enter__(self) -> Self:
        """For `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()
