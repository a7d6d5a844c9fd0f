"""Allreduce searched as it is: contributions that are added on the way, without overlap.

`instance` states it, `search` and `searcher` look for a schedule, `pair_bound` proves limits, `optimum`
settles one number of steps and `frontier` all of them; `links` and `meeting` (over `cores`) are hierarchical
allreduces, `halves` a reduce-scatter and an allgather.
"""
