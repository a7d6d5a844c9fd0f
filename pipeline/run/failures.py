"""All ranks begin with the same, and when one cannot go on, all raise, each in one line that says why.

What ranks were given is compared through the store that the job was started with, once for each shape: a
message of another size than its receiver expects would end a process inside gloo, or be received in part. A
rank that cannot go on tells the others why there and breaks its connections, so that who waits for it stops
waiting at once and finds the reason.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed.distributed_c10d import _get_default_store

from arborcast.backends.errors import ExecutionError
from arborcast.backends.tensors.torch_compat import PrefixStore, Store
from arborcast.pipeline.errors import BatchError, first_line
from arborcast.pipeline.run.batches import said_differently
from arborcast.synth.errors import InputError

_GLOO_CLOSED = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused"
)
_GLOO_GAVE_UP = "Application timeout caused pair closure"
_GLOO_LATE = re.compile(r"Timed out waiting (\d+)ms")
_OCCASIONS = {"batch": "come to the same step", "trainer": "make the same trainer"}


class TrainingError(ExecutionError):
    """A step could not be completed: a peer died, a deadline passed, or a pass raised.

    The message names the rank that says so, its stage, and what it did or waited for. The trainer is
    unusable afterwards: close it, make new groups and a new trainer, and load a checkpoint.
    """


def is_of_others(error: BaseException) -> bool:
    """Whether an error is that of a call that other ranks take part in, who know better what went wrong."""
    return isinstance(error, ExecutionError) or (
        isinstance(error, RuntimeError) and ("/gloo/" in str(error) or _GLOO_GAVE_UP in str(error))
    )


def words_of(error: BaseException) -> str:
    """What gloo says, without its file names and advice; the first line of any other error."""
    text = str(error)
    if _GLOO_CLOSED.search(text):
        return "its connection was closed: it died or has given up"
    if _GLOO_GAVE_UP in text:
        return "nothing came in time"
    if isinstance(error, ExecutionError):
        return first_line(error).partition(": ")[2]
    late = _GLOO_LATE.search(text)
    if late is not None:
        return f"nothing came within {int(late[1]) / 1000:g} s"
    return first_line(error)


class ConfigBarrier:
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
    ) -> list[str]:
        """Wait until all ranks have come with the same (`check_alike`); what each of them said.

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
        self.say(when, signature)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        keys = [self._key(when, rank) for rank in range(self._size)]
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            missing = [str(rank) for rank in range(self._size) if not self._has(keys[rank])]
            raise TrainingError(
                f"rank {self._rank}: got no word of rank {', '.join(missing)} within {timeout_s:g} s, where "
                f"all ranks must {_OCCASIONS[what]} ({signature})"
            ) from error
        said = [self._store.get(key).decode() for key in keys]
        check_alike(what, said)
        return said

    def say(self, when: str, signature: str) -> None:
        """Tell those that `agree` what this rank has, without waiting for them."""
        self._store.set(self._key(when, self._rank), signature)

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


def check_alike(what: str, said: Sequence[str]) -> None:
    """See that ranks say the same; of a batch each may have been given a part (`said_differently`).

    Args:
        what: they say in words.
        said: by rank.

    Raises:
        BatchError: they have different batches; on all ranks that heard them.
        InputError: likewise of other things.
    """
    is_batch = what == "batch"
    other = next((rank for rank, theirs in enumerate(said) if theirs != said[0]), None)
    pair = said_differently(said) if is_batch else None if other is None else (0, other)
    if pair is not None:
        raise (BatchError if is_batch else InputError)(
            f"{what}: all ranks must be given the same one, got {said[pair[0]]} on rank {pair[0]} and "
            f"{said[pair[1]]} on rank {pair[1]}"
        )


class FailureBroadcast:
    """What a rank that cannot go on does: it tells the others why, and ends what they wait for.

    Args:
        name: of this rank, as errors begin.
        agreement: through which ranks tell each other why.
        break_all: ends all calls in flight, here and on ranks that wait for this one.
    """

    def __init__(self, name: str, agreement: ConfigBarrier, break_all: Callable[[], None]) -> None:
        self._name = name
        self._agreement = agreement
        self._break_all = break_all
        self._reason: str | None = None

    def refuse(self) -> None:
        """Refuse to go on after a failure.

        Raises:
            TrainingError: there was one, or `end` was called.
        """
        if self._reason is not None:
            raise TrainingError(f"{self._name}: this trainer has ended, make a new one: {self._reason}")

    def leave(self, what: str) -> None:
        """Say that this rank comes no more, to those who still wait for it."""
        if self._reason is None:
            self._agreement.report(f"{self._name} {what}")

    def end(self, reason: str) -> None:
        """From now on refuse, for this reason unless there is another one already."""
        if self._reason is None:
            self._reason = reason
        self._break_all = _nothing  # what it would break may be gone

    @contextmanager
    def all_or_nothing(
        self, doing: Callable[[], str], call: int | None = None, *, forgives: bool = False
    ) -> Iterator[None]:
        """Give up on any error in the block.

        Args:
            doing: what this rank did last, in words.
            call: number of the step; None outside of steps.
            forgives: whether all ranks raise an `InputError` alike, so that they may go on.

        Raises:
            TrainingError: the block raised; an `InputError`, or what is no `Exception`, is raised as it is.
        """
        try:
            yield
        except BaseException as error:
            if forgives and isinstance(error, InputError):
                raise
            message = self._words(error, doing, call)
            self._reason = message
            if not is_of_others(error):
                self._agreement.report(message)
            self._break_all()
            if isinstance(error, Exception) and not isinstance(error, InputError):
                raise TrainingError(message) from error
            raise

    def _words(self, cause: BaseException, doing: Callable[[], str], call: int | None) -> str:
        """One line that says what this rank did, and what others said."""
        own = isinstance(cause, TrainingError)
        message = str(cause) if own else f"{self._name}: {doing()}: {words_of(cause)}"
        if not is_of_others(cause):
            return message
        theirs = self._agreement.first_report()
        if theirs is None and call is not None:
            theirs = self._agreement.others_at(call)
        return message if theirs is None else f"{message}; {theirs}"


def _nothing() -> None:
    """There is nothing left to break."""
