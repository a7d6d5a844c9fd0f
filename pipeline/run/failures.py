"""What a step of training may end with when something is wrong outside this rank."""

from __future__ import annotations

from backends.errors import ExecutionError


class TrainingError(ExecutionError):
    """A step could not be completed: a peer died, a deadline passed, or a pass raised.

    The message names the rank that says so, its stage, and what it did or waited for. The trainer is
    unusable afterwards: close it, make new groups and a new trainer, and load a checkpoint.
    """


def first_line(error: BaseException) -> str:
    """Class and first line of an error, for a message of one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0].strip()}" if text else type(error).__name__


def cause_of(error: BaseException) -> BaseException:
    """The first error of a chain: torch wraps those of passes in others of many lines."""
    while not isinstance(error, TrainingError) and error.__cause__ is not None:
        error = error.__cause__
    return error
