"""What a question of the corpus means, and the digest of its answer.

A question is a line of words:

    solve   FABRIC COLLECTIVE [KNOB=VALUE ...]     the schedule, as its file
    repair  FABRIC COLLECTIVE down=... [lost=...]  the schedule repaired from that of the healthy fabric
    bound   FABRIC COLLECTIVE [KNOB=VALUE ...]     the rate with its certificate
    pareto  FABRIC COLLECTIVE [KNOB=VALUE ...]     what is known of each point, and its schedule
    groups  FABRIC KIND:RANKS ... [KNOB=VALUE ...] the rates with their certificate, and the schedules

FABRIC is a spec of the catalog or a file of `topologies/examples`. COLLECTIVE is a kind, or the blocks of a
custom one: `0>1+2,3>4+5` has two, of which ranks 0 and 3 hold one each. `fragment=0,2,3` loads those ranks
alone, `ranks=0,2,3` with the others as relays, both renumbered in this order; `down=0-1,2-3`, `lost=5` and
`slow=0-1:25/2` say what failed. All other knobs are those of the Python API. Nothing depends on time: there
are no deadlines, and no answer comes from the disk.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import Any

# All that the corpus knows of the product: modules may move, the questions and their answers stay.
from arborcast import topologies
from arborcast.synth import (
    Collective,
    Demand,
    ImplicitSchedule,
    InfeasibleError,
    Schedule,
    bound,
    pareto,
    repair,
    solve,
    verify,
    without,
    write_schedule,
)
from arborcast.synth.formats import bound_to_document
from arborcast.synth.groups import GroupSchedules, solve_groups, verify_groups

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "topologies" / "examples"
ANSWERS = HERE / "answers.json"


def questions() -> dict[str, bool]:
    """The questions in their order, with single spaces; and whether every run of the tests asks them."""
    lines = (line.split() for line in (HERE / "questions.txt").read_text().splitlines())
    found = [line for line in lines if line and line[0] != "#"]
    asked = {" ".join(word for word in line if word != "*"): line[0] == "*" for line in found}
    assert len(asked) == len(found), "a question stands there twice"
    return asked


def answers() -> dict[str, str]:
    """The digest of each answer, by question, as they were written last."""
    written: dict[str, str] = json.loads(ANSWERS.read_text())
    return written


@dataclass(frozen=True)
class Answer:
    """Schedules, and what else is said.

    Attributes:
        said: rates, certificates and the like, as plain JSON.
        schedules: their files are part of the answer, byte by byte.
        groups: those whose schedules they are, to be checked together.
    """

    said: object
    schedules: tuple[Schedule | ImplicitSchedule, ...] = ()
    groups: GroupSchedules | None = None

    @property
    def digest(self) -> str:
        """Of all of it."""
        content = sha256(json.dumps(self.said, sort_keys=True, default=str).encode())
        with tempfile.TemporaryDirectory() as folder:
            for schedule in self.schedules:
                path = Path(folder, "schedule.json")
                write_schedule(schedule, path)
                content.update(path.read_bytes())
        return content.hexdigest()

    def objections(self) -> tuple[str, ...]:
        """What the independent checkers have against it."""
        if self.groups is not None:
            return verify_groups(self.groups).errors
        return tuple(error for schedule in self.schedules for error in verify(schedule).errors)


def answer(question: str) -> Answer:
    """The answer of the present code; that there is none is one, too."""
    verb, spec, *rest = question.split()
    words = [word for word in rest if "=" not in word]
    knobs = {name: _READERS[name](text) for name, text in (word.split("=") for word in rest if "=" in word)}
    try:
        return _ANSWERERS[verb](_fabric(spec, knobs), words, knobs)
    except InfeasibleError:
        return Answer("infeasible")


def _solved(fabric: Any, words: list[str], knobs: Mapping[str, Any]) -> Answer:
    faults, wishes = _faults(knobs)
    healthy = without(fabric, **faults) if faults else fabric
    found = solve(healthy, _collective(fabric, words[0]), cache=False, **wishes)
    return Answer(None, (found,))


def _repaired(fabric: Any, words: list[str], knobs: Mapping[str, Any]) -> Answer:
    faults, wishes = _faults(knobs)
    healthy = solve(fabric, _collective(fabric, words[0]), cache=False, **wishes)
    return Answer(None, (repair(healthy, **{_REPAIRED[name]: value for name, value in faults.items()}),))


def _bounded(fabric: Any, words: list[str], knobs: Mapping[str, Any]) -> Answer:
    return Answer(bound_to_document(bound(fabric, _collective(fabric, words[0]), **knobs), fabric))


def _traced(fabric: Any, words: list[str], knobs: Mapping[str, Any]) -> Answer:
    found = pareto(fabric, _collective(fabric, words[0]), cache=False, **knobs)
    points = [
        (point.chunks, point.steps, point.rounds, point.least, point.is_proved, point.scope)
        for point in found.points
    ]
    said = (found.static_ratio, found.complete, found.open_steps, points)
    return Answer(said, tuple(point.schedule for point in found.points))


def _shared(fabric: Any, words: list[str], knobs: Mapping[str, Any]) -> Answer:
    groups = [
        Collective.on(fabric, kind, ranks=ranks, root=ranks[0])
        for kind, ranks in ((kind, _ranks(text)) for kind, text in (word.split(":") for word in words))
    ]
    found = solve_groups(fabric, groups, **knobs)
    levels = [(level.rate, level.bound, level.groups, level.lengths) for level in found.certificate.levels]
    said = ([(group.rate, group.alone) for group in found.groups], levels)
    return Answer(said, tuple(group.schedule for group in found.groups), found)


_ANSWERERS: Mapping[str, Callable[[Any, list[str], Mapping[str, Any]], Answer]] = {
    "solve": _solved,
    "repair": _repaired,
    "bound": _bounded,
    "pareto": _traced,
    "groups": _shared,
}


def _fabric(spec: str, knobs: dict[str, Any]) -> Any:
    path = str(EXAMPLES / spec) if spec.endswith(".yaml") else spec
    if "ranks" not in knobs:
        return topologies.load(path, ranks=knobs.pop("fragment", None))
    chosen = knobs["ranks"]
    knobs["ranks"] = range(len(chosen))
    return topologies.load(path, ranks=chosen, relays=True)


def _collective(fabric: Any, word: str) -> Any:
    if ">" not in word:
        return word
    ends = (block.split(">") for block in word.split(","))
    return Collective.custom(
        fabric,
        [Demand(*(frozenset(map(int, side.split("+"))) for side in sides)) for sides in ends],
    )


_REPAIRED = {"links": "without_links", "ranks": "without_ranks", "slower": "slower_links"}
"""What `repair` calls the faults of `without`."""


def _faults(knobs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What failed, as `without` takes it, and all other knobs."""
    names = {"down": "links", "lost": "ranks", "slow": "slower"}
    faults = {names[name]: value for name, value in knobs.items() if name in names}
    return faults, {name: value for name, value in knobs.items() if name not in names}


def _ranks(text: str) -> tuple[int, ...]:
    """`0,2,4..7` as numbers."""
    ends = (part.partition("..") for part in text.split(","))
    return tuple(rank for first, _, last in ends for rank in range(int(first), int(last or first) + 1))


def _slower(text: str) -> dict[tuple[int, int], Fraction]:
    entries = (entry.split(":") for entry in text.split(","))
    return {(int(link.split("-")[0]), int(link.split("-")[1])): Fraction(rate) for link, rate in entries}


_READERS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("fragment", "ranks", "lost"), _ranks),
    **dict.fromkeys(("form", "method"), str),
    **dict.fromkeys(("tolerance", "epsilon"), Fraction),
    **dict.fromkeys(("root", "seed", "size_bytes", "max_trees", "max_height"), int),
    **dict.fromkeys(("chunks", "steps", "rounds", "max_steps"), int),
    "weights": lambda text: [Fraction(weight) for weight in text.split(",")],
    "relays": lambda text: {"yes": True, "no": False}[text],
    "down": lambda text: text.split(","),
    "slow": _slower,
}
"""What the text of each knob means."""
