"""The one door to HiGHS: silent and on one thread, so that it goes the same way on every machine."""

from __future__ import annotations

from typing import Any

from arborcast.synth.deadline import NO_DEADLINE, Deadline

_SEEDS = 1 << 31
_LEAST_TIME_S = 1e-3  # less is no time at all, in which HiGHS need not even look at the program


def new_model(*, seed: int = 0, **options: bool | int | float | str) -> Any:
    """An empty model.

    Args:
        seed: of HiGHS's own ties.
        options: any others by HiGHS's names, such as `mip_max_nodes`.
    """
    import highspy

    untyped: Any = highspy
    model = untyped.Highs()
    fixed = {"output_flag": False, "threads": 1, "random_seed": seed % _SEEDS}
    for name, value in (fixed | options).items():
        model.setOptionValue(name, value)
    return model


def run(model: Any, deadline: Deadline = NO_DEADLINE, *, what: str = "a program of HiGHS") -> str:
    """Solve; how it ended, in HiGHS's words ("Optimal", "Infeasible", ...).

    Raises:
        TimedOutError: the deadline passed; names `what` it was for.
    """
    limit_time(model, deadline.left_s)
    model.run()
    status: str = model.modelStatusToString(model.getModelStatus())
    if status == "Time limit reached":
        raise deadline.missed_by(what)
    return status


def limit_time(model: Any, seconds: float | None) -> None:
    """Let the next run take so many seconds; None sets no limit.

    HiGHS counts the seconds of all runs of a model together.
    """
    if seconds is not None:
        model.setOptionValue("time_limit", model.getRunTime() + max(seconds, _LEAST_TIME_S))
