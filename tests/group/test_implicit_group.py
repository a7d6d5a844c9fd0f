"""The process group with tables of implicit schedules: made, passed on, and run."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from arborcast.backends import Options
from arborcast.backends.group.communicator import Communicator
from arborcast.backends.group.membership import Membership
from arborcast.backends.schedules.schedule_table import ScheduleTable, TableEntry
from arborcast.backends.schedules.synthesis import tables
from arborcast.synth.bounds.dispatch import bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.selection import Choice
from arborcast.synth.simulation.pieces import SEVERAL_HOSTS
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Topology
from arborcast.topologies import load
from tests.support.drawn_implicit import circulant, grid, implicit
from tests.support.ranks import run_ranks

SQUARE = grid(2, 2, hubs=True)


def table_of(topology: Topology, kind: Kind) -> ScheduleTable:
    drawn = implicit(topology, kind)
    # A group checks what it is given, the certificate included.
    return ScheduleTable.of([Choice(0, replace(drawn, bound=bound(topology, drawn.collective)))])


def test_tables_go_to_bytes_and_back() -> None:
    schedule = implicit(SQUARE, Kind.ALLREDUCE)
    table = ScheduleTable.of(
        [Choice(0, schedule), Choice(1 << 20, implicit(SQUARE, Kind.ALLREDUCE, shares=[Fraction(1)]))]
    )
    again = ScheduleTable.from_bytes(table.to_bytes(), "test")
    assert again == table and again.digest == table.digest
    assert isinstance(again.at(0).schedule, ImplicitSchedule)
    assert again.renamed("other").topology.name == "other"
    whole = ScheduleTable.of([Choice(0, schedule.expand())])
    assert all(table.peers(rank) >= whole.peers(rank) for rank in range(4))
    assert str(table.entries[0]) == str(whole.entries[0])


def test_forms_are_not_mixed_in_a_table() -> None:
    schedule = implicit(SQUARE, Kind.ALLREDUCE)
    some = Translations.generated(SQUARE, SQUARE.symmetries[:1])
    for other in (schedule.expand(), implicit(SQUARE, Kind.ALLREDUCE, translations=some)):
        with pytest.raises(InputError, match=r"entries\[1\].schedule: must be in the form of the first"):
            ScheduleTable(schedule.collective, (TableEntry(0, schedule), TableEntry(8, other)))


def test_pieces_are_those_of_the_whole_schedule() -> None:
    for kind in (Kind.ALLGATHER, Kind.ALLREDUCE):
        schedule = implicit(circulant(9, {1: 1, 2: 1}), kind)
        for nbytes in (1 << 10, 1 << 20, 1 << 30):
            assert SEVERAL_HOSTS.pieces(schedule, nbytes) == SEVERAL_HOSTS.pieces(schedule.expand(), nbytes)


def test_large_fabrics_with_translations_get_implicit_schedules() -> None:
    def first(spec: str, kind: str) -> object:
        topology = load(spec)
        return next(tables(topology, Collective.on(topology, kind), "trees", SolveOptions())).at(0).schedule

    found = first("ring:65", "allgather")
    assert isinstance(found, ImplicitSchedule) and found.is_optimal
    assert found.translations.order == 65
    # Small ones, and what has no implicit form, stay as they are.
    assert not isinstance(first("ring:8", "allgather"), ImplicitSchedule)
    assert not isinstance(first("ring:65", "broadcast"), ImplicitSchedule)


def every_call(rank: int, size: int) -> list[str]:
    """On every rank: what a communicator gets wrong whose schedules are implicit."""
    from arborcast.backends.schedules import held as schedules
    from arborcast.backends.tensors.torch_compat import PrefixStore

    made = []

    def synthesize(topology: Topology, kind: Kind, root: int | None, *_: object) -> ScheduleTable:
        made.append(kind)
        return table_of(topology, kind)

    schedules.synthesize_table = synthesize  # type: ignore[attr-defined]  # this process is the test's own
    store = PrefixStore("test", dist.distributed_c10d._get_default_store())
    options = Options(topology="ring:4", gloo_below=0, piece_bytes=1 << 12)
    communicator = Communicator(Membership(store, rank, size, options=options, timeout_s=60))
    wrong = []
    for elements in (1, 3, 5003):
        own = torch.arange(elements) * 7 + 1009 * rank
        everybody = [torch.arange(elements) * 7 + 1009 * other for other in range(size)]
        gathered = torch.empty(size * elements, dtype=own.dtype)
        communicator.allgather(gathered, own)
        summed = own.clone()
        communicator.allreduce(summed, dist.ReduceOp.SUM)
        scattered = torch.empty_like(own)
        communicator.reduce_scatter(scattered, gathered * (rank + 1), dist.ReduceOp.SUM)
        right = {
            "allgather": torch.equal(gathered, torch.cat(everybody)),
            "allreduce": torch.equal(summed, sum(everybody)),
            "reduce-scatter": torch.equal(scattered, everybody[rank] * sum(range(1, size + 1))),
        }
        wrong += [f"{kind} of {elements} on rank {rank}" for kind, is_right in right.items() if not is_right]
    served = {kind: paths["schedule"] for kind, paths in communicator.history.counters().items()}
    if served != dict.fromkeys(("allreduce", "allgather", "reduce-scatter"), 3):
        wrong.append(f"rank {rank}: served {served}")
    if (len(made) == 3) != (rank == 0):
        wrong.append(f"rank {rank}: made {made}")
    communicator.close()
    return wrong


def test_a_group_runs_implicit_schedules() -> None:
    assert run_ranks(4, every_call) == [[]] * 4
