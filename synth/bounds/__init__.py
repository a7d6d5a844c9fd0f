"""Exact limits of collectives with certificates, and the check that recomputes a rate from a certificate."""

from synth.bounds.by_kind import bound
from synth.bounds.certification import certified_rate, certified_scope

__all__ = ["bound", "certified_rate", "certified_scope"]
