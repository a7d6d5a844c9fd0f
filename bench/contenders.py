"""Those that `loopback.py` compares, groups of all ranks, and what their calls work on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arborcast.bench.harness.payload import Payload, torch_call
from arborcast.bench.harness.turns import Sample
from arborcast.synth.collective import Kind

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

BASELINE = "gloo"

# What a contender's groups are told; None is not the process group "synth".
CONTENDERS: dict[str, dict[str, str] | None] = {
    BASELINE: None,
    "sockets": {"ARBORCAST_GLOO_BELOW": "0", "ARBORCAST_TRANSPORT": "sockets"},
    "shared memory": {"ARBORCAST_GLOO_BELOW": "0", "ARBORCAST_TRANSPORT": "shared memory"},
}
COLLECTIVES = (
    "allreduce",
    "broadcast",
    "allgather",
    "reduce-scatter",
    "reduce",
    "gather",
    "scatter",
    "alltoall",
)

Call = Callable[["Buffers", int], None]


@dataclass(frozen=True)
class Case:
    """What all contenders do in turns: a collective on a buffer, as algbw counts it.

    Attributes:
        collective: one of `COLLECTIVES`.
        size_bytes: of the whole buffer.
        is_busy: whether the main thread of every rank computes in Python until the call, which is
            asynchronous, has ended; else it waits.
    """

    collective: str
    size_bytes: int
    is_busy: bool = False


@dataclass(frozen=True)
class Measured:
    """What one contender did in one case.

    Attributes:
        samples: in the order of the rounds.
        served_by: "schedule" or "gloo", by what the group has counted.
        explanation: the group's own words, empty for others.
    """

    samples: list[Sample]
    served_by: str
    explanation: str


class Contender:
    """One of those that are compared; all ranks make it.

    Attributes:
        group: of all ranks, by which it works.
    """

    def __init__(self, name: str) -> None:
        import torch.distributed as dist

        self._name = name
        self._told = CONTENDERS[name]
        if self._told is not None:
            import arborcast.torch_backend  # noqa: F401 - makes "synth" known
        with _environment({"ARBORCAST_START": "wait", **(self._told or {})}):
            self.group: Any = dist.new_group(backend="gloo" if self._told is None else "synth")

    def call(self, case: Case) -> Call:
        """What does call number i of a sample."""
        asked = torch_call(
            Kind(case.collective), case.size_bytes // 4, group=self.group, async_op=case.is_busy
        )

        def run(buffers: Buffers, i: int) -> None:
            work = asked(buffers.outputs[i], buffers.given)
            if work is not None:
                _compute_until_it_ends(work)

        return run

    def count(self, case: Case) -> dict[str, int]:
        """How many calls each path has served so far."""
        counted = {} if self._told is None else self.group.counters().get(case.collective, {})
        return {path: counted.get(path, 0) for path in ("schedule", "gloo", "handed over")}

    def measured(self, case: Case, before: dict[str, int], samples: list[Sample]) -> Measured:
        """The samples with what served them; a group that is to run schedules alone must have done so."""
        if self._told is None:
            return Measured(samples, self._name, "")
        served = {path for path, calls in self.count(case).items() if calls > before.get(path, 0)}
        explanation = self.group.explain(case.size_bytes, case.collective)
        if served != {"schedule"}:
            raise RuntimeError(f"{self._name}: {case} was served by {served}: {explanation}")
        return Measured(samples, "schedule", explanation)


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _compute_until_it_ends(work: dist.Work) -> None:
    """As a loop in Python does that prepares the next batch: the interpreter is hardly ever free."""
    while not work.is_completed():
        sum(range(1000))
    work.wait()


class Buffers:
    """What the calls of one sample work on, filled afresh before each."""

    def __init__(self, case: Case, rank: int, ranks: int) -> None:
        self.outputs: list[Tensor] = []
        self._payload = Payload(Kind(case.collective), case.size_bytes // 4, rank, ranks)
        self.given = self._payload.given

    def fill(self, calls: int) -> None:
        """As many buffers as calls, in the state before them."""
        missing = range(len(self.outputs), calls)
        self.outputs = [*self.outputs[:calls], *(self._payload.initial.clone() for _ in missing)]
        for output in self.outputs:
            output.copy_(self._payload.initial)

    def check(self, what: str) -> None:
        """Raise where a result is wrong anywhere."""
        for i, output in enumerate(self.outputs):
            self._payload.check(output, f"{what}, call {i}")
