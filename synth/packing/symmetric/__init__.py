"""Trees for symmetric fabrics: packings of the trees of a few representatives, whose images do the rest."""

from arborcast.synth.packing.symmetric.symmetric_solver import solve_symmetric

__all__ = ["solve_symmetric"]
