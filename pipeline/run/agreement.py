"""That all ranks were given the same: arguments at the start, then batches, once for each shape.

A message of another size than its receiver expects would end a process inside gloo, or be received in part.
The question goes through the store that the job was started with; shapes that are known cost nothing.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta

from torch.distributed.distributed_c10d import _get_default_store

from arborcast.backends.tensors.torch_compat import PrefixStore, Store
from arborcast.pipeline.errors import BatchError
from arborcast.pipeline.run.failures import TrainingError
from arborcast.synth.errors import InputError

_OCCASIONS = {"batch": "a batch has a new shape or trains other parameters", "trainer": "a trainer is made"}


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

    def agree(
        self, when: str, signature: str, *, what: str = "batch", timeout_s: float | None = None
    ) -> None:
        """Wait until all ranks have come with the same.

        Args:
            when: of all questions; "call 3" for the batch before which there were 3 steps and evaluations.
            signature: what this rank was given, in words.
            what: that is.
            timeout_s: another one for this once.

        Raises:
            BatchError: some rank has another batch; raised on all ranks alike.
            InputError: likewise of other things.
            TrainingError: some rank did not come in time.
        """
        self._store.set(self._key(when, self._rank), signature)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        keys = [self._key(when, rank) for rank in range(self._size)]
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            missing = [str(rank) for rank in range(self._size) if not self._has(keys[rank])]
            raise TrainingError(
                f"rank {self._rank}: no rank may be left behind when {_OCCASIONS[what]} ({signature}), "
                f"got no word of rank {', '.join(missing)} within {timeout_s:g} s"
            ) from error
        said = [self._store.get(key).decode() for key in keys]
        for rank, theirs in enumerate(said):
            if theirs != said[0]:
                raise (BatchError if what == "batch" else InputError)(
                    f"{what}: all ranks must be given the same one, got {said[0]} on rank 0 and {theirs} "
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
            when = f"call {call}"
            if self._has(self._key(when, self._rank)):
                return None
            for rank in range(self._size):
                if self._has(self._key(when, rank)):
                    return f"rank {rank} came to {self._store.get(self._key(when, rank)).decode()}"
        return None

    def _key(self, when: str, rank: int) -> str:
        return f"{when} rank {rank}"

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))
