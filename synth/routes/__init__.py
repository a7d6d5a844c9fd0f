"""Gather, scatter and alltoall along paths, and what can be reached at all."""
