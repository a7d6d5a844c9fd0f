"""What may be wrong with a model, a profile, a plan or a training, one class for each.

All of them are `InputError`s: one line that names the object, the value and the rule; exit status 2 at the
command line.
"""

from __future__ import annotations

from arborcast.synth.errors import InputError


class PartitionError(InputError):
    """A model cannot be cut as asked: tracing failed, too few cut points, a cut that breaks a rule."""


class ProfileError(InputError):
    """A profile or a profile file breaks a rule, or does not fit the model or the plan it is used with."""


class PlanError(InputError):
    """A plan or a plan file breaks a rule, does not fit its model, topology or memory, or none exists."""


class MemoryShortError(PlanError):
    """Nothing fits into the memory of a rank.

    Attributes:
        least_bytes: that each rank would need at least.
    """

    def __init__(self, words: str, least_bytes: int) -> None:
        super().__init__(words)
        self.least_bytes = least_bytes


class BatchError(InputError):
    """A batch does not split into the microbatches and replicas of a plan."""


class CheckpointError(InputError):
    """A checkpoint cannot be read, or does not fit the model or the optimizer it is loaded into."""


def first_line(error: BaseException) -> str:
    """Class and first line of an error, for a message of one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0].strip()}" if text else type(error).__name__
