"""The child's part in a race: one search, kept from one slice of effort to the next."""

from __future__ import annotations

import importlib

from arborcast.synth.chunks.problem.outcome import Instance, Outcome, Search

_held: list[Search] = []
"""At most one; it belongs to whoever this process works for."""


def search_slice(encoding: str, instance: Instance | None, seed: int, effort: int) -> Outcome:
    """Spend some effort on a search.

    Args:
        encoding: `module:class` of a `Search`.
        instance: what to begin with; None to go on with what this process began.
        seed: of the solver.
        effort: see `Search.run`.
    """
    if instance is not None:
        _held.clear()  # before the next one takes its memory
        module, _, name = encoding.partition(":")
        _held.append(getattr(importlib.import_module(module), name)(instance, seed=seed))
    return _held[0].run(effort)
