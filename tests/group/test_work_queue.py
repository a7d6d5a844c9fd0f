"""Calls of a group run one after another; a callback may make further calls and wait for them."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from typing import Any

import pytest
import torch

from arborcast.backends.errors import ExecutionError
from arborcast.backends.group.work import KEPT, KEPT_BYTES, SWITCH_S, WorkQueue
from tests.support.waiting import PATIENCE_S


def test_a_callback_may_wait_for_a_call_that_was_made_before_it_began() -> None:
    """PowerSGD's callbacks wait for later calls, which another thread must execute meanwhile."""
    queue = WorkQueue("queue")
    begun, may_end = threading.Event(), threading.Event()
    answers: list[object] = []

    def wait_for_the_word() -> None:
        begun.set()
        may_end.wait(PATIENCE_S)

    first = queue.submit(wait_for_the_word)
    assert begun.wait(PATIENCE_S)
    second = queue.submit(lambda: 2)  # queued while the first one is executed

    def wait_for_the_second(_: object) -> None:
        answers.append(second.get_future().wait())

    done = first.get_future().then(wait_for_the_second)
    may_end.set()
    finished = threading.Event()
    done.add_done_callback(lambda _: finished.set())
    assert finished.wait(PATIENCE_S), "the callback waits for a call that nobody executes"
    assert answers == [2]
    assert queue.close("the test is over", wait_s=PATIENCE_S)


def test_who_waits_at_once_executes_where_nothing_is_under_way() -> None:
    queue = WorkQueue("queue")
    assert queue.execute(threading.get_ident).result() == threading.get_ident()
    usual = sys.getswitchinterval()
    assert queue.execute(sys.getswitchinterval).result() == pytest.approx(SWITCH_S)

    def ends_as_usual() -> bool:  # in a child that is forked while a call is under way
        child = os.fork()
        if not child:
            os._exit(sys.getswitchinterval() != usual)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    assert queue.execute(ends_as_usual).result()
    assert sys.getswitchinterval() == usual
    begun, may_end = threading.Event(), threading.Event()

    def wait_for_the_word() -> int:
        begun.set()
        may_end.wait(PATIENCE_S)
        return threading.get_ident()

    first = queue.submit(wait_for_the_word)
    assert begun.wait(PATIENCE_S)
    second = queue.execute(lambda: (threading.get_ident(), first.is_completed()))
    may_end.set()
    assert first.result() != threading.get_ident()
    thread, was_later = second.result()
    assert thread != threading.get_ident() and was_later

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        queue.execute(fail).wait()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        queue.execute(interrupt)
    assert queue.close("the test is over", wait_s=PATIENCE_S)
    with pytest.raises(Exception, match="the test is over"):
        queue.execute(fail).wait()


def test_who_makes_a_call_gives_way_until_it_has_left_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("arborcast.backends.group.work.DEPARTURE_S", PATIENCE_S)
    queue = WorkQueue("queue")
    done: list[str] = []
    may_end = threading.Event()

    def leave_and_wait() -> None:
        done.append("left")
        queue.leave()
        may_end.wait(PATIENCE_S)

    under_way = queue.submit(leave_and_wait)
    assert done == ["left"] and not under_way.is_completed()
    later = queue.submit(lambda: done.append("later"))  # behind another one nobody is waited for
    assert done == ["left"]
    may_end.set()
    assert under_way.wait() and later.wait()
    assert queue.submit(lambda: done.append("ended")).is_completed()
    assert done == ["left", "later", "ended"]
    assert queue.close("the test is over", wait_s=PATIENCE_S)


def test_who_makes_a_call_gives_way_for_a_moment_only() -> None:
    queue = WorkQueue("queue")
    may_end = threading.Event()
    needs_python = queue.submit(lambda: may_end.wait(PATIENCE_S))
    assert not needs_python.is_completed()
    may_end.set()
    assert needs_python.wait()
    assert queue.close("the test is over", wait_s=PATIENCE_S)


def test_python_hands_over_sooner_while_calls_are_under_way() -> None:
    usual = sys.getswitchinterval()
    queues = [WorkQueue("one"), WorkQueue("another")]
    begun, may_end = threading.Semaphore(0), threading.Event()

    def wait_for_the_word() -> None:
        begun.release()
        may_end.wait(PATIENCE_S)

    works = [queue.submit(wait_for_the_word) for queue in queues]
    assert all(begun.acquire(timeout=PATIENCE_S) for _ in works)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    dropped = queues[0].submit(wait_for_the_word)
    queues[0].close("no more", wait_s=0)
    with pytest.raises(Exception, match="no more"):
        dropped.wait()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    may_end.set()
    for work, queue in zip(works, queues, strict=True):
        work.wait()
        assert queue.close("the test is over", wait_s=PATIENCE_S)
    assert sys.getswitchinterval() == usual


class _Result:
    """Of a work; no tensor."""


def test_a_work_that_nobody_holds_lives_on_without_a_large_result() -> None:
    # C++ may hold it, whose `wait` would not end without the Python half.
    queue = WorkQueue("queue")
    great, small, other = torch.empty(KEPT_BYTES), torch.empty(1), _Result()
    gone = weakref.ref(other)
    freed: list[bool] = []
    weakref.finalize(great, freed.append, True)
    results: list[Any] = [[great], [great[:1]], other, small]
    shells = [weakref.ref(queue.execute(lambda: None, result)) for result in results]
    del great, other, results
    gc.collect()
    assert freed == [True] and gone() is None
    for shell in shells[:3]:
        work = shell()
        assert work is not None and work.wait() and work.is_success()
        with pytest.raises(ExecutionError, match="the result of a work that nobody held was freed"):
            work.result()
        with pytest.raises(RuntimeError, match="the result of a work that nobody held was freed"):
            work.get_future().wait()
    work = shells[3]()
    assert work is not None and work.result() is small and work.get_future().wait() is small
    del work
    for _ in range(KEPT):
        queue.execute(lambda: None)
    gc.collect()
    assert [shell() for shell in shells] == [None] * 4
    assert queue.close("the test is over", wait_s=PATIENCE_S)
