"""Messages of one rank to and from others: posted at once, waited for later, counted, and named in errors."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from arborcast.pipeline.run.failures import TrainingError, words_of
from arborcast.pipeline.run.recorder import NullRecorder, Records

_WATCHERS = 16
"""Threads that note when messages end, where that is recorded."""


@dataclass
class Messages:
    """What a rank sent to and received from other stages so far."""

    sent: int = 0
    received: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class Pending:
    """A message on its way; keeps its tensor alive."""

    def __init__(self, work: dist.Work | Future[None], tensor: Tensor, words: str) -> None:
        self._work = work
        self._tensor = tensor
        self._words = words

    def wait(self) -> None:
        """Return once the tensor was received, or may be written again.

        Raises:
            TrainingError: the peer is gone, or a deadline passed.
        """
        try:
            if isinstance(self._work, Future):
                self._work.result()
            else:
                self._work.wait()
        except RuntimeError as error:
            raise TrainingError(f"{self._words}: {words_of(error)}") from error


class Links:
    """Point-to-point messages of a rank.

    Args:
        group: gloo, of all ranks of the job: tags tell messages apart whatever their order.
        name: of this rank in errors.
        recorder: notes when messages begin and end.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, recorder: Records) -> None:
        self._group = group
        self._name = name
        self._recorder = recorder
        self._watchers = None if isinstance(recorder, NullRecorder) else ThreadPoolExecutor(_WATCHERS)
        self.messages = Messages()

    def send(self, tensor: Tensor, peer: int, tag: int, *, what: str, microbatch: int) -> Pending:
        """Begin to send a contiguous tensor to a rank of the job.

        Args:
            tensor: must not change until the send is waited for.
            peer: where to.
            tag: of no other message to this rank at the time.
            what: in words, for errors and records.
            microbatch: that it belongs to.
        """
        self.messages.sent += 1
        self.messages.sent_bytes += tensor.nbytes
        words = f"{self._name}: {what} of microbatch {microbatch} to rank {peer}"
        begin = time.perf_counter_ns()
        work = self._posted(words, dist.isend, tensor, peer, tag)
        if self._watchers is None:
            return Pending(work, tensor, words)
        return Pending(self._watchers.submit(self._watch, work, microbatch, begin, peer), tensor, words)

    def receive(self, tensor: Tensor, peer: int, tag: int, *, what: str, microbatch: int) -> Pending:
        """Begin to receive a contiguous tensor; arguments as for `send`."""
        self.messages.received += 1
        self.messages.received_bytes += tensor.nbytes
        words = f"{self._name}: waiting for the {what} of microbatch {microbatch} from rank {peer}"
        return Pending(self._posted(words, dist.irecv, tensor, peer, tag), tensor, words)

    def close(self) -> None:
        """End the threads."""
        if self._watchers is not None:
            self._watchers.shutdown(wait=False, cancel_futures=True)

    def _posted(self, words: str, operation: object, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        assert callable(operation)
        try:
            work = operation(tensor, peer, group=self._group, tag=tag)
        except RuntimeError as error:
            raise TrainingError(f"{words}: {words_of(error)}") from error
        assert isinstance(work, dist.Work), "only ranks outside the group get none"
        return work

    def _watch(self, work: dist.Work, microbatch: int, begin: int, peer: int) -> None:
        work.wait()
        self._recorder.add("communication", microbatch, begin, time.perf_counter_ns(), peer)
