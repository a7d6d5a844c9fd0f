"""The children of `bench/frontier.py`: one frontier in a process of its own.

Run as `python bench/ours.py frontier SPEC COLLECTIVE ROOT MAX_STEPS DEADLINE` (or `checked` with the same);
the answer is one line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

AGAIN_CALLS = 5
AGAIN_ENOUGH_S = 10.0


def main() -> None:
    """Answer what the command line asks."""
    print(json.dumps(CHILDREN[sys.argv[1]](*sys.argv[2:])))


def frontier(spec: str, kind: str, root: str, max_steps: str, deadline: str) -> dict[str, Any]:
    """A whole frontier without the cache; `max_steps` 0 for the default, `deadline` 0 for none."""
    return _told(*_pareto(spec, kind, root, max_steps, deadline))


def _told(seconds: float, found: Any) -> dict[str, Any]:
    return {
        "call_seconds": seconds,
        "points": [[point.chunks, point.steps, point.rounds] for point in found.points],
        "proved": [point.is_proved for point in found.points],
        "gaps": [None if point.gap is None else float(point.gap) for point in found.points],
        "restrictions": [point.restriction for point in found.points],
        "complete": found.complete,
        "why_stopped": found.why_stopped,
    }


def checked(spec: str, kind: str, root: str, max_steps: str, deadline: str) -> dict[str, Any]:
    """The same, whether its schedules are correct, and how long further calls in one process take.

    With a deadline there is one call.
    """
    first, found = _pareto(spec, kind, root, max_steps, deadline)
    again: list[float] = [first] if float(deadline) else []
    while not float(deadline) and len(again) < AGAIN_CALLS and sum(again) < AGAIN_ENOUGH_S:
        again.append(_pareto(spec, kind, root, max_steps, deadline)[0])
    verified = all(_is_correct(point.schedule) for point in found.points)
    return {**_told(first, found), "verified": verified, "again_seconds": statistics.median(again)}


def _pareto(spec: str, kind: str, root: str, max_steps: str, deadline: str) -> tuple[float, Any]:
    from arborcast import topologies
    from arborcast.synth.chunks.frontier import pareto
    from arborcast.synth.collective import Collective

    topology = topologies.load(spec)  # afresh, because it caches what it has derived
    collective = Collective.on(topology, kind, root=int(root))
    start = time.perf_counter()
    found = pareto(
        topology,
        collective,
        max_steps=int(max_steps) or None,
        deadline_s=float(deadline) or None,
        cache=False,
    )
    return time.perf_counter() - start, found


def _is_correct(schedule: Any) -> bool:
    from arborcast.synth.verification.verifier import verify

    return bool(verify(schedule).correct)


CHILDREN: dict[str, Callable[..., dict[str, Any]]] = {
    "frontier": frontier,
    "checked": checked,
}

if __name__ == "__main__":
    main()
