"""Children that hang, crash, eat memory or lose their parent."""

from __future__ import annotations
import os
from pathlib import Path
import fake_searches
import pytest
from synth.chunks.workers import Workers, WorkerDiedError
from synth.deadline import Deadline
from synth.errors import TimedOutError


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_killed_at_the_deadline(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    with Workers(1) as workers:
        workers.run("z3", int, "3", deadline=Deadline())  # it is up
        with pytest.raises(TimedOutError, match=r"z3 did not end within 0\.5 s"):
            workers.run("z3", fake_searches.sleep_forever, started, deadline=Deadline.after(0.5))
        assert is_gone(int(started.read_text()))
        assert workers.run("z3", int, "3", deadline=Deadline()) == 3
