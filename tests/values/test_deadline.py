"""One deadline for a whole question: what is left of it, and what it says when it has passed."""

from __future__ import annotations

import time

import pytest

from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import TimedOutError


def test_it_passes_when_its_seconds_are_over(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    deadline = Deadline.after(5)
    now[0] = 103.0
    assert (deadline.left_s, deadline.has_passed) == (2.0, False)
    deadline.check("the search")
    now[0] = 105.5
    assert (deadline.left_s, deadline.has_passed) == (0.0, True)
    with pytest.raises(TimedOutError, match=r"^the search did not end within 5 s$"):
        deadline.check("the search")


def test_none_never_comes():
    deadline = Deadline.after(None)
    assert (deadline.left_s, deadline.has_passed) == (None, False)
    deadline.check("anything")


def test_a_share_is_that_part_of_what_is_left_and_names_the_whole(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    deadline = Deadline.after(8)
    now[0] = 102.0
    first = deadline.share(2)
    assert (first.left_s, deadline.left_s) == (3.0, 6.0)
    now[0] = 105.5
    with pytest.raises(TimedOutError, match=r"^the first half did not end within 8 s$"):
        first.check("the first half")
    assert Deadline.after(None).share(2) == Deadline()
