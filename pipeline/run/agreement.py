"""That all ranks were given the same batch, asked once for each shape before anything is sent.

A message of another size than its receiver expects would end a process inside gloo, or be received in part.
The question goes through the store that the job was started with; shapes that are known cost nothing.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta

from torch.distributed.distributed_c10d import _get_default_store

from backends.torch_names import PrefixStore, Store
from pipeline.errors import BatchError
from pipeline.run.failures import TrainingError


class Agreement:
    """What ranks tell each other through the job's store.

    Args:
        name: of the trainer, the same on all ranks and of no other trainer.
        rank: of the job.
        size: ranks of the job.
        timeout_s: how long others are waited for.
    """

    def __init__(self, name: str, rank: int, size: int, timeout_s: float) -> None:
        self._store: Store = PrefixStore(name, _get_default_store())
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s

    def agree(self, call: int, signature: str) -> None:
        """Wait until all ranks have come with the same batch.

        Args:
            call: how many steps and evaluations came before.
            signature: of this rank's batch.

        Raises:
            BatchError: some rank has another; raised on all ranks alike.
            TrainingError: some rank did not come in time.
        """
        self._store.set(self._key(call, self._rank), signature)
        keys = [self._key(call, rank) for rank in range(self._size)]
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            missing = [str(rank) for rank in range(self._size) if not self._has(keys[rank])]
            raise TrainingError(
                f"rank {self._rank}: no rank may be left behind when a batch has a new shape ({signature}), "
                f"got no word of rank {', '.join(missing)} within {self._timeout_s:g} s"
            ) from error
        said = [self._store.get(key).decode() for key in keys]
        for rank, theirs in enumerate(said):
            if theirs != said[0]:
                raise BatchError(
                    f"batch: all ranks must be given the same one, got {said[0]} on rank 0 and {theirs} "
                    f"on rank {rank}"
                )

    def report(self, message: str) -> None:
        """Tell the others why this rank gives up."""
        with contextlib.suppress(Exception):  # the store may be gone too, and there is nobody else to tell
            self._store.set(f"failure {self._rank}", message)

    def first_report(self) -> str | None:
        """What another rank said when it gave up; None where nobody did."""
        with contextlib.suppress(Exception):
            for rank in range(self._size):
                if rank != self._rank and self._has(f"failure {rank}"):
                    return self._store.get(f"failure {rank}").decode()
        return None

    def others_at(self, call: int) -> str | None:
        """What another rank was given at a call for which this rank did not ask; None where nobody asked."""
        with contextlib.suppress(Exception):
            if self._has(self._key(call, self._rank)):
                return None
            for rank in range(self._size):
                if self._has(self._key(call, rank)):
                    return f"rank {rank} came to {self._store.get(self._key(call, rank)).decode()}"
        return None

    def _key(self, call: int, rank: int) -> str:
        return f"call {call} rank {rank}"

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))
