"""Looking things up in the folder of a sweep: the schedule for an allocation, as the scheduler handed it out.

What was answered for one fragment serves all that are like it: the schedule is renumbered and its proof too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from arborcast.synth.collective import NAMED_KINDS, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats import topology_from_document
from arborcast.synth.formats.any_schedule import read_schedule
from arborcast.synth.formats.reading import check_format
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.schedule import Schedule
from arborcast.synth.sweeps.answering import SOLVED
from arborcast.synth.sweeps.questions import Question
from arborcast.synth.sweeps.sweep import ANSWERS, HEAD, SCHEDULES, SWEEP_FORMAT, read_json
from arborcast.synth.symmetry.isomorphism import ComparableTopology
from arborcast.synth.symmetry.permutations import identity
from arborcast.synth.topology import Hop, Permutation, Topology


@dataclass(frozen=True)
class Table:
    """A folder of answers.

    Attributes:
        folder: where it is.
        machine: what the answers are about.
        answers: the documents by question.
    """

    folder: Path
    machine: Topology
    answers: dict[Question, dict[str, Any]]

    @classmethod
    def read(cls, folder: Path | str) -> Table:
        """The table in a folder, as far as the sweep has come.

        Raises:
            InputError: it holds no sweep, or a file of it is damaged.
        """
        folder = Path(folder)
        head = read_json(folder / HEAD)
        check_format(head, (SWEEP_FORMAT,), str(folder / HEAD))
        machine = topology_from_document(head.get("topology"), str(folder / HEAD))
        answers = {}
        for path in sorted((folder / ANSWERS).glob("*.json")):
            document = read_json(path)
            answers[_question(document, path)] = document
            _check_choices(document, path)
        return cls(folder, machine, answers)

    def find(
        self,
        kind: Kind | str,
        *,
        ranks: Sequence[int] | None = None,
        failed: Sequence[Hop] = (),
        root: int = 0,
        size_bytes: int | None = None,
    ) -> AnySchedule:
        """The schedule for an allocation of the machine; it runs on the ranks 0, 1, 2... of the fragment.

        Args:
            kind: of the collective.
            ranks: of the machine, which the fragment numbers in this order; None for all.
            failed: cables that are down, as pairs of vertices of the fragment.
            root: numbered in the fragment; ignored by kinds without.
            size_bytes: the message size; None for the largest messages.

        Raises:
            InputError: the table has no answer to this question, or the answer is that there is none.
        """
        kind = _named(kind)
        chosen = tuple(range(self.machine.ranks)) if ranks is None else tuple(ranks)
        cables = tuple(sorted((min(hop), max(hop)) for hop in failed))
        asked = Question(chosen, cables, kind, root if kind.has_root else None)
        topology = asked.topology(self.machine)
        exact = self.answers.get(asked)
        if exact is not None:
            return self._schedule(exact, size_bytes, topology)
        shape = _shape(topology, asked.root)
        for document, known in self._shapes(kind, len(chosen)):
            images = known.isomorphism(shape)
            if images is not None:
                found = self._schedule(document, size_bytes, topology)
                if images == identity(len(images)) and found.topology == topology:
                    return found
                whole = found.expand()
                return renumbered(whole, topology, images)
        raise InputError(
            f"{self.folder}: has no answer for {kind} on {topology.name}; "
            f"it has {len(self.answers)} answers, sweep again with this fragment or these failures"
        )

    def _shapes(self, kind: Kind, ranks: int) -> Iterator[tuple[dict[str, Any], ComparableTopology]]:
        for question, document in self.answers.items():
            if question.kind is kind and len(question.ranks) == ranks:
                if question not in self._known:
                    self._known[question] = _shape(question.topology(self.machine), question.root)
                yield document, self._known[question]

    @cached_property
    def _known(self) -> dict[Question, ComparableTopology]:
        """Fragments prepared for comparisons, as they were needed."""
        return {}

    def _schedule(self, document: dict[str, Any], size_bytes: int | None, topology: Topology) -> AnySchedule:
        choices = document["choices"]
        if document["status"] != SOLVED and not choices:
            # The reason is told in the numbers of the fragment that was asked for: a like one, perhaps.
            raise InputError(
                f"{self.folder}: {document['collective']} on {topology.name} is {document['status']}, as on "
                f"ranks {document['ranks']} of {self.machine.name}, numbered in this order: {document['why']}"
            )
        fitting = [one for one in choices if size_bytes is None or one["from_bytes"] <= size_bytes]
        return read_schedule(self.folder / SCHEDULES / fitting[-1]["file"])


def _shape(topology: Topology, root: int | None) -> ComparableTopology:
    """Prepared for comparisons in which roots go to roots and latencies count."""
    colours = [int(vertex == root) for vertex in range(topology.size)]
    return ComparableTopology(topology, latencies=True, colours=colours)


def _named(kind: Kind | str) -> Kind:
    try:
        return Kind(kind)
    except ValueError as error:
        known = ", ".join(one.value for one in NAMED_KINDS)
        raise InputError(f"collective {kind}: must be one of {known}") from error


def _question(document: dict[str, Any], path: Path) -> Question:
    try:
        return Question(
            tuple(map(int, document["ranks"])),
            tuple((int(src), int(dst)) for src, dst in document["failed"]),
            Kind(document["collective"]),
            None if document["root"] is None else int(document["root"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: must be an answer with ranks, failed, collective and root") from error


def _check_choices(document: dict[str, Any], path: Path) -> None:
    """What is read of an answer later on."""
    choices = document.get("choices")
    if not isinstance(document.get("status"), str) or "why" not in document or not isinstance(choices, list):
        raise InputError(f"{path}: must be an answer with status, why and choices")
    for index, choice in enumerate(choices):
        place = f"{path}: choices[{index}]"
        if not isinstance(choice, dict) or not isinstance(choice.get("optimal"), bool):
            raise InputError(f"{place}: must be an object with from_bytes, optimal and file")
        if not isinstance(choice.get("from_bytes"), int) or (index == 0 and choice["from_bytes"] != 0):
            raise InputError(f"{place}.from_bytes: must be a whole number, 0 for the first choice")
        file = choice.get("file")
        if not isinstance(file, str) or Path(file).name != file:
            raise InputError(f"{place}.file: must be a file of {SCHEDULES}, got {file!r}")


def renumbered(schedule: Schedule, topology: Topology, images: Permutation) -> Schedule:
    """The schedule with every vertex called by its image; ranks take part in ascending order.

    Args:
        schedule: on another topology, among all its ranks.
        topology: what the other one is by renumbering.
        images: the vertex of `topology` that each vertex of the other one becomes.

    Raises:
        ScheduleError: `images` takes a link that is used to where there is none.
    """
    root = schedule.collective.root
    collective = replace(
        schedule.collective,
        ranks=tuple(sorted(images[rank] for rank in schedule.collective.ranks)),
        root=None if root is None else images[root],
    )
    return schedule.relabelled(topology, images, collective)
