"""Calls of a group run one after another; a callback may make further calls and wait for them."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")

from arborcast.backends.group.work import WorkQueue

PATIENCE_S = 60.0


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
