"""Gather, scatter and alltoall along paths, and what can be reached at all.

`solver` is the entry; `symmetric_alltoall` solves by orbits; `paths` takes flows apart and makes schedules.
"""
