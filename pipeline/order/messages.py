"""When a stage posts its receives and sends its results: an order with its messages.

    stage 0: F0 F0> +B0 F1 F1> +B1 B0 B1        +B0 posts a receive, B0 computes, B0> sends
    stage 1: +F0 F0 +F1 B0 B0> F1 B1 B1>

Receives are posted early enough that a message can arrive while the stage computes, and that nothing
deadlocks even where a send ends only once its receive has been posted and messages match in order
(tests replay exactly that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.order.actions import Action, Passes, Phase


@dataclass(frozen=True, slots=True)
class Step:
    """What a stage does next.

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


def with_messages(order: Passes, *, ahead: int = 1) -> tuple[tuple[Step, ...], ...]:
    """The steps of each stage: its passes in the given order, each result sent as soon as it is there.

    The receive of a pass is posted `ahead` passes before it, which lets its message overlap the passes
    between; earlier only where otherwise stages would wait for each other's receives: the stages run with
    blocking sends, and where none can go on, one receive that a send waits for is posted where its stage
    stands. So few buffers wait for data at once: one pass ahead, at most 2 in gpipe and 1f1b, 5 in pe.
    Receives from one stage are posted in the order in which it sends: NCCL knows no tags.

    Args:
        order: the passes of each stage.
        ahead: at least 0; 0 posts a receive right before its pass, where nothing can overlap.

    Raises:
        PlanError: `ahead` is negative, or the passes themselves wait for each other in a circle.
    """
    if ahead < 0:
        raise PlanError(f"ahead: must be at least 0, got {ahead}")
    return _Placement(order, ahead).run()


class _Placement:
    """A run of all stages with blocking sends, in which receives find their places."""

    def __init__(self, order: Passes, ahead: int) -> None:
        self.order = order
        self.ahead = ahead
        self.steps: list[list[Step]] = [[] for _ in order]
        self.position = [0] * len(order)
        self.sending: list[Action | None] = [None] * len(order)
        self.posted: list[set[Action]] = [set() for _ in order]
        self.arrived: list[set[Action]] = [set() for _ in order]
        # What a stage is sent, in the order in which it is sent, by phase.
        self.incoming = [
            {
                phase: _of_phase(order, stage - 1 if phase is Phase.FORWARD else stage + 1, phase)
                for phase in Phase
            }
            for stage in range(len(order))
        ]
        self.next_incoming = [dict.fromkeys(Phase, 0) for _ in order]

    def run(self) -> tuple[tuple[Step, ...], ...]:
        """Let the stages go on as far as they can, time and again."""
        while not self._finished():
            moved = [self._advance(stage) for stage in range(len(self.order))]
            if not any(moved):
                self._release()
        return tuple(tuple(steps) for steps in self.steps)

    def _finished(self) -> bool:
        return all(
            position == len(actions) and sending is None
            for position, actions, sending in zip(self.position, self.order, self.sending, strict=True)
        )

    def _advance(self, stage: int) -> bool:
        """Do steps of a stage until it must wait; whether there was any."""
        moved = False
        while self._end_send(stage) or self._compute(stage):
            moved = True
        return moved

    def _end_send(self, stage: int) -> bool:
        action = self.sending[stage]
        if action is None:
            return False
        target = _target(stage, action)
        if action not in self.posted[target]:
            return False
        self.arrived[target].add(action)
        self.steps[stage].append(Step("send", action))
        self.sending[stage] = None
        return True

    def _compute(self, stage: int) -> bool:
        position, actions = self.position[stage], self.order[stage]
        if self.sending[stage] is not None or position == len(actions):
            return False
        for later in actions[position : position + self.ahead + 1]:
            self._post_up_to(stage, later)
        action = actions[position]
        if self._has_input(stage, action) and action not in self.arrived[stage]:
            return False
        self.steps[stage].append(Step("compute", action))
        self.position[stage] += 1
        if 0 <= _target(stage, action) < len(self.order):
            self.sending[stage] = action
        return True

    def _post_up_to(self, stage: int, action: Action) -> None:
        """Post the receive of an action's input, and before it those of what is sent earlier."""
        if not self._has_input(stage, action):
            return
        while action not in self.posted[stage]:
            if self.next_incoming[stage][action.phase] == len(self.incoming[stage][action.phase]):
                raise PlanError(f"order: stage {stage}: the input of {action} must be sent, no stage does")
            self._post_next(stage, action.phase)

    def _post_next(self, stage: int, phase: Phase) -> None:
        action = self.incoming[stage][phase][self.next_incoming[stage][phase]]
        self.next_incoming[stage][phase] += 1
        self.posted[stage].add(action)
        self.steps[stage].append(Step("receive", action))

    def _release(self) -> None:
        """Post one receive that a send waits for; gradients first, for they end what is in flight."""
        stuck = [(stage, action) for stage, action in enumerate(self.sending) if action is not None]
        if not stuck:
            waits = ", ".join(
                f"stage {stage} before {actions[position]}"
                for stage, (actions, position) in enumerate(zip(self.order, self.position, strict=True))
                if position < len(actions)
            )
            raise PlanError(f"order: passes must not wait for each other in a circle, got {waits}")
        stage, action = min(stuck, key=lambda it: (it[1].phase is Phase.FORWARD, -it[0]))
        self._post_next(_target(stage, action), action.phase)

    def _has_input(self, stage: int, action: Action) -> bool:
        return stage > 0 if action.phase is Phase.FORWARD else stage < len(self.order) - 1


def _of_phase(order: Sequence[Sequence[Action]], stage: int, phase: Phase) -> list[Action]:
    if not 0 <= stage < len(order):
        return []
    return [action for action in order[stage] if action.phase is phase]


def _target(stage: int, action: Action) -> int:
    """Where the result of a pass goes; none of the stages behind the ends."""
    return stage + 1 if action.phase is Phase.FORWARD else stage - 1
