"""Exact limits of collectives with certificates, and the check that recomputes a rate from a certificate."""

from arborcast.synth.bounds.dispatch import bound
from arborcast.synth.certification import certified_rate

__all__ = ["bound", "certified_rate"]
