"""The engine over whimsical channels: results, openings, failures, and what comes early of the next call."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from arborcast.backends import lower
from arborcast.backends.dataflow.engine import Engine
from arborcast.backends.dataflow.run import GraphRun
from arborcast.backends.dataflow.task_graph import compile_graph
from arborcast.backends.errors import ChannelClosedError, DisagreementError, ExecutionError
from arborcast.backends.lowering.layout import Buffer, lay_out
from arborcast.backends.measure.job import Reduction
from arborcast.backends.native.library import RunEvent
from arborcast.backends.tensors.torch_reduction import ReductionOperator, operator_of
from arborcast.backends.transport.fingerprint import CollectiveFingerprint
from arborcast.synth.collective import Kind
from arborcast.synth.schedule import Chunk, Schedule, Transfer
from tests.support.definition import define, inputs_of
from tests.support.drawn_schedules import (
    DRAWN,
    direct,
    make,
    ring_allreduce,
    tree_broadcast,
)
from tests.support.fake_channels import close, each, engines_of, fake_networks, in_threads
from tests.support.waiting import any_inside, is_inside, until

SUM = operator_of(torch.distributed.ReduceOp.SUM, torch.int64)


def an_opening(
    count: int = 0, kind: Kind = Kind.ALLREDUCE, sequence: int = 0, by: bytes = b"schedule"
) -> CollectiveFingerprint:
    return CollectiveFingerprint(sequence, count, -1, kind, "int64 sum", by)


class Job:
    """A schedule on buffers of one size, for all ranks."""

    def __init__(self, schedule: Schedule, size: int, *, pieces: int = 2) -> None:
        self.schedule = schedule
        self.programs = lower(schedule, size * lay_out(schedule, 0).blocks, pieces=pieces, window=2)
        self.graphs = [compile_graph(program) for program in self.programs]
        self.count = size * lay_out(schedule, 0).blocks

    def opening(self, sequence: int = 0) -> CollectiveFingerprint:
        return an_opening(self.count, self.schedule.collective.kind, sequence)

    def inputs(self, dtype: str = "int64") -> list[Any]:
        return list(inputs_of(self.schedule, self.count, dtype))

    def memory(self, rank: int, given: Any) -> dict[Buffer, torch.Tensor]:
        program = self.programs[rank]
        memory = {}
        for buffer in (Buffer.INPUT, Buffer.OUTPUT):
            if program.elements(buffer):
                memory[buffer] = torch.full((program.elements(buffer),), -77, dtype=torch.int64)
        own = Buffer.OUTPUT if program.in_place else Buffer.INPUT
        if given is not None and own in memory:
            memory[own][:] = torch.from_numpy(given)
        return memory

    def run(
        self, engine: Engine, given: Any, sequence: int = 0, operator: ReductionOperator | None = SUM
    ) -> Any:
        memory = self.memory(engine.rank, given)
        engine.run(self.graphs[engine.rank], memory, self.opening(sequence), operator, dtype=torch.int64)
        return memory.get(Buffer.OUTPUT)

    def check(self, inputs: list[Any], results: list[Any]) -> None:
        for rank, wanted in enumerate(define(self.schedule.collective, inputs, Reduction.SUM)):
            if isinstance(results[rank], BaseException):
                raise results[rank]
            if wanted is not None and len(wanted):
                np.testing.assert_array_equal(results[rank].numpy(), wanted, f"rank {rank}")


def test_calls_one_after_the_other_with_a_slow_rank() -> None:
    """What is early waits in the channels; scratch is shared between lengths."""
    jobs = [Job(DRAWN["exchange"], 40), Job(DRAWN["ring"], 5), Job(DRAWN["exchange"], 7)]
    networks = fake_networks(4, capacity=1000, part_bytes=32)
    engines = engines_of(networks)
    inputs = [job.inputs() for job in jobs]

    def work(engine: Engine) -> list[Any]:
        results = []
        for number, job in enumerate(jobs):
            if engine.rank == 2:
                time.sleep(0.1)
            results.append(job.run(engine, inputs[number][engine.rank], number))
            engine.agree(an_opening(3, sequence=100 + number, by=bytes(8)))
        return results

    results = each(engines, work)
    for number, job in enumerate(jobs):
        job.check(inputs[number], [result[number] for result in results])
    close(engines, networks)


def test_the_sum_is_the_same_whoever_is_slow() -> None:
    """Contributions are added in the program's order: floating-point results do not depend on timing."""
    job = Job(DRAWN["uneven"], 60)
    found = []
    for slow in range(3):
        networks = fake_networks(3, capacity=64, part_bytes=64, seed=slow)
        engines = engines_of(networks)

        def work(engine: Engine, slow: int = slow) -> torch.Tensor:
            time.sleep(0.05 * (engine.rank == slow))
            tensor = torch.from_numpy(np.random.default_rng(engine.rank).standard_normal(60))
            engine.run(job.graphs[engine.rank], {Buffer.OUTPUT: tensor}, job.opening(), SUM)
            return tensor

        found.append(each(engines, work))
        close(engines, networks)
    assert all(torch.equal(tensor, found[0][0]) for results in found for tensor in results)


def test_a_group_of_one() -> None:
    networks = fake_networks(1)
    (engine,) = engines_of(networks)
    engine.agree(an_opening(5))
    engine.run(compile_graph(lower(ring_allreduce(2), 0)[0]), {}, an_opening(), None)
    close([engine], networks)


@pytest.mark.parametrize("by", [b"schedule", bytes(8)])
def test_counts_that_differ_are_refused_everywhere_with_both(by: bytes) -> None:
    jobs = [Job(DRAWN["ring"], 8), Job(DRAWN["ring"], 12)]
    networks = fake_networks(4, capacity=64)
    engines = engines_of(networks)

    def work(engine: Engine) -> None:
        job = jobs[engine.rank == 1]
        if any(by):
            job.run(engine, job.inputs()[engine.rank])
            return
        for sequence in range(4):  # by openings alone the news goes one rank further with each call
            engine.agree(job.opening(sequence))

    errors = each(engines, work)
    for rank, error in enumerate(errors):
        assert isinstance(error, ExecutionError), error
        assert "allreduce of 8 elements" in str(error) and "allreduce of 12 elements" in str(error)
        assert f"rank {rank}" in str(error) or isinstance(error, DisagreementError)
    assert any(isinstance(error, DisagreementError) for error in errors)
    with pytest.raises(ExecutionError, match=r"rank 3: an earlier call failed: .*of 12 elements"):
        engines[3].agree(an_opening())


def test_a_rank_that_vanishes_is_named_with_the_piece() -> None:
    job = Job(DRAWN["ring"], 400, pieces=4)
    networks = fake_networks(4, capacity=64)
    engines = engines_of(networks)
    inputs = job.inputs()

    def work(engine: Engine) -> Any:
        if engine.rank == 1:
            until(lambda: any_inside("_advance"))  # others wait
            networks[1].vanish()
            return None
        return job.run(engine, inputs[engine.rank])

    results = each(engines, work)
    for rank in (0, 2, 3):
        message = str(results[rank])
        assert isinstance(results[rank], ExecutionError)
        assert message.startswith(f"rank {rank}: allreduce of 400 elements (int64 sum)")
        assert "rank 1 closed its connection: it died or was ended" in message
    # Rank 2 receives from rank 1, so that it can say which piece is missing.
    assert "begin together with rank 1" in str(results[2]) or "receive output[" in str(results[2])


def test_the_first_cause_is_passed_on() -> None:
    """Rank 3 of a chain never talks to rank 0 by its graph; it still learns what happened there."""
    job = Job(tree_broadcast(), 600, pieces=4)
    networks = fake_networks(5, capacity=64)
    engines = engines_of(networks)

    def work(engine: Engine) -> Any:
        if engine.rank == 0:
            until(lambda: any_inside("_advance"))  # others wait
            engine.give_up("rank 0: out of memory")
            return None
        return job.run(engine, job.inputs()[engine.rank])

    results = each(engines, work)
    for rank in (1, 2, 3, 4):
        assert "rank 0: out of memory" in str(results[rank])
        assert str(results[rank]).count("gave up") == 1, "the cause is passed on as it is"


def test_who_goes_without_a_word_is_explained_by_another() -> None:
    networks = fake_networks(3)
    engines = [Engine(network.rank, network, timeout_s=100, search_s=60) for network in networks]

    def work(engine: Engine) -> None:
        if engine.rank == 1:
            networks[1].vanish()
        elif engine.rank == 2:
            until(lambda: any_inside("find_reason"))  # rank 0 misses rank 1, and looks for the cause
            engine.give_up("rank 2: disk full")
        else:
            Job(direct("gather", 3, root=0), 4).run(engine, np.arange(4))

    message = str(each(engines, work)[0])
    assert "rank 1 closed its connection" in message
    assert message.endswith("(rank 2 gave up: rank 2: disk full)")


def test_an_interrupt_ends_it_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal ends a sleep, and its handler runs before the next one."""
    job = Job(DRAWN["ring"], 40)
    networks = fake_networks(4)
    engines = engines_of(networks)
    advance, interrupted = GraphRun._advance, threading.local()

    def interrupt(run: GraphRun, *arguments: Any) -> int:
        if getattr(interrupted, "here", False):
            raise KeyboardInterrupt
        return advance(run, *arguments)

    monkeypatch.setattr(GraphRun, "_advance", interrupt)

    def work(engine: Engine) -> Any:
        interrupted.here = engine.rank == 2
        return job.run(engine, job.inputs()[engine.rank])

    results = each(engines, work)
    assert isinstance(results[2], KeyboardInterrupt)
    for rank in (0, 1, 3):
        assert isinstance(results[rank], ExecutionError)
        assert "rank 2: allreduce of 40 elements (int64 sum) by schedule" in str(results[rank])
        assert "KeyboardInterrupt" in str(results[rank])


def test_nothing_happens_for_too_long() -> None:
    job = Job(DRAWN["ring"], 40)
    networks = fake_networks(4)
    engines = engines_of(networks, timeout_s=0.3)

    def work(engine: Engine) -> Any:
        if engine.rank == 1:
            return None  # it never comes
        return job.run(engine, job.inputs()[engine.rank])

    results = each(engines, work)
    assert all(isinstance(results[rank], ExecutionError) for rank in (0, 2, 3))
    assert all("nothing happened for 0.3 s" in str(results[rank]) for rank in (0, 2, 3))
    assert any("rank 1" in str(results[rank]) for rank in (0, 2, 3))
    close(engines, networks)


def test_peers_that_leave_one_after_another_do_not_prolong_a_wait() -> None:
    networks = fake_networks(40)
    engine = Engine(0, networks[0], timeout_s=1.0)
    has_raised = threading.Event()

    def leave() -> int:
        until(lambda: any_inside("_advance"))
        for left, network in enumerate(networks[1:39]):
            if has_raised.wait(0.3):
                return left
            network.close()
        return len(networks)

    def wait() -> None:
        try:
            engine.agree(an_opening())  # with rank 39, which neither comes nor goes
        finally:
            has_raised.set()

    left, error = in_threads([leave, wait])
    assert "begin together with rank 39: nothing happened for 1 s" in str(error)
    assert left < len(networks), "all of them went before rank 0 had waited for a second"


def test_a_slow_rank_that_goes_on_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something happens all the time, though the whole takes longer than nothing may happen."""
    job = Job(DRAWN["ring"], 160, pieces=16)
    networks = fake_networks(4)
    engines = engines_of(networks, timeout_s=1)
    inputs = job.inputs()
    advance, here = GraphRun._advance, threading.local()
    slept: list[float] = []

    def slowly(run: GraphRun, patience_s: float, lingers: bool) -> int:
        if not here.is_slow:
            return advance(run, patience_s, lingers)
        event = advance(run, 0, lingers)  # returns as soon as there is nothing to do
        if event == RunEvent.TIMED and len(slept) < 40:
            slept.append(0.03)
            time.sleep(slept[-1])
        return event

    monkeypatch.setattr(GraphRun, "_advance", slowly)

    def work(engine: Engine) -> Any:
        here.is_slow = engine.rank == 1
        return job.run(engine, inputs[engine.rank])

    job.check(inputs, each(engines, work))
    close(engines, networks)


def test_who_leaves_in_peace_disturbs_nobody() -> None:
    """The root of a broadcast is done and gone while others still pass its data on."""
    job = Job(tree_broadcast(), 300, pieces=4)
    networks = fake_networks(5, capacity=10_000)
    engines = engines_of(networks)
    inputs = job.inputs()

    def work(engine: Engine) -> Any:
        result = job.run(engine, inputs[engine.rank])
        networks[engine.rank].close()
        return result

    job.check(inputs, each(engines, work))


def test_the_root_of_a_broadcast_waits_for_nobody() -> None:
    """All others see an opening of one that they get data of; the root may go on before anybody has come."""
    job = Job(tree_broadcast(), 6, pieces=1)
    root = job.schedule.collective.root
    networks = fake_networks(5, capacity=1000)
    for channel in networks[root].channels.values():
        channel.state.most = 0  # a socket holds few sends of some bytes each
    engines = engines_of(networks)
    inputs = job.inputs()
    has_ended = threading.Event()

    def work(engine: Engine) -> Any:
        if engine.rank != root:
            assert has_ended.wait(60)
        result = job.run(engine, inputs[engine.rank])
        has_ended.set()
        return result

    job.check(inputs, each(engines, work))
    close(engines, networks)


def test_two_roots_are_noticed_by_the_next_call_at_the_latest() -> None:
    edges = [
        make("broadcast", [Chunk(Fraction(1), 0)], [Transfer(0, 0, 1, 0)], total=2, root=0),
        make("broadcast", [Chunk(Fraction(1), 1)], [Transfer(0, 1, 0, 0)], total=2, root=1),
    ]
    jobs = [Job(schedule, 8) for schedule in edges]
    networks = fake_networks(2)
    engines = engines_of(networks)

    def work(engine: Engine) -> None:
        jobs[engine.rank].run(engine, np.arange(8))
        Job(ring_allreduce(2), 8).run(engine, np.arange(8), 1)

    errors = each(engines, work)
    assert all(isinstance(error, ExecutionError) for error in errors), errors
    assert any(isinstance(error, DisagreementError) and "broadcast" in str(error) for error in errors)


def test_standing_by_returns_when_rung_for() -> None:
    networks = fake_networks(3)
    engines = engines_of(networks)

    def work(engine: Engine) -> bool:
        is_done = threading.Event()

        def finish() -> None:
            is_done.set()
            engine.ring()

        engine.begin(an_opening(4, by=bytes(8)))
        here = threading.get_ident()

        def finish_within() -> None:
            until(lambda: is_inside("wait_external", here))
            finish()

        threading.Thread(target=finish_within).start()
        engine.wait_external(is_done.is_set, look_every_s=1000)
        return is_done.is_set()

    assert each(engines, work) == [True] * 3
    close(engines, networks)


def test_standing_by_notices_a_peer_that_gives_up() -> None:
    networks = fake_networks(3)
    engines = engines_of(networks)

    def work(engine: Engine) -> None:
        engine.begin(an_opening(4, by=bytes(8)))
        if engine.rank == 1:
            until(lambda: any_inside("wait_external"))
            engine.give_up("rank 1: gloo says no")
            return
        engine.wait_external(lambda: False, look_every_s=1000)

    results = each(engines, work)
    assert all("rank 1: gloo says no" in str(results[rank]) for rank in (0, 2))


def test_standing_by_outlives_a_peer_that_left_in_peace() -> None:
    networks = fake_networks(2)
    engines = engines_of(networks)
    has_left = threading.Event()

    def work(engine: Engine) -> None:
        engine.begin(an_opening(4, by=bytes(8)))
        if engine.rank == 1:
            engine.wait_external()
            networks[1].close()
            has_left.set()
            return
        looks = itertools.count()
        engine.wait_external(lambda: has_left.is_set() and next(looks) > 3, look_every_s=0.05)

    assert each(engines, work) == [None, None]


@pytest.mark.parametrize("look_every_s", [0.02, 1000])
def test_standing_by_has_no_deadline_once_all_agree(look_every_s: float) -> None:
    """What is waited for has its own: gloo's holds for each of its waits, and a call may have many."""
    networks = fake_networks(2)
    engines = engines_of(networks, timeout_s=0.2)

    def work(engine: Engine) -> float:
        engine.begin(an_opening())
        begun = time.monotonic()
        engine.wait_external(lambda: time.monotonic() > begun + 0.7, look_every_s=look_every_s)
        return time.monotonic() - begun

    assert all(isinstance(waited, float) and waited > 0.7 for waited in each(engines, work))
    close(engines, networks)


@pytest.mark.parametrize("timeout_s", [1000, 1e8])
def test_another_thread_ends_a_call_that_waits(timeout_s: float) -> None:
    """Though no peer says a word; and `poll` knows no more than 24.8 days, but groups may be patient."""
    job = Job(ring_allreduce(2), 40)
    networks = fake_networks(2)
    engine = Engine(0, networks[0], timeout_s=timeout_s)

    def end() -> None:
        until(lambda: any_inside("_advance"))
        engine.give_up("rank 0: told to stop")

    waiting, _ = in_threads([lambda: job.run(engine, job.inputs()[0]), end], timeout_s=20)
    assert isinstance(waiting, ExecutionError), waiting
    assert "rank 0: told to stop" in str(waiting)
    assert networks[0].reason == "gave up: rank 0: told to stop"
    with pytest.raises(ExecutionError, match="rank 0: an earlier call failed: rank 0: told to stop"):
        engine.agree(an_opening())


def test_a_timeout_that_is_set_holds_from_the_next_call_on() -> None:
    networks = fake_networks(2)
    engines = engines_of(networks, timeout_s=1000)

    def work(engine: Engine) -> None:
        engine.timeout_s = 0.3
        if engine.rank == 0:
            engine.agree(an_opening())

    assert "nothing happened for 0.3 s" in str(each(engines, work)[0])


@pytest.mark.parametrize("seed", [0, 1])  # through a socket, through memory
def test_a_run_looks_up_while_bytes_keep_coming(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A peer that always has some more must not keep signals, silent hosts and deadlines from being seen."""
    job = Job(ring_allreduce(2), 100_000, pieces=1)
    networks = fake_networks(2, seed=seed)
    engine, peer = Engine(0, networks[0], timeout_s=1000), networks[1].channels[0]
    peer.state.most = 16
    has_ended = threading.Event()

    def look(engine: Engine) -> None:
        raise ExecutionError("looked up")

    def trickle() -> int:
        peer.open(job.opening().to_bytes())
        message, sent = memoryview(bytes(8 * job.count // 2)), 0
        with suppress(ChannelClosedError):  # the run ends, and closes, before this thread hears of it
            while sent < len(message) - 1000 and not has_ended.wait(0.0005):
                sent += peer.send(message[sent:])
        return len(message) - sent

    def run() -> None:
        try:
            job.run(engine, job.inputs()[0])
        finally:
            has_ended.set()

    monkeypatch.setattr(Engine, "_look", look)
    error, left = in_threads([run, trickle])
    assert "looked up" in str(error)
    assert left > 1000, "the peer had no more to say"
    networks[1].close()


def test_part_of_an_element_is_waited_for_no_longer_than_nothing() -> None:
    job = Job(ring_allreduce(2), 40)
    networks = fake_networks(2, capacity=200, seed=1)
    engine, peer = Engine(0, networks[0], timeout_s=0.3), networks[1].channels[0]
    assert peer.transport == "shared memory"
    networks[0].channels[1].state.most = peer.state.most = 0
    peer.open(job.opening().to_bytes())
    peer.state.most = 8 + 2  # a header and a quarter of the first element
    assert peer.send(memoryview(bytes(8 * job.count // 4))) == 2
    (error,) = in_threads([lambda: job.run(engine, job.inputs()[0])], timeout_s=20)
    assert "nothing happened for 0.3 s" in str(error), error
    networks[1].close()
