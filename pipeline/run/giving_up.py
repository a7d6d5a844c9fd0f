"""What happens on all ranks when a training cannot go on on one of them: each raises, in one line.

A rank that cannot go on tells the others why through the job's store and breaks its connections, so that who
waits for it stops waiting at once and finds the reason there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from arborcast.pipeline.run.agreement import Agreement
from arborcast.pipeline.run.failures import TrainingError, cause_of, is_of_others, words_of
from arborcast.synth.errors import InputError


class GivingUp:
    """One rank's part in it.

    Args:
        name: of this rank, as errors begin.
        agreement: through which ranks tell each other why.
        break_all: ends all calls in flight, here and on ranks that wait for this one.
    """

    def __init__(self, name: str, agreement: Agreement, break_all: Callable[[], None]) -> None:
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
            raise TrainingError(f"{self._name}: the trainer is of no more use: {self._reason}")

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
            cause = cause_of(error)
            if forgives and isinstance(cause, InputError):
                raise
            message = self._words(cause, doing, call)
            self._reason = message
            if not is_of_others(cause):
                self._agreement.report(message)
            self._break_all()
            if isinstance(cause, InputError):
                raise cause from None
            if isinstance(error, Exception):
                raise TrainingError(message) from cause
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
