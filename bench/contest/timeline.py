"""One recorded run as a value: what ranks saw and links carried, and what the limit would have needed."""

from __future__ import annotations

from dataclasses import dataclass

from arborcast.bench.contest.contenders import Contender
from arborcast.bench.contest.ranks import Order
from arborcast.bench.contest.recording import Trace
from arborcast.bench.contest.rows import Limits
from arborcast.bench.contest.wires import Use
from arborcast.bench.emulation.plan import EmulationPlan
from arborcast.synth.topology import Hop


@dataclass(frozen=True)
class Timeline:
    """One run.

    Attributes:
        plan: of the emulation.
        order: what was run.
        limits: what it needs at least.
        run_s: what it took.
        runs_s: what all runs took.
        traces: of the ranks.
        uses: of the links that carried anything, at the rates they delivered alone.
        rates: bits of payload per second of each link.
    """

    plan: EmulationPlan
    order: Order
    limits: Limits
    run_s: float
    runs_s: tuple[float, ...]
    traces: tuple[Trace, ...]
    uses: dict[Hop, Use]
    rates: dict[Hop, float]

    @property
    def contender(self) -> Contender:
        """What ran."""
        return self.order.contenders[0]

    @property
    def optimum_s(self) -> float:
        """The least time at delivered rates."""
        return self.limits.delivered_us * self.order.size_bytes / 1e6
