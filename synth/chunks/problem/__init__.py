"""The question of a chunk schedule: blocks copied over routes in S steps of R rounds.

`instance` states it; `time_reversal` turns reductions into it; `symmetry` finds groups that act freely on the
chunks, and `orbits` cuts the question down by them; `outcome` is what a search may answer, and `prune` cuts
an answer down to a tree per chunk.
"""
