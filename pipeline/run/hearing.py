"""What batch comes next, where only some ranks are given data: all hear its shapes in one small allreduce.

Shapes have numbers, the same on all ranks: these met for each (`Agreement`). Every rank says the number of
its inputs, the samples of its targets, both, or nothing; where that does not go together, or a shape is new,
all meet again, in words.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from arborcast.pipeline.run.batches import Signature

MEET = -1
"""Instead of a number of samples: all ranks are to meet."""

_MOST = 1 << 40
"""Above all numbers that are said."""


class Hearing:
    """The shapes that ranks of a job know together.

    Args:
        group: of all ranks of the job.

    Attributes:
        is_needed: whether some rank was given no inputs, so that ranks hear of each batch; None before any.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._numbers: dict[Signature, int] = {}
        self.is_needed: bool | None = None

    def know(self, signature: Signature) -> None:
        """A shape that all ranks have met with."""
        self._numbers.setdefault(signature, len(self._numbers))

    def hear(self, mine: Signature | None, samples: int | None, *, training: bool) -> Signature | None:
        """The shape of the next batch; None where ranks must meet. Every rank calls it.

        Args:
            mine: of the inputs that this rank was given; None without any.
            samples: of what this rank was given; None of nothing, or `MEET`.
            training: whether the batch is to be trained with.
        """
        number = None if mine is None else self._numbers.get(mine, -1)
        said = (number, samples, int(training))
        # The largest and the smallest of each in one maximum; 0 where nothing is said.
        both = [[0, 0] if it is None else [it + 2, _MOST - it] for it in said]
        heard = torch.tensor(both, dtype=torch.int64)
        dist.all_reduce(heard, op=dist.ReduceOp.MAX, group=self._group)
        if any(most - 2 != _MOST - least or most < 2 for most, least in heard.tolist()):
            return None
        return list(self._numbers)[int(heard[0, 0]) - 2]
