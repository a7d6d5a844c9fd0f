"""When a worker posts its receives and sends its results: an order with its messages.

    worker 0: F0 F0> F1 F1> +B0 B0 +B1 B1        +B0 posts a receive, B0 computes, B0> sends
    worker 1: +F0 +F1 F0 B0 B0> F1 B1 B1>

A GPU may do nothing new while a message is open, for code that is loaded or memory that is made then waits
for all that is under way. So receives are posted early enough that a message can arrive while the worker
computes, but only where nothing deadlocks even if each pass waits for all messages that its worker has begun,
or if a send ends only once its receive has been posted, with messages matched in order (tests replay exactly
that). Between two stages of one worker there are no messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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


@lru_cache(16)  # planners ask for plans that differ in their cuts
def with_messages(order: Passes) -> tuple[tuple[WorkerStep, ...], ...]:
    """The steps of each worker: its passes in the given order, each result sent as soon as it is there.

    All passes are put into one line, by when they begin where each takes the same time. Whatever a pass sends
    is received behind the passes of the other worker that stand before it in the line: so no pass, and no
    message, ever waits for what stands behind it. Few buffers wait for data at once: at most 2 in gpipe and
    1f1b. Receives from one worker are posted in the order in which it sends: NCCL knows no tags.

    Args:
        order: the passes of each worker.

    Raises:
        PlanError: the passes wait for each other in a circle, or for what nobody sends.
    """
    home = {action.stage: worker for worker, actions in enumerate(order) for action in actions}
    begins = _begins(order, len(home))

    def place(action: Action) -> tuple[int, int, int]:
        """Of those that begin together first who has nothing to wait for, where all go the same way."""
        is_forward = action.phase is Phase.FORWARD
        return begins[action], not is_forward, action.stage if is_forward else -action.stage

    steps: list[list[WorkerStep]] = [[] for _ in order]
    for action in sorted(begins, key=place):
        worker, taker = home[action.stage], action.taker(len(home))
        steps[worker].append(WorkerStep("compute", action))
        if taker is not None and home[taker.stage] != worker:
            steps[worker].append(WorkerStep("send", action))
            steps[home[taker.stage]].append(WorkerStep("receive", taker))
    return tuple(map(tuple, steps))


def _begins(order: Passes, stages: int) -> dict[Action, int]:
    """When each pass begins where each takes one unit of time, and messages none."""
    every = {action for actions in order for action in actions}
    begins: dict[Action, int] = {}
    position, clock = [0] * len(order), [0] * len(order)
    moved = True
    while moved:
        moved = False
        for worker, actions in enumerate(order):
            for action in actions[position[worker] :]:
                giver = action.giver(stages)
                if giver is not None and giver not in every:
                    raise PlanError(
                        f"order: stage {action.stage}: the input of {action} must be sent, no stage does"
                    )
                if giver is not None and giver not in begins:
                    break
                begins[action] = max(clock[worker], 0 if giver is None else begins[giver] + 1)
                clock[worker] = begins[action] + 1
                position[worker] += 1
                moved = True
    waits = ", ".join(
        f"stage {actions[at].stage} before {actions[at]}"
        for actions, at in zip(order, position, strict=True)
        if at < len(actions)
    )
    if waits:
        raise PlanError(f"order: passes must not wait for each other in a circle, got {waits}")
    return begins
