"""Whether the stages of an order can all finish where a send blocks until its receive has been posted.

That is the strictest transport that there is: what finishes here finishes on any. The check looks at the
steps only, in no way at how they were made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.order.actions import Action, Phase
from arborcast.pipeline.order.messages import Step


def check_order(steps: Sequence[Sequence[Step]], *, tags: bool = False) -> None:
    """Replay the steps of all stages with blocking sends.

    Each stage does its steps strictly in order, so which of them can go on does not depend on who is fast,
    and one replay decides, also for replicas, which all do the same.

    Args:
        steps: of stages 0, 1, 2, ...
        tags: whether the transport matches messages by microbatch, as gloo can; otherwise the first send
            from a stage to another meets the first receive there, as with NCCL.

    Raises:
        PlanError: a step is missing, there twice or out of order, a send meets another message's receive,
            or stages wait for each other; the message names the stages and what they wait for.
    """
    microbatches = {step.action.microbatch for own in steps for step in own}
    for stage, own in enumerate(steps):
        _check_complete(stage, len(steps), own, microbatches)
        _check_sequence(stage, own)
    if not tags:
        _check_matching(steps)
    _replay(steps)


def _check_complete(stage: int, stages: int, steps: Sequence[Step], microbatches: set[int]) -> None:
    """Every pass once, with the messages that a stage in this place has."""
    first, last = stage == 0, stage == stages - 1
    wanted: Counter[tuple[str, Phase, int]] = Counter()
    for m in microbatches:
        wanted.update([("compute", Phase.FORWARD, m), ("compute", Phase.BACKWARD, m)])
        if not first:
            wanted.update([("receive", Phase.FORWARD, m), ("send", Phase.BACKWARD, m)])
        if not last:
            wanted.update([("send", Phase.FORWARD, m), ("receive", Phase.BACKWARD, m)])
    there = Counter((step.kind, step.action.phase, step.action.microbatch) for step in steps)
    for key in sorted(wanted.keys() | there.keys()):
        if there[key] != wanted[key]:
            kind, phase, m = key
            raise PlanError(
                f"order: stage {stage} must have {kind} {phase}{m} {_times(wanted[key])}, "
                f"got it {_times(there[key])}"
            )


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _check_sequence(stage: int, steps: Sequence[Step]) -> None:
    """Receive before compute before send, forward before backward."""
    place = {(step.kind, step.action): index for index, step in enumerate(steps)}
    for (kind, action), index in place.items():
        before: tuple[str, Action] | None = None
        if kind == "send":
            before = ("compute", action)
        elif kind == "compute" and ("receive", action) in place:
            before = ("receive", action)
        if before is not None and place[before] > index:
            raise PlanError(
                f"order: stage {stage}: {before[0]} {action} must come before {kind} {action}, got it after"
            )
        forward = ("compute", Action(Phase.FORWARD, action.microbatch))
        if kind == "compute" and action.phase is Phase.BACKWARD and place[forward] > index:
            raise PlanError(f"order: stage {stage}: {forward[1]} must come before {action}, got it after")


def _check_matching(steps: Sequence[Sequence[Step]]) -> None:
    """Between two neighbours and in one direction, receives are posted in the order of the sends."""
    for stage, own in enumerate(steps):
        for phase, target in ((Phase.FORWARD, stage + 1), (Phase.BACKWARD, stage - 1)):
            if not 0 <= target < len(steps):
                continue
            sends = [s.action for s in own if (s.kind, s.action.phase) == ("send", phase)]
            receives = [s.action for s in steps[target] if (s.kind, s.action.phase) == ("receive", phase)]
            for index, (sent, received) in enumerate(zip(sends, receives, strict=True)):
                if sent != received:
                    raise PlanError(
                        f"order: message {index} from stage {stage} to stage {target} must be received as "
                        f"{sent}, which is sent, got receive {received}"
                    )


def _replay(steps: Sequence[Sequence[Step]]) -> None:
    """Let every stage go on as far as it can until all have finished."""
    at = [0] * len(steps)
    posted: set[tuple[int, Action]] = set()
    sent: set[tuple[int, Action]] = set()
    moved = True
    while moved:
        moved = False
        for stage, own in enumerate(steps):
            while (
                at[stage] < len(own) and _waits_for(stage, len(steps), own[at[stage]], posted, sent) is None
            ):
                step = own[at[stage]]
                if step.kind == "receive":
                    posted.add((stage, step.action))
                elif step.kind == "send":
                    sent.add((_receiver(stage, step.action), step.action))
                at[stage] += 1
                moved = True
    stuck = [
        f"stage {stage} waits in {own[index]} for {_waits_for(stage, len(steps), own[index], posted, sent)}"
        for stage, (own, index) in enumerate(zip(steps, at, strict=True))
        if index < len(own)
    ]
    if stuck:
        raise PlanError(f"order: stages must not wait for each other, got {'; '.join(stuck)}")


def _waits_for(
    stage: int, stages: int, step: Step, posted: set[tuple[int, Action]], sent: set[tuple[int, Action]]
) -> str | None:
    """What keeps a stage from doing a step now; None where nothing does."""
    if step.kind == "send":
        target = _receiver(stage, step.action)
        return None if (target, step.action) in posted else f"receive {step.action} of stage {target}"
    source = stage - 1 if step.action.phase is Phase.FORWARD else stage + 1
    if step.kind == "compute" and 0 <= source < stages and (stage, step.action) not in sent:
        return f"send {step.action} of stage {source}"
    return None


def _receiver(stage: int, action: Action) -> int:
    return stage + 1 if action.phase is Phase.FORWARD else stage - 1
