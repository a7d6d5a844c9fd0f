"""The order of service: which of the pieces that wait for a link it carries next, and what ranks hold back.

A simulated time holds for one order. `priority` is what a schedule is planned with. An order that nobody
planned may take much longer: where ranks hand over all that is ready, pieces of later steps stand in the way
of those that others wait for, and the links behind those fall idle. The engine of the process group therefore
decides itself what goes over a link: to each rank it sends in the planned order, and not far ahead of what
comes in.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from arborcast.synth.errors import InputError

AHEAD = 8
"""What the engine sends at time t (step + piece) waits for all that its rank is to get at t - AHEAD.

Leaves of trees could send all they have at once. Where links are shared, as the ports of a switch are, that
fills the queues on the way, and what the other trees wait for comes late: two boxes behind a slow uplink
reached 0.83 of their optimum without this limit, 0.99 with one of 2 to 8. The most of those, because a step
through switches takes a piece as many times as it passes links: a chain of six such steps, simulated with 4,
takes 1.09 times its bound, and 1.20 with random orders; with 8, 1.02 and 1.06.
"""

MOST_ORDERS = 100_000
"""That one question may play."""


class Rule(IntEnum):
    """What a link carries next, of all that waits for it."""

    PRIORITY = 0
    FIFO = 1
    RANDOM = 2


@dataclass(frozen=True, slots=True)
class Service:
    """An order of service, or several random ones of which the slowest counts.

    Attributes:
        rule: priority serves the least step + piece first, then in the order of the transfers; fifo what
            came first (what came at the same time by priority); random any of those that wait, each as
            likely as the others.
        seed: of the random order, or of the first of them.
        orders: how many are played.
        ahead: None where ranks hand over all that is ready. Where not, of what goes from a rank to another
            only the next piece in the order of priority is handed over, and only once all that the rank is
            to get `ahead` steps + pieces before is there.
    """

    rule: Rule = Rule.PRIORITY
    seed: int = 0
    orders: int = 1
    ahead: int | None = None

    @classmethod
    def of(cls, text: str | Service) -> Service:
        """The one that a text names: see `FORMS`.

        Raises:
            InputError: it names none.
        """
        if isinstance(text, Service):
            return text
        name, colon, number = text.partition(":")
        rule = "fifo" if name == "engine" else name.removeprefix("engine-")
        ahead = AHEAD if name.startswith("engine") else None
        if not colon and rule in ("priority", "fifo", "random"):
            return cls(Rule[rule.upper()], ahead=ahead)
        if not number.isdecimal() or len(number) > _MOST_DIGITS or rule not in ("random", "worst"):
            raise InputError(f"service {text!r}: must be {FORMS}")
        if rule == "random":
            return cls(Rule.RANDOM, seed=int(number), ahead=ahead)
        if not 1 <= int(number) <= MOST_ORDERS:
            raise InputError(f"service {text!r}: must be the worst of 1 to {MOST_ORDERS} orders")
        return cls(Rule.RANDOM, orders=int(number), ahead=ahead)

    def one(self, seed: int) -> Service:
        """One of its orders."""
        return Service(self.rule, seed, 1, self.ahead)

    def __str__(self) -> str:
        """As `of` reads it."""
        if self.ahead is not None and self.rule is Rule.FIFO:
            return "engine"
        rule = self.rule.name.lower()
        if self.rule is Rule.RANDOM:
            rule = f"random:{self.seed}" if self.orders == 1 else f"worst:{self.orders}"
        return rule if self.ahead is None else f"engine-{rule}"


FORMS = (
    "priority, fifo, random[:SEED], worst:N, engine, engine-priority, engine-random[:SEED] or engine-worst:N"
)
_MOST_DIGITS = 9

EARLIEST = Service()
"""The order that schedules are planned with, and that is meant where nothing is said."""
