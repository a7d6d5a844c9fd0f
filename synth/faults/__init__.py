"""Fabrics that lost links and ranks, and schedules repaired from the trees that still stand.

`faulty` makes the fragment, `repair` the new schedule: it starts from the old trees (`old_trees`),
which keeps them low. Imports `packing` and what lies below.
"""
