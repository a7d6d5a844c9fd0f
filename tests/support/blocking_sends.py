"""Whether the workers of an order can all finish where a send blocks until its receive has been posted.

And whether they can where each pass waits until all messages that its worker has begun are over, as a GPU
may: what finishes here finishes on any transport and device. The check looks at the steps only, in no way at
how they were made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.order.actions import Action, Phase
from arborcast.pipeline.order.pass_messages import WorkerStep

UP = {Phase.FORWARD: 1, Phase.BACKWARD: -1}
"""Where the result of a pass goes, in stages."""


def check_order(
    steps: Sequence[Sequence[WorkerStep]], *, tags: bool = False, passes_wait: bool = False
) -> None:
    """Replay the steps of all workers with blocking sends.

    Each worker does its steps strictly in order, so which of them can go on does not depend on who is fast,
    and one replay decides, also for replicas, which all do the same.

    Args:
        steps: of workers 0, 1, 2, ...; a stage is held by the worker that computes its passes.
        tags: whether the transport matches messages by stage and microbatch, as gloo can; otherwise the first
            send from a worker to another meets the first receive there, as with NCCL.
        passes_wait: whether not sends block, but passes, for all messages of their worker.

    Raises:
        PlanError: a step is missing, there twice or out of order, a send meets another message's receive,
            or workers wait for each other; the message names the stages and what they wait for.
    """
    home = {it.action.stage: worker for worker, own in enumerate(steps) for it in own if it.kind == "compute"}
    for worker, own in enumerate(steps):
        _check_complete(worker, home, steps, own)
        _check_sequence(own)
    if not tags:
        _check_matching(steps, home)
    _replay(steps, home, passes_wait=passes_wait)


def _check_complete(
    worker: int, home: dict[int, int], steps: Sequence[Sequence[WorkerStep]], own: Sequence[WorkerStep]
) -> None:
    """Every pass once, with the messages that stages in these places have."""
    every = [step.action for each in steps for step in each]
    microbatches = {action.microbatch for action in every}
    splits = any(action.phase is Phase.WEIGHTS for action in every)
    wanted: Counter[tuple[str, Phase, int, int]] = Counter()
    for stage, holder in home.items():
        if holder != worker:
            continue
        for m in microbatches:
            for phase in Phase if splits else UP:
                wanted["compute", phase, m, stage] += 1
            for phase, up in UP.items():
                if home.get(stage - up, worker) != worker:
                    wanted["receive", phase, m, stage] += 1
                if home.get(stage + up, worker) != worker:
                    wanted["send", phase, m, stage] += 1
    there = Counter((it.kind, it.action.phase, it.action.microbatch, it.action.stage) for it in own)
    for key in sorted(wanted.keys() | there.keys()):
        if there[key] != wanted[key]:
            kind, phase, m, stage = key
            raise PlanError(
                f"order: stage {stage} must have {kind} {phase}{m} {_times(wanted[key])}, "
                f"got it {_times(there[key])}"
            )


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _check_sequence(steps: Sequence[WorkerStep]) -> None:
    """Receive before compute before send, forward before backward before gradients of parameters."""
    place = {(step.kind, step.action): index for index, step in enumerate(steps)}
    before = {Phase.BACKWARD: Phase.FORWARD, Phase.WEIGHTS: Phase.BACKWARD}
    for (kind, action), index in place.items():
        first: list[tuple[str, Action]] = []
        if kind == "send":
            first.append(("compute", action))
        elif kind == "compute":
            first.append(("receive", action))
            if action.phase in before:
                earlier = Action(before[action.phase], action.microbatch, action.stage)
                first.append(("compute", earlier))
        for one in first:
            if place.get(one, -1) > index:
                what = one[1] if one[0] == kind else f"{one[0]} {one[1]}"
                raise PlanError(
                    f"order: stage {action.stage}: {what} must come before "
                    f"{action if one[0] == kind else f'{kind} {action}'}, got it after"
                )


def _taker(action: Action) -> Action:
    return Action(action.phase, action.microbatch, action.stage + UP[action.phase])


def _check_matching(steps: Sequence[Sequence[WorkerStep]], home: dict[int, int]) -> None:
    """From a worker to another, receives are posted in the order of the sends."""
    for source, own in enumerate(steps):
        for target, theirs in enumerate(steps):
            sends = [s.action for s in own if s.kind == "send" and home[_taker(s.action).stage] == target]
            receives = [
                s.action
                for s in theirs
                if s.kind == "receive" and home[s.action.stage - UP[s.action.phase]] == source
            ]
            for index, (sent, received) in enumerate(zip(sends, receives, strict=True)):
                if _taker(sent) != received:
                    raise PlanError(
                        f"order: message {index} from stage {sent.stage} to stage {_taker(sent).stage} must "
                        f"be received as {sent}, which is sent, got receive {received}"
                    )


def _replay(steps: Sequence[Sequence[WorkerStep]], home: dict[int, int], *, passes_wait: bool) -> None:
    """Let every worker go on as far as it can until all have finished."""
    at = [0] * len(steps)
    posted: set[Action] = set()
    there: set[Action] = set()  # inputs that have been sent, by the pass that takes them
    moved = True

    def waits_for(step: WorkerStep) -> str | None:
        """What keeps a worker from doing a step now; None where nothing does."""
        action = step.action
        if step.kind == "send" and not passes_wait:
            return receive_of(action)
        if step.kind != "compute":
            return None
        begun = steps[home[action.stage]][: at[home[action.stage]]] if passes_wait else ()
        sent = [receive_of(it.action) for it in begun if it.kind == "send"]
        taken = [send_of(it.action) for it in begun if it.kind == "receive"]
        own = send_of(action) if action.phase in UP else None
        return next((said for said in (*sent, *taken, own) if said), None)

    def send_of(action: Action) -> str | None:
        source = action.stage - UP[action.phase]
        return f"send {action} of stage {source}" if source in home and action not in there else None

    def receive_of(action: Action) -> str | None:
        taker = _taker(action)
        return None if taker in posted else f"receive {action} of stage {taker.stage}"

    while moved:
        moved = False
        for worker, own in enumerate(steps):
            while at[worker] < len(own) and waits_for(own[at[worker]]) is None:
                step = own[at[worker]]
                if step.kind == "receive":
                    posted.add(step.action)
                elif step.action.phase is not Phase.WEIGHTS:
                    taker = _taker(step.action)
                    if step.kind == "send" or home.get(taker.stage) == worker:
                        there.add(taker)
                at[worker] += 1
                moved = True
    stuck = [
        f"stage {own[index].action.stage} waits in {own[index]} for {waits_for(own[index])}"
        for own, index in zip(steps, at, strict=True)
        if index < len(own)
    ]
    if stuck:
        raise PlanError(f"order: stages must not wait for each other, got {'; '.join(stuck)}")
