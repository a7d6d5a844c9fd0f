"""What a step of training may end with when something is wrong outside this rank."""

from __future__ import annotations

import re

from arborcast.backends.errors import ExecutionError
from arborcast.synth.errors import InputError

_GLOO_CLOSED = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused"
)
_GLOO_GAVE_UP = "Application timeout caused pair closure"
_GLOO_LATE = re.compile(r"Timed out waiting (\d+)ms")


class TrainingError(ExecutionError):
    """A step could not be completed: a peer died, a deadline passed, or a pass raised.

    The message names the rank that says so, its stage, and what it did or waited for. The trainer is
    unusable afterwards: close it, make new groups and a new trainer, and load a checkpoint.
    """


def first_line(error: BaseException) -> str:
    """Class and first line of an error, for a message of one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0].strip()}" if text else type(error).__name__


def is_of_others(error: BaseException) -> bool:
    """Whether an error is that of a call that other ranks take part in, who know better what went wrong."""
    return isinstance(error, ExecutionError) or (
        isinstance(error, RuntimeError) and ("/gloo/" in str(error) or _GLOO_GAVE_UP in str(error))
    )


def cause_of(error: BaseException) -> BaseException:
    """The first error of a chain: torch wraps those of passes in others of many lines.

    Ours are told as they are: they say what was wrong, and what caused them only how it was found.
    """
    while not isinstance(error, (TrainingError, InputError)) and error.__cause__ is not None:
        error = error.__cause__
    return error


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
