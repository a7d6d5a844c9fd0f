"""When a worker posts its receives and sends its results: an order with its messages.

    worker 0: F0 F0> +B0 F1 F1> +B1 B0 B1        +B0 posts a receive, B0 computes, B0> sends
    worker 1: +F0 F0 +F1 B0 B0> F1 B1 B1>

Receives are posted early enough that a message can arrive while the worker computes, and that nothing
deadlocks even where a send ends only once its receive has been posted and messages match in order
(tests replay exactly that). Between two stages of one worker there are no messages.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.order.actions import Action, Passes, Phase


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """What a worker does next.

    Attributes:
        kind: "receive" posts the receive of the action's input (for F from the stage before, for B from
            the stage behind) and does not wait; "compute" waits for that input and does the pass; "send"
            sends its result on (for F to the stage behind, for B to the stage before).
        action: the pass that takes or made the data.
    """

    kind: str
    action: Action

    def __str__(self) -> str:
        """As errors name it, such as `send F3`."""
        return f"{self.kind} {self.action}"


def with_messages(order: Passes, *, ahead: int = 1) -> tuple[tuple[WorkerStep, ...], ...]:
    """The steps of each worker: its passes in the given order, each result sent as soon as it is there.

    The receive of a pass is posted `ahead` passes before it, which lets its message overlap the passes
    between; earlier only where otherwise workers would wait for each other's receives: they run with
    blocking sends, and where none can go on, one receive that a send waits for is posted where its worker
    stands. So few buffers wait for data at once: one pass ahead, at most 2 in gpipe and 1f1b, 5 in pe.
    Receives from one worker are posted in the order in which it sends: NCCL knows no tags.

    Args:
        order: the passes of each worker.
        ahead: at least 0; 0 posts a receive right before its pass, where nothing can overlap.

    Raises:
        PlanError: `ahead` is negative, or the passes themselves wait for each other in a circle.
    """
    if ahead < 0:
        raise PlanError(f"ahead: must be at least 0, got {ahead}")
    return _Placement(order, ahead).run()


class _Placement:
    """A run of all workers with blocking sends, in which receives find their places."""

    def __init__(self, order: Passes, ahead: int) -> None:
        self.order = order
        self.ahead = ahead
        self.home = {action.stage: worker for worker, actions in enumerate(order) for action in actions}
        self.steps: list[list[WorkerStep]] = [[] for _ in order]
        self.position = [0] * len(order)
        self.sending: list[Action | None] = [None] * len(order)
        self.posted: list[set[Action]] = [set() for _ in order]
        self.arrived: set[Action] = set()  # inputs, by the pass that takes them
        # What a worker is sent, by whom, in the order in which it is sent, as the passes that take it.
        self.incoming: list[dict[int, deque[Action]]] = [{} for _ in order]
        for worker, actions in enumerate(order):
            for action in actions:
                taker = self._taker(worker, action)
                if taker is not None:
                    self.incoming[self.home[taker.stage]].setdefault(worker, deque()).append(taker)

    def run(self) -> tuple[tuple[WorkerStep, ...], ...]:
        """Let the workers go on as far as they can, time and again."""
        while not self._finished():
            moved = [self._advance(worker) for worker in range(len(self.order))]
            if not any(moved):
                self._release()
        return tuple(tuple(steps) for steps in self.steps)

    def _taker(self, worker: int, action: Action) -> Action | None:
        """The pass that takes a result on another worker."""
        taker = action.taker(len(self.home))
        return None if taker is None or self.home[taker.stage] == worker else taker

    def _source(self, worker: int, action: Action) -> int | None:
        """The other worker that an input comes from."""
        giver = action.giver(len(self.home))
        return None if giver is None or self.home[giver.stage] == worker else self.home[giver.stage]

    def _finished(self) -> bool:
        return all(
            position == len(actions) and sending is None
            for position, actions, sending in zip(self.position, self.order, self.sending, strict=True)
        )

    def _advance(self, worker: int) -> bool:
        """Do steps of a worker until it must wait; whether there was any."""
        moved = False
        while self._end_send(worker) or self._compute(worker):
            moved = True
        return moved

    def _end_send(self, worker: int) -> bool:
        action = self.sending[worker]
        if action is None:
            return False
        taker = self._taker(worker, action)
        assert taker is not None, "there is somebody to send to"
        target = self.home[taker.stage]
        if taker not in self.posted[target]:
            return False
        self.arrived.add(taker)
        self.steps[worker].append(WorkerStep("send", action))
        self.sending[worker] = None
        return True

    def _compute(self, worker: int) -> bool:
        position, actions = self.position[worker], self.order[worker]
        if self.sending[worker] is not None or position == len(actions):
            return False
        for later in actions[position : position + self.ahead + 1]:
            self._post_up_to(worker, later)
        action = actions[position]
        if action.giver(len(self.home)) is not None and action not in self.arrived:
            return False
        self.steps[worker].append(WorkerStep("compute", action))
        self.position[worker] += 1
        if self._taker(worker, action) is not None:
            self.sending[worker] = action
        elif (taker := action.taker(len(self.home))) is not None:
            self.arrived.add(taker)
        return True

    def _post_up_to(self, worker: int, action: Action) -> None:
        """Post the receive of an action's input, and before it those of what is sent earlier."""
        source = self._source(worker, action)
        while source is not None and action not in self.posted[worker]:
            if not self.incoming[worker].get(source):
                raise PlanError(
                    f"order: stage {action.stage}: the input of {action} must be sent, no stage does"
                )
            self._post_next(worker, source)

    def _post_next(self, worker: int, source: int) -> None:
        action = self.incoming[worker][source].popleft()
        self.posted[worker].add(action)
        self.steps[worker].append(WorkerStep("receive", action))

    def _release(self) -> None:
        """Post one receive that a send waits for; gradients first, for they end what is in flight."""
        stuck = [(worker, action) for worker, action in enumerate(self.sending) if action is not None]
        if not stuck:
            waits = ", ".join(
                f"stage {actions[position].stage} before {actions[position]}"
                for actions, position in zip(self.order, self.position, strict=True)
                if position < len(actions)
            )
            raise PlanError(f"order: passes must not wait for each other in a circle, got {waits}")
        worker, action = min(stuck, key=lambda it: (it[1].phase is Phase.FORWARD, -it[1].stage))
        taker = self._taker(worker, action)
        assert taker is not None, "there is somebody to send to"
        self._post_next(self.home[taker.stage], worker)
