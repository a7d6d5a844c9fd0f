"""What a schedule asks of the switches at which its transfers start or end, against what they can do.

The rules are those of `synth.topology.Switch`, stated here on the checker's own account. A switch holds one
*content* of a chunk from the first transfer that comes to it, or from one that replaces what it held, to the
next that does. What comes in meanwhile are the inputs of the content, what goes out its outputs: more than
one input is a sum, more than one output a multicast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from arborcast.synth.schedule import Transfer
from arborcast.synth.topology import Topology, Vertex
from arborcast.synth.verification.replay import Errors, describe_vertex

if TYPE_CHECKING:
    from arborcast.synth.implicit_schedule import AnySchedule


@dataclass(frozen=True)
class SwitchUse:
    """A content that a switch adds or multicasts.

    Attributes:
        switch: its vertex.
        chunk: whose content it is.
        adds: the steps in which it adds; none where it only multicasts.
    """

    switch: Vertex
    chunk: int
    adds: tuple[int, ...]


@dataclass
class _SwitchContent:
    """What a switch has held of a chunk since it was last replaced; steps of each input and output."""

    inputs: list[Vertex] = field(default_factory=list)
    came: list[int] = field(default_factory=list)
    outputs: list[Vertex] = field(default_factory=list)
    left: list[int] = field(default_factory=list)


def check_switch_use(schedule: AnySchedule, errors: Errors) -> list[SwitchUse]:
    """Object to what switches cannot do, and list what they do; of an implicit schedule, representatives."""
    ranks = schedule.topology.ranks
    if not schedule.uses_switches:
        return []
    at_switches = [t for t in schedule.transfers if t.src >= ranks or t.dst >= ranks]
    at_switches.sort(key=attrgetter("chunk"))
    uses: list[SwitchUse] = []
    for chunk, transfers in groupby(at_switches, key=attrgetter("chunk")):
        uses += uses_of_chunk(chunk, transfers, schedule.topology, errors)
    return uses


def uses_of_chunk(
    index: int, transfers: Iterable[Transfer], topology: Topology, errors: Errors
) -> list[SwitchUse]:
    """What the transfers of one chunk, whose number is `index`, ask of switches; in any order."""
    now: dict[Vertex, _SwitchContent] = {}
    uses: list[SwitchUse] = []
    for step, together in groupby(sorted(transfers, key=attrgetter("step")), key=attrgetter("step")):
        arriving = []
        for transfer in together:  # all of a step start from the state before it
            if transfer.src in now:  # a switch that holds nothing is for the replay to name
                now[transfer.src].outputs.append(transfer.dst)
                now[transfer.src].left.append(step)
                _check_given_sum(index, transfer, now[transfer.src], topology, errors)
            if topology.is_switch(transfer.dst):
                arriving.append(transfer)
        for transfer in arriving:
            if not transfer.reduce and transfer.dst in now:
                uses += _judge(index, transfer.dst, now.pop(transfer.dst), topology, errors)
            content = now.setdefault(transfer.dst, _SwitchContent())
            content.inputs.append(transfer.src)
            content.came.append(step)
    for switch, content in now.items():
        uses += _judge(index, switch, content, topology, errors)
    return uses


def _check_given_sum(
    index: int, transfer: Transfer, content: _SwitchContent, topology: Topology, errors: Errors
) -> None:
    """A switch that loops back gives a sum to a rank only if that rank's own part has come to it, too."""
    switch = topology.switches[transfer.src - topology.ranks]
    if (
        switch.loopback
        and len(content.inputs) > 1
        and not topology.is_switch(transfer.dst)
        and transfer.dst not in content.inputs
    ):
        errors.add(
            f"step {transfer.step}: switch {switch.name}, which loops back, gives its sum of chunk {index} "
            f"to rank {transfer.dst}, which must be among its inputs, got {_names(topology, content.inputs)}"
        )


def _judge(
    index: int, vertex: Vertex, content: _SwitchContent, topology: Topology, errors: Errors
) -> Iterator[SwitchUse]:
    """Object to what the switch cannot do, once all is known of a content."""
    switch = topology.switches[vertex - topology.ranks]
    inputs, outputs = len(content.inputs), len(content.outputs)
    if inputs > 1 and not switch.reduces:
        errors.add(
            f"step {content.came[1]}: switch {switch.name} adds chunk {index} from {inputs} inputs, "
            "one that does not reduce takes 1"
        )
    if outputs > 1 and not switch.multicasts:
        errors.add(
            f"step {content.left[1]}: switch {switch.name} passes chunk {index} on to {outputs} outputs, "
            "one that does not multicast serves 1"
        )
    elif inputs > 1 and outputs > 1 and switch.reduces and not switch.turns:
        errors.add(
            f"step {content.left[1]}: switch {switch.name} passes its sum of chunk {index} from {inputs} "
            f"inputs on to {outputs} outputs, one that does not turn serves 1"
        )
    source = content.inputs[0]
    if (
        switch.loopback
        and inputs == 1
        and outputs > 1
        and not topology.is_switch(source)
        and source not in content.outputs
    ):
        errors.add(
            f"step {content.left[1]}: switch {switch.name}, which loops back, multicasts chunk {index} of "
            f"rank {source}, which must be among its outputs, got {_names(topology, content.outputs)}"
        )
    if inputs > 1 or outputs > 1:
        # The first input needs no adder: what comes after it in the same step or later does.
        yield SwitchUse(vertex, index, tuple(sorted(set(content.came[1:]))))


def check_switch_limits(
    schedule: AnySchedule,
    sums: Mapping[Vertex, Fraction],
    trees: Mapping[Vertex, int],
    errors: Errors,
) -> Fraction:
    """Object to adders and numbers of trees beyond what switches have.

    Args:
        schedule: whose rate counts.
        sums: the share of the buffer that each switch adds.
        trees: how many chunks each switch adds or multicasts; of each that adds, too.
        errors: where objections go.

    Returns:
        The longest time that an adder is busy, in seconds per GB of the buffer.
    """
    busiest = Fraction(0)
    for vertex, number in sorted(trees.items()):
        switch = schedule.topology.switches[vertex - schedule.topology.ranks]
        if switch.trees is not None and number > switch.trees:
            errors.add(
                f"switch {switch.name}: adds or multicasts {number} chunks, of which it can {switch.trees}"
            )
        if switch.adder is None or vertex not in sums:
            continue
        busiest = max(busiest, sums[vertex] / switch.adder)
        if schedule.rounds is None and sums[vertex] * schedule.rate > switch.adder:
            errors.add(
                f"switch {switch.name}: adds {sums[vertex] * schedule.rate} GB/s at the declared rate of "
                f"{schedule.rate} GB/s, its adder makes {switch.adder} GB/s"
            )
    return busiest


def _names(topology: Topology, vertices: Sequence[Vertex], limit: int = 4) -> str:
    names = [describe_vertex(topology, vertex) for vertex in vertices[:limit]]
    return ", ".join(names) + (f", ... ({len(vertices)} in all)" if len(vertices) > limit else "")
